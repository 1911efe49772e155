# SPDX-License-Identifier: Apache-2.0
"""Twelve wrong mechanisms, and which attack or law finds each.

claim     each is found in less than five minutes; a right twin is not accused in 20 tries
verdict   so it is: by an attack within 7 core seconds, by a law within 3; no twin is accused
time      18 core minutes
hardware  two CPU cores
command   python -m experiments.faults --out=experiments/results/faults.json

A loop releases 8 noisy sums of gradients; that of row i points along axis i of two leaves. Attacks
refute what is stated at a confidence of 99.9 %: the white-box audit of one step, and 6,000 runs
with row 0 beside 6,000 without it, at a delta of 0.1, for which few runs do. A law is a line of
`dpjax.testing` on the part that is wrong, or what mechanism and ledger say.
"""

import time
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.random import key_data

from dpjax import Mechanism, accounting, auditing, clipping, dpsgd, noise, sampling
from dpjax.testing import LawBroken, assert_noise, assert_private, assert_sampling
from experiments.audit import loss
from experiments.common import runs

TRIES, ROWS, RUNS, STEPS, SURE = 20, 16, 6000, 8, 0.999
AXES = jnp.diag(jnp.full(ROWS, 3.0).at[0].set(300.0) / 2**0.5)  # row 0 is far above the bound
SMALL, MANY = dict.fromkeys("ab", jnp.zeros(ROWS)), jnp.zeros(500_000)
LEAVES = clipping.by_path(SMALL | {"n": 0}, {"[ab]": "gradient", "n": "count"})
TWO, COUNT = clipping.per_group([1.0, 1.0], 2), clipping.per_group([1.0, 0.5], LEAVES)
epsilon = cache(accounting.epsilon)


class Program(NamedTuple):
    """A loop as users write it, its fault, and how an attacker reads what it releases."""

    law: str
    rule: Any = clipping.flat(1.0)
    multipliers: Any = (2.0, 2.0)  # stated, and that run
    every: int = 1  # how many steps share their noise
    bare: str = ""  # leaves without noise
    mix: Any = lambda g: g  # of the rows of a batch, before they are clipped
    rates: Any = (0.5, 0.5)  # of sampling, stated and that run
    steps: int = STEPS  # that run
    known: bool = False  # whether the attacker has the key
    score: Any = lambda seen: seen.sum(axis=1)

    def rows(self):
        """Gradients; and halves that count rows, as adapted bounds do."""
        counted = {"n": jnp.full((ROWS, 1), 0.5)} if self.rule is COUNT else {}
        return {"a": AXES, "b": AXES, **counted}

    def sampler(self):
        stated, ran = (sampling.poisson(ROWS, ROWS * rate) for rate in self.rates)
        return replace(stated, draw=ran.draw)

    def claimed(self, sampler=None):
        of = {"clipping": self.rule, "noise_multiplier": self.multipliers[0], "steps": STEPS}
        mechanism = Mechanism(sampling=sampler or self.sampler(), **of)
        return dpsgd(loss, optax.sgd(1.0), mechanism, self.rows())

    def noise(self, key):
        def update(updates, state, params=None, **_):
            now = state._replace(step=state.step - state.step % self.every)
            bare = {name: updates.value[name] for name in self.bare}
            return link.update(updates, now)[0] | bare, state._replace(step=state.step + 1)

        link: Any = noise.gaussian(self.multipliers[1], self.rule, key)
        return optax.GradientTransformationExtraArgs(link.init, update)

    def chain(self, key):
        mix = optax.stateless(lambda g, _: jax.tree.map(self.mix, g))
        return optax.chain(mix, clipping.clip_and_sum(self.rule), self.noise(key))


@partial(jax.jit, static_argnums=0)
def released(program, key, at, mask):
    def step(state, drawn):
        # The loss is linear, so a row is its own gradient.
        real = jax.tree.map(lambda g: g[drawn[0]] * drawn[1][:, None], rows)
        return chain.update(real, state)[::-1]

    chain, rows = program.chain(key), program.rows()
    return jax.lax.scan(step, chain.init(jax.tree.map(lambda g: g[0], rows)), (at, mask))[1]


def one_step(program, seed):
    def build(sampler):
        draw, key = jax.jit(jax.vmap(sampler.draw, (None, 0))), jax.random.fold_in
        of = lambda s: (key(s.noise_key, seed), *draw(s.key, jnp.arange(1)))  # noqa: E731
        step = lambda s: (s._replace(params=released(program, *of(s))), None)  # noqa: E731
        return replace(program.claimed(sampler), step=step)

    zeros = jax.tree.map(lambda g: 0 * g[:1], program.rows())
    return auditing.audit_algorithm(build, program.sampler(), zeros, 0, confidence=SURE).refutes


@partial(jax.jit, static_argnums=0)
def seen_of_row_0(program, keys, joins):
    def run(of):
        at, mask = jax.vmap(partial(program.sampler().draw, of[0]))(jnp.arange(program.steps))
        along = released(program, of[0], at, mask & (of[1] | (at > 0)))
        return along["a"][:, 0] + along["b"][:, 0]

    seen = jax.lax.map(run, (keys, joins), batch_size=500)
    if program.known:  # the runs again without row 0
        seen -= jax.lax.map(run, (keys, joins & False), batch_size=500)
    return program.score(seen)


def many_runs(program, seed):
    joins, keys = np.arange(2 * RUNS) < RUNS, jax.random.split(jax.random.key(seed), 2 * RUNS)
    found = seen_of_row_0(program, keys, joins)
    audit = auditing.audit_membership(found[joins], found[~joins], delta=0.1, confidence=SURE)
    return audit.epsilon > epsilon(program.claimed().mechanism.event, 0.1, "pld")


LAWS = {
    "assert_noise": lambda p, key: assert_noise(
        p.noise(key), dict.fromkeys(p.rows(), MANY), p.claimed().mechanism.deviations_on_sum(0)[0]
    ),
    "assert_sampling": lambda p, k: assert_sampling(p.sampler(), seed=int(key_data(k)[1])),
    "assert_private": lambda p, key: assert_private(p.chain(key), SMALL),
    "the plan": lambda p, _: assert_private(p.claimed().mechanism.private(), SMALL, steps=p.steps),
    "the ledger": lambda p, k: p.claimed().init(SMALL, k if p.known else None).ledger.supplied,
}
NOISE, DRAWS, CHAIN, PLAN, LEDGER = map(Program, LAWS)
PAIRS = NOISE._replace(score=lambda seen: abs(seen[:, 1::2] - seen[:, ::2]).sum(axis=1))
COUNTED = NOISE._replace(rule=COUNT, multipliers=((2.0, 4.0),) * 2)
FAULTS = {  # the right program, and what is wrong
    "noise x 0.8": (NOISE, {"multipliers": (2.0, 1.6)}),
    "sampling at 2q": (DRAWS._replace(rates=(0.25, 0.25)), {"rates": (0.25, 0.5)}),
    "sensitivity without the root": (NOISE._replace(rule=TWO), {"multipliers": (2.0, 2**0.5)}),
    "noise reused every other step": (PAIRS, {"every": 2}),
    "clip after averaging": (CHAIN, {"mix": lambda g: 0 * g + g.mean(axis=0)}),
    "batch norm": (CHAIN, {"mix": lambda g: g / (2 * jnp.std(g) + 1e-6)}),
    "a published seed": (LEDGER, {"known": True}),
    "count without noise": (COUNTED, {"bare": "n"}),
    "padding counted": (DRAWS, {"rates": (0.5, 1.0)}),  # all rows are drawn
    "one leaf without noise": (NOISE, {"bare": "b"}),
    "bound per microbatch": (CHAIN, {"mix": lambda g: (g + jnp.roll(g, -1, 0)).at[1::2].set(0)}),
    "twice the steps stated": (PLAN, {"steps": 2 * STEPS}),
}


def law(program, seed):
    try:
        return LAWS[program.law](program, jax.random.key(seed))
    except LawBroken:
        return True


def measured(name, *_):
    """Of the attacks and the law: whether it finds the fault, core seconds, and twins accused."""
    (twin, fault), found, seed = FAULTS[name], {}, 100 * list(FAULTS).index(name)
    seeds = range(seed, seed + (1 if runs.SMOKE.value else TRIES))
    for tells in (one_step, many_runs, law):
        began, finds = time.process_time(), bool(tells(twin._replace(**fault), seed))
        seconds, accused = time.process_time() - began, [bool(tells(twin, of)) for of in seeds]
        found[tells.__name__] = [finds, seconds, sum(accused)]
    return {"by": twin.law, **found}


def main(results):
    for name in filter(runs.named, FAULTS):
        print(name, results.of(name, 0, partial(measured, name)), flush=True)


def tables(rows):
    lines = []
    for name, run in rows.items():
        by, *ways = list(run["0"].values())[:4]
        cells = [f"{seconds:.1f}" if finds else "no" for finds, seconds, _ in ways]
        lines.append([name, *cells, by, str(sum(way[2] for way in ways))])
    return {"faults": runs.table(["", "one step", "many runs", "a law", "which", "twins"], lines)}


if __name__ == "__main__":
    runs.guide("faults", tables, main, "row")

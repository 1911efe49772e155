# SPDX-License-Identifier: Apache-2.0
"""Twelve wrong mechanisms, and which attack or law finds each.

claim     each is found in less than five minutes; a right twin is not accused in 20 tries
verdict   so it is: by an attack within 7 core seconds, by a law within 3; no twin is accused
time      18 core minutes
hardware  two CPU cores
command   python -m experiments.faults --out=experiments/results/faults.json

A loop releases 8 noisy sums of gradients; that of row i points along axis i of two leaves. Attacks
refute the stated epsilon at a confidence of 99.9 %: the white-box audit of one step, and 6,000 runs
with row 0 against 6,000 without it, at a delta of 0.1, for which few runs suffice. A law is a line
of `dpjax.testing` on the part that is wrong, or a record of the mechanism or the ledger.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax import Mechanism, accounting, auditing, clipping, dpsgd, noise, sampling
from dpjax.testing import LawBroken, assert_noise, assert_private, assert_sampling
from experiments.audit import loss
from experiments.common import runs

TRIES = 20  # of each right twin
ROWS = 16
STEPS = 8
RUNS = 6000
CONFIDENCE = 0.999
DELTA = 0.1
LENGTHS = np.full(ROWS, 3.0)
LENGTHS[0] = 300.0  # row 0 is far above the bound of 1
GRADIENTS = jnp.diag(jnp.asarray(LENGTHS, jnp.float32) / 2**0.5)  # of each leaf
PARAMS = {"a": jnp.zeros(ROWS), "b": jnp.zeros(ROWS)}
FLAT = clipping.flat(1.0)
TWO_GROUPS = clipping.per_group([1.0, 1.0], 2)
# A second group counts the rows of a batch, as adapted bounds do.
LEAVES = clipping.by_path(PARAMS | {"n": 0}, {"[ab]": "gradient", "n": "count"})
WITH_COUNT = clipping.per_group([1.0, 0.5], LEAVES)
epsilon = functools.cache(accounting.epsilon)


def separate(gradients: Any) -> Any:
    """The rows of a batch as they are."""
    return gradients


def averaged(gradients: Any) -> Any:
    """Each row as the mean of the batch."""
    return 0 * gradients + gradients.mean(axis=0)


def batch_normed(gradients: Any) -> Any:
    """The rows over their common deviation."""
    return gradients / (2 * jnp.std(gradients) + 1e-6)


def summed_in_pairs(gradients: Any) -> Any:
    """The sum of two rows in place of the first, and 0 in place of the second."""
    sums = gradients + jnp.roll(gradients, -1, 0)
    return sums.at[1::2].set(0)


def total(seen: Any) -> Any:
    """The sum over the steps of what is released along row 0."""
    return seen.sum(axis=1)


def differences(seen: Any) -> Any:
    """How far two successive steps differ: noise that they share cancels."""
    return abs(seen[:, 1::2] - seen[:, ::2]).sum(axis=1)


class Program(NamedTuple):
    """A loop as users write it, its fault, and how an attacker reads the released sums.

    Attributes:
      law: The law that finds the fault.
      rule: Of clipping.
      stated_multiplier: Of the noise, in the mechanism.
      multiplier: Of the noise that is drawn.
      stated_rate: Of sampling, in the mechanism.
      rate: Of the batches that are drawn.
      steps: That run; the mechanism states `STEPS`.
      sharing: How many steps share their noise.
      bare: The names of leaves without noise.
      mix: Changes the rows of a batch before they are clipped.
      known: Whether the attacker has the key.
      score: How an attacker reads the sums along row 0, ``[runs, steps]``.
    """

    law: str
    rule: Any = FLAT
    stated_multiplier: Any = 2.0
    multiplier: Any = 2.0
    stated_rate: float = 0.5
    rate: float = 0.5
    steps: int = STEPS
    sharing: int = 1
    bare: str = ""
    mix: Callable[[Any], Any] = separate
    known: bool = False
    score: Callable[[Any], Any] = total

    def rows(self) -> dict[str, Any]:
        """The gradient of each row, and with a count the half that counts it."""
        rows = {"a": GRADIENTS, "b": GRADIENTS}
        if self.rule is WITH_COUNT:
            rows["n"] = jnp.full((ROWS, 1), 0.5)
        return rows

    def sampler(self) -> Any:
        """The stated sampler, with the draws of the rate that runs."""
        stated = sampling.poisson(ROWS, ROWS * self.stated_rate)
        ran = sampling.poisson(ROWS, ROWS * self.rate)
        return dataclasses.replace(stated, draw=ran.draw)

    def stated(self, sampler: Any = None) -> Any:
        """The algorithm whose epsilon is stated."""
        mechanism = Mechanism(
            sampling=sampler or self.sampler(),
            clipping=self.rule,
            noise_multiplier=self.stated_multiplier,
            steps=STEPS,
        )
        return dpsgd(loss, optax.sgd(1.0), mechanism, self.rows())

    def noise(self, key: Any) -> Any:
        """The noise link that runs."""
        link: Any = noise.gaussian(self.multiplier, self.rule, key)

        def update(updates: Any, state: Any, params: Any = None, **more: Any) -> tuple[Any, Any]:
            del params, more
            first_of_sharing = state.step - state.step % self.sharing
            noisy, _ = link.update(updates, state._replace(step=first_of_sharing))
            for name in self.bare:
                noisy = noisy | {name: updates.value[name]}
            return noisy, state._replace(step=state.step + 1)

        return optax.GradientTransformationExtraArgs(link.init, update)

    def chain(self, key: Any) -> Any:
        """The loop as an Optax chain, from the rows of a batch to a noisy sum."""
        mix = optax.stateless(lambda rows, _: jax.tree.map(self.mix, rows))
        return optax.chain(mix, clipping.clip_and_sum(self.rule), self.noise(key))


@partial(jax.jit, static_argnums=0)
def released(program: Program, key: Any, indices: Any, mask: Any) -> Any:
    """The noisy sums of a run, whose batches are given by step."""
    chain = program.chain(key)
    rows = program.rows()

    def step(state: Any, drawn: Any) -> tuple[Any, Any]:
        indices, mask = drawn
        # The loss is linear, so a row is its own gradient.
        batch = jax.tree.map(lambda leaf: leaf[indices] * mask[:, None], rows)
        noisy, state = chain.update(batch, state)
        return state, noisy

    params = jax.tree.map(lambda leaf: leaf[0], rows)
    _, sums = jax.lax.scan(step, chain.init(params), (indices, mask))
    return sums


def one_step(program: Program, seed: int) -> bool:
    """Whether the white-box audit of one step refutes the stated epsilon."""

    def build(sampler: Any) -> Any:
        draw = jax.jit(jax.vmap(sampler.draw, (None, 0)))

        def step(state: Any) -> tuple[Any, None]:
            key = jax.random.fold_in(state.noise_key, seed)
            indices, mask = draw(state.key, jnp.arange(1))
            sums = released(program, key, indices, mask)
            return state._replace(params=sums), None

        return dataclasses.replace(program.stated(sampler), step=step)

    params = jax.tree.map(lambda leaf: 0 * leaf[:1], program.rows())
    separation = auditing.audit_algorithm(
        build, program.sampler(), params, 0, confidence=CONFIDENCE
    )
    return separation.refutes


@partial(jax.jit, static_argnums=0)
def scores(program: Program, keys: Any, joins: Any) -> Any:
    """The attacker's score of each run, in which row 0 joins or not."""

    def along_row_0(key: Any, joins: Any) -> Any:
        draw = partial(program.sampler().draw, key)
        indices, mask = jax.vmap(draw)(jnp.arange(program.steps))
        sums = released(program, key, indices, mask & (joins | (indices > 0)))
        return sums["a"][:, 0] + sums["b"][:, 0]

    def of_run(run: Any) -> Any:
        return along_row_0(*run)

    seen = jax.lax.map(of_run, (keys, joins), batch_size=500)
    if program.known:  # the attacker runs the same keys without row 0
        without = jnp.zeros_like(joins)
        seen -= jax.lax.map(of_run, (keys, without), batch_size=500)
    return program.score(seen)


def many_runs(program: Program, seed: int) -> bool:
    """Whether runs with and without row 0 refute the stated epsilon."""
    joins = np.arange(2 * RUNS) < RUNS
    keys = jax.random.split(jax.random.key(seed), 2 * RUNS)
    found = scores(program, keys, joins)
    audit = auditing.audit_membership(
        found[joins], found[~joins], delta=DELTA, confidence=CONFIDENCE
    )
    return audit.epsilon > epsilon(program.stated().mechanism.event, DELTA, "pld")


def noise_has_its_deviation(program: Program, key: Any) -> None:
    """The drawn noise has the deviation that the mechanism states."""
    deviation = program.stated().mechanism.deviations_on_sum(0)[0]
    params = dict.fromkeys(program.rows(), jnp.zeros(500_000))
    assert_noise(program.noise(key), params, deviation)


def draws_have_their_rate(program: Program, key: Any) -> None:
    """The draws have the rate that the sampler states."""
    _, seed = jax.random.key_data(key)
    assert_sampling(program.sampler(), seed=int(seed))


def chain_is_private(program: Program, key: Any) -> None:
    """One row moves the input of the noise by at most the sensitivity."""
    assert_private(program.chain(key), PARAMS)


def steps_are_planned(program: Program, key: Any) -> None:
    """The link of the mechanism runs no more steps than it states."""
    del key
    assert_private(program.stated().mechanism.private(), PARAMS, steps=program.steps)


def ledger_records_the_key(program: Program, key: Any) -> bool:
    """Whether the ledger records that the key was supplied."""
    if not program.known:
        key = None
    return program.stated().init(PARAMS, key).ledger.supplied


LAWS = {  # each raises `LawBroken` or returns True for a wrong program
    "assert_noise": noise_has_its_deviation,
    "assert_sampling": draws_have_their_rate,
    "assert_private": chain_is_private,
    "the plan": steps_are_planned,
    "the ledger": ledger_records_the_key,
}
NOISE = Program("assert_noise")
SAMPLING = Program("assert_sampling")
CHAIN = Program("assert_private")
FAULTS = {  # the right program, and its fault
    "noise x 0.8": (NOISE, {"multiplier": 1.6}),
    "sampling at 2q": (SAMPLING._replace(stated_rate=0.25, rate=0.25), {"rate": 0.5}),
    "sensitivity without the root": (NOISE._replace(rule=TWO_GROUPS), {"multiplier": 2**0.5}),
    "noise reused every other step": (NOISE._replace(score=differences), {"sharing": 2}),
    "clip after averaging": (CHAIN, {"mix": averaged}),
    "batch norm": (CHAIN, {"mix": batch_normed}),
    "a published seed": (Program("the ledger"), {"known": True}),
    "count without noise": (
        NOISE._replace(rule=WITH_COUNT, stated_multiplier=(2.0, 4.0), multiplier=(2.0, 4.0)),
        {"bare": "n"},
    ),
    "padding counted": (SAMPLING, {"rate": 1.0}),  # all rows are drawn
    "one leaf without noise": (NOISE, {"bare": "b"}),
    "bound per microbatch": (CHAIN, {"mix": summed_in_pairs}),
    "twice the steps stated": (Program("the plan"), {"steps": 2 * STEPS}),
}


def law(program: Program, seed: int) -> bool:
    """Whether the law of a program finds a fault."""
    try:
        return bool(LAWS[program.law](program, jax.random.key(seed)))
    except LawBroken:
        return True


WAYS = {"one_step": one_step, "many_runs": many_runs, "law": law}


def measured(name: str, *_: Any) -> dict[str, Any]:
    """Whether each attack and the law find the fault, their core seconds, and twins accused."""
    twin, fault = FAULTS[name]
    wrong = twin._replace(**fault)
    seed = 100 * list(FAULTS).index(name)
    tries = 1 if runs.SMOKE.value else TRIES
    found: dict[str, Any] = {"by": twin.law}
    for way, finds_fault in WAYS.items():
        began = time.process_time()
        finds = bool(finds_fault(wrong, seed))
        seconds = time.process_time() - began
        accused = sum(bool(finds_fault(twin, seed + number)) for number in range(tries))
        found[way] = [finds, seconds, accused]
    return found


def main(results: runs.Results) -> None:
    """Runs the rows as far as they are missing."""
    for name in filter(runs.named, FAULTS):
        print(name, results.of(name, 0, partial(measured, name)), flush=True)


def tables(rows: dict[str, Any]) -> dict[str, str]:
    """The table of the page."""
    lines = []
    for name, seeds in rows.items():
        run = seeds["0"]
        line = [name]
        all_accused = 0
        for way in WAYS:
            finds, seconds, accused = run[way]
            line.append(f"{seconds:.1f}" if finds else "no")
            all_accused += accused
        lines.append([*line, run["by"], str(all_accused)])
    return {"faults": runs.table(["", "one step", "many runs", "a law", "which", "twins"], lines)}


if __name__ == "__main__":
    runs.guide("faults", tables, main, "row")

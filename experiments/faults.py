# SPDX-License-Identifier: Apache-2.0
"""Twelve wrong mechanisms, and which attack or law finds each.

claim     each is found in less than five minutes; a right twin is not accused in 20 tries
verdict   not run
hardware  two CPU cores
command   python -m experiments.faults --out=experiments/results/faults.json

The data are those of `experiments.audit`: the gradient of row i points along axis i. An attack is
the white-box audit of one step, or canaries in one run of 8 steps; both compare with what is stated
for the wrong mechanism. A law is one line of `dpjax.testing` on the part that is wrong, or what
dpjax itself refuses. "no" says that an attack does not see the fault.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging

import dpjax
from dpjax import accounting, auditing, clipping, noise, sampling, testing
from experiments.audit import (
    COUNT,
    DELTA,
    MULTIPLIER,
    ROWS,
    STEPS,
    Build,
    described,
    loss,
    rows,
    sgd,
)
from experiments.common import runs

TRIES = 20
HALF = sampling.poisson(ROWS, ROWS / 2)
RULE, LIKE = clipping.flat(1.0), jnp.zeros(1_000_000)
Law = Callable[[bool], Any]  # of the wrong part, or of the right one


def stating(wrong: Build, right: Build) -> Build:
    """The wrong algorithm, which states the mechanism of the right one."""

    def build(sampler: Any, x: Any) -> Any:
        return dataclasses.replace(wrong(sampler, x), mechanism=right(sampler, x).mechanism)

    return build


def handmade(release: Callable[..., Any]) -> Build:
    """A loop as users write it; ``release(gradients, mask, key, step)`` is the noisy sum."""

    def build(sampler: Any, x: Any) -> Any:
        @jax.jit
        def moved(params: Any, key: Any, noise_key: Any, step: Any) -> Any:
            indices, mask = sampler.draw(key, step)
            drawn = jax.tree.map(lambda leaf: jnp.asarray(leaf)[indices], x)
            gradients = jax.vmap(jax.grad(loss), (None, 0))(params, drawn)
            total = release(gradients, mask, noise_key, step)
            return jax.tree.map(lambda p, g: p - g / sampler.batch_size, params, total)

        def step(state: Any) -> tuple[Any, None]:
            params = moved(state.params, state.key, state.noise_key, state.step)
            return state._replace(params=params, step=state.step + 1), None

        return dataclasses.replace(sgd()(sampler, x), step=step, run=None)

    return build


def noisy(total: Any, key: Any, step: Any, leaves: str = "ab") -> Any:
    keys = jax.random.split(jax.random.fold_in(key, step), 2)
    return {
        name: x + (name in leaves) * MULTIPLIER * jax.random.normal(one, x.shape)
        for one, (name, x) in zip(keys, sorted(total.items()), strict=True)
    }


def bounded(gradients: Any, mask: Any) -> Any:
    """The sum of gradients, each clipped to norm 1."""
    squares = sum(jnp.sum(x**2, axis=1) for x in gradients.values())
    factors = mask / jnp.maximum(1, jnp.sqrt(squares))
    return {name: factors @ x for name, x in gradients.items()}


def honest(gradients: Any, mask: Any, key: Any, step: Any) -> Any:
    return noisy(bounded(gradients, mask), key, step)


def reused(gradients: Any, mask: Any, key: Any, step: Any) -> Any:
    return noisy(bounded(gradients, mask), key, step // 2)


def averaged_first(gradients: Any, mask: Any, key: Any, step: Any) -> Any:
    mean = {name: mask @ x / jnp.sum(mask) for name, x in gradients.items()}
    clipped = bounded({name: x[None] for name, x in mean.items()}, jnp.ones(1))
    return noisy({name: x * jnp.sum(mask) for name, x in clipped.items()}, key, step)


def batch_normalised(gradients: Any, mask: Any, key: Any, step: Any) -> Any:
    scale = jnp.sqrt(sum(jnp.sum(mask @ x**2) for x in gradients.values()) / jnp.sum(mask))
    return honest({name: x / (2 * scale) for name, x in gradients.items()}, mask, key, step)


def unmasked(gradients: Any, mask: Any, key: Any, step: Any) -> Any:
    return honest(gradients, jnp.ones_like(mask), key, step)


def bare_leaf(gradients: Any, mask: Any, key: Any, step: Any) -> Any:
    return noisy(bounded(gradients, mask), key, step, "a")


def by_microbatch(gradients: Any, mask: Any, key: Any, step: Any) -> Any:
    small = {name: (mask[:, None] * x).reshape(-1, 8, ROWS) for name, x in gradients.items()}
    total = bounded({name: x.sum(axis=1) for name, x in small.items()}, jnp.ones(ROWS // 8))
    return noisy(total, key, step)


def longer(sampler: Any, x: Any) -> Any:
    planned = dataclasses.replace(described(sampler, RULE), steps=2 * STEPS)
    return dpjax.dpsgd(loss, optax.sgd(1.0), planned, x)


def exact_count(sampler: Any, x: Any) -> Any:
    """An adapted bound that follows the size of the draw as it is."""
    algorithm = sgd(adaptive=COUNT)(sampler, x)

    def step(state: Any) -> tuple[Any, Any]:
        size = sampler.draw(state.key, state.step).size
        after, info = algorithm.step(state)
        return after._replace(bound_scale=jnp.exp(-0.2 * size / ROWS)), info

    return dataclasses.replace(algorithm, step=step, run=None)


def planned_count(broken: bool) -> None:
    """A mechanism refuses a count with less noise than all together."""
    bare = dataclasses.replace(COUNT, count_multiplier=1e-3)
    sgd(adaptive=bare if broken else COUNT)(HALF, rows(3.0))


def links(*between: Any, multiplier: float = MULTIPLIER) -> Any:
    """A chain from per-example gradients to a noisy sum, with links before the clipping."""
    clip = clipping.clip_and_sum(RULE)
    return optax.chain(*between, clip, noise.gaussian(multiplier, RULE))


def noise_law(wrong: Any, like: Any = LIKE) -> Law:
    right = noise.gaussian(MULTIPLIER, RULE)
    return lambda broken: testing.assert_noise(wrong if broken else right, like, MULTIPLIER)


def chain_law(*between: Any) -> Law:
    return lambda broken: testing.assert_private(
        links(*between) if broken else links(), {"w": jnp.zeros(40)}
    )


def sampling_law(wrong: Any, right: Any) -> Law:
    return lambda broken: testing.assert_sampling(wrong if broken else right)


def stale() -> Any:
    """A noise link whose every second release is the one before it."""
    link = noise.gaussian(MULTIPLIER, RULE)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        inner, kept = state
        if kept is not None:
            return kept, (inner, None)
        released, inner = link.update(updates, inner, params)
        return released, (inner, released)

    begin: Any = lambda params: (link.init(params), None)  # noqa: E731
    return optax.GradientTransformation(begin, update)


def without_b(updates: Any, params: Any = None) -> Any:
    return {"a": updates["a"], "b": 0 * updates["b"]}


def supplied(broken: bool) -> None:
    """The ledger says that a caller supplied the key, and so do card and statement."""
    key = jax.random.key(0) if broken else None
    state = sgd()(HALF, rows(3.0)).init({name: jnp.zeros(ROWS) for name in "ab"}, key)
    if state.ledger.supplied:
        raise testing.LawBroken("the key was supplied")


def twice(broken: bool) -> None:
    """The ledger admits no step beyond the plan."""
    algorithm = sgd()(HALF, rows(3.0))
    state = algorithm.init({name: jnp.zeros(ROWS) for name in "ab"})
    for _ in range(STEPS * (2 if broken else 1)):
        state, _ = algorithm.step(state)


class Fault(NamedTuple):
    """A wrong algorithm and its right twin."""

    wrong: Build
    right: Build
    law: Law | None = None
    sampling: Any = HALF
    longest: float = 3.0  # the gradient of row 0
    steps: int = STEPS  # that run, where 8 are stated
    known: bool = False  # whether the attacker knows the key


QUARTER = sampling.poisson(ROWS, ROWS / 4)
DOUBLED = dataclasses.replace(QUARTER, draw=HALF.draw)
EVERYONE = dataclasses.replace(
    HALF, draw=lambda key, step: HALF.draw(key, step)._replace(mask=jnp.ones(ROWS, bool))
)
MICRO = optax.stateless(lambda g, _: jax.tree.map(lambda x: x.sum(axis=0, keepdims=True), g))
SCALED = optax.stateless(lambda g, _: jax.tree.map(lambda x: x / jnp.std(x), g))
MEAN = optax.stateless(lambda g, _: jax.tree.map(lambda x: x.mean(axis=0), g))
GROUPS = clipping.per_group([1.0, 1.0], 2)
CLOSE = noise.gaussian(MULTIPLIER / 2**0.5, RULE)
FAULTS = {
    "noise x 0.8": Fault(
        sgd(multiplier=0.8 * MULTIPLIER), sgd(), noise_law(noise.gaussian(0.8 * MULTIPLIER, RULE))
    ),
    "sampling at 2q": Fault(sgd(), sgd(), sampling_law(DOUBLED, QUARTER), DOUBLED),
    "sensitivity without the root": Fault(
        sgd(GROUPS, multiplier=MULTIPLIER / 2**0.5), sgd(GROUPS), noise_law(CLOSE)
    ),
    "noise reused every other step": Fault(handmade(reused), sgd(), noise_law(stale())),
    "clip after averaging": Fault(handmade(averaged_first), sgd(), chain_law(MEAN)),
    "batch norm": Fault(handmade(batch_normalised), sgd(), chain_law(SCALED), longest=60.0),
    "a published seed": Fault(sgd(), sgd(), supplied, known=True),
    "count without noise": Fault(exact_count, sgd(adaptive=COUNT), planned_count),
    "padding counted": Fault(handmade(unmasked), sgd(), sampling_law(EVERYONE, HALF)),
    "one leaf without noise": Fault(
        handmade(bare_leaf),
        sgd(),
        noise_law(
            optax.chain(noise.gaussian(MULTIPLIER, RULE), optax.stateless(without_b)),
            {"a": LIKE, "b": jnp.zeros(9)},
        ),
    ),
    "bound per microbatch": Fault(handmade(by_microbatch), sgd(), chain_law(MICRO), longest=3000.0),
    "twice the steps stated": Fault(longer, sgd(), twice, steps=2 * STEPS),
}


def data_of(fault: Fault) -> Any:
    x = rows(3.0)
    for leaf in x.values():
        leaf[0] *= fault.longest / 3.0
    return x


def step_refutes(fault: Fault, build: Build, x: Any, canary: int = 0) -> bool:
    return auditing.audit_algorithm(
        lambda sampler: build(sampler, x),
        fault.sampling,
        {name: jnp.zeros(ROWS) for name in x},
        canary=canary,
    ).refutes


def canaries_refute(fault: Fault, build: Build, x: Any, steps: int, seed: int = 0) -> bool:
    """One run in which fair coins decide who takes part; with the key, less its noise."""
    members = np.random.default_rng(seed).random(ROWS) < 0.5
    algorithm = build(auditing.without(fault.sampling, np.flatnonzero(~members)), x)
    mechanism: Any = algorithm.mechanism

    def released(algorithm: Any) -> dict[str, np.ndarray]:
        state = algorithm.init({name: jnp.zeros(ROWS) for name in x}, key=jax.random.key(seed))
        for _ in range(steps):
            state, _ = algorithm.step(state)
        return {name: np.asarray(leaf, np.float64) for name, leaf in state.params.items()}

    seen = released(algorithm)
    if fault.known:  # the run again, without all rows
        nobody = released(build(auditing.without(fault.sampling, np.arange(ROWS)), x))
        seen = {name: seen[name] - nobody[name] for name in x}
    scores = sum(x[name] @ seen[name] for name in x)
    # With the key no noise is left, so no guess is doubtful.
    count = ROWS if fault.known else ROWS // 5
    right, guesses = auditing.guess_members(scores, members, count)
    asked = {"canaries": ROWS, "delta": DELTA, "curve": mechanism.event, "confidence": 0.999}
    bound = auditing.epsilon_lower_bound(right, guesses, **asked)
    return bound > accounting.epsilon(mechanism.event, DELTA, "pld")


def raises(law: Law, broken: bool) -> bool:
    try:
        law(broken)
    except (testing.LawBroken, dpjax.ledger.Refused, ValueError):
        return True
    return False


def found(name: str, seed: int, folder: Any) -> Mapping[str, Any]:
    """What finds a fault, and in how many seconds."""
    del seed, folder
    fault, answers = FAULTS[name], {}
    x, wrong = data_of(fault), stating(fault.wrong, fault.right)
    fault = fault._replace(wrong=wrong)
    attacks: dict[str, Callable[[], bool]] = {
        "one step": partial(step_refutes, fault, wrong, x),
        "canaries": partial(canaries_refute, fault, wrong, x, fault.steps),
    }
    if fault.law is not None:
        attacks["law"] = partial(raises, fault.law, True)
    for attack, tells in attacks.items():
        began = time.time()
        answers[attack] = [bool(tells()), round(time.time() - began, 1)]
    return answers


def accused(name: str, seed: int, folder: Any) -> Mapping[str, Any]:
    """How often its right twin is accused."""
    del folder
    fault = FAULTS[name]._replace(known=False)
    fault = fault._replace(sampling=QUARTER if fault.sampling is DOUBLED else fault.sampling)
    x = data_of(fault)
    step = step_refutes(fault, fault.right, x, canary=seed)
    run = canaries_refute(fault, fault.right, x, STEPS, seed)
    law = fault.law is not None and seed == 0 and raises(fault.law, False)
    return {"accused": bool(step or run or law)}


def main(argv: list[str]) -> None:
    runs.only_flags(argv)
    logging.set_verbosity(logging.ERROR)
    results = runs.results()
    for name in FAULTS:
        if runs.named(name):
            print(name, results.of(name, 0, partial(found, name)), flush=True)
            twins = [
                results.of(f"twin of {name}", seed, partial(accused, name))
                for seed in range(1 if runs.SMOKE.value else TRIES)
            ]
            print("  twin accused:", sum(twin["accused"] for twin in twins), flush=True)


if __name__ == "__main__":
    runs.start(main, "smoke", "out", "row")

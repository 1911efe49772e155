# SPDX-License-Identifier: Apache-2.0
"""Twelve wrong mechanisms, and which attack or law finds each.

claim     each is found in less than five minutes; a right twin is not accused in 20 tries
verdict   not run
hardware  two CPU cores
command   python -m experiments.faults --out=experiments/results/faults.json

The data are those of `experiments.audit`: the gradient of row i points along axis i. An attack is
the white-box audit of one step, or canaries in one run of 8 steps, at a confidence of 99.9 %; both
compare with what is stated for the wrong mechanism. A law is one line of `dpjax.testing` on the
part that is wrong, or a refusal of dpjax.
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

TRIES, MANY = 20, jnp.zeros(1_000_000)
QUARTER, HALF = (sampling.poisson(ROWS, ROWS / n) for n in (4, 2))
RULE, GROUPS = clipping.flat(1.0), clipping.per_group([1.0, 1.0], 2)
LINK, ZEROS = noise.gaussian(MULTIPLIER, RULE), {name: jnp.zeros(ROWS) for name in "ab"}


def handmade(total: Callable[..., Any], leaves: str = "ab", every: int = 1) -> Build:
    """A loop as users write it: ``total(gradients, mask)``, and noise of its own."""

    def build(sampler: Any, x: Any) -> Any:
        @jax.jit
        def moved(params: Any, key: Any, noise_key: Any, step: Any) -> Any:
            indices, mask = sampler.draw(key, step)
            drawn = jax.tree.map(lambda leaf: jnp.asarray(leaf)[indices], x)
            summed = total(jax.vmap(jax.grad(loss), (None, 0))(params, drawn), mask)
            keys = jax.random.split(jax.random.fold_in(noise_key, step // every), 2)
            for one, name in zip(keys, "ab", strict=True):
                deviation = MULTIPLIER if name in leaves else 0.0
                summed[name] += deviation * jax.random.normal(one, (ROWS,))
            return jax.tree.map(lambda p, g: p - g / sampler.batch_size, params, summed)

        def step(state: Any) -> tuple[Any, None]:
            params = moved(state.params, state.key, state.noise_key, state.step)
            return state._replace(params=params, step=state.step + 1), None

        return dataclasses.replace(sgd()(sampler, x), step=step, run=None)

    return build


def bounded(gradients: Any, mask: Any) -> Any:
    """The sum of gradients, each clipped to norm 1."""
    squares = sum(jnp.sum(x**2, axis=1) for x in gradients.values())
    factors = mask / jnp.maximum(1, jnp.sqrt(squares))
    return {name: factors @ x for name, x in gradients.items()}


def averaged_first(gradients: Any, mask: Any) -> Any:
    size = jnp.sum(mask)
    mean = {name: (mask @ x / size)[None] for name, x in gradients.items()}
    return {name: x * size for name, x in bounded(mean, jnp.ones(1)).items()}


def batch_normalised(gradients: Any, mask: Any) -> Any:
    scale = jnp.sqrt(sum(jnp.sum(mask @ x**2) for x in gradients.values()) / jnp.sum(mask))
    return bounded({name: x / (2 * scale) for name, x in gradients.items()}, mask)


def by_microbatch(gradients: Any, mask: Any) -> Any:
    small = {n: (mask[:, None] * x).reshape(-1, 8, ROWS).sum(1) for n, x in gradients.items()}
    return bounded(small, jnp.ones(ROWS // 8))


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


def noise_law(wrong: Any, like: Any = MANY) -> None:
    testing.assert_noise(wrong, like, MULTIPLIER)


def chain_law(before: Callable[[Any], Any]) -> None:
    """A link before the clipping that mixes the examples."""
    link = optax.stateless(lambda gradients, _: jax.tree.map(before, gradients))
    chain = optax.chain(link, clipping.clip_and_sum(RULE), LINK)
    testing.assert_private(chain, {"w": jnp.zeros(40)})


def stale() -> Any:
    """A noise link whose every second release is the one before it."""

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        inner, kept = state
        if kept is not None:
            return kept, (inner, None)
        released, inner = LINK.update(updates, inner, params)
        return released, (inner, released)

    init: Any = lambda params: (LINK.init(params), None)  # noqa: E731
    return optax.GradientTransformation(init, update)


def supplied() -> None:
    """The ledger says that a caller supplied the key, and so do card and statement."""
    state = sgd()(HALF, rows(3.0)).init(ZEROS, jax.random.key(0))
    if state.ledger.supplied:
        raise testing.LawBroken("the key was supplied")


def twice() -> None:
    """The ledger admits no step beyond the plan."""
    algorithm = sgd()(HALF, rows(3.0))
    state = algorithm.init(ZEROS)
    for _ in range(2 * STEPS):
        state, _ = algorithm.step(state)


class Fault(NamedTuple):
    """A wrong algorithm, what it states, and the law that finds it."""

    wrong: Build
    law: Callable[[], None]
    stated: Build = sgd()
    sampling: Any = HALF
    longest: float = 3.0  # the gradient of row 0
    steps: int = STEPS  # that run, where 8 are stated
    known: bool = False  # whether the attacker knows the key


DOUBLED = dataclasses.replace(QUARTER, draw=HALF.draw)
EVERYONE = dataclasses.replace(
    HALF, draw=lambda *at: HALF.draw(*at)._replace(mask=HALF.draw(*at).mask | True)
)
LESS, CLOSE = (noise.gaussian(MULTIPLIER * share, RULE) for share in (0.8, 0.5**0.5))
BARE = optax.chain(LINK, optax.stateless(lambda u, _: {**u, "b": 0 * u["b"]}))
FAULTS = {
    "noise x 0.8": Fault(sgd(multiplier=0.8 * MULTIPLIER), partial(noise_law, LESS)),
    "sampling at 2q": Fault(sgd(), partial(testing.assert_sampling, DOUBLED), sampling=DOUBLED),
    "sensitivity without the root": Fault(
        sgd(GROUPS, multiplier=MULTIPLIER / 2**0.5), partial(noise_law, CLOSE), sgd(GROUPS)
    ),
    "noise reused every other step": Fault(handmade(bounded, every=2), lambda: noise_law(stale())),
    "clip after averaging": Fault(
        handmade(averaged_first), partial(chain_law, lambda x: x.mean(axis=0))
    ),
    "batch norm": Fault(
        handmade(batch_normalised), partial(chain_law, lambda x: x / jnp.std(x)), longest=60.0
    ),
    "a published seed": Fault(sgd(), supplied, known=True),
    "count without noise": Fault(
        exact_count,
        lambda: sgd(adaptive=dataclasses.replace(COUNT, count_multiplier=1e-3))(HALF, ZEROS),
        sgd(adaptive=COUNT),
    ),
    "padding counted": Fault(
        handmade(lambda g, mask: bounded(g, jnp.ones_like(mask))),
        partial(testing.assert_sampling, EVERYONE),
    ),
    "one leaf without noise": Fault(
        handmade(bounded, leaves="a"),
        partial(noise_law, BARE, {"a": MANY, "b": jnp.zeros(9)}),
    ),
    "bound per microbatch": Fault(
        handmade(by_microbatch),
        partial(chain_law, lambda x: x.sum(axis=0, keepdims=True)),
        longest=3000.0,
    ),
    "twice the steps stated": Fault(longer, twice, steps=2 * STEPS),
}


def attacked(fault: Fault, build: Build, seed: int) -> dict[str, Callable[[], bool]]:
    """Attacks by name: whether each refutes what is stated."""
    x = rows(3.0)
    for leaf in x.values():
        leaf[0] *= fault.longest / 3.0

    def stating(sampler: Any) -> Any:
        mechanism = fault.stated(sampler, x).mechanism
        return dataclasses.replace(build(sampler, x), mechanism=mechanism)

    def step() -> bool:
        canary = seed % ROWS
        return auditing.audit_algorithm(stating, fault.sampling, ZEROS, canary).refutes

    def released(lacking: Any) -> tuple[dict[str, np.ndarray], Any]:
        algorithm = stating(auditing.without(fault.sampling, lacking))
        state = algorithm.init(ZEROS, key=jax.random.key(seed))
        for _ in range(fault.steps):
            state, _ = algorithm.step(state)
        return {n: np.asarray(p, np.float64) for n, p in state.params.items()}, algorithm.mechanism

    def canaries() -> bool:
        members = np.random.default_rng(seed).random(ROWS) < 0.5
        seen, mechanism = released(np.flatnonzero(~members))
        if fault.known:  # the run again, without all rows: its noise alone
            nobody, _ = released(np.arange(ROWS))
            seen = {name: seen[name] - nobody[name] for name in x}
        scores = sum(x[name] @ seen[name] for name in x)
        # Without noise no guess is doubtful.
        numbers = auditing.guess_members(scores, members, ROWS if fault.known else ROWS // 5)
        asked = {"canaries": ROWS, "delta": DELTA, "curve": mechanism.event, "confidence": 0.999}
        bound = auditing.epsilon_lower_bound(*numbers, **asked)
        return bound > accounting.epsilon(mechanism.event, DELTA, "pld")

    return {"one step": step, "canaries": canaries}


def raises(law: Callable[[], Any]) -> bool:
    try:
        law()
    except (testing.LawBroken, dpjax.ledger.Refused, ValueError):
        return True
    return False


def found(fault: Fault, seed: int, folder: Any) -> Mapping[str, Any]:
    """Whether each attack and the law find a fault, and in how many seconds."""
    del folder
    attacks, answers = attacked(fault, fault.wrong, seed), {}
    for name, tells in {**attacks, "law": partial(raises, fault.law)}.items():
        began = time.time()
        answers[name] = [bool(tells()), round(time.time() - began, 1)]
    return answers


def accused(fault: Fault, seed: int, folder: Any) -> Mapping[str, Any]:
    """Whether its right twin is accused."""
    del folder
    right = QUARTER if fault.sampling is DOUBLED else fault.sampling
    twin = fault._replace(sampling=right, steps=STEPS, known=False)
    return {"accused": any(tells() for tells in attacked(twin, fault.stated, seed).values())}


def main(argv: list[str]) -> None:
    runs.only_flags(argv)
    logging.set_verbosity(logging.ERROR)
    results, tries = runs.results(), range(1 if runs.SMOKE.value else TRIES)
    for name, fault in FAULTS.items():
        if runs.named(name):
            print(name, results.of(name, 0, partial(found, fault)), flush=True)
            twins = [results.of(f"twin: {name}", s, partial(accused, fault)) for s in tries]
            print("  right twins accused:", sum(twin["accused"] for twin in twins), flush=True)


if __name__ == "__main__":
    runs.start(main, "smoke", "out", "row")

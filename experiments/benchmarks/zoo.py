# SPDX-License-Identifier: Apache-2.0
"""Models of many kinds: the private clipped sum against a plain gradient, in time and in agreement.

claim     a private gradient costs little more than a plain one, whatever the model
verdict   a median of 1.23 x; hypernetwork 12.2 and neural ode 2.3 are far above
hardware  two CPU cores
command   make bench BENCH=zoo ARGS="--out experiments/results/zoo.json"

A ratio is the CPU time of `dpjax.clipped_grad` over that of JAX's gradient of the mean loss, both
compiled, as the median over rounds in which the two alternate. Disagreement is with
``engine="vmap"``, relative to the length of the definition's sum, or of its norms.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from absl import flags

import dpjax
from dpjax import clipping
from experiments.benchmarks import reporting
from experiments.benchmarks.zoo_models import MODELS, Case

Run = Callable[[Any, Any], Any]
SMOKE = ["weight decay", "graph network"]


def private(case: Case, bound: float, engine: str = "auto") -> Run:
    """The clipped sum and the norms."""
    clipped_grad = dpjax.clipped_grad(case.loss, clipping.flat(bound), engine=engine)

    def run(params: Any, batch: Any) -> Any:
        clipped = clipped_grad(params, batch)
        return clipped.value, clipped.norms

    return jax.jit(run)


def plain(case: Case) -> Run:
    """The gradient of the mean loss."""

    def mean(params: Any, batch: Any) -> jax.Array:
        return jnp.mean(jax.vmap(case.loss, (None, 0))(params, batch))

    return jax.jit(jax.grad(mean))


def disagreement(case: Case, bound: float) -> float:
    """The relative difference from the definition: the larger one of the sum and the norms."""
    measured = private(case, bound)(case.params, case.batch)
    defined = private(case, bound, "vmap")(case.params, case.batch)
    difference = jax.tree.map(jnp.subtract, measured, defined)
    largest = 0.0
    for error, exact in zip(difference, defined, strict=True):
        relative = optax.tree.norm(error) / optax.tree.norm(exact)
        largest = max(largest, float(relative))
    return largest


def cpu_seconds(run: Run, case: Case, times: int) -> float:
    """The CPU time of one run, on average."""
    started = time.process_time()
    for _ in range(times):
        jax.block_until_ready(run(case.params, case.batch))
    return (time.process_time() - started) / times


def measure(case: Case, rounds: int, seconds: float) -> dict[str, float]:
    """Times of both contestants, which take turns, and their disagreement."""
    _, norms = private(case, 1.0, "vmap")(case.params, case.batch)
    bound = float(jnp.median(norms))  # half of the examples are clipped
    contestants = {"plain": plain(case), "private": private(case, bound)}
    first = 0.0
    for run in contestants.values():
        cpu_seconds(run, case, 1)  # compiles
        first += cpu_seconds(run, case, 1)
    times = max(1, round(seconds / rounds / first))
    taken: dict[str, list[float]] = {who: [] for who in contestants}
    for _ in range(rounds):
        for who, run in contestants.items():
            taken[who].append(cpu_seconds(run, case, times))
    pairs = zip(taken["private"], taken["plain"], strict=True)
    return {
        "ratio": statistics.median(a / b for a, b in pairs),
        "plain_ms": 1e3 * statistics.median(taken["plain"]),
        "private_ms": 1e3 * statistics.median(taken["private"]),
        "disagreement": disagreement(case, bound),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(case.params)),
        "batch_size": len(jax.tree.leaves(case.batch)[0]),
    }


def main(asked: Any) -> None:
    words = asked.models
    rounds = asked.rounds
    if asked.smoke:
        words = asked.models or SMOKE
        rounds = 1
    names = reporting.chosen("models", list(MODELS), words or None)
    report = reporting.begin(("jax", "jaxlib", "flax"), smoke=asked.smoke, rounds=rounds)
    report["models"] = {}
    for name in names:
        size, make = MODELS[name]
        case = make(4 if asked.smoke else size)
        found = measure(case, rounds, asked.seconds)
        report["models"][name] = found
        print(
            f"{name:30} {found['plain_ms']:8.2f} ms {found['private_ms']:8.2f} ms "
            f"{found['ratio']:6.2f} x  {found['disagreement']:.1e}",
            flush=True,
        )
        reporting.keep(report, asked.out)
    ratios = [found["ratio"] for found in report["models"].values()]
    print(f"median {statistics.median(ratios):.2f}, most {max(ratios):.2f}")


if __name__ == "__main__":
    flags.DEFINE_list("models", None, "Names or how they begin; by default all.")
    flags.DEFINE_float("seconds", 3.0, "CPU seconds for the rounds of a model.", lower_bound=0.01)
    reporting.run(main, smoke="A few models, batches of 4, one round", rounds=11)

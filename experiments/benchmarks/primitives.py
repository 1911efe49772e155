# SPDX-License-Identifier: Apache-2.0
"""Fast versions of single operations, each against XLA's own, in a loop.

  result    convolutions take 0.34 to 0.56 of XLA's time, max-pools 0.26 to 0.28, tanh after a bias
            0.86; 32 examples, forward and backward
  hardware  2 cores of an AMD EPYC, JAX 0.10.2; medians of 15 rounds
  command   make bench BENCH=primitives ARGS="--rounds 15 --out FILE"
  figures   experiments/results/primitives.json

Each case is one or two equations, one of them in `dpjax.gradients._xla_cpu.primitives.FAST`.  A
round is a loop that computes the value and the cotangent of the data, once as written and once by
the fast version.  No time is printed unless both cotangents agree.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import reporting
from absl import flags
from agreement import TOLERANCE
from contestants import Contestant
from steps import configure, start, take_turns

from dpjax.gradients._xla_cpu.primitives import bind_fast
from dpjax.gradients.jaxprs import bind, evaluate

EXAMPLES, ROUNDS = 32, 8  # per round; rounds of the loop


class Case(NamedTuple):
    """A function of data ``[examples, ...]`` and of what all examples share."""

    function: Callable[..., Any]
    data: tuple[int, ...]
    shared: tuple[int, ...] | None = None


def conv(stride: int, x: Any, kernel: Any) -> Any:
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=numbers
    )


def pool(size: int, stride: int, x: Any) -> Any:
    return nn.max_pool(x, (size, size), (stride, stride))


CASES = {
    "conv 8x8 / 2, 1 to 16": Case(functools.partial(conv, 2), (28, 28, 1), (8, 8, 1, 16)),
    "conv 3x3, 3 to 32": Case(functools.partial(conv, 1), (32, 32, 3), (3, 3, 3, 32)),
    "conv 4x4 / 2, 16 to 32": Case(functools.partial(conv, 2), (14, 14, 16), (4, 4, 16, 32)),
    "conv 3x3, 64 to 64": Case(functools.partial(conv, 1), (16, 16, 64), (3, 3, 64, 64)),
    "max-pool 2x2 / 1": Case(functools.partial(pool, 2, 1), (14, 14, 16)),
    "max-pool 2x2 / 2": Case(functools.partial(pool, 2, 2), (32, 32, 32)),
    "max-pool 3x3 / 2": Case(functools.partial(pool, 3, 2), (32, 32, 32)),
    "tanh after a bias": Case(lambda x, bias: jnp.tanh(x + bias), (14, 14, 16), (16,)),
}


def evaluated(case: Case, way: Callable[..., list[Any]], *arguments: Any) -> Any:
    """The case's own equations, each by `bind` or by `bind_fast`."""
    program = jax.make_jaxpr(case.function)(*arguments).jaxpr
    return evaluate(program, (), arguments, way)[0]


def looped(case: Case, way: Callable[..., list[Any]], batches: Any, shared: Any) -> Any:
    """Values and cotangents of the data, summed over all rounds of a loop."""
    rest = () if shared is None else (shared,)

    def body(total: Any, data: Any) -> tuple[Any, None]:
        value, back = jax.vjp(lambda x: evaluated(case, way, x, *rest), data)
        return jax.tree.map(jnp.add, total, (value, *back(jnp.sin(value)))), None

    value = jax.eval_shape(case.function, batches[0], *rest)
    return jax.lax.scan(body, (jnp.zeros_like(value), jnp.zeros_like(batches[0])), batches)[0]


def contestant(case: Case, way: Callable[..., list[Any]], arguments: Any) -> Contestant:
    run = jax.jit(functools.partial(looped, case, way))

    def several(times: int) -> float:
        started = time.perf_counter()
        for _ in range(times):
            jax.block_until_ready(run(*arguments))
        return (time.perf_counter() - started) / times

    return Contestant(several, dict, lambda: True, lambda: None, {})


def measure(case: Case, examples: int, **limits: Any) -> dict[str, Any]:
    """Milliseconds a round of the loop, by either way, and how far their results are apart."""
    for_data, for_shared = jax.random.split(jax.random.key(0))
    batches = jax.random.normal(for_data, (ROUNDS, examples, *case.data))
    shared = None if case.shared is None else jax.random.normal(for_shared, case.shared)
    arguments = batches, shared
    ways = {"as written": bind, "fast": bind_fast}
    both = [jax.jit(functools.partial(looped, case, way))(*arguments) for way in ways.values()]
    apart = max(
        float(jnp.linalg.norm(a - b) / jnp.linalg.norm(a)) for a, b in zip(*both, strict=True)
    )
    if not apart <= TOLERANCE:
        raise RuntimeError(f"primitives: cotangents differ by {apart:.2g}.")
    makes = {
        name: functools.partial(contestant, case, way, arguments) for name, way in ways.items()
    }
    contestants, figures = start(makes)
    take_turns(contestants, figures, **limits)
    times = {name: statistics.median(f["rounds_ms"]) / ROUNDS for name, f in figures.items()}
    return {"median_ms": times, "disagreement": apart}


def main(asked: Any) -> None:
    configure(asked.smoke, host_devices=1)
    limits = {"rounds": 1 if asked.smoke else asked.rounds, "seconds": 10.0}
    report = reporting.begin(("jax", "jaxlib"), smoke=asked.smoke, **limits)
    report["cases"] = {}
    for name in reporting.chosen("cases", list(CASES), asked.cases):
        found = measure(CASES[name], 2 if asked.smoke else EXAMPLES, **limits)
        report["cases"][name] = found
        written, fast = found["median_ms"].values()
        line = f"{name:24} as written {written:8.3f} ms   fast {fast:8.3f}   {written / fast:5.2f}"
        print(line, flush=True)
        reporting.keep(report, asked.out)


if __name__ == "__main__":
    flags.DEFINE_list("cases", None, "Which, by how they begin; all by default.")
    reporting.run(main, smoke="Two examples, one turn, little optimized", rounds=15)

# SPDX-License-Identifier: Apache-2.0
"""Microbatch sizes and devices: the layout that dpjax chooses, against its neighbours.

claim     the choice of `dpjax.gradients.layout` is near the fastest layout
verdict   1.00 to 1.09 times its time on W1 to W5, and 1.05 for the biases of an encoder
hardware  2 cores of an AMD EPYC as 2 host devices, JAX 0.10.2; fastest of 7 rounds
command   make bench BENCH=layouts ARGS="--rounds 7 --around 2 --out FILE"

Each workload's clipped sum is timed in microbatches of 1, 2, 4 ... examples on one and on all
host devices. `cost` is the time over the fastest.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import optax
from absl import flags

import dpjax
from dpjax import clipping, gradients, meshes
from experiments.benchmarks import reporting
from experiments.benchmarks.contestants import BOUND, compiled
from experiments.benchmarks.steps import configure, start, take_turns
from experiments.benchmarks.workloads import TEXTS, WORKLOADS, Workload, problem

Layout = gradients.Layout
ENCODER = TEXTS.clone(vocabulary=30_522, length=32, width=384, depth=6, heads=12)
CASES = {**WORKLOADS, "biases": Workload(ENCODER, 22_384_138, (32,), 64, 30_522)}


def prepared(name: str, batch_size: int) -> tuple[Any, Any, Any]:
    """The loss, the parameters that are trained, and a batch."""
    loss, params, batch = problem(CASES[name]._replace(batch_size=batch_size))
    if name != "biases":
        return loss, params, batch

    def is_bias(path: Any, leaf: Any) -> Any:
        return leaf if path[-1].key == "bias" else None

    def whole(biases: Any) -> Any:
        def either(bias: Any, weight: Any) -> Any:
            return weight if bias is None else bias

        return jax.tree.map(either, biases, params, is_leaf=lambda leaf: leaf is None)

    biases = jax.tree_util.tree_map_with_path(is_bias, params)
    return lambda biases, example: loss(whole(biases), example), biases, batch


def candidates(batch_size: int, devices: int) -> list[Layout]:
    """All layouts in which every device has at least one microbatch."""
    sizes = [2**k for k in range(batch_size.bit_length()) if 2**k <= batch_size]
    shares = [(d, meshes.of_host(d)) for d in sorted({1, devices})]
    each = [(Layout(m, mesh, ("data",) * (d > 1)), m * d) for d, mesh in shares for m in sizes]
    return [layout for layout, flying in each if flying <= batch_size]


def words(layout: Layout) -> str:
    """A layout as the table shows it."""
    return f"{layout.microbatch_size} on {layout.shares}"


def measure(name: str, batch_size: int, around: float, **limits: Any) -> dict[str, Any]:
    """The choice, and the fastest turn of it and of the layouts around it."""
    loss, params, batch = prepared(name, batch_size)
    example = jax.tree.map(lambda x: x[0], batch)
    choice = gradients.layout(loss, params, example, batch_size)
    near = [
        layout
        for layout in candidates(batch_size, jax.local_device_count())
        if 1 / around <= layout.microbatch_size / choice.microbatch_size <= around
    ]

    def sums(layout: Layout) -> Any:
        clipped = dpjax.clipped_grad(
            loss,
            clipping.flat(BOUND),
            microbatch_size=layout.microbatch_size,
            devices=layout.shares,
        )
        return lambda params, batch: clipped(params, batch).value

    makes = {
        words(layout): functools.partial(compiled, sums(layout), optax.identity(), params, batch)
        for layout in dict.fromkeys([*near, choice])
    }
    contestants, figures = start(makes)
    take_turns(contestants, figures, **limits)
    times = {who: min(figure["rounds_ms"]) for who, figure in figures.items()}
    return {"choice": words(choice), "fastest_ms": times}


def table(name: str, result: dict[str, Any]) -> str:
    times, choice = result["fastest_ms"], result["choice"]
    rows = [
        f"  {who:10} {each:9.2f} ms  cost {each / min(times.values()):5.2f}"
        + ("  chosen" if who == choice else "")
        for who, each in times.items()
    ]
    return "\n".join([name, *rows])


def main(asked: Any) -> None:
    configure(asked.smoke, asked.host_devices)
    names = ["W4"] if asked.smoke else list(CASES)
    limits = {"rounds": 2 if asked.smoke else asked.rounds, "seconds": 30.0}
    report = reporting.begin(("jax", "jaxlib", "flax"), smoke=asked.smoke, **limits)
    report["workloads"] = {}
    for name in names:
        batch_size = 8 if asked.smoke else CASES[name].batch_size
        result = measure(name, batch_size, asked.around, **limits)
        report["workloads"][name] = result
        print(table(name, result), flush=True)
        reporting.keep(report, asked.out)


if __name__ == "__main__":
    flags.DEFINE_float("around", 4.0, "Largest factor between a tried size and the chosen one.")
    flags.DEFINE_integer("host_devices", 2, "Devices that the CPU is shown as.", lower_bound=1)
    reporting.run(main, smoke="Batches of 8, two rounds, little optimized", rounds=5)

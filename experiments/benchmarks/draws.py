# SPDX-License-Identifier: Apache-2.0
"""Time and memory of one draw, for data sets of a hundred thousand to a million million examples.

claim     a draw of 4,096 examples costs the same whatever the size of the data
verdict   0.4 to 2.7 ms and at most 5 MiB, without a trend from 1e5 to 1e12 examples; of random
          allocation, whose draw takes time of the batches of an epoch, 1 to 12 ms and 66 MiB
hardware  2 cores of an AMD EPYC; fastest of 300 draws
command   make bench BENCH=draws ARGS="--out experiments/results/draws.json"
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from dpjax import sampling
from dpjax.sampling import sparse
from experiments.benchmarks import memory, reporting

SAMPLERS = ("poisson", "fixed", "shuffled", "random_allocation")
BATCH = 4096


def measure(name: str, examples: int, draws: int) -> dict[str, Any]:
    """Milliseconds of a draw, the bytes that it needs, and the seconds until the first."""
    if name == "random_allocation" and examples > sparse.LARGEST:
        return {"refused": "more than 2^31 - 1 examples"}
    started = time.perf_counter()
    draw = jax.jit(sampling.by_name(name, examples, BATCH).draw)
    key = jax.random.key(0)
    jax.block_until_ready(draw(key, jnp.int32(0)))
    first, times, rise = time.perf_counter() - started, [], memory.of_process()
    for step in range(1, draws + 1):
        number, started = jnp.int32(step), time.perf_counter()
        jax.block_until_ready(draw(key, number))
        times.append(time.perf_counter() - started)
    return {
        "fastest_ms": 1e3 * min(times),
        "median_ms": 1e3 * statistics.median(times),
        "peak_bytes": rise(),
        "first_s": first,
    }


def main(asked: Any) -> None:
    draws = 3 if asked.smoke else 300
    report = reporting.begin(("jax", "jaxlib"), batch_size=BATCH, draws=draws, smoke=asked.smoke)
    report["examples"] = {}
    for power in (5, 12) if asked.smoke else range(5, 13):
        found = {name: measure(name, 10**power, draws) for name in SAMPLERS}
        report["examples"][f"1e{power}"] = found
        each = (
            f"{name} {f['fastest_ms']:6.2f} ms {(f['peak_bytes'] or 0) / 2**20:5.1f} MiB"
            for name, f in found.items()
            if "refused" not in f
        )
        print(f"1e{power:<3}", *each, sep="   ", flush=True)
        reporting.keep(report, asked.out)


if __name__ == "__main__":
    reporting.run(main, smoke="Two sizes, three draws")

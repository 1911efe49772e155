# SPDX-License-Identifier: Apache-2.0
"""How far one example moves a clipped sum beyond its bound, because float32 rounds.

  result    a million examples, 16 a microbatch: a blanked row moves the sum by less than 1 + 1e-6
            bounds, a removed one by 1.013 (hostile) and 1.0002 (random); in plain sums by 610 and 3
  hardware  two CPU cores; the figures do not depend on the machine's speed
  command   make bench BENCH=rounding ARGS="--out FILE"
  figures   experiments/results/rounding.json

A neighbour has one row less: `blanked` keeps its place, as a run of a fixed public size does;
`removed` moves all later rows up by one, which shifts the microbatches too.  `hostile` rows make
every addition to a plain total round down, and up in the neighbour; `random` rows are aligned.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import reporting

from dpjax import clipping
from dpjax.gradients import batching
from dpjax.gradients.clipped_grad import clipped_sum
from dpjax.types import Draw

RULE = clipping.flat(1.0)


def linear(weights: Any, row: Any) -> Any:
    """A loss whose gradient is the row."""
    return jnp.sum(weights * row)


def total(rows: np.ndarray, size: int, compensated: bool) -> np.ndarray:
    """The sum of the clipped gradients, in float64 from its two parts."""
    zero = jnp.zeros(rows.shape[1])

    def add(state: Any, some: Any, mask: Any, sums: batching.Total) -> batching.Total:
        one = linear, RULE, "auto", zero, some, mask, None, None
        return sums._replace(block=clipped_sum(*one, start=sums.block).value)

    @jax.jit
    def parts(rows: Any) -> Any:
        draw = Draw(jnp.arange(len(rows)), jnp.ones(len(rows), bool))
        layout = batching.Layout(size)
        start = batching.no_total(zero, len(rows) if compensated else 0, layout)
        sums = batching.sum_over(add, start, layout, draw, rows, None, batching.settled)
        return batching.join(sums, (), layout, [1.0])[:2]

    high, low = parts(jnp.asarray(rows))
    return np.asarray(high, np.float64) + (0 if low is None else np.asarray(low, np.float64))


def hostile(count: int, size: int) -> np.ndarray:
    """Numbers from 0 to 1 whose microbatches fall half of a last bit short of the total's grid."""
    rows, whole, last = np.zeros(count), 0.0, 0.0
    for k in range(count // size):
        unit = 2.0 ** (np.floor(np.log2(max(whole, 1))) - 23)
        step = np.floor(0.98 * size / unit) * unit
        now = last - 0.02 * unit if k % 100 else 0.0
        rows[k * size : (k + 1) * size] = (step + 0.49 * unit) / size
        # What the shift by one row carries from each microbatch to the next tips the rounding.
        rows[k * size] -= now
        rows[(k + 1) * size - 1] += now
        whole, last = whole + step, now
    return np.append(1.0, np.clip(rows, 0, 1)).astype(np.float32)[:, None]


def aligned(count: int) -> np.ndarray:
    """Rows of ten positive numbers with norms from 0.5 to 1; the first has norm 1."""
    rows = np.random.default_rng(0).uniform(0.5, 1, (count, 10)) / 10**0.5
    rows[0] = 10**-0.5
    return rows.astype(np.float32)


def beyond(rows: np.ndarray, size: int, compensated: bool) -> dict[str, float]:
    """By how many bounds the first example moves the sum too far."""
    blank = np.concatenate([np.zeros_like(rows[:1]), rows[1:]])
    whole = total(rows, size, compensated)
    others = {"blanked": blank, "removed": rows[1:]}
    return {
        name: float(np.linalg.norm(whole - total(other, size, compensated)) - 1)
        for name, other in others.items()
    }


def main(asked: Any) -> None:
    report = reporting.begin(("dpjax", "jax", "jaxlib"), smoke=asked.smoke)
    large, cases = (4096 if asked.smoke else 1_000_000), []
    for kind, count, size in (
        ("hostile", min(large, 60_000), 16),
        ("hostile", large, 16),
        ("random", large, 16),
        ("random", large, 256),
        ("random", large, 4096),
    ):
        rows = hostile(count, size) if kind == "hostile" else aligned(count)
        cases.append({"rows": kind, "examples": count, "microbatch_size": size})
        for name, compensated in (("compensated", True), ("plain", False)):
            cases[-1][name] = found = beyond(rows, size, compensated)
            told = ", ".join(f"{neighbour} 1 {by:+.1e}" for neighbour, by in found.items())
            print(f"{kind:8} {count:8} in {size:4}  {name:12} {told}", flush=True)
    reporting.keep(report | {"cases": cases}, asked.out)


if __name__ == "__main__":
    reporting.run(main, smoke="A few thousand rows")

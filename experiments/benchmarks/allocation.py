# SPDX-License-Identifier: Apache-2.0
"""Epsilon of random allocation by PLD, with Poisson's, Monte Carlo and a bound from below.

claim     the accountant is not below Monte Carlo but by chance, and at most 3 % above it
verdict   of 48 orders 41 have a Monte Carlo error below 1 %: there the accountant is 0.9 % below to
          0.9 % above the estimate, and of all 2.5 errors below to 2.9 above. Epsilon is 0.01 to
          0.2 % above the bound from below
hardware  one core of an AMD EPYC that other programs used too
command   make bench BENCH=allocation ARGS="--out experiments/results/allocation.json"

An order is the run with the example against the run without it, or reversed. Monte Carlo draws a
run's ratios, shifted to where the loss is near epsilon, and weighs them; its error is one standard
deviation. The bound from below is that of `dpjax.verify`.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from typing import Any

import numpy as np

from dpjax import accounting
from dpjax.accounting import random_allocation
from dpjax.accounting.events import random_allocation as event_of
from dpjax.verify.epochs import epsilon_of, law_of
from dpjax.verify.steps import Step
from experiments.benchmarks import reporting

DELTA = 1e-5
GRID = 1e-4  # of the loss distributions
CHUNK = 5_000_000  # numbers in memory
ROWS = [  # bins, epochs, noise multiplier
    (58, 15, 1.0),
    (58, 15, 0.8),
    (20, 5, 2.0),
    (10, 10, 0.8),
    (10, 100, 2.0),
    (20, 20, 1.0),
    (20, 100, 1.5),
    (50, 1, 0.6),
    (50, 10, 0.7),
    (58, 15, 0.6),
    (58, 15, 1.5),
    (58, 60, 1.0),
    (58, 150, 1.5),
    (100, 10, 0.7),
    (100, 30, 0.8),
    (100, 100, 1.0),
    (200, 5, 0.6),
    (200, 50, 0.8),
    (234, 20, 0.8),
    (500, 10, 0.7),
    (500, 50, 1.0),
    (1000, 1, 0.5),
    (1000, 10, 0.8),
    (1000, 100, 1.0),
]
SHIFTS = {  # tried for each order; the one with the smallest spread is used
    1: [1, 1.25, 1.5, 1.75, 2, 2.5, 3],
    -1: [1, 2, 3, 3.5, 4, 4.5, 5],
}


def by_orders(bins: int, epochs: int, z: float) -> list[float]:
    """Epsilon of each order, by loss distributions."""
    event = accounting.RandomAllocationDpEvent(bins, ((z, bins),))
    total = random_allocation.loss(event, GRID, 1e-3 * DELTA / epochs).self_compose(epochs)
    return [law.get_epsilon_for_delta(DELTA) for law in (total._pmf_remove, total._pmf_add)]


def drawn(
    order: int, shift: float, bins: int, epochs: int, z: float, runs: int, rng: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Losses of runs from a shifted law, and the logarithms of their weights."""
    losses = np.zeros(runs)
    weights = np.zeros(runs)
    down = shift / math.sqrt(bins * epochs)
    size = max(1, CHUNK // bins)
    for start in range(0, runs, size):
        part = slice(start, start + size)
        for _ in range(epochs):
            g = rng.standard_normal((losses[part].size, bins), np.float32)
            if order > 0:  # the example's bin is shifted further
                g[:, 0] += shift / z
            else:  # all bins are shifted down
                g -= down
            ratios = np.exp(g / z - 1 / (2 * z**2))
            log_ratio = np.log(ratios.mean(axis=1, dtype=np.float64))
            losses[part] += order * log_ratio
            if order > 0:
                shifted = np.exp(g * (shift / z) - shift**2 / (2 * z**2))
                weights[part] += log_ratio - np.log(shifted.mean(axis=1))
            else:
                total = g.sum(axis=1, dtype=np.float64)
                weights[part] += down * total + bins * down**2 / 2
    return losses, weights


def monte_carlo(
    order: int, bins: int, epochs: int, z: float, near: float, normals: float
) -> tuple[float, float]:
    """An estimate of epsilon with its standard deviation."""
    rng = np.random.default_rng(0)

    def deltas(epsilon: float, losses: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """The weighted share of each run in delta."""
        return np.exp(weights) * -np.expm1(np.minimum(epsilon - losses, 0))

    def spread(shift: float) -> float:
        runs = max(500, int(normals / 50 / bins / epochs))
        costs = deltas(near, *drawn(order, shift, bins, epochs, z, runs, rng))
        # A shift that misses the losses that count has a small mean and a large variance.
        if costs.mean() <= DELTA / 3:
            return 1e9
        return float(costs.std() / max(costs.mean(), 1e-300))

    shift = min(SHIFTS[order], key=spread)
    runs = int(normals / bins / epochs)
    sample = drawn(order, shift, bins, epochs, z, runs, rng)
    low = 0.0
    high = 4 * near
    for _ in range(40):
        middle = (low + high) / 2
        if deltas(middle, *sample).mean() > DELTA:
            low = middle
        else:
            high = middle
    error = deltas(low, *sample).std() / math.sqrt(runs)
    fall = deltas(low * 0.99, *sample).mean() - deltas(low * 1.01, *sample).mean()
    slope = fall / (0.02 * low)
    return low, float(error / slope)


def measure(bins: int, epochs: int, z: float, normals: float) -> dict[str, Any]:
    """The epsilons of one row; Monte Carlo draws about ``normals`` normal numbers."""
    event = event_of([z] * (bins * epochs), bins)
    started = time.perf_counter()
    epsilon = accounting.epsilon(event, DELTA, "pld")
    seconds = time.perf_counter() - started
    steps = Counter({Step(z, bins=bins, epoch=((z, bins),)): epochs})
    poisson = accounting.subsampled_gaussian(z, 1 / bins, bins * epochs)
    with_against_without, reversed_order = by_orders(bins, epochs, z)
    return {
        "row": [bins, epochs, z],
        "epsilon": epsilon,
        "seconds": seconds,
        "orders": [with_against_without, reversed_order],
        "below": epsilon_of(law_of(steps), DELTA),
        "poisson": accounting.epsilon(poisson, DELTA, "pld"),
        "monte_carlo": [
            monte_carlo(1, bins, epochs, z, near=with_against_without, normals=normals),
            monte_carlo(-1, bins, epochs, z, near=reversed_order, normals=normals),
        ],
    }


def main(asked: Any) -> None:
    report = reporting.begin(("numpy", "scipy", "dp-accounting"), delta=DELTA, smoke=asked.smoke)
    report["rows"] = []
    print("row, epsilon, from below, Poisson's | each order and Monte Carlo | seconds")
    rows = ROWS[2:3] if asked.smoke else ROWS
    normals = 1e6 if asked.smoke else 6e8
    for row in rows:
        found = measure(*row, normals=normals)
        report["rows"].append(found)
        pairs = zip(found["orders"], found["monte_carlo"], strict=True)
        cells = [f"{by_pld:8.4f} {mean:8.4f} ±{error:.4f}" for by_pld, (mean, error) in pairs]
        print(
            f"{row!s:18} {found['epsilon']:8.4f} {found['below']:8.4f} {found['poisson']:8.4f} |",
            " | ".join(cells),
            f"| {found['seconds']:6.2f} s",
            flush=True,
        )
        reporting.keep(report, asked.out)


if __name__ == "__main__":
    reporting.run(main, smoke="One row, few draws")

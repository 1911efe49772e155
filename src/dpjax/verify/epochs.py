# SPDX-License-Identifier: Apache-2.0
r"""The epsilon of epochs of random allocation: the law of a likelihood ratio, point by point.

With an example, an epoch of t bins with multipliers $z_j$ has the likelihood ratio
$S = \frac1t \sum_j \exp(g_j / z_j - 1 / 2 z_j^2)$ of independent standard Gaussians $g_j$, and
ratios of epochs multiply (Feldman and Shenfeld, *Privacy amplification by random allocation*,
2025). A law is a list of points. Sums and products of two laws have a point for each pair, and are
merged to few points, which keep mass and mean. Merging can only lower epsilon, by 0.2 % at most in
the tests.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from dpjax.verify.steps import Step

POINTS, CELLS = 1000, 2**16  # of a merged law, and that its points are sorted into
Law: TypeAlias = tuple[np.ndarray, np.ndarray]  # positive points, and their masses


def law_of(steps: Counter[Step]) -> Law:
    """The likelihood ratio of these steps, without samples of a fixed size."""
    total = np.ones(1), np.ones(1)
    for step, count in steps.items():
        total = paired(np.multiply, total, repeated(np.multiply, ratio(step), count))
    return total


def ratio(step: Step) -> Law:
    """The likelihood ratio of a Gaussian on all data or on a Poisson sample, or of an epoch."""
    if not step.epoch:
        points, masses = lognormal(step.multiplier)
        return 1 - step.rate + step.rate * points, masses
    total = np.full(1, float(step.bins - sum(n for _, n in step.epoch))), np.ones(1)
    for multiplier, n in step.epoch:
        total = paired(np.add, total, repeated(np.add, lognormal(multiplier), n))
    return total[0] / step.bins, total[1]


def lognormal(multiplier: float) -> Law:
    """The likelihood ratio of one Gaussian: by the trapezoid rule, which is exact for it."""
    g = np.linspace(-9, 9 + 1 / multiplier, POINTS)
    masses = np.exp(-(g**2) / 2) * (g[1] - g[0]) / math.sqrt(2 * math.pi)
    return np.exp(g / multiplier - 1 / (2 * multiplier**2)), masses


def repeated(join: Callable[..., np.ndarray], law: Law, count: int) -> Law:
    """The sum or product of ``count`` independent ratios, by squaring."""
    if count == 1:
        return law
    half = repeated(join, law, count // 2)
    both = paired(join, half, half)
    return paired(join, both, law) if count % 2 else both


def paired(join: Callable[..., np.ndarray], one: Law, other: Law) -> Law:
    """The sum or product of two independent ratios."""
    points = join(one[0][:, None], other[0]).ravel()
    return merged(points, np.multiply.outer(one[1], other[1]).ravel())


def merged(points: np.ndarray, masses: np.ndarray) -> Law:
    """At most `POINTS` of them, dense where a law has much of its mass."""
    if points.size <= POINTS:
        return points, masses
    logs = np.log(points)
    logs -= logs.min()
    cells = (logs * ((CELLS - 1) / logs.max())).astype(int)
    mass, mean = np.bincount(cells, masses), np.bincount(cells, masses * points)
    held = np.flatnonzero(mass)
    mass, mean, gaps = mass[held], mean[held], np.diff(held, prepend=-1)
    # Points as the sixth root of the density, as the tails are what decides; of the laws without
    # and with the example. A cell without points belongs to the next one.
    shares = (mass / mass.sum()) ** (1 / 6) + (mean / mean.sum()) ** (1 / 6)
    dense = np.cumsum(shares * gaps ** (5 / 6))
    cells = ((POINTS - 1) * dense / dense[-1]).astype(int)
    mass, mean = np.bincount(cells, mass), np.bincount(cells, mean)
    return mean[mass > 0] / mass[mass > 0], mass[mass > 0]


def epsilon_of(law: Law, delta: float) -> float:
    """The least epsilon at delta."""
    low, high = 0.0, 1e4
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if delta_of(law, middle) <= delta else (middle, high)
    return high


def delta_of(law: Law, epsilon: float) -> float:
    """The delta at epsilon: with against without the example, or reversed, whichever is more."""
    points, masses = law
    with np.errstate(over="ignore"):
        gaps = points - np.exp(epsilon), 1 - np.exp(epsilon) * points
    return max(float(masses @ gap.clip(0)) for gap in gaps)

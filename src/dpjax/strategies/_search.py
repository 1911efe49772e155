# SPDX-License-Identifier: Apache-2.0
r"""The search for Toeplitz strategies of least error: objectives on series, with their gradients.

The objective is $\log E(r) + \log S(c)$ with $r = 1 / c$: the mean or the last variance of the
workload, and the squared sensitivity of the pattern 0, b, 2b, ..., in linear time and memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from jaxtyping import Float

from dpjax.strategies import _descent, _series
from dpjax.strategies._workload import Workload
from dpjax.strategies.participation import Participation

Series = Float[np.ndarray, " steps"]
Valued = tuple[float, Series]


def variance(steps: int, of: Workload, error: str) -> Callable[[Series], Valued]:
    r"""The mean or maximal variance of the workload as a function of 1 / c, with its gradient.

    With learning rates the mean variance is a quadratic form in the averaged noise series, with
    $Q_{uv} = \sum_{j \ge \max(u, v)} \eta_j \eta_{j - |u - v|} (T - j) / T$.
    """
    below, left = np.array([1.0, -of.momentum]), (steps - np.arange(steps)) / steps
    if of.rates is None:
        below = np.convolve([1.0, -1.0], below)
        # Entry j of the error series occurs in all rows from j on, and in the last row once.
        form = left if error == "mean" else np.ones(steps)
    else:
        rates, form = np.asarray(of.rates), np.zeros((steps, steps))
        for lag in range(steps):
            sums = np.cumsum((rates[lag:] * rates[: steps - lag] * left[lag:])[::-1])[::-1]
            rows = np.arange(lag, steps)
            form[rows, rows - lag] = form[rows - lag, rows] = sums

    def value(inverse: Series) -> Valued:
        errors = _series.filtered([1.0], below, inverse)
        weighted = form * errors if form.ndim == 1 else form @ errors
        return float(weighted @ errors), 2 * _series.filtered([1.0], below, weighted[::-1])[::-1]

    return value


def first_pattern(
    coefficients: Series, participation: Participation
) -> Float[np.ndarray, " steps"]:
    """C times the indicator of steps 0, b, 2b, ..."""
    steps, apart = coefficients.size, participation.separation
    most = participation.within(steps)
    blocks = -(-steps // apart)
    shaped = np.pad(coefficients, (0, blocks * apart - steps)).reshape(blocks, apart)
    sums = np.cumsum(shaped, axis=0)
    sums[most:] -= sums[:-most].copy()
    return sums.reshape(-1)[:steps]


def squared_sensitivity(coefficients: Series, participation: Participation) -> Valued:
    """The squared norm of `first_pattern`, with its gradient."""
    sums = first_pattern(coefficients, participation)
    # The transpose of a Toeplitz map is the map in reverse.
    return float(sums @ sums), 2 * first_pattern(sums[::-1], participation)[::-1]


def banded_coefficients(
    steps: int, bands: int, participation: Participation, of: Workload, error: str
) -> Float[np.ndarray, " bands"]:
    """The first column of the banded Toeplitz matrix of least error."""
    variance_of = variance(steps, of, error)
    # Apart enough, columns of one pattern do not meet, and any signs are exact. Otherwise the
    # coefficients must decrease: they are sums of steps down, each a square.
    decreasing = bands > participation.separation
    root = _series.square_root(bands)
    begin = _series.product(root, root * of.momentum ** np.arange(bands), bands)
    begin = begin / begin[0]

    def unpacked(x: np.ndarray) -> np.ndarray:
        return np.cumsum(np.square(x)[::-1])[::-1] if decreasing else np.concatenate([[1.0], x])

    def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
        column = unpacked(x)
        inverse = _series.reciprocal(column, steps)
        spread, by_inverse = variance_of(inverse)
        solved = _series.filtered([1.0], column, by_inverse[::-1])[::-1]
        by_spread = -_series.correlated(solved, inverse, bands)
        squared, by_squared = squared_sensitivity(np.pad(column, (0, steps - bands)), participation)
        gradient = by_spread / spread + by_squared[:bands] / squared
        by_steps = np.cumsum(gradient) * 2 * x if decreasing else gradient[1:]
        return math.log(spread * squared), by_steps

    x = np.sqrt(-np.diff(begin, append=0.0)) if decreasing else begin[1:]
    best = unpacked(_descent.minimum(objective, x)) if x.size else begin
    return best / best[0]

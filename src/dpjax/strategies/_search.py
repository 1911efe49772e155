# SPDX-License-Identifier: Apache-2.0
r"""The search for Toeplitz strategies of least error: objectives on series, with their gradients.

The objective is $\log E(r) + \log S(c)$ with $r = 1 / c$: E is the mean or the last variance of the
workload, and S the squared sensitivity of the pattern 0, b, 2b, ..., in linear time and memory. A
*column* is the first column of the matrix C, the coefficients of the series c.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from dpjax.strategies import _descent, _series
from dpjax.strategies._series import Matrix, Series
from dpjax.strategies._workload import Workload
from dpjax.strategies.participation import Participation

Valued = tuple[float, Series]


def variance(steps: int, workload: Workload, error: str) -> Callable[[Series], Valued]:
    r"""The mean or maximal variance of the workload as a function of r = 1 / c, with its gradient.

    Each is a quadratic form $e^\top Q e$ in a series $e$ of T steps, linear in r. Without learning
    rates $e$ are the errors $W / c$, and Q is diagonal: error j occurs in all rows from j on, and
    in the last row once. The last row has the maximal variance. With learning rates $\eta$, for
    which only the mean is searched, $e$ is the noise after momentum, and

    $$ Q_{uv} = \sum_{j \ge \max(u, v)} \eta_j \eta_{j - |u - v|} (T - j) / T. $$
    """
    # The series of e is r over the denominator; momentum divides by 1 - beta x.
    of_momentum = np.array([1.0, -workload.momentum])
    remaining = (steps - np.arange(steps)) / steps  # (T - j) / T
    # Q, or its diagonal if it is diagonal.
    if workload.rates is not None:
        denominator = of_momentum
        form = _quadratic_form(np.asarray(workload.rates), remaining)
    else:
        # The denominator 1 - x makes prefix sums.
        denominator = np.convolve([1.0, -1.0], of_momentum)
        form = remaining if error == "mean" else np.ones(steps)

    def variance_of(inverse: Series) -> Valued:
        errors = _series.filtered([1.0], denominator, inverse)  # e
        weighted = form * errors if form.ndim == 1 else form @ errors
        gradient = 2 * _transposed_filter(denominator, weighted)
        return float(weighted @ errors), gradient

    return variance_of


def _transposed_filter(denominator: Series, values: Series) -> Series:
    """Applies the transpose of division by ``denominator``, which is division in reverse."""
    return _series.filtered([1.0], denominator, values[::-1])[::-1]


def _quadratic_form(rates: Series, remaining: Series) -> Matrix:
    """The matrix Q of `variance`."""
    steps = rates.size
    form = np.zeros((steps, steps))
    for lag in range(steps):
        products = rates[lag:] * rates[: steps - lag] * remaining[lag:]
        sums = np.cumsum(products[::-1])[::-1]
        rows = np.arange(lag, steps)
        form[rows, rows - lag] = sums
        form[rows - lag, rows] = sums
    return form


def first_pattern(coefficients: Series, participation: Participation) -> Series:
    r"""C times the indicator of steps 0, b, 2b, ...: row t is $c_t + c_{t-b} + \dots$."""
    steps = coefficients.size
    apart = participation.separation
    most = participation.within(steps)
    rows = -(-steps // apart)
    padded = np.pad(coefficients, (0, rows * apart - steps))
    # Rows of a table follow each other by b steps.
    sums = np.cumsum(padded.reshape(rows, apart), axis=0)
    # The pattern has ``most`` steps: older coefficients leave the sum.
    sums[most:] -= sums[:-most].copy()
    return sums.reshape(-1)[:steps]


def squared_sensitivity(coefficients: Series, participation: Participation) -> Valued:
    """The squared norm of `first_pattern`, with its gradient."""
    sums = first_pattern(coefficients, participation)
    # The transpose of a Toeplitz map is the map in reverse.
    gradient = 2 * first_pattern(sums[::-1], participation)[::-1]
    return float(sums @ sums), gradient


def banded_coefficients(
    steps: int, bands: int, participation: Participation, workload: Workload, error: str
) -> Series:
    """The first column of the banded Toeplitz matrix of least error."""
    variance_of = variance(steps, workload, error)

    def objective(column: Series) -> Valued:
        """The log of variance times squared sensitivity, and its gradient by the column."""
        inverse = _series.reciprocal(column, steps)
        noise_variance, by_inverse = variance_of(inverse)
        # The chain rule through r = 1 / c, whose differential is -(r dc) / c: the transposes of the
        # division by c, and then of the product with r.
        divided = _transposed_filter(column, by_inverse)
        by_column = -_series.correlated(divided, inverse, bands)
        padded = np.pad(column, (0, steps - bands))
        squared_norm, norm_by_column = squared_sensitivity(padded, participation)
        gradient = by_column / noise_variance + norm_by_column[:bands] / squared_norm
        return math.log(noise_variance * squared_norm), gradient

    # The start is the square root of the workload 1 / ((1 - x) (1 - momentum x)), cut off.
    root = _series.square_root(bands)
    start = _series.product(root, root * workload.momentum ** np.arange(bands), bands)
    start = start / start[0]  # a product of long series rounds the first coefficient, which is 1
    # If the steps of a pattern are at least ``bands`` apart, its columns do not overlap, and the
    # sensitivity is exact for any signs. Otherwise 0, b, 2b, ... is sure to be the pattern that
    # moves C G most only if the coefficients decrease.
    if bands <= participation.separation:
        best = _free_minimum(objective, start)
    else:
        best = _decreasing_minimum(objective, start)
    # The objective is equal for all multiples of a column, and c_0 is 1.
    return best / best[0]


def _free_minimum(objective: Callable[[Series], Valued], start: Series) -> Series:
    """The best column with 1 on the diagonal."""
    if start.size == 1:
        return start

    def column_of(x: np.ndarray) -> Series:
        return np.concatenate([[1.0], x])

    def of_others(x: np.ndarray) -> Valued:
        value, gradient = objective(column_of(x))
        return value, gradient[1:]

    return column_of(_descent.minimum(of_others, start[1:]))


def _decreasing_minimum(objective: Callable[[Series], Valued], start: Series) -> Series:
    """The best column that decreases: its differences are squares of the numbers searched."""

    def column_of(x: np.ndarray) -> Series:
        return np.cumsum(np.square(x)[::-1])[::-1]

    def of_roots(x: np.ndarray) -> Valued:
        value, gradient = objective(column_of(x))
        return value, np.cumsum(gradient) * 2 * x

    roots = np.sqrt(-np.diff(start, append=0.0))
    return column_of(_descent.minimum(of_roots, roots))

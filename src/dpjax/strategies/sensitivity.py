# SPDX-License-Identifier: Apache-2.0
r"""The sensitivity: how far one example moves $C G$, and so what the noise of a run must hide.

The example adds gradients $g_t$ with $\lVert g_t \rVert \le 1$ at the steps t of a pattern that its
participation allows. With $X = C^T C$,

$$ \lVert C G \rVert_F^2 = \sum_{i, j} X_{ij} \langle g_i, g_j \rangle
   \le \sum_{i, j \in \pi} \lvert X_{ij} \rvert, $$

with equality for equal gradients if these $X_{ij}$ are not negative. So the sensitivity is at most
the root of the largest such sum over patterns $\pi$. Each bound below is this sum for a set of
patterns that includes all allowed ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from dpjax.strategies._search import first_pattern
from dpjax.strategies._series import Matrix, Series
from dpjax.strategies.participation import Participation

if TYPE_CHECKING:  # strategy.py imports this file
    from dpjax.strategies.strategy import Strategy


def sensitivity(strategy: Strategy, participation: Participation) -> float:
    r"""The most that one example moves $C G$ in norm, if each of its gradients has norm 1 at most.

    Noise with the standard deviation ``multiplier * bound * sensitivity`` before it is correlated
    makes the whole run one Gaussian mechanism with this multiplier.

    | strategy and participation | method | |
    |---|---|---|
    | one step | the largest norm of a column | exact |
    | bands <= separation: columns do not overlap | programming over column norms | exact* |
    | Toeplitz, coefficients not negative and not increasing | the pattern 0, b, 2b, ... | exact |
    | Toeplitz, other coefficients | the same for a decreasing bound on their magnitudes | bound |
    | few products, cycles | all patterns | exact if $C^T C$ has no negative entry |
    | few products | programming over bounds of rows | bound |
    | a tree | the most steps that fit into each node | bound |
    | any | the sum of column norms (triangle inequality) | bound |

    (* For cycles a bound, if the norms of columns differ.) Products of columns are few up to 4,096
    steps, and where $C$ is Toeplitz up to $4096^2$ numbers in its bands.

    The answer is the least of the bounds that apply, rounded up.

    Sensitivity:
      The third row is Theorem 2 of Kalinin and Lampert. Why it holds: for decreasing coefficients
      $X_{ij}$ falls in $i$, in $j$ and with their distance. So moving steps of a pattern towards 0
      and closer together never makes the sum smaller, and neither do further steps. The fourth row
      follows since larger magnitudes make each $\lvert X_{ij} \rvert$ larger.

    Example:
      >>> from dpjax import strategies
      >>> sensitivity(strategies.white(100), strategies.apart(10, most=4))
      2.0
      >>> sensitivity(strategies.toeplitz(6, [0.5, 0.25], normalized=True), strategies.once())
      1.0

    References:
      Kalinin and Lampert, "Banded square root matrix factorization for differentially private
      model training", 2024, Theorem 2.
      Choquette-Choo et al., "(Amplified) banded matrix factorization", 2023: separated steps.
    """
    most = participation.within(strategy.steps)
    squares = strategy.column_squares()
    if most == 1 or strategy.bands <= participation.separation:
        largest = float(_largest_sum(squares, participation))
        # Sums of whole numbers, such as the squared norms of white noise, are exact.
        if np.all(squares == np.round(squares)):
            return _root(largest, additions=0)
        return _root(largest, _additions(strategy) + most)
    least = min(_squared_bounds(strategy, participation))
    # From norms or products of columns a bound adds up to ``steps`` numbers in each of two stages.
    return _root(least, _additions(strategy) + 2 * strategy.steps)


def _squared_bounds(strategy: Strategy, participation: Participation) -> Iterator[float]:
    """Bounds on the squared sensitivity, where the columns of a pattern overlap."""
    coefficients = strategy.coefficients
    if coefficients is not None:  # C is Toeplitz
        column = np.pad(coefficients, (0, strategy.steps - coefficients.size))
        # The least decreasing sequence above the magnitudes; the column itself if it decreases. The
        # worst pattern of a decreasing column is 0, b, 2b, ..., whose columns `first_pattern` adds.
        decreasing = np.maximum.accumulate(np.abs(column)[::-1])[::-1]
        yield float(np.sum(first_pattern(decreasing, participation) ** 2))
        if np.all(decreasing == column):
            return  # the bound is exact, so no other is less
    # The triangle inequality: the columns of a pattern add up to at most the sum of their norms.
    norms = np.sqrt(strategy.column_squares())
    yield float(_largest_sum(norms, participation)) ** 2
    # The bounds of the strategy's family: by products of columns, or by the nodes of a tree.
    yield from strategy.squared_bounds(participation)


def _largest_sum(
    values: Float[np.ndarray, "*rows steps"], participation: Participation
) -> Float[np.ndarray, "*rows"]:
    """The largest sum of each row's values at the steps of a pattern, by dynamic programming.

    The values are not negative.
    """
    steps = values.shape[-1]
    # A step joins patterns that end at least the separation before it.
    joins = np.maximum(np.arange(steps) + 1 - participation.separation, 0)
    none = np.zeros((*values.shape[:-1], 1))
    # The largest sum over patterns that end before each step; each round adds a step to patterns.
    best = np.zeros((*values.shape[:-1], steps + 1))
    for _ in range(participation.within(steps)):
        ending = np.maximum.accumulate(best[..., joins] + values, axis=-1)
        best = np.concatenate([none, ending], axis=-1)
    return best[..., -1]


def of_products(gram: Matrix, participation: Participation) -> float:
    """Bounds the squared sensitivity by the magnitudes of all products of columns."""
    steps = len(gram)
    apart = participation.separation
    if participation.even:
        diagonals = [np.diagonal(gram, distance) for distance in range(0, steps, apart)]
        return _largest_cycle(diagonals, participation)
    lag = np.abs(np.arange(steps)[:, None] - np.arange(steps))
    others = np.where(lag < apart, 0.0, gram)
    return _row_bounds(np.diagonal(gram), others, participation)


def of_bands(diagonals: list[np.ndarray], participation: Participation) -> float:
    """Bounds the squared sensitivity as `of_products`, from the products of columns that overlap.

    ``diagonals[d][i]`` is the magnitude of the product of columns i and i + d. Columns that are
    ``len(diagonals)`` or more steps apart do not overlap.
    """
    apart = participation.separation
    if participation.even:
        # Evenly spaced steps are multiples of ``apart`` apart.
        return _largest_cycle(diagonals[::apart], participation)
    squares = diagonals[0]
    steps = len(squares)
    last = len(diagonals) - 1
    # The products of each step with the steps around it, from ``last`` before to ``last`` after.
    # Steps less than ``apart`` away stay 0, because no pattern has both.
    others = np.zeros((steps, 2 * last + 1))
    for distance in range(apart, len(diagonals)):
        others[: steps - distance, last + distance] = diagonals[distance]
        others[distance:, last - distance] = diagonals[distance]
    return _row_bounds(squares, others, participation)


def _row_bounds(
    squares: Series,
    others: Float[np.ndarray, "steps around"],
    participation: Participation,
) -> float:
    """Bounds the sum over a pattern: first the share of each step, then of the chosen steps.

    The share of a step is its square and its products with other steps of the pattern, which are
    chosen for each step separately.
    """
    most = participation.within(len(squares))
    fewer = Participation(separation=participation.separation, most=most - 1)
    shares = squares + _largest_sum(others, fewer)
    return float(_largest_sum(shares, participation))


def _largest_cycle(diagonals: Sequence[np.ndarray], participation: Participation) -> float:
    r"""The largest sum of $\lvert X_{ij} \rvert$ over the pairs of steps of a pattern i, i + b, ...

    ``diagonals[k][i]`` is $\lvert X_{i, i + k b} \rvert$. Only the longest patterns count, because
    magnitudes are not negative.
    """
    steps = len(diagonals[0])
    apart = participation.separation  # b
    most = participation.within(steps)
    longest = -(-steps // apart)  # the number of steps in a whole cycle
    # Entry [m, r] is the sum of the pattern whose first step is m b + r.
    sums = np.zeros((longest - most + 1, apart))
    for k, products in enumerate(diagonals[:most]):
        # Column r holds the steps r, r + b, ... of one cycle, and a pattern is a window of it.
        padded = np.pad(products, (0, longest * apart - len(products)))
        cycles = padded.reshape(longest, apart)
        # A pattern has ``most - k`` pairs of steps that are k b apart: [m, r, pairs].
        windows = np.lib.stride_tricks.sliding_window_view(cycles, most - k, axis=0)
        # Further windows belong to patterns with fewer than ``most`` steps.
        collected = np.sum(windows[: len(sums)], axis=-1)
        if k > 0:
            collected *= 2  # entries above and below the diagonal
        sums += collected
    return float(np.max(sums))


def _additions(strategy: Strategy) -> int:
    """The most float64 roundings of a column norm and its coefficients."""
    # Only a matrix with its coefficients as given has fewer bands than steps: squares are added.
    if strategy.remembers + 1 == strategy.bands < max(strategy.steps, 2):
        return strategy.bands - 1
    return strategy.steps * (strategy.remembers + 2)


def _root(square: float, additions: int) -> float:
    """The square root, rounded up by the most that this many additions can have lost."""
    square = square * (1 + additions * 2.0**-52)
    root = math.sqrt(square)
    return root if root * root >= square else math.nextafter(root, math.inf)

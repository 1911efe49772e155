# SPDX-License-Identifier: Apache-2.0
r"""How far one example moves $C G$, which is what the noise of a run must hide.

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
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from dpjax.strategies.participation import Participation
from dpjax.strategies.search import first_pattern

if TYPE_CHECKING:  # a strategy finds its errors with this file
    from dpjax.strategies.strategy import Strategy


def sensitivity(strategy: Strategy, participation: Participation) -> float:
    r"""The most that one example moves $C G$ in norm, if each of its gradients has norm 1 at most.

    Noise with the standard deviation ``multiplier * bound * sensitivity`` before it is correlated
    makes the whole run one Gaussian mechanism with this multiplier.

    | strategy and participation | method | |
    |---|---|---|
    | one step | the largest norm of a column | exact |
    | bands <= separation, so that columns do not overlap | programming over column norms | exact* |
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
      $X_{ij}$ falls in $i$, in $j$ and with their distance, so that moving steps of a pattern
      towards 0 and closer together never makes the sum smaller, and neither do further steps. The
      fourth row follows since larger magnitudes make each $\lvert X_{ij} \rvert$ larger.

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
        # Sums of whole numbers, such as the squared norms of white noise, are exact.
        additions = 0 if np.all(squares == np.round(squares)) else _additions(strategy) + most
        return _root(float(_chosen(squares, participation)), additions)
    bounds, exact, coefficients = [], False, strategy.coefficients
    if coefficients is not None:
        column = np.pad(coefficients, (0, strategy.steps - coefficients.size))
        # The least decreasing sequence above the magnitudes; the column itself if it decreases.
        decreasing = np.maximum.accumulate(np.abs(column)[::-1])[::-1]
        bounds.append(float(np.sum(first_pattern(decreasing, participation) ** 2)))
        exact = bool(np.all(decreasing == column))
    if not exact:
        bounds.append(float(_chosen(np.sqrt(squares), participation)) ** 2)
        bounds.extend(strategy.squared_bounds(participation))
    return _root(min(bounds), _additions(strategy) + 2 * strategy.steps)


def _chosen(values: Float[np.ndarray, "*rows steps"], participation: Participation) -> np.ndarray:
    """The largest sum of values at the steps of a pattern, by dynamic programming; along rows."""
    steps, apart = values.shape[-1], participation.separation
    best = np.zeros((*values.shape[:-1], steps + 1))  # of patterns that end before each step
    for _ in range(participation.within(steps)):
        # A step joins patterns that end at least the separation before it.
        earlier = best[..., np.maximum(np.arange(steps) + 1 - apart, 0)]
        ending = np.maximum.accumulate(earlier + values, axis=-1)
        best = np.concatenate([np.zeros_like(best[..., :1]), ending], axis=-1)
    return best[..., -1]


def of_products(gram: Float[np.ndarray, "steps steps"], participation: Participation) -> float:
    """The bound on the squared sensitivity by magnitudes of all products of columns."""
    steps, apart = len(gram), participation.separation
    if participation.even:
        return _largest_cycle([np.diagonal(gram, d) for d in range(0, steps, apart)], participation)
    lag = np.abs(np.arange(steps)[:, None] - np.arange(steps))
    return _row_bounds(np.diagonal(gram), np.where(lag < apart, 0.0, gram), participation)


def of_bands(diagonals: list[np.ndarray], participation: Participation) -> float:
    """The same where only columns less than ``len(diagonals)`` steps apart overlap."""
    apart, own, last = participation.separation, diagonals[0], len(diagonals) - 1
    if participation.even:
        return _largest_cycle(diagonals[::apart], participation)
    others = np.zeros((len(own), 2 * last + 1))  # of each step with the steps around it
    for distance in range(apart, len(diagonals)):
        others[: len(own) - distance, last + distance] = diagonals[distance]
        others[distance:, last - distance] = diagonals[distance]
    return _row_bounds(own, others, participation)


def _row_bounds(
    own: Float[np.ndarray, " steps"],
    others: Float[np.ndarray, "steps around"],
    participation: Participation,
) -> float:
    """A step's share of the sum is at most what its row can collect; then steps are chosen."""
    most = participation.within(len(own))
    fewer = Participation(separation=participation.separation, most=most - 1)
    return float(_chosen(own + _chosen(others, fewer), participation))


def _largest_cycle(diagonals: Sequence[np.ndarray], participation: Participation) -> float:
    """The largest sum over evenly spaced steps: more of them only add to a sum of magnitudes."""
    steps, apart = len(diagonals[0]), participation.separation
    most, longest = participation.within(steps), -(-steps // apart)
    sums = np.zeros((longest - most + 1, apart))
    for distance, products in enumerate(diagonals[:most]):
        # A column for each first step; the windows of a pattern begin at each of its steps.
        cycles = np.pad(products, (0, longest * apart - len(products))).reshape(longest, apart)
        windows = np.lib.stride_tricks.sliding_window_view(cycles, most - distance, axis=0)
        sums += np.sum(windows[: len(sums)], axis=-1) * (1 if distance == 0 else 2)
    return float(np.max(sums))


def _additions(strategy: Strategy) -> int:
    """How many float64 roundings a column norm and its coefficients may have."""
    if strategy.remembers + 1 == strategy.bands < max(strategy.steps, 2):
        return strategy.bands - 1
    return strategy.steps * (strategy.remembers + 2)


def _root(square: float, additions: int) -> float:
    """The square root, rounded up by what as many roundings can have taken away."""
    square = square * (1 + additions * 2.0**-52)
    root = math.sqrt(square)
    return root if root * root >= square else math.nextafter(root, math.inf)


def overlaps(strategy: Strategy, bins: int) -> Float[np.ndarray, " bins"]:
    r"""Bounds on the products of the moves of two bins, for `dpjax.accounting`.

    With $m_{tb} = \sum_{s \bmod n = b} |C_{ts}|$ for n bins, the i-th number is the largest of the
    i-th largest entries of the rows of $M^T M$.
    """
    magnitudes = np.abs(strategy.matrix())
    moves = np.stack([magnitudes[:, first::bins].sum(axis=1) for first in range(bins)], axis=1)
    # Sums of float64 numbers, none negative, have no relative error of this size.
    return np.sort(moves.T @ moves * (1 + 1e-9), axis=1)[:, ::-1].max(axis=0)

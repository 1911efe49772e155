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

import numpy as np
from jaxtyping import Float

from dpjax import checks
from dpjax.strategies.participation import Participation
from dpjax.strategies.search import first_pattern
from dpjax.strategies.strategy import LARGEST_MATRIX, Strategy
from dpjax.strategies.tree import Tree


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
    | at most 4,096 steps, cycles | all patterns | exact if $C^T C$ has no negative entry |
    | at most 4,096 steps | programming over bounds of rows | bound |
    | a tree | the most steps that fit into each node | bound |
    | any | the sum of column norms (triangle inequality) | bound |

    (* For cycles a bound, if the norms of columns differ.)

    Args:
      strategy: Its C.
      participation: Which steps one example may have: `once`, `apart`, `cycles`.

    Returns:
      The least of the bounds that apply, rounded up.

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
    call = "strategies.sensitivity"
    hint = "Make one with strategies.white, .banded, .buffered, .tree or .dense."
    checks.instance(call, "strategy", strategy, Strategy, hint)
    hint = "Use strategies.once(), strategies.apart(...) or strategies.cycles(...)."
    checks.instance(call, "participation", participation, Participation, hint)
    most = participation.within(strategy.steps)
    squares = strategy.form.column_squares()
    apart = strategy.bands is not None and strategy.bands <= participation.separation
    if most == 1 or apart:
        # Sums of whole numbers, such as the squared norms of white noise, are exact.
        whole = bool(np.all(squares == np.round(squares)))
        additions = 0 if whole else _additions(strategy) + most
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
    if not exact and strategy.steps <= LARGEST_MATRIX:
        whole = strategy.matrix()
        gram = np.abs(whole.T @ whole)
        bounds.append((_largest_cycle if participation.even else _row_bounds)(gram, participation))
    if isinstance(strategy.form, Tree):
        bounds.append(_crowded(strategy.form, participation))
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


def _row_bounds(gram: Float[np.ndarray, "steps steps"], participation: Participation) -> float:
    """A step's share of the sum is at most what its row can collect; then steps are chosen."""
    steps, apart = gram.shape[0], participation.separation
    lag = np.abs(np.arange(steps)[:, None] - np.arange(steps))
    others = np.where(lag < apart, 0.0, gram)
    most = participation.within(steps)
    fewer = Participation(separation=apart, most=most - 1)
    return float(_chosen(np.diag(gram) + _chosen(others, fewer), participation))


def _largest_cycle(gram: Float[np.ndarray, "steps steps"], participation: Participation) -> float:
    """The largest sum over evenly spaced steps. More steps only add to a sum of magnitudes."""
    apart, most = participation.separation, participation.within(len(gram))
    found = 0.0
    for first in range(len(gram)):
        pattern = np.arange(first, len(gram), apart)[:most]
        found = max(found, float(gram[np.ix_(pattern, pattern)].sum()))
    return found


def _crowded(form: Tree, participation: Participation) -> float:
    """The squared counts of a pattern in all nodes: on a level, at most their number each."""
    most = participation.within(form.steps)
    sizes = [2**level for level in range(form.remembers + 1)]
    return float(sum(most * participation.within(min(size, form.steps)) for size in sizes))


def _additions(strategy: Strategy) -> int:
    """How many float64 roundings a column norm and its coefficients may have."""
    bands = strategy.bands
    if bands is not None and bands <= strategy.steps and strategy.remembers + 1 == bands:
        return bands - 1
    return strategy.steps * (strategy.remembers + 2)


def _root(square: float, additions: int) -> float:
    """The square root, rounded up by what as many roundings can have taken away."""
    square = square * (1 + additions * 2.0**-52)
    root = math.sqrt(square)
    return root if root * root >= square else math.nextafter(root, math.inf)

# SPDX-License-Identifier: Apache-2.0
r"""Descent: L-BFGS for all searches, and the convex one behind dense strategies.

$\min_X \mathrm{tr}(G X^{-1})$ with $X_{ii} = 1$: for a full X the optimum is a fixed point of a
known map. With zeros at given places, or given sums of diagonal entries, the search is L-BFGS on
the other entries, where a step that leaves the positive definite matrices is halved.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Float

Valued = tuple[float, np.ndarray]
Matrix = Float[np.ndarray, "steps steps"]

# Of `fixed_point`: the share of the optimum that a stop may lose, and iterations at most.
_GAP, _ITERATIONS = 1e-5, 100
# Of `minimum`: steps at most, and the earlier steps that the Hessian is estimated from.
_STEPS, _PAIRS = 1_000, 20


def fixed_point(gram: Matrix) -> Matrix:
    r"""$X = D^{-1/2} (D^{1/2} G D^{1/2})^{1/2} D^{-1/2}$ with $D$ such that the diagonal is 1.

    The fixed point has the root's diagonal as D. Any D gives a lower bound of the optimum, and X
    scaled to a diagonal of ones an upper one, so a stop loses at most the gap between both.
    """
    weights = np.sqrt(np.diag(gram))
    found = gram
    for _ in range(_ITERATIONS):
        scale = np.sqrt(weights)
        values, vectors = np.linalg.eigh(scale[:, None] * gram * scale)
        roots = np.sqrt(np.maximum(values, 0.0))
        root = (vectors * roots) @ vectors.T
        found = root / scale[:, None] / scale
        norms = np.sqrt(np.diag(found))
        found = found / norms[:, None] / norms
        # The dual of the problem, at D scaled as is best for it.
        lower = np.sum(roots) ** 2 / np.sum(weights)
        inverse = (vectors / np.maximum(roots, 1e-300)) @ vectors.T
        upper = float(np.sum(gram * (inverse * np.outer(scale * norms, scale * norms))))
        if upper - lower <= _GAP * upper:
            break
        # Nearly twice the step of the plain iteration converges in half as many.
        weights = weights * (np.diag(root) / weights) ** 1.9
    return found


def masked(
    gram: Matrix, free: Bool[np.ndarray, "steps steps"], begin: Matrix, cycle: int | None = None
) -> Matrix:
    r"""The X of least trace with zeros.

    Args:
      gram: G, positive definite.
      free: Which entries of X may differ from 0, symmetric.
      begin: A positive definite X with these zeros and a diagonal of ones.
      cycle: None for a diagonal of ones. Otherwise one example has every ``cycle``-th step, and the
        diagonal entries of its steps have the same sum for all first steps.
    """
    steps = len(gram)
    rows, columns = np.nonzero(np.tril(free, -1))
    group = np.arange(steps) % (steps if cycle is None else cycle)
    total = np.max(np.bincount(group))

    def filled(x: np.ndarray) -> Matrix:
        # The diagonal of a group is a softmax, as large as its largest group allows.
        weights = np.exp(x[rows.size :])
        whole = np.diag(total * weights / np.bincount(group, weights)[group])
        whole[rows, columns] = whole[columns, rows] = x[: rows.size]
        return whole

    def objective(x: np.ndarray) -> Valued:
        whole = filled(x)
        try:
            np.linalg.cholesky(whole)
        except np.linalg.LinAlgError:
            return math.inf, x
        inverse = np.linalg.inv(whole)
        solved = gram @ inverse
        trace = float(np.trace(solved))
        slopes = -(inverse @ solved) / trace
        diagonal = np.diag(whole)
        moves = diagonal * np.diag(slopes)
        moves = moves - diagonal * np.bincount(group, moves)[group] / total
        return math.log(trace), np.concatenate([2 * slopes[rows, columns], moves])

    scale = np.sqrt(np.diag(filled(np.zeros(rows.size + steps))))
    scaled = (begin * np.outer(scale, scale))[rows, columns]
    return filled(minimum(objective, np.append(scaled, np.zeros(steps)), tolerance=1e-6))


def minimum(
    objective: Callable[[np.ndarray], Valued], x: np.ndarray, *, tolerance: float = 1e-10
) -> np.ndarray:
    """L-BFGS with step halving, without bounds.

    SciPy's calls threaded BLAS for a few numbers, which on a busy machine costs more than the
    objectives here.

    Args:
      objective: Value and gradient; the value is infinite outside the domain.
      x: Where to begin, inside the domain.
      tolerance: The search ends where a step promises a smaller decrease.
    """
    value, gradient = objective(x)
    pairs: list[tuple[np.ndarray, np.ndarray]] = []
    for _ in range(_STEPS):
        direction = -_scaled(gradient, pairs)
        slope = float(gradient @ direction)
        if -slope <= tolerance:
            break
        length = 1.0 if pairs else min(1.0, 0.1 / float(np.max(np.abs(direction))))
        while True:
            after, turned = objective(x + length * direction)
            # Less than this ratio of the promised decrease is a step too far.
            if after <= value + 1e-4 * length * slope or length < 1e-12:
                break
            length *= 0.5
        if not after < value:
            break
        moved, change = length * direction, turned - gradient
        if moved @ change > 0:
            pairs = [*pairs[1 - _PAIRS :], (moved, change)]
        x, value, gradient = x + moved, after, turned
    return x


def _scaled(gradient: np.ndarray, pairs: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """The inverse Hessian that the last steps suggest, times the gradient (two-loop recursion)."""
    found = gradient.copy()
    shares = []
    for moved, turned in reversed(pairs):
        share = (moved @ found) / (moved @ turned)
        found -= share * turned
        shares.append(share)
    if pairs:
        moved, turned = pairs[-1]
        found *= (moved @ turned) / (turned @ turned)
    for (moved, turned), share in zip(pairs, reversed(shares), strict=True):
        found += (share - (turned @ found) / (moved @ turned)) * moved
    return found

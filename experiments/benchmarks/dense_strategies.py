# SPDX-License-Identifier: Apache-2.0
r"""Dense strategies: the error of the best lower-triangular matrix, to compare others with.

The variance depends on $X = C^T C$ alone, $\mathrm{tr}(W X^{-1} W^T)$, and is convex in it. X has
zeros wherever one example can have both steps, so that their columns are orthogonal and the squared
sensitivity is a sum of diagonal entries: each is 1, or in cycles the entries of one example have
their number as sum. For one participation this is the optimum over all matrices; otherwise the
zeros are a restriction that loses little.

References:
  Denisov et al., "Improved differential privacy for SGD via optimal private linear operators on
  adaptive streams", 2022.
  Choquette-Choo et al., "Multi-epoch matrix factorization mechanisms for private machine
  learning", 2023: several participations.
"""

from __future__ import annotations

import math

import numpy as np

from dpjax import strategies
from dpjax.strategies.descent import Valued, minimum

# Of `fixed_point`: the share of the optimum that a stop may lose, and iterations at most.
GAP, ITERATIONS = 1e-5, 100


def mean_error(steps: int, participation: strategies.Participation) -> float:
    """The root of the mean variance of the dense strategy, times its sensitivity."""
    sums, several = np.tril(np.ones((steps, steps))), participation.within(steps)
    gram = sums.T @ sums
    if several == 1:
        products = fixed_point(gram)
    else:
        bands = min(participation.separation, steps)
        begin = strategies.banded(steps, bands, participation).matrix()
        # An example with all steps of its cycle counts by the sum of their squared norms alone.
        whole = participation.even and several == -(-steps // bands)
        products = masked(
            gram, free(steps, participation), begin.T @ begin, bands if whole else None
        )
    return math.sqrt(several * np.trace(np.linalg.solve(products, gram)) / steps)


def free(steps: int, participation: strategies.Participation) -> np.ndarray:
    """Where X may differ from 0, ``[steps, steps]``."""
    lag = np.abs(np.arange(steps)[:, None] - np.arange(steps))
    if participation.even:
        return (lag % participation.separation > 0) | (lag == 0)
    return lag < participation.separation


def fixed_point(gram: np.ndarray) -> np.ndarray:
    r"""$X = D^{-1/2} (D^{1/2} G D^{1/2})^{1/2} D^{-1/2}$ with $D$ such that the diagonal is 1.

    The fixed point has the root's diagonal as D. Any D gives a lower bound of the optimum, and X
    scaled to a diagonal of ones an upper one, so a stop loses at most the gap between both.
    """
    weights = np.sqrt(np.diag(gram))
    found = gram
    for _ in range(ITERATIONS):
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
        if upper - lower <= GAP * upper:
            break
        # Nearly twice the step of the plain iteration converges in half as many.
        weights = weights * (np.diag(root) / weights) ** 1.9
    return found


def masked(
    gram: np.ndarray, free: np.ndarray, begin: np.ndarray, cycle: int | None = None
) -> np.ndarray:
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

    def filled(x: np.ndarray) -> np.ndarray:
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

# SPDX-License-Identifier: Apache-2.0
r"""The convex search behind dense strategies: $\min_X \mathrm{tr}(G X^{-1})$ with $X_{ii} = 1$.

For a full X the optimum is a fixed point of a known map. With zeros at given places the search is
L-BFGS on the other entries, where a step that leaves the positive definite matrices is halved.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float

Matrix = Float[np.ndarray, "steps steps"]


def least_trace(gram: Matrix, free: Bool[np.ndarray, "steps steps"]) -> Matrix:
    """The X of least trace.

    Args:
      gram: G, positive definite.
      free: Which entries of X may differ from 0, symmetric, the diagonal included.
    """
    return fixed_point(gram) if np.all(free) else limited_memory(gram, free)


def fixed_point(gram: Matrix, tolerance: float = 1e-6, most: int = 200) -> Matrix:
    r"""$X = D^{-1/2} (D^{1/2} G D^{1/2})^{1/2} D^{-1/2}$ with $D$ such that the diagonal is 1.

    The diagonal of the root is iterated into D. $\mathrm{tr} D$ is at most, and the trace at the
    scaled X at least, the optimum, so the relative gap between both is what a stop loses.
    """
    weights = np.sqrt(np.diag(gram))
    found = gram
    for _ in range(most):
        scale = np.sqrt(weights)
        values, vectors = np.linalg.eigh(scale[:, None] * gram * scale)
        roots = np.sqrt(np.maximum(values, 0.0))
        root = (vectors * roots) @ vectors.T
        found = root / scale[:, None] / scale
        norms = np.sqrt(np.diag(found))
        found = found / norms[:, None] / norms
        # The dual bound: 2 tr(root) - tr(D) for any D, and equal to tr(root) at the optimum.
        lower = 2 * np.sum(roots) - np.sum(weights)
        inverse = (vectors / np.maximum(roots, 1e-300)) @ vectors.T
        upper = float(np.sum(gram * (inverse * np.outer(scale * norms, scale * norms))))
        if upper - lower <= tolerance * upper:
            break
        weights = np.diag(root).copy()
    return found


def limited_memory(
    gram: Matrix, free: Bool[np.ndarray, "steps steps"], tolerance: float = 1e-6, most: int = 500
) -> Matrix:
    """L-BFGS on the free entries, from the identity."""
    rows, columns = np.nonzero(np.tril(free, -1))
    steps = len(gram)

    def evaluated(x: np.ndarray) -> tuple[float, np.ndarray]:
        whole = np.eye(steps)
        whole[rows, columns] = whole[columns, rows] = x
        try:
            np.linalg.cholesky(whole)
        except np.linalg.LinAlgError:
            return np.inf, x
        inverse = np.linalg.inv(whole)
        solved = gram @ inverse
        gradient = -2 * (inverse @ solved)[rows, columns]
        return float(np.trace(solved)), gradient

    x = np.zeros(rows.size)
    value, gradient = evaluated(x)
    pairs: list[tuple[np.ndarray, np.ndarray]] = []
    for _ in range(most):
        direction = -_scaled(gradient, pairs)
        slope = float(gradient @ direction)
        if -slope <= tolerance * value:
            break
        length = 1.0 if pairs else 0.1 / np.max(np.abs(direction))
        while True:
            after, slopes = evaluated(x + length * direction)
            if after <= value + 1e-4 * length * slope:
                break
            length *= 0.5
        moved, turned = length * direction, slopes - gradient
        if moved @ turned > 0:
            pairs = [*pairs[-9:], (moved, turned)]
        x, value, gradient = x + moved, after, slopes
    whole = np.eye(steps)
    whole[rows, columns] = whole[columns, rows] = x
    return whole


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

# SPDX-License-Identifier: Apache-2.0
"""Descent: L-BFGS for all searches, where a step that leaves the domain is halved."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Valued = tuple[float, np.ndarray]

# Steps at most, and the earlier steps that the Hessian is estimated from.
_STEPS, _PAIRS = 1_000, 20


def minimum(objective: Callable[[np.ndarray], Valued], x: np.ndarray) -> np.ndarray:
    """The minimum of a value with a gradient; the value is infinite outside the domain.

    SciPy's threaded BLAS costs more than the objectives here.
    """
    value, gradient = objective(x)
    pairs: list[tuple[np.ndarray, np.ndarray]] = []
    for _ in range(_STEPS):
        direction = -_scaled(gradient, pairs)
        slope = float(gradient @ direction)
        if -slope <= 1e-10:
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
    direction = gradient.copy()
    shares = []
    for moved, turned in reversed(pairs):
        share = (moved @ direction) / (moved @ turned)
        direction -= share * turned
        shares.append(share)
    if pairs:
        moved, turned = pairs[-1]
        direction *= (moved @ turned) / (turned @ turned)
    for (moved, turned), share in zip(pairs, reversed(shares), strict=True):
        direction += (share - (turned @ direction) / (moved @ turned)) * moved
    return direction

# SPDX-License-Identifier: Apache-2.0
"""Descent: L-BFGS for all searches, where a step that leaves the domain is halved."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Valued = tuple[float, np.ndarray]
Objective = Callable[[np.ndarray], Valued]
Pairs = list[tuple[np.ndarray, np.ndarray]]

# The most iterations of a search.
_ITERATIONS = 1_000
# The number of earlier moves from which the Hessian is estimated.
_PAIRS = 20
# Objectives are logarithms of errors, and a smaller slope promises less than their tenth digit.
_FLAT = 1e-10
# The share of the promised decrease that a move must reach; the value of Nocedal and Wright.
_ARMIJO = 1e-4
# A move is not halved below this share of the first one, because the value hardly changes there.
_SHORTEST = 1e-12


def minimum(objective: Objective, x: np.ndarray) -> np.ndarray:
    """The minimum of ``objective(x) -> (value, gradient)``, from a start x.

    The value is infinite outside the domain. SciPy's optimizers are not used, because their
    threaded BLAS costs more than these objectives.
    """
    value, gradient = objective(x)
    pairs: Pairs = []  # of the last moves and the changes of the gradient that they made
    for _ in range(_ITERATIONS):
        direction = -_times_inverse_hessian(gradient, pairs)
        slope = float(gradient @ direction)
        if -slope <= _FLAT:
            break
        length = 1.0
        if not pairs:
            # No curvature is known yet, so the first move changes no coordinate by more than 0.1.
            length = min(1.0, 0.1 / float(np.max(np.abs(direction))))
        while True:
            next_value, next_gradient = objective(x + length * direction)
            # Armijo's rule: halve a step that reaches too little of the decrease that the slope
            # promises.
            if next_value <= value + _ARMIJO * length * slope or length < _SHORTEST:
                break
            length *= 0.5
        if not next_value < value:  # even the shortest move gains nothing, or the value is NaN
            break
        move = length * direction
        change = next_gradient - gradient
        if move @ change > 0:  # otherwise the estimate is not positive definite
            pairs = [*pairs[1 - _PAIRS :], (move, change)]  # the newest _PAIRS
        x = x + move
        value = next_value
        gradient = next_gradient
    return x


def _times_inverse_hessian(gradient: np.ndarray, pairs: Pairs) -> np.ndarray:
    r"""The gradient times the inverse Hessian that the pairs suggest: the two-loop recursion.

    It begins with the gradient as $q$. For each pair of a move $s$ and a change $y$, newest first,
    $\alpha = s^\top q / s^\top y$ and $q \leftarrow q - \alpha y$. Then $q$ is scaled by
    $s^\top y / y^\top y$ of the newest pair, the scale of the inverse. Last, for each pair, oldest
    first, $q \leftarrow q + (\alpha - y^\top q / s^\top y) s$, and the result is $q$.

    Reference: Nocedal and Wright, "Numerical Optimization", 2006, algorithm 7.4.
    """
    q = gradient.copy()
    alphas = []  # newest first
    for move, change in reversed(pairs):
        alpha = (move @ q) / (move @ change)
        q -= alpha * change
        alphas.append(alpha)
    if pairs:
        move, change = pairs[-1]
        q *= (move @ change) / (change @ change)
    for (move, change), alpha in zip(pairs, reversed(alphas), strict=True):
        q += (alpha - (change @ q) / (move @ change)) * move
    return q

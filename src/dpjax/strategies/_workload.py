# SPDX-License-Identifier: Apache-2.0
r"""Workloads: what an optimizer makes of the noisy gradients, as a linear map.

Without momentum the parameters are prefix sums of gradients. With momentum $\beta$ and learning
rates $\eta_s$ they are, up to a sign, $\theta_t = \sum_{s \le t} \eta_s m_s$ with
$m_s = \beta m_{s-1} + g_s$. The noise in $\theta_t$ is row t of $W C^{-1} Z$, and its variance is
the squared norm of that row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike

from dpjax import checks
from dpjax.strategies import _series


class Workload(NamedTuple):
    """Momentum and learning rates of a run."""

    momentum: float = 0.0
    rates: tuple[float, ...] | None = None

    def applied(self, noise: Float[np.ndarray, "steps n"]) -> Float[np.ndarray, "steps n"]:
        """The workload matrix times the rows of ``noise``."""
        moves = _series.filtered([1.0], [1.0, -self.momentum], noise)
        if self.rates is not None:
            moves = moves * np.asarray(self.rates)[:, None]
        return np.cumsum(moves, axis=0)


def workload(call: str, steps: int, momentum: float, learning_rates: ArrayLike | None) -> Workload:
    """The workload of these arguments, checked; without rates, that of a rate of 1."""
    beta = checks.number(call, "momentum", momentum)
    if not 0 <= beta < 1:
        raise ValueError(f"{call}(momentum={momentum}): expected a number from 0 to below 1.")
    if learning_rates is None:
        return Workload(beta)
    rates = np.asarray(learning_rates, np.float64)
    if rates.shape != (steps,) or not np.all(np.isfinite(rates)) or np.any(rates < 0):
        raise ValueError(
            f"{call}(learning_rates of shape {rates.shape}): expected {steps} numbers, 0 or more. "
            "dpjax.schedules.values(schedule, steps) tabulates an Optax schedule."
        )
    return Workload(beta, tuple(rates.tolist()))


def toeplitz_squares(
    inverse: Float[np.ndarray, " steps"], scales: Float[np.ndarray, " steps"] | None, of: Workload
) -> Float[np.ndarray, " steps"]:
    r"""Squared row norms of $W D C^{-1}$ for a Toeplitz $C^{-1}$, without a matrix.

    As long as scales and rates are constant, row t holds the first coefficients of one series in
    reverse, and the squared norm is a prefix sum. After that, rows follow from one another.
    """
    steps = inverse.size
    scales = np.ones(steps) if scales is None else scales
    rates = np.ones(steps) if of.rates is None else np.asarray(of.rates)
    changed = np.flatnonzero((scales != scales[0]) | (rates != rates[0]))
    start = int(changed[0]) if changed.size else steps
    averaged = scales[0] * _series.filtered([1.0], [1.0, -of.momentum], inverse)
    summed = rates[0] * np.cumsum(averaged)
    squares = np.cumsum(summed**2)
    if start == steps:
        return squares
    # Reversed, so that position i of each row stays that of step i's normal numbers.
    momentum, total = np.zeros(steps), np.zeros(steps)
    momentum[:start], total[:start] = averaged[:start][::-1], summed[:start][::-1]
    backwards = inverse[::-1].copy()
    for t in range(start, steps):
        momentum[: t + 1] *= of.momentum
        momentum[: t + 1] += scales[t] * backwards[steps - 1 - t :]
        total[: t + 1] += rates[t] * momentum[: t + 1]
        squares[t] = total[: t + 1] @ total[: t + 1]
    return squares

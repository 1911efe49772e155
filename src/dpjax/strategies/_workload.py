# SPDX-License-Identifier: Apache-2.0
r"""Workloads: the linear map from noisy gradients to parameters that an optimizer applies.

Without momentum the parameters are prefix sums of gradients. With momentum $\beta$ and learning
rates $\eta_s$ they are, up to a sign, $\theta_t = \sum_{s \le t} \eta_s m_s$ with
$m_s = \beta m_{s-1} + g_s$. The noise in $\theta_t$ is row t of $W C^{-1} Z$, and its variance is
the squared norm of that row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from dpjax import checks
from dpjax.strategies import _series
from dpjax.strategies._series import Matrix, Series


class Workload(NamedTuple):
    """Momentum and learning rates of a run."""

    momentum: float = 0.0
    rates: tuple[float, ...] | None = None

    def applied(self, noise: Matrix) -> Matrix:
        """The workload matrix times the rows of ``noise``."""
        moves = _series.filtered([1.0], [1.0, -self.momentum], noise)
        if self.rates is not None:
            moves = moves * np.asarray(self.rates)[:, None]
        return np.cumsum(moves, axis=0)


def checked_workload(
    call: str, steps: int, momentum: float, learning_rates: ArrayLike | None
) -> Workload:
    """Checks the arguments; without learning rates each step has a rate of 1."""
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
    inverse: Series,
    scales: Series | None,
    workload: Workload,
) -> Series:
    r"""Squared row norms of $W D C^{-1}$ for a Toeplitz $C^{-1}$, without a matrix.

    Row t has the weights of the normal numbers of steps 0 to t in the parameters $\theta_t$. While
    scales and rates are constant, these are the coefficients t, ..., 0 of one series, and the
    squared norm is a prefix sum. Each later row is computed from the row before.

    Args:
      inverse: The first column of $C^{-1}$.
      scales: The diagonal of D, which scales the noise of each step; None for ones.
      workload: W.
    """
    steps = inverse.size
    if scales is None:
        scales = np.ones(steps)
    rates = np.ones(steps) if workload.rates is None else np.asarray(workload.rates)
    # The series of the momentum m, and of the parameters, at the first scale and rate.
    momentum_series = scales[0] * _series.filtered([1.0], [1.0, -workload.momentum], inverse)
    parameter_series = rates[0] * np.cumsum(momentum_series)
    squares = np.cumsum(parameter_series**2)
    changed = np.flatnonzero((scales != scales[0]) | (rates != rates[0]))
    if not changed.size:
        return squares
    start = int(changed[0])
    # Entry s of a row is the weight of the normal numbers of step s. Both begin as row start - 1.
    momentum_row = np.zeros(steps)
    momentum_row[:start] = momentum_series[:start][::-1]
    parameter_row = np.zeros(steps)
    parameter_row[:start] = parameter_series[:start][::-1]
    reversed_inverse = inverse[::-1].copy()  # contiguous, which is faster in the loop
    for t in range(start, steps):
        # m_t = beta m_{t-1} + noise of step t, whose weights are the coefficients t, ..., 0 of the
        # inverse. Then theta_t = theta_{t-1} + eta_t m_t.
        momentum_row[: t + 1] *= workload.momentum
        momentum_row[: t + 1] += scales[t] * reversed_inverse[steps - 1 - t :]
        parameter_row[: t + 1] += rates[t] * momentum_row[: t + 1]
        squares[t] = parameter_row[: t + 1] @ parameter_row[: t + 1]
    return squares

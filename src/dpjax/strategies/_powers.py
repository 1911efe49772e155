# SPDX-License-Identifier: Apache-2.0
r"""The search for buffered strategies: error and sensitivity as sums over pairs of powers.

With poles $\lambda_i$ and zeros $\theta_i$ the series of the matrix C is

$$ c(x) = \prod_i \frac{1 - \theta_i x}{1 - \lambda_i x}, \qquad
   c_0 = 1, \quad c_k = \sum_i A_i \lambda_i^k \text{ for } k \ge 1. $$

The errors are the series $W / c$ with the workload $W(x) = 1 / ((1 - x) (1 - \beta x))$ of a
momentum $\beta$. So the coefficients of both are sums of powers, and sums of their squares are
geometric sums: one evaluation costs as little for 100,000 steps as for 100. Powers are written
$e^{-\rho}$ with rates $\rho$, which keeps all digits of differences between powers close to 1.

Gradients come from steps in imaginary directions: $f(x + i h) \approx f(x) + i h f'(x)$ has no
cancellation, so h can be tiny and the derivative is exact. All functions compute one value for each
direction, so they take a row of rates for each.

A geometric sum is $\sum_{\tau = 0}^{n-1} e^{-\tau \rho} = (e^{-n \rho} - 1) / (e^{-\rho} - 1)$.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Complex

from dpjax.strategies import _descent
from dpjax.strategies._series import Series
from dpjax.strategies._workload import Workload
from dpjax.strategies.participation import Participation

Rates = Complex[np.ndarray, "directions rates"]
Values = Complex[np.ndarray, " directions"]

_TINY = 1e-30


def least_error(
    steps: int, buffers: int, participation: Participation, workload: Workload, error: str
) -> tuple[Series, Series]:
    r"""Scales $a_i$ and decays $\lambda_i$ of least error: $c_k = \sum_i a_i \lambda_i^{k-1}$.

    The search is over x, ``[2 * buffers]``, the logs of the gaps between neighbouring rates. These
    are, from the smallest, the rate of a pole, of a zero, of a pole and so on; the first gap begins
    at 0. ``error`` is "mean" or "maximal", as in `variance`.
    """
    # Number i has a tiny imaginary part in row i of ``x + directions``.
    directions = 1j * _TINY * np.eye(2 * buffers)

    def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
        """The log of variance times squared sensitivity, and its gradient."""
        # The largest rate is the sum of the gaps. At a rate of 40 a power is 0 after one step, and
        # products of its reciprocal overflow. One gap above e^4 exceeds 40, and its exponential may
        # overflow, so it is tested before.
        if np.max(x) > 4 or np.sum(np.exp(x)) > 40:
            return math.inf, x  # the search does not read this gradient
        poles, zeros = _poles_and_zeros(x + directions, steps)
        values = np.log(variance(poles, zeros, steps, workload, error))
        values += np.log(squared_sensitivity(poles, zeros, steps, participation))
        # All rows have the same real part.
        return float(values[0].real), np.imag(values) / _TINY

    minima = []
    # The search has two starts, and the better minimum counts. At a start the slowest power falls
    # to e^-3 or e^-0.3 during the run, but no faster than by e^-0.1 in each step of a short run.
    # The fastest power falls by e^-1.5 in each step.
    for slowest in (3.0 / steps, 0.3 / steps):
        rates = np.geomspace(min(slowest, 0.1), 1.5, 2 * buffers)
        gaps = np.diff(rates, prepend=0.0)
        minima.append(_descent.minimum(objective, np.log(gaps)))
    best = min(minima, key=lambda x: objective(x)[0])
    poles, zeros = _poles_and_zeros(best[None], steps)  # one row of rates each
    decays = np.exp(-poles)
    # The residues are A, so a_i = A_i lambda_i.
    scales = _residues(poles, zeros) * decays
    return scales[0], decays[0]


def _poles_and_zeros(logs_of_gaps: np.ndarray, steps: int) -> tuple[Rates, Rates]:
    """Rates that interlace for any numbers: a pole, then a zero, and so on."""
    # The least gap keeps digits in the differences of powers that nearly merge.
    gaps = np.exp(logs_of_gaps) + 1e-6 / steps
    rates = np.cumsum(gaps, axis=1)
    return rates[:, 0::2], rates[:, 1::2]


def variance(poles: Rates, zeros: Rates, steps: int, workload: Workload, error: str) -> Values:
    r"""The mean or maximal variance of the parameters, from the errors W / c of all steps.

    Coefficient $\tau$ of the errors is $\sum_i w_i p_i^\tau$ with weights $w_i$; the powers
    $p_i = e^{-\rho_i}$ are 1, the momentum and the zeros. The variance of step t is
    $\sum_{ij} w_i w_j \sum_{\tau \le t} (p_i p_j)^\tau$. It grows with t, so the last one is the
    maximal one.
    """
    constant_rates = [0.0]
    if workload.momentum:
        constant_rates.append(-math.log(workload.momentum))
    constants = np.tile(constant_rates, (len(zeros), 1))
    rates = np.concatenate([constants, zeros], axis=1)
    weights = _residues(rates, poles)
    # The rate of each product p of two powers: [directions, powers, powers].
    pairs = rates[:, :, None] + rates[:, None]
    # The power 1 times itself is 1, for which the formulas divide by 0. This rate is a placeholder,
    # and its entry of `sums` is set below.
    pairs[:, 0, 0] = 1.0
    # The sum over tau at the last of n steps: s = (1 - p^n) / (1 - p).
    sums = np.expm1(-pairs * steps) / np.expm1(-pairs)
    if error == "mean":
        # The mean of the sums over tau at all steps t:
        # sum_t (1 - p^(t+1)) / (1 - p) / n = (n - p s) / (1 - p) / n.
        sums = (steps - np.exp(-pairs) * sums) / -np.expm1(-pairs) / steps
        sums[:, 0, 0] = (steps + 1) / 2  # the mean of 1, 2, ..., n
    else:
        sums[:, 0, 0] = steps
    products = weights[:, :, None] * weights[:, None]
    return np.sum(products * sums, axis=(1, 2))


def squared_sensitivity(
    poles: Rates, zeros: Rates, steps: int, participation: Participation
) -> Values:
    r"""The squared norm of C times the indicator of steps 0, b, 2b, ...

    This pattern is the worst one, because the coefficients of c decrease. Row $m b + \tau$, $\tau$
    steps after the m-th step of the pattern, has for each power $\lambda_i$ with weight $A_i$ the
    term $A_i \lambda_i^\tau U_{im}$, where $U_{im} = \sum_{k \le m} \lambda_i^{k b}$ collects the
    steps so far. At $\tau = 0$ the last step itself contributes 1, the first coefficient of c, in
    place of $\sum_i A_i$.
    """
    apart = participation.separation  # b
    most = participation.within(steps)
    weights = _residues(poles, zeros)  # A
    pairs = poles[:, :, None] + poles[:, None]  # the rate of each product of two powers
    # Both are [directions, steps of the pattern, poles].
    decays = np.exp(-apart * poles[:, None] * np.arange(most)[:, None])  # lambda^(m b)
    collected = np.cumsum(decays, axis=1)  # U

    def of_rows_after(u: np.ndarray, length: int) -> Values:
        """The squared norm of the ``length - 1`` rows after each step with the given U."""
        # The geometric sum over tau from 1 to length - 1.
        sums = np.exp(-pairs) * np.expm1(-pairs * (length - 1)) / np.expm1(-pairs)
        weighted = weights[:, None] * u
        # The sum over steps of the pattern: [directions, poles, poles].
        products = np.swapaxes(weighted, 1, 2) @ weighted
        return np.sum(products * sums, axis=(1, 2))

    at_steps = 1 + np.sum(weights[:, None] * (collected - 1), axis=2)  # rows with tau = 0
    total = np.sum(at_steps**2, axis=1)
    total += of_rows_after(collected[:, :-1], apart)
    # After the last step of the pattern come all steps of the run that are left.
    total += of_rows_after(collected[:, -1:], steps - (most - 1) * apart)
    return total


def _residues(powers: Rates, others: Rates) -> Rates:
    r"""The weight of each power: $\prod_j (1 - o_j / p_i) / \prod_{j \ne i} (1 - p_j / p_i)$."""
    above = -np.expm1(powers[:, :, None] - others[:, None])
    below = -np.expm1(powers[:, :, None] - powers[:, None])
    diagonal = np.arange(powers.shape[1])
    below[:, diagonal, diagonal] = 1.0
    return np.prod(above, axis=2) / np.prod(below, axis=2)

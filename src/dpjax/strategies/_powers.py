# SPDX-License-Identifier: Apache-2.0
r"""The search for buffered strategies: error and sensitivity as sums over pairs of powers.

With poles $\lambda_i$ and zeros $\theta_i$ the coefficients of c, and of the errors $W / c$, are
sums of powers, and sums of their squares are geometric sums. So one evaluation costs as little for
100,000 steps as for 100. Powers are written $e^{-\rho}$ with rates $\rho$, which keeps all digits
of differences between powers close to 1.

Gradients come from steps in imaginary directions: $f(x + i h) \approx f(x) + i h f'(x)$ has no
cancellation, so h can be tiny and the derivative is exact.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Complex, Float

from dpjax.strategies import _descent
from dpjax.strategies._workload import Workload
from dpjax.strategies.participation import Participation

# One row of rates for each direction in which the gradient is taken.
Rates = Complex[np.ndarray, "directions rates"]
Values = Complex[np.ndarray, " directions"]

_TINY = 1e-30


def least_error(
    steps: int, buffers: int, participation: Participation, of: Workload, error: str
) -> tuple[Float[np.ndarray, " buffers"], Float[np.ndarray, " buffers"]]:
    """Scales and decays of the buffered Toeplitz matrix of least error."""
    directions = 1j * _TINY * np.eye(2 * buffers)

    def unpacked(x: np.ndarray) -> tuple[Rates, Rates]:
        # Prefix sums of exponentials: poles and zeros interlace for any x. The least gap keeps
        # digits in the differences of powers that nearly merge.
        rates = np.cumsum(np.exp(x) + 1e-6 / steps, axis=1)
        return rates[:, 0::2], rates[:, 1::2]

    def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
        # At a rate of 40 a power is 0 after one step; products of its reciprocal would overflow.
        if np.max(x) > 4 or np.sum(np.exp(x)) > 40:
            return math.inf, x
        poles, zeros = unpacked(x + directions)
        values = np.log(variance(poles, zeros, steps, of, error))
        values += np.log(squared_sensitivity(poles, zeros, steps, participation))
        return float(values[0].real), np.imag(values) / _TINY

    minima = []
    for slowest in (3.0 / steps, 0.3 / steps):
        rates = np.geomspace(min(slowest, 0.1), 1.5, 2 * buffers)
        minima.append(_descent.minimum(objective, np.log(np.diff(rates, prepend=0.0))))
    poles, zeros = unpacked(min(minima, key=lambda x: objective(x)[0])[None])
    decays = np.exp(-poles)
    return (_residues(poles, zeros) * decays)[0], decays[0]


def variance(poles: Rates, zeros: Rates, steps: int, of: Workload, error: str) -> Values:
    r"""The mean or last variance of W / c: powers of 1, of the momentum, and of the zeros."""
    constant = [0.0, -math.log(of.momentum)] if of.momentum else [0.0]
    rates = np.concatenate([np.tile(constant, (len(zeros), 1)), zeros], axis=1)
    weights = _residues(rates, poles)
    pairs = rates[:, :, None] + rates[:, None]
    # The pair of 1 with itself is no geometric sum.
    pairs[:, 0, 0] = 1.0
    sums = np.expm1(-pairs * steps) / np.expm1(-pairs)
    if error == "mean":
        sums = (steps - np.exp(-pairs) * sums) / -np.expm1(-pairs) / steps
    sums[:, 0, 0] = (steps + 1) / 2 if error == "mean" else steps
    return np.sum(weights[:, :, None] * weights[:, None] * sums, axis=(1, 2))


def squared_sensitivity(
    poles: Rates, zeros: Rates, steps: int, participation: Participation
) -> Values:
    r"""The squared norm of C times the indicator of steps 0, b, 2b, ...

    $\tau$ steps after the m-th, each power contributes $A_i \lambda_i^\tau U_{im}$ with
    $U_{im} = 1 + \lambda_i^b U_{i,m-1}$.
    """
    apart, most = participation.separation, participation.within(steps)
    weights = _residues(poles, zeros)
    collected = np.cumsum(np.exp(-apart * poles[:, None] * np.arange(most)[:, None]), axis=1)
    at_steps = 1 + np.sum(weights[:, None] * (collected - 1), axis=2)
    pairs = poles[:, :, None] + poles[:, None]
    total = np.sum(at_steps**2, axis=1)
    # Between two steps of the pattern, and from the last one to the end of the run.
    stretches = (collected[:, :-1], apart), (collected[:, -1:], steps - (most - 1) * apart)
    for amounts, length in stretches:
        between = np.exp(-pairs) * np.expm1(-pairs * (length - 1)) / np.expm1(-pairs)
        weighted = weights[:, None] * amounts
        inner = np.swapaxes(weighted, 1, 2) @ weighted
        total += np.sum(inner * between, axis=(1, 2))
    return total


def _residues(powers: Rates, others: Rates) -> Rates:
    r"""The weight of each power: $\prod_j (1 - o_j / p_i) / \prod_{j \ne i} (1 - p_j / p_i)$."""
    above = -np.expm1(powers[:, :, None] - others[:, None])
    below = -np.expm1(powers[:, :, None] - powers[:, None])
    below[:, range(powers.shape[1]), range(powers.shape[1])] = 1.0
    return np.prod(above, axis=2) / np.prod(below, axis=2)

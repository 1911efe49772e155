# SPDX-License-Identifier: Apache-2.0
"""Privacy profiles: delta as a function of epsilon, and epsilon as a function of delta.

Many small sampled steps look, in the limit, like one Gaussian, and papers print epsilons from that
limit (Gaussian DP). For finitely many steps its error has no known sign, and at small multipliers
it is far too small. So it is an `Estimate`, which calibration and budgets refuse.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import dp_accounting
import numpy as np
from scipy import optimize
from scipy.special import log_ndtr

from dpjax.accounting.event_parts import Parts, as_sampled


class Profile(NamedTuple):
    """What a run costs: epsilon at a delta in (0, 1), and delta at a finite epsilon."""

    epsilon: Callable[[float], float]
    delta: Callable[[float], float]


def gaussian(mu: float) -> Profile:
    """The profile of a Gaussian whose neighbours are ``mu`` standard deviations apart.

    ``delta(epsilon) = Phi(-epsilon/mu + mu/2) - e^epsilon Phi(-epsilon/mu - mu/2)``: Balle, Wang,
    *Improving the Gaussian mechanism for differential privacy*, 2018, theorem 8.
    """
    if mu == 0:
        return Profile(lambda delta: 0.0, lambda epsilon: 0.0)
    if not mu < math.inf:  # NaN hides nothing either
        return Profile(lambda delta: math.inf, lambda epsilon: 1.0)

    def epsilon_at(delta: float) -> float:
        with np.errstate(all="ignore"):  # the library takes logarithms of zero on its way
            return float(dp_accounting.get_epsilon_gaussian(1 / mu, delta))

    def delta_at(epsilon: float) -> float:
        # In logarithms: for large epsilon both terms underflow.
        upper = log_ndtr(mu / 2 - epsilon / mu)
        lower = epsilon + log_ndtr(-mu / 2 - epsilon / mu)
        return -math.exp(upper) * math.expm1(lower - upper)

    return Profile(epsilon_at, delta_at)


def most_true_positives(profile: Profile, false_positive_rate: float) -> float:
    """`dpjax.accounting.true_positive_rate` of a profile."""

    def bound(slope: float) -> float:
        # A negative slope is that of the curve's other half, which is the mirror image of this one.
        size, delta = math.exp(slope), profile.delta(abs(slope))
        if slope < 0:
            return 1 - size * (1 - delta - false_positive_rate)
        return size * false_positive_rate + delta

    # Convex in exp(slope), so that one search finds the least. Beyond, the bound is nearly 1.
    interval = -16.0, -math.log(false_positive_rate)
    found = optimize.minimize_scalar(
        bound, bounds=interval, method="bounded", options={"xatol": 1e-3}
    )
    return min(1.0, bound(0.0), float(found.fun))


class Estimate(float):
    """A number that is not a bound, and whose ``repr`` says so.

    Example:
      >>> Estimate(2.3244)
      Estimate(2.3244, not a bound)
      >>> f"{Estimate(2.3244):.2f}"
      '2.32'
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Estimate({float(self)!r}, not a bound)"


def central_limit(parts: Parts, neighbours: str) -> Profile:
    """The profile of the Gaussian that many small sampled steps look like.

    ``mu^2 = sum q^2 (exp(1/z^2) - 1)`` over sampled steps, and ``1/z^2`` over unsampled ones: Bu,
    Dong, Long, Su, *Deep learning with Gaussian differential privacy*, 2020, §3. An epoch of random
    allocation has the same variance of its ratio, with q^2 = bins^-2 for each of its steps.
    """
    parts = as_sampled(parts)
    if parts.foreign or (neighbours == "replace-one" and parts.sampled):
        raise ValueError(
            "accounting: method 'gdp' knows Gaussians only, unsampled ones if 'replace-one'; "
            f"the event holds {parts.named or 'Poisson samples'}. Use 'pld'."
        )
    # Replace-one doubles the signal, and signals enter squared.
    squares = [parts.precision * (4 if neighbours == "replace-one" else 1)]
    for (q, z), count in parts.sampled.items():
        # exp would overflow: such a step hides nothing.
        if z**-2 > 700:
            return gaussian(math.inf)
        squares.append(count * q**2 * math.expm1(z**-2))
    return gaussian(math.sqrt(math.fsum(squares)))

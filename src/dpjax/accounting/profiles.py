# SPDX-License-Identifier: Apache-2.0
"""Privacy profiles: delta as a function of epsilon, and epsilon as a function of delta.

Many small sampled steps look, in the limit, like one Gaussian, and papers print epsilons from that
limit (Gaussian DP). For finitely many steps its error has no known sign, and at small multipliers
it is far too small. The answer is therefore an `Estimate`, which calibration and budgets refuse.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import dp_accounting
import numpy as np
from scipy import optimize
from scipy.special import log_ndtr

from dpjax.accounting._event_parts import Parts, as_sampled


class Profile(NamedTuple):
    """The cost of a run: epsilon at a delta in (0, 1), and delta at a finite epsilon."""

    epsilon: Callable[[float], float]
    delta: Callable[[float], float]


def gaussian(mu: float) -> Profile:
    """The profile of a Gaussian whose neighbours are ``mu`` standard deviations apart.

    ``delta(epsilon) = Phi(-epsilon/mu + mu/2) - e^epsilon Phi(-epsilon/mu - mu/2)``: Balle, Wang,
    *Improving the Gaussian mechanism for differential privacy*, 2018, theorem 8.
    """
    if mu == 0:
        return Profile(lambda delta: 0.0, lambda epsilon: 0.0)
    if not mu < math.inf:  # NaN included, which counts as no noise
        return Profile(lambda delta: math.inf, lambda epsilon: 1.0)

    def epsilon_at(delta: float) -> float:
        with np.errstate(all="ignore"):  # the library takes logarithms of zero
            return float(dp_accounting.get_epsilon_gaussian(1 / mu, delta))

    def delta_at(epsilon: float) -> float:
        # Both terms underflow for large epsilon, so this subtracts in logarithms.
        upper = log_ndtr(mu / 2 - epsilon / mu)
        lower = epsilon + log_ndtr(-mu / 2 - epsilon / mu)
        return -math.exp(upper) * math.expm1(lower - upper)

    return Profile(epsilon_at, delta_at)


def most_true_positives(profile: Profile, false_positive_rate: float) -> float:
    """`dpjax.accounting.true_positive_rate` of a profile."""

    def bound(slope: float) -> float:
        size = math.exp(slope)
        delta = profile.delta(abs(slope))
        # The two halves of the curve mirror each other. A negative slope belongs to the second one.
        if slope < 0:
            return 1 - size * (1 - delta - false_positive_rate)
        return size * false_positive_rate + delta

    # The bound is convex in exp(slope), so one search finds the least. It is nearly 1 outside.
    interval = (-16.0, -math.log(false_positive_rate))
    search = optimize.minimize_scalar(
        bound, bounds=interval, method="bounded", options={"xatol": 1e-3}
    )
    return min(1.0, bound(0.0), float(search.fun))


class Estimate(float):
    """A number that is not a bound; its ``repr`` shows that.

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
    Dong, Long, Su, *Deep learning with Gaussian differential privacy*, 2020, §3. Random allocation,
    with an example in one of t steps of an epoch, counts as sampling with ``q = 1 / t``: the
    likelihood ratio of an epoch has the same variance.
    """
    parts = as_sampled(parts)
    if parts.foreign or (neighbours == "replace-one" and parts.sampled):
        raise ValueError(
            "accounting: method 'gdp' knows Gaussians only, unsampled ones if 'replace-one'; "
            f"the event holds {parts.named or 'Poisson samples'}. Use 'pld'."
        )
    # Replace-one doubles the signal, and signals enter squared.
    squared_factor = 4 if neighbours == "replace-one" else 1
    squares = [parts.precision * squared_factor]
    for (q, z), count in parts.sampled.items():
        if z**-2 > 700:
            # Such a step hides nothing, and the exponential overflows.
            return gaussian(math.inf)
        squares.append(count * q**2 * math.expm1(z**-2))
    return gaussian(math.sqrt(math.fsum(squares)))

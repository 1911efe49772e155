# SPDX-License-Identifier: Apache-2.0
"""Privacy profiles: delta as a function of epsilon, and epsilon as a function of delta.

An accountant turns the parts of an event into a profile. That of one Gaussian has a closed form,
here; it is exact, whatever an accountant uses it for.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import dp_accounting
import numpy as np
from scipy.special import log_ndtr


class Profile(NamedTuple):
    """What a run costs.

    Attributes:
      epsilon: At a delta in (0, 1).
      delta: At a finite epsilon, 0 or more.
    """

    epsilon: Callable[[float], float]
    delta: Callable[[float], float]


def gaussian(mu: float) -> Profile:
    """The profile of a Gaussian whose neighbours are ``mu`` standard deviations apart.

    ``delta(epsilon) = Phi(-epsilon/mu + mu/2) - e^epsilon Phi(-epsilon/mu - mu/2)``.

    Example:
      >>> exact = gaussian(1.0)
      >>> round(exact.epsilon(1e-5), 3), round(exact.delta(1.0), 5)
      (4.377, 0.12694)

    References:
      Balle, Wang, *Improving the Gaussian mechanism for differential privacy*, 2018, theorem 8.
    """
    if mu == 0:
        return Profile(lambda delta: 0.0, lambda epsilon: 0.0)
    if not mu < math.inf:  # NaN hides nothing either
        return Profile(lambda delta: math.inf, lambda epsilon: 1.0)

    def epsilon_at(delta: float) -> float:
        with np.errstate(all="ignore"):  # the library takes logarithms of zero on its way
            return float(dp_accounting.get_epsilon_gaussian(1 / mu, delta))

    def delta_at(epsilon: float) -> float:
        # In logarithms: for large epsilon both terms underflow, and their difference loses all
        # digits.
        upper = log_ndtr(mu / 2 - epsilon / mu)
        lower = epsilon + log_ndtr(-mu / 2 - epsilon / mu)
        return -math.exp(upper) * math.expm1(lower - upper)

    return Profile(epsilon_at, delta_at)

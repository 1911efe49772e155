# SPDX-License-Identifier: Apache-2.0
"""Gaussian differential privacy by the central limit theorem: an estimate, not a bound.

Many small sampled steps look, in the limit, like one Gaussian of signal ``mu``. Papers print
epsilons from that limit. For finitely many steps the error has no known sign, and at small
multipliers the estimate is far too small. Every output is therefore labelled as an estimate, and
calibration and budgets refuse the method. Unsampled Gaussians enter exactly.
"""

import math

from dpjax.accounting import profiles
from dpjax.accounting.event_parts import Parts
from dpjax.accounting.profiles import Profile


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

    "replace-one" doubles the signal of unsampled Gaussians and refuses sampled ones.

    References:
      Bu, Dong, Long, Su, *Deep learning with Gaussian differential privacy*, 2020, §3.
    """
    return profiles.gaussian(_signal(parts, neighbours))


def _signal(parts: Parts, neighbours: str) -> float:
    """``mu^2 = sum q^2 (exp(1/z^2) - 1)`` over sampled steps, and ``1/z^2`` over unsampled ones."""
    if parts.foreign:
        raise ValueError(
            f"accounting: method 'gdp' knows Gaussians only; the event holds {parts.named}. "
            "Use 'pld'."
        )
    if neighbours == "replace-one" and parts.sampled:
        raise ValueError(
            "accounting: method 'gdp' does not know Poisson sampling with 'replace-one'. Use 'pld'."
        )
    # Replace-one doubles the signal, and signals enter squared.
    squares = [parts.precision * (4 if neighbours == "replace-one" else 1)]
    for (q, z), count in parts.sampled.items():
        # exp would overflow: such a step hides nothing.
        if z**-2 > 700:
            return math.inf
        squares.append(count * q**2 * math.expm1(z**-2))
    return math.sqrt(math.fsum(squares))

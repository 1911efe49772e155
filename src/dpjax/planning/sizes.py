# SPDX-License-Identifier: Apache-2.0
"""Batch and steps: the noise of a step against the examples that it computes.

The noise is estimated here by the central limit of Gaussian DP, in closed form. A plan is then
calibrated by a proven accountant.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from scipy.optimize import root_scalar
from scipy.stats import norm

from dpjax import clipping

STEPS = 200
"""The least number of steps, if time suffices."""
MOST_STEPS = 800
"""More steps travel further at equal noise, if data suffice for batches of `LEAST_BATCH`."""
RATIO = 0.68
"""The mu of a plan over the square root of steps times sampling rate: a tenth more noise than that
of batches of all examples."""
LEAST_BATCH = 1024
"""A smaller batch saves little time, and its sampling adds to the noise."""
_FEWEST_STEPS = 25  # a plan for less time has no fewer; only its batch shrinks further


class Size(NamedTuple):
    """A batch and a number of steps.

    Attributes:
      batch: The expected number of examples of a step.
      steps: The number of steps.
      excess: Noise of the mean gradient relative to batches of all examples, at equal epsilon and
        steps; an estimate, 1 or more.
      multiplier: The noise multiplier of a step; an estimate.
    """

    batch: int
    steps: int
    excess: float
    multiplier: float

    @property
    def examples(self) -> int:
        """How many examples all steps together compute."""
        return self.batch * self.steps

    @property
    def adaptive(self) -> clipping.Quantile | None:
        """How the bound follows the gradient norms; None if a noised count cannot tell them.

        The count of a `clipping.Quantile` has four times the multiplier, and half of that is its
        deviation. Above a tenth of the batch a bound that follows it wanders off.
        """
        if 2 * self.multiplier > 0.1 * self.batch:
            return None
        # The bound falls slowly for a target near 1, and with it a rate that is divided by it rises
        # slowly while the model fits the data. But for noise, the bound rises by up to 62 % a step
        # and falls by 1.5 %.
        return clipping.Quantile(target=0.97, rate=0.5)


def gaussian_parameter(epsilon: float, delta: float) -> float:
    r"""The $\mu$ of Gaussian DP with this epsilon and delta.

    It solves

    $$ \delta = \Phi(-\varepsilon / \mu + \mu / 2)
       - e^\varepsilon\, \Phi(-\varepsilon / \mu - \mu / 2). $$

    References:
      Balle and Wang, "Improving the Gaussian Mechanism for Differential Privacy", 2018, theorem 8.
    """

    def surplus(mu: float) -> float:
        second = math.exp(epsilon + norm.logcdf(-epsilon / mu - mu / 2))
        return float(norm.cdf(-epsilon / mu + mu / 2)) - second - delta

    # 1e-4 is below the parameter of every epsilon that trains anything. At the upper end the right
    # side of the formula is 1 up to rounding, which is above every delta.
    bracket = (1e-4, 20 + 2 * math.sqrt(epsilon))
    return root_scalar(surplus, bracket=bracket).root


def sized(examples: int, batch: float, steps: int, mu: float) -> Size:
    r"""A batch and steps, with the multiplier $\sigma$ and the excess $a \sigma$.

    $$ a = \frac{\mu}{q \sqrt T}, \qquad \sigma = 1 / \sqrt{\log(1 + a^2)},
       \ \text{or } 1 / a \text{ for batches of all examples} $$

    References:
      Bu, Dong, Long and Su, "Deep Learning with Gaussian Differential Privacy", 2020: the central
      limit $\mu = q \sqrt{T (e^{1 / \sigma^2} - 1)}$, solved for $\sigma$.
    """
    batch = min(examples, math.ceil(batch))
    ratio = mu * examples / (batch * math.sqrt(steps))
    multiplier = 1 / ratio
    if batch < examples:
        multiplier = 1 / math.sqrt(math.log1p(ratio**2))
    return Size(batch, steps, ratio * multiplier, multiplier)


def usual_steps(examples: int, mu: float) -> int:
    """The steps of a plan that time does not limit.

    With four times the steps, half the batch has the same excess. So steps grow until the batch is
    `LEAST_BATCH`, or until they are `MOST_STEPS`.
    """
    steps = (mu * examples / (RATIO * LEAST_BATCH)) ** 2
    return math.ceil(min(max(steps, STEPS), MOST_STEPS))


def size_for(examples: int, epsilon: float, delta: float, most: float = math.inf) -> Size:
    """The batch and steps of a plan that computes at most about ``most`` examples.

    Args:
      examples: The size of the data set.
      epsilon: The target.
      delta: The target.
      most: How many examples all steps together may compute.
    """
    mu = gaussian_parameter(epsilon, delta)

    steps = usual_steps(examples, mu)
    batch = max(mu * examples / (RATIO * math.sqrt(steps)), LEAST_BATCH)
    batch = min(batch, examples)
    if batch * steps > most:
        # Batch and steps shrink by the same factor, until the steps are at their fewest.
        shrink = math.sqrt(most / (batch * steps))
        steps = max(_FEWEST_STEPS, round(steps * shrink))
        batch = max(1.0, most / steps)
    return sized(examples, batch, steps, mu)


def other_sizes(examples: int, epsilon: float, delta: float, most: float = math.inf) -> list[Size]:
    """Sizes for a half to eight times the time of the planned one, which is among them.

    Time is the number of examples that all steps compute. More of it makes batches larger, up to
    all examples. The arguments are as for `size_for`.
    """
    mu = gaussian_parameter(epsilon, delta)
    planned = size_for(examples, epsilon, delta, most)
    usual = usual_steps(examples, mu)
    others = []
    for factor in (0.5, 1, 2, 4, 8):
        batch = planned.batch * factor
        steps = planned.steps
        # If `size_for` took fewer steps than usual to save time, more time goes into both: steps
        # grow by the root of the factor, up to the usual number, and batches by the rest of it.
        if planned.steps < usual and factor > 1:
            steps = min(usual, round(planned.steps * factor**0.5))
            batch = planned.examples * factor / steps
        others.append(sized(examples, batch, steps, mu))
    return list(dict.fromkeys(others))  # sizes with batches of all examples may be equal

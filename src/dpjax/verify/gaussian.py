# SPDX-License-Identifier: Apache-2.0
r"""The exact epsilon of Gaussians without sampling, which a distribution on a grid only approaches.

Gaussians with multipliers $z_t$ together are one Gaussian that an example moves by
$\mu = (\sum_t z_t^{-2})^{1/2}$ standard deviations. dp-accounting cuts 1e-15 off a distribution,
so a smaller delta needs this form.
"""

from __future__ import annotations

import math

import dp_accounting as dp
from scipy.special import erfcx


def precision(event: dp.DpEvent) -> float:
    """The sum of 1 / multiplier^2 of Gaussians; NaN if the event has any other part."""
    match event:
        case dp.NoOpDpEvent():
            return 0.0
        case dp.GaussianDpEvent(noise_multiplier=multiplier):
            return multiplier**-2
        case dp.SelfComposedDpEvent(event=part, count=count):
            return count * precision(part)
        case dp.ComposedDpEvent(events=parts):
            return math.fsum(map(precision, parts))
    return math.nan


def epsilon(signal: float, delta: float) -> float:
    r"""The epsilon of a Gaussian that an example moves by ``signal`` standard deviations.

    With $x = \varepsilon / \mu - \mu / 2$,
    $\delta = \Phi(-x) - e^\varepsilon \Phi(-x - \mu)
    = e^{-x^2 / 2} [R(x) - R(x + \mu)] / 2$, where $R(x) = \mathrm{erfcx}(x / \sqrt 2)$.
    Bisection finds $x$; $R$ does not underflow, however small delta is.

    References:
      Balle, Wang, *Improving the Gaussian mechanism for differential privacy*, 2018, theorem 8.
    """
    low, high = max(-signal / 2, -40.0), math.sqrt(-2 * math.log(delta))
    for _ in range(100):
        x = (low + high) / 2
        between = float(erfcx(x / 2**0.5) - erfcx((x + signal) / 2**0.5)) / 2
        if between > 0 and math.log(between) - x**2 / 2 > math.log(delta):
            low = x
        else:
            high = x
    return signal * (high + signal / 2)

# SPDX-License-Identifier: Apache-2.0
"""Accounting backwards: the least noise, or the most steps, that a budget allows.

Both are the root of a monotone function. `calibrate` finds the smallest parameter (a noise
multiplier, or the scale of a schedule) whose epsilon does not exceed the target; `largest_steps`
the largest number of steps. Both return the end of the bracket that *keeps* the promise, checked
by the same call that a report makes. The slow method starts from the answer of the fast one.

Only proven methods are inverted: noise chosen by an estimate would promise too much.
"""

import contextlib
import functools
import math
from collections.abc import Callable

from dp_accounting import DpEvent
from scipy.optimize import root_scalar

from dpjax import checks
from dpjax.accounting.methods import checked_delta, checked_method
from dpjax.accounting.methods import epsilon as epsilon_of
from dpjax.accounting.rdp_accountant import least_epsilon
from dpjax.accounting.rounding import upwards

# Relative width of the answer. PLD answers on a grid, so a tighter search would chase its steps.
_TIGHTNESS = {"rdp": 1e-6, "rdp-classic": 1e-6, "pld": 1e-4}


def calibrate(
    make_event: Callable[[float], DpEvent],
    epsilon: float,
    delta: float,
    method: str = "rdp",
    neighbours: str = "add-or-remove",
) -> float:
    """The smallest parameter whose event costs at most ``epsilon``.

    Args:
      make_event: From a positive number to an event that costs less the larger the number is;
        for instance a noise multiplier, or the factor on a whole schedule.
      epsilon: The target, above 0.
      delta: The probability beside it, in (0, 1).
      method: A proven method.
      neighbours: As for `accounting.epsilon`.

    Returns:
      The parameter. Its epsilon is at most the target, exactly; the parameter is within 1e-6 of
      the smallest such (relative; 1e-4 for "pld").

    Privacy:
      The parameter must be chosen before training: nothing here may have seen the data.

    Example:
      >>> from dpjax import accounting
      >>> make = lambda z: accounting.subsampled_gaussian(
      ...     z, sampling_rate=256 / 60_000, steps=14_063
      ... )
      >>> round(accounting.calibrate(make, epsilon=2.0, delta=1e-5), 4)
      1.2953
    """
    _check("accounting.calibrate", epsilon, delta, method)
    # Below it the conversion answers 0 for divergences near delta^2 and nothing else, so a search
    # would end at noise hundreds or millions of times what "pld" finds.
    if epsilon <= (least := least_epsilon(delta, method)):
        raise ValueError(
            f"accounting.calibrate(epsilon={epsilon}, delta={delta}, method={method!r}): expected "
            f"an epsilon above {upwards(least)}, which this method answers at this delta however "
            "little is released. So small an epsilon needs larger Rényi orders than it has: use "
            "method='pld', or allow a larger epsilon or delta."
        )

    @functools.cache
    def spent(value: float) -> float:
        return epsilon_of(make_event(value), delta, method, neighbours)

    # A PLD costs seconds and RDP milliseconds: RDP's answer is a bracket that is nearly right.
    start, factor = 1.0, 2.0
    if method == "pld":
        with contextlib.suppress(ValueError):  # RDP may have no proof here, and PLD have one
            start, factor = calibrate(make_event, epsilon, delta, "rdp", neighbours), 1.2
    low, high = _bracket(spent, epsilon, start, factor)
    tight = _TIGHTNESS[method]
    root = _crossing(
        lambda x: spent(math.exp(x)), epsilon, math.log(low), math.log(high), tight / 4
    )
    value = math.exp(root)
    # The root may lie on either side; the answer must be on the private one.
    while spent(value) > epsilon:
        value *= 1 + tight / 2
    return min(value, high)


def largest_steps(
    make_event: Callable[[int], DpEvent],
    epsilon: float,
    delta: float,
    method: str = "rdp",
    neighbours: str = "add-or-remove",
    maximum: float = 10_000_000,
) -> int:
    """The largest number of steps whose event costs at most ``epsilon``.

    Args:
      make_event: From a number of steps to an event that costs more the larger the number is.
      epsilon: The target, above 0.
      delta: The probability beside it, in (0, 1).
      method: A proven method.
      neighbours: As for `accounting.epsilon`.
      maximum: The largest number of steps to consider: a whole number, or infinity.

    Returns:
      The number: 0 if not even one step fits, ``maximum`` if that fits.

    Example:
      >>> from dpjax import accounting
      >>> make = lambda steps: accounting.subsampled_gaussian(3.0, sampling_rate=0.1, steps=steps)
      >>> accounting.largest_steps(make, epsilon=2.0, delta=1e-6)
      133
    """
    _check("accounting.largest_steps", epsilon, delta, method)
    if maximum != math.inf:
        hint = "It may also be infinity: a whole number, zero or more, or infinity."
        checks.whole("accounting.largest_steps", "maximum", maximum, hint, least=0)
    if maximum == 0:
        return 0

    @functools.cache
    def spent(steps: int) -> float:
        return epsilon_of(make_event(steps), delta, method, neighbours) if steps else 0.0

    low, high = 0, 1
    if method == "pld":
        with contextlib.suppress(ValueError):
            # RDP's answer is proven too, so at least as many steps fit by PLD.
            low = largest_steps(make_event, epsilon, delta, "rdp", neighbours, maximum)
        high = int(min(maximum, low + max(1, low // 4)))
    while spent(high) <= epsilon:
        if high == maximum:
            return high
        if high >= 2**62:
            raise ValueError(
                f"accounting.largest_steps(epsilon={epsilon}, maximum={maximum}): epsilon is "
                f"{spent(high):.4g} even for {high:.3g} steps, so any number fits. Usually the "
                "sampling rate is 0, or the noise infinite. Give the steps that are planned as "
                "maximum."
            )
        low, high = high, int(min(maximum, 2 * high))
    steps = int(_crossing(lambda x: spent(int(x)), epsilon, low, high, 0.5))
    while spent(steps) > epsilon:
        steps -= 1
    # Epsilon is not smooth in whole steps: the search ends within one step of the answer.
    while steps < maximum and spent(steps + 1) <= epsilon:
        steps += 1
    return steps


def _bracket(
    spent: Callable[[float], float], target: float, start: float, factor: float
) -> tuple[float, float]:
    """Two parameters, the first too small, the second large enough."""
    high = low = start
    while spent(high) > target:
        low, high = high, high * factor
        if high > 1e9:
            raise ValueError(
                f"accounting.calibrate(epsilon={target}): not reachable; even at parameter "
                f"{low:.3g} epsilon is {spent(low):.4g}. Some part of the event does not depend "
                "on the parameter and costs that much, such as the runs in before=, or private "
                "moments of features: make that part cheaper, or allow a larger epsilon or delta."
            )
    while spent(low) <= target:
        low, high = low / factor, low
        # Ever faster: a PLD takes seconds, and a delta above the sampling rates needs no noise.
        factor *= factor
        if low < 1e-9:
            raise ValueError(
                f"accounting.calibrate(epsilon={target}): epsilon is {spent(high):.4g} even at "
                f"parameter {high:.3g}, so there is nothing to calibrate. Usually the event has no "
                "steps, the parameter does not change it, or delta is so large that no noise is "
                "needed."
            )
    return low, high


def _crossing(
    spent: Callable[[float], float], target: float, low: float, high: float, tolerance: float
) -> float:
    """Where epsilon passes the target, by Brent's method on its nearly linear logarithm."""

    def excess(x: float) -> float:
        # Brent's method needs finite values, and a zero exactly at the target would end it on the
        # wrong side.
        return min(50.0, max(-50.0, math.log(max(spent(x), 1e-300) / target))) or -1e-300

    found = root_scalar(excess, bracket=(low, high), method="brentq", xtol=tolerance, rtol=1e-15)
    return float(found.root)


def _check(call: str, target: float, delta: float, method: str) -> None:
    checked_delta(call, delta)
    row = checked_method(call, method)
    if not row.proven:
        raise ValueError(
            f"{call}(method={method!r}): refused. It is {row.words}, and noise or steps chosen by "
            "it would promise what is not proven. Use 'rdp' or 'pld', and print the estimate "
            "beside them."
        )
    hint = (
        "At epsilon 0 nothing about the data is learnt. For a run without noise, to compare with, "
        "build the mechanism with noise_multiplier=0.0 instead."
    )
    checks.positive(call, "epsilon", target, hint)

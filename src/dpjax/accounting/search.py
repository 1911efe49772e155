# SPDX-License-Identifier: Apache-2.0
"""Accounting backwards: the least noise, or the most steps, that a budget allows.

Both are the root of a monotone function. `calibrate` finds the smallest parameter (a noise
multiplier, or the scale of a schedule) whose epsilon does not exceed the target; `largest_steps`
the largest number of steps. Both return the end of the bracket that *keeps* the promise, checked
by the same call that a report makes. PLD starts from the answer of the central limit.

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

    @functools.cache
    def spent(value: float) -> float:
        return epsilon_of(make_event(value), delta, method, neighbours)

    tight = _TIGHTNESS[method]
    # A PLD of a schedule takes ten seconds. The central limit takes none, and is nearly right.
    if method == "pld":
        with contextlib.suppress(ValueError):  # it may know no such event
            guess = _least(
                lambda value: epsilon_of(make_event(value), delta, "gdp", neighbours), epsilon, 1e-3
            )
            if value := _from_near(spent, epsilon, guess, tight):
                return value
    return _least(spent, epsilon, tight)


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
        checks.whole("accounting.largest_steps", "maximum", maximum, least=0)
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
                f"accounting.largest_steps(epsilon={epsilon}, maximum={maximum}): any number fits. "
                "Give the steps that are planned as maximum."
            )
        low, high = high, int(min(maximum, 2 * high))
    steps = int(_crossing(lambda x: spent(int(x)), epsilon, low, high, 0.5))
    while spent(steps) > epsilon:
        steps -= 1
    # Epsilon is not smooth in whole steps: the search ends within one step of the answer.
    while steps < maximum and spent(steps + 1) <= epsilon:
        steps += 1
    return steps


def _least(spent: Callable[[float], float], target: float, tight: float) -> float:
    """The smallest parameter that keeps the target, from a bracket around it."""
    low, high = _bracket(spent, target)
    root = _crossing(lambda x: spent(math.exp(x)), target, math.log(low), math.log(high), tight / 4)
    value = math.exp(root)
    # The root may lie on either side; the answer must be on the private one.
    while spent(value) > target:
        value *= 1 + tight / 2
    return min(value, high)


def _from_near(
    spent: Callable[[float], float], target: float, value: float, tight: float
) -> float | None:
    """A parameter whose epsilon is just below the target, by the secant method, or None."""
    # Epsilon is nearly a power of the parameter, so its logarithm is nearly linear in that of the
    # parameter. Epsilons of sampled steps fall with about the power 3/2.
    slope, before, aim = -1.5, None, math.log(target) - tight / 2
    for _ in range(8):
        if not 0 < (found := spent(value)) < math.inf:
            return None
        if target * (1 - tight) <= found <= target:
            return value
        here = math.log(value), math.log(found)
        if before:
            slope = (here[1] - before[1]) / (here[0] - before[0])
        if not slope < -0.5:
            return None
        before, value = here, value * math.exp((aim - here[1]) / slope)
    return None


def _bracket(spent: Callable[[float], float], target: float) -> tuple[float, float]:
    """Two parameters, the first too small, the second large enough."""
    high = low = 1.0
    while spent(high) > target:
        low, high = high, high * 2
        if high > 1e9:
            raise ValueError(
                f"accounting.calibrate(epsilon={target}): not reachable; even at parameter "
                f"{low:.3g} epsilon is {spent(low):.4g}. Make the parts cheaper that do not depend "
                "on the parameter, such as before= or private moments."
            )
    factor = 2.0
    while spent(low) <= target:
        low, high = low / factor, low
        # Ever faster: a PLD takes seconds, and a delta above the sampling rates needs no noise.
        factor *= factor
        if low < 1e-9:
            raise ValueError(
                f"accounting.calibrate(epsilon={target}): nothing to calibrate; epsilon is "
                f"{spent(high):.4g} even at parameter {high:.3g}."
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
    if not checked_method(call, method).proven:
        raise ValueError(
            f"{call}(method={method!r}): it is an estimate, and noise chosen by it would promise "
            "what is not proven. Use 'rdp' or 'pld'."
        )
    hint = "Without noise, build the mechanism with noise_multiplier=0.0."
    checks.positive(call, "epsilon", target, hint)

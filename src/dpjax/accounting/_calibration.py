# SPDX-License-Identifier: Apache-2.0
"""Accounting backwards: the least noise, or the most steps, that a budget allows.

Every search returns a number that it tried and that *keeps* the budget. It computes the cost by the
same call as a report. Only proven methods are allowed, because noise chosen by an estimate promises
too much.
"""

import bisect
import contextlib
import functools
import math
from collections.abc import Callable

from dp_accounting import DpEvent
from scipy.special import ndtri

from dpjax import checks
from dpjax.accounting.methods import checked_method
from dpjax.accounting.methods import epsilon as epsilon_of
from dpjax.accounting.methods import true_positive_rate as rate_of

# The relative width of the answer. PLD rounds losses to a grid, so a tighter search finds only
# rounding.
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
      delta: As for `accounting.epsilon`.
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
    def spent(value: float, by: str = method) -> float:
        return epsilon_of(make_event(value), delta, by, neighbours)

    # A PLD takes seconds. The central limit ("gdp") takes milliseconds, and from its answer the
    # secant method needs only a few PLDs. Bisection is for events where this fails.
    if method == "pld":
        with contextlib.suppress(ValueError):  # the central limit does not know every event
            guess = by_bisection(lambda value: spent(value, "gdp"), epsilon, tight=1e-2)
            value = by_secants(spent, epsilon, guess)
            if value is not None:
                return value
    return by_bisection(spent, epsilon, _TIGHTNESS[method])


def calibrate_risk(
    make_event: Callable[[float], DpEvent],
    true_positive_rate: float,
    false_positive_rate: float,
    neighbours: str = "add-or-remove",
) -> float:
    r"""The smallest parameter that limits the true positives of every membership attack, by PLD.

    An epsilon limits them at all rates of false positives, so noise chosen by way of it is larger
    than a limit at one rate needs: for a Gaussian, and 5 % true positives at 1 % false ones,
    epsilon $= \ln 5$ at delta 1e-5 needs 1.65 times the noise.

    Args:
      make_event: As for `calibrate`.
      true_positive_rate: The most true positives that any attack may have, as a share.
      false_positive_rate: The most false positives of these attacks, as a share.
      neighbours: As for `accounting.epsilon`.

    Returns:
      The parameter. Its `accounting.true_positive_rate` is at most the target, exactly; the
      parameter is within about 1e-4 of the smallest such (relative).

    Example:
      >>> from dpjax import accounting
      >>> round(accounting.calibrate_risk(accounting.gaussian, 0.05, 0.01), 3)
      1.467

    References:
      Kulynych, Gomez, Kaissis, Calmon and Troncoso, "Attack-Aware Noise Calibration for
      Differential Privacy", 2024.
    """
    call = "accounting.calibrate_risk"
    false_positive_rate = checks.fraction(call, "false_positive_rate", false_positive_rate)
    target = checks.fraction(call, "true_positive_rate", true_positive_rate)

    @functools.cache
    def rate_at(value: float, by: str = "pld") -> float:
        """The largest share of true positives at a parameter, by an accounting method."""
        return rate_of(make_event(value), false_positive_rate, by, neighbours)

    def mu_of(rate: float) -> float:
        """The mu at which N(0, 1) and N(mu, 1) allow this rate at the rate of false positives.

        It is nearly a power of the parameter, as `by_secants` needs; the rate is not.
        """
        return float(ndtri(rate) - ndtri(false_positive_rate))

    # As in `calibrate`: a guess by the central limit ("gdp"), secants from it, and bisection if
    # they fail.
    with contextlib.suppress(ValueError):  # the central limit does not know every event
        guess = by_bisection(
            lambda value: rate_at(value, "gdp"), target, tight=1e-2, name="true_positive_rate"
        )
        value = by_secants(lambda value: mu_of(rate_at(value)), mu_of(target), guess)
        # The rate may be above its target by rounding, although mu is not.
        if value is not None and rate_at(value) <= target:
            return value
    return by_bisection(rate_at, target, _TIGHTNESS["pld"], name="true_positive_rate")


def largest_steps(
    make_event: Callable[[int], DpEvent],
    epsilon: float,
    delta: float,
    method: str = "rdp",
    neighbours: str = "add-or-remove",
    maximum: int = 10_000_000,
) -> int:
    """The largest number of steps, up to ``maximum``, whose event costs at most ``epsilon``.

    ``make_event`` makes an event of a number of steps, which costs more the larger the number is.
    The other arguments are as for `calibrate`. The answer is 0 if not even one step fits.

    Example:
      >>> from dpjax import accounting
      >>> make = lambda steps: accounting.subsampled_gaussian(3.0, sampling_rate=0.1, steps=steps)
      >>> accounting.largest_steps(make, epsilon=2.0, delta=1e-6)
      133
    """
    _check("accounting.largest_steps", epsilon, delta, method)
    maximum = checks.whole("accounting.largest_steps", "maximum", maximum, least=0)
    if maximum == 0:
        return 0  # the search below begins at one step

    @functools.cache
    def spent(steps: int) -> float:
        return epsilon_of(make_event(steps), delta, method, neighbours)

    # Double the steps until they cost too much; half of them still fit.
    high = 1
    while spent(high) <= epsilon:
        if high == maximum:
            return high
        high = min(maximum, 2 * high)
    # The answer is the first number after which one more step costs too much.
    candidates = range(high // 2, high)
    index = bisect.bisect_left(candidates, True, key=lambda n: spent(n + 1) > epsilon)
    return candidates[index]


def by_bisection(
    spent: Callable[[float], float], target: float, tight: float, name: str = "epsilon"
) -> float:
    """The smallest parameter with ``spent(parameter) <= target``, within a factor ``1 + tight``.

    The search bisects the logarithm of the parameter. Errors call the target ``name``.
    """
    low, high = _bracket(spent, target, name)
    while high > low * (1 + tight):
        middle = math.sqrt(low * high)
        if spent(middle) <= target:
            high = middle
        else:
            low = middle
    return high


def by_secants(
    spent: Callable[[float], float], target: float, value: float, tight: float = _TIGHTNESS["pld"]
) -> float | None:
    """A parameter at which ``spent`` is just below the target, by the secant method from ``value``.

    There, ``(1 - tight) target <= spent(parameter) <= target``. The answer is None if the method
    does not converge.
    """
    # The method works on log(spent) as a function of log(parameter), which is nearly a line. The
    # first slope is a guess, about right for sampled steps with multipliers near 1.
    slope = -1.5
    log_aim = math.log(target) - tight / 2  # the middle of the accepted range
    previous: tuple[float, float] | None = None
    for _ in range(8):
        cost = spent(value)
        if not 0 < cost < math.inf:
            return None  # it has no logarithm
        if target * (1 - tight) <= cost <= target:
            return value
        log_value = math.log(value)
        log_cost = math.log(cost)
        if previous is not None:
            previous_log_value, previous_log_cost = previous
            slope = (log_cost - previous_log_cost) / (log_value - previous_log_value)
        if not slope < -0.5:
            return None  # too flat for a secant; NaN included
        previous = (log_value, log_cost)
        value = value * math.exp((log_aim - log_cost) / slope)
    return None


def _bracket(spent: Callable[[float], float], target: float, name: str) -> tuple[float, float]:
    """Two parameters: the first costs more than the target, the second at most the target."""
    # Either 1 costs too much, and `high` doubles until it does not, or `low` falls until it does.
    low = 1.0
    high = 1.0
    while spent(high) > target:
        low = high
        high = high * 2
        if high > 1e9:
            raise ValueError(
                f"accounting.calibrate({name}={target}): not reachable; at parameter "
                f"{low:.3g} {name} is {spent(low):.4g}. Make before= or features cheaper."
            )
    divisor = 2.0
    while spent(low) <= target:
        high = low
        low = low / divisor
        # The divisor is squared to reach the error below in few evaluations: at a delta above the
        # chance that the example is ever drawn, epsilon is 0 at every parameter.
        divisor *= divisor
        if low < 1e-9:
            raise ValueError(
                f"accounting.calibrate({name}={target}): nothing to calibrate; {name} is "
                f"{spent(high):.4g} even at parameter {high:.3g}."
            )
    return low, high


def _check(call: str, target: float, delta: float, method: str) -> None:
    checks.delta(call, delta)
    if not checked_method(call, method).proven:
        raise ValueError(f"{call}(method={method!r}): an estimate, not proven. Use 'rdp' or 'pld'.")
    checks.positive(call, "epsilon", target, "Without noise, write noise_multiplier=0.0.")

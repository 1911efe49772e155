# SPDX-License-Identifier: Apache-2.0
"""Epsilon and delta of an event, by a named method.

A new method is a row here, a name in `dpjax.verify` and, if it is proven, a tolerance in
`accounting._calibration`.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

from dp_accounting import DpEvent

from dpjax import checks
from dpjax.accounting import _allocation, _pld, _random_projections
from dpjax.accounting._event_parts import Parts, relation, split
from dpjax.accounting._loss_distributions import level_count, rounded
from dpjax.accounting._rdp_accountant import classic, improved
from dpjax.accounting.events import RandomAllocationDpEvent
from dpjax.accounting.profiles import Estimate, Profile, central_limit, most_true_positives


@dataclasses.dataclass(frozen=True)
class Method:
    """An accounting method.

    Attributes:
      proven: Whether its answer is an upper bound; if not, nothing may rest on it.
      profile: ``(parts, neighbours) -> Profile``: epsilon at a delta, and delta at an epsilon.
    """

    name: str
    proven: bool
    words: str
    profile: Callable[[Parts, str], Profile] = dataclasses.field(repr=False)


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("rdp", True, "upper bound by Rényi divergences, improved conversion", improved),
        Method("pld", True, "tightest upper bound, by privacy loss distributions", _pld.profile),
        Method("rdp-classic", True, "looser upper bound, as older papers print", classic),
        Method(
            "gdp", False, "an estimate, not a bound: central limit of Gaussian DP", central_limit
        ),
    )
}


def epsilon(
    event: DpEvent,
    delta: float,
    method: str = "rdp",
    neighbours: str = "add-or-remove",
    *,
    plan: DpEvent | None = None,
) -> float:
    """The epsilon that ``event`` costs at this delta.

    Args:
      event: What was run.
      delta: In (0, 1); below one over the number of examples.
      method: "rdp", "pld", "rdp-classic", or "gdp" (an estimate).
      neighbours: "add-or-remove", "zero-out" (same arithmetic), or "replace-one" (sensitivity
        doubled here).
      plan: What was planned, if ``event`` is the part of it that ran. "pld" rounds more than 256
        different sampled steps to the `levels` of the plan, so more steps never cost less.

    Returns:
      Epsilon, never negative; an `Estimate` if the method is not proven.

      | event | epsilon |
      |---|---|
      | no steps, or rate 0 | 0 |
      | multiplier 0, or a non-private part | infinity |
      | Poisson, replace-one | "pld" only |
      | without replacement | "rdp" with "replace-one" only |
      | best of several runs (`RepeatAndSelectDpEvent`) | "rdp" only |
      | norms from random projections | "pld" only |
      | random allocation, fresh bins each epoch | "pld" is exact to about 0.1 %; "rdp" far looser |
      | random bins under correlated noise | "pld" is the least of "rdp" and of known bins |

      Below a multiplier of about 0.2, "pld" of random allocation can be that of known bins.

    Example:
      >>> from dpjax import accounting
      >>> event = accounting.subsampled_gaussian(1.1, sampling_rate=256 / 60_000, steps=14_063)
      >>> round(accounting.epsilon(event, delta=1e-5), 4)
      2.5967
      >>> accounting.epsilon(event, delta=1e-5, method="gdp")
      Estimate(2.324..., not a bound)
    """
    call = "accounting.epsilon"
    delta = checks.delta(call, delta)
    row = checked_method(call, method)
    return _as(row, profile_of(event, method, neighbours, plan).epsilon(delta))


def delta(
    event: DpEvent, epsilon: float, method: str = "rdp", neighbours: str = "add-or-remove"
) -> float:
    """The delta that ``event`` costs at this epsilon, zero or more: the inverse of `epsilon`.

    The other arguments are as for `epsilon`, and the answer too is an `Estimate` if not proven.

    Example:
      >>> from dpjax import accounting
      >>> event = accounting.gaussian(3**0.5, steps=3)
      >>> round(accounting.delta(event, epsilon=1.0, method="pld"), 5)
      0.12694
    """
    epsilon = checks.not_negative("accounting.delta", "epsilon", epsilon)
    row = checked_method("accounting.delta", method)
    profile = profile_of(event, method, neighbours)
    if math.isinf(epsilon):  # conversions compute inf - inf
        bare = math.isinf(profile.epsilon(0.5))
        return _as(row, float(bare))
    return _as(row, profile.delta(epsilon))


def true_positive_rate(
    event: DpEvent,
    false_positive_rate: float,
    method: str | None = None,
    neighbours: str = "add-or-remove",
) -> float:
    r"""The largest share of true positives that any membership attack on ``event`` can have.

    An attacker who knows all examples but one decides whether that one is in the data. With
    $\alpha$ the share of false alarms and $\delta(\varepsilon)$ the privacy profile, it is at most

    $$ \min_{\varepsilon \ge 0} \min\{ e^\varepsilon \alpha + \delta(\varepsilon),
       1 - e^{-\varepsilon} (1 - \delta(\varepsilon) - \alpha) \} . $$

    Args:
      event: As for `epsilon`.
      false_positive_rate: The share of false alarms, in (0, 1).
      method: As for `epsilon`; by default `tightest`.
      neighbours: As for `epsilon`.

    Returns:
      A number from 0 to 1; an `Estimate` if the method is not proven. Every epsilon gives a bound,
      so the search can only be too high: by about 1e-5 of the rate.

    Example:
      >>> from dpjax import accounting
      >>> event = accounting.gaussian(1.0)
      >>> round(true_positive_rate(event, 0.01), 4)  # Phi(Phi^-1(0.01) + 1)
      0.0924

    References:
      Dong, Roth and Su, "Gaussian differential privacy", 2022, proposition 2.5.
    """
    call = "accounting.true_positive_rate"
    rate = checks.fraction(call, "false_positive_rate", false_positive_rate)
    row = checked_method(call, method or tightest(event, neighbours))
    return _as(row, most_true_positives(profile_of(event, row.name, neighbours), rate))


def true_positive_rates(
    event: DpEvent,
    false_positive_rates: Sequence[float],
    method: str,
    neighbours: str,
    plan: DpEvent | None = None,
) -> tuple[float, ...]:
    """As `true_positive_rate`, for several rates and by a method that is proven."""
    profile = profile_of(event, method, neighbours, plan)
    return tuple(most_true_positives(profile, rate) for rate in false_positive_rates)


def tightest(event: DpEvent, neighbours: str = "add-or-remove") -> str:
    """The method that proves the smallest epsilon of an event: "pld", or "rdp" where it has none.

    Example:
      >>> from dpjax import accounting
      >>> accounting.tightest(accounting.subsampled_gaussian(1.1, sampling_rate=0.01, steps=100))
      'pld'
    """
    parts = _allocation.known_bins(_checked_parts(event, neighbours, "pld"))
    if not parts.private or parts.empty:
        return "rdp"
    if not parts.foreign:
        return "pld"
    try:
        # RDP costs milliseconds. Only PLD can have a proof where RDP has none.
        epsilon(event, 0.5, "rdp", neighbours)
    except ValueError:
        return "pld"
    return "rdp"


def default_method(event: DpEvent, neighbours: str = "add-or-remove") -> str:
    """The method of a mechanism that names none: "rdp", or "pld" where RDP has no answer.

    RDP also has a far looser answer for random allocation: 9.86 where "pld" has 2.87.

    Example:
      >>> from dpjax import accounting
      >>> accounting.default_method(
      ...     accounting.subsampled_gaussian(1.1, sampling_rate=0.01, steps=100)
      ... )
      'rdp'
    """
    parts = split(event)
    allocated = any(isinstance(part, RandomAllocationDpEvent) for part, _ in parts.foreign)
    projected = _random_projections.steps_of(parts)
    exchanged = parts.sampled and neighbours == "replace-one"
    if allocated or projected or exchanged:
        return "pld"
    return "rdp"


def levels_of(plan: DpEvent) -> dict[str, float] | None:
    """How "pld" rounds the steps of a plan, for its card; None where it keeps all of them.

    The ``smallest`` multiplier is the first of the `levels`.

    Example:
      >>> from dpjax import accounting
      >>> levels_of(accounting.scheduled_gaussian([1 + t / 300 for t in range(300)], 0.01))
      {'levels': 256, 'smallest': 1.0}
    """
    sampled = split(plan).sampled
    count = level_count(sampled)
    if count == 0:
        return None
    return {"levels": count, "smallest": min(z for _, z in sampled)}


def profile_of(
    event: DpEvent, method: str, neighbours: str, plan: DpEvent | None = None
) -> Profile:
    """The profile of an event by a row of `METHODS`; arguments as for `epsilon`."""
    parts = _checked_parts(event, neighbours, method, plan)
    if not parts.private:
        return Profile(lambda delta: math.inf, lambda epsilon: 1.0)
    if parts.empty:
        return Profile(lambda delta: 0.0, lambda epsilon: 0.0)
    return METHODS[method].profile(parts, neighbours)


def checked_method(call: str, name: str) -> Method:
    """The row of `METHODS`."""
    return METHODS[checks.one_of(call, "method", name, METHODS)]


def _checked_parts(
    event: DpEvent, neighbours: str, method: str, plan: DpEvent | None = None
) -> Parts:
    """The parts of an event for a method, with steps rounded to `levels` for "pld"."""
    relation(neighbours)  # raises for an unknown name, even if the event is empty
    parts = split(event)
    # The time of PLD grows with the number of different steps.
    if method == "pld":
        planned = parts if plan is None else split(plan)
        parts = parts._replace(sampled=rounded(parts.sampled, plan=planned.sampled))
    # The Rényi divergence is infinite if a norm may be estimated too small by any factor.
    if method != "pld" and _random_projections.steps_of(parts):
        raise ValueError(
            f"accounting: method {method!r} has no answer for random projections. Use 'pld'."
        )
    return parts


def _as(row: Method, value: float) -> float:
    """A number of a method; an `Estimate`, which prints as one, if the method is not proven."""
    if row.proven:
        return float(value)
    return Estimate(value)

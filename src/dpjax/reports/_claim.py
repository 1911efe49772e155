# SPDX-License-Identifier: Apache-2.0
"""The claim of a mechanism, which statement, card and board put into words.

It holds the epsilon by each accountant, the smallest proven one, and bounds on attacks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from dpjax import accounting, checks
from dpjax._rounding import upwards
from dpjax.accounting.methods import true_positive_rates
from dpjax.ledger import Ledger, counted
from dpjax.mechanism import Mechanism, Spent
from dpjax.types import HeldOut

_FALSE_POSITIVES = (0.001, 0.01, 0.1)


class Claim(NamedTuple):
    """The claim of a mechanism, before it is put into words."""

    mechanism: Mechanism
    ran: np.ndarray  # the noise multiplier of every step that counts
    delta: float
    epsilons: dict[str, float]  # by every method that has an answer for this sampler
    not_private: str | None  # names a release without noise; None may still mean no proof
    supplied: bool  # whether the caller gave the key of this run, or of one before it
    proven: tuple[float, str]  # the smallest proven epsilon and its method, "" without one
    bounded_by: str  # the proven method that bounds attacks


def claim_of(
    call: str,
    mechanism: Mechanism,
    delta: float | None,
    ledger: Ledger | None = None,
    supplied: bool = False,
    methods: Sequence[str] | None = None,
) -> Claim:
    """The claim of a mechanism; arguments as in `dpjax.statement`, whose errors name ``call``."""
    checks.instance(call, "mechanism", mechanism, Mechanism, "Of a run: algorithm.mechanism.")
    stated_delta, _ = mechanism.stated(delta, method=None)  # as given, or else of its target
    delta = checks.delta(call, stated_delta)
    ran = mechanism.multipliers  # of all planned steps
    if ledger is not None:
        ran = counted(ledger, mechanism)  # of more than ran, if results chose the end
        supplied = supplied or bool(ledger.supplied)
    supplied = supplied or any(spent.supplied for spent in mechanism.before)
    for name in methods or ():
        checks.one_of(call, "methods", name, accounting.METHODS)
    used = tuple(name for name in accounting.METHODS if methods is None or name in methods)
    epsilons = dict(_epsilons(mechanism, tuple(ran.tolist()), delta, used))
    proven = [(e, name) for name, e in epsilons.items() if accounting.METHODS[name].proven]
    # The smallest of several upper bounds is an upper bound too, whichever method gives it.
    best = min(proven, default=(math.inf, ""))
    # Attacks are bounded by the trade-off curve of one method, usually the best one.
    _, bounded_by = best
    if mechanism.risk is not None:
        bounded_by = mechanism.risk.method  # the noise was chosen by its curve
    elif methods is not None and proven:
        # A run in progress names its methods. The first is "rdp", whose curve is fast; that of
        # "pld" takes seconds.
        _, bounded_by = proven[0]
    return Claim(
        mechanism=mechanism,
        ran=ran,
        delta=delta,
        epsilons=epsilons,
        not_private=_why_infinite(mechanism, ran),
        supplied=supplied,
        proven=best,
        bounded_by=bounded_by,
    )


# Statement and card of one run ask for the same numbers, which can take seconds.
@functools.lru_cache(maxsize=16)
def _epsilons(
    mechanism: Mechanism, multipliers: tuple[float, ...], delta: float, methods: tuple[str, ...]
) -> tuple[tuple[str, float], ...]:
    epsilons = []
    ran = np.array(multipliers, np.float64)
    for method in methods:
        try:
            epsilons.append((method, mechanism.epsilon_of(ran, delta, method)))
        except ValueError:  # the method proves nothing for this sampler and relation
            continue
    return tuple(epsilons)


def attacks(claim: Claim) -> tuple[tuple[float, float], ...]:
    """Pairs of a membership attack's rate of false positives, and its true positives at most."""
    rates = set(_FALSE_POSITIVES)
    if claim.mechanism.risk is not None:
        rates.add(claim.mechanism.risk.false_positive_rate)
    multipliers = tuple(claim.ran.tolist())
    return _attacks(claim.mechanism, multipliers, claim.bounded_by, tuple(sorted(rates)))


def risk_reached(claim: Claim) -> float:
    """The true positives that are proved at the rate of false ones that calibration was given."""
    assert claim.mechanism.risk is not None
    return dict(attacks(claim))[claim.mechanism.risk.false_positive_rate]


def percent(rate: float, rounded: Callable[[float, str], str] = upwards) -> str:
    """A rate in per cent: true positives rounded up, and false ones down, so both claim less."""
    # Round before multiplying: 100 * 0.07 is above 7.
    return f"{100 * float(rounded(rate, '.3g')):.3g} %"


@functools.lru_cache(maxsize=16)  # card and board ask for the same rates
def _attacks(
    mechanism: Mechanism,
    multipliers: tuple[float, ...],
    method: str,
    false_positive_rates: tuple[float, ...],
) -> tuple[tuple[float, float], ...]:
    if not method:
        return tuple((rate, 1.0) for rate in false_positive_rates)
    event = mechanism.event_of(np.array(multipliers, np.float64))
    plan = mechanism.event if method == "pld" else None
    rates = true_positive_rates(event, false_positive_rates, method, mechanism.relation, plan)
    return tuple(zip(false_positive_rates, rates, strict=True))


def not_covered(held_out: HeldOut | None, unit: str) -> list[str]:
    """The entry for the test data in the list of what no epsilon covers; none without such data."""
    if held_out is None:
        return []
    if held_out.public:
        return ["the test file, which was declared public: results on it have no noise"]
    if not held_out.units:  # nothing was held out
        return []
    noun = unit
    if held_out.units > 1:
        noun = f"{unit}s"
    held = f"the {held_out.units:,} {noun} held out for the test"
    return [f"{held}: results on them are published without noise"]


def _why_infinite(mechanism: Mechanism, ran: np.ndarray) -> str | None:
    """The first reason for an infinite epsilon, because one sentence is enough; None without any.

    ``ran`` are the noise multipliers of the steps that count.
    """
    if math.isinf(mechanism.clipping.sensitivity) and len(ran):  # a run without steps has no sum
        return f"The rule's bound is infinite: one {mechanism.unit} can move the sum by any amount."
    if not np.all(ran > 0):
        return "The noise multiplier is 0 at some step."
    if not all(mechanism.preparation):  # the multipliers of the queries
        return "A query before the first step had no noise."
    if any(map(_not_private, mechanism.before)):
        return "An earlier run on these data was not private, so no run that uses its result is."
    if mechanism.sampling.reveals_data:
        return mechanism.sampling.claim  # the sampler's own words on its batches
    return None


def _not_private(spent: Spent) -> bool:
    """Whether an earlier run had a step or a query without noise, or batches that reveal data."""
    multipliers = [multiplier for multiplier, _ in spent.runs]
    noise = [*multipliers, *spent.preparation]
    return not all(noise) or spent.sampling.reveals_data

# SPDX-License-Identifier: Apache-2.0
"""What is claimed for a computation, and the privacy card: the claim as a JSON object.

A reader can recompute its epsilon without dpjax, as `dpjax.verify` does: numbers are not rounded.

| field | holds |
|---|---|
| ``mechanism`` | the plan, as `dpjax.mechanism.card` describes it and ``run.json`` holds it |
| ``steps`` | how many planned steps count: the first ones, which ran; all, if results ended it |
| ``claim`` | in words, how batches are drawn and what is proved for them |
| ``delta``, ``epsilon`` | the value by each method, and whether the method proves a bound |
| ``true_positive_rates`` | pairs: a rate of false positives of an attack, of true ones at most |
| ``levels`` | to how many levels "pld" rounds many multipliers, and the smallest; or null |
| ``not_private`` | what was released without noise, in words, or null |
| ``randomness`` | ``"supplied"`` if the caller gave a key, also of an earlier run; or ``"fresh"`` |
| ``versions`` | the versions of the packages that ran and accounted |
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dpjax import accounting, checks
from dpjax._versions import version
from dpjax.accounting.methods import checked_delta, levels_of, profile_of
from dpjax.accounting.profiles import Profile, most_true_positives
from dpjax.ledger import Ledger, counted
from dpjax.mechanism import Mechanism, Spent
from dpjax.mechanism.card import randomness, strict
from dpjax.types import HeldOut, Sampler


def not_covered(held_out: HeldOut | None, unit: str) -> list[str]:
    """Names the test data first among what no epsilon covers, for statement and board."""
    if held_out is None:
        return []
    if held_out.public:
        return ["the test file, which was declared public: results on it have no noise"]
    if not held_out.units:
        return []
    units = unit if held_out.units == 1 else f"{unit}s"
    held = f"the {held_out.units:,} {units} held out for the test"
    return [f"{held}: results on them are published without noise"]


class Claim(NamedTuple):
    """What is claimed for a mechanism."""

    mechanism: Mechanism
    ran: np.ndarray  # the noise multiplier of every step that counts
    delta: float
    epsilons: dict[str, float]  # by every method that has an answer for this sampler
    not_private: str | None  # what was released without noise; None may still mean no proof
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
    delta = checked_delta(call, mechanism.stated(delta, None)[0])
    ran = mechanism.multipliers if ledger is None else counted(ledger, mechanism)
    for name in methods or ():
        checks.one_of(call, "methods", name, accounting.METHODS)
    asked = tuple(name for name in accounting.METHODS if methods is None or name in methods)
    epsilons = dict(_epsilons(mechanism, tuple(ran.tolist()), delta, asked))
    proven = [(e, name) for name, e in epsilons.items() if accounting.METHODS[name].proven]
    # The smallest of several upper bounds is one: methods are not chosen by looking at data.
    best = min(proven, default=(math.inf, ""))
    # A running run names its methods, "rdp" first, and has no second for the curve of "pld".
    _, bounded_by = best if methods is None or not proven else proven[0]
    supplied = supplied or (ledger is not None and bool(ledger.supplied))
    supplied = supplied or any(spent.supplied for spent in mechanism.before)
    why = _why_infinite(mechanism, ran)
    return Claim(mechanism, ran, delta, epsilons, why, supplied, best, bounded_by)


# Statement and card of one run ask for the same numbers, which can take seconds.
@functools.lru_cache(maxsize=16)
def _epsilons(
    mechanism: Mechanism, multipliers: tuple[float, ...], delta: float, methods: tuple[str, ...]
) -> tuple[tuple[str, float], ...]:
    epsilons, ran = [], np.array(multipliers, np.float64)
    for method in methods:
        try:
            epsilons.append((method, mechanism.epsilon_of(ran, delta, method)))
        except ValueError:  # this method proves nothing for this sampler and relation
            continue
    return tuple(epsilons)


def attacks(claim: Claim) -> tuple[tuple[float, float], ...]:
    """Of membership attacks: three rates of false positives, and of true ones at most."""
    return _attacks(claim.mechanism, tuple(claim.ran.tolist()), claim.bounded_by)


@functools.lru_cache(maxsize=16)  # for card and board
def _attacks(
    mechanism: Mechanism, multipliers: tuple[float, ...], method: str
) -> tuple[tuple[float, float], ...]:
    profile = Profile(lambda _: math.inf, lambda _: 1.0)
    if method:
        event = mechanism.event_of(np.array(multipliers, np.float64))
        plan = mechanism.event if method == "pld" else None
        profile = profile_of(event, method, mechanism.relation, plan)
    return tuple((rate, most_true_positives(profile, rate)) for rate in (0.001, 0.01, 0.1))


def _why_infinite(mechanism: Mechanism, ran: np.ndarray) -> str | None:
    # The first reason that holds: a reader can act on one sentence.
    if math.isinf(mechanism.clipping.sensitivity) and len(ran):
        return f"The rule's bound is infinite: one {mechanism.unit} can move the sum by any amount."
    if not np.all(ran > 0):
        return "The noise multiplier is 0 at some step."
    if not all(mechanism.preparation):
        return "A query before the first step had no noise."
    if any(map(_not_private, mechanism.before)):
        return "An earlier run on these data was not private, so no run that uses its result is."
    return mechanism.sampling.claim if _draws_reveal_data(mechanism.sampling) else None


def _not_private(spent: Spent) -> bool:
    noise = (*(multiplier for multiplier, _ in spent.runs), *spent.preparation)
    return not all(noise) or _draws_reveal_data(spent.sampling)


def _draws_reveal_data(sampling: Sampler) -> bool:
    """Whether the choice of examples is itself a release, which no noise protects."""
    return sampling.facts.get("event") == "none"


def card(mechanism: Mechanism, delta: float | None = None, **more: Any) -> dict[str, Any]:
    """The facts of a statement as a JSON object, from which epsilon can be recomputed.

    The arguments are as in `dpjax.statement`: ``more`` are ``ledger``, ``supplied``, ``methods``.

    Returns:
      An object for ``json.dumps``; an infinite number is the word ``"inf"``.

    Example:
      >>> import dpjax
      >>> mechanism = dpjax.Mechanism(
      ...     sampling=dpjax.sampling.full(examples=1000),
      ...     clipping=dpjax.clipping.flat(bound=1.0),
      ...     noise_multiplier=4.0,
      ...     steps=2,
      ... )
      >>> card(mechanism, delta=1e-5)["mechanism"]["multiplier_and_steps"]
      [[4.0, 2]]
    """
    claim = claim_of("reports.card", mechanism, delta, **more)
    facts = {
        "mechanism": mechanism.facts,
        "steps": len(claim.ran),
        "claim": mechanism.claim,
        "delta": claim.delta,
        "levels": levels_of(mechanism.event),
        "epsilon": {
            method: {"value": float(value), "proven": accounting.METHODS[method].proven}
            for method, value in claim.epsilons.items()
        },
        "true_positive_rates": attacks(claim),
        "not_private": claim.not_private,
        "randomness": randomness(claim.supplied),
        "versions": {
            name: version(name) for name in ("dpjax", "dp-accounting", "jax", "optax", "numpy")
        },
    }
    return strict(facts)

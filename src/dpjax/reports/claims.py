# SPDX-License-Identifier: Apache-2.0
"""What is claimed: the steps that count, their epsilon by every method, and what takes it away.

The statement and the card both print one `Claim`. Nothing is rounded here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dpjax import accounting, checks
from dpjax.accounting.methods import checked_delta
from dpjax.ledger import Ledger, counted
from dpjax.mechanism import Mechanism, Spent
from dpjax.types import Sampler


class Claim(NamedTuple):
    """What is claimed for a mechanism."""

    mechanism: Mechanism
    ran: np.ndarray
    """The noise multiplier of every step that counts, ``[steps]``."""
    delta: float
    epsilons: dict[str, float]
    """By every method that has an answer for this sampler."""
    not_private: str | None
    """What was released without protection, as a sentence, or None.

    With None, an infinite or missing epsilon means that nothing is proved, not that the
    computation is not private.
    """
    supplied: bool
    """Whether the caller supplied the key of this run, or of one before it."""


def claim_of(
    call: str,
    mechanism: Mechanism,
    delta: float | None,
    ledger: Ledger | None,
    supplied: bool,
    methods: Sequence[str] | None,
) -> Claim:
    """The claim of a mechanism.

    ``call`` is how errors call the function that states it. The other arguments are as in
    `dpjax.statement`.
    """
    checks.instance(call, "mechanism", mechanism, Mechanism, "Of a run: algorithm.mechanism.")
    delta = checked_delta(call, mechanism.stated(delta, None)[0])
    ran = mechanism.multipliers if ledger is None else counted(ledger, mechanism)
    epsilons = _epsilons(mechanism, tuple(ran.tolist()), delta, _asked(call, methods))
    supplied = supplied or (ledger is not None and bool(ledger.supplied))
    supplied = supplied or any(spent.supplied for spent in mechanism.before)
    return Claim(mechanism, ran, delta, dict(epsilons), _why_infinite(mechanism, ran), supplied)


def _asked(call: str, methods: Sequence[str] | None) -> tuple[str, ...]:
    """The names of methods, in the order of their table."""
    table = accounting.METHODS
    given = table if methods is None else methods
    names = [given] if isinstance(given, str) else list(given)
    for name in names:
        checks.one_of(call, "methods", name, table)
    return tuple(name for name in table if name in names)


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


def _why_infinite(mechanism: Mechanism, ran: np.ndarray) -> str | None:
    # The first reason that holds is named: a reader can act on one sentence.
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
    """Whether an earlier run released anything without noise."""
    noise = (*(multiplier for multiplier, _ in spent.runs), *spent.preparation)
    return not all(noise) or _draws_reveal_data(spent.sampling)


def _draws_reveal_data(sampling: Sampler) -> bool:
    """Whether the choice of examples is itself a release, which no noise protects."""
    return sampling.facts.get("event") == "none"

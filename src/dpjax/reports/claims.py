# SPDX-License-Identifier: Apache-2.0
"""What is claimed: the steps that count, their epsilon by every method, and what takes it away.

The statement and the card both print one `Claim`. Nothing is rounded here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import dp_accounting as dp
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
    seed: int | bool | None
    """The published seed; True for another below 2^32, or that of an earlier run; or None."""


def claim_of(
    call: str,
    mechanism: Mechanism,
    delta: float | None,
    ledger: Ledger | None,
    seed: int | None,
    methods: Sequence[str] | None,
) -> Claim:
    """The claim of a mechanism.

    ``call`` is how errors call the function that states it. The other arguments are as in
    `dpjax.statement`.

    Raises:
      ValueError: A name is no method, or none of ``methods`` proves a bound.
    """
    checks.instance(call, "mechanism", mechanism, Mechanism, "Of a run: algorithm.mechanism.")
    delta = checked_delta(call, mechanism.stated(delta, None)[0])
    ran = mechanism.multipliers if ledger is None else counted(ledger, mechanism)
    found = _epsilons(mechanism, tuple(ran.tolist()), delta, _asked(call, methods))
    why, published = _why_infinite(mechanism, ran), _published_seed(seed, ledger, mechanism)
    return Claim(mechanism, ran, delta, dict(found), why, published)


def _asked(call: str, methods: Sequence[str] | None) -> tuple[str, ...]:
    """The names of methods, in the order of their table."""
    given = accounting.METHODS if methods is None else methods
    names = [given] if isinstance(given, str) else list(given)
    table, hint = accounting.METHODS, "Leave methods out for all that have an answer."
    rows = [table[checks.one_of(call, "methods", name, table, hint)] for name in names]
    # Without a bound a statement would say that nothing is proved, whatever other methods prove.
    if not any(row.proven for row in rows):
        bounds = ", ".join(name for name, row in table.items() if row.proven)
        raise ValueError(
            f"{call}(methods={methods!r}): expected a method that proves a bound: one of "
            f"{bounds}. gdp is an estimate. Add one of these, or leave methods out."
        )
    return tuple(name for name in table if name in names)


# Statement and card of one run ask for the same numbers, which can take seconds.
@functools.lru_cache(maxsize=16)
def _epsilons(
    mechanism: Mechanism, multipliers: tuple[float, ...], delta: float, methods: tuple[str, ...]
) -> tuple[tuple[str, float], ...]:
    event, found = mechanism.event_of(np.array(multipliers, np.float64)), []
    for method in methods:
        try:
            value = accounting.epsilon(event, delta, method, mechanism.relation)
        except ValueError:  # this method proves nothing for this sampler and relation
            continue
        found.append((method, value))
    return tuple(found)


def _published_seed(
    seed: int | None, ledger: Ledger | None, mechanism: Mechanism
) -> int | bool | None:
    small = ledger is not None and bool(ledger.supplied)
    # A run that starts from what such a run released shows it, whatever its own key.
    small = small or any(spent.seeded for spent in mechanism.before)
    return seed if seed is not None else (small or None)


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
    """Whether the choice of examples is itself a release, whatever the noise."""
    # An order that was computed from private data is a release of its own, which no noise protects.
    return isinstance(sampling.event(np.ones(1)), dp.NonPrivateDpEvent)

# SPDX-License-Identifier: Apache-2.0
"""The multipliers of the steps that count, and their epsilon by every method.

The statement and the card both call these functions, so their numbers are equal. Nothing is
rounded here.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from dpjax import accounting
from dpjax.accounting.methods import checked_delta, checked_method
from dpjax.ledger import Ledger, counted
from dpjax.mechanism import Mechanism


def multipliers(mechanism: Mechanism, ledger: Ledger | None) -> np.ndarray:
    """The noise multiplier of every step that counts; without a ledger, of all planned ones."""
    return mechanism.multipliers if ledger is None else counted(ledger, mechanism)


def epsilons(
    mechanism: Mechanism,
    multipliers: np.ndarray,
    delta: float,
    methods: Sequence[str] | None = None,
) -> tuple[tuple[str, float], ...]:
    """Epsilon by every method, or by those asked for, that has an answer for this sampler.

    Raises:
      ValueError: A name is no method, or none of ``methods`` proves a bound.
    """
    given = accounting.METHODS if methods is None else methods
    names = [given] if isinstance(given, str) else list(given)
    rows = [checked_method("dpjax.statement", name) for name in names]
    # Without a bound a statement would say that nothing is proved, whatever other methods prove.
    if not any(row.proven for row in rows):
        bounds = ", ".join(name for name, row in accounting.METHODS.items() if row.proven)
        raise ValueError(
            f"dpjax.statement(methods={methods!r}): expected a method that proves a bound: one of "
            f"{bounds}. gdp is an estimate. Add one of these, or leave methods out."
        )
    asked = tuple(name for name in accounting.METHODS if name in names)
    return _epsilons(mechanism, tuple(multipliers.tolist()), delta, asked)


# Statement and card of one run ask for the same numbers, which can take seconds.
@functools.lru_cache(maxsize=16)
def _epsilons(
    mechanism: Mechanism, multipliers: tuple[float, ...], delta: float, methods: tuple[str, ...]
) -> tuple[tuple[str, float], ...]:
    # Before the loop, which takes a ValueError for "no answer".
    checked_delta("dpjax.statement", delta)
    event, found = mechanism.event_of(np.array(multipliers, np.float64)), []
    for method in methods:
        try:
            value = accounting.epsilon(event, delta, method, mechanism.relation)
        except ValueError:  # this method proves nothing for this sampler and relation
            continue
        found.append((method, value))
    return tuple(found)

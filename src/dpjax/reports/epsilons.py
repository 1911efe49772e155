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
from dpjax.accounting.methods import checked_delta
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
    """Epsilon by every method that has an answer for this sampler and relation."""
    asked = tuple(m for m in accounting.METHODS if methods is None or m in methods)
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

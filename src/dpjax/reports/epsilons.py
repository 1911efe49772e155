# SPDX-License-Identifier: Apache-2.0
"""The multipliers of the steps that ran, and their epsilon by every method.

The statement and the card both call these functions, so their numbers are equal. Nothing is
rounded here.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dpjax import accounting
from dpjax.ledger import Ledger, ran
from dpjax.mechanism import Mechanism


def multipliers(mechanism: Mechanism, ledger: Ledger | None) -> np.ndarray:
    """The noise multiplier of every step that ran; without a ledger, of all that are planned."""
    return mechanism.multipliers if ledger is None else ran(ledger, mechanism)


def epsilons(
    mechanism: Mechanism, multipliers: np.ndarray, delta: float
) -> Iterator[tuple[str, float]]:
    """Epsilon by every method that has an answer for this sampler and relation."""
    # An invalid delta raises here; the loop below takes a ValueError for "no answer".
    accounting.epsilon(accounting.compose(), delta)
    event = mechanism.event_of(multipliers)
    for method in accounting.METHODS:
        try:
            value = accounting.epsilon(event, delta, method, mechanism.relation)
        except ValueError:  # this method proves nothing for this sampler and relation
            continue
        yield method, value

# SPDX-License-Identifier: Apache-2.0
"""Filters: no choice of events gets more than the budget through, and none that fits is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mutation import kills
from small_mechanisms import mechanism_with

from dpjax import accounting, checks, ledger
from dpjax.accounting import Filter

RATE = 256 / 60_000
GOLDEN = [(3.0, 7.3, 1.635412, 18338), (2.0, 9.8, 1.058705, 8642), (1.0, 12.0, 0.266282, 1709)]


@kills(
    "accounting/rdp_accountant.py",
    "epsilon - np.log1p(-1 / orders) + (math.log(delta) + np.log(orders)) / (orders - 1)",
    "epsilon - np.log1p(-1 / orders) + np.log(orders) / (orders - 1)",
    case="2.0-9.8-1.058705-8642",
)
@pytest.mark.parametrize(("epsilon", "order", "limit", "steps"), GOLDEN)
def test_at_the_best_order_it_lets_as_much_through_as_the_ledger(epsilon, order, limit, steps):
    step = accounting.subsampled_gaussian(1.1, RATE, 1)
    assert accounting.best_order(step, epsilon, 1e-5) == order
    budget = Filter(epsilon=epsilon, delta=1e-5, order=order)
    assert budget.limit == pytest.approx(limit, abs=1e-6)
    mechanism = mechanism_with(60_000, 256, noise_multiplier=1.1, steps=20_000)
    fits = ledger.affordable(mechanism, ledger.Budget(epsilon=epsilon, delta=1e-5))
    assert budget.room(1.1, RATE) == fits == steps


def test_step_by_step_the_last_one_that_fits_is_the_last_one():
    budget, rate, multiplier = Filter(epsilon=1.0, delta=1e-5, order=12.0), 0.02, 1.5
    fits = budget.room(multiplier, rate)
    assert 50 < fits < 2000
    for _ in range(fits):
        budget = budget.admit(multiplier, rate)
    assert (budget.steps, budget.room(multiplier, rate)) == (fits, 0)
    with pytest.raises(checks.Refused, match=f"0 such steps fit after the {fits} that ran"):
        budget.admit(multiplier, rate)
    with pytest.raises(ledger.Refused):
        budget.admit(multiplier, rate)


choices = st.lists(
    st.tuples(st.floats(0.5, 8.0), st.sampled_from([0.001, 0.02, 0.3, 1.0]), st.integers(1, 50)),
    min_size=1,
    max_size=12,
)


# By order, an epsilon into which something fits at delta 1e-5.
FITS = {2.0: 10.2, 7.3: 1.4, 12.0: 0.8, 32.0: 0.3}


@given(choices, st.sampled_from(sorted(FITS)), st.floats(0.0, 10.0))
def test_nothing_that_exceeds_gets_through(choices, order, more):
    epsilon, delta = FITS[order] + more, 1e-5
    budget, ran = Filter(epsilon=epsilon, delta=delta, order=order), []
    for multiplier, rate, steps in choices:
        try:
            budget = budget.admit(multiplier, rate, steps=steps)
            ran.append(accounting.subsampled_gaussian(multiplier, rate, steps))
        except checks.Refused:
            after = sum(r @ n for r, n in [(np.array([budget.cost(multiplier, rate)]), [steps])])
            assert budget.spent + after > budget.limit * (1 - 1e-12), "it would have fitted"
    assert budget.spent <= budget.limit
    assert accounting.epsilon(accounting.compose(*ran), delta) <= epsilon * (1 + 1e-12)


def test_what_no_theorem_covers_is_refused():
    for order in (1.0, np.inf):
        with pytest.raises(ValueError, match=r"order - 1=.*finite number above 0.*best_order"):
            Filter(epsilon=1.0, delta=1e-5, order=order)
    with pytest.raises(ValueError, match="at no order"):
        accounting.best_order(accounting.compose(), 1.0, 1e-5)

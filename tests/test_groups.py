# SPDX-License-Identifier: Apache-2.0
"""Users with several records: recomputed figures, one step by quadrature, and the laws between."""

import math

import dp_accounting
import pytest
from mutation import kills
from scipy import stats
from scipy.integrate import quad
from small_mechanisms import mechanism_with

from dpjax import accounting, sampling

STEP = accounting.subsampled_gaussian(1.0, 0.01, 200)


@pytest.mark.sample(1)
@kills("accounting/_user_level.py", "drawn, records,", "drawn, 1,", case="2-1.9466", slow=True)
@pytest.mark.parametrize(("records", "expected"), [(1, 0.9125), (2, 1.9466), (4, 4.1482)])
def test_what_users_pay(records, expected):
    got = accounting.epsilon_for_users(STEP, 1e-5, records)
    assert got == pytest.approx(expected, rel=0.002)


def lost(rate, multiplier, records, epsilon):
    """Delta of one step by quadrature, the user leaving and joining."""

    def one(x):
        odds = stats.binom.pmf(range(records + 1), records, rate)
        return odds @ stats.norm.pdf(x, range(records + 1), multiplier)

    def none(x):
        return stats.norm.pdf(x, 0, multiplier)

    ends = {"limit": 2000, "points": (0, 1, records)}
    low, high = -12 * multiplier, records + 12 * multiplier
    scale = math.exp(epsilon)
    joins = quad(lambda x: max(0.0, one(x) - scale * none(x)), low, high, **ends)[0]
    leaves = quad(lambda x: max(0.0, none(x) - scale * one(x)), low, high, **ends)[0]
    return max(joins, leaves)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rate", "multiplier", "records", "epsilon"), [(0.1, 1.0, 3, 0.5), (0.05, 1.0, 4, 1.0)]
)
def test_one_step_is_the_mixture_that_it_should_be(rate, multiplier, records, epsilon):
    step = accounting.subsampled_gaussian(multiplier, rate, 1)
    event = accounting.for_groups(step, records=records)
    expected = lost(rate, multiplier, records, epsilon)
    got = accounting.delta(event, epsilon, "pld")
    assert expected <= got * (1 + 1e-6), "an upper bound"
    assert got == pytest.approx(expected, rel=0.01)


@kills("accounting/_user_level.py", "unsampled_multiplier / records", "unsampled_multiplier")
def test_without_sampling_all_records_are_always_there():
    event = accounting.for_groups(accounting.gaussian(6.0, steps=4), records=3)
    assert event == accounting.gaussian(1.0)


def test_one_record_is_what_it_was():
    assert accounting.for_groups(STEP, 1) is STEP
    shuffled = dp_accounting.SampledWithoutReplacementDpEvent(100, 10, accounting.gaussian(1.0))
    assert accounting.for_groups(shuffled, 1) is shuffled


@pytest.mark.slow
def test_more_records_cost_more_and_less_than_all_of_them_always():
    step = accounting.subsampled_gaussian(1.0, 0.1, 10)
    costs = [accounting.epsilon_for_users(step, 1e-5, records) for records in (1, 2, 3)]
    assert costs[0] < costs[1] < costs[2]
    for records, cost in enumerate(costs, 1):
        assert cost < accounting.epsilon(accounting.gaussian(1 / records, 10), 1e-5, "pld")


def test_what_is_bare_stays_bare_and_nothing_stays_nothing():
    bare = accounting.subsampled_gaussian(0.0, 0.1, 3)
    assert accounting.epsilon_for_users(bare, 1e-5, 2) == math.inf
    assert accounting.epsilon_for_users(accounting.compose(), 1e-5, 2) == 0


@pytest.mark.parametrize(
    ("records", "rate", "multiplier", "steps"), [(20, 0.3, 0.5, 100_000), (2, 0.3, 0.02, 10_000)]
)
def test_large_losses_get_a_coarse_grid_and_not_all_memory(records, rate, multiplier, steps):
    event = accounting.subsampled_gaussian(multiplier, rate, steps)
    assert 1000 < accounting.epsilon_for_users(event, 1e-5, records) < math.inf


def test_a_mixture_that_the_accountant_cannot_bound_has_no_guarantee():
    event = accounting.subsampled_gaussian(1.0, 0.5, 1)
    assert accounting.epsilon_for_users(event, 1e-5, 50) == math.inf
    # What the caller got wrong is still said.
    with pytest.raises(ValueError, match=r"^accounting\.epsilon_for_users\(delta=2\.0\)"):
        accounting.epsilon_for_users(event, 2.0, 50)
    with pytest.raises(ValueError, match="expected one of add-or-remove"):
        accounting.epsilon_for_users(event, 1e-5, 50, "another")


def test_what_has_no_proof_is_refused():
    fixed = mechanism_with(sampling=sampling.fixed(100, 10), steps=5)
    with pytest.raises(ValueError, match=r"Sample with sampling\.poisson"):
        accounting.for_groups(fixed.event, 2)
    with pytest.raises(ValueError, match="Use 'add-or-remove'"):
        accounting.epsilon_for_users(STEP, 1e-5, 2, "replace-one")
    with pytest.raises(ValueError, match="method='pld' has one"):
        accounting.epsilon(accounting.for_groups(STEP, 2), 1e-5, "rdp")

# SPDX-License-Identifier: Apache-2.0
"""The ledger: what is written down, what fits, what is refused."""

import dataclasses

import jax
import numpy as np
import pytest
from mutation import kills
from small_mechanisms import mechanism_with

import dpjax
from dpjax import clipping, ledger, sampling


def make(multiplier=1.1, steps=14_063):
    return mechanism_with(60_000, 256, noise_multiplier=multiplier, steps=steps)


def walk(mechanism, steps, budget=None):
    book = ledger.empty()
    for _ in range(steps):
        book = ledger.admit(book, mechanism, budget)
    return book


@pytest.mark.parametrize(("epsilon", "last"), [(1.0, 1709), (2.0, 8642), (3.0, 18_338)])
def test_the_last_step_that_fits(epsilon, last):
    budget = ledger.Budget(epsilon=epsilon, delta=1e-5)
    fits = ledger.affordable(make(steps=25_000), budget)
    assert fits == pytest.approx(last, rel=0.003)


@pytest.mark.promotes
def test_equal_steps_share_a_row_and_order_is_kept():
    book = walk(make(lambda t: 3.0 - t // 2, steps=6), 5)
    np.testing.assert_array_equal(book.multipliers, [3.0, 2.0, 1.0])
    np.testing.assert_array_equal(book.counts, [2, 2, 1])
    np.testing.assert_array_equal(book.expand(), [3, 3, 2, 2, 1])
    assert book.steps == 5


@kills(
    "schedules.py",
    "np.diff(starts, append=len(multipliers))",
    "np.ones(len(starts), np.int64)",
)
def test_what_ran_costs_what_was_planned_and_less_if_it_stopped():
    mechanism = make(steps=30)
    full, half = walk(mechanism, 30), walk(mechanism, 15)
    assert ledger.epsilon(full, mechanism, 1e-5) == mechanism.epsilon(1e-5)
    assert 0 < ledger.epsilon(half, mechanism, 1e-5) < mechanism.epsilon(1e-5)
    assert ledger.epsilon(ledger.empty(), mechanism, 1e-5) == 0.0


def test_a_budget_admits_what_was_calibrated_for_it():
    mechanism = mechanism_with(sampling=sampling.full(50), steps=8).calibrate(4.0, 1e-3)
    assert mechanism.target.method == "pld", "which is less than RDP"
    book = ledger.admit(ledger.empty(), mechanism, ledger.Budget(epsilon=4.0, delta=1e-3), steps=8)
    assert ledger.epsilon(book, mechanism) == mechanism.epsilon() <= 4.0
    with pytest.raises(TypeError, match="delta is missing"):
        ledger.epsilon(ledger.empty(), make())


@kills("ledger.py", "if done + steps > planned:", "if done + steps > planned + 1:", slow=True)
def test_the_step_after_the_last_is_refused():
    mechanism = make(steps=3)
    with pytest.raises(ledger.Refused, match="step 4 of 3 planned steps"):
        ledger.admit(walk(mechanism, 3), mechanism)


@kills("ledger.py", "reached > fits:", "reached > fits + 1:")
@kills("ledger.py", "method) <= epsilon", "method) <= 1.001 * epsilon", slow=True)
@pytest.mark.promotes
def test_the_step_that_would_pass_the_budget_is_refused_in_words():
    mechanism = make(lambda t: 1.0 + 0 * t, steps=1000)
    budget = ledger.Budget(epsilon=1.0, delta=1e-5)
    fits = ledger.affordable(mechanism, budget)
    assert mechanism.epsilon_of(mechanism.multipliers[:fits], 1e-5) <= 1.0
    assert mechanism.epsilon_of(mechanism.multipliers[: fits + 1], 1e-5) > 1.0
    book = walk(mechanism, fits, budget)
    with pytest.raises(ledger.Refused, match=rf"the budget is 1 \(rdp\). {fits} of 1000 steps fit"):
        ledger.admit(book, mechanism, budget)
    with pytest.raises(ledger.Refused, match="these 1000 steps would bring epsilon"):
        ledger.require(ledger.empty(), mechanism, 1000, budget)


def test_a_ledger_of_another_mechanism_is_refused():
    book = walk(make(2.0, steps=5), 2)
    with pytest.raises(ledger.Refused, match="not the first of"):
        ledger.admit(book, make(1.0, steps=5))
    with pytest.raises(ledger.Refused, match=r"not the first of 1 "):
        ledger.epsilon(book, make(2.0, steps=1), 1e-5)


OTHERS = {
    "another rate": {"sampling": sampling.poisson(60_000, 2)},
    "without its queries": {"preparation": ()},
    "without what was spent before": {"before": ()},
    "a bound": {"clipping": clipping.flat(1.0)},
    "exact norms": {"clipping": clipping.jl(1.0, 30)},
    "clients": {"unit": "client"},
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_ledger_has_no_cost_under_another_mechanism(name):
    """A state that is handed to another mechanism with the same noise is not made cheaper."""
    own = dataclasses.replace(
        make(0.0 if name == "a bound" else 1.1, steps=5),
        preparation=() if name == "clients" else (9.0,),
        before=() if name == "clients" else (make(2.0, steps=3).spent(np.full(3, 2.0)),),
        clipping=clipping.flat(np.inf if name == "a bound" else 1.0),
    )
    book, other = walk(own, 2), dataclasses.replace(own, **OTHERS[name])
    for ask in (
        lambda: ledger.admit(book, other),
        lambda: ledger.epsilon(book, other, 1e-5),
        lambda: dpjax.statement(other, 1e-5, ledger=book),
    ):
        with pytest.raises(ledger.Refused, match="ran under another mechanism"):
            ask()


def test_steps_are_of_the_bins_that_drew_them():
    """Samplers of one name and one price may draw others."""
    options = {"rates": [[0.1, 0.1]], "steps_per_row": 5, "batch_size": 2}
    one, other = (
        mechanism_with(sampling=sampling.scored(bins, **options), steps=5)
        for bins in (np.arange(10) % 2, np.arange(10) // 5)
    )
    with pytest.raises(ledger.Refused, match="ran under another mechanism"):
        ledger.admit(walk(one, 2), other)


def test_a_ledger_that_was_on_a_device_is_the_same():
    mechanism = make(steps=5)
    book = jax.device_put(walk(mechanism, 2))
    assert book.multipliers.dtype == np.float32
    assert ledger.epsilon(book, mechanism, 1e-5) == mechanism.epsilon_of(np.full(2, 1.1), 1e-5)
    assert ledger.admit(book, mechanism).expand().tolist() == [1.1] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"epsilon": 0.0, "delta": 1e-5},
            r"^ledger\.Budget\(epsilon=0.0\): expected a number above 0\. At 0",
        ),
        (
            {"epsilon": 1.0, "delta": 1.0},
            r"^ledger\.Budget\(delta=1.0\): expected a number between",
        ),
        ({"epsilon": 1.0, "delta": 1e-5, "method": "gdp"}, r"^ledger\.Budget\(.*not proven"),
    ],
)
def test_budgets_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ledger.Budget(**options)


@kills(
    "ledger.py",
    "max(int(ledger.chosen), affordable(mechanism, budget), least)",
    "max(int(ledger.chosen), affordable(mechanism, budget))",
    slow=True,
)
def test_a_smaller_budget_takes_back_no_step_that_was_allowed():
    """A run that results ended counts all steps that could have run, however it continues."""
    mechanism, small = make(steps=2000), ledger.Budget(epsilon=1.0, delta=1e-5)
    fits = ledger.affordable(mechanism, small)
    assert 10 < fits < 1900
    book = ledger.admit(ledger.empty(), mechanism, steps=10)
    assert ledger.ended(book, mechanism, small).chosen == fits
    assert ledger.ended(book, mechanism, small, least=1900).chosen == 1900
    assert ledger.ended(ledger.ended(book, mechanism), mechanism, small).chosen == 2000


KILLS = {
    "test_a_ledger_has_no_cost_under_another_mechanism": [
        kills(
            "mechanism/card.py", '"sampling", "preparation",', '"preparation",', case="another rate"
        ),
        kills(
            "mechanism/card.py",
            '        "clipped": math.isfinite(mechanism.clipping.sensitivity),\n',
            "",
            case="a bound",
        ),
        kills(
            "mechanism/card.py", '("unit", "sampling",', '("sampling",', case="clients", slow=True
        ),
    ],
}

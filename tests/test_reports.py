# SPDX-License-Identifier: Apache-2.0
"""The statement and the card: every fact in them, and none that does not hold."""

import dataclasses
import json
import math
import re
import xml.etree.ElementTree as ET

import jax.numpy as jnp
import numpy as np
import pytest
from html_pages import text
from mutation import kills
from small_mechanisms import mechanism_with

import dpjax
from dpjax import clipping, ledger, reports, sampling, schedules, strategies, verify
from dpjax._rounding import three_digits
from dpjax.mechanism import Spent
from dpjax.types import HeldOut

FIXED_BEFORE = Spent(sampling=sampling.fixed(1000, 10), runs=((1.0, 5),))


def make(**changes):
    facts = {"clipping": clipping.flat(2.0), "noise_multiplier": 1.1, "steps": 14_063, **changes}
    return mechanism_with(60_000, 256, **facts)


def test_the_statement_says_all_that_a_reader_must_know():
    words = dpjax.statement(make(), 1e-5)
    for fact in (
        "one example",
        "add-or-remove",
        "256 of 60,000 examples a step (rate 0.00427)",
        "one example moves the sum by at most 2",
        "multiplier 1.1 x sensitivity",
        "standard deviation 0.008594 on the mean",
        "steps         14,063",
        "delta         1e-05",
        "2.60   rdp",
        "3.01   rdp-classic",
        "2.39   pld",
        "an estimate, not a bound",
        "Not covered",
        "hyper-parameters",
        "@inproceedings{abadi2016deep",
    ):
        assert fact in words, fact
    assert "(2.39, 1e-05)-differentially private, as proved by PLD." in words
    assert "NOT" not in words
    assert "supplied" not in words


def test_the_paragraph_for_a_paper_names_mechanism_sampling_epsilon_and_accountant():
    spent = Spent(sampling=sampling.poisson(1000, 10), runs=((1.0, 5),))
    earlier = {"before": (spent,), "preparation": (8.0, 8.0)}
    for changes, facts in (
        (
            {},
            (
                "with Poisson sampling of 256 of 60,000",
                "per-example clipping (flat, sensitivity 2)",
            ),
        ),
        (
            {},
            ("multiplier 1.1. This is (2.39, 1e-05)-", "(add-or-remove), by the PLD acc", "jax 0"),
        ),
        (earlier, ("Together with 5 steps of an earlier run and 2 Gaussian queries on all the",)),
    ):
        words = " ".join(dpjax.statement(make(**changes), 1e-5).split())
        for fact in facts:
            assert fact in words.partition("in a paper")[2], fact
    assert "in a paper" not in dpjax.statement(make(noise_multiplier=0.0), 1e-5)


def test_no_verdict_claims_less_than_is_proved():
    mechanism = make(sampling=sampling.poisson(1000, 10), noise_multiplier=1.02, steps=100)
    verdict = dpjax.statement(mechanism, 1e-5).splitlines()[2]
    claimed = float(verdict.strip(" (").split(",")[0])
    proved = mechanism.epsilon(1e-5, "pld")
    assert proved <= claimed < 1.01 * proved


def test_the_statement_of_what_ran():
    mechanism = make(steps=10)
    book = ledger.empty()
    for _ in range(4):
        book = ledger.admit(book, mechanism)
    words = dpjax.statement(mechanism, 1e-5, ledger=book)
    assert "steps         4 (of 10 planned)" in words
    assert f"{three_digits(ledger.epsilon(book, mechanism, 1e-5)):>8}   rdp" in words
    for call in (dpjax.statement, reports.card):
        with pytest.raises(ValueError, match=r"'pdl'.*expected one of rdp, "):
            call(mechanism, 1e-5, methods=["pdl"])


def test_the_statement_cites_what_was_used():
    grouped = dpjax.statement(make(clipping=clipping.grouped(1.0, 4), steps=20), 1e-5)
    assert all(key in grouped for key in ("abadi2016", "mironov2017", "doroshenko2022", "liu2021"))
    assert "liu2021" not in dpjax.statement(make(steps=20), 1e-5)
    fixed = dpjax.statement(make(sampling=sampling.fixed(10_000, 100), steps=20), 1e-5)
    assert "replace-one" in fixed
    assert "moves the sum by at most 2, a replacement by twice that\n" in fixed
    assert "doroshenko2022" not in fixed
    assert "pld:" not in fixed


@kills("reports/_claim.py", "any(spent.supplied for spent in mechanism.before)", "False", slow=True)
def test_a_supplied_key_is_said_of_this_run_and_of_those_before_it():
    said = "epsilon holds against those who do not know the key, for one run per key."
    plan, spent = make(steps=5), make(steps=5).spent(np.ones(5))
    book = ledger.admit(ledger.empty(supplied=True), plan)
    later = make(steps=5, before=[dataclasses.replace(spent, supplied=True)])
    for mechanism, options in ((plan, {"supplied": True}), (plan, {"ledger": book}), (later, {})):
        assert said in dpjax.statement(mechanism, 1e-5, methods=["rdp"], **options)
        card = reports.card(mechanism, 1e-5, methods=["rdp"], **options)
        assert card["randomness"] == "supplied"
    card = reports.card(make(before=[spent]), 1e-5, methods=["rdp"])
    assert card["randomness"] == card["mechanism"]["before"][0]["randomness"] == "fresh"


PRIVATE_ORDER = sampling.curriculum(np.arange(100), 10)


def before(*noise, sampler=None, preparation=()):
    """What an earlier run has spent, a step for each multiplier."""
    sampler, runs = sampler or sampling.poisson(60_000, 256), tuple((z, 1) for z in noise)
    spent = Spent(sampling=sampler, runs=runs, preparation=preparation)
    return {"before": [spent], "neighbours": "zero-out"}


@kills("reports/_claim.py", "if any(map(_not_private, mechanism.before))", "if False", slow=True)
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"noise_multiplier": 0.0}, "The noise multiplier is 0"),
        ({"noise_multiplier": 0.0, "clipping": clipping.flat(math.inf)}, "bound is infinite"),
        ({"sampling": PRIVATE_ORDER}, "the order comes from"),
        (before(1.0, 0.0), "An earlier run on these data was not private"),
        (before(1.0, preparation=(0.0,)), "An earlier run on these data was not private"),
        (before(1.0, sampler=PRIVATE_ORDER), "An earlier run on these data was not private"),
    ],
    ids=["no noise", "no bound", "order", "earlier step", "earlier query", "earlier order"],
)
def test_what_is_not_private_is_said_not_to_be(changes, why):
    words = dpjax.statement(make(**{"steps": 20, **changes}), 1e-5)
    assert "NOT differentially private (epsilon is infinite)" in words
    assert why in words.split("unit ")[0]


@pytest.mark.parametrize(
    ("changes", "epsilons", "why"),
    [
        ({}, [], "No method proves a number for the whole"),
        ({"clipping": clipping.jl(1.0, 2)}, [("pld", math.inf)], "Take more random projections"),
        ({}, [("pld", math.inf)], "Usually the noise is far too small."),
    ],
    ids=["none", "estimated", "loud"],
)
def test_what_is_not_proved_is_not_said_to_be_infinite(monkeypatch, changes, epsilons, why):
    monkeypatch.setattr("dpjax.reports._claim._epsilons", lambda *_: epsilons)
    words = dpjax.statement(make(steps=100, **changes), 1e-5)
    assert "NOT PROVED to be differentially private" in words
    assert why in words
    assert "infinite" not in words


def test_shuffled_batches_show_both_numbers():
    shuffled = sampling.shuffled(60_000, 600)
    words = dpjax.statement(make(sampling=shuffled, noise_multiplier=1.38, steps=2000), 1e-5)
    assert "zero-out" in words
    assert "18.5   pld" in words
    assert "as if Poisson" in words
    assert "It does not hold" in words
    # An earlier run by another sampler leaves no figure to compare with.
    facts = {"sampling": shuffled, "before": [FIXED_BEFORE], "neighbours": "replace-one"}
    assert "as if Poisson" not in dpjax.statement(make(steps=3, **facts), 1e-5, methods=["rdp"])
    bins = sampling.balls_in_bins(1000, 300)  # sums are divided by 300, and bins are larger
    words = dpjax.statement(make(sampling=bins, steps=3), 1e-5)
    assert "balls_in_bins: 333.333 of 1,000 examples a step (rate 0.333)" in words


def test_a_schedule_is_described():
    schedule = schedules.CURRICULA["linear-down"](epochs=5, steps_per_epoch=2)
    words = dpjax.statement(make(noise_multiplier=schedule, steps=10), 1e-5, methods=["rdp"])
    assert "5 to 1 (5 values, by a schedule)" in words
    turning = make(noise_multiplier=schedules.table([2.0, 0.5, 2.0]), steps=3)
    words = dpjax.statement(turning, 1e-5, methods=["rdp"])
    assert "multiplier 2 to 2, between 0.5 and 2 (2 values, by a schedule)" in words


def test_what_scales_the_noise_beside_the_mechanism_is_said_of_its_run_alone():
    small = make(sampling=sampling.poisson(1000, 10), noise_multiplier=2.0, steps=5)
    assert "alike" not in dpjax.statement(small, 1e-5)
    words = dpjax.statement(small, 1e-5, scaled_by="a bound schedule")
    assert (
        "on the mean\n                before a bound schedule, which scales sum and noise alike\n"
    ) in words


def test_the_statement_of_a_run_that_stopped_early_says_what_a_choice_costs():
    mechanism = make(steps=10)
    chosen = "if results chose where to stop, all planned steps count"
    for ran in (4, 10):
        book = ledger.admit(ledger.empty(), mechanism, steps=ran)
        assert (chosen in dpjax.statement(mechanism, 1e-5, ledger=book)) == (ran < 10)
    assert chosen not in dpjax.statement(mechanism, 1e-5)


@pytest.mark.parametrize(
    "mechanism",
    [
        make(steps=5),
        make(steps=5, sampling=sampling.shuffled(60_000, 256)),
        make(steps=5, unit="client", adaptive=clipping.Quantile(count_multiplier=9)),
    ],
    ids=["proved", "as if Poisson", "adapted"],
)
def test_a_notebook_shows_all_words_of_a_statement_and_no_others(mechanism):
    words = dpjax.statement(mechanism, 1e-5, ledger=ledger.empty(), supplied=True)
    shown = text(ET.fromstring(f"<div>{words._repr_html_()}</div>"))
    bare = re.sub(r"^  - ", "", words, flags=re.MULTILINE).replace("References", FOLDED)
    bare = bare.replace("1e-05", "10\N{MINUS SIGN}5")
    assert "".join(shown.split()) == "".join(bare.split())
    assert repr(words) == words
    assert json.loads(json.dumps(words)) == words


@kills("reports/_claim.py", "rounded(rate, '.3g')", "f'{rate:.3g}'")
@pytest.mark.parametrize("neighbours", [None, "zero-out", "replace-one"])
def test_a_board_reads_what_an_attacker_could_learn_at_most(neighbours):
    """The rates of the card, in words of the unit, rounded up."""
    mechanism = make(
        sampling=sampling.full(1000),
        steps=1,
        unit="client",
        neighbours=neighbours,
        noise_multiplier=2,
    )
    words, card = reports.board(mechanism, 1e-5), reports.card(mechanism, 1e-5)
    rates = card["true_positive_rates"]
    for wrong, right in rates:
        (line,) = re.findall(rf"^  {100 * wrong:g} % +(.*) %$", words, re.MULTILINE)
        assert right <= float(line) / 100 + 1e-12 < 1.01 * right
    claimed = three_digits(card["epsilon"]["pld"]["value"])
    assert f"({claimed}, 1e-05)-differential privacy, proved by PLD." in words
    assert ("another one in their place" in " ".join(words.split())) == (
        neighbours == "replace-one"
    )
    assert "one client" in words
    assert "one person" not in words
    assert max(map(len, words.splitlines())) <= 100


def test_a_board_is_not_promised_what_is_not_proved():
    words = reports.board(make(noise_multiplier=0.0), 1e-5, supplied=True)
    assert "Nothing is promised. The noise multiplier is 0 at some step." in words
    assert words.count(" 100 %") == 3
    assert "which was supplied" in words
    assert "and not one person" in words
    earlier = {"before": (FIXED_BEFORE,), "neighbours": "replace-one"}
    words = reports.board(make(steps=3, **earlier), 1e-5, methods=["rdp"])
    assert "No guarantee is proved" in words
    assert words.count(" 100 %") == 3


@kills("reports/_claim.py", "held_out.units > 1", "held_out.units > 0")
def test_units_that_are_held_out_come_first_among_what_is_not_covered():
    mechanism = make(steps=3)
    held = {
        1: "the 1 example held out for the test: results on them",
        1200: "the 1,200 examples held out for the test: results on them",
    }
    for count, first in held.items():
        options = {"held_out": HeldOut(count), "methods": ["rdp"]}
        assert f"Not covered\n  - {first}" in dpjax.statement(mechanism, 1e-5, **options)
        words = reports.board(mechanism, 1e-5, **options)
        assert f"What is not covered\n\n  - {first}" in words
    plain = dpjax.statement(mechanism, 1e-5, methods=["rdp"])
    assert dpjax.statement(mechanism, 1e-5, methods=["rdp"], held_out=HeldOut(0)) == plain


def test_a_running_run_has_no_seconds_for_the_curve():
    """Its card limits attacks by RDP, and the last card by the smallest epsilon."""
    mechanism = make(sampling=sampling.poisson(1000, 10), steps=10)
    rough, tight = (
        reports.card(mechanism, 1e-5, methods=methods)["true_positive_rates"]
        for methods in (["rdp", "pld"], None)
    )
    assert all(more > less > wrong for (wrong, more), (_, less) in zip(rough, tight, strict=True))


@kills(
    "reports/_claim.py",
    "if mechanism.risk is not None:\n        bounded",
    "if False:\n        bounded",
)
def test_the_risk_that_was_given_is_stated_with_the_epsilon():
    """By the curve of "pld" also while the run is in progress, and of the steps that ran."""
    plan = make(sampling=sampling.full(1000), steps=4)
    mechanism = plan.calibrate(true_positive_rate=0.2, false_positive_rate=0.02)
    card = reports.card(mechanism, 1e-5, methods=["rdp", "pld"])
    assert card["risk"] == {"true_positive_rate": 0.2, "false_positive_rate": 0.02}
    rates = dict(card["true_positive_rates"])
    assert set(rates) == {0.001, 0.01, 0.02, 0.1}
    assert 0.199 < rates[0.02] <= 0.2
    words = dpjax.statement(mechanism, 1e-5)
    assert f"({three_digits(card['epsilon']['pld']['value'])}, 1e-05)-differentially" in words
    said = "At 2 % false alarms a membership attack has at most"
    assert f"  {said} 20 % true ones; noise was chosen for 20 %.\n" in words
    assert "kulynych2024attack" in words
    board = " ".join(reports.board(mechanism, 1e-5).split())
    assert "chosen for a limit of 20 % true alarms at 2 % false ones" in board
    assert " 2 % 20 % " in board
    part = ledger.admit(ledger.empty(), mechanism, steps=1)
    assert f"{said} 7.39 % true" in dpjax.statement(mechanism, 1e-5, ledger=part)
    assert said not in dpjax.statement(plan, 1e-5)
    odd = plan.calibrate(true_positive_rate=0.2, false_positive_rate=0.01999)
    assert "At 1.99 % false alarms" in dpjax.statement(odd, 1e-5), "the curve rises"
    assert reports.card(plan, 1e-5)["risk"] is None


FOLDED = "References, as BibTeX"


def of_groups(*multipliers, **options):
    rule = clipping.per_group((1.0,) * len(multipliers), len(multipliers))
    facts = {"clipping": rule, "noise_multiplier": multipliers, "steps": 10}
    return mechanism_with(1000, 10, **facts, **options)


def test_each_group_has_its_own_noise_in_the_statement():
    mechanism = of_groups(1.0, 10.0)
    words = dpjax.statement(mechanism, 1e-5)
    assert mechanism.deviations_on_mean(0) == [0.1, 1.0]
    assert "multiplier 0.995 in all, on the sum" in words
    assert "by group: multiplier 1, 10 x the group's own bound;" in words
    assert "0.995 is what these are worth together" in words
    assert "= standard deviation 0.1, 1 by group, on the mean\n" in words
    assert "0.1407" not in words, "the deviation of no group"


@pytest.mark.slow
def test_the_rate_that_is_counted_is_the_one_stated():
    def words(steps, rates):
        sampler = sampling.scored(np.arange(1000) % 2, rates, steps_per_row=4, batch_size=20)
        return dpjax.statement(make(sampling=sampler, steps=steps), 1e-5)

    one = words(10, [[0.01, 0.3]])
    assert "20 of 1,000 examples a step (rates go by bins)" in one
    assert "counted: rate 0.3\n" in one
    assert "rate 0.02" not in one
    rows = [[0.01, 0.0], [0.01, 0.05], [0.4, 0.2]]
    assert "counted: rate 0.01 to 0.4 (3 values, by a schedule)" in words(30, rows)
    assert "counted: rate 0.01 to 0.05 (2 values, by a schedule)" in words(8, rows)


def test_a_delta_above_one_over_n_is_pointed_out():
    assert "is not below 1/examples" in dpjax.statement(make(), 1e-3)
    with pytest.raises(ValueError, match=r"^statement\(delta.*between 0 and 1"):
        dpjax.statement(make(), 1.0)


def test_the_card_is_complete_and_strict_json():
    schedule = schedules.CURRICULA["piecewise-down"](epochs=5, steps_per_epoch=2)
    mechanism = make(noise_multiplier=schedule, clipping=clipping.grouped(1.0, 4), steps=9)
    card = reports.card(mechanism, 1e-5)
    again = json.loads(json.dumps(card, allow_nan=False))
    assert again == card
    assert card["mechanism"]["multiplier_and_steps"] == [[5, 2], [4, 2], [3, 2], [2, 2], [1, 1]]
    assert card["mechanism"]["clipping"]["bounds"] == [1.0] * 4
    assert card["epsilon"]["gdp"]["proven"] is False
    assert card["epsilon"]["pld"]["proven"] is True
    infinite = reports.card(make(noise_multiplier=0.0), 1e-5)
    assert json.loads(json.dumps(infinite, allow_nan=False))["epsilon"]["rdp"]["value"] == "inf"


def verdicts(card):
    """How many epsilons hold by the file that does not know dpjax, and how many do not."""
    found = (line for _, line in verify.findings(json.loads(json.dumps(card))))
    lines = [line for line in found if not line.startswith("attacks")]
    return sum(line.endswith(": holds") for line in lines), sum("DOES NOT" in x for x in lines)


@pytest.mark.slow
@kills("reports/card.py", '"steps": len(claim.ran)', '"steps": mechanism.steps', slow=True)
def test_a_card_counts_the_steps_that_ran():
    """The mechanism on the card is the plan; `dpjax verify` counts its first steps."""
    schedule = lambda step: jnp.where(step < 30, 2.0, 0.5)  # noqa: E731
    mechanism = mechanism_with(1000, 10, noise_multiplier=schedule, steps=60)
    book = dpjax.ledger.admit(dpjax.ledger.empty(), mechanism, steps=30)
    card = reports.card(mechanism, 1e-5, ledger=book)
    assert card["steps"] == 30
    assert card["mechanism"] == mechanism.facts == reports.card(mechanism, 1e-5)["mechanism"]
    assert card["epsilon"]["rdp"]["value"] == mechanism.epsilon_of(book.expand(), 1e-5)
    assert verdicts(card) == (3, 0)
    assert verdicts({**card, "steps": 60}) == (0, 3)


@pytest.mark.slow
@kills("mechanism/card.py", "for spent in mechanism.before\n", "for spent in ()\n", slow=True)
def test_a_card_of_a_run_that_continues_another_is_verified():
    earlier = Spent(sampling=sampling.poisson(1000, 50), runs=((1.5, 300),), preparation=(9.0,))
    mechanism = mechanism_with(1000, 10, steps=100, before=[earlier])
    card = json.loads(json.dumps(reports.card(mechanism, 1e-5)))
    assert verdicts(card) == (3, 0)
    lighter = dataclasses.replace(mechanism, before=())
    card["epsilon"] = reports.card(lighter, 1e-5)["epsilon"]
    assert verdicts(card) == (0, 3), "without the earlier run the claims are too small"
    words = dpjax.statement(mechanism, 1e-5)
    assert "300 steps of an earlier run on these data count too" in words
    assert "multiplier 1.5; queries before it with multiplier " in words
    whole = sampling.full(1000)
    spent = [
        Spent(sampling=whole, runs=((1.0, 40),), noise=strategies.square_root(steps=40)),
        Spent(sampling=whole, runs=((1.0, 40),), projections=30),
    ]
    words = dpjax.statement(dataclasses.replace(mechanism, before=spent), 1e-5, methods=["pld"])
    assert "multiplier 1, correlated over the steps" in words
    assert "multiplier 1, norms from 30 projections" in words

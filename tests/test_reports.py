# SPDX-License-Identifier: Apache-2.0
"""The statement and the card: every fact in them, and none that does not hold."""

import dataclasses
import json
import math
import pathlib
import subprocess
import sys

import numpy as np
import pytest

import dpjax
from dpjax import clipping, ledger, reports, sampling, schedules
from dpjax.mechanism import Spent


def make(**changes):
    description = {
        "sampling": sampling.poisson(60_000, 256),
        "clipping": clipping.flat(2.0),
        "noise_multiplier": 1.1,
        "steps": 14_063,
        **changes,
    }
    return dpjax.Mechanism(**description)


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
        "2.597   rdp",
        "3.008   rdp-classic",
        "2.38",
        "an estimate, not a bound",
        "Not covered",
        "hyper-parameters",
        "@inproceedings{abadi2016deep",
    ):
        assert fact in words, fact
    assert "(2.382, 1e-05)-differentially private" in words
    assert "NOT" not in words
    assert "seed" not in words.lower()


def test_the_statement_of_what_ran():
    mechanism = make(steps=10)
    book = ledger.empty()
    for _ in range(4):
        book = ledger.admit(book, mechanism)
    words = dpjax.statement(mechanism, 1e-5, ledger=book)
    assert "steps         4 (of 10 planned)" in words
    assert f"{ledger.epsilon(book, mechanism, 1e-5):8.4g}   rdp" in words


def test_the_statement_cites_what_was_used():
    grouped = dpjax.statement(make(clipping=clipping.grouped(1.0, 4), steps=20), 1e-5)
    assert all(key in grouped for key in ("abadi2016", "mironov2017", "doroshenko2022", "liu2021"))
    assert "liu2021" not in dpjax.statement(make(steps=20), 1e-5)
    fixed = make(sampling=sampling.fixed(10_000, 100), steps=20)
    assert "doroshenko2022" not in dpjax.statement(fixed, 1e-5)


def test_a_published_seed_is_not_for_release():
    assert "Seed published (7): not for release" in dpjax.statement(make(), 1e-5, seed=7)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"noise_multiplier": 0.0}, "The noise multiplier is 0"),
        ({"noise_multiplier": 0.0, "clipping": clipping.flat(math.inf)}, "bound is infinite"),
        ({"sampling": sampling.curriculum(np.arange(100), 10)}, "the order comes from"),
    ],
)
def test_what_is_not_private_is_said_not_to_be(changes, why):
    words = dpjax.statement(make(**{"steps": 20, **changes}), 1e-5)
    assert "NOT differentially private" in words
    assert why in words


def test_shuffled_batches_show_both_numbers():
    words = dpjax.statement(
        make(sampling=sampling.shuffled(60_000, 600), noise_multiplier=1.38, steps=2000), 1e-5
    )
    assert "zero-out" in words
    assert "18.44   pld" in words
    assert "as if Poisson" in words
    assert "It does not hold" in words


def test_fixed_batches_are_stated_for_replace_one_by_rdp_alone():
    words = dpjax.statement(make(sampling=sampling.fixed(10_000, 100), steps=1000), 1e-5)
    assert "replace-one" in words
    assert "pld:" not in words


def test_a_schedule_is_described():
    words = dpjax.statement(
        make(noise_multiplier=schedules.linear_down(epochs=5, steps_per_epoch=2), steps=10), 1e-5
    )
    assert "5 to 1 (5 values, by a schedule)" in words


def test_a_delta_above_one_over_n_is_pointed_out():
    assert "is not below 1/examples" in dpjax.statement(make(), 1e-3)
    with pytest.raises(ValueError, match="delta"):
        dpjax.statement(make(), 1.0)


def test_the_card_is_complete_and_strict_json():
    mechanism = make(noise_multiplier=schedules.piecewise_down(epochs=5, steps_per_epoch=2))
    card = reports.card(
        dpjax.Mechanism(
            sampling=mechanism.sampling,
            clipping=clipping.grouped(1.0, 4),
            noise_multiplier=mechanism.noise_multiplier,
            steps=9,
        ),
        1e-5,
        seed=3,
    )
    again = json.loads(json.dumps(card, allow_nan=False))
    assert again == card
    assert card["noise"]["multiplier_and_steps"] == [[5, 2], [4, 2], [3, 2], [2, 2], [1, 1]]
    assert card["clipping"]["sensitivity"] == 2.0
    assert card["epsilon"]["gdp"]["proven"] is False
    assert card["epsilon"]["pld"]["proven"] is True
    assert card["seed_published"] == 3
    infinite = reports.card(make(noise_multiplier=0.0), 1e-5)
    assert json.loads(json.dumps(infinite, allow_nan=False))["epsilon"]["rdp"]["value"] == "inf"


def verdicts(card, folder):
    """How many claims of a card hold by the file that does not know dpjax, and how many do not."""
    path = folder / "privacy.json"
    path.write_text(json.dumps(card))
    verify = pathlib.Path(__file__).parents[1] / "experiments" / "verify.py"
    out = subprocess.run([sys.executable, verify, path], capture_output=True, text=True).stdout
    return out.count(": holds"), out.count("DOES NOT HOLD")


def test_a_card_of_a_run_that_goes_on_is_verified(tmp_path):
    earlier = Spent(sampling=sampling.poisson(1000, 50), runs=((1.5, 300),), preparation=(9.0,))
    mechanism = dpjax.Mechanism(
        sampling=sampling.poisson(1000, 10),
        clipping=clipping.flat(1.0),
        noise_multiplier=1.0,
        steps=100,
        before=[earlier],
    )
    card = json.loads(json.dumps(reports.card(mechanism, 1e-5)))
    assert verdicts(card, tmp_path) == (3, 0)
    lighter = dataclasses.replace(mechanism, before=())
    card["epsilon"] = reports.card(lighter, 1e-5)["epsilon"]
    assert verdicts(card, tmp_path) == (0, 3), "without the earlier run the claims are too small"
    words = dpjax.statement(mechanism, 1e-5)
    assert "300 steps of an earlier run on these data count too" in words
    assert "multiplier 1.5; queries before it: 1" in words

# SPDX-License-Identifier: Apache-2.0
"""Presets are the committed rows of accuracies, and their settings never met the test set."""

import copy
import json

import numpy as np
import pytest
from absl import flags
from experiments import accuracy, leaderboard
from experiments.common import runs, tables
from run_binary import run

from dpjax import data, verify
from dpjax.cli.flag_sets import presets
from dpjax.cli.flag_sets.train import FLAGS, settings
from dpjax.cli.train import build

flags.FLAGS.mark_as_parsed()


def given(*words):
    values = copy.deepcopy(FLAGS)
    values(["train", *words])
    presets.apply(values)
    return values


@pytest.mark.parametrize("name", presets.ROWS)
def test_a_preset_is_a_committed_row(name):
    dataset, _, epsilon = name.rpartition("_eps")
    of = given(f"--preset={name}")
    kind = {"cross_entropy": "linear", "composite": "cnn"}[of.loss]
    row = tables.load("accuracy")["rows"][accuracy.named(dataset, kind, float(epsilon))].values()
    assert presets.ROWS[name][0] == runs.spread([run["accuracy"] for run in row])
    model, choice = {"linear": ("scatter_linear", None), "cnn": accuracy.CNNS[dataset]}[kind]
    assert (of.dataset, of.features, of.model, of.torch_init) == (
        dataset,
        "scattering",
        model,
        True,
    )
    assert build.read_options(of.loss_options) == (choice._asdict() if choice else {})
    assert of.norm_groups == accuracy.Recipe._field_defaults["groups"]
    numbers = of.batch_size, of.epochs, of.learning_rate, of.target_epsilon, of.average, of.bound
    assert {run["recipe"] for run in row} == {accuracy.Recipe(dataset, kind, *numbers).words}


@pytest.mark.thorough
def test_each_row_has_a_card_and_those_at_3_are_recomputed():
    for name, row in tables.load("accuracy")["rows"].items():
        if name.startswith(("split: ", "curve: ")) or len(row) < 5:
            continue
        card = json.loads((tables.RESULTS / "cards" / f"{name.replace(' ', '_')}.json").read_text())
        assert card["epsilon"]["pld"]["value"] == pytest.approx(row["0"]["epsilon"], abs=1e-4)
        if name.endswith(" 3"):
            assert all(holds for holds, _ in verify.findings(card))


@pytest.mark.thorough
def test_the_public_list_repeats_committed_rows():
    committed = (tables.RESULTS / "leaderboard.yml").read_text()
    assert committed == leaderboard.text()
    assert committed.count("epsilon: ") == len(accuracy.EPSILONS)


def test_flags_beside_a_preset_win():
    name = next(iter(presets.ROWS))
    of, alone = given("--bound=2", f"--preset={name}", "--steps=7"), given(f"--preset={name}")
    assert (of.bound, of.steps, of.batch_size) == (2.0, 7, alone.batch_size)
    assert not of["epochs"].present, "so --steps is the only one of the two"
    typed = [f"--{key}={value}" for key, value in presets.flags_of(name).items()]
    assert settings(given(*typed)) == settings(alone), "the run that these flags resume"


def test_a_search_reads_no_test_data(monkeypatch):
    """The held-out examples are training examples on which no trial trains."""
    x = np.arange(40, dtype=np.float32).reshape(40, 1, 1, 1, 1) * np.ones((1, 1, 2, 2, 81))
    whole = data.Dataset("digits", (x, np.arange(40)), (x[:0], x[:0]), 10)
    monkeypatch.setattr(accuracy, "featured", lambda *_: whole)
    recipe = accuracy.Recipe("digits", "linear", 4, 1.0, 1.0)
    (_, train), (_, held) = accuracy.prepared(recipe, 10, 0)
    assert len(held) == 10
    assert sorted([*train, *held]) == list(range(40))


def test_a_search_keeps_what_gains_and_counts_what_it_tried():
    """With a score that has its best at rate 8 and a batch of 2,048."""
    tried = []

    def score(recipe):
        tried.append(recipe)
        return -abs(recipe.rate - 8) - (recipe.batch != 2048)

    found = accuracy.search("mnist", "linear", score)
    assert {epsilon: (of.batch, of.rate) for epsilon, of in found.items()} == dict.fromkeys(
        accuracy.EPSILONS, (2048, 8.0)
    )
    assert not any(of.mirrored or of.opponent for of in tried)
    assert all(of.epsilon == epsilon for epsilon, of in found.items())


@pytest.mark.slow
def test_digits_walk_through_a_search_and_final_runs(tmp_path):
    path = tmp_path / "accuracy.json"
    run("experiments.accuracy", "--smoke", "--out", path)
    rows = json.loads(path.read_text())["rows"]
    final = {name: row["0"] for name, row in rows.items() if "split" not in name}
    assert len(final) == len(accuracy.EPSILONS)
    for name, row in final.items():
        target = float(name.rpartition(" ")[2])
        assert target - 0.01 <= row["epsilon"] <= target <= row["best_of"]
        assert (row["trials"], row["accuracy"] > 85) == (len(rows) - len(final), True)

# SPDX-License-Identifier: Apache-2.0
"""Guides, tutorials and headers of experiments say what the committed results say."""

import itertools
import json
import statistics

import pytest
from absl import flags
from experiments import (
    declared,
    faults,
    membership,
    nothing_to_tune,
    persons,
    sentences,
    settings,
    text,
)
from experiments.common import markdown
from run_binary import run
from test_docs import PAGES, ROOT

flags.FLAGS.mark_as_parsed()
RESULTS = ROOT / "experiments" / "results"
SETTINGS = PAGES / "settings.md"

# What the guide says in words: all seeds of one line of a table are above all seeds of another.
ABOVE = [
    ("features", "MNIST, a linear model on wavelets", "MNIST, a CNN on pixels"),
    ("features", "FashionMNIST, a linear model on wavelets", "FashionMNIST, a CNN on pixels"),
    (
        "features",
        "CIFAR-10, a linear model on EfficientNet",
        "CIFAR-10, a linear model on wavelets",
    ),
    ("epsilons", "noise multiplier 1", "noise multiplier 2"),
    ("epsilons", "noise multiplier 4", "noise multiplier 5"),
    ("rate of a paper", "MNIST, rate 0.1414", "MNIST, rate 0.05"),
    ("rate of a paper", "MNIST, rate 0.5", "MNIST, rate 0.1414"),
    ("rules", "bound 1", "bound 200, rate by as much smaller"),
    ("rules", "flat, for 8 groups", "8 groups, with the same total"),
    ("noise", "falling", "rising"),
    ("group norm", "with group normalisation", "convolutions"),
    ("augmentation", "the image", "4 shifted views"),
    ("activations", "MNIST, tanh", "MNIST, ReLU"),
    ("activations", "FashionMNIST, tanh", "FashionMNIST, ReLU"),
    ("activations", "CIFAR-10, ReLU", "CIFAR-10, tanh"),
    ("activations", "CIFAR-10, 16 groups, tanh", "CIFAR-10, 16 groups, ReLU"),
    ("optimizers", "SGD", "heavy ball"),
    ("optimizers", "SGD", "Adam"),
    ("optimizers", "SGD", "RMSprop"),
    ("rate", "rate 0.4", "rate 0.04"),
    ("rate", "rate 0.04", "rate 0.004"),
    ("rate", "rate 0.4", "rate 4"),
    ("rate", "rate 4", "rate 40"),
    ("bound", "bound 0.5, rate 0.4", "bound 50, rate 0.004"),
    ("steps", "448 steps", "28 steps"),
]
# Where it says that two lines are level, their ranges overlap.
LEVEL = [
    ("steps", "448 steps", "112 steps"),
    ("average", "average over about 20 steps", "last parameters"),
    ("batch", "898 batches of 64", "56 batches of 1024"),
    ("bound", "bound 0.05, rate 4", "bound 0.5, rate 0.4"),
    ("bound", "bound 5, rate 0.04", "bound 0.5, rate 0.4"),
    ("features", "CIFAR-10, the same at epsilon 3", "CIFAR-10, the same, not private"),
    ("rules", "automatic", "bound 1"),
    ("rules", "a bound for each layer", "flat, for layers"),
    ("noise", "constant, at an epsilon as large", "falling"),
]


def test_the_tables_of_the_guide_are_current():
    """``python -m experiments.settings --page docs/pages/settings.md`` writes them."""
    page = SETTINGS.read_text()
    assert markdown.filled(page, settings.tables()) == page
    assert page.count(": begin -->") == len(settings.lines())


def test_no_best_rate_is_at_an_end_of_its_search():
    sweeps = [each for sweep in settings.SWEEPS.values() for each in sweep.items()]
    for label, tried in sweeps:
        best = settings.of_sweep(label, tried).source.removeprefix("settings: ")
        ends = {settings.row_of(tried[0]), settings.row_of(tried[-1])}
        assert len(tried) == 1 or best not in ends, label


def test_what_the_guide_says_in_words_is_so():
    found = {
        (name, line.label): line.accuracies
        for name, lines in settings.lines().items()
        for line in lines
    }
    for name, better, worse in ABOVE:
        assert min(found[name, better]) > max(found[name, worse]), (name, better, worse)
    for name, one, other in LEVEL:
        one, other = found[name, one], found[name, other]
        assert max(min(one), min(other)) <= min(max(one), max(other)), (name, one, other)
    epsilons = [float(line.epsilon) for line in settings.lines()["epsilons"]]
    means = [statistics.mean(line.accuracies) for line in settings.lines()["epsilons"]]
    assert epsilons[1] < 0.4 * epsilons[0]
    assert epsilons[4] > 0.7 * epsilons[3]
    assert means[0] - means[1] < 0.5 < 1.5 < means[3] - means[4]
    for name in ("MNIST", "FashionMNIST"):
        tanh, relu = (found["activations", f"{name}, {kind}"] for kind in ("tanh", "ReLU"))
        assert statistics.mean(tanh) > statistics.mean(relu) + 1


GUIDES = [(persons, "persons", "persons"), (faults, "faults", "auditing"), (text, "text", "text")]
GUIDES += [(declared, "declared", "table"), (sentences, "llm", "text")]
GUIDES += [(membership, "membership", "auditing")]


def rows_of(name):
    return json.loads((RESULTS / f"{name}.json").read_text())["rows"]


@pytest.mark.parametrize(("guide", "name", "page"), GUIDES)
def test_tables_of_tutorials_are_current(guide, name, page):
    """``python -m experiments.GUIDE --page docs/pages/tutorials/PAGE.md`` writes them."""
    page = (PAGES / "tutorials" / f"{page}.md").read_text()
    assert markdown.filled(page, guide.tables(rows_of(name))) == page


def test_a_gradient_a_patient_is_better():
    rows = rows_of("persons")
    first, _, last = (
        [r["accuracy"] for r in rows[f"{w}, epsilon 1"].values()] for w in persons.WAYS
    )
    assert min(first) > max(last)
    assert max(run["epsilon"] for row in rows.values() for run in row.values()) <= 8


def test_each_wrong_mechanism_is_found_and_its_twin_is_not_accused():
    rows = rows_of("faults")
    assert rows.keys() == faults.FAULTS.keys()
    for _, *ways, _ in (runs["0"].values() for runs in rows.values()):
        found, seconds, accused = zip(*ways, strict=True)
        assert any(found[:2]), "by an attack"
        assert max(seconds) < 300
        assert not any(accused)


@pytest.mark.thorough
@pytest.mark.parametrize("name", faults.FAULTS)
def test_a_law_finds_each_wrong_mechanism(name):
    right, fault = faults.FAULTS[name]
    assert faults.law(right._replace(**fault), 0)
    assert not faults.law(right, 0)


@pytest.mark.slow
def test_a_wrong_mechanism_is_attacked(tmp_path):
    run("experiments.faults", "--smoke", "--row=leaf", "--out", tmp_path / "out.json")
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert rows["smoke: one leaf without noise"]["0"]["one_step"][::2] == [True, 0]


def test_ratios_find_members_of_models_without_privacy():
    rows = rows_of("membership")
    for name in ("digits", "FashionMNIST", "housing"):
        private, plain = (
            [attack["auroc"] for attack in rows[f"{name}, {way}"]["0"]["attacks"].values()]
            for way in ("epsilon 3", "not private")
        )
        (_, low, _), (_, _, losses), (private, _, _) = plain[1], plain[0], private[1]
        assert low > max(losses, private), "of LiRA without privacy, limits included"


@pytest.mark.slow
def test_finished_models_are_attacked_once(tmp_path):
    """Private and not, of digits, whose test part is too small for a rate of 0.1 %."""
    flags = "--smoke", f"--runs={tmp_path}", "--out"
    run("experiments.membership", *flags, tmp_path / "found.json")
    private, plain = json.loads((tmp_path / "found.json").read_text())["rows"].values()
    assert len(private["0"]["attacks"]) == len(plain["0"]["attacks"]) == 3
    for found in (private["0"], plain["0"]):
        for attack in found["attacks"].values():
            assert attack["rates"][0].startswith("("), "limits alone"
            assert len(attack["by_class"]) == 10
    assert "shadow" not in run("experiments.membership", *flags, tmp_path / "again.json").stderr


@pytest.mark.slow
def test_both_ways_run(tmp_path):
    run("experiments.persons", "--smoke", f"--out={tmp_path / 'found.json'}")
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert len(rows) == len(persons.WAYS) * len(persons.COLUMNS)


def test_embeddings_with_the_head_learn_most():
    rows = rows_of("text")
    of = {row: [run.get("accuracy") for run in runs.values()] for row, runs in rows.items()}
    base, parts = of["sst2 base alone"], ("head", "lora and head", "embeddings and head", "all")
    head, lora, embeddings, everything = (of[f"sst2 {part} at epsilon 3"] for part in parts)
    assert min(embeddings) > max(everything) > max(head + lora)
    assert min(head + lora) < max(base), "they stay where the base stands"


def test_privacy_lowers_the_exposure_of_planted_secrets():
    rows = rows_of("llm")
    of = {row: {n: run["perplexity"] for n, run in runs.items()} for row, runs in rows.items()}
    orders = [  # each better than the one before it, for each seed
        ("pretrained alone", "full at epsilon 1", "full at epsilon 8", "full not private"),
        ("pretrained alone", "lora at epsilon 1", "lora not private", "full at epsilon 1"),
    ]
    for worse, better in (pair for order in orders for pair in itertools.pairwise(order)):
        assert all(of[worse][n] > of[better][n] for n in of[worse].keys() & of[better].keys())
    kept = {
        row: [sum(run["exposure"]["10"]) / 5 for run in runs.values()] for row, runs in rows.items()
    }
    assert min(kept["full not private"]) > 5 > 4 > max(kept["full at epsilon 8"])
    first, last = rows["full at epsilon 1"]["0"]["epsilon_of"].values()
    assert first <= 1 < 10 < last, "little is promised for 10 copies"


@pytest.mark.slow
def test_the_settings_run(tmp_path):
    run("experiments.settings", "--smoke", "--row=augmentation", "--out", tmp_path / "out.json")
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert {"smoke: digits views 4", "smoke: digits defaults"} == set(rows)
    assert all(run["0"]["epsilon"] <= 3 for run in rows.values())


@pytest.mark.slow
def test_the_texts_run(tmp_path):
    words = [f"--row={word}" for word in ("phrases", "lora")]
    run("experiments.text", "--smoke", *words, "--out", tmp_path / "out.json")
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    of = {name: run["0"] for name, run in rows.items()}
    counts = of["smoke: sst2 phrases of a sentence"]
    assert (counts["sentences"], counts["most"]) == (2, 14), "two phrases, each seven times"
    lora = of["smoke: sst2 lora and head at epsilon 3"]
    assert lora["trained"] == 2 * 2 * 4 * 32 + 66, "two kernels of rank 4, and the head"
    assert lora["accuracy"] > 60


@pytest.mark.slow
def test_the_sentences_run(tmp_path):
    row = "lora not private"
    run("experiments.sentences", "--smoke", f"--row={row}", "--out", tmp_path / "out.json")
    tuned = json.loads((tmp_path / "out.json").read_text())["rows"][f"smoke: {row}"]["0"]
    assert tuned["trained"] == 2 * 8 * (64 + 3 * 64), "two projections of rank 8"
    assert {count: len(found) for count, found in tuned["exposure"].items()} == {"1": 5, "10": 5}
    assert tuned["text"].startswith("the film")


def test_the_tables_of_nothing_to_tune_are_current():
    """``python -m experiments.nothing_to_tune --page=...`` writes them."""
    page = (PAGES / "nothing_to_tune.md").read_text()
    tables = nothing_to_tune.tables(rows_of("nothing_to_tune"))
    assert markdown.filled(page, tables) == page

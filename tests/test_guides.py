# SPDX-License-Identifier: Apache-2.0
"""Guides, tutorials and headers of experiments say what the committed results say."""

import ast
import json
import re
import statistics

import pytest
import run_binary
from test_docs import PAGES, ROOT

RESULTS = ROOT / "experiments" / "results"
SETTINGS, TEXT = PAGES / "settings.md", PAGES / "tutorials" / "text.md"

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


HEADERS = {  # of experiments, and the file of their results
    "papers/an2021_noise_curricula": "an2021",
    "papers/bu2023_algorithms": "bu2023",
    "papers/bu2023_calibration": "bu2023",
    "papers/bu2023_finetuning": "finetuning",
    "papers/liu2021_grouped_clipping": "liu2021",
    "papers/losing_less2022_loss": "losing_less2022",
    "papers/papernot2021_tempered_sigmoids": "papernot2021",
    "papers/tramer2021_scatternet": "tramer2021",
    "settings": "settings",
}


@pytest.fixture
def settings():
    with run_binary.importing() as import_binary:
        yield import_binary("settings")


def test_the_tables_of_the_guide_are_current(settings):
    """``python experiments/settings.py --page docs/pages/settings.md`` writes them."""
    page = SETTINGS.read_text()
    assert settings.markdown.filled(page, settings.tables()) == page
    assert page.count(": begin -->") == len(settings.lines())


def test_no_best_rate_is_at_an_end_of_its_search(settings):
    sweeps = [each for sweep in settings.SWEEPS.values() for each in sweep.items()]
    for label, tried in sweeps:
        best = settings.of_sweep(label, tried).source.removeprefix("settings: ")
        ends = {settings.row_of(tried[0]), settings.row_of(tried[-1])}
        assert len(tried) == 1 or best not in ends, label


def test_what_the_guide_says_in_words_is_so(settings):
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


def test_the_figures_of_the_tutorial_are_current():
    """``python experiments/text.py --page docs/pages/tutorials/text.md`` writes them."""
    rows = json.loads((RESULTS / "text.json").read_text())["rows"]
    with run_binary.importing() as import_binary:
        text, page = import_binary("text"), TEXT.read_text()
        assert text.markdown.filled(page, text.tables(rows)) == page
    of = {row: [run.get("accuracy") for run in runs.values()] for row, runs in rows.items()}
    base, parts = of["sst2 base alone"], ("head", "lora and head", "embeddings and head", "all")
    head, lora, embeddings, everything = (of[f"sst2 {part} at epsilon 3"] for part in parts)
    assert min(embeddings) > max(everything) > max(head + lora)
    assert min(head + lora) < max(base), "they stay where the base stands"
    first, _, last = rows["shakespeare at epsilon 2"]["0"]["epsilon_of"].values()
    assert first <= 2 < 60 < last, "nothing is promised for 16 copies"


@pytest.mark.parametrize("binary", HEADERS)
def test_accuracies_in_headers_are_means_of_rows(binary):
    """At the end of a run, or after the epochs that a claim names; others' are in parentheses."""
    rows = json.loads((RESULTS / f"{HEADERS[binary]}.json").read_text())["rows"]
    judged = json.loads((RESULTS / "systems.json").read_text()).get(HEADERS[binary], {})
    epochs = {claim["at"] for claim in judged.get("claims", [])} - {0}
    means = set()
    for runs in rows.values():
        for measure, scale in (("accuracy", 1), ("ece", 100)):
            values = [scale * run[measure] for run in runs.values() if measure in run]
            means |= {f"{statistics.mean(values):.1f}"} if values else set()
        logs = [run.get("way", []) for run in runs.values()]
        for epoch in epochs & set(range(1, 1 + min(map(len, logs)))):
            means.add(f"{statistics.mean(100 * log[epoch - 1]['accuracy'] for log in logs):.1f}")
    header = ast.get_docstring(ast.parse((ROOT / "experiments" / f"{binary}.py").read_text()))
    result = re.search(r"^  result(.*?)^  time", header, re.DOTALL | re.MULTILINE)[1]
    named = re.findall(r"(?<![\d.])\d\d\.\d(?!\d)", re.sub(r"\(.*?\)", "", result, flags=re.DOTALL))
    assert named
    assert set(named) <= means, sorted(set(named) - means)


@pytest.mark.slow
def test_the_settings_run(tmp_path):
    run_binary.run("settings.py", "--smoke", "--rows=augmentation", "--out", tmp_path / "out.json")
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert {"smoke: digits views 4", "smoke: digits defaults"} < set(rows)
    assert all(run["0"]["epsilon"] <= 3 for run in rows.values())


@pytest.mark.slow
def test_the_texts_run(tmp_path):
    flags = ["--smoke", "--rows=phrases,lora,shakespeare not", "--out", tmp_path / "out.json"]
    run_binary.run("text.py", *flags)
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    of = {name: run["0"] for name, run in rows.items()}
    counts = of["smoke: sst2 phrases of a sentence"]
    assert (counts["sentences"], counts["most"]) == (2, 14), "two phrases, each seven times"
    lora = of["smoke: sst2 lora and head at epsilon 3"]
    assert lora["trained"] == 2 * 2 * 4 * 32 + 66, "two kernels of rank 4, and the head"
    assert lora["accuracy"] > 60
    exposure = of["smoke: shakespeare not private"]["exposure"]
    assert sum(exposure["16"]) > sum(exposure["1"]), "what is planted more often is known better"

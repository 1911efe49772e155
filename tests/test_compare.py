# SPDX-License-Identifier: Apache-2.0
"""Runs side by side: which are one group, their mean and spread, and what choosing costs."""

import json

import pytest
from absl import app
from html_pages import parsed, text
from mutation import kills

from dpjax.cli import compare
from dpjax.cli.compare import RunGroup
from dpjax.reports.load_run import Missing, read

EVIL = "<b>$x$</b>"
INF, SPENT = float("inf"), [0.5, 1.0, 1.5]


def write(path, accuracies, flags=None, epsilons=None, seconds=10.0, **identity):
    """A run whose accuracies were seen at steps 10, 20, ... for parts of epsilon 1."""
    path.mkdir()
    epsilons = epsilons or [i / len(accuracies) for i in range(1, len(accuracies) + 1)]
    rows = [
        {"step": 10 * i, "epsilon": epsilon, "delta": 1e-5, "accuracy": accuracy}
        for i, (epsilon, accuracy) in enumerate(zip(epsilons, accuracies, strict=True), start=1)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if flags is not None:
        config = {"flags": {"out": str(path), **flags}, "seconds": seconds}
        (path / "config.json").write_text(json.dumps(config))
    if identity:
        (path / "run.json").write_text(json.dumps(identity))
    return path


def runs_of(*folders):
    return [read(folder, arrays=False) for folder in folders]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    runs = [
        write(folder / "a1", [0.5, 0.90], {"seed": 1, "rule": EVIL, "epochs": 3}),
        write(
            folder / "a2", [0.6, None, 0.94], {"seed": 2, "rule": EVIL, "epochs": 3}, [1, 1, 1.5]
        ),
        write(folder / "b", [0.7, 0.80], {"seed": 1, "rule": "flat", "epochs": 3}, [1.0, 2.0]),
        write(folder / "_bare", [0.1, 0.2]),
    ]
    again = folder / ".." / folder.name / "_bare"  # a folder under two names is one run
    return compare.compare([*runs, again, folder / "none"], folder / "deeper" / "page.html")


def test_runs_that_differ_in_seed_and_folder_alone_are_one_line_of_the_table(compared):
    lines = [[text(cell) for cell in line] for line in parsed(compared).iter("tr")]
    unknown = "not written"
    assert lines == [
        [*compare.COLUMNS],
        [f"rule={EVIL}", "92.00 % ± 2.83", "2 runs", "20 to 30", "1.5", "1e-05", "10.0 s", unknown],
        ["rule=flat", "80.00 %", "1 run", "20", "2", "1e-05", "10.0 s", unknown],
        ["_bare", "20.00 %", "1 run", "20", "1", "1e-05", unknown, unknown],
    ]


def test_the_figure_has_two_plots_with_a_line_for_each_group(compared):
    (image,) = parsed(compared).iter("svg")
    shown = [text(node).strip() for node in image.iter("text")]
    assert any(words.startswith("epsilon spent at delta") for words in shown)
    assert "steps" in shown
    groups = [f"rule={EVIL}", "rule=flat", "_bare"]
    assert [words for words in shown if words in groups] == groups
    names = [node.get("id", "") for node in image.iter("g")]
    assert sum("FillBetween" in name for name in names) == 2, "where runs repeat"
    assert compared.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_the_page_says_what_choosing_costs(compared):
    words = text(parsed(compared).find(".//header"))
    assert "looking at private data" in words
    # 1 + 1.5 + 2 + 1, and four times 1e-5.
    assert "All 4 together cost at most epsilon 5.5 at delta 4e-05" in words


def test_the_page_is_escaped_and_loads_nothing(compared):
    raw = compared.read_text()
    assert "<b>" not in raw
    assert "src=" not in raw
    assert "<script" not in raw
    assert raw.count("http") == 2, "the names of two XML namespaces"


def test_a_run_of_an_infinite_epsilon_is_not_for_release(tmp_path, capsys):
    folders = [write(tmp_path / "a", [0.5, 0.9], epsilons=[INF, INF]), write(tmp_path / "b", [0.5])]
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "metrics.jsonl").write_text("{half")
    page = compare.compare([*folders, tmp_path / "damaged"], tmp_path / "page.png")
    tree = parsed(page)
    assert "has no proven epsilon" in text(tree.find(".//header"))
    assert "do not publish" in text(tree.find(".//figure"))
    assert "Not drawn: a (" in text(tree.find(".//p[@id='left-out']"))
    assert page.stat().st_mode & 0o077 == 0
    assert f"Not on the page: {tmp_path / 'damaged'} (" in capsys.readouterr().out
    with pytest.raises(app.UsageError, match="none of these folders can be read"):
        compare.compare([tmp_path / "damaged"], page)
    with pytest.raises(app.UsageError, match="expected folders of runs"):
        compare.run(None, ["compare"])


@kills("cli/compare.py", "if len(kinds := protected(runs)) > 1:", "if kinds := '':")
def test_costs_of_other_units_and_neighbours_do_not_add(tmp_path):
    def ran(name, **other):
        facts = {"unit": "example", "neighbours": "zero-out", **other}
        return write(tmp_path / name, [0.5], {"rule": name}, mechanism=facts)

    one, clients, swapped = runs_of(
        ran("a"), ran("b", unit="client"), ran("c", neighbours="replace-one")
    )
    assert "cost at most epsilon 2 at delta 2e-05." in compare.price([one, one])
    assert compare.price([one, clients]).endswith(
        "Their costs do not add: these runs protect zero-out neighbours of one client and zero-out "
        "neighbours of one example."
    )
    assert "replace-one neighbours of one example and" in compare.price([one, swapped])
    assert compare.line(RunGroup("a", [clients]))[-1] == "zero-out neighbours of one client"


def test_groups_are_named_by_the_flags_in_which_they_differ(tmp_path):
    folders = [
        write(tmp_path / name, [0.5], {"optimizer": word, "momentum": 0.9, "seed": seed})
        for name, word, seed in (("a", "adam", 1), ("b", "adam", 2), ("c", "sgd", 1))
    ]
    for folder in (tmp_path / "e", tmp_path / "f"):
        folder.mkdir()
        folders.append(write(folder / "run", [0.5]))
    groups = {group.label: len(group.runs) for group in compare.groups_of(runs_of(*folders))}
    second = f"run ({tmp_path / 'f' / 'run'})"
    assert groups == {"optimizer=adam": 2, "optimizer=sgd": 1, "run": 1, second: 1}


def test_steps_without_a_finite_epsilon_are_not_drawn(tmp_path):
    def curve(*epsilons):
        names = (tmp_path / str(len(list(tmp_path.iterdir()))) for _ in epsilons)
        folders = [
            write(name, [i / 10 for i in range(1, len(row) + 1)], epsilons=row)
            for name, row in zip(names, epsilons, strict=True)
        ]
        group = RunGroup("some", runs_of(*folders))
        return [values.round(6).tolist() for values in compare.curve(group, "epsilon")]

    assert curve([1.0, 2.0, INF]) == [[1, 2], [[10], [20]]]
    found = curve([1.0, INF], [2.0, 3.0])
    assert found == [[2], [[10, 10]]], "what one run paid without end is not what the other paid"
    assert curve([1.0, 4.0], [2.0, 3.0]) == [[2, 4], [[10, 10], [20, 20]]]
    with pytest.raises(Missing, match="at no step"):
        curve([1.0, INF], [None, 3.0])
    classes = write(tmp_path / "classes", [0.5, [0.5, 0.25]], {"seed": 1})
    with pytest.raises(Missing, match="its accuracy is not one number"):
        compare.curve(RunGroup("some", runs_of(classes)), "step")


@kills("cli/compare.py", 'upwards(group.epsilon(), ".3g")', 'format(group.epsilon(), ".3g")')
@kills("cli/compare.py", "upwards(epsilon, '.3g')", "format(epsilon, '.3g')")
def test_the_table_and_the_price_are_rounded_up(tmp_path):
    runs = runs_of(*(write(tmp_path / name, [0.5], epsilons=[2.0001]) for name in "ab"))
    assert {compare.line(group)[4] for group in compare.groups_of(runs)} == {"2.01"}
    assert "at most epsilon 4.01 at delta 2e-05" in compare.price(runs)

# SPDX-License-Identifier: Apache-2.0
"""Runs side by side: which are one group, their mean and spread, and what choosing costs."""

import json
import re
import types

import numpy as np
import pytest
from absl import app
from mutation import kills

from dpjax.cli import compare
from dpjax.cli.compare import RunGroup
from dpjax.cli.report.load_run import Missing, read

INF, SPENT = float("inf"), [0.5, 1.0, 1.5]


def write(path, accuracies, flags=None, epsilons=None, seconds=10.0, name="accuracy", **identity):
    """A run whose accuracies were seen at steps 10, 20, ... for parts of epsilon 1."""
    path.mkdir()
    epsilons = epsilons or [i / len(accuracies) for i in range(1, len(accuracies) + 1)]
    rows = [
        {"step": 10 * i, "epsilon": epsilon, "delta": 1e-5, name: accuracy}
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


def run(out, *folders):
    compare.run(types.SimpleNamespace(out=str(out)), ["compare", *map(str, folders)])


def test_runs_that_differ_in_seed_and_folder_alone_are_one_line_of_the_table(
    tmp_path, capsys, monkeypatch
):
    runs = [
        write(tmp_path / "a1", [0.5, 0.90], {"seed": 1, "rule": "x", "epochs": 3}),
        write(tmp_path / "a2", [0.6, None, 0.94], {"seed": 2, "rule": "x", "epochs": 3}, SPENT),
        write(tmp_path / "b", [0.7, 0.80], {"seed": 1, "rule": "flat", "epochs": 3}, [1.0, 2.0]),
        write(tmp_path / "_bare", [0.1, 0.2]),
    ]
    figures = []
    monkeypatch.setattr(compare.style, "png", lambda *given: figures.append(given) or b"")
    again = tmp_path / ".." / tmp_path.name / "_bare"  # a folder under two names is one run
    run(tmp_path / "deeper" / "page.png", *runs, again, tmp_path / "none")
    left_out, *lines = capsys.readouterr().out.splitlines()
    assert left_out.startswith(f"Left out: {tmp_path / 'none'} (")
    unknown = "not written"
    assert [re.split("  +", line) for line in lines[:4]] == [
        ["runs", "test accuracy", *compare.COLUMNS],
        ["rule=x", "92.00 % ± 2.83", "2 runs", "20 to 30", "1.50", "1e-05", "10.0 s", unknown],
        ["rule=flat", "80.00 %", "1 run", "20", "2.00", "1e-05", "10.0 s", unknown],
        [str(again), "20.00 %", "1 run", "20", "1.00", "1e-05", unknown, unknown],
    ]
    # 1 + 1.5 + 2 + 1, and four times 1e-5.
    assert "All 4 together cost at most epsilon 5.50 at delta 4e-05" in lines[5]
    assert "among runs by private data" in lines[5]
    ((figure, badge),) = figures
    assert not badge
    spent, taken = figure.axes
    assert spent.get_xlabel().startswith("epsilon spent at delta")
    labels = [line.get_label().strip() for line in spent.lines]
    assert labels == ["rule=x", "rule=flat", str(again)]
    assert len(taken.lines) == 3
    assert [len(axes.collections) for axes in figure.axes] == [4, 4], "three ends and a band"
    assert len(figure.legends[0].get_texts()) == 3


def test_a_run_of_an_infinite_epsilon_is_not_for_release(tmp_path, capsys):
    folders = [write(tmp_path / "a", [0.5, 0.9], epsilons=[INF, INF]), write(tmp_path / "b", [0.5])]
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "metrics.jsonl").write_text("{half")
    out = tmp_path / "page.png"
    run(out, *folders, tmp_path / "damaged")
    said = capsys.readouterr().out
    assert "has no proven epsilon" in said
    assert f"Left out: {tmp_path / 'damaged'} (" in said
    assert out.read_bytes().startswith(b"\x89PNG")
    assert out.stat().st_mode & 0o077 == 0
    for words in ([], [tmp_path / "damaged"]):
        with pytest.raises(app.UsageError, match="expected folders of runs"):
            run(out, *words)


@kills("cli/compare.py", "by_epsilon.axhline(end, ", "by_epsilon.axhline(0 * end, ")
def test_runs_without_noise_and_a_guess_stand_beside_private_ones(tmp_path, capsys, monkeypatch):
    """In the columns that the runs have, here of regressions."""
    private, exact = (
        write(tmp_path / name, [4.0, rmse], {"noise": name}, epsilons, name="rmse")
        for name, rmse, epsilons in (("private", 3.0, None), ("exact", 2.0, [INF, INF]))
    )
    for folder in (private, exact):
        np.savez(folder / "evaluation.npz", targets=np.array([0.0, 10.0]), predictions=np.ones(2))
    figures = []
    monkeypatch.setattr(compare.style, "png", lambda *given: figures.append(given) or b"")
    run(tmp_path / "page.png", private, exact)
    head, first, second, said, *_ = capsys.readouterr().out.splitlines()
    assert head.split("  ")[0] == "runs"
    assert "test RMSE" in head
    assert "accuracy" not in head
    assert re.split("  +", first)[:2] == ["noise=private", "3"]
    assert re.split("  +", second)[:5] == ["noise=exact", "2", "1 run", "20", "inf"]
    assert said == "Always guessing the mean of the test targets: test RMSE 5."
    ((figure, badge),) = figures
    assert badge, "without noise it is not for release"
    spent, taken = figure.axes
    curve, line = spent.lines
    assert curve.get_ydata().tolist() == [4.0, 3.0]
    assert set(line.get_ydata()) == {2.0}
    assert line.get_linestyle() == "--"
    assert len(taken.lines) == 2


@kills("cli/compare.py", "    if len(kinds) > 1:", "    if False:")
def test_costs_of_other_units_and_neighbours_do_not_add(tmp_path):
    def ran(name, **other):
        facts = {"unit": "example", "neighbours": "zero-out", **other}
        return write(tmp_path / name, [0.5], {"rule": name}, mechanism=facts)

    one, clients, swapped = runs_of(
        ran("a"), ran("b", unit="client"), ran("c", neighbours="replace-one")
    )
    assert "cost at most epsilon 2.00 at delta 2e-05." in compare.price([one, one])
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
    others = [str(tmp_path / name / "run") for name in "ef"]
    assert groups == {"optimizer=adam": 2, "optimizer=sgd": 1, **dict.fromkeys(others, 1)}


def test_plots_go_into_a_folder_and_long_flags_give_way_to_the_folder(tmp_path, capsys):
    widths = [str(width) for width in range(100, 130)]
    runs = [write(tmp_path / name, [0.5], {"hidden": widths[n:]}) for n, name in enumerate("ab")]
    run(tmp_path / "plots", *runs)
    assert (tmp_path / "plots" / "comparison.png").exists()
    run(tmp_path / "plots", *runs)
    out = capsys.readouterr().out
    assert "hidden" not in out
    assert f"\n{runs[0]}  " in out


def test_steps_without_a_finite_epsilon_are_not_drawn(tmp_path):
    def curve(*epsilons):
        names = (tmp_path / str(len(list(tmp_path.iterdir()))) for _ in epsilons)
        folders = [
            write(name, [i / 10 for i in range(1, len(row) + 1)], epsilons=row)
            for name, row in zip(names, epsilons, strict=True)
        ]
        group = RunGroup("some", runs_of(*folders))
        return [values.round(6).tolist() for values in compare.curve(group, "epsilon", "accuracy")]

    assert curve([1.0, 2.0, INF]) == [[1, 2], [[10], [20]]]
    found = curve([1.0, INF], [2.0, 3.0])
    assert found == [[2], [[10, 10]]], "what one run paid without end is not what the other paid"
    assert curve([1.0, 4.0], [2.0, 3.0]) == [[2, 4], [[10, 10], [20, 20]]]
    with pytest.raises(Missing, match="at no step"):
        curve([1.0, INF], [None, 3.0])


@kills("cli/compare.py", "{three_digits(epsilon)}", "{epsilon:.3g}")
def test_the_table_and_the_price_are_rounded_up(tmp_path):
    runs = runs_of(*(write(tmp_path / name, [0.5], epsilons=[2.0001]) for name in "ab"))
    assert {compare.line(group)[4] for group in compare.groups_of(runs)} == {"2.01"}
    assert "at most epsilon 4.01 at delta 2e-05" in compare.price(runs)

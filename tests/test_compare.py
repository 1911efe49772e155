# SPDX-License-Identifier: Apache-2.0
"""Runs side by side: which are one group, their mean and spread, and what choosing costs."""

import json

import pytest
import run_binary
from absl import app
from html_pages import parsed, text
from mutation import kills

from dpjax.cli.compare import job
from dpjax.cli.compare.job import RunGroup
from dpjax.cli.compare.job import curve as curve_of
from dpjax.reports.load_run import Missing, read

EVIL = "<b>$x$</b>"


def compare(*arguments, status=0):
    return run_binary.run("dpjax", "compare", *arguments, status=status)


def log(path, epsilons, accuracies):
    """A log of the steps 10, 20, ..."""
    rows = [
        {"step": 10 * i, "epsilon": epsilon, "delta": 1e-5, "accuracy": accuracy}
        for i, (epsilon, accuracy) in enumerate(zip(epsilons, accuracies, strict=True), start=1)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write(path, accuracies, flags=None, epsilon=1.0, seconds=10.0, **identity):
    """A run whose accuracies were seen at steps 10, 20, ... for equal parts of epsilon."""
    path.mkdir()
    log(path, [epsilon * i / len(accuracies) for i in range(1, len(accuracies) + 1)], accuracies)
    if flags is not None:
        config = {"flags": {"out": str(path), **flags}, "seconds": seconds}
        (path / "config.json").write_text(json.dumps(config))
    if identity:
        named = {name.replace("_", " "): value for name, value in identity.items()}
        (path / "run.json").write_text(json.dumps(named))
    return path


def groups(*folders):
    """The labels of groups, and the names of their runs."""
    found = job.groups_of([read(folder, arrays=False) for folder in folders])
    return {group.label: [run.path.name for run in group.runs] for group in found}


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    runs = [
        write(folder / "a1", [0.5, 0.90], {"seed": 1, "rule": EVIL, "epochs": 3}),
        write(folder / "a2", [0.6, None, 0.94], {"seed": 2, "rule": EVIL, "epochs": 3}, 1.5),
        write(folder / "b", [0.7, 0.80], {"seed": 1, "rule": "flat", "epochs": 3}, 2.0),
        write(folder / "bare", [0.1, 0.2]),
    ]
    out = folder / "deeper" / "side_by_side.html"
    return out, compare(*runs, "--out", out)


@pytest.mark.slow
def test_runs_that_differ_in_seed_and_folder_alone_are_one_line_of_the_table(compared):
    lines = [[text(cell) for cell in line] for line in parsed(compared[0]).iter("tr")]
    assert lines == [
        ["runs", "test accuracy", "of", "epsilon", "delta", "time of one"],
        [f"rule={EVIL}", "92.00 % ± 2.83", "2 runs", "1.5", "1e-05", "10.0 s"],
        ["rule=flat", "80.00 %", "1 run", "2", "1e-05", "10.0 s"],
        ["bare", "20.00 %", "1 run", "1", "1e-05", "not written"],
    ]


@pytest.mark.slow
def test_the_figure_has_a_line_for_each_group_and_a_band_where_runs_repeat(compared):
    (image,) = parsed(compared[0]).iter("svg")
    shown = [text(node) for node in image.iter("text")]
    assert any(words.startswith("epsilon spent at delta") for words in shown)
    groups = [f"rule={EVIL}", "rule=flat", "bare"]
    assert [words for words in shown if words in groups] == groups
    names = [node.get("id", "") for node in image.iter("g")]
    assert sum("FillBetween" in name for name in names) == 1
    assert compared[0].with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_page_says_what_choosing_costs(compared):
    words = text(parsed(compared[0]).find(".//header"))
    assert "looking at private data" in words
    assert "a cost of its own" in words
    # 1 + 1.5 + 2 + 1, and four times 1e-5; both rounded up, if at all.
    assert "All 4 together" in words
    assert "epsilon 5.5 at delta 4e-05" in words
    assert "has a cost" in compared[1].stdout


@pytest.mark.slow
def test_the_page_is_escaped_and_loads_nothing(compared):
    raw = compared[0].read_text()
    assert "<b>" not in raw
    assert "src=" not in raw
    assert "<script" not in raw
    assert raw.count("http") == 2, "the names of two XML namespaces"


@pytest.mark.slow
def test_a_run_of_an_infinite_epsilon_is_said_to_be_unproved(tmp_path):
    runs = [write(tmp_path / "a", [0.5, 0.9], epsilon=float("inf")), write(tmp_path / "b", [0.5])]
    compare(*runs, "--out", tmp_path / "page.html")
    tree = parsed(tmp_path / "page.html")
    assert "not proved to be private" in text(tree.find(".//header"))
    assert "do not publish" in text(tree.find(".//figure"))
    assert text(tree.find(".//p[@id='left-out']")) == "Not drawn: a (metrics.jsonl has no epsilon)."


@pytest.mark.slow
def test_a_published_seed_is_not_for_release(tmp_path):
    runs = [write(tmp_path / "a", [0.5, 0.9]), write(tmp_path / "b", [0.5])]
    (runs[1] / "run.json").write_text(json.dumps({"--seed": 7}))
    compare(*runs, "--out", tmp_path / "page.html")
    tree = parsed(tmp_path / "page.html")
    assert "b: Seed published (7): not for release." in text(tree.find(".//header"))
    badge = tree.find(".//figure//p[@class]")
    assert "the seed of its noise is published" in text(badge)
    assert badge.get("class") == "badge private"
    compare(runs[0], "--out", tmp_path / "page.html")
    tree = parsed(tmp_path / "page.html")
    assert "Seed published" not in text(tree.find(".//header"))
    assert text(tree.find(".//figure//p[@class]")) == "released"


@pytest.mark.slow
def test_a_folder_that_cannot_be_read_is_named_and_stops_nothing(tmp_path):
    runs = [write(tmp_path / name, [0.5, 0.9]) for name in "abc"]
    (runs[0] / "evaluation.npz").write_bytes(b"")  # which this test does not read
    (runs[1] / "metrics.jsonl").write_text("{half")
    said = compare(*runs, tmp_path / "none", "--out", tmp_path / "page.html")
    tree = parsed(tmp_path / "page.html")
    assert [text(line.find("th")) for line in tree.iter("tr")] == ["runs", "a", "c"]
    assert f"{tmp_path / 'none'} (" in said.stdout
    words = text(tree.find(".//header"))
    assert "All 2 together" in words
    assert "What could not be read is not in these numbers." in words
    assert "no whole line yet" in words
    assert "none is no folder" in words
    alone = compare(runs[1], "--out", tmp_path / "page.html", status=1)
    assert "none of these folders can be read" in alone.stdout + alone.stderr


@pytest.mark.slow
def test_a_page_is_not_replaced_by_its_own_figure(tmp_path):
    run = write(tmp_path / "a", [0.5])
    refused = compare(run, "--out", tmp_path / "page.png", status=1)
    assert "such as" in refused.stdout + refused.stderr
    assert "page.html" in refused.stdout + refused.stderr
    assert [*tmp_path.iterdir()] == [run]


RAN = {
    "data": "hash of rows",
    "test_data": "another hash",
    "program": {"functions": "p", "step": ["s"]},
}


@kills("cli/compare/job.py", "data_of(run), traced(run)]", "traced(run)]", slow=True)
@kills("cli/compare/job.py", "{planned(run)} {program_of(run)}", "{planned(run)}", slow=True)
def test_runs_of_other_data_or_code_are_another_group(tmp_path):
    flags, here = {"dataset": "my.csv", "rule": "flat"}, {"numerics": {"jax": "1", "mesh": {}}}

    def ran(name, seed=1, **other):
        return write(tmp_path / name, [0.5], {**flags, "seed": seed}, **{**RAN, **here, **other})

    same = [ran("a1"), ran("a2", 2, numerics={"jax": "1", "mesh": {"data": 2}})]
    same.append(ran("a3", program={"functions": "p", "step": ["of another mesh"]}))
    assert groups(*same) == {"a1": ["a1", "a2", "a3"]}
    data = ran("b", data="other hash", test_data="other hash")
    where = f"data as in {tmp_path}"
    assert groups(*same[:2], data) == {
        f"a1, {where}/a1": ["a1", "a2"],
        f"b, {where}/b": ["b"],
    }
    program = ran("c", program={"functions": "q"})
    where = f"program as in {tmp_path}"
    assert groups(same[0], program) == {f"a1, {where}/a1": ["a1"], f"c, {where}/c": ["c"]}
    other = ran("d", numerics={"jax": "2"}, program={"functions": "q"})
    assert groups(*same[:2], other) == {"jax=1": ["a1", "a2"], "jax=2": ["d"]}
    for label in groups(same[0], data, program, other):
        assert "hash" not in label, "it confirms a guess of the data"


@kills(
    "reports/load_run.py", 'bool(self.card.get("not_private"))', "True", case="unproved", slow=True
)
@pytest.mark.parametrize(
    ("reason", "words"),
    [
        pytest.param("The noise multiplier is 0.", "is not private, so neither", id="not private"),
        pytest.param(None, "is not proved to be private, so nothing is proved", id="unproved"),
    ],
)
def test_not_private_and_not_proved_are_two_verdicts(reason, words, tmp_path):
    run = read(write(tmp_path / "a", [0.5]), arrays=False)
    claims = {"rdp": {"value": "inf", "proven": True}}
    other = run._replace(card={"epsilon": claims, "not_private": reason, "delta": 1e-5})
    assert words in job.price([run, other])
    assert run.not_private is False
    assert other.not_private is (reason is not None)


@kills("cli/compare/job.py", "if why := apart(runs):", "if why := '':", slow=True)
def test_costs_of_other_units_neighbours_and_data_do_not_add(tmp_path, monkeypatch):
    flags, facts = {"dataset": "a"}, {"unit": "example", "neighbours": "zero-out"}

    def ran(name, **other):
        known = {**RAN, "mechanism": facts, **other}
        return read(write(tmp_path / name, [0.5], {**flags, "rule": name}, **known), arrays=False)

    one, clients = ran("a"), ran("b", mechanism={**facts, "unit": "client"})
    assert "cost at most epsilon 2 at delta 2e-05." in job.price([one, one])
    assert job.price([one, clients]).endswith(
        "Their costs do not add: these runs protect zero-out neighbours of one client and zero-out "
        "neighbours of one example."
    )
    seen = []
    monkeypatch.setattr(job.style, "panel", lambda _, label, __: seen.append(label) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        job.draw(job.groups_of([one, clients]), "")
    assert seen == ["epsilon spent for one client or one example at delta 1e-05"]
    html = "".join(job.body_of(job.groups_of([one, clients]), "", [], "", [""]))
    assert "protects</th>" in html
    assert "zero-out neighbours of one client</td>" in html
    swapped = ran("c", mechanism={**facts, "neighbours": "replace-one"})
    assert "replace-one neighbours of one example and" in job.price([one, swapped])
    other = ran("d", data="other hash")
    assert job.price([one, other]).endswith("these runs were trained on different data.")
    flags["features"] = "scattering"
    assert "cost at most" in job.price([one, ran("e", data="hash of features")])
    assert "different data" in job.price([one, ran("f", data="hash", test_data="other hash")])


def test_features_on_scales_with_noise_are_of_the_same_data(tmp_path):
    flags = {"dataset": "mnist", "features": "scattering"}
    runs = [
        write(tmp_path / name, [0.5], {**flags, "seed": i}, **{**RAN, "data": name})
        for i, name in enumerate("ab")
    ]
    assert groups(*runs) == {"a": ["a", "b"]}


def test_a_label_has_the_flags_with_an_effect(tmp_path):
    flags = {"optimizer": "adam", "momentum": 0.9, "steps": None, "epochs": 5.0}
    others = {"optimizer": "sgd", "momentum": 0.5, "steps": 9, "epochs": 40.0}
    runs = [write(tmp_path / "a", [0.5], flags), write(tmp_path / "b", [0.5], others)]
    labels = ["epochs=5.0, optimizer=adam", "momentum=0.5, optimizer=sgd, steps=9"]
    assert [*groups(*runs)] == labels
    without = [
        write(tmp_path / name, [0.5], {**flags, "momentum": i}) for i, name in enumerate("cd")
    ]
    assert [*groups(*without)] == ["c", "d"]
    for folder in (tmp_path / "e", tmp_path / "f"):
        folder.mkdir()
    same = [write(tmp_path / name / "run", [0.5]) for name in "ef"]
    assert [*groups(*same)] == [f"run ({each})" for each in same]


def test_steps_without_a_finite_epsilon_are_not_drawn(tmp_path):
    def logged(epsilons):
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        path.mkdir()
        log(path, epsilons, [i / 10 for i in range(1, len(epsilons) + 1)])
        return path

    def curve(*runs):
        group = RunGroup("some", [read(logged(epsilons), arrays=False) for epsilons in runs])
        return [values.round(6).tolist() for values in curve_of(group)]

    inf = float("inf")
    assert curve([1.0, 2.0, inf]) == [[1, 2], [[10], [20]]]
    found = curve([1.0, inf], [2.0, 3.0])
    assert found == [[2], [[10, 10]]], "what one run paid without end is not what the other paid"
    assert curve([1.0, 4.0], [2.0, 3.0]) == [[2, 4], [[10, 10], [20, 20]]]
    with pytest.raises(Missing, match="at no step"):
        curve([1.0, inf], [None, 3.0])


def test_an_accuracy_for_each_class_is_not_one(tmp_path):
    folder = write(tmp_path / "a", [0.5, [0.5, 0.25]], {"seed": 1})
    group = RunGroup("some", [read(folder, arrays=False)])
    with pytest.raises(Missing, match="its accuracy is not one number"):
        curve_of(group)
    assert job.line(group)[1] == "none"


@pytest.mark.parametrize("out", ["afile/x.html", "/proc/x.html", "taken", "page.html"])
def test_a_page_that_cannot_be_written_is_refused_before_any_file(out, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "run", [0.5])
    (tmp_path / "afile").touch()
    for name in ("taken", "page.png"):
        (tmp_path / name).mkdir()
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(job, "draw", lambda *_: ("<svg/>", b"", []))
    with pytest.raises(app.UsageError, match=f"--out={out}: "):
        job.compare(["run"], out)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.slow
def test_without_runs_the_usage_is_shown():
    assert "expected folders of runs" in compare(status=1).stderr


def test_a_folder_under_two_names_is_one_run(tmp_path, monkeypatch):
    write(tmp_path / "a", [0.5], {"seed": 1})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(job, "draw", lambda *_: ("<svg/>", b"", []))
    page = job.compare(["a", "a/", tmp_path / "a", "../" + tmp_path.name + "/a"], "page.html")
    assert "1 run of dpjax" in page.read_text()


def test_a_run_whose_name_begins_with_an_underscore_is_in_the_legend(tmp_path):
    """Matplotlib would leave such a label out."""
    runs = [read(write(tmp_path / name, [0.5, 0.9]), arrays=False) for name in ("_first", "second")]
    image, *_ = job.draw(job.groups_of(runs), "released")
    assert ">_first<" in image.replace(" ", "")


@kills(
    "cli/compare/job.py",
    'upwards(group.epsilon(), ".3g")',
    'format(group.epsilon(), ".3g")',
    slow=True,
)
@kills("cli/compare/job.py", "upwards(epsilon, '.3g')", "format(epsilon, '.3g')", slow=True)
def test_the_table_and_the_price_are_rounded_up(tmp_path):
    runs = [read(write(tmp_path / name, [0.5], epsilon=2.0001), arrays=False) for name in "ab"]
    assert {job.line(group)[3] for group in job.groups_of(runs)} == {"2.01"}
    assert "at most epsilon 4.01 at delta 2e-05" in job.price(runs)

# SPDX-License-Identifier: Apache-2.0
"""The page of a run: every figure, its badge, and the errors for damaged files."""

import json
import math
import pathlib
import re
import sys
import types
import warnings
import xml.etree.ElementTree as ET

import matplotlib
import numpy as np
import pytest
from html_pages import parsed, text
from mutation import kills
from small_mechanisms import mechanism_with

import dpjax
from dpjax import _display, reports, sampling
from dpjax.cli import report as pages
from dpjax.cli.report import figures, html_report, load_run, measures, style
from dpjax.mechanism import Spent, card

DELTA = 1e-5
FACTS = {"multiplier_and_steps": [[2.0, 6], [1.5, 4]], "clipping": {"bounds": [0.5]}}
CARD = {
    "mechanism": {"format": card.FORMAT, **FACTS},
    "steps": 10,
    "delta": DELTA,
    "epsilon": {
        name: {"value": value, "proven": name != "gdp"}
        for name, value in {"rdp": 2.5, "pld": 2.25, "gdp": 1.5}.items()
    },
    "randomness": "fresh",
}
EVIL = "<script>alert('x')</script>"
CONFIG = {
    "command": f"train.py --note={EVIL}",
    "dataset": "digits & <i>more</i>",
    "model": "mlp",
    "parameters": 9610,
    "seconds": 75.4,
    "flags": {"note": EVIL, "seed": None, "hidden": ["128", "64"], "bound": 0.5},
    "versions": {"dpjax": "0.1.0"},
}
STATEMENT = "Privacy statement\n\n  (2.25, 1e-05) <private>\n\nReferences\n@misc{x&y}\n"
BOARD = (
    "Statement for a board\n\nWhat\n\n  1 < 2\n  words\n\n  10 %     at most 30 %\n\n  - a & b\n"
)
# 8 of 10 are right; of class 2, a half. Confidence is 0.8 throughout, so nothing is miscalibrated.
LABELS = np.array([0, 0, 0, 1, 1, 1, 2, 2, 2, 2])
GUESSES = np.array([0, 0, 0, 1, 1, 1, 2, 2, 0, 0])
PROBABILITIES = np.where(np.eye(3)[GUESSES] > 0, 0.8, 0.1)
DIAGNOSTICS = {"norms": np.array([[0.0], [0.25], [1.0], [2.0]]), "bounds": np.array([0.5])}
SEEN = {
    "accuracy": "80.0 % at the end, 80.0 % at best. Always guessing the most frequent class: "
    "40.0 %.",
    "error": "3 at the end, 3 at best.",
    "test_loss": "0.1 at the end, 0.1 at best.",
    "training_loss": "0.2 at the end.",
    "noise": "From 2 to 1.5, over 10 accounted steps.",
    "clipping": "75 % of the examples were above the bound; the cosine was 0.90.",
    "norms": "1.5 at the end.",
    "gradients": "Of 4 training examples, 50% are above the bound; median 0.625.",
    "classes": "Lowest: class 2, 50.0 % of 4 examples.",
    "confusion": "Most often class 2 was taken for class 0: 2 of 4 examples.",
    "calibration": "Expected calibration error (ECE) 0.000, largest (MCE) 0.000.",
}
PRIVATE = {"training_loss", "clipping", "norms", "gradients"}
ALL = {plot.name for plot in figures.PLOTS}


def row(step, **changes):
    private = {"loss": 2 / step, "examples": 10.0, "norm": 1.5, "clipped": 0.75, "cosine": 0.9}
    return {
        "step": step,
        "epsilon": step / 4,
        "delta": DELTA,
        "accuracy": 0.4 + step / 25,
        "nll": 1 / step,
        "examples_per_second": 12345.6,
        "private": private,
        **changes,
    }


def write(path, rows=None, *, card=CARD, config=CONFIG, statement=STATEMENT, **diagnostics):
    """Writes the folder of a run."""
    path.mkdir(parents=True, exist_ok=True)
    rows = [row(step) for step in range(1, 11)] if rows is None else rows
    (path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    if card is not None:
        (path / "privacy.json").write_text(json.dumps(card))
        (path / "config.json").write_text(json.dumps(config))
        (path / "statement.txt").write_text(statement)
        (path / "board.txt").write_text(BOARD)
        np.savez(path / "evaluation.npz", labels=LABELS, probabilities=PROBABILITIES)
        np.savez(path / "diagnostics.npz", **{**DIAGNOSTICS, **diagnostics})
    return path


def badges(tree):
    """Figure -> badge."""
    return {figure.get("id"): text(figure.find(".//p[@class]")) for figure in tree.iter("figure")}


def drawn(function, run):
    """What a function draws, and what it says."""
    with style.style():
        figure = style.canvas()
        return figure, function(figure, run)


def stairs(figure):
    """Values and edges of the first stairs of a figure."""
    return figure.axes[0].patches[0].get_data()[:2]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    # Of a classifier and of a regression, which no run is.
    rows = [row(step, rmse=13 - step) for step in range(1, 11)]
    path = write(tmp_path_factory.mktemp("runs") / "whole", rows)
    before = dict(matplotlib.rcParams)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pages.report(path) == path / "report.html"
    assert dict(matplotlib.rcParams) == before, "a setting of the user's was changed"
    return path


def test_every_figure_is_there_as_svg_and_as_png(whole):
    tree = parsed(whole / "report.html")
    assert [figure.get("id") for figure in tree.iter("figure")] == [p.name for p in figures.PLOTS]
    for figure, plot in zip(tree.iter("figure"), figures.PLOTS, strict=True):
        (image,) = figure.iter("svg")
        assert image.get("role") == "img"
        assert image.get("aria-label", "").startswith(plot.title)
        assert list(image.iter("path"))
        assert plot.title in text(figure.find(".//h3"))
        assert plot.words in text(figure.find(".//figcaption"))
        assert text(figure.find(".//p[@class='seen']")) == SEEN[plot.name], plot.name
    pngs = {path.stem: path.read_bytes() for path in (whole / "figures").iterdir()}
    assert set(pngs) == ALL
    assert all(image.startswith(b"\x89PNG\r\n\x1a\n") for image in pngs.values())
    assert "left-out" not in (whole / "report.html").read_text()


@kills("cli/report/html_report.py", "public=is_public", "public=True", slow=True)
def test_badges_say_what_was_computed_before_the_noise(whole):
    """And only the owner can read such figures and the page, from their first byte."""
    found = badges(parsed(whole / "report.html"))
    assert found == {name: figures.PRIVATE if name in PRIVATE else figures.RELEASED for name in ALL}
    assert figures.RELEASED == "released"
    assert figures.PRIVATE == "computed from private data without noise: do not publish"
    assert (whole / "report.html").stat().st_mode & 0o077 == 0
    for path in (whole / "figures").iterdir():
        assert bool(path.stat().st_mode & 0o077) == (path.stem not in PRIVATE), path


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, PRIVATE),
        ({"card": {**CARD, "epsilon": {"gdp": {"value": 1.0, "proven": False}}}}, ALL - {"noise"}),
        ({"card": {**CARD, "epsilon": {"rdp": {"value": "inf", "proven": True}}}}, ALL - {"noise"}),
    ],
    ids=["finite", "nothing proven", "epsilon infinite"],
)
def test_what_is_private_depends_on_the_run(changes, expected, tmp_path):
    run = load_run.read(write(tmp_path, **changes))
    assert {p.name for p in figures.PLOTS if p.badge(run) == figures.PRIVATE} == expected
    assert {p.badge(run) for p in figures.PLOTS} == {figures.PRIVATE, figures.RELEASED}


@kills("cli/report/figures.py", "return SEEDED", "return RELEASED", slow=True)
def test_what_a_supplied_key_protects_is_not_released(tmp_path, monkeypatch):
    """The card says so, and while there is no card run.json."""
    monkeypatch.setattr("dpjax.cli.report.html_report.PLOTS", figures.PLOTS[:1])
    run = load_run.read(write(tmp_path, card={**CARD, "randomness": "supplied"}))
    found = {plot.name: plot.badge(run) for plot in figures.PLOTS}
    assert found.pop("noise") == figures.RELEASED, "it follows from the mechanism alone"
    assert {name for name, badge in found.items() if badge == figures.PRIVATE} == PRIVATE
    assert set(found.values()) == {figures.PRIVATE, figures.SEEDED}
    page = parsed(pages.report(tmp_path))
    assert badges(page) == {"accuracy": figures.SEEDED}
    assert page.find(".//figure//p[@class]").get("class") == "badge private"
    assert "The key was supplied" in text(page.find(".//header"))
    (tmp_path / "privacy.json").unlink()
    assert not load_run.read(tmp_path).supplied
    (tmp_path / "run.json").write_text(json.dumps({"randomness": "supplied"}))
    assert figures.PLOTS[0].badge(load_run.read(tmp_path)) == figures.SEEDED


def test_numbers_of_the_header_and_the_flags(whole):
    head = text(parsed(whole / "report.html").find(".//header"))
    for words in (
        "mlp on digits & <i>more</i>",
        "(2.25, 10−5)-differentially private, with 80.0 % test accuracy.",
        "test RMSE3",
        "epsilon2.25by pld; 2.50 by rdp",
        "steps10",
        "examples per second12,300",
        "time1 min 15 s",
    ):
        assert words in head, words
    assert "The key" not in head
    assert "board.txt. What 1 < 2 words 10 %at most 30 % a & b" in text(
        parsed(whole / "report.html")
    )
    page = (whole / "report.html").read_text()
    for html in ("<h4>What</h4>", "<p>1 &lt; 2 words</p>", "<ul><li>a &amp; b</li></ul>"):
        assert html in page
    assert '<table class="columns"><tr><td>10 %</td><td>at most 30 %</td></tr></table>' in page
    lines = parsed(whole / "report.html").findall(".//tr[th]")
    cells = [(text(line.find("th")), text(line.find("td"))) for line in lines]
    for pair in (("hidden", "128, 64"), ("seed", "not set"), ("bound", "0.5"), ("dpjax", "0.1.0")):
        assert pair in cells


FIXED_BEFORE = Spent(sampling=sampling.fixed(1000, 10), runs=((1.0, 5),))


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "({}, 10−5)-differentially private."),
        ({"noise_multiplier": 0.0}, "Not differentially private: epsilon is infinite."),
        (
            {"before": [FIXED_BEFORE], "neighbours": "replace-one"},
            "Not proved to be differentially private.",
        ),
    ],
    ids=["proved", "bare", "no method has an answer"],
)
def test_the_report_distinguishes_no_noise_from_no_proof(changes, verdict, tmp_path, monkeypatch):
    """As the statement does, and in the same digits, rounded up."""
    monkeypatch.setattr("dpjax.cli.report.html_report.PLOTS", ())
    mechanism = mechanism_with(1000, 10, **{"noise_multiplier": 1.05, "steps": 10, **changes})
    card = reports.card(mechanism, DELTA)
    words = dpjax.statement(mechanism, DELTA)
    pages.report(write(tmp_path, [row(10, accuracy=None)], card=card, statement=words))
    head = text(parsed(tmp_path / "report.html").find(".//header"))
    claimed = words.splitlines()[2].strip(" (").partition(",")[0]
    assert verdict.format(claimed) in head
    assert ("NOT PROVED" in words) == ("Not proved" in head)
    assert ("NOT differentially" in words) == ("Not differentially" in head)


def test_a_card_of_an_earlier_run_is_not_believed(tmp_path, monkeypatch):
    """The new run was killed, so the card next to its log is of the run that it overwrote."""
    monkeypatch.setattr("dpjax.cli.report.html_report.PLOTS", figures.PLOTS[:1])
    rows = [row(step, epsilon=step / 2) for step in (10, 20, 30)]
    run = load_run.read(write(tmp_path, rows))
    assert run.foreign == "it counts 10 steps, and the log counts 30"
    assert (run.card, run.statement, run.board, run.config, run.evaluation) == (None,) * 5
    assert run.diagnostics is None
    assert run.epsilons == {"the log": 15.0}
    with pytest.raises(load_run.Missing, match=r"evaluation.npz is not of this run"):
        run.array("evaluation", "labels")
    page = parsed(pages.report(tmp_path))
    assert "(15.0, 10−5)-differentially private" in text(page.find(".//header"))
    assert "it counts 10 steps" in text(page.find(".//header"))
    assert "2.25" not in text(page)


LOADING = {"script", "link", "img", "iframe", "object", "image", "foreignObject"}


def test_the_page_loads_nothing_and_runs_nothing(whole):
    raw, tree = (whole / "report.html").read_text(), parsed(whole / "report.html")
    for node in tree.iter():
        assert node.tag not in LOADING
        for name, value in node.attrib.items():
            local = name.rpartition("}")[2]
            assert not local.startswith("on"), local
            assert local != "src"
            assert local != "href" or value.startswith("#")
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", raw))
    assert "@import" not in raw
    names = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}  # names, not addresses
    assert set(re.findall(r"https?://[^\"'\s<]*", raw)) == names


def test_ids_do_not_clash_and_colors_are_the_pages(whole):
    raw, tree = (whole / "report.html").read_text(), parsed(whole / "report.html")
    ids = [node.get("id") for node in tree.iter() if node.get("id")]
    assert len(ids) == len(set(ids))
    named = (item for node in tree.iter() for item in node.attrib.items())
    meant = re.findall(r"url\(#([^)]*)\)", raw) + [to[1:] for name, to in named if "href" in name]
    assert meant
    assert set(meant) <= set(ids)
    for image in tree.iter("svg"):
        inside = ET.tostring(image, encoding="unicode")
        assert not re.findall(r"#[0-9a-f]{6}\b(?<!#000000)", inside), "a color of no palette"
    assert set(style.PALETTE) == set(style.DARK)
    dark = raw[raw.index("prefers-color-scheme:dark") :]
    assert all(f"--{name}:{color};" in dark for name, color in style.DARK.items())


EARLIER = Spent(sampling=sampling.poisson(1000, 10), runs=((2.0, 5),))


@kills("cli/report/load_run.py", 'if card["mechanism"] !=', 'if False and card["mechanism"] !=')
@pytest.mark.parametrize(
    "changes", [{"noise_multiplier": 2.5}, {"before": [EARLIER]}], ids=["noise", "an earlier run"]
)
def test_a_card_of_another_mechanism_is_not_believed(changes, tmp_path):
    """Such as of cheaper steps with the same noise, in a folder that another run overwrote."""
    own, earlier = (
        mechanism_with(1000, 10, **{"noise_multiplier": 2.0, "steps": 10, **changed})
        for changed in ({}, changes)
    )
    (tmp_path / "run.json").write_text(json.dumps(own.identity))
    assert load_run.read(write(tmp_path, card=reports.card(own, DELTA))).foreign == ""
    found = load_run.read(write(tmp_path, card=reports.card(earlier, DELTA)))
    assert (found.foreign, found.card) == ("run.json describes another mechanism", None)


def test_a_card_of_another_format_is_refused_with_what_to_do(tmp_path):
    path = write(tmp_path, card={"format": "dpjax privacy card 1", "noise": {}})
    with pytest.raises(ValueError, match=r"privacy.json: .* format 1; expected 4"):
        load_run.read(path)


def test_without_its_other_files_a_run_still_has_a_page(tmp_path):
    write(tmp_path, [{"step": 3, "epsilon": 1.0, "delta": DELTA, "accuracy": 0.5}], card=None)
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "norms.png").write_bytes(b"from an earlier page")
    tree = parsed(pages.report(tmp_path))
    assert set(badges(tree)) == {"accuracy"}
    assert [path.name for path in (tmp_path / "figures").iterdir()] == ["accuracy.png"]
    left_out = text(tree.find(".//p[@id='left-out']"))
    for words in (
        "test loss against epsilon (metrics.jsonl has no test_loss)",
        "training loss against epsilon (metrics.jsonl has no private / loss)",
        "noise schedule (there is no privacy.json)",
        "what clipping does (metrics.jsonl has no private / clipped)",
        "gradient norms at the end (there is no diagnostics.npz)",
        "confusion matrix (there is no evaluation.npz)",
    ):
        assert words in left_out, words
    assert left_out.count("(") == len(ALL) - 1
    assert "epsilon1.00by the log" in text(tree.find(".//header"))
    assert "There is no statement.txt" in text(tree)


def test_damaged_files_are_refused_in_words(tmp_path):
    for log in ("", "{half"):
        (tmp_path / "metrics.jsonl").write_text(log)
        with pytest.raises(FileNotFoundError, match=r"a metrics\.jsonl with a row"):
            pages.report(tmp_path)
    write(tmp_path)
    (tmp_path / "evaluation.npz").write_bytes(b"")
    with pytest.raises(ValueError, match=r"evaluation\.npz is not a whole"):
        pages.report(tmp_path)
    assert load_run.read(tmp_path, arrays=False).card == CARD, "no array is read"


HOSTILE = "<img src=x onerror=alert(1)>$x^$"


def hostile(value):
    """The value with hostile text in place of every text, and a hostile name in every mapping."""
    if isinstance(value, dict):
        return {name: hostile(inner) for name, inner in value.items()} | {HOSTILE: HOSTILE}
    if isinstance(value, list):
        return [hostile(inner) for inner in value]
    return HOSTILE if isinstance(value, str) else value


@pytest.mark.parametrize("foreign", ["", "it counts"])
def test_no_text_of_a_file_is_html(foreign, tmp_path, monkeypatch):
    monkeypatch.setattr("dpjax.cli.report.html_report.PLOTS", figures.PLOTS[:1])
    mechanism = mechanism_with(1000, 10, noise_multiplier=1.05, steps=10)
    made = hostile(json.loads(json.dumps(reports.card(mechanism, DELTA))))
    made["mechanism"] |= {"multiplier_and_steps": [[2.0, 10]], "format": card.FORMAT}
    made["epsilon"][HOSTILE] = {"value": 9.0, "proven": True}
    identity = {"mechanism": dict(made["mechanism"]), "note": HOSTILE}
    if foreign == "it counts":
        made["steps"] = HOSTILE
    rows = [row(step, method=HOSTILE, **{f"{HOSTILE}s_per_second": 1.0}) for step in (5, 10)]
    write(tmp_path, rows, card=made, config=hostile(CONFIG), statement=STATEMENT + HOSTILE)
    (tmp_path / "run.json").write_text(json.dumps(identity))
    page = pages.report(tmp_path)
    assert "<img" not in page.read_text()
    words = text(parsed(page))
    assert f"{HOSTILE}s per second" in words
    assert (f"of an earlier run in this folder: {foreign}" in words) == bool(foreign)


@pytest.mark.parametrize(
    ("file", "arrays", "figure"),
    [
        ("diagnostics", {**DIAGNOSTICS, "norms": np.ones((4, 2))}, "gradients"),
        ("evaluation", {"labels": LABELS + 7, "probabilities": PROBABILITIES}, "confusion"),
    ],
    ids=["one bound for two groups", "labels out of range"],
)
def test_a_figure_without_meaning_costs_no_other_figure(
    file, arrays, figure, tmp_path, monkeypatch
):
    kept = [plot for plot in figures.PLOTS if plot.name in (figure, "noise")]
    monkeypatch.setattr("dpjax.cli.report.html_report.PLOTS", kept)
    np.savez(write(tmp_path) / f"{file}.npz", **arrays)
    tree = parsed(pages.report(tmp_path))
    assert set(badges(tree)) == {"noise"}
    assert "its data cannot be drawn: " in text(tree.find(".//p[@id='left-out']"))


def test_a_row_of_another_kind_has_a_page(tmp_path, monkeypatch):
    """`fit` logs one accuracy for each class; null and text were written by others."""
    monkeypatch.setattr("dpjax.cli.report.html_report.PLOTS", figures.PLOTS[:4])
    rows = [row(1, accuracy=[0.5, 0.25]), row(2, accuracy=[0.5, 0.25], nll="low", delta=None)]
    run = load_run.read(write(tmp_path, rows, card=None))
    assert math.isnan(run.accuracy)
    assert math.isnan(run.delta)
    tree = parsed(pages.report(tmp_path))
    assert set(badges(tree)) == {"accuracy", "test_loss", "training_loss"}
    assert "37.5 % at the end, 37.5 % at best. The line is the mean of 2 groups" in text(tree)
    assert "test accuracy" not in text(tree.find(".//header"))


def test_nulls_leave_gaps(tmp_path):
    rows = [row(step, accuracy=None if step == 2 else step / 4) for step in (1, 2, 3)]
    rows[0]["private"]["norm"] = [1.0, 3.0]
    rows[1]["private"]["norm"] = None
    rows[2]["private"]["norm"] = [2.0, None]
    mechanism = {**CARD["mechanism"], "clipping": {"bounds": [0.5, 0.5]}}
    run = load_run.read(write(tmp_path, rows, card={**CARD, "mechanism": mechanism, "steps": 3}))
    figure, seen = drawn(figures.accuracy, run)
    np.testing.assert_array_equal(figure.axes[0].lines[0].get_ydata(), [25, np.nan, 75])
    assert seen.startswith("75.0 % at the end, 75.0 % at best.")
    figure, seen = drawn(figures.norms, run)
    line, bound = figure.axes[0].lines
    np.testing.assert_array_equal(line.get_ydata(), [2, np.nan, 2])  # the mean of both groups
    assert np.all(np.asarray(bound.get_ydata()) == 0.5)
    assert seen == "2 at the end. The line is the mean of 2 groups, the band their range."
    assert len(figure.axes[0].collections) == 1, "the band from the shortest to the longest group"


def test_a_model_that_is_no_better_than_a_guess_is_named(tmp_path):
    for accuracy, said in ((0.9, False), (0.4, True), (0.3, True)):
        run = load_run.read(write(tmp_path, [row(10, accuracy=accuracy)]))
        assert ("no better than always guessing" in measures.first_and_guess(run)) == said
    targets = np.array([1.0, 5.0])
    np.savez(tmp_path / "evaluation.npz", targets=targets, predictions=targets)
    for rmse, said in ((1.9, False), (2.0, True)):
        only = {"step": 10, "epsilon": 1.0, "rmse": rmse, "mae": 1.5, "r2": 0.5}
        (tmp_path / "metrics.jsonl").write_text(json.dumps(only))
        run = load_run.read(tmp_path)
        assert ("no better than always guessing the mean" in measures.first_and_guess(run)) == said
        assert (
            measures.others_and_guess(run) == "test MAE 1.5 (a guess: 2), R2 0.500 (a guess: 0.000)"
        )


@kills("cli/report/measures.py", "> 1.5 * guess.get", "> 0 * guess.get")
def test_unlike_and_two_classes_have_further_measures(tmp_path):
    measured = {"balanced_accuracy": 0.6, "auroc": 0.7, "average_precision": 0.3}
    for ones, unlike in ((1, True), (4, False)):
        write(tmp_path, [row(10, **measured)])
        np.savez(tmp_path / "evaluation.npz", labels=np.arange(10) < ones)
        run = load_run.read(tmp_path)
        assert (
            "balanced accuracy 60.0 % (a guess: 50.0 %), " in measures.others_and_guess(run)
        ) == unlike
        assert measures.others_and_guess(run).endswith(
            f"AUROC 0.700 (a guess: 0.500), average precision 0.300 (a guess: {ones / 10:.3f})"
        )


def test_where_epsilon_is_not_finite_steps_are_the_axis(tmp_path):
    run = load_run.read(write(tmp_path, [row(2, epsilon=math.inf), row(4, epsilon=None)]))
    figure, _ = drawn(figures.accuracy, run)
    assert figure.axes[0].get_xlabel() == "step (epsilon is not finite)"
    np.testing.assert_array_equal(figure.axes[0].lines[0].get_xdata(), [2, 4])


def test_the_bound_is_a_line_where_it_is_one_number(tmp_path):
    for bounds, lines in (([0.5, 0.5], 2), ([0.5, 0.6], 1), (["inf"], 1)):
        mechanism = {**CARD["mechanism"], "clipping": {"bounds": bounds}}
        run = load_run.read(write(tmp_path, card={**CARD, "mechanism": mechanism}))
        assert len(drawn(figures.norms, run)[0].axes[0].lines) == lines
    # An adapted bound is the one that was released.
    bounds = [0.5, 0.4, 0.3]
    rows = [row(t, bound=[b, 2 * b]) for t, b in enumerate(bounds, start=1)]
    figure, _ = drawn(figures.norms, load_run.read(write(tmp_path, rows)))
    _, bound = figure.axes[0].lines
    np.testing.assert_allclose(bound.get_ydata(), np.multiply(1.5, bounds))
    assert len(figure.axes[0].collections) == 1, "from the smallest to the largest group"


def test_every_step_and_every_example_is_drawn(whole):
    figure, _ = drawn(figures.noise, load_run.read(whole))
    values, edges = stairs(figure)
    np.testing.assert_array_equal(values, [2.0, 1.5])
    np.testing.assert_array_equal(edges, [0, 6, 10])
    figure, _ = drawn(figures.gradients, load_run.read(whole))
    counts, edges = stairs(figure)
    assert counts.sum() == 4
    assert counts[0] == 1, "a gradient of zero is among the shortest"
    assert edges[-1] > 2
    assert np.all(np.asarray(figure.axes[0].lines[0].get_xdata()) == 0.5)


def test_each_group_has_its_histogram(tmp_path):
    draw = np.random.default_rng(0)
    norms, bounds = draw.lognormal(size=(50, 14)), np.linspace(0.1, 1, 14)
    norms[3, 2] = np.inf
    groups = {"groups": ["$first$", "the/very/long/name/of/a/layer/kernel"]}
    mechanism = {**CARD["mechanism"], "clipping": groups}
    write(tmp_path, card={**CARD, "mechanism": mechanism}, norms=norms, bounds=bounds)
    run = load_run.read(tmp_path)
    figure, seen = drawn(figures.gradients, run)
    lines = [np.max(np.asarray(axes.lines[0].get_xdata())) for axes in figure.axes if axes.lines]
    np.testing.assert_allclose(lines, bounds[:12])
    titles = [axes.get_title() for axes in figure.axes]
    assert titles[:3] == ["$first$", "…" + "the/very/long/name/of/a/layer/kernel"[-25:], "group 2"]
    assert "1 norms are not finite" in seen
    assert "The first 12 of 14 groups are drawn." in seen


def test_small_numbers_are_powers_and_claims_are_rounded_up():
    assert _display.power("1e-05") == "10<sup>\N{MINUS SIGN}5</sup>"
    assert _display.power("2.5e-06") == "2.5 × 10<sup>\N{MINUS SIGN}6</sup>"
    assert _display.power("0.01") == "0.01"
    run = load_run.SavedRun(pathlib.Path(), [{"step": 1, "epsilon": 1.0, "delta": 1.2301e-5}])
    assert html_report._delta(run) == "1.24 × 10<sup>\N{MINUS SIGN}5</sup>"


@pytest.fixture
def notebook(monkeypatch):
    """What a notebook would show: a list for each output, with its images in order."""
    outputs = []

    def display(image, display_id):
        assert display_id is True
        outputs.append([image])
        return types.SimpleNamespace(update=outputs[-1].append)

    cell = types.SimpleNamespace(Image=lambda image, width: image, display=display)
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", cell)
    return outputs


def test_a_live_plot_replaces_its_figure(notebook):
    rows = [row(step, method="pld") for step in (1, 2)]
    plot = pages.live_plot("accuracy")
    for count in (1, 2):
        plot(rows[:count])
    (images,) = notebook
    assert len(set(images)) == 2
    assert all(image.startswith(b"\x89PNG") for image in images)


@pytest.fixture
def pictures(notebook, monkeypatch):
    """The figures of a live plot, with their notes."""
    seen, real = [], style.png
    monkeypatch.setattr(
        "dpjax.cli.report.live.png", lambda *given: seen.append(given) or real(*given)
    )
    return seen


@kills("cli/report/live.py", "badge = PRIVATE", "badge = RELEASED", case="named")
@pytest.mark.parametrize(
    ("names", "changes", "labels", "note"),
    [
        ((), {}, ["accuracy", "nll"], ""),
        (("accuracy", "private/loss"), {}, ["accuracy", "private/loss"], figures.PRIVATE),
        (("nll",), {"epsilon": math.inf}, ["nll"], figures.PRIVATE),
        (("nll",), {"estimate": True}, ["nll"], figures.PRIVATE),
    ],
    ids=["released", "named", "bare", "estimated"],
)
def test_a_live_plot_says_what_is_not_for_release(names, changes, labels, note, pictures):
    rows = [row(step, method="pld", bound=1.0, stop=0.0, **changes) for step in (1, 2)]
    pages.live_plot(*names)(rows)
    ((figure, warning),) = pictures
    assert [axes.get_ylabel() for axes in figure.axes] == labels
    assert warning == note


def test_a_live_plot_ends_no_run(pictures, caplog, monkeypatch):
    """Without a directory, an error in a figure would lose the state of a private run."""
    rows = [row(1, **{"gain_$x^$": 0.5, "a/b": 0.5}), row(2, **{"gain_$x^$": None, "a/b": None})]
    pages.live_plot()(rows)
    pages.live_plot("accurcy")(rows)
    (every, _), (named, _) = pictures
    assert [axes.get_ylabel() for axes in every.axes] == ["accuracy", "nll", "gain_$x^$", "a/b"]
    assert named.axes[0].get_title() == "no finite number so far"
    assert not caplog.records
    pages.live_plot()([{"step": 1, "epsilon": 1.0, "private": {"loss": 1.0}}])
    assert "the figure was not drawn: the log has no number" in caplog.text
    monkeypatch.setattr(sys.modules["IPython.display"], "Image", None)
    pages.live_plot("accuracy")(rows)
    assert "the figure was not drawn: 'NoneType' object is not callable" in caplog.text

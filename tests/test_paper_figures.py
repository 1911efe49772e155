# SPDX-License-Identifier: Apache-2.0
"""Figures of the papers and verdicts on their claims: from results files, without training."""

import json
import re
from collections import Counter

import numpy as np
import pytest
import run_binary

RESULTS = run_binary.EXPERIMENTS / "results"


@pytest.fixture(scope="module")
def imported():
    with run_binary.importing() as import_binary:
        yield import_binary


@pytest.fixture(scope="module")
def panels(imported):
    return imported("common.multi_panel_figure")


def flat(number, seeds=1):
    return range(3), np.full((3, seeds), float(number))


def axes_of(panels, monkeypatch, *drawn):
    """The figure that is saved, and the axes of its panels."""
    kept = []
    monkeypatch.setattr(panels, "png", lambda figure: kept.append(figure) or b"")
    panels.image(drawn)
    return kept[0], kept[0].axes


def test_twelve_lines_have_twelve_looks_and_none_is_dropped(panels, monkeypatch):
    lines = {f"line {i}": flat(i) for i in range(12)}
    figure, (axes,) = axes_of(panels, monkeypatch, panels.Panel("title", "x", "y", lines))
    drawn = axes.get_lines()
    assert [line.get_ydata()[0] for line in drawn] == list(range(12))
    assert len({(line.get_color(), line.get_linestyle()) for line in drawn}) == 12
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(lines)


def test_a_thirteenth_line_is_an_error_that_names_it(panels):
    lines = {f"line {i}": flat(i) for i in range(13)}
    with pytest.raises(ValueError, match=r"13 lines; a figure has at most 12.*line 12"):
        panels.image([panels.Panel("title", "x", "y", lines)])


def test_a_line_looks_alike_in_all_panels_and_is_named_once(panels, monkeypatch):
    one = panels.Panel("one", "x", "y", {"a": flat(1), "b": flat(2)})
    other = panels.Panel("other", "x", "y", {"b": flat(3)})
    figure, (left, right, *_) = axes_of(panels, monkeypatch, one, other)
    assert left.get_lines()[1].get_color() == right.get_lines()[0].get_color()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]


def test_the_legend_stays_in_the_picture_and_leaves_the_axes_their_place(panels, monkeypatch):
    lines = {f"a line with a name of some length, {i}": flat(i) for i in range(12)}
    figure, (axes,) = axes_of(panels, monkeypatch, panels.Panel("title", "x", "y", lines))
    figure.savefig("/dev/null", format="png")
    legend, page = figure.legends[0].get_window_extent(), figure.bbox
    assert page.x0 <= legend.x0
    assert legend.x1 <= page.x1
    assert legend.y1 <= page.y1
    assert axes.get_window_extent().height > 0.3 * page.height


def test_bands_are_of_the_seeds_that_have_a_number(panels, monkeypatch):
    lines = {"three": flat(1, 3), "ragged": (range(3), [[1], [1, 3], [np.nan, 2]])}
    panel = panels.Panel("title", "x", "y", lines)
    assert panels.seeds_of(panel) == "3 seeds; 2 of ragged"
    _, (axes,) = axes_of(panels, monkeypatch, panel)
    np.testing.assert_array_equal(axes.get_lines()[1].get_ydata(), [1, 2, 2])
    assert panels.seeds_of(panel._replace(measured=False)) == ""


def test_seeds_without_a_curve_are_left_out(imported):
    figures = imported("common.paper_figures")
    way = [{"step": 1, "accuracy": 0.5}, {"step": 2, "accuracy": 0.75}]
    runs = [{"way": []}, {"way": way}, {"accuracy": 80.0}, {"way": way[:1]}]
    places, values = figures.series(runs, "step", "accuracy", 100)
    assert places == [1, 2]
    assert values.tolist() == [[50.0], [75.0]]
    assert figures.series(runs[:1], "step", "accuracy") is None
    assert figures.series(runs, "step", "norm") is None
    assert figures.logged("step", "norm", ("step", "norm"))("title", {"a": runs}) == []


def test_rows_are_found_by_title_and_line_and_the_others_are_missing(imported):
    figures = imported("common.paper_figures")
    figure = figures.Figure("shows", [], ("mnist", "cifar10"), ("tanh", "ReLU"))
    run = {"0": {"accuracy": 1.0}}
    names = ("cifar10 (JPEG copy) tanh", "mnist ReLU", "mnist tanh", "mnist tanh, and more")
    found = figure.found(dict.fromkeys(names, run))
    # In the order of the paper, whatever the order of the file.
    assert [(title, list(of)) for title, of in found.items()] == [
        ("mnist", ["tanh", "ReLU"]),
        ("cifar10 (JPEG copy)", ["tanh"]),
    ]
    assert figure.missing(dict.fromkeys(names, run)) == ["cifar10 ReLU"]
    assert figure.missing({}) == ["mnist", "cifar10"]


def test_every_figure_is_drawn_from_the_committed_results_or_says_what_to_run(imported):
    figures = imported("figures")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures.multi_panel_figure, "image", list)
        drawn = list(figures.drawn())
    names = {(each.paper, each.name) for each in drawn}
    assert {paper for paper, _ in names} == set(figures.PAPERS)
    assert len(names) == len(drawn) == 39
    for each in drawn:
        assert each.picture or each.missing
        assert (run_binary.EXPERIMENTS.parent / each.command.split()[1]).exists()
        if each.picture:
            lines = {name for panel in each.picture for name in panel.lines}
            figures.multi_panel_figure.looks_of(lines)  # not too many
        assert each.caption([]).startswith("**Published.** ")


def test_two_printed_epsilons_are_two_panels(imported):
    figures, pictures = imported("figures"), imported("liu2021_pictures")
    found = pictures.FIGURES["3"].found(figures.rows_of("liu2021"))
    titles = [title for title in found if title.startswith("mnist")]
    assert {"mnist, 1324 steps", "mnist, 12646 steps"} <= set(titles)
    (panel,) = pictures.FIGURES["3"].panels("mnist", found["mnist, 12646 steps"])
    assert {"flat", "paper, 8 groups"} <= set(panel.lines)


def test_of_several_rates_the_best_is_drawn(imported):
    pictures = imported("liu2021_pictures")

    def runs(accuracy):
        return [{"accuracy": accuracy, "way": [{"step": 1, "accuracy": accuracy / 100}]}]

    found = {
        "paper, 8 groups, rate 0.5": runs(97.0),
        "paper, 8 groups, rate 0.05, momentum 0.9, relu": runs(98.0),
        "flat": runs(96.0),
    }
    (panel,) = pictures.FIGURES["3"].panels("mnist", found)
    assert {name: values[0][0] for name, (_, values) in panel.lines.items()} == {
        "flat": 96.0,
        "paper, 8 groups": 98.0,
    }


def test_each_regression_has_a_panel_of_its_own(imported):
    figures, pictures = imported("figures"), imported("bu2023_pictures")
    found = pictures.FIGURES["10"].found(figures.rows_of("bu2023"))
    drawn = [p for title, of in found.items() for p in pictures.FIGURES["10"].panels(title, of)]
    assert [panel.title for panel in drawn] == ["california_housing", "wine_quality"]
    assert all(list(panel.lines) == ["not private", "small R", "large R"] for panel in drawn)


def test_a_figure_without_rows_is_not_run_and_names_its_command(imported, monkeypatch):
    figures = imported("figures")
    rows = dict(figures.rows_of("an2021"))
    monkeypatch.setattr(figures, "rows_of", lambda *_: {})
    one, two, four = figures.drawn(papers=("an2021",))
    assert one.picture.startswith(b"\x89PNG")
    assert two.picture
    assert four.picture is None
    assert four.command.endswith("an2021_noise_curricula.py --table=3 --seeds=3")
    assert "Not run" in four.caption([])
    monkeypatch.setattr(figures, "rows_of", lambda *_: rows)
    *_, four = figures.drawn(papers=("an2021",))
    assert four.picture is not None
    assert not four.missing


def seeds(*numbers, measure="accuracy"):
    return {str(seed): {measure: number} for seed, number in enumerate(numbers)}


ROWS = {
    "tanh": seeds(98.0, 97.8),
    "ReLU": seeds(96.0, 96.4),
    "near": seeds(97.9, 97.5),
    "alone": seeds(99.0),
    "tanh, rate 0.5": seeds(98.5),
    "ece small": seeds(0.024, 0.026, measure="ece"),
    "ece large": seeds(0.004, 0.006, measure="ece"),
    "mse": seeds(0.39, 0.41, measure="mse"),
    "mse worse": seeds(0.41, 0.42, measure="mse"),
    "mse much worse": seeds(0.42, 0.43, measure="mse"),
}


@pytest.mark.parametrize(
    ("fields", "verdict"),
    [
        ({"rows": ["tanh"], "published": 98.4}, "holds"),
        ({"rows": ["tanh"], "published": 98.5}, "does not hold"),
        ({"rows": ["tanh"], "published": 97.3}, "better"),
        ({"rows": ["none"], "published": 90.0}, "not run"),
        ({"rows": ["none"], "published": 90.0, "why": "no data"}, "not run: no data"),
        ({"rows": ["tanh"], "published": ""}, ""),
        ({"rows": ["tanh"], "published": "above", "than": ["ReLU"]}, "holds"),
        ({"rows": ["ReLU"], "published": "above", "than": ["tanh"]}, "does not hold"),
        (
            {"rows": ["tanh"], "published": "above", "than": ["near"]},
            "does not hold, within chance",
        ),
        ({"rows": ["tanh"], "published": "above", "than": ["none"]}, "not run"),
        ({"rows": ["alone"], "published": "above", "than": ["ReLU"]}, "open: 1 seed"),
        ({"rows": ["near"], "published": "level", "than": ["tanh"]}, "holds"),
        ({"rows": ["tanh"], "published": "level", "than": ["ReLU"]}, "holds"),
        ({"rows": ["ReLU"], "published": "level", "than": ["tanh"]}, "does not hold"),
        ({"rows": ["ece small"], "published": 2.1, "measure": "ece"}, "holds"),
        (
            {"rows": ["ece small"], "published": 1.9, "measure": "ece"},
            "does not hold",
        ),
        ({"rows": ["ece small"], "published": 3.5, "measure": "ece"}, "better"),
        (
            {"rows": ["mse worse"], "published": "level", "than": ["mse"], "measure": "mse"},
            "holds",
        ),
        (
            {"rows": ["mse much worse"], "published": "level", "than": ["mse"], "measure": "mse"},
            "does not hold",
        ),
        (
            {
                "rows": ["ece large"],
                "published": "below",
                "than": ["ece small"],
                "measure": "ece",
            },
            "holds",
        ),
    ],
)
def test_one_rule_decides_whether_a_claim_holds(fields, verdict, imported):
    claims = imported("common.claims")
    assert claims.judged(claims.Claim("a system", **fields), ROWS).verdict == verdict


def test_a_seed_that_diverged_is_no_luck_of_the_others(imported):
    claims, tables = imported("common.claims"), imported("common.result_tables")
    rows = {
        "diverged": {"0": {"accuracy": 0.99}, "1": {"accuracy": None}},
        "sound": seeds(50.0, 51.0),
    }
    below = claims.Claim("", ["diverged"], "above", than=["sound"])
    assert claims.judged(below, rows).verdict == "does not hold"
    assert claims.judged(below._replace(published=98.0, than=()), rows).verdict == "does not hold"
    assert (
        claims.judged(below._replace(rows=["diverged", "sound"], pooled=True), rows).row == "sound"
    )
    assert tables.summary(rows["diverged"], "accuracy").startswith("nan")


def test_a_negative_verdict_is_open_until_the_rows_that_it_needs_ran(imported):
    claims = imported("common.claims")
    claim = claims.Claim("", ["ReLU"], 98.0, needs=[("0.5", "tanh, rate 0.5"), ("0.8", "x|y")])

    def verdict(claim, **more):
        return claims.judged(claim, ROWS | more).verdict

    assert verdict(claim) == "open: rate 0.8 did not run"
    assert verdict(claim, y=seeds(97.0)) == "does not hold"
    assert verdict(claim._replace(published=96.0)) == "holds"
    compared = claim._replace(published="above", than=["tanh"])
    assert verdict(compared) == "open: rate 0.8 did not run"
    assert verdict(compared._replace(rows=["tanh"], than=["ReLU"])) == "holds"


def test_the_sweep_of_bounds_holds_the_bounds_of_table_2_in_order(imported):
    pictures = imported("bu2023_pictures")
    rows = json.loads((RESULTS / "bu2023.json").read_text())["rows"]
    pattern = re.compile(pictures.FIGURES["6-right"].rows)
    found = {m["line"]: list(rows[m[0]].values()) for m in map(pattern.fullmatch, rows) if m}
    for panel in pictures.bounds("mnist", found):
        places, _ = panel.lines["DP-SGD"]
        assert places == [0.1, 1, 10, 50, 100, 200, 500]


def test_average_settings_of_a_sweep_hold_within_half_a_step_of_its_grid(imported):
    claims, tables = imported("common.claims"), imported("common.result_tables")
    # 20 rows: the best two have s = 1 and 2, and T = 4 and 4.
    grid = [(s, t) for t in (1, 2, 4, 8, 16) for s in (1, 2, 4, 8)]
    score = {(1, 4): 90.0, (2, 4): 89.0}
    rows = {f"s={s} T={t}, 9 steps": seeds(score.get((s, t), 50.0 - s - t)) for s, t in grid}
    claim = claims.Claim("", (), "1.50, 4.00", why="two nights", sweep=list(rows))
    found = claims.judged(claim, rows)
    assert (found.row, found.ours, found.verdict) == ("s=1 T=4, 9 steps", [1.5, 4.0], "holds")
    assert tables.here(found) == "1.50, 4.00"
    for printed, verdict in (
        ("1.07, 5.60", "holds"),
        ("1.05, 4.00", "does not hold"),
        ("1.50, 5.70", "does not hold"),
    ):
        assert claims.judged(claim._replace(published=printed), rows).verdict == verdict
    del rows["s=8 T=16, 9 steps"]
    assert claims.judged(claim, rows).verdict == "not run: two nights", "a part of a sweep is none"


@pytest.mark.parametrize("count", [2, 3, 10, 30, 300])
def test_more_seeds_do_not_make_a_certain_difference_level(count, imported):
    claims = imported("common.claims")
    # Far apart for their spread, though of many seeds some overlap.
    drawn = np.random.default_rng(0).normal(0, 0.3, (2, count))
    drawn += np.array([[98.0], [96.5]]) - drawn.mean(axis=1, keepdims=True)
    rows = {"a": seeds(*drawn[0]), "b": seeds(*drawn[1])}
    for published, ours, than, verdict in (
        ("above", "a", "b", "holds"),
        ("level", "a", "b", "holds"),
        ("above", "b", "a", "does not hold"),
        ("level", "b", "a", "does not hold"),
    ):
        assert claims.judged(claims.Claim("", [ours], published, [than]), rows).verdict == verdict


def test_a_difference_of_thirty_seeds_is_told_whether_three_or_thirty_are_read(imported):
    claims = imported("common.claims")
    kept = json.loads((RESULTS / "bu2023.json").read_text())["rows"]
    large, small = (f"california_housing {way} R squared_error" for way in ("large", "small"))
    claim = claims.Claim("", [small], "below", [large], measure="mse")
    for count in (3, 10, 30):
        rows = {name: dict(list(kept[name].items())[:count]) for name in (large, small)}
        assert claims.judged(claim, rows).verdict == "holds"
        level = claim._replace(rows=[large], published="level", than=[small])
        assert claims.judged(level, rows).verdict == "holds", "3 % apart"


def test_both_sides_of_a_comparison_show_their_epsilons(imported, monkeypatch):
    tables = imported("common.result_tables")
    claim = {"system": "", "rows": ["tanh"], "published": "above", "than": ["ReLU"]}
    costs = {"tanh": ["1", "2", "3"], "ReLU": ["1", "2", "4"]}
    found = {"a paper": {"claims": [claim], "epsilons": costs}, "rows": ROWS}
    monkeypatch.setattr(tables, "load", lambda name: found)
    ((_, epsilons),) = tables.judged_claims("a paper")
    assert epsilons == ["1", "2", "3 against 4"]
    found["a paper"]["claims"] = [{**claim, "published": 98.0, "than": []}]
    ((_, epsilons),) = tables.judged_claims("a paper")
    assert epsilons == ["1", "2", "3"]


def test_claims_of_papers_and_comparisons_of_this_repository_are_counted_apart(
    imported, monkeypatch
):
    tables, claims = imported("common.result_tables"), imported("common.claims")
    results = [
        (claims.judged(claims.Claim("", ["tanh"], number, own=own), ROWS), [])
        for number, own in ((98.0, False), (90.0, False), (99.0, False), (98.0, True))
    ]
    monkeypatch.setattr(tables, "PAPERS", {"a paper": ""})
    monkeypatch.setattr(tables, "judged_claims", lambda _: results)
    assert tables.verdicts() == (
        "Of 3 claims of the papers, 1 hold, 1 have better numbers and 1 do not hold; open: 0; "
        "not run: 0. Of 1 comparisons of this repository, 1 hold, 0 have better numbers and 0 do "
        "not hold; open: 0; not run: 0."
    )


def test_the_row_that_speaks_is_of_the_preferred_pattern_and_has_the_best_mean(imported):
    claims = imported("common.claims")

    def row(*patterns, **more):
        return claims.judged(claims.Claim("a system", patterns, 98.0, **more), ROWS).row

    assert row("tanh.*") == "tanh, rate 0.5"
    assert row("none", "ReLU", "tanh") == "ReLU"
    assert row("ReLU", "tanh", pooled=True) == "tanh"
    early = {"a": {"0": {"accuracy": 1.0, "way": [{"accuracy": 0.25}, {"accuracy": 0.5}]}}}
    assert claims.judged(claims.Claim("", ["a"], 25.0, at=1), early).ours == [25.0]
    assert claims.judged(claims.Claim("", ["a"], 25.0, at=3), early).ours == []


def test_a_sweep_is_one_row_of_the_page(imported, monkeypatch):
    tables = imported("common.result_tables")
    rows = {f"tanh, {i} steps": seeds(90.0 + i) for i in range(tables.FAMILY)}
    monkeypatch.setattr(tables, "load", lambda _: {"rows": {**rows, "ReLU": seeds(80.0, 82.0)}})
    assert list(tables.rows_of("a paper")) == [
        "| ReLU | 81 (80 to 82) | 2 |",
        "| tanh, # steps: 10 rows, the best tanh, 9 steps | 90 to 99 | 1 |",
    ]


def printed_numbers(import_binary, paper):
    """All numbers that the binaries of a paper have as printed."""
    if paper == "tramer2021":
        return [row.published for row in import_binary("tramer2021_scatternet").ROWS.values()]
    if paper == "papernot2021":
        of = import_binary("papernot2021_tempered_sigmoids")
        settings = [of.SETTINGS[name] for name in ("mnist", "fashion_mnist", "cifar10")]
        numbers = [number for each in settings for number in each.printed.values()]
        numbers += [number for sides in of.TABLE_4.values() for _, number in sides]
        numbers.remove(86.1)  # SGD of table 4 is tanh of table 3
        averages = [", ".join(f"{part:.2f}" for part in each.average) for each in settings]
        return [*numbers, *of.PRINTED_TANH.values(), *averages]
    if paper == "losing_less2022":
        printed = import_binary("losing_less2022_settings").PRINTED.values()
        return [float(part) for text in printed for part in text.split(";") if part.strip()]
    if paper == "liu2021":
        of = import_binary("liu2021_grouped_clipping")
        printed = [number for each in of.SETTINGS.values() for number in each.printed.values()]
        return printed + list(of.FLAT.values())
    if paper == "an2021":
        of = import_binary("an2021_noise_curricula")
        numbers = [number for _, number in of.PRINTED.values()] + list(of.CONSTANT.values())
        numbers += [
            number for both in (*of.ORDERED.values(), *of.COMBINED.values()) for number in both
        ]
        numbers.remove(94.63)  # linear-down stands in tables 2 and 4
        return numbers
    printed = import_binary("bu2023_calibration").PRINTED
    return [number for ways in printed.values() for two in ways.values() for number in two]


@pytest.mark.parametrize(
    "paper", ["tramer2021", "papernot2021", "losing_less2022", "liu2021", "an2021", "bu2023"]
)
def test_every_printed_number_is_a_claim(paper):
    """`python experiments/papers/systems.py` writes claims; one that did not run may say why."""
    claims = json.loads((RESULTS / "systems.json").read_text())[paper]["claims"]
    claimed = Counter(claim["published"] for claim in claims)
    with run_binary.importing() as import_binary:
        assert Counter(printed_numbers(import_binary, paper)) - claimed == Counter()


def test_a_claim_of_one_activation_reads_no_row_of_the_other():
    systems = json.loads((RESULTS / "systems.json").read_text())
    rows = json.loads((RESULTS / "liu2021.json").read_text())["rows"]
    with run_binary.importing() as import_binary:
        judged = import_binary("common.claims").judged
        claim = import_binary("common.claims").Claim
        spoke = {}
        for fields in systems["liu2021"]["claims"]:
            spoke[fields["system"]] = judged(claim(**fields), rows).row or ""
    for kind in ("tanh", "ReLU"):
        row = spoke[f"CIFAR-10 at 3.19: 16 groups with the paper's noise, {kind}"]
        assert row.startswith("cifar10 paper, 16 groups")
        assert (", relu" in row) == (kind == "ReLU")


@pytest.mark.slow
@pytest.mark.parametrize("paper", ["tramer2021", "papernot2021", "an2021"])
def test_epsilons_and_claims_are_those_of_the_settings(paper):
    """`python experiments/papers/systems.py` writes them."""
    kept = json.loads((RESULTS / "systems.json").read_text())[paper]
    with run_binary.importing() as import_binary:
        found = import_binary("systems").collected(paper)
    assert json.loads(json.dumps(found)) == kept

# SPDX-License-Identifier: Apache-2.0
"""The papers: rows and claims as data, one rule of verdicts, published epsilons, figures."""

import json
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from absl import flags
from experiments import epsilons, gallery
from experiments.calibration import algorithms
from experiments.calibration import settings as calibration
from experiments.common import claims, pictures, runs, tables
from experiments.common.claims import Claim, judged
from experiments.composite_loss import run as composite
from experiments.composite_loss.settings import Choice
from experiments.grouped_clipping import run as grouped
from experiments.grouped_clipping import settings as groups
from experiments.noise_curricula import run as curricula
from experiments.noise_curricula import settings as noises
from experiments.scatternet import run as scatternet
from experiments.scatternet import settings as features
from experiments.tempered_sigmoids import run as tempered
from experiments.tempered_sigmoids import settings as sigmoids
from run_binary import run

from dpjax import accounting, losses, schedules

PAPERS = tables.papers()


@pytest.fixture(autouse=True)
def _flags():
    flags.FLAGS.mark_as_parsed()


def seeds(*numbers, measure="accuracy"):
    return {str(seed): {measure: number} for seed, number in enumerate(numbers)}


def logs(norms, *names):
    return {name: {"accuracy": 90.0, "way": [{"norm": norm} for norm in norms]} for name in names}


ROWS = {
    "tanh": seeds(97.9, 98.0, 98.1),
    "ReLU": seeds(96.4, 96.5, 96.6),
    "near": seeds(97.7, 98.0, 98.0),
    "alone": seeds(98.0),
    "five": seeds(97.9, 98.0, 98.1, 98.0, 97.9),
    "paired": seeds(97.92, 98.02, 98.121),
    "wide": seeds(80.0, 86.0, 98.0),
    "ece small": seeds(0.024, 0.025, 0.026, measure="ece"),
    "ece large": seeds(0.005, 0.006, 0.005, measure="ece"),
    "mse": seeds(0.39, 0.40, 0.395, measure="mse"),
    "mse much worse": seeds(0.42, 0.43, 0.425, measure="mse"),
    "ordered": seeds(97.9, 98.0, 98.1),
    "low": logs([1.0] * 9 + [3.0], "0", "1"),
    "high": logs([1.2] * 5 + [2.0] * 5, "0", "1"),
    "once": logs([1.2] * 5 + [2.0] * 5, "0"),
    "short": logs([2.0, 2.0], "0"),
}
COSTS = {
    "ordered": ["2.9", "inf", "inf"],
    "tanh": ["2.9", "2.5", "2.3"],
    "groups": ["2.85", "60", "54.5"],
}
NORM = claims.curve("norm")
VERDICTS = [
    # Two standard errors of both sides are 2 * 0.1 * sqrt(4 / 3) = 0.23.
    (Claim("", ["tanh"], 98.22), "reproduced"),
    (Claim("", ["tanh"], 98.24), "not reached"),
    (Claim("", ["tanh"], 97.5), "reproduced: better"),
    (Claim("", ["tanh"], 97.5, baseline=True), "baseline stronger here"),
    (Claim("", ["tanh"], 98.24, baseline=True), "not reached"),
    (Claim("", ["ReLU"], 97), "reproduced"),  # half a unit of the last printed digit
    (Claim("", ["ReLU"], 97.0), "not reached"),
    (Claim("", ["wide"], 90.0), "within noise"),
    (Claim("", ["ordered"], 98.0), "reproduced: at an infinite epsilon"),
    (Claim("", ["ordered"], 97.5), "reproduced: better, at an infinite epsilon"),
    (Claim("", ["none"], 90.0, why="no data"), "not run: no data"),
    (Claim("", [], 0.848, limit="no points"), "cannot be recomputed: no points"),
    (Claim("", ["alone"], 98.0), "open: 1 of 3 runs"),
    (Claim("", ["five"], 98.27, best=5), "reproduced"),
    (Claim("", ["tanh"], 98.1, best=5), "open: 3 of 5 runs"),
    (Claim("", ["tanh"], "above", ["ReLU"]), "reproduced: p < 0.001"),
    (Claim("", ["ReLU"], "above", ["tanh"]), "refuted: 1.5 behind, p < 0.001"),
    (Claim("", ["ReLU"], "above", ["tanh"], limit="one rate"), "not reached: one rate, p < 0.001"),
    (Claim("", ["tanh"], "above", ["near"]), "within noise: p 0.23"),
    (Claim("", ["tanh"], "above", ["alone"]), "open: 1 of 3 pairs"),
    (Claim("", ["paired"], "above", ["tanh"]), "reproduced: p < 0.001"),
    (Claim("", ["paired"], "above", ["tanh"], paired=False), "within noise: p 0.82"),
    (Claim("", ["wide"], "level", ["tanh"]), "within noise: p 0.2"),
    (Claim("", ["tanh", "wide"], "level", ["tanh", "wide"]), "reproduced"),
    (Claim("", ["tanh", "wide"], "level", ["tanh", "wide"], worst=True), "within noise: p 0.2"),
    (Claim("", ["ece large"], "below", ["ece small"], measure="ece"), "reproduced: p 0.0011"),
    (Claim("", ["ece small"], 3.5, measure="ece"), "reproduced: better"),
    (Claim("", ["mse much worse"], "level", ["mse"], measure="mse"),
     "refuted: 0.03 behind, p < 0.001"),
    (Claim("", ["low"], "below", ["high"], NORM), "reproduced: leads at 18 of 20 points, 2 seeds"),
    (Claim("", ["low"], "above", ["high"], NORM), "refuted: leads at 2 of 20 points, 2 seeds"),
    (Claim("", ["high"], "above", ["low"], NORM, factor=1.5),
     "not reached: leads at 8 of 20 points, 2 seeds"),
    (Claim("", ["low"], "below", ["once"], NORM), "seen once: leads at 9 of 10 points"),
    (Claim("", ["low"], "above", ["once"], NORM, limit="x"), "seen once: leads at 1 of 10 points"),
    (Claim("", ["short"], "above", ["low"], NORM), "open: 2 of 3 pairs"),
    (Claim("", ["tanh"], 2.3, measure="epsilon"), "reproduced"),
    (Claim("", ["tanh", "groups"], 2.85, measure="epsilon", why="B is not the sensitivity"),
     "refuted: it costs 54.5, since B is not the sensitivity"),
    (Claim("", ["tanh"], 2.3, measure="epsilon", limit="no noise"),
     "cannot be recomputed: no noise"),
    (Claim("", [], "below", counterexample="two groups"), "refuted: two groups"),
]  # fmt: skip


@pytest.mark.parametrize(("claim", "verdict"), VERDICTS)
def test_one_rule_decides_whether_a_claim_holds(claim, verdict):
    assert str(judged(claim, ROWS, COSTS).verdict) == verdict


def test_the_line_of_all_tests_decides_what_is_beyond_chance():
    """Benjamini and Hochberg: the k-th smallest of m p-values is at most 0.05 k / m."""
    assert claims.line_of([0.04, 0.001, 0.03, 0.9]) == pytest.approx(0.0125)
    assert claims.line_of([0.02, 0.001, 0.9, 0.03]) == pytest.approx(0.0375)
    assert claims.line_of([0.04]) == 0.05
    assert claims.line_of([0.06, 0.9]) == 0.0
    chances = tables.chances()
    passed = scipy.stats.false_discovery_control(chances) <= 0.05
    line = claims.line_of(chances)
    np.testing.assert_array_equal(np.asarray(chances) <= line, passed)
    claim = Claim("", ["ece large"], "below", ["ece small"], measure="ece")
    assert str(judged(claim, ROWS, COSTS, line=0.001).verdict) == "within noise: p 0.0011"


def test_a_claim_that_lacks_runs_names_its_command():
    for paper in PAPERS:
        for result, _ in tables.judged_claims(paper):
            if result.verdict.word in (claims.NOT_RUN, claims.OPEN):
                named = tables.command_of(paper, result)
                assert named or result.verdict.fact, "why there is no command"
                assert named in tables.verdict_cell(paper, result)


def test_a_seed_that_diverged_is_no_luck_of_the_others():
    rows = {"diverged": seeds(0.99, 99.0, None), "sound": seeds(50.0, 51.0, 52.0)}
    assert judged(Claim("", ["diverged"], 98.0), rows, {}).verdict.word == "not reached"
    assert judged(Claim("", ["diverged", "sound"], 98.0), rows, {}).row == "sound"
    assert tables.summary(rows["diverged"], "accuracy").startswith("nan")


def test_what_is_private_at_an_epsilon_is_so_at_larger_ones():
    """A published accuracy holds from its epsilon on, and to exceed an older one is not a lead."""
    assert tables.published_at("cifar10", 1) == (72.3, True)
    assert tables.published_at("cifar10", 3) == (81.4, False)
    assert tables.compared([73.0], 72.3, True) == "73.0; at least 72.3"
    assert tables.compared([70.0, 71.0], 72.3, True) == "70.5; at least **72.3**"
    assert tables.compared([90.4], 89.3, False) == "**90.4**; 89.3"
    assert tables.compared([98.53], 98.5, False) == "98.5; 98.5"


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.name)
def test_every_row_of_the_results_and_of_the_claims_is_a_row_of_the_paper(paper):
    assert set(tables.load(paper.name)["rows"]) <= set(paper.rows)
    for claim in paper.claims:
        assert {*claim.rows, *claim.than} <= set(paper.rows), claim.system
        assert set(claim.figures) <= set(paper.figures), claim.system
    for figure in paper.figures.values():
        assert set(figure.row_keys()) <= set(paper.rows)


PRINTED = {
    "tramer2021": [3.0, *features.PRINTED.values()],
    "papernot2021": [90.3, 90.5, 86.0, 2.93, 2.7, 7.53, 63.84]
    + [n for of in (sigmoids.ACCURACIES, sigmoids.CURVES, sigmoids.BEST) for n in of.values()],
    "losing_less2022": [98.2, 86.9, 63.2, 55.4, 59.8, 45.9, 66.8, 64.5, 1.5, 2],
    "liu2021": [2.85, 0.94, 2.60, 1.81, 3.19, 3.00, 98.23, 97.05, 86.28, 84.76, 67.11, 65.91, 60.65]
    + [2.39, 98.19]
    + [number for _, *printed in groups.ABSENT.values() for number in printed],
    "an2021": [2.61, 1.64, 1.40, 1.32, 1.69]
    + [number for _, number in noises.SCHEDULES.values()]
    + [number for _, number in noises.CONSTANT.values()]
    + [number for both in noises.ORDERED.values() for number in both],
    "bu2023": [2.32, 1.96, 1.25, 4.41, 4.40]
    + [n for ways in calibration.PRINTED.values() for two in ways.values() for n in two]
    + [number for numbers in calibration.UNTESTED.values() for number in numbers.values()],
}


@pytest.mark.parametrize("paper", PAPERS[:-1], ids=lambda paper: paper.name)
def test_every_printed_number_is_a_claim(paper):
    claimed = Counter(claim.published for claim in paper.claims)
    assert Counter(PRINTED[paper.name]) - claimed == Counter()


# --- epsilons ------------------------------------------------------------------------------------

FEATURES = {  # by the paper's convention, and improved RDP for its own events
    "mnist pixels cnn": (2.9923, 2.5788),
    "mnist wavelets linear": (2.9968, 2.5878),
    "mnist wavelets cnn": (3.1310, 2.7012),
    "fashion pixels cnn": (3.0026, 2.5910),
    "cifar wavelets cnn": (2.9966, 2.5910),
}


def test_the_epsilons_of_wavelets_are_reproduced_and_thresholds_are_paid_for():
    for name, (classic, improved) in FEATURES.items():
        row = features.ROWS[name]
        claimed = scatternet.claimed(row)
        for method, printed in (("rdp-classic", classic), ("rdp", improved)):
            epsilon = accounting.epsilon(claimed, 1e-5, method)
            assert epsilon == pytest.approx(printed, rel=0.002)
        sound = scatternet.mechanism_of(row).epsilon(1e-5)
        assert (sound > improved * 1.003) == (row.scaled == "data")


@pytest.mark.parametrize(("dataset", "printed"), [("mnist", 2.93), ("cifar10", 7.53)])
def test_tempered_sigmoids_have_the_printed_epsilons(dataset, printed):
    row = sigmoids.ROWS[sigmoids.key_of(dataset, "tanh")]
    mechanism, claimed, convention = tempered.epsilons(row)
    assert accounting.epsilon(claimed, 1e-5, convention) == pytest.approx(printed, abs=0.01)
    assert mechanism.epsilon(1e-5) < printed - 0.3


def test_schedules_have_the_printed_epsilons():
    for name, (printed, _) in noises.SCHEDULES.items():
        assert curricula.mechanism_of(noises.ROWS[name]).epsilon(1e-5) == pytest.approx(
            printed, abs=0.006
        )
    equal = curricula.mechanism_of(noises.ROWS["constant 1.0472"])
    assert equal.noise_multiplier == pytest.approx(1.0472, abs=1e-4)


@pytest.mark.slow
def test_groups_cost_the_printed_epsilon_only_by_the_paper_s_accounting():
    for dataset in ("mnist", "fashion_mnist"):
        for printed, steps in groups.SETTINGS[dataset].steps.items():
            row = groups.Row(dataset, "flat", steps, 0.05)
            method = groups.METHODS.get(printed, "rdp-classic")
            assert grouped.mechanism_of(row).epsilon(1e-5, method) <= printed
            beyond = grouped.mechanism_of(row._replace(steps=steps + 1))
            assert beyond.epsilon(1e-5, method) > printed, "the most steps within it"
            equal = grouped.mechanism_of(row._replace(way="equal", groups=8))
            assert equal.epsilon(1e-5) == grouped.mechanism_of(row).epsilon(1e-5)
            assert equal.clipping.sensitivity == pytest.approx(1.0)
    ran = grouped.mechanism_of(groups.Row("mnist", "paper", 12_646, 0.05, groups=8))
    assert ran.epsilon(1e-5, "pld") == pytest.approx(54.50, rel=0.005)


ESTIMATES = {  # printed, estimate of its own event, and for what runs here by PLD
    "mnist": (2.32, 2.3244, 2.3818),
    "wine_quality": (4.40, 4.396, 4.3959),
}
LAYERS = {f"layer {i}": {"kernel": jnp.zeros(1)} for i in range(4)}


@pytest.mark.parametrize("task", ESTIMATES)
def test_the_published_epsilons_are_estimates_beside_proofs(task):
    printed, estimate, pld = ESTIMATES[task]
    setting = calibration.SETTINGS[task]
    event = calibration.claimed(setting)
    claimed = accounting.epsilon(event, setting.delta, "gdp")
    assert setting.printed == printed == pytest.approx(claimed, abs=0.01)
    assert claimed == pytest.approx(estimate, abs=0.001)
    mechanism = calibration.mechanism_of(setting, calibration.SMALL, LAYERS)
    assert mechanism.epsilon(setting.delta, "pld") == pytest.approx(pld, rel=0.005)


def test_a_mixed_run_takes_the_large_bound_at_its_end_and_costs_the_same():
    setting = calibration.SETTINGS["mnist"]
    _, schedule = calibration.moves(setting, calibration.MIXED, 1.0)
    scales = schedules.values(schedule, setting.steps)
    assert set(scales[:13_000]) == {1.0}
    assert set(scales[13_500:]) == {200.0}
    mixed, small = (
        calibration.mechanism_of(setting, way, LAYERS)
        for way in (calibration.MIXED, calibration.SMALL)
    )
    assert mixed.event == small.event


@pytest.mark.slow
def test_every_algorithm_of_exact_norms_costs_the_epsilon_of_the_table():
    rows = [row for name, row in algorithms.METHODS.items() if "JL" not in name]
    sizes = {"example": algorithms.EXAMPLES, "user": algorithms.USERS}
    events = {
        str(mechanism.event): mechanism
        for row in rows
        for mechanism in [algorithms.mechanism_of(row, sizes[row.unit], LAYERS)]
    }
    assert len(events) == 2, "all rows of examples have one event, and all rows of users another"
    for mechanism in events.values():
        assert mechanism.epsilon(1e-5, "pld") == pytest.approx(2.38, rel=0.01)


@pytest.mark.slow
def test_the_committed_epsilons_are_those_of_the_settings():
    for paper in (scatternet.PAPER, tempered.PAPER):
        assert epsilons.costs(paper) == tables.load("epsilons")[paper.name]


# --- losses and runs -----------------------------------------------------------------------------

LOGITS = jnp.array([2.0, -1.0, 0.5, 0.0])


@pytest.mark.thorough
def test_the_losses_of_the_ablation():
    chosen, y = Choice(threshold=7, beta=11, gamma=5), jnp.array(2)
    error = LOGITS - jax.nn.one_hot(2, 4)
    squared = float(0.5 * jnp.sum(error**2))
    assert composite.loss_of("SSE", chosen)(LOGITS, y) == pytest.approx(squared)
    assert composite.loss_of("SAE", chosen)(LOGITS, y) == pytest.approx(
        float(jnp.sum(jnp.abs(error)))
    )
    huber = composite.loss_of("Huber 0.5", chosen)
    distance = jnp.abs(error)
    equation = jnp.where(distance < 0.5, distance**2, distance - 0.25)
    assert huber(LOGITS, y) == pytest.approx(float(equation.sum()), rel=1e-5)
    # Early the squared error rules, late the other one; at the threshold their mean.
    unseen = [jnp.full(3, jnp.inf)]
    for name, late in (("SSE+CE", losses.cross_entropy), ("SSE+focal", losses.focal(5.0))):
        other, loss = float(late(LOGITS, y)), composite.loss_of(name, chosen)
        for epoch, value in ((-30, squared), (7, (squared + other) / 2), (40, other)):
            assert loss(LOGITS, y, hidden=unseen, epoch=epoch) == pytest.approx(value, rel=1e-5)
    hidden = [jnp.full(3, 2.0)]
    fading = 2 * jax.nn.sigmoid(7.0 - 5.0)  # 1 - alpha, of half the mean square
    for name, want in (("all", fading / 11), ("all, beta=4", fading / 4), ("all, 1/beta", 4 / 11)):
        loss = composite.loss_of(name, chosen)
        penalty = loss(LOGITS, y, hidden=hidden, epoch=5) - loss(LOGITS, y, hidden=[], epoch=5)
        assert float(penalty) == pytest.approx(float(want), rel=1e-4)


def test_results_are_strict_json_and_come_back_as_numbers(tmp_path):
    file, called = tmp_path / "results.json", []

    def train(seed, folder):
        called.append(seed)
        return {"accuracy": float("nan"), "way": [{"nll": np.inf, "norms": [1.0, np.nan]}]}

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    for row in ("a", "b", "b"):
        assert np.isnan(runs.Results(file).of(row, 0, train)["accuracy"])
    assert called == [0, 0], "the last was known"
    rows = json.loads(file.read_text(), parse_constant=refuse)["rows"]
    assert rows["a"]["0"]["way"] == [{"nll": None, "norms": [1.0, None]}]
    for kept in tables.RESULTS.glob("*.json"):
        json.loads(kept.read_text(), parse_constant=refuse)


@pytest.mark.slow
@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.name)
def test_every_paper_runs_in_little_and_shows_three_epsilons(paper, tmp_path):
    out = tmp_path / "results.json"
    package = paper.command.split()[-1]
    shown = run(package, "--smoke", "--out", out).stdout
    rows = json.loads(out.read_text())["rows"]
    assert set(rows) == {f"smoke: {key}" for key in paper.small}
    assert "| epsilon, paper's |" in shown
    learned = [run["0"]["accuracy"] for run in rows.values() if "accuracy" in run["0"]]
    # Fine-tuning takes four steps from random weights, which is above chance and no more.
    assert max(learned) > (20 if paper.name == "finetuning" else 60)
    assert run(package, "--smoke", "--out", out).stdout == shown, "nothing runs again"


# --- figures -------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("paper", [p for p in PAPERS if p.figures], ids=lambda paper: paper.name)
def test_every_figure_is_drawn_from_the_committed_results_or_says_what_to_run(paper, monkeypatch):
    monkeypatch.setattr(pictures, "png", lambda figure: b"a picture")
    verdicts = [result for result, _ in tables.judged_claims(paper)]
    for drawn in gallery.drawn([paper]):
        caption = drawn.caption(verdicts)
        assert drawn.picture or "Not run" in caption
        assert not drawn.missing or f"--figure={drawn.name}` runs these rows" in caption


def test_the_rule_is_printed_and_counts_all_claims():
    words, page = tables.verdicts(), (tables.RESULTS / "README.md").read_text()
    counts = [int(word) for word in re.findall(r"Of (\d+) ", words)]
    assert sum(counts) == sum(len(paper.claims) for paper in PAPERS)
    assert words in page
    assert claims.RULE in page

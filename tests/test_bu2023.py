# SPDX-License-Identifier: Apache-2.0
"""Calibration paper: every table and figure runs, and its epsilons are estimates and bounds."""

import json

import jax.numpy as jnp
import pytest
import run_binary

import dpjax


def run(*asked, status=0):
    return run_binary.run("papers/bu2023_calibration.py", *asked, status=status)


def rows(text):
    """The cells of a table, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.fixture(scope="module")
def paper():
    """The settings, imported as the binary does."""
    with run_binary.importing() as import_binary:
        yield import_binary("bu2023_settings")


ASKED = {"--table=1": 6, "--figure=1": 2, "--figure=10": 4}  # and how many rows there are
TASKS = [f"--table=2 --tasks={task}" for task in ("mnist", "cifar10", "snli")]
FIGURES = ("2", "3", "4", "5", "6", "6-right", "7", "8", "9", "11", "12")
TWO = ["--table=clippings", *TASKS, *(f"--figure={n}" for n in FIGURES)]
ASKED |= dict.fromkeys(TWO, 2)


@pytest.mark.slow
@pytest.mark.parametrize("asked", ASKED)
def test_every_table_and_figure_runs(asked, tmp_path):
    picture = tmp_path / "figure.png"
    out = run("--smoke", "--plot", picture, *asked.split()).stdout
    assert len(rows(out)) == ASKED[asked]
    assert picture.exists() == ("figure" in asked)
    if picture.exists():
        assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_no_clipping_has_all_properties_and_a_small_bound_loses_some():
    table = rows(run("--smoke", "--table=1").stdout)
    found = {row[0]: [cell.split("/")[0] for cell in row[1:4]] for row in table}
    for name in ("no clipping", "batch clipping", "large R, flat", "large R, layerwise"):
        assert found[name] == ["10", "10", "10"]
    symmetric, form, eigenvalues = map(int, found["small R, flat"])
    assert symmetric == 0
    assert form < 10
    assert eigenvalues == 10, "theorem 1: flat clipping keeps the eigenvalues positive"


@pytest.mark.slow
def test_results_are_kept_and_shown_again(tmp_path):
    kept = tmp_path / "results.json"
    first = run("--smoke", "--figure=10", "--out", kept).stdout
    known = json.loads(kept.read_text())["rows"]
    assert len(known) == 4
    assert run("--smoke", "--figure=10", "--out", kept).stdout == first
    assert json.loads(kept.read_text())["rows"] == known, "nothing was run again"


@pytest.mark.slow
def test_weights_that_are_not_there_are_asked_for(tmp_path):
    folder = tmp_path / "none"
    words = run("--table=2", "--tasks=snli", "--data_dir", folder, status=1).stderr
    assert "--snli is missing" in words


PUBLISHED = {  # printed, estimate of its own event, and for what runs here: RDP and PLD
    "mnist": (2.32, 2.3244, 2.5967, 2.3818),
    "cifar10": (1.96, 1.9578, None, 2.1047),
    "snli": (1.25, 1.2535, None, 5.1635),
    "california_housing": (4.41, 4.4085, None, 4.6239),
    "wine_quality": (4.40, 4.396, 4.9056, 4.3959),
}
LAYERS = {f"layer {i}": {"kernel": jnp.zeros(1)} for i in range(4)}


@pytest.mark.sample(4)
@pytest.mark.parametrize("task", PUBLISHED)
def test_the_published_epsilons_are_estimates_beside_proofs(task, paper):
    printed, estimate, rdp, pld = PUBLISHED[task]
    setting = paper.SETTINGS[task]
    found = list(map(float, paper.epsilons(setting, paper.SMALL, LAYERS)))
    assert found[0] == printed == pytest.approx(found[1], abs=0.01)
    assert found[1] == pytest.approx(estimate, abs=0.001)
    assert found[3] == pytest.approx(pld, rel=0.005)
    assert found[2] >= found[3]
    if rdp is not None:
        assert found[2] == pytest.approx(rdp, rel=0.002)
    if setting.batch < setting.examples:
        assert found[1] < found[3], "the estimate is no bound"


@pytest.mark.slow
def test_the_paper_s_noise_for_layers_is_far_weaker(paper):
    setting = paper.SETTINGS["mnist"]
    theirs = paper.mechanism_of(setting, paper.THEIRS, LAYERS)
    assert theirs.noise_multiplier == pytest.approx(0.55)
    assert theirs.epsilon(1e-5, "pld") == pytest.approx(14.7183, rel=0.005)
    ours = paper.mechanism_of(setting, "layerwise, small R", LAYERS)
    assert ours.clipping.sensitivity == pytest.approx(setting.small)
    assert ours.event == paper.mechanism_of(setting, paper.SMALL, LAYERS).event


def test_a_mixed_run_takes_the_large_bound_at_its_end_and_costs_the_same(paper):
    setting = paper.SETTINGS["mnist"]
    _, schedule = paper.moves(setting, paper.MIXED, 1.0)
    scales = dpjax.schedules.values(schedule, setting.steps)
    assert set(scales[:13_000]) == {1.0}
    assert set(scales[13_500:]) == {200.0}
    mixed, small = (paper.mechanism_of(setting, n, LAYERS) for n in (paper.MIXED, paper.SMALL))
    assert mixed.event == small.event
    assert paper.moves(setting, paper.SMALL, 1.0)[1] is None


def test_rates_follow_bounds(paper):
    """A step under full noise moves the weights as far whatever the bound."""
    setting = paper.SETTINGS["mnist"]
    gradient = jnp.ones(3)
    for bound in (1.0, 200.0):
        optimizer, _ = paper.moves(setting, paper.SMALL, bound)
        moved, _ = optimizer.update(bound * gradient, optimizer.init(gradient))
        assert jnp.allclose(moved, -0.15)


@pytest.fixture(scope="module")
def algorithms():
    """The binary of all algorithms, imported as a module."""
    with run_binary.importing() as import_binary:
        yield import_binary("bu2023_algorithms")


def mechanisms(algorithms):
    """What runs in each row, at the length of the table."""
    sizes = {"example": algorithms.EXAMPLES, "user": algorithms.USERS}
    return {
        name: algorithms.mechanism_of(row, sizes[row.unit], LAYERS)
        for name, row in algorithms.ROWS.items()
    }


def test_the_rows_are_all_algorithms_and_clippings(algorithms):
    assert len(algorithms.ROWS) == 6 * 5 + 1 + 2 * 4 + 2
    kinds = {row.build.__name__ for row in algorithms.ROWS.values()}
    assert kinds == {"gradients", "langevin", "fedavg", "fedsgd"}
    assert {row.unit for row in algorithms.ROWS.values()} == {"example", "user"}


def test_every_row_of_exact_norms_costs_the_epsilon_of_the_table(algorithms):
    each = mechanisms(algorithms).values()
    events = {str(m.event): m for m in each if m.clipping.projections is None}
    assert len(events) == 2, "all rows of examples have one event, and all rows of users another"
    for mechanism in events.values():
        found = mechanism.epsilon(algorithms.DELTA, "pld")
        assert 0.99 * algorithms.EPSILON < found <= 1.0005 * algorithms.EPSILON


@pytest.mark.slow
@pytest.mark.parametrize("projections", [10, 30, 100])
def test_estimated_norms_cost_the_same_epsilon_by_more_noise(projections, algorithms):
    found = mechanisms(algorithms)
    one, other = (found[f"{name}-JL, r = {projections}"] for name in ("SGD", "Adam"))
    assert one.event == other.event
    assert one.noise_multiplier > algorithms.NOISE
    epsilon = one.epsilon(algorithms.DELTA, "pld")
    assert 0.99 * algorithms.EPSILON < epsilon <= 1.0005 * algorithms.EPSILON


def test_the_rate_of_langevin_dynamics_gives_the_noise_that_is_claimed(algorithms):
    row, size = algorithms.ROWS["SGLD"], algorithms.EXAMPLES
    zeros = dpjax.data.Dataset("zeros", (jnp.zeros((size.units, 1)), None), (None, None), 1)
    algorithm = algorithms.langevin(row, size, lambda w, x: w @ x[0], zeros, LAYERS)
    assert algorithm.mechanism.noise_multiplier == pytest.approx(row.noise)
    assert algorithm.mechanism.event == algorithms.mechanism_of(row, size, LAYERS).event


@pytest.mark.slow
@pytest.mark.parametrize("row", ["NAG, layerwise", "SGLD", "SGD-JL, r = 30", "FedAvg", "FedSGD"])
def test_every_kind_of_algorithm_learns_digits(row, tmp_path):
    kept = tmp_path / "results.json"
    out = run_binary.run("papers/bu2023_algorithms.py", "--smoke", f'--rows="{row}"', "--out", kept)
    ((name, _, accuracy, *_),) = rows(out.stdout)
    assert name == row
    assert float(accuracy.split()[0]) > 80
    assert list(json.loads(kept.read_text())["rows"]) == [f"smoke: algorithms {row}"]

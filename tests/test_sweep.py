# SPDX-License-Identifier: Apache-2.0
"""Searches: what is run, that nothing is run twice or beside itself, and what it all costs.

Most run a stand-in for the training binary, which leaves what that leaves, in no time, and
notes in `lives` when it begins and when it ends.
"""

import copy
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import run_binary
from absl import app, flags
from mutation import kills
from small_mechanisms import mechanism_with

from dpjax import accounting, reports, sampling
from dpjax.accounting.rounding import upwards
from dpjax.cli.compare import job as compare_job
from dpjax.cli.compare.job import groups_of
from dpjax.cli.flag_checks import writable_folder
from dpjax.cli.sweep import FLAGS, possible_runs, search_cost, search_results, search_space
from dpjax.cli.sweep.job import (
    candidates_from_flags,
    conclude,
    costs,
    draw,
    flags_of,
    planned,
    require_flags,
)
from dpjax.cli.sweep.job import command as command_of
from dpjax.cli.sweep.search_cost import Unfinished
from dpjax.mechanism.card import strict
from dpjax.reports.load_run import read

STAND_IN = """
import json, os, pathlib, sys, time

given = dict(flag.removeprefix("--").split("=", 1) for flag in sys.argv[1:])
out, z = pathlib.Path(given["out"]), float(given.get("noise_multiplier", 2))
note = lambda word: (out / "lives").open("a").write(f"{word} {os.getpid()}\\\\n")
note("begin")
if "gate" in given and float(given["x"]) >= float(given.get("waits", 0)):
    while not os.path.exists(given["gate"]):
        time.sleep(0.01)
if "fails" in given and given["x"] == given["fails"] and not os.path.exists(given["gate"]):
    sys.exit("the data have a hole")
sampling = {"name": "poisson", "examples": 100, "batch_size": 10}
facts = {"format": 3, "unit": "example", "neighbours": "add-or-remove", "sampling": sampling}
facts |= {"preparation": [], "projections": None, "clipping": {"bounds": [1.0]}, "before": []}
facts |= {"noise": None}
epsilon = {"rdp": {"value": 4 / z, "proven": True}}
card = {"mechanism": {**facts, "multiplier_and_steps": [[z, 50]]}, "steps": 50, "delta": 1e-5}
card["epsilon"] = epsilon
right = float(given["x"]) / 100 + int(given.get("seed", 0)) / 1000
row = {"step": 50, "epsilon": 4 / z, "delta": 1e-5, "accuracy": right}
(out / "metrics.jsonl").write_text(json.dumps(row) + "\\\\n")
(out / "privacy.json").write_text(json.dumps(card))
note("end")
""".replace("\\\\", "\\")
ONE = accounting.subsampled_gaussian(2.0, 0.1, 50)


@pytest.fixture
def stand_in(tmp_path):
    path = tmp_path / "stand_in.py"
    path.write_text(STAND_IN)
    return path


def command(*flags):
    return [sys.executable, "-m", "dpjax", "sweep", *map(str, flags)]


def sweep(*flags, status=0):
    outcome = run_binary.run("dpjax", "sweep", *flags, status=status)
    return outcome.stdout[-3000:] + outcome.stderr[-3000:]


def lives(folder):
    return [line.split()[0] for line in (folder / "lives").read_text().splitlines()]


def results(folder):
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def prices(folder):
    return [price["epsilon"] for price in json.loads((folder / "costs.json").read_text())["prices"]]


def wait_for(condition):
    until = time.time() + 60
    while not condition():
        assert time.time() < until
        time.sleep(0.02)


@pytest.mark.slow
def test_a_search_trains_ranks_and_is_not_repeated(tmp_path):
    flags = ["--grid", "learning_rate=0.1,0.4;bound=1", "--seed=0", "--jobs=2"]
    flags += ["--fixed", "epochs=1;evaluations=1", "--out", tmp_path]
    said = sweep(*flags)
    rows = results(tmp_path)
    assert len(rows) == 2
    means = [row["mean"] for row in rows]
    assert means == sorted(means, reverse=True)
    cards = [json.loads(path.read_text()) for path in tmp_path.glob("*/privacy.json")]
    assert len(cards) == 2
    ((z, steps),) = cards[0]["mechanism"]["multiplier_and_steps"]
    drawn = cards[0]["mechanism"]["sampling"]
    one = accounting.subsampled_gaussian(z, drawn["batch_size"] / drawn["examples"], steps)
    every = accounting.epsilon(accounting.compose(*[one] * 2), 1e-5, "pld")
    assert prices(tmp_path) == pytest.approx([accounting.epsilon(one, 1e-5, "pld"), every])
    assert prices(tmp_path)[0] <= 3, "the epsilon that the runs were planned for"
    assert "These seeds are published" in said
    assert (tmp_path / "comparison.html").stat().st_size > 1000
    page = " ".join((tmp_path / "comparison.html").read_text().split())
    for price in prices(tmp_path):
        assert f"epsilon {upwards(price, '.3f')}" in said
        assert f"epsilon {upwards(price, '.3f')}" in page
    best = tmp_path / rows[0]["folders"][0]
    assert (best / "params.msgpack").exists()
    assert not (best / "report.html").exists(), "only if it is wanted"
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*")}
    again = sweep(*flags, "--nopage")
    assert "2 runs; 2 have finished" in again
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*")} == before


def test_a_run_is_a_command_without_a_report_of_its_own():
    trial = search_space.Trial({"bound": "1"}, 3, 0)
    given = copy.deepcopy(FLAGS)
    given(["sweep", "--fixed=epochs=2"])
    train = [sys.executable, "-m", "dpjax", "train", "--out=a"]
    quiet = [*train, "--report=false", "--epochs=2", "--bound=1", "--seed=3"]
    assert command_of(given, trial, "a") == quiet
    given(["sweep", "--fixed=report=true"])
    assert command_of(given, trial, "a") == [*train, "--report=true", "--bound=1", "--seed=3"]
    given(["sweep", "--reports", "--fixed="])
    assert command_of(given, trial, "a") == [*train, "--bound=1", "--seed=3"]
    given(["sweep", "--noreports", "--binary=mine.py"])
    assert command_of(given, trial, "a")[1:] == ["mine.py", "--out=a", "--bound=1", "--seed=3"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"boun": "1"}, "Did you mean: bound"), ({"bound": "a"}, "the run bound=a,repeat=0")],
)
def test_a_setting_that_no_run_takes_is_refused_before_the_first(settings, words):
    given = copy.deepcopy(FLAGS)
    given(["sweep"])
    right = search_space.Trial({"bound": "1"}, None, 0)
    require_flags(given, [right])
    with pytest.raises(app.UsageError, match=words):
        require_flags(given, [right, search_space.Trial(settings, None, 0)])
    given(["sweep", "--binary=mine.py"])
    require_flags(given, [search_space.Trial(settings, None, 0)])


@pytest.mark.slow
def test_a_run_that_fails_is_reported_and_tried_again_and_the_others_continue(stand_in, tmp_path):
    gate, out = tmp_path / "gate", tmp_path / "out"
    flags = ["--binary", stand_in, "--grid", "x=50,70,60", "--seeds=2", "--seed=4", "--nopage"]
    flags += ["--fixed", f"gate={gate};waits=1000;fails=70", "--out", out]
    said = sweep(*flags, status=1)
    assert said.count("FAILED with status 1: the data have a hole") == 2
    rows = results(out)
    assert [(row["settings"], row["runs"]) for row in rows] == [({"x": "60"}, 2), ({"x": "50"}, 2)]
    assert rows[0]["accuracies"] == pytest.approx([60.4, 60.5])
    assert rows[0]["deviation"] == pytest.approx(np.std([60.4, 60.5], ddof=1))
    gate.touch()
    said = sweep(*flags)
    assert "6 runs; 4 have finished" in said
    assert "70.45 % ± 0.07     2    2.000  x=70" in said
    assert prices(out)[1] == pytest.approx(
        accounting.epsilon(accounting.compose(*[ONE] * 6), 1e-5, "pld")
    )
    assert lives(out / "x=50,seed=4") == ["begin", "end"]
    assert lives(out / "x=70,seed=4") == ["begin", "begin", "end"]


@pytest.mark.slow
def test_what_a_killed_search_left_running_is_waited_for(stand_in, tmp_path):
    gate, out = tmp_path / "gate", tmp_path / "out"
    flags = ["--binary", stand_in, "--grid", "x=10,20,30,40", "--jobs=2", "--nopage"]
    flags += ["--fixed", f"gate={gate};waits=20", "--out", out]
    names = [f"x={x},repeat=0" for x in (10, 20, 30, 40)]
    first = subprocess.Popen(command(*flags), stdout=subprocess.DEVNULL)
    wait_for(lambda: all((out / name / "lives").exists() for name in names[:3]))
    assert not (out / names[3]).exists(), "two simultaneously, no more"
    first.kill()
    first.wait()
    second = subprocess.Popen(command(*flags), stdout=subprocess.PIPE, text=True)
    wait_for(lambda: (out / names[3] / "lives").exists())
    assert [lives(out / name) for name in names[1:3]] == [["begin"]] * 2
    sweep(*flags, status=1)  # a third, beside the second, is refused
    gate.touch()
    assert "4 runs; 1 have finished" in second.communicate(timeout=60)[0]
    assert second.returncode == 0
    assert [lives(out / name) for name in names] == [["begin", "end"] * n for n in (1, 2, 2, 1)]


@pytest.mark.slow
def test_a_signal_stops_the_runs_and_the_same_command_resumes(stand_in, tmp_path):
    gate, out = tmp_path / "gate", tmp_path / "out"
    flags = ["--binary", stand_in, "--grid", "x=10,20,30", "--nopage"]
    flags += ["--fixed", f"gate={gate};waits=20", "--out", out]
    search = subprocess.Popen(
        command(*flags), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    noted = out / "x=20,repeat=0" / "lives"
    wait_for(lambda: noted.exists() and noted.read_text().endswith("\n"))
    search.send_signal(signal.SIGTERM)
    said = search.communicate(timeout=60)[0]
    assert search.returncode == 143
    assert "stopped" in said
    assert "the same command resumes" in said
    with pytest.raises(ProcessLookupError):
        os.kill(int(noted.read_text().split()[1]), 0)
    assert not (out / "x=30,repeat=0").exists()
    gate.touch()
    assert "3 runs; 1 have finished" in sweep(*flags)
    assert lives(noted.parent) == ["begin", "begin", "end"]


@pytest.mark.slow
def test_a_random_number_of_runs_costs_what_selection_costs(stand_in, tmp_path):
    flags = ["--binary", stand_in, "--random_runs=geometric:3", "--seed=1", "--nopage"]
    count = accounting.draw_runs(jax.random.key(1), 3)
    said = sweep(*flags, "--grid=x=10,20", "--free=x", "--out", tmp_path / "out")
    assert f"{count} runs; 0" in said
    for output in (tmp_path / "out").glob("*/output.txt"):
        assert not output.stat().st_mode & 0o077, "it holds private losses"
    best = accounting.select_best(ONE, 1e-5, runs=3).epsilon_best
    want = [accounting.epsilon(ONE, 1e-5, "pld"), best]
    assert prices(tmp_path / "out")[::2] == pytest.approx(want)
    other = sweep(*flags, "--grid=x=10,30", "--out", tmp_path / "out", status=1)
    assert "--grid: x=10,20 there, x=10,30 now" in other


@kills("cli/sweep/job.py", "trial._replace(repeat=secrets.randbits(64))", "trial", slow=True)
def test_no_name_of_a_folder_tells_how_many_ran():
    """The best run is published with its `config.json`, which holds the name."""
    given = copy.deepcopy(FLAGS)
    given(["sweep", "--grid=x=1", "--random_runs=geometric:30", "--binary=x.py"])
    names = [trial.name for trial in draw(given, {"x": ["1"]})]
    assert len({*names}) == len(names)
    assert not {f"x=1,repeat={number}" for number in range(1000)} & {*names}


@pytest.mark.slow
def test_flags_that_do_not_go_together_are_refused(tmp_path):
    assert "either --grid or --ranges" in sweep("--out", tmp_path, status=1)
    both = ["--grid=a=1", "--fixed=a=2", "--out", tmp_path]
    assert "both say what a is" in sweep(*both, status=1)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        ("geometric:0.5", "must be 1 or more, and finite"),
        ("geometric:nan", "expected a number"),
        ("geometric", "could not convert string to float"),
        ("fixed:3", "There are: 'geometric'"),
    ],
)
def test_a_random_number_of_runs_that_cannot_be_drawn_is_refused(number, words):
    given = copy.deepcopy(FLAGS)
    given(["sweep", "--ranges=learning_rate=0.1,0.2", f"--random_runs={number}"])
    answer = rf"^--random_runs={number}: expected one of geometric, .*geometric:10\. .*{words}"
    with pytest.raises(app.UsageError, match=answer):
        candidates_from_flags(given)


@pytest.mark.parametrize("supplied", [False, True])
def test_a_search_that_continues_a_supplied_key_says_so(supplied, tmp_path):
    given = copy.deepcopy(FLAGS)
    given(["sweep"])
    plain = mechanism_with(1000, 10, noise_multiplier=2.0, steps=5)
    spent = dataclasses.replace(plain.spent(plain.multipliers), supplied=np.array(supplied))
    card = reports.card(dataclasses.replace(plain, before=[spent]), 1e-5, methods=["rdp"])
    (tmp_path / "privacy.json").write_text(json.dumps(card))
    (tmp_path / "metrics.jsonl").write_text('{"step": 5, "epsilon": 1.0}\n')
    (tmp_path / "finished").touch()
    _, words = costs(given, {"x": ["1"]}, {tmp_path: search_space.Trial({"x": "1"}, None, 0)})
    assert ("were supplied" in words) == supplied


# --- candidates ---


def test_candidates_are_values_or_ranges():
    found = search_space.candidates("a=1, 2 ;hidden=64|128,64; rate=log:0.05:1", "ranges")
    rate = search_space.Range("log", 0.05, 1.0)
    assert found == {"a": ["1", "2"], "hidden": ["64", "128,64"], "rate": rate}
    assert len(search_space.every({"a": ["1", "2"], "b": ["x", "y", "z"]})) == 6


def test_draws_are_even_on_their_scale_and_follow_their_seed():
    of = search_space.candidates("a=log:0.01:1;b=uniform:2:4;c=whole:1:3;d=x,y", "ranges")
    many, again, others = (
        search_space.drawn(of, 4000, np.random.default_rng(seed)) for seed in (0, 0, 1)
    )
    assert many == again != others
    a, b, c = (np.array([float(one[name]) for one in many]) for name in "abc")
    assert np.mean(a < 0.1) == pytest.approx(0.5, abs=0.03)
    assert 0.01 <= a.min() < a.max() <= 1
    assert np.mean(b) == pytest.approx(3, abs=0.05)
    np.testing.assert_allclose([np.mean(c == n) for n in (1, 2, 3)], 1 / 3, rtol=0, atol=0.03)
    assert {one["d"] for one in many} == {"x", "y"}


def test_whole_numbers_are_drawn_to_their_last_digit():
    of = search_space.candidates("a=whole:1234567:1234569", "ranges")
    found = {each["a"] for each in search_space.drawn(of, 100, np.random.default_rng(0))}
    assert found == {"1234567", "1234568", "1234569"}


def test_equal_settings_are_repeats_with_seeds_and_folders_of_their_own():
    found = search_space.trials([{"b": "1"}, {"b": "1"}, {"b": "2"}, {"b": "a/" + "x" * 200}], 7)
    assert [trial.seed for trial in found] == [7, 8, 7, 7]
    assert [trial.name for trial in found[:3]] == ["b=1,seed=7", "b=1,seed=8", "b=2,seed=7"]
    assert "/" not in found[3].name
    assert len(found[3].name) < 140
    assert search_space.trials([{"b": "1"}], None)[0].name == "b=1,repeat=0"
    assert [search_space.Trial(**stored) for stored in search_space.stored(found)] == found


@pytest.mark.parametrize(
    ("text", "flag"),
    [
        ("a", "grid"),
        ("a=1;a=2", "grid"),
        ("seed=1", "fixed"),
        ("out=x", "fixed"),
        ("a=log:0:1", "ranges"),
        ("a=uniform:2:1", "ranges"),
        ("a=uniform:2:1e999", "ranges"),
        ("a=log:x:1", "ranges"),
        ("a=uniform:1:2", "grid"),
        ("a=whole:0.5:0.9", "ranges"),
    ],
)
def test_what_cannot_be_read_is_refused_with_an_example(text, flag):
    with pytest.raises(app.UsageError, match=f"--{flag}: .*(log:LOW:HIGH|learning_rate=0.2,0.4)"):
        search_space.candidates(text, flag)


# --- prices ---


def card(z=2.0, delta=1e-5, **changes):
    mechanism = mechanism_with(100, 10, noise_multiplier=z, **{"steps": 50, **changes})
    return {"mechanism": mechanism.facts, "steps": 50, "delta": delta}


@kills("cli/sweep/search_cost.py", 'min(card["delta"]', 'max(card["delta"]', slow=True)
@kills("cli/sweep/search_cost.py", "by_one = max(", "by_one = min(", slow=True)
@kills("cli/sweep/search_cost.py", "*(other.event for other in others)", "", slow=True)
def test_the_dearest_run_and_all_of_them_and_the_smallest_delta():
    cheap = accounting.subsampled_gaussian(4.0, 0.1, 50)
    cards = [card(4.0), card(2.0, delta=1e-6), card(4.0)]
    found, delta, relation = search_cost.prices(cards, [Unfinished(ONE)], ("logarithmic", 4.0), "")
    want = [
        accounting.epsilon(ONE, 1e-6, "pld"),
        accounting.epsilon(accounting.compose(cheap, cheap, ONE, ONE), 1e-6, "pld"),
        accounting.select_best([ONE, cheap], 1e-6, runs=4, distribution="logarithmic").epsilon_best,
    ]
    assert [price.epsilon for price in found] == pytest.approx(want)
    assert (delta, relation) == (1e-6, "add-or-remove")
    assert [price.method for price in found] == ["pld", "pld", "rdp"]
    assert "one run alone, by PLD: " in str(found[0])
    with pytest.raises(ValueError, match="add-or-remove neighbours of one example and replace-"):
        search_cost.prices([card(), card(neighbours="replace-one")], [], None, "")


def test_what_might_have_been_drawn_counts_unless_it_changes_no_price():
    free = ["bound", "rate"]

    def why(text, *ran):
        of = search_space.candidates(text, "ranges")
        return search_cost.uncovered(of, search_space.trials(ran, None), free)

    assert not why("bound=1,2;rate=log:0.1:1", {"bound": "1", "rate": "0.5"})
    assert not why("noise=1,2;rate=uniform:0:1", *({"noise": z, "rate": "0"} for z in "12"))
    assert "settings of noise" in why("noise=1,2;rate=3", {"noise": "2", "rate": "3"})
    assert "settings of noise" in why("noise=uniform:1:2", {"noise": "1"})
    for infinite in ("inf", "-Infinity", "1e999"):
        assert "settings of bound" in why(f"bound=1,{infinite}", {"bound": "1"})
    unknown = search_cost.prices([card()], [], ("geometric", 3.0), "because")[0][-1]
    assert unknown.epsilon is None
    assert str(unknown).startswith("not known")


def test_a_search_leaves_out_what_a_run_does_not_have(tmp_path):
    """A grid of optimizers and of momentum is one: adam runs without the momentum."""
    given = copy.deepcopy(FLAGS)
    for grid, fixed in (
        ("optimizer=sgd,adam;momentum=0.5", ""),
        ("optimizer=sgd,adam", "momentum=0.5"),
    ):
        given(["sweep", f"--grid={grid}", f"--fixed={fixed}"])
        folder = tmp_path / f"fixed {fixed}"
        folder.mkdir()
        trials = planned(given, folder, candidates_from_flags(given))
        said = [command_of(given, trial, "a") for trial in trials]
        assert ["--momentum=0.5" in each for each in said] == [True, False]
        assert ["--optimizer=adam" in each for each in said] == [False, True]


@pytest.mark.parametrize(
    "words",
    [
        ["--grid=momentum=0.5,0.9", "--fixed=optimizer=adam"],
        ["--grid=bound=1,2", "--fixed=optimizer=adam;momentum=0.5"],
    ],
)
def test_a_search_of_a_flag_without_effect_is_refused_before_it_runs(words, tmp_path):
    given = copy.deepcopy(FLAGS)
    given(["sweep", *words])
    answer = r"the run .*: --momentum=0\.5 --optimizer=adam: --momentum has an effect with"
    with pytest.raises(app.UsageError, match=answer):
        planned(given, tmp_path, candidates_from_flags(given))
    assert not list(tmp_path.iterdir())
    given(["sweep", "--binary=mine.py"])
    (tmp_path / "mine").mkdir()
    assert len(planned(given, tmp_path / "mine", candidates_from_flags(given))) == 2


BINS = "noise=banded;sampling=balls_in_bins;noise_multiplier=2;steps=40;batch_size=100"


def drawable(fixed, ranges):
    """What `dpjax train` could run with these settings, and why some of it is not known."""
    given = copy.deepcopy(FLAGS)
    given(["sweep", f"--fixed={fixed}", f"--ranges={ranges}", "--random_runs=geometric:3"])
    of = candidates_from_flags(given)
    return possible_runs.mechanisms(
        of, lambda settings: flags_of(given, search_space.Trial(settings, None, 0))
    )


@kills("cli/sweep/search_cost.py", "*(mechanism.event for mechanism in possible)", "", slow=True)
@kills("cli/sweep/possible_runs.py", "        self.names_read.add(name)\n", "", slow=True)
@kills("cli/sweep/job.py", "uncovered, possible, different", "uncovered, (), different", slow=True)
def test_the_best_run_pays_for_every_setting_that_could_be_drawn(tmp_path):
    """Momentum of SGD changes the strategy of correlated noise, and so what a step costs."""
    given = copy.deepcopy(FLAGS)
    ranges = "optimizer=sgd,adam;momentum=0.9,0.5;learning_rate=1,2"
    given(["sweep", f"--fixed={BINS}", f"--ranges={ranges}", "--random_runs=geometric:3"])
    of = candidates_from_flags(given)
    mechanisms, why = drawable(BINS, ranges)
    assert (len(mechanisms), why) == (3, ""), "adam has no momentum, and no rate changes a cost"
    events = [mechanism.event for mechanism in mechanisms]
    for number, mechanism in enumerate(mechanisms):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "privacy.json").write_text(
            json.dumps(reports.card(mechanism, 1e-5, methods=["rdp"]))
        )
        (folder / "metrics.jsonl").write_text('{"step": 40, "epsilon": 1.0}\n')
        (folder / "finished").touch()
        settings = {"optimizer": "sgd", "momentum": "0.9", "learning_rate": "1"}
        found, _ = costs(given, of, {folder: search_space.Trial(settings, None, 0)})
        best = accounting.select_best(events, 1e-5, runs=3).epsilon_best
        assert found["prices"][-1]["epsilon"] == pytest.approx(best), "whichever was drawn"


def test_a_range_is_no_list_of_every_cost():
    _, why = drawable(BINS, "momentum=uniform:0:0.9;learning_rate=1,2")
    assert "depends on momentum, which is drawn from a range" in why
    _, why = drawable(BINS, "momentum=uniform:0:1;learning_rate=1,2")
    assert "momentum=1 is refused" in why, "and 0.9 is not"
    found, why = drawable(BINS, "learning_rate=log:0.1:1;bound=uniform:0:1")
    assert (len(found), why) == (1, ""), "noise is in units of the bound"
    white = "noise_multiplier=2;steps=40;batch_size=100"
    found, why = drawable(white, "momentum=uniform:0:0.9;bound=1,1e999;optimizer=sgd,adam")
    assert (len(found), why) == (1, ""), "independent noise; no run has an infinite bound"
    white = "noise_multiplier=2;epochs=1"
    found, why = drawable(white, "dataset=digits,none.csv;batch_size=100,50")
    assert (len(found), why) == (2, ""), "train refuses the others"
    found, why = drawable(white, "sampling=poisson,fixed;batch_size=100")
    assert (len(found), why) == (2, "")
    number = ("geometric", 3.0)
    best = search_cost.prices([card()], [], number, "", found)[0][-1]
    assert (best.epsilon, best.holds) == (
        None,
        "settings that were not run protect other neighbours",
    )
    given = copy.deepcopy(FLAGS)
    given(["sweep", "--grid=momentum=0,0.9", "--free=momentum"])
    with pytest.raises(app.UsageError, match="goes with --binary"):
        candidates_from_flags(given)
    given = copy.deepcopy(FLAGS)
    given(["sweep", "--grid=x=1,2", "--reports", "--binary=x.py"])
    with pytest.raises(app.UsageError, match=r"--reports --binary=x\.py: a script draws"):
        candidates_from_flags(given)
    with pytest.raises(flags.IllegalFlagValueError, match="Expected a path"):
        given(["sweep", "--binary="])


@kills(
    "cli/sweep/search_cost.py", "for run in spent_of(mechanism, steps)", "for run in []", slow=True
)
def test_random_bins_lower_the_price_as_on_the_card():
    (mechanism,), _ = drawable(f"{BINS};optimizer=adam", "learning_rate=1")
    run = {"mechanism": mechanism.facts, "steps": 40, "delta": 1e-5}
    (one, *_), _, _ = search_cost.prices([run], [], None, "")
    tightest = accounting.tightest(mechanism.event, "add-or-remove")
    assert one.epsilon == pytest.approx(mechanism.epsilon(1e-5, tightest))
    assert one.epsilon < accounting.epsilon(accounting.gaussian(2.0), 1e-5, "pld")


def test_a_run_that_has_not_finished_has_spent_its_steps(tmp_path):
    assert accounting.epsilon(search_cost.spent_so_far(tmp_path).event, 1e-5) == 0
    np.savez(tmp_path / "moments.npz", multipliers=[8.0, 8.0], mean=0)
    queries = accounting.compose(*[accounting.gaussian(8.0)] * 2)
    spent = accounting.epsilon(search_cost.spent_so_far(tmp_path).event, 1e-5)
    assert spent == pytest.approx(accounting.epsilon(queries, 1e-5)), "killed after its queries"
    run = {"mechanism": card(steps=80)["mechanism"]}
    (tmp_path / "run.json").write_text(json.dumps(run))
    (tmp_path / "metrics.jsonl").write_text('{"step": 50}\n')
    spent = accounting.epsilon(search_cost.spent_so_far(tmp_path).event, 1e-5)
    assert spent == pytest.approx(accounting.epsilon(ONE, 1e-5))
    run["mechanism"]["clipping"]["bounds"] = ["inf"]
    (tmp_path / "run.json").write_text(json.dumps(run))
    assert accounting.epsilon(search_cost.spent_so_far(tmp_path).event, 1e-5) == math.inf
    with pytest.raises(ValueError, match="expected the privacy card"):
        search_cost.card_of(tmp_path)


@kills(
    "cli/sweep/search_cost.py",
    "for other in others if other.protects",
    "for other in []",
    slow=True,
)
def test_a_run_that_has_not_finished_protects_what_it_was_made_for(tmp_path):
    """A relation that one run of a search has no proof for is not stated for all."""
    shuffled = mechanism_with(1000, 10, noise_multiplier=1.0, sampling=sampling.shuffled(1000, 10))
    clients = mechanism_with(100, 10, noise_multiplier=1.0, unit="client")
    for mechanism, other in ((shuffled, "zero-out neighbours of one example"), (clients, "client")):
        (tmp_path / "run.json").write_text(json.dumps(mechanism.identity))
        (tmp_path / "furthest").write_text("1 0\n")
        spent = search_cost.spent_so_far(tmp_path)
        with pytest.raises(ValueError, match=f"costs of these runs do not add: .*{other}"):
            search_cost.prices([card()], [Unfinished(ONE), spent], None, "")


@kills("cli/sweep/job.py", "public = number_of_runs(given) is None", "public = True", slow=True)
def finished_run(folder):
    folder.mkdir()
    claim = {"epsilon": {"rdp": {"value": 1.0, "proven": True}}}
    (folder / "privacy.json").write_text(json.dumps(card() | claim))
    (folder / "metrics.jsonl").write_text('{"step": 50, "epsilon": 1.0, "accuracy": 0.9}\n')
    (folder / "finished").touch()
    return folder


@kills("cli/sweep/job.py", "if given.binary and (silent", "if False and (silent", slow=True)
def test_a_script_that_failed_without_a_description_may_have_spent_anything(tmp_path):
    given = copy.deepcopy(FLAGS)
    given(["sweep", "--grid=x=1,2", "--binary=x.py"])
    trials = {
        folder: search_space.Trial({"x": folder.name}, None, 0)
        for folder in (finished_run(tmp_path / "1"), tmp_path / "2")
    }
    known, _ = costs(given, {"x": ["1", "2"]}, trials)
    assert known["prices"][1]["epsilon"] is not None, "the second has not begun"
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "output.txt").touch()
    unknown, said = costs(given, {"x": ["1", "2"]}, trials)
    assert unknown["prices"][1]["epsilon"] is None
    assert "no file says what 2 spent" in said


@kills("cli/flag_checks.py", "if mode != 0o777:", "if False:", slow=True)
def test_the_folder_of_a_secret_number_of_runs_is_its_owners_alone_though_it_was_there(tmp_path):
    for mode, others in ((0o777, 0o055), (0o700, 0)):
        tmp_path.chmod(0o755)
        writable_folder(tmp_path, tmp_path, mode=mode)
        assert tmp_path.stat().st_mode & 0o077 == others


@kills("cli/sweep/job.py", "RELEASED if public else _COUNTED", "RELEASED", slow=True)
@kills("cli/sweep/job.py", "single=not public", "single=False", slow=True)
@kills("cli/compare/job.py", "badges = {badge, *map", "badges = {*map", slow=True)
@pytest.mark.parametrize(
    ("number", "mode"), [("--random_runs=geometric:3", 0o600), ("--seeds=1", 0o666)]
)
def test_results_that_tell_a_secret_number_of_runs_are_their_owners_alone(
    number, mode, tmp_path, monkeypatch
):
    given = copy.deepcopy(FLAGS)
    given(["sweep", "--grid=x=1", number, "--binary=x.py"])
    run = finished_run(tmp_path / "run")
    monkeypatch.setattr(compare_job, "draw", lambda *_: ("<svg/>", b"", []))
    trials = dict.fromkeys(
        (run, finished_run(tmp_path / "again")), search_space.Trial({"x": "1"}, None, 0)
    )
    conclude(given, tmp_path, {"x": ["1"]}, trials)
    # The price of the best run is of a score of its own, and a mean is of several runs.
    ranked = (tmp_path / "results.jsonl").read_text().splitlines()
    assert len(ranked) == (2 if mode == 0o600 else 1)
    os.umask(umask := os.umask(0))
    page = tmp_path / "comparison.html"
    assert ("tells how many ran: do not publish" in page.read_text()) == (mode == 0o600)
    for name in ("results.jsonl", "costs.json", page, page.with_suffix(".png")):
        assert (tmp_path / name).stat().st_mode & 0o777 == mode & ~umask


@kills("cli/sweep/search_results.py", "upwards(spent, '.3f')", "format(spent, '.3f')", slow=True)
def test_the_table_of_a_search_is_rounded_up():
    row = {"mean": 50.0, "deviation": None, "runs": 1, "epsilon": 2.0001, "settings": {"x": "1"}}
    assert "2.001" in search_results.table([row])


def test_a_run_without_a_last_accuracy_has_none_in_a_search_either(tmp_path):
    """As in `dpjax compare`: an earlier accuracy is of other parameters."""
    trials = {}
    for name, last in (("a", 0.5), ("b", None)):
        (tmp_path / name).mkdir()
        rows = [{"step": 1, "epsilon": 1.0, "accuracy": 0.9}, {"step": 2, "epsilon": None}]
        rows[1]["accuracy"] = last
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / name / "metrics.jsonl").write_text(lines)
        trials[tmp_path / name] = search_space.Trial({"x": name}, None, 0)
    found = search_results.results(trials)
    alone = search_results.results(dict.fromkeys(trials, search_space.Trial({}, 1, 0)), single=True)
    assert [row["runs"] for row in alone] == [1, 1], "what a price of the best run is of"
    assert [row["mean"] for row in found] == [50.0, None]
    assert [row["epsilon"] for row in found] == [math.inf, math.inf]
    groups = groups_of([read(folder, arrays=False) for folder in trials])
    assert [group.finals().tolist() for group in groups] == [[50.0], []]
    assert json.loads(json.dumps(strict(found)))[0]["epsilon"] == "inf"


@kills("cli/sweep/job.py", "replace(path, json.dumps(plan,", "path.write_text(json.dumps(plan,")
def test_a_plan_is_its_owners_alone(tmp_path):
    given = copy.deepcopy(FLAGS)
    given(["sweep", "--grid=learning_rate=0.1", f"--out={tmp_path}"])
    planned(given, tmp_path, candidates_from_flags(given))
    assert (tmp_path / "sweep.json").stat().st_mode & 0o077 == 0


@kills("cli/sweep/job.py", "if hash_of(f) != there", "if False", slow=True)
@pytest.mark.parametrize("number", ["--random=2", "--random_runs=geometric:3"])
def test_a_search_whose_file_of_data_changed_is_refused(number, tmp_path, monkeypatch):
    """Also a file that no run drew: the best of a random number pays for its settings too."""
    files = [tmp_path / name for name in ("a.csv", "b.csv")]
    for file in files:
        file.write_text("x,label\n" + "0,0\n1,1\n" * 20)
    given = copy.deepcopy(FLAGS)
    monkeypatch.setenv("HOME", str(tmp_path))
    # A shell leaves ~ as it is there.
    ranges = f"--ranges=dataset={files[0]},~/b.csv;learning_rate=0.1,0.2"
    given(["sweep", ranges, "--fixed=epochs=1;model=linear", number, "--seed=0"])
    begun = planned(given, tmp_path, candidates_from_flags(given))
    for file, given_as in zip(files, (files[0], "~/b.csv"), strict=True):
        before = file.read_text()
        file.write_text(before + "1,1\n")
        with pytest.raises(app.UsageError, match=f"--dataset={given_as}: the file differs"):
            planned(given, tmp_path, candidates_from_flags(given))
        file.write_text(before)
        assert planned(given, tmp_path, candidates_from_flags(given)) == begun
    files[0].unlink()
    with pytest.raises(app.UsageError, match="restore the file, or give another --out"):
        planned(given, tmp_path, candidates_from_flags(given))


@kills("cli/sweep/job.py", "different = apart(", "different = '' and (", slow=True)
@kills("cli/sweep/search_cost.py", "    if different:", "    if False:", slow=True)
def test_costs_of_runs_on_different_data_are_not_added(tmp_path):
    """As in `dpjax compare`: the data are named otherwise, or a script chose them."""
    given = copy.deepcopy(FLAGS)
    given(["sweep", "--ranges=x=1,2", "--random_runs=geometric:3", "--binary=x.py", "--free=x"])
    trials = {}
    for name, data in (("1", "one"), ("2", "one"), ("3", "another")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "privacy.json").write_text(json.dumps(card() | {"epsilon": {}}))
        (folder / "run.json").write_text(json.dumps({**card(), "data": data}))
        (folder / "metrics.jsonl").write_text('{"step": 50, "epsilon": 1.0}\n')
        (folder / "finished").touch()
        trials[folder] = search_space.Trial({"x": name}, None, 0)
        found, said = costs(given, {"x": ["1", "2", "3"]}, trials)
        epsilons = [price["epsilon"] for price in found["prices"]]
        assert [each is None for each in epsilons] == [False, *[name == "3"] * 2]
    assert "their costs do not add: these runs were trained on different data" in said

# SPDX-License-Identifier: Apache-2.0
"""Searches: what is run, that nothing is run twice, and what it all costs.

Most run a stand-in for the command of a run, which leaves what that leaves, in no time, and
notes in `lives` when it begins and when it ends.
"""

import copy
import json
import math
import re
import sys

import jax
import numpy as np
import pytest
from absl import app, flags
from mutation import kills
from small_mechanisms import mechanism_with

from dpjax import accounting, sampling
from dpjax._files import strict
from dpjax._rounding import three_digits
from dpjax.cli import compare
from dpjax.cli.flag_sets.sweep import FLAGS
from dpjax.cli.sweep import child_processes, search_cost, search_space
from dpjax.cli.sweep import command as search
from dpjax.cli.sweep.search_cost import Spent
from dpjax.cli.train.build import build_mechanism

ONE = accounting.subsampled_gaussian(2.0, 0.1, 50)
STAND_IN = """
import json, os, pathlib, sys

given = dict(flag.removeprefix("--").split("=", 1) for flag in sys.argv[1:])
out = pathlib.Path(given["out"])
note = lambda word: (out / "lives").open("a").write(f"{word} {os.getpid()}\\n")
note("begin")
if given["x"] == given.get("fails") and not os.path.exists(given["gate"]):
    sys.exit("the data have a hole")
run = json.loads(pathlib.Path(given["card"]).read_text())
right = float(given["x"]) / 100 + int(given.get("seed", 0)) / 1000
row = {"step": 50, "epsilon": 2.0, "delta": 1e-5, "accuracy": right}
(out / "run.json").write_text(json.dumps(run))
(out / "metrics.jsonl").write_text(json.dumps(row) + "\\n")
note("end")
"""


def parsed(*words):
    given = copy.deepcopy(FLAGS)
    given(["sweep", *map(str, words)])
    return given


def described(mechanism):
    return {"mechanism": json.loads(json.dumps(mechanism.facts))}


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Flags of a search that runs a stand-in for `dpjax train`, with a flag that is free."""
    (script := tmp_path / "stand_in.py").write_text(STAND_IN)

    def command(*given):
        return [sys.executable, str(script), *search.options_of(*given)]

    monkeypatch.setattr(search, "command", command)
    monkeypatch.setattr(search, "announce", lambda given, runs: None)  # no flags of train here
    monkeypatch.setattr(search, "_FREE", ("x",))
    mechanism = mechanism_with(100, 10, noise_multiplier=2.0, steps=50)
    (tmp_path / "card.json").write_text(json.dumps(described(mechanism)))
    fixed = f"card={tmp_path / 'card.json'};gate={tmp_path / 'gate'}"
    return [f"--out={tmp_path / 'out'}", "--noplot"], fixed


def sweep(*words, status=0):
    with pytest.raises(SystemExit) as ended:
        search.run(parsed(*words), ["sweep"])
    assert int(ended.value.code) == status


@pytest.fixture(autouse=True)
def _as_before():
    """A search takes SIGTERM as Ctrl-C, and leaves the accelerator to its runs."""
    signals, platforms = search.signal, jax.config.jax_platforms
    before = signals.getsignal(signals.SIGTERM)
    yield
    signals.signal(signals.SIGTERM, before)
    jax.config.update("jax_platforms", platforms)


def lives(folder):
    return [line.split()[0] for line in (folder / "lives").read_text().splitlines()]


def prices(folder):
    return [price["epsilon"] for price in json.loads((folder / "costs.json").read_text())["prices"]]


# --- runs ---


@pytest.mark.slow
def test_a_search_trains_ranks_and_is_not_repeated(tmp_path, capsys):
    words = ["--grid=learning_rate=0.1,0.4;bound=1", "--seed=0", f"--out={tmp_path}"]
    words += ["--fixed=epochs=1;evaluations=1;model=linear;accountant=rdp"]
    sweep(*words)
    said = capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    means = [row["mean"] for row in rows]
    assert means == sorted(means, reverse=True)
    cards = [json.loads(path.read_text()) for path in tmp_path.glob("*/privacy.json")]
    ((z, steps),) = cards[0]["mechanism"]["multiplier_and_steps"]
    drawn = cards[0]["mechanism"]["sampling"]
    one = accounting.subsampled_gaussian(z, drawn["batch_size"] / drawn["examples"], steps)
    every = accounting.epsilon(accounting.compose(*[one] * 2), 1e-5, "pld")
    assert prices(tmp_path) == pytest.approx([accounting.epsilon(one, 1e-5, "pld"), every])
    for price in prices(tmp_path):
        assert f"epsilon {three_digits(price)}" in said
    best = tmp_path / rows[0]["folders"][0]
    assert (best / "params.msgpack").exists()
    assert not (best / "report.html").exists(), "only if it is wanted"
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*")}
    sweep(*words, "--noplot")
    assert "0 of 2 runs to do" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*")} == before


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("words", "covered"),
    [
        (["--grid=bound=0.5,1,2"], "all 3 runs"),
        (["--ranges=bound=0.5,1", "--random_runs=geometric:3"], "the best of a geometric number"),
    ],
)
def test_the_price_of_a_search_is_printed_before_it_runs(words, covered, tmp_path, capsys):
    given = copy.deepcopy(FLAGS)
    given(["sweep", "--fixed=dataset=digits;model=linear;target_epsilon=1", *words])
    trials = search.draw(given, search.candidates_of(given))
    search.announce(given, {tmp_path / trial.name: trial for trial in trials})
    printed = capsys.readouterr().out
    assert covered in printed
    (total,) = re.findall(r"--target_epsilon=([\d.]+)", printed)
    assert 1.5 < float(total) < 3
    if "random_runs" in "".join(words):
        assert f"all {len(trials)}" not in printed  # their number is secret


@pytest.mark.thorough
def test_a_run_that_fails_is_reported_and_tried_again_and_the_others_continue(
    stand_in, tmp_path, capsys
):
    words, fixed = stand_in
    words = [*words, "--grid=x=50,70,60", "--seeds=2", "--seed=4", "--jobs=2"]
    words += [f"--fixed={fixed};fails=70"]
    sweep(*words, status=1)
    out, said = tmp_path / "out", capsys.readouterr().out
    assert said.count("FAILED with status 1: the data have a hole") == 2
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [(row["settings"], row["runs"]) for row in rows] == [({"x": "60"}, 2), ({"x": "50"}, 2)]
    assert rows[0]["mean"] == pytest.approx(60.45)
    assert rows[0]["deviation"] == pytest.approx(np.std([60.4, 60.5], ddof=1))
    (tmp_path / "gate").touch()
    sweep(*words)
    said = capsys.readouterr().out
    assert "2 of 6 runs to do" in said
    assert "70.45 % ± 0.07     2     2.00  x=70" in said
    every = accounting.epsilon(accounting.compose(*[ONE] * 6), 1e-5, "pld")
    assert prices(out)[1] == pytest.approx(every)
    assert lives(out / "x=50,seed=4") == ["begin", "end"]
    assert lives(out / "x=70,seed=4") == ["begin", "begin", "end"]
    for output in out.glob("*/output.txt"):
        assert not output.stat().st_mode & 0o077, "it holds private losses"
    with pytest.raises(app.UsageError, match="another search is there"):
        search.run(parsed(*words, "--grid=x=50"), [])


def test_children_end_with_the_search(tmp_path):
    waits = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    running = child_processes.run_all({tmp_path / name: waits for name in "ab"}, 2)
    begun, before = [], child_processes.begin

    def begin(*given):
        begun.append(before(*given))
        if len(begun) == 2:
            raise KeyboardInterrupt
        return begun[-1]

    child_processes.begin = begin
    try:
        with pytest.raises(KeyboardInterrupt):
            next(running)
    finally:
        child_processes.begin = before
        begun[-1].kill()
        begun[-1].wait()
    assert begun[0].returncode is not None
    assert not (tmp_path / "a" / "finished").exists()


def test_a_run_is_a_command_without_a_report_of_its_own(tmp_path):
    trial = search_space.Trial({"bound": "1"}, 3, 0)
    train = [sys.executable, "-m", "dpjax", "train", "--out=a"]
    quiet = [*train, "--report=false", "--epochs=2", "--bound=1", "--seed=3"]
    assert search.command(parsed("--fixed=epochs=2"), trial, "a") == quiet
    wanted = [*train, "--report=true", "--bound=1", "--seed=3"]
    assert search.command(parsed("--fixed=report=true"), trial, "a") == wanted
    for settings in ({"boun": "1"}, {"bound": "a"}):
        given = parsed(f"--grid={search_space.words(settings)}")
        with pytest.raises(flags.Error):
            search.plan(given, tmp_path, search.candidates_of(given))
        assert not list(tmp_path.iterdir()), "before the first run, and before a plan"


@pytest.mark.parametrize(
    ("words", "answer"),
    [([], "either --grid or --ranges"), (["--ranges=a=1"], "goes with --random or --random_runs")],
)
def test_flags_that_do_not_go_together_are_refused(words, answer):
    with pytest.raises(app.UsageError, match=answer):
        search.candidates_of(parsed(*words))


# --- candidates ---


def test_candidates_are_values_or_ranges():
    tried = search_space.candidates("a=1, 2 ;hidden=64|128,64; rate=log:0.05:1", "ranges")
    rate = search_space.Range("log", 0.05, 1.0)
    assert tried == {"a": ["1", "2"], "hidden": ["64", "128,64"], "rate": rate}
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
    large = search_space.candidates("a=whole:1234567:1234569", "ranges")
    values = {one["a"] for one in search_space.drawn(large, 100, np.random.default_rng(0))}
    assert values == {"1234567", "1234568", "1234569"}, "to the last digit"


def test_equal_settings_are_repeats_with_seeds_and_folders_of_their_own():
    runs = search_space.trials([{"b": "1"}, {"b": "1"}, {"b": "2"}, {"b": "a/" + "x" * 200}], 7)
    assert [trial.seed for trial in runs] == [7, 8, 7, 7]
    assert [trial.name for trial in runs[:3]] == ["b=1,seed=7", "b=1,seed=8", "b=2,seed=7"]
    assert "/" not in runs[3].name
    assert len(runs[3].name) < 140
    assert search_space.trials([{"b": "1"}], None)[0].name == "b=1,repeat=0"


@pytest.mark.parametrize(
    ("text", "flag"),
    [
        ("a", "grid"),
        ("a=1;a=2", "grid"),
        ("seed=1", "fixed"),
        ("a=log:0:1", "ranges"),
        ("a=uniform:2:1", "ranges"),
        ("a=uniform:1:2", "grid"),
    ],
)
def test_what_cannot_be_read_is_refused_with_an_example(text, flag):
    with pytest.raises(app.UsageError, match=f"--{flag}: .*(log:LOW:HIGH|learning_rate=0.2,0.4)"):
        search_space.candidates(text, flag)


# --- prices ---


def spent(z=2.0, steps=50, **changes):
    mechanism = mechanism_with(100, 10, noise_multiplier=z, **{"steps": 50, **changes})
    return Spent(mechanism.facts, steps)


@kills("cli/sweep/search_cost.py", "method_of_one = max(", "method_of_one = min(")
@kills(
    "cli/sweep/search_cost.py", "compose(*(run.event for run in runs)))", "compose(runs[0].event))"
)
def test_the_dearest_run_and_all_of_them():
    cheap = accounting.subsampled_gaussian(4.0, 0.1, 50)
    part = accounting.subsampled_gaussian(2.0, 0.1, 20)
    runs = [spent(4.0), spent(2.0), spent(4.0), spent(2.0, 20)]
    found = search_cost.prices(runs, 1e-6, ("logarithmic", 4.0))
    by = {"runs": 4, "distribution": "logarithmic"}
    want = [
        accounting.epsilon(ONE, 1e-6, "pld"),
        accounting.epsilon(accounting.compose(cheap, cheap, ONE, part), 1e-6, "pld"),
        accounting.select_best([ONE, cheap, part], 1e-6, **by).epsilon_best,
    ]
    assert [price.epsilon for price in found] == pytest.approx(want)
    assert [price.method for price in found] == ["pld", "pld", "rdp"]
    assert "one run alone, by PLD: " in str(found[0])


def test_a_relation_is_proved_for_all_runs_or_none():
    """Also a run that has not finished."""
    shuffled = mechanism_with(1000, 10, sampling=sampling.shuffled(1000, 10))
    for others in ([spent(neighbours="replace-one")], [Spent(shuffled.facts, 1)]):
        with pytest.raises(ValueError, match="do not add: they protect add-or-remove neighbours"):
            search_cost.prices([spent(), *others], 1e-5)


def test_a_run_that_has_not_finished_has_spent_its_steps(tmp_path):
    mechanism = mechanism_with(100, 10, noise_multiplier=2.0, steps=80)
    (tmp_path / "run.json").write_text(json.dumps(described(mechanism)))
    (tmp_path / "metrics.jsonl").write_text('{"step": 50}\n')
    run = search_cost.spent_in(tmp_path)
    assert accounting.epsilon(run.event, 1e-5) == pytest.approx(accounting.epsilon(ONE, 1e-5))
    endless = run._replace(mechanism={**run.mechanism, "clipping": {"bounds": ["inf"]}})
    assert accounting.epsilon(endless.event, 1e-5) == math.inf


@kills("cli/sweep/command.py", "tried.keys() - {*free}", "set()")
def test_the_best_run_is_priced_among_settings_of_equal_cost():
    """What could have been drawn, and was not, must cost no more than what ran."""

    def candidates(ranges, *words):
        given = parsed(f"--ranges={ranges}", "--random_runs=geometric:3", *words)
        return search.candidates_of(given).keys()

    assert candidates("momentum=0.9,0.5;learning_rate=log:0.1:1") == {"momentum", "learning_rate"}
    with pytest.raises(app.UsageError, match=r"steps can change what a run costs.*learning_rate"):
        candidates("bound=1,2;steps=10,20")
    # Momentum changes the strategy of correlated noise.
    with pytest.raises(app.UsageError, match="momentum can change"):
        candidates("momentum=0.9,0.5", "--fixed=noise=banded")


def test_no_setting_that_a_random_number_of_runs_may_try_changes_the_mechanism():
    facts = [
        build_mechanism(search.parsed([f"--{flag}" for flag in changed]), 1000).facts
        for changed in (
            ["noise_multiplier=2"],
            ["noise_multiplier=2", "learning_rate=1", "warmup_steps=3", "average=0.5", "floor=1"],
            ["noise_multiplier=2", "evaluations=2", "model=linear", "loss=focal", "optimizer=adam"],
            ["noise_multiplier=2", "hidden=9", "activation=relu", "torch_init", "momentum=0.1"],
            ["noise_multiplier=2", "model_options=a=1", "loss_options=b=2", "class_weights=1,2"],
        )
    ]
    assert facts == facts[:1] * 5


# --- a secret number of runs ---


@kills("cli/sweep/command.py", "trial._replace(repeat=secrets.randbits(64))", "trial")
@kills("cli/sweep/command.py", "public = number_of_runs(given) is None", "public = True")
@pytest.mark.parametrize("secret", [True, False])
def test_results_that_tell_a_secret_number_of_runs_are_their_owners_alone(
    secret, stand_in, tmp_path, monkeypatch
):
    """The best run is published with its `config.json`, which holds the name of its folder."""
    words, fixed = stand_in
    number = "--random_runs=poisson:3" if secret else "--seeds=2"
    seed = next(n for n in range(99) if accounting.draw_runs(jax.random.key(n), 3, "poisson") == 2)
    given = parsed(*words, "--grid=x=1", number, f"--fixed={fixed}", "--plot")
    out = tmp_path / "out"
    badges = []
    monkeypatch.setattr(compare.style, "png", lambda _, words: badges.append(words) or b"")
    monkeypatch.setattr(search.noise, "secret_key", lambda: jax.random.key(seed))
    with pytest.raises(SystemExit):
        search.run(given, [])
    assert bool(out.stat().st_mode & 0o077) != secret, "the names of subfolders tell it"
    names = [path.parent.name for path in out.glob("*/finished")]
    assert len(names) == 2
    assert ({"x=1,repeat=0", "x=1,repeat=1"} == {*names}) != secret
    # The price of the best run is of a score of its own, and a mean is of several runs.
    assert len((out / "results.jsonl").read_text().splitlines()) == (2 if secret else 1)
    for name in ("results.jsonl", "costs.json", "comparison.png"):
        assert bool((out / name).stat().st_mode & 0o077) != secret
    assert [*map(bool, badges)] == [secret]
    assert not (out / "sweep.json").stat().st_mode & 0o077


def test_the_table_of_a_search_is_rounded_up_and_has_runs_without_an_accuracy(tmp_path):
    row = {"mean": 50.0, "deviation": None, "runs": 1, "epsilon": 2.0001, "settings": {"x": "1"}}
    assert "2.01" in search.table([row])
    trials = {}
    for name, last in (("a", None), ("b", 0.5)):  # an earlier accuracy is of other parameters
        rows = [{"step": 1, "epsilon": 1.0, "accuracy": 0.9}, {"step": 2, "epsilon": None}]
        rows[1]["accuracy"] = last
        (tmp_path / name).mkdir()
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / name / "metrics.jsonl").write_text(lines)
        trials[tmp_path / name] = search_space.Trial({"x": name}, None, 0)
    ranked = json.loads(json.dumps(strict(search.results(trials))))
    assert [row["mean"] for row in ranked] == [50.0, None]
    assert ranked[0]["epsilon"] == "inf"
    assert "none" in search.table(search.results(trials))

# SPDX-License-Identifier: Apache-2.0
"""The search: draws its runs, trains the missing ones, ranks them and adds up their cost.

The plan is in `sweep.json`: the same command resumes it, and every run that began is priced. With
`--random_runs` the number of runs is drawn and secret: then the best run costs much less than all
runs together, and no public file may reveal the number.
"""

from __future__ import annotations

import copy
import json
import pathlib
import secrets
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import app, flags

from dpjax import accounting, noise
from dpjax._files import held, read_json, replace, strict
from dpjax._rounding import downwards, three_digits, upwards
from dpjax.checks import Refused
from dpjax.cli.compare import plot
from dpjax.cli.flag_checks import require
from dpjax.cli.flag_sets import presets
from dpjax.cli.flag_sets.train import FLAGS
from dpjax.cli.report.figures import RELEASED
from dpjax.cli.report.load_run import read
from dpjax.cli.sweep import child_processes, search_cost, search_space
from dpjax.cli.sweep.search_space import Candidates, Trial, pairs, words
from dpjax.cli.train import command as train

Runs = Mapping[pathlib.Path, Trial]

_COUNTED = "tells how many ran: do not publish"  # the badge of a figure that shows all runs
# Flags that change no cost of a run: noise is in units of the bound.
_FREE = ["learning_rate", "bound", "warmup_steps", "average", "floor", "evaluations", "model"]
_FREE += ["model_options", "hidden", "activation", "torch_init"]
_FREE += ["loss", "loss_options", "class_weights"]
# Free with white noise only: a strategy of correlated noise is made for them.
_FREE_OF_STRATEGY = ["optimizer", "momentum"]
_CHANGEABLE = ("jobs", "out", "plot")  # flags that may differ when a search is resumed


def run(given: flags.FlagValues, argv: Sequence[str]) -> None:
    """Runs the search that the flags describe; the exit status is 1 if a run failed."""
    if given.plot:
        require("dpjax sweep", "matplotlib.figure", otherwise=", or give --noplot")
    jax.config.update("jax_platforms", "cpu")  # leaves the accelerator to the runs
    # SIGTERM ends a search as Ctrl-C does: its children stop, and save.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    out = pathlib.Path(given.out)
    try:
        tried = candidates_of(given)
        with held(out):  # a lock: no second search runs in this folder
            if number_of_runs(given) is not None:
                out.chmod(0o700)  # the subfolders tell how many ran, which is secret
            runs = {out / trial.name: trial for trial in plan(given, out, tried)}
            if runs.keys() - finished(runs).keys():  # a finished search is only reported again
                announce(given, runs)
            failed = run_missing(given, runs)
            conclude(given, out, runs)
    except (OSError, ValueError, Refused) as error:
        raise app.UsageError(str(error)) from error
    sys.exit(bool(failed))


def candidates_of(given: flags.FlagValues) -> Candidates:
    """The values or the range that the search tries for each flag.

    ``--grid`` runs all combinations, ``--random`` draws a given number of runs from ``--ranges``,
    and ``--random_runs`` draws the number of runs too.
    """
    if (given.grid is None) == (given.ranges is None):
        raise app.UsageError("expected either --grid or --ranges, which say what is tried.")
    if given.ranges and not (given.random or given.random_runs):
        raise app.UsageError("--ranges goes with --random or --random_runs, which says how many.")
    if given.ranges:
        tried = search_space.candidates(given.ranges, "ranges")
    else:
        tried = search_space.candidates(given.grid, "grid")
    fixed = pairs(given.fixed, "fixed")
    # If the number of runs is drawn, the cost of the best run is computed from the most expensive
    # run that could be drawn, whether it was drawn or not. Such a search therefore tries only flags
    # that do not change the cost of a run. With correlated noise, which --fixed can choose, the
    # optimizer and its momentum change it too.
    free = _FREE if "noise" in fixed else [*_FREE, *_FREE_OF_STRATEGY]
    costly = tried.keys() - {*free}
    if given.random_runs and costly:
        raise app.UsageError(
            f"--random_runs: {min(costly)} can change what a run costs; expected flags among "
            f"{', '.join(free)}."
        )
    return tried


def number_of_runs(given: flags.FlagValues) -> tuple[str, float] | None:
    """The distribution of the number of runs, and its mean."""
    name, _, mean = (given.random_runs or "").partition(":")
    if not name:
        return None
    return name, float(mean)


def plan(given: flags.FlagValues, folder: pathlib.Path, tried: Candidates) -> list[Trial]:
    """Reads the runs of the search from ``sweep.json``; draws and writes them if it is missing.

    The file also holds the flags of the search: a folder takes no second search with other flags.
    """
    path = folder / "sweep.json"
    values = given.flag_values_dict()
    search_flags = {name: value for name, value in values.items() if name not in _CHANGEABLE}
    if not path.exists():
        drawn = draw(given, tried)
        for trial in drawn:
            command(given, trial, folder)  # raises for wrong flags, before they are written
        content = {"search": search_flags, "trials": [trial._asdict() for trial in drawn]}
        replace(path, json.dumps(content, indent=2) + "\n")
    planned = read_json(path)
    if planned["search"] != search_flags:
        raise app.UsageError(f"--out={folder}: another search is there. Give another --out.")
    return [Trial(**trial) for trial in planned["trials"]]


def draw(given: flags.FlagValues, tried: Candidates) -> list[Trial]:
    """Draws all runs of the search: a random number of them, or as many as the flags name."""
    generator = np.random.default_rng(given.seed)  # of the settings
    number = number_of_runs(given)
    if number is not None:
        distribution, mean = number
        # The key is secret, because the number of runs follows from it. With --seed neither is.
        key = noise.secret_key() if given.seed is None else jax.random.key(given.seed)
        count = accounting.draw_runs(key, mean, distribution)
        settings = search_space.drawn(tried, count, generator)
        runs = search_space.trials(settings, given.seed)
        # `repeat` numbers the runs of equal settings from 0, and is in the name of a run's folder,
        # which the public config.json of the run contains. Random bits replace it, because a large
        # number shows that many ran.
        return [trial._replace(repeat=secrets.randbits(64)) for trial in runs]
    chosen = search_space.every(tried)  # all combinations, for `--grid`
    if given.random:
        chosen = search_space.drawn(tried, given.random, generator)
    # Each setting runs `--seeds` times.
    repeated = [settings for settings in chosen for _ in range(given.seeds)]
    return search_space.trials(repeated, given.seed)


def options_of(given: flags.FlagValues, trial: Trial, folder: pathlib.Path) -> list[str]:
    """The flags of a run, as they are typed."""
    # A report costs more time than a small run, and a search has one figure for all of them.
    typed = {"out": folder, "report": "false", **pairs(given.fixed, "fixed"), **trial.settings}
    if trial.seed is not None:
        typed["seed"] = trial.seed
    return [f"--{name}={value}" for name, value in typed.items()]


def parsed(options: Sequence[str]) -> flags.FlagValues:
    """The flags of a run of `dpjax train`; raises if it refuses them."""
    of_train = copy.deepcopy(FLAGS)
    of_train(["train", *options])
    presets.apply(of_train)
    return of_train


def command(given: flags.FlagValues, trial: Trial, folder: pathlib.Path) -> list[str]:
    """The command of a run."""
    options = options_of(given, trial, folder)
    if parsed(options).holdout == 0:
        raise app.UsageError(
            "--holdout=0: expected test rows, by which a search ranks its runs. Give test=FILE."
        )
    return [sys.executable, "-m", "dpjax", "train", *options]


def announce(given: flags.FlagValues, runs: Runs) -> None:
    """Prints what the search will cost, and the command of a single run at the same cost."""
    # Only the first run is planned, because a plan reads data and calibrates noise.
    folder, trial = next(iter(runs.items()))
    first_flags = parsed(options_of(given, trial, folder))
    first_run = train.plan(first_flags)
    event = first_run.mechanism.event
    relation = first_run.mechanism.relation
    number = number_of_runs(given)
    if number is None:
        method = accounting.tightest(event, relation)
        event_of_all = accounting.compose(*[event] * len(runs))
        total = accounting.epsilon(event_of_all, first_flags.delta, method, relation)
        covered = f"all {len(runs)} runs"
    else:
        distribution, mean = number
        total = accounting.select_best(
            event, first_flags.delta, runs=mean, distribution=distribution, neighbours=relation
        ).epsilon_best
        covered = f"the best of a {distribution} number, {mean:g} on average,"
    print(
        f"If all cost as the first one, epsilon {three_digits(first_run.epsilon)}: {covered} will "
        f"cost epsilon {three_digits(total)} at delta={upwards(first_flags.delta, '.3g')}.\n"
        f"Without a search, dpjax train --target_epsilon={downwards(total, '.3g')} costs as much, "
        "and chooses no setting on these data.",
        flush=True,
    )


def run_missing(given: flags.FlagValues, runs: Runs) -> int:
    """Runs all unfinished runs; returns the number of failures."""
    done = finished(runs)
    left = [folder for folder in runs if folder not in done]
    commands = {folder: command(given, runs[folder], folder) for folder in left}
    print(f"{len(left)} of {len(runs)} runs to do", flush=True)
    failed = 0
    for count, ended in enumerate(child_processes.run_all(commands, given.jobs), 1):
        folder, status, seconds = ended
        if status:
            failed += 1
            outcome = f"FAILED with status {status}: {child_processes.last_line(folder)}"
        else:
            outcome = f"{100 * read(folder, arrays=False).accuracy:.2f} %"
        print(f"[{count}/{len(left)}] {folder.name}  {seconds:.1f} s  {outcome}", flush=True)
    return failed


def finished(runs: Runs) -> dict[pathlib.Path, Trial]:
    """The runs that have finished."""
    return {f: trial for f, trial in runs.items() if (f / child_processes.FINISHED).exists()}


def conclude(given: flags.FlagValues, out: pathlib.Path, runs: Runs) -> None:
    """Prints and writes the results and the cost of the search."""
    done = finished(runs)
    if not done:
        print("No run has finished.")
        return
    # A drawn number of runs must stay secret, because the price of the best run holds only then.
    # Results, costs and figure reveal the number, so only their owner may read them.
    public = number_of_runs(given) is None
    # The price also requires that each run is ranked by a score of its own, not by a mean of runs.
    rows = results(done, single=not public)
    # `strict` replaces infinity and NaN by words, because JSON has neither.
    lines = "".join(json.dumps(strict(row)) + "\n" for row in rows)
    replace(out / "results.jsonl", lines, public=public)
    facts, in_words = costs(given, runs)
    replace(out / "costs.json", json.dumps(strict(facts), indent=2) + "\n", public=public)
    print(f"\n{table(rows)}\n\n{in_words}", flush=True)
    if given.plot:
        saved = [read(folder, arrays=False) for folder in done]
        plot(saved, out / "comparison.png", RELEASED if public else _COUNTED)


def results(runs: Runs, *, single: bool = False) -> list[dict[str, Any]]:
    """A row for each setting, the best mean first; with ``single`` a row for each run.

    ``mean`` and ``deviation`` are of the test accuracies of its runs, in per cent.
    """
    folders_of_row: dict[str, list[pathlib.Path]] = {}
    for folder, trial in runs.items():
        row_name = folder.name if single else words(trial.settings)
        folders_of_row.setdefault(row_name, []).append(folder)
    rows = []
    for folders in folders_of_row.values():
        saved = [read(folder, arrays=False) for folder in folders]
        accuracies = [100 * run.accuracy for run in saved]
        mean = None  # without test accuracies, as of a regression
        deviation = None  # of a single run
        if not np.isnan(accuracies).any():
            mean = float(np.mean(accuracies))
            if len(saved) > 1:
                deviation = float(np.std(accuracies, ddof=1))
        row = {
            "settings": runs[folders[0]].settings,  # equal in all folders of the row
            "runs": len(saved),
            "mean": mean,
            "deviation": deviation,
            "epsilon": max(run.epsilon for run in saved),  # holds for each of these runs
            "folders": [folder.name for folder in folders],
        }
        rows.append(row)
    # Rows without a mean come last.
    return sorted(rows, key=lambda row: np.inf if row["mean"] is None else -row["mean"])


def table(rows: list[dict[str, Any]]) -> str:
    """The results as lines of text."""
    lines = [f"{'test accuracy':>17}  {'runs':>4}  {'epsilon':>7}  settings"]
    for row in rows:
        accuracy = "none"
        if row["mean"] is not None:
            accuracy = f"{row['mean']:.2f} %"
        if row["deviation"] is not None:
            accuracy += f" ± {row['deviation']:.2f}"
        epsilon = three_digits(row["epsilon"])
        lines.append(f"{accuracy:>17}  {row['runs']:>4}  {epsilon:>7}  {words(row['settings'])}")
    return "\n".join(lines)


def costs(given: flags.FlagValues, runs: Runs) -> tuple[dict[str, Any], str]:
    """The cost of the search: the content of ``costs.json``, and the text to print."""
    done = finished(runs)
    # A guarantee at the smallest delta of the runs holds at the larger ones too.
    delta = min(read(folder, arrays=False).delta for folder in done)
    # A run that failed or was stopped has a cost too, unless it has no `run.json`, which is written
    # before the first step.
    begun = [folder for folder in runs if folder in done or (folder / "run.json").exists()]
    spent = [search_cost.spent_in(folder) for folder in begun]
    prices = search_cost.prices(spent, delta, number_of_runs(given))
    lines = [f"What this search costs at delta={upwards(delta, '.3g')}:"]
    lines += [f"  {price}" for price in prices]
    lines.append("Choosing by public test data costs no more. Private test data are not protected.")
    if given.seed is not None:
        lines.append("The keys follow from --seed: this holds against those who do not know it.")
    content = {"delta": delta, "seed": given.seed, "prices": [price._asdict() for price in prices]}
    return content, "\n".join(lines)

# SPDX-License-Identifier: Apache-2.0
"""Tries many settings of a binary, and computes the privacy cost of the search itself.

  result    digits, 12 runs: accuracy from 45.3 to 76.4 %; one run costs epsilon 3.0, all 12 11.4
  time      2 to 3 minutes on two busy CPU cores
  command   python experiments/sweep.py --grid "learning_rate=0.2,0.4;bound=0.5,1" --seeds 3 \\
                --fixed "dataset=digits;epochs=5" --jobs 2 --out runs/sweep

`--ranges "learning_rate=log:0.05:1;bound=0.25,0.5,1" --random 10` draws ten settings.
`--random_runs geometric:10` draws a secret number of runs; then the best run, published alone,
costs much less than all runs together.  The folder receives a folder per run, `results.jsonl`
(best setting first), `costs.json` and `comparison.html`.  The same command resumes a search and
repeats no finished run.  Runs have secret keys unless `--seed` is given.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import jax
import numpy as np
from absl import app, flags
from common import child_processes, search_cost, search_results, search_space

from dpjax import accounting, noise
from dpjax.reports.load_run import read
from dpjax.training.signals import Stop

HERE = pathlib.Path(__file__).resolve().parent

_BINARY = flags.DEFINE_string(
    "binary", str(HERE / "train.py"), "Binary of each run; it takes --out."
)
_GRID = flags.DEFINE_string("grid", None, "Flags and their values; every combination runs.")
_RANGES = flags.DEFINE_string("ranges", None, "Flags, and values or ranges to draw from.")
_RANDOM = flags.DEFINE_integer("random", None, "Number of settings drawn from --ranges.", 1)
_RANDOM_RUNS = flags.DEFINE_string(
    "random_runs",
    None,
    "Draw the number of runs, and for each its settings: geometric:MEAN, logarithmic:MEAN or "
    "poisson:MEAN.",
)
_SEEDS = flags.DEFINE_integer("seeds", 1, "Number of runs of each setting.", 1)
_FIXED = flags.DEFINE_string("fixed", "", "Flags of every run: dataset=digits;epochs=5.")
_SEED = flags.DEFINE_integer(
    "seed", None, "Seed of the draws, and of the first run; makes noise reproducible and public."
)
_JOBS = flags.DEFINE_integer("jobs", 1, "Number of parallel runs.", 1)
_OUT = flags.DEFINE_string("out", "runs/sweep", "Folder of the search.")
_PAGE = flags.DEFINE_bool("page", True, "Write comparison.html with compare.py.")
_FREE = flags.DEFINE_list(
    "free",
    "activation,average,bound,floor,hidden,learning_rate,loss,loss_options,model,model_options,"
    "momentum,optimizer,rate_per_512,torch_init,warmup_steps",
    "Flags that change no run's cost; with --random_runs all values of other flags must run.",
)

_ELSEWHERE = {"jobs", "out", "page", "free"}  # the same search


def settings() -> dict[str, Any]:
    """The flags that identify the search."""
    own = flags.FLAGS.get_flags_for_module(sys.modules[__name__])
    return {flag.name: flag.value for flag in own if flag.name not in _ELSEWHERE}


def number_of_runs() -> tuple[str, float] | None:
    """The distribution of the number of runs, and its mean."""
    if _RANDOM_RUNS.value is None:
        return None
    name, _, mean = _RANDOM_RUNS.value.partition(":")
    try:
        return name, float(mean)
    except ValueError as error:
        raise app.UsageError(
            f"--random_runs={_RANDOM_RUNS.value}: expected one of "
            f"{', '.join(accounting.DISTRIBUTIONS)}, a colon and the mean: geometric:10."
        ) from error


def candidates_from_flags() -> search_space.Candidates:
    """The candidates of each flag; refuses flags that contradict each other."""
    number = number_of_runs()
    if (_GRID.value is None) == (_RANGES.value is None):
        raise app.UsageError("expected either --grid or --ranges, which say what is tried.")
    if (_RANDOM.value is None) == (_RANGES.value is not None and number is None):
        raise app.UsageError("--random=N goes with --ranges, and not with --random_runs.")
    if number is not None and _SEEDS.value > 1:
        raise app.UsageError("--random_runs accounts for single runs; leave --seeds out.")
    name = "grid" if _RANGES.value is None else "ranges"
    found = search_space.candidates(_RANGES.value or _GRID.value or "", name)
    if both := sorted(found.keys() & search_space.pairs(_FIXED.value, "fixed").keys()):
        raise app.UsageError(f"--fixed and --{name} both say what {', '.join(both)} is.")
    return found


def draw(candidates: search_space.Candidates) -> list[search_space.Trial]:
    """Draws all runs of the search."""
    number, numbers = number_of_runs(), np.random.default_rng(_SEED.value)
    if number is not None:
        key = noise.secret_key() if _SEED.value is None else jax.random.key(_SEED.value)
        count = accounting.draw_runs(key, number[1], number[0])
        return search_space.trials(search_space.drawn(candidates, count, numbers), _SEED.value)
    if _RANDOM.value is not None:
        chosen = search_space.drawn(candidates, _RANDOM.value, numbers)
    else:
        chosen = search_space.every(candidates)
    return search_space.trials([one for one in chosen for _ in range(_SEEDS.value)], _SEED.value)


def planned(folder: pathlib.Path, candidates: search_space.Candidates) -> list[search_space.Trial]:
    """The runs in the folder's plan; draws and writes a plan if there is none."""
    path, now = folder / "sweep.json", settings()
    if not path.exists():
        plan = {"search": now, "trials": search_space.stored(draw(candidates))}
        partial_file = path.with_suffix(".part")
        partial_file.touch(mode=0o600)
        partial_file.write_text(json.dumps(plan, indent=2) + "\n")
        os.replace(partial_file, path)
    plan = json.loads(path.read_text())
    if differ := [name for name in now if plan["search"].get(name) != now[name]]:
        lines = (f"  --{n}: {plan['search'].get(n)} there, {now[n]} now" for n in differ)
        raise app.UsageError(
            f"another search is in {folder}:\n" + "\n".join(lines) + "\nChoose another --out; what "
            "both cost together is the price of all their runs."
        )
    return [search_space.Trial(**trial) for trial in plan["trials"]]


def command(trial: search_space.Trial, folder: pathlib.Path) -> list[str]:
    given = {**search_space.pairs(_FIXED.value, "fixed"), **trial.settings}
    seed = [] if trial.seed is None else [f"--seed={trial.seed}"]
    listed = [f"--{name}={value}" for name, value in given.items()]
    return [sys.executable, _BINARY.value, f"--out={folder}", *listed, *seed]


def run_missing(trials: dict[pathlib.Path, search_space.Trial]) -> int:
    """Runs all unfinished runs; returns the number of failures."""
    done = finished(trials)
    left = {f: command(trial, f) for f, trial in trials.items() if f not in done}
    print(f"{len(trials)} runs; {len(done)} have finished", flush=True)
    failed = 0
    with Stop() as stop:
        for count, end in enumerate(child_processes.run_all(left, _JOBS.value, stop), 1):
            failed += bool(end.status) and not end.asked
            name = f"[{count}/{len(left)}] {end.folder.name}"
            print(f"{name}  {end.seconds:.1f} s  {outcome(end)}", flush=True)
        if stop.asked:
            print("Stopped. The same command resumes the search.", flush=True)
            stop.leave()
    return failed


def outcome(end: child_processes.Ended) -> str:
    """How a run ended, in words."""
    if end.status:
        failed = f"FAILED with status {end.status}: {child_processes.last_line(end.folder)}"
        return "stopped" if end.asked else failed
    try:
        return f"{search_results.accuracy(read(end.folder, arrays=False)):.2f} %"
    except (OSError, ValueError):  # `conclude` reports it again with the cure
        return "no results"


def finished(
    trials: dict[pathlib.Path, search_space.Trial],
) -> dict[pathlib.Path, search_space.Trial]:
    return {f: trial for f, trial in trials.items() if (f / child_processes.FINISHED).exists()}


def costs(
    candidates: search_space.Candidates, trials: dict[pathlib.Path, search_space.Trial]
) -> tuple[dict[str, Any], str]:
    """The cost of the search, for JSON and in words."""
    done = finished(trials)
    prices, delta, relation = search_cost.prices(
        [search_cost.card_of(folder) for folder in done],
        [search_cost.spent_so_far(folder) for folder in trials if folder not in done],
        number_of_runs(),
        search_cost.uncovered(candidates, done.values(), _FREE.value),
    )
    lines = [f"What this search costs at delta={delta:g} for {relation} neighbours, by RDP:"]
    lines += [f"  {price}" for price in prices]
    lines.append(
        "To choose by public test data adds nothing to these lines; if the test data are private, "
        "no line protects them."
    )
    if _SEED.value is not None:
        lines.append("These seeds are published: a search with secret keys would cost this.")
    said = {"delta": delta, "neighbours": relation, "seed_published": _SEED.value}
    listed = [
        {**price._asdict(), "epsilon": search_results.number(price.epsilon)} for price in prices
    ]
    return {**said, "prices": listed}, "\n".join(lines)


def conclude(
    out: pathlib.Path,
    candidates: search_space.Candidates,
    trials: dict[pathlib.Path, search_space.Trial],
) -> None:
    """Prints and writes the results and the cost of the search."""
    done = finished(trials)
    rows = search_results.results(done)
    (out / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spent, said = costs(candidates, trials)
    (out / "costs.json").write_text(json.dumps(spent, indent=2) + "\n")
    print(f"\n{search_results.table(rows)}\n\n{said}", flush=True)
    if _PAGE.value:
        page = [sys.executable, HERE / "compare.py", *done, f"--out={out / 'comparison.html'}"]
        if subprocess.run(list(map(str, page)), check=False).returncode:
            print("comparison.html was not written; nothing else is missing.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}; flags of the runs go into --fixed.")
    jax.config.update("jax_platforms", "cpu")  # leaves the accelerator to the runs
    candidates, out = candidates_from_flags(), pathlib.Path(_OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    if child_processes.locked(out / "lock") is None:
        raise app.UsageError(f"another search is running in {out}; wait for it.")
    trials = {out / trial.name: trial for trial in planned(out, candidates)}
    failed = run_missing(trials)
    if finished(trials):
        conclude(out, candidates, trials)
    else:
        print("No run has finished, so there is nothing to compare or to choose.")
    sys.exit(bool(failed))


if __name__ == "__main__":
    app.run(main)

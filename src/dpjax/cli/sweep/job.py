# SPDX-License-Identifier: Apache-2.0
"""The search: draws its runs, trains the missing ones, ranks them and adds up their cost."""

from __future__ import annotations

import copy
import hashlib
import json
import pathlib
import secrets
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from absl import app, flags

from dpjax import accounting, noise
from dpjax._files import lock, read_json, replace
from dpjax.accounting.rounding import upwards
from dpjax.cli.compare.job import apart, compare
from dpjax.cli.flag_checks import cure, writable_folder
from dpjax.cli.sweep import (
    child_processes,
    possible_runs,
    search_cost,
    search_results,
    search_space,
)
from dpjax.cli.train import FLAGS as TRAIN
from dpjax.cli.train import flags as train_flags
from dpjax.cli.train import names
from dpjax.mechanism.card import strict
from dpjax.reports.figures import RELEASED
from dpjax.reports.load_run import read
from dpjax.training.signals import Stop

_COUNTED = "tells how many ran: do not publish"
_ELSEWHERE = {"jobs", "out", "page", "free", "reports"}  # the same search


def settings(given: flags.FlagValues) -> dict[str, Any]:
    """The flags that identify the search."""
    return {n: value for n, value in given.flag_values_dict().items() if n not in _ELSEWHERE}


def number_of_runs(given: flags.FlagValues) -> tuple[str, float] | None:
    """The distribution of the number of runs, and its mean."""
    if given.random_runs is None:
        return None
    name, _, mean = given.random_runs.partition(":")
    try:
        # Only for its checks: the search draws its number from another key.
        accounting.draw_runs(jax.random.key(0), float(mean), name)
    except ValueError as error:
        raise app.UsageError(
            f"--random_runs={given.random_runs}: expected one of "
            f"{', '.join(accounting.DISTRIBUTIONS)}, a colon and the mean: geometric:10. {error}"
        ) from error
    return name, float(mean)


def candidates_from_flags(given: flags.FlagValues) -> search_space.Candidates:
    """The candidates of each flag; refuses flags that contradict each other."""
    number = number_of_runs(given)
    if given.free and given.binary is None:
        raise app.UsageError(
            f"--free={','.join(given.free)}: goes with --binary. What each setting of dpjax train "
            "costs is computed; leave --free out."
        )
    if given.reports and given.binary is not None:
        raise app.UsageError(
            f"--reports --binary={given.binary}: a script draws its own report. Leave --reports "
            "out, or give a flag of the script in --fixed."
        )
    if (given.grid is None) == (given.ranges is None):
        raise app.UsageError("expected either --grid or --ranges, which say what is tried.")
    if (given.random is None) == (given.ranges is not None and number is None):
        raise app.UsageError("--random=N goes with --ranges, and not with --random_runs.")
    if number is not None and given.seeds > 1:
        raise app.UsageError("--random_runs accounts for single runs; leave --seeds out.")
    name = "grid" if given.ranges is None else "ranges"
    found = search_space.candidates(given.ranges or given.grid or "", name)
    if both := sorted(found.keys() & search_space.pairs(given.fixed, "fixed").keys()):
        raise app.UsageError(f"--fixed and --{name} both say what {', '.join(both)} is.")
    return found


def draw(given: flags.FlagValues, candidates: search_space.Candidates) -> list[search_space.Trial]:
    """Draws all runs of the search."""
    number, numbers = number_of_runs(given), np.random.default_rng(given.seed)
    if number is not None:
        key = noise.secret_key() if given.seed is None else jax.random.key(given.seed)
        count = accounting.draw_runs(key, number[1], number[0])
        found = search_space.trials(search_space.drawn(candidates, count, numbers), given.seed)
        # A folder's name stands in its public config.json, where a counter would tell how many ran.
        return [trial._replace(repeat=secrets.randbits(64)) for trial in found]
    if given.random is not None:
        chosen = search_space.drawn(candidates, given.random, numbers)
    else:
        chosen = search_space.every(candidates)
    return search_space.trials([one for one in chosen for _ in range(given.seeds)], given.seed)


def planned(
    given: flags.FlagValues, folder: pathlib.Path, candidates: search_space.Candidates
) -> list[search_space.Trial]:
    """The runs in the folder's plan; draws and writes a plan if there is none."""
    path, now = folder / "sweep.json", settings(given)
    if not path.exists():
        drawn = draw(given, candidates)
        require_flags(given, drawn)  # before the plan binds this folder to them
        # Also of files that no run drew: the best of a random number pays for them too.
        files = [search_space.pairs(given.fixed, "fixed").get("dataset", "")]
        files += map(str, candidates.get("dataset", []))
        hashes = {file: hash_of(file) for file in files if names.is_file(file)}
        plan = {"search": now, "files": hashes, "trials": search_space.stored(drawn)}
        replace(path, json.dumps(plan, indent=2) + "\n")
    plan = read_json(path)
    if differ := [name for name in now if plan["search"].get(name) != now[name]]:
        lines = (f"  --{n}: {plan['search'].get(n)} there, {now[n]} now" for n in differ)
        raise app.UsageError(
            f"another search is in {folder}:\n" + "\n".join(lines) + "\nChoose another --out; what "
            "both cost together is the price of all their runs."
        )
    kept = plan.get("files", {})  # of plans of dpjax 0.1 the costs alone tell
    if changed := [f"--dataset={f}" for f, there in kept.items() if hash_of(f) != there]:
        raise app.UsageError(
            f"{', '.join(changed)}: the file differs from that with which the search in {folder} "
            "began; expected equal ones, because runs on different data have no common ranking or "
            "cost. Usually rows were added or removed: restore the file, or give another --out."
        )
    return [search_space.Trial(**trial) for trial in plan["trials"]]


def hash_of(file: str) -> str | None:
    """The hash of a file of data, or None without one."""
    path = pathlib.Path(file).expanduser()  # a shell leaves it in --fixed="dataset=~/my.csv"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def words_of(
    given: flags.FlagValues, trial: search_space.Trial, folder: pathlib.Path
) -> dict[str, Any]:
    """The flags of a run, as texts."""
    # A report costs more time than a small run, and a search looks at one page for all of them.
    quiet = {} if given.binary or given.reports else {"report": "false"}
    seed = {} if trial.seed is None else {"seed": trial.seed}
    fixed = search_space.pairs(given.fixed, "fixed")
    return {"out": folder, **quiet, **fixed, **trial.settings, **seed}


def command(given: flags.FlagValues, trial: search_space.Trial, folder: pathlib.Path) -> list[str]:
    """The command of a run."""
    program = ["-m", "dpjax", "train"] if given.binary is None else [given.binary]
    words = words_of(given, trial, folder)
    if given.binary is None:
        # A search over optimizers may set momentum, which adam has not: it is left out there.
        for name, needed in train_flags.without_effect(flags_of(given, trial)):
            if needed.keys() & trial.settings.keys():
                words.pop(name, None)
    return [sys.executable, *program, *(f"--{name}={value}" for name, value in words.items())]


def require_flags(given: flags.FlagValues, trials: Iterable[search_space.Trial]) -> None:
    """Refuses settings that `dpjax train` would refuse, before the first run."""
    for trial in trials if given.binary is None else ():
        try:
            parsed = flags_of(given, trial)
        except flags.Error as error:
            raise app.UsageError(f"the run {trial.name}: {error}{cure(error, TRAIN)}") from error
        for name, needed in train_flags.without_effect(parsed):
            if not needed.keys() & trial.settings.keys():
                said = train_flags.refusal(parsed, name, needed)
                raise app.UsageError(f"the run {trial.name}: {said}")


def flags_of(given: flags.FlagValues, trial: search_space.Trial) -> flags.FlagValues:
    """The flags of a run of `dpjax train`, also flags without effect there."""
    words = words_of(given, trial, pathlib.Path(trial.name))
    parsed = copy.deepcopy(TRAIN)
    parsed(["train", *(f"--{name}={value}" for name, value in words.items())])
    return parsed


def run_missing(given: flags.FlagValues, trials: dict[pathlib.Path, search_space.Trial]) -> int:
    """Runs all unfinished runs; returns the number of failures."""
    done = finished(trials)
    left = {f: command(given, trial, f) for f, trial in trials.items() if f not in done}
    print(f"{len(trials)} runs; {len(done)} have finished", flush=True)
    failed = 0
    with Stop() as stop:
        for count, end in enumerate(child_processes.run_all(left, given.jobs, stop), 1):
            failed += bool(end.status) and not end.asked
            name = f"[{count}/{len(left)}] {end.folder.name}"
            print(f"{name}  {end.seconds:.1f} s  {outcome(end)}", flush=True)
        if stop.asked:
            stop.end_process("stopped; the same command resumes the search.")
    return failed


def outcome(end: child_processes.Ended) -> str:
    """How a run ended, in words."""
    if end.status:
        failed = f"FAILED with status {end.status}: {child_processes.last_line(end.folder)}"
        return "stopped" if end.asked else failed
    try:
        return f"{100 * read(end.folder, arrays=False).accuracy:.2f} %"
    except (OSError, ValueError):  # `conclude` reports it again with the cure
        return "no results"


def finished(
    trials: dict[pathlib.Path, search_space.Trial],
) -> dict[pathlib.Path, search_space.Trial]:
    """The trials whose runs have finished."""
    return {f: trial for f, trial in trials.items() if (f / child_processes.FINISHED).exists()}


def costs(
    given: flags.FlagValues,
    candidates: search_space.Candidates,
    trials: dict[pathlib.Path, search_space.Trial],
) -> tuple[dict[str, Any], str]:
    """The cost of the search, as numbers and in words."""
    done = finished(trials)
    cards, number = [search_cost.card_of(folder) for folder in done], number_of_runs(given)
    possible, uncovered = [], ""
    if number is not None and given.binary is not None:
        uncovered = search_cost.uncovered(candidates, done.values(), given.free)
    elif number is not None:
        possible, uncovered = possible_runs.mechanisms(
            candidates, lambda settings: flags_of(given, search_space.Trial(settings, None, 0))
        )
    unfinished = [search_cost.spent_so_far(folder) for folder in trials if folder not in done]
    different = apart([read(folder, arrays=False) for folder in done])
    # `fit` describes a run before its first step; a script without it may have spent anything.
    begun = [folder for folder in trials if folder not in done and (folder / "output.txt").exists()]
    if given.binary and (silent := [f.name for f in begun if not (f / "run.json").exists()]):
        different = different or f"no file says what {', '.join(silent)} spent"
    prices, delta, relation = search_cost.prices(
        cards, unfinished, number, uncovered, possible, different
    )
    at = upwards(delta, ".6g")
    lines = [f"What this search costs at delta={at} for {relation} neighbours:"]
    lines += [f"  {price}" for price in prices]
    lines.append(
        "To choose by public test data adds nothing to these lines; if the test data are private, "
        "no line protects them."
    )
    seed = given.seed
    if seed is not None:
        lines.append("These seeds are published: a search with secret keys would cost this.")
    elif any(card.get("randomness") == "supplied" for card in cards):
        lines.append("Keys of these runs, or before them, were supplied.")
    said = {"delta": delta, "neighbours": relation, "seed_published": seed}
    return {**said, "prices": [price._asdict() for price in prices]}, "\n".join(lines)


def conclude(
    given: flags.FlagValues,
    out: pathlib.Path,
    candidates: search_space.Candidates,
    trials: dict[pathlib.Path, search_space.Trial],
) -> None:
    """Prints and writes the results and the cost of the search."""
    done = finished(trials)
    # Results, prices and page tell how many ran. The price of the best of a drawn number needs
    # that to stay secret, and a score that is the run's own, not a mean over several runs.
    public = number_of_runs(given) is None
    rows = search_results.results(done, single=not public)
    written = "".join(json.dumps(strict(row)) + "\n" for row in rows)
    replace(out / "results.jsonl", written, public=public)
    spent, said = costs(given, candidates, trials)
    replace(out / "costs.json", json.dumps(strict(spent), indent=2) + "\n", public=public)
    print(f"\n{search_results.table(rows)}\n\n{said}", flush=True)
    if given.page:
        try:
            compare(done, out / "comparison.html", said, RELEASED if public else _COUNTED)
        except (OSError, app.UsageError) as error:
            print(f"comparison.html was not written, and nothing else is missing: {error}")


def run(given: flags.FlagValues, argv: Sequence[str]) -> None:
    """Runs the search that the flags describe."""
    del argv  # flags alone
    jax.config.update("jax_platforms", "cpu")  # leaves the accelerator to the runs
    candidates, out = candidates_from_flags(given), pathlib.Path(given.out)
    # The names of subfolders tell how many ran.
    writable_folder(given.out, out, mode=0o777 if number_of_runs(given) is None else 0o700)
    if lock(out / "lock") is None:
        raise app.UsageError(f"another search is running in {out}; wait for it.")
    trials = {out / trial.name: trial for trial in planned(given, out, candidates)}
    failed = run_missing(given, trials)
    if finished(trials):
        try:
            conclude(given, out, candidates, trials)
        # Not OSError: a closed pipe is one.
        except (FileNotFoundError, ValueError) as error:
            raise app.UsageError(str(error)) from error
    else:
        print("No run has finished, so there is nothing to compare or to choose.")
    sys.exit(bool(failed))

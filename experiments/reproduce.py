# SPDX-License-Identifier: Apache-2.0
"""Fills the results of the papers, as far as they are missing, in order of value.

  result    experiments/results/*.json of tramer2021, papernot2021, an2021, losing_less2022, liu2021
            and bu2023
  time      --list prints it by command: about 12 hours of a core are missing
  command   python experiments/reproduce.py --processes=2 --minutes=600
  state     python experiments/reproduce.py --list --only=liu2021

A run that is in the files does not run again, and a killed one resumes from its checkpoints, so
the same command continues after every interruption.  `common/paper_commands.py` has the list.
Rows of CIFAR-10 need lossless files; rows of JPEG copies do not count.
"""

from __future__ import annotations

import json
import os
import pathlib
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from common.paper_commands import BINARIES, COMMANDS, Command

from dpjax.cli.flag_checks import only_flags

HERE = pathlib.Path(__file__).resolve().parent
_LIST = flags.DEFINE_bool("list", False, "Print the commands with done and missing runs.")
_ONLY = flags.DEFINE_list("only", None, "Papers, such as liu2021; all by default.")
_MINUTES = flags.DEFINE_float("minutes", None, "Start no run after this number of minutes.", 0)
_PROCESSES = flags.DEFINE_integer("processes", 1, "Commands side by side, each on one core.", 1)
_RESULTS = flags.DEFINE_string("results", str(HERE / "results"), "Folder of the JSON files.")
_CHECKPOINTS = flags.DEFINE_string("checkpoints", "runs/papers", "Folder of unfinished runs.")


def rows_of(paper: str) -> Mapping[str, Any]:
    """The rows in a paper's file."""
    file = pathlib.Path(_RESULTS.value, f"{paper}.json")
    return json.loads(file.read_text())["rows"] if file.exists() else {}


def started(command: Command, core: int, minutes: float | None) -> subprocess.Popen[bytes]:
    """A process that runs what is missing of a command, on one core."""
    out = pathlib.Path(_RESULTS.value, f"{command.paper}.json")
    kept = [f"--seeds={command.seeds}", f"--out={out}", f"--runs={_CHECKPOINTS.value}"]
    kept += [] if minutes is None else [f"--minutes={minutes:.2f}"]
    if command.paper in ("tramer2021", "losing_less2022"):
        kept.append(f"--cache_dir={_CHECKPOINTS.value}/features")
    binary = str(HERE / "papers" / command.binary)
    process = subprocess.Popen([sys.executable, binary, *shlex.split(command.flags), *kept])
    if hasattr(os, "sched_setaffinity"):
        some = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(process.pid, {some[core % len(some)]})
    return process


def listed(waiting: list[Command]) -> None:
    """Prints the state of every command."""
    for command in waiting:
        missing, runs = (
            command.missing(rows_of(command.paper)),
            len(command.names()) * command.seeds,
        )
        words = " ".join([command.binary, *command.flags.split(), f"--seeds={command.seeds}"])
        print(f"{runs - missing:4} of {runs:3} done, {missing * command.minutes:6g} min  {words}")


def main(argv: list[str]) -> None:
    only_flags(argv)
    papers = _ONLY.value or list(BINARIES)
    if unknown := set(papers) - set(BINARIES):
        raise app.UsageError(f"--only={','.join(unknown)}: expected some of {', '.join(BINARIES)}.")
    waiting = [command for command in COMMANDS if command.paper in papers]
    if _LIST.value:
        listed(waiting)
        return
    end = None if _MINUTES.value is None else time.monotonic() + 60 * _MINUTES.value
    running: dict[int, tuple[Command, subprocess.Popen[bytes]]] = {}
    failed = []
    while waiting or running:
        left = None if end is None else (end - time.monotonic()) / 60
        for core in set(range(_PROCESSES.value)) - set(running):
            # Two commands of one paper may share rows, which would run twice.
            busy = {command.paper for command, _ in running.values()}
            free = [command for command in waiting if command.paper not in busy]
            if not free or (left is not None and left <= 0):
                continue
            waiting.remove(free[0])
            if free[0].missing(rows_of(free[0].paper)):
                print(f"{free[0].paper} {free[0].flags}", flush=True)
                running[core] = free[0], started(free[0], core, left)
        if not running and left is not None and left <= 0:
            break
        time.sleep(0.2)
        for core, (command, process) in list(running.items()):
            if process.poll() is not None:
                del running[core]
                failed += [command] * (process.returncode != 0)
    if failed:
        names = "; ".join(f"{command.paper} {command.flags}" for command in failed)
        raise SystemExit(f"{len(failed)} commands failed, whose output is above: {names}")


if __name__ == "__main__":
    app.run(main)

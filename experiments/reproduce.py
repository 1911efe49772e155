# SPDX-License-Identifier: Apache-2.0
"""Fills the results of the papers, as far as they are missing.

``python -m experiments.reproduce --list`` prints what is missing, ``--processes=2 --minutes=600``
runs it. A run that is in the files does not run again, and a killed one resumes from its
checkpoints, so the same command continues after every interruption.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

from absl import app, flags

from experiments.common import runs, tables
from experiments.common.paper import Paper

_LIST = flags.DEFINE_bool("list", False, "Print the rows with missing runs.")
_ONLY = flags.DEFINE_list("only", None, "Papers, such as liu2021; all by default.")
_PROCESSES = flags.DEFINE_integer("processes", 1, "Rows side by side, each on one core.", 1)
_CHECKPOINTS = flags.DEFINE_string("checkpoints", "runs/papers", "Folder of unfinished runs.")


class Missing(NamedTuple):
    """A row that lacks seeds."""

    paper: Paper
    key: str
    seeds: int

    @property
    def minutes(self) -> float:
        """Of one core."""
        return self.seeds * self.paper.minutes(self.key)


def missing() -> Iterator[Missing]:
    """The rows of the papers' tables that lack seeds."""
    for paper in tables.papers():
        if _ONLY.value and paper.name not in _ONLY.value:
            continue
        rows = tables.load(paper.name)["rows"]
        drawn = [figure for figure in paper.figures.values() if not figure.why]
        keys = dict.fromkeys(
            [key for of in paper.tables.values() for key in of]
            + [key for figure in drawn for key in figure.row_keys()]
        )
        for key in keys:
            lacking = paper.seeds(key) - len(rows.get(key, {}))
            if lacking > 0:
                yield Missing(paper, key, lacking)


def started(row: Missing, core: int, minutes: float | None) -> subprocess.Popen[bytes]:
    """A process that runs what is missing of a row, on one core."""
    out = tables.RESULTS / f"{row.paper.name}.json"
    words = [f"--row={row.key}", f"--seeds={row.paper.seeds(row.key)}", f"--out={out}"]
    words += [f"--runs={_CHECKPOINTS.value}", f"--cache_dir={_CHECKPOINTS.value}/features"]
    words += [] if minutes is None else [f"--minutes={minutes:.2f}"]
    process = subprocess.Popen([sys.executable, *row.paper.command.split()[1:], *words])
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(process.pid, {cores[core % len(cores)]})
    return process


def main(argv: list[str]) -> None:
    runs.only_flags(argv)
    waiting = sorted(missing(), key=lambda row: row.minutes)
    if _LIST.value:
        for row in waiting:
            print(f"{row.minutes:6g} min  {row.paper.name}: {row.key}, {row.seeds} seeds")
        return
    began, running, failed = time.monotonic(), {}, []
    while waiting or running:
        left = None
        if runs.MINUTES.value is not None:
            left = runs.MINUTES.value - (time.monotonic() - began) / 60
        for core in set(range(_PROCESSES.value)) - set(running):
            if waiting and (left is None or left > 0):
                row = waiting.pop(0)
                running[core] = row, started(row, core, left)
        if not running:
            break
        time.sleep(0.2)
        for core, (row, process) in list(running.items()):
            if process.poll() is not None:
                del running[core]
                failed += [row.key] * (process.returncode != 0)
    if failed:
        raise SystemExit(f"{len(failed)} rows failed, whose output is above: {'; '.join(failed)}")


if __name__ == "__main__":
    app.run(main)

# SPDX-License-Identifier: Apache-2.0
"""Fills the results of the papers, as far as they are missing.

``python -m experiments.reproduce --list`` prints what is missing; without ``--list`` it runs, the
quickest rows first. A run that is in the files does not run again, and a killed one resumes from
its checkpoints, so the same command continues after every interruption.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

from absl import app, flags

from experiments.common import runs, tables
from experiments.common.paper import Paper

_LIST = flags.DEFINE_bool("list", False, "Print the rows with missing runs.")
_ONLY = flags.DEFINE_list("only", None, "Papers, such as liu2021; all by default.")
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
    """The rows of the papers' tables and figures that lack seeds."""
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


def command(row: Missing) -> list[str]:
    """What runs a row."""
    out = tables.RESULTS / f"{row.paper.name}.json"
    words = [f"--row={row.key}", f"--seeds={row.paper.seeds(row.key)}", f"--out={out}"]
    words += [f"--runs={_CHECKPOINTS.value}", f"--cache_dir={_CHECKPOINTS.value}/features"]
    return [sys.executable, *row.paper.command.split()[1:], *words]


def main(argv: list[str]) -> None:
    runs.only_flags(argv)
    for row in sorted(missing(), key=lambda row: row.minutes):
        print(f"{row.minutes:6g} min  {row.paper.name}: {row.key}, {row.seeds} seeds", flush=True)
        if not _LIST.value:
            subprocess.run(command(row), check=False)  # its error is printed; the others run


if __name__ == "__main__":
    app.run(main)

# SPDX-License-Identifier: Apache-2.0
"""Figures of papers as data: which rows a figure shows, and how they are drawn.

Nothing here can train: `experiments.gallery` draws the rows of the committed results.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.common.pictures import Panel

Runs = Mapping[str, Sequence[Mapping[str, Any]]]  # the runs of each line
Draw = Callable[[str, Runs], list[Panel]]


class Figure(NamedTuple):
    """A figure of a paper.

    Attributes:
      title: The heading in the gallery.
      shows: The caption: the figure of the paper, and its claim.
      draws: Functions that make panels from the runs of a title.
      lines: The keys of its rows, by title and line; the best row that ran is drawn.
      judged: Whether the verdicts on its rows stand below it.
    """

    title: str
    shows: str
    draws: Sequence[Draw]
    lines: Mapping[str, Mapping[str, Sequence[str]]] = {}
    judged: bool = False

    def row_keys(self) -> list[str]:
        """The keys of all rows that the figure can show."""
        return [key for lines in self.lines.values() for keys in lines.values() for key in keys]

    def panels(self, rows: Mapping[str, Mapping[str, Any]]) -> list[Panel]:
        """The panels, as far as their rows ran."""
        if not self.lines:
            return self._drawn("", {})
        panels = []
        for title, lines in self.lines.items():
            best_rows = {line: best(keys, rows) for line, keys in lines.items()}
            runs = {line: list(rows[key].values()) for line, key in best_rows.items() if key}
            if runs:
                panels += self._drawn(title, runs)
        return panels

    def _drawn(self, title: str, runs: Runs) -> list[Panel]:
        """The panels of one title."""
        return [panel for draw in self.draws for panel in draw(title, runs)]

    def missing(self, rows: Mapping[str, Any]) -> list[str]:
        """The lines of the paper for which no row ran."""
        return [
            f"{title} {line}"
            for title, lines in self.lines.items()
            for line, keys in lines.items()
            if best(keys, rows) is None
        ]


def best(keys: Sequence[str], rows: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The row with the best mean accuracy, of rows that ran."""

    def mean(key: str) -> float:
        return statistics.mean(run.get("accuracy") or 0.0 for run in rows[key].values())

    ran = [key for key in keys if key in rows]
    return max(ran, key=mean, default=None)


def logged(
    x: str, y: str, words: tuple[str, str], scale: float = 1.0, x_scale: str = "linear"
) -> Draw:
    """One number of the logs against another, of all seeds that have a log."""

    def draw(title: str, runs: Runs) -> list[Panel]:
        logs = {name: series(seeds, x, y, scale) for name, seeds in runs.items()}
        lines = {name: log for name, log in logs.items() if log is not None}
        if not lines:
            return []
        return [Panel(title, *words, lines, x_scale=x_scale)]

    return draw


def series(runs: Sequence[Mapping[str, Any]], x: str, y: str, scale: float = 1.0) -> Any:
    """Places and values ``[points, seeds]`` of the logs; None if no seed has logged the value.

    Seeds whose log has other places than the first one's are left out.
    """
    ways = [run["way"] for run in runs if run.get("way") and y in run["way"][0]]
    if not ways:
        return None
    places = [row[x] for row in ways[0]]
    alike = [way for way in ways if [row[x] for row in way] == places]
    values = np.array([[row.get(y) for row in way] for way in alike], float)
    return places, scale * values.T

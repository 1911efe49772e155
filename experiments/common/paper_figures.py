# SPDX-License-Identifier: Apache-2.0
"""Figures of papers as data: which rows of the results a figure shows, and how they are drawn.

Binaries draw the rows that they ran; `experiments/papers/figures.py` draws the rows of a results
file.  Nothing here can train.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from common.multi_panel_figure import Panel

Found = Mapping[str, Sequence[Mapping[str, Any]]]  # the runs of each line
Draw = Callable[[str, Found], list[Panel]]
COPY = r"(?: \(JPEG copy\))?"


class Figure(NamedTuple):
    """A figure of a paper.

    Attributes:
      shows: What the paper shows, and what it says of it.
      draws: Functions that make panels from the runs of a title.
      titles: The panels of the paper, as row names begin; empty if the figure needs no rows.
      lines: Its lines, as row names continue; empty if any line will do.
      rows: The pattern of row names, with groups "title" and "line", and perhaps "length", which
        joins the title.  By default the pattern of ``titles`` and ``lines``.
      command: Flags of the binary that run the rows.
      why: Why rows were not run, if the reason is not time.
      claims: Pattern of the claims in `systems.json` that the figure shows.
    """

    shows: str
    draws: Sequence[Draw]
    titles: Sequence[str] = ()
    lines: Sequence[str] = ()
    rows: str = ""
    command: str = ""
    why: str = ""
    claims: str = ""

    def panels(self, title: str, found: Found) -> list[Panel]:
        """The panels of one title."""
        return [panel for draw in self.draws for panel in draw(title, found)]

    def pattern(self) -> str:
        """A pattern that whole row names match."""
        return self.rows or f"{one_of('title', self.titles, COPY)} {one_of('line', self.lines)}"

    def found(self, rows: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, list[Any]]]:
        """The runs of a results file that this figure shows, by title and line."""
        found: dict[str, dict[str, list[Any]]] = {title: {} for title, *_ in self._places(rows)}
        for title, line, row in self._places(rows):
            found[title][line] = list(rows[row].values())
        # In the order of the paper, not in that in which rows were run.
        order = {name: at for at, name in enumerate((*self.titles, *self.lines))}
        return {
            title: dict(sorted(of.items(), key=lambda each: order.get(each[0], len(order))))
            for title, of in sorted(
                found.items(), key=lambda each: order.get(_known(each[0], self.titles), len(order))
            )
        }

    def missing(self, rows: Mapping[str, Any]) -> list[str]:
        """What the paper shows and the results file lacks."""
        there = {(_known(title, self.titles), line) for title, line, _ in self._places(rows)}
        absent = [title for title in self.titles if title not in {of for of, _ in there}]
        return absent + [
            f"{title} {line}"
            for title in self.titles
            for line in self.lines
            if title not in absent and (title, line) not in there
        ]

    def _places(self, rows: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
        for row in rows if self.titles else ():
            if match := re.fullmatch(self.pattern(), row):
                length = match.groupdict().get("length")
                yield match["title"] + f", {length}" * bool(length), match["line"], row


def one_of(group: str, words: Sequence[str], tail: str = "") -> str:
    """A pattern of one of some words, as a group."""
    return f"(?P<{group}>(?:{'|'.join(map(re.escape, words))}){tail})"


def _known(title: str, titles: Sequence[str]) -> str:
    """The title of the paper that a title begins with."""
    return next((of for of in titles if re.match(rf"{re.escape(of)}\b", title)), title)


def logged(x: str, y: str, words: tuple[str, str], scale: float = 1.0) -> Draw:
    """One number of the logs against another, of all seeds that have a log."""

    def draw(title: str, found: Found) -> list[Panel]:
        lines = {name: series(runs, x, y, scale) for name, runs in found.items()}
        lines = {name: line for name, line in lines.items() if line is not None}
        return [Panel(title, *words, lines)] if lines else []

    return draw


def series(runs: Sequence[Mapping[str, Any]], x: str, y: str, scale: float = 1.0) -> Any:
    """Places and values ``[points, seeds]`` of the logs; None if no seed has logged the value.

    Seeds whose log has other places than the first one's are left out.
    """
    ways = [each["way"] for each in runs if each.get("way") and y in each["way"][0]]
    places = [[row[x] for row in way] for way in ways]
    alike = [way for way, place in zip(ways, places, strict=True) if place == places[0]]
    if not alike:
        return None
    values = np.array([[row.get(y) for row in way] for way in alike], float)
    return places[0], scale * values.T

# SPDX-License-Identifier: Apache-2.0
"""A figure in a notebook that grows while `dpjax.fit` runs; by default of released numbers."""

from __future__ import annotations

import importlib
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from absl import logging

from dpjax._files import FIELDS
from dpjax.cli.report.figures import PRIVATE, against_epsilon, note_of, of_what_was_released
from dpjax.cli.report.load_run import Missing, SavedRun
from dpjax.cli.report.style import WIDTH, canvas, png, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PREFIX_OF_PRIVATE = "private/"  # of names that `live_plot` takes
_PIXELS = 540  # fewer than the image has: sharp on screens of high resolution


def live_plot(*names: str) -> Callable[[Sequence[Mapping[str, Any]]], None]:
    """A figure of a run in a notebook, for ``dpjax.fit(..., progress=live_plot())``.

    Args:
      names: The numbers of the log to draw against epsilon; by default all that ``evaluate``
        returns. ``"private/loss"`` is the loss of the drawn examples.

    Returns:
      A function of the rows of the log, which draws them. It logs what keeps it from drawing,
      and raises nothing: a run is worth more than its figure.

    Privacy:
      Numbers under ``private/`` are computed without noise. A note in the figure names them, as it
      does an infinite epsilon. A notebook keeps its figures: remove such a one before you publish
      the notebook, and any figure of a run with a supplied key, which no row mentions.
    """
    display = importlib.import_module("IPython.display")
    with style():  # without Matplotlib this raises, before any step runs
        pass
    handle = None

    def plot(rows: Sequence[Mapping[str, Any]]) -> None:
        nonlocal handle
        # An error loses the state of a run without a directory, whose privacy is spent.
        try:
            drawn = names or _evaluated(rows)
            image = display.Image(_figure([dict(row) for row in rows], drawn), width=_PIXELS)
            if handle is None:
                handle = display.display(image, display_id=True)
            else:
                handle.update(image)
        except Exception as error:
            logging.error("reports.live_plot: the figure was not drawn: %s", error)

    return plot


def _figure(rows: list[dict[str, Any]], names: Sequence[str]) -> bytes:
    """The numbers of these names against epsilon, one below the other, as PNG."""
    if not names:
        raise Missing("the log has no number, as evaluate=... returns and 'private/loss' is")
    # Rows are all that the figure needs; no file is read, and the path stays empty.
    run = SavedRun(pathlib.Path(), rows)
    badge = of_what_was_released(run)
    if any(name.startswith(_PREFIX_OF_PRIVATE) for name in names):
        badge = PRIVATE
    with style():
        figure = canvas(WIDTH, 0.5 + 1.9 * len(names))
        for axes, name in zip(np.ravel(figure.subplots(len(names))), names, strict=True):
            _draw(axes, run, name)
        return png(figure, note_of(badge))


def _draw(axes: Axes, run: SavedRun, name: str) -> None:
    """Draws one number of the log, or empty axes before its first value."""
    path = [name]
    color = "blue"
    if name.startswith(_PREFIX_OF_PRIVATE):
        # The rest is one name, since a name of `evaluate` may hold a slash.
        path = name.split("/", 1)
        color = "clay"
    try:
        y = run.series(*path)
    except Missing:
        y = np.full((len(run.rows), 1), np.nan)
        axes.set_title("no finite number so far")
    against_epsilon(axes, run, y, name, color)


def _evaluated(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of all rows, in their order; a number that is not finite is null."""
    names = dict.fromkeys(
        name
        for row in rows
        for name, value in row.items()
        if isinstance(value, float | list | None)
    )
    return [name for name in names if name not in FIELDS and not name.endswith("_per_second")]

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
    """Makes a function that draws a run in a notebook: ``dpjax.fit(..., progress=live_plot())``.

    Args:
      names: The numbers of the log to draw against epsilon; by default all that ``evaluate``
        returns. ``"private/loss"`` is the loss of the training examples.

    Returns:
      A function that `fit` calls with all rows of the log so far, and that replaces the figure. It
      logs its errors and raises none: a run is worth more than its figure.

    Privacy:
      Numbers under ``private/`` are computed without noise. A figure with such numbers, or with an
      infinite epsilon, has a note that it is not for publication. A notebook keeps its figures:
      remove these before you publish it. Also remove the figures of a run with a supplied key; they
      have no note, because the log does not record the key's origin.
    """
    # IPython and Matplotlib are optional. If one is not installed, its import raises here, before
    # any step runs.
    display = importlib.import_module("IPython.display")
    with style():  # imports Matplotlib
        pass
    handle = None  # of the figure in the notebook, once it is displayed

    def plot(rows: Sequence[Mapping[str, Any]]) -> None:
        nonlocal handle
        try:
            drawn_names = names or _names_of_evaluate(rows)
            png_image = _figure([dict(row) for row in rows], drawn_names)
            image = display.Image(png_image, width=_PIXELS)
            if handle is None:
                handle = display.display(image, display_id=True)
            else:
                handle.update(image)
        # An error raised here ends `fit`. The trained state is lost then, if `fit` has no directory
        # to save it in.
        except Exception as error:
            logging.error("reports.live_plot: the figure was not drawn: %s", error)

    return plot


def _figure(rows: list[dict[str, Any]], names: Sequence[str]) -> bytes:
    """A PNG of the numbers with these names against epsilon, one axes below the other."""
    if not names:
        raise Missing("the log has no number, as evaluate=... returns and 'private/loss' is")
    # Rows are all that the figure needs; no file is read, and the path stays empty.
    run = SavedRun(pathlib.Path(), rows)
    badge = of_what_was_released(run)  # "released", unless epsilon is infinite
    if any(name.startswith(_PREFIX_OF_PRIVATE) for name in names):
        badge = PRIVATE
    with style():
        figure = canvas(WIDTH, height=0.5 + 1.9 * len(names))  # a margin, and the axes
        # `subplots(1)` returns an `Axes` and not an array; `ravel` makes it an array too.
        all_axes = np.ravel(figure.subplots(len(names)))
        for axes, name in zip(all_axes, names, strict=True):
            _draw(axes, run, name)
        return png(figure, note_of(badge))


def _draw(axes: Axes, run: SavedRun, name: str) -> None:
    """Draws one number of the log, or empty axes before its first value."""
    keys = [name]  # in a row of the log
    color = "blue"
    if name.startswith(_PREFIX_OF_PRIVATE):
        # A row holds these numbers in a dictionary, `private`. Only the first slash separates,
        # since the name of a number may have slashes too.
        keys = name.split("/", 1)
        color = "clay"  # sets private numbers apart
    try:
        y = run.series(*keys)  # [rows, 1], or [rows, groups] for a number per group
    except Missing:
        y = np.full((len(run.rows), 1), np.nan)
        axes.set_title("no finite number so far")
    against_epsilon(axes, run, y, name, color)


def _names_of_evaluate(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of the numbers that ``evaluate`` returned in any row, in their order."""
    # A number that is not finite is None in the log.
    names = dict.fromkeys(
        name
        for row in rows
        for name, value in row.items()
        if isinstance(value, float | list | None)
    )
    return [name for name in names if name not in FIELDS and not name.endswith("_per_second")]

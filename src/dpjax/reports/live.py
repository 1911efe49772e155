# SPDX-License-Identifier: Apache-2.0
"""A figure in a notebook that grows while `dpjax.fit` runs; by default of released numbers."""

from __future__ import annotations

import importlib
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging

from dpjax._files import FIELDS
from dpjax.reports.figures import PRIVATE, RELEASED, against_epsilon, of_what_was_released
from dpjax.reports.load_run import Missing, SavedRun
from dpjax.reports.style import WIDTH, canvas, png, style

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
      Numbers under ``private/`` are computed without noise, and the figure then says so, as it does
      where epsilon is infinite. A notebook keeps its figures: remove such a one before you publish
      the notebook, and any figure of a run with a supplied key, which no row mentions.
    """
    display = importlib.import_module("IPython.display")
    with style():  # without Matplotlib this raises, before any step runs
        pass
    handle = None

    def plot(rows: Sequence[Mapping[str, Any]]) -> None:
        nonlocal handle
        # Private data are paid for by now, and without a directory an error would lose the state.
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
    if not names:
        raise Missing("the log has no number, as evaluate=... returns and 'private/loss' is")
    run = SavedRun(pathlib.Path(), rows)
    hidden = any(name.startswith("private/") for name in names)
    badge = PRIVATE if hidden else of_what_was_released(run)
    with style():
        figure = canvas(WIDTH, 0.5 + 1.9 * len(names))
        for axes, name in zip(np.ravel(figure.subplots(len(names))), names, strict=True):
            color = "clay" if name.startswith("private/") else "blue"
            try:
                # A name of `evaluate` may have a slash of its own.
                y = run.series(*(name.split("/", 1) if color == "clay" else [name]))
            except Missing:
                y = np.full((len(rows), 1), np.nan)
                axes.set_title("no finite number so far")
            against_epsilon(axes, run, y, name, color)
        return png(figure, "" if badge == RELEASED else badge)


def _evaluated(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of all rows, in their order; a number that is not finite is null."""
    items = [item for row in rows for item in row.items()]
    names = dict.fromkeys(name for name, value in items if isinstance(value, float | list | None))
    return [name for name in names if name not in FIELDS and not name.endswith("_per_second")]

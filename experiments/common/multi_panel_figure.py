# SPDX-License-Identifier: Apache-2.0
"""Figures of several panels, as the papers print them.

A panel is a table of counts, or lines that each show the median of their seeds with the smallest
and largest value.  The panels of a figure share one legend.
"""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from dpjax.reports import style
from dpjax.reports.figure_output import png


class Panel(NamedTuple):
    """One drawing of a figure: lines, or a table of counts."""

    title: str
    x: str
    y: str
    lines: Mapping[str, tuple[Any, Any]] = MappingProxyType({})  # places, values [points, seeds]
    counts: Any = None  # [right class, predicted class]
    scale: str = "linear"


def draw(path: str, drawn: Sequence[Panel], columns: int = 3) -> None:
    """Draws panels to a PNG file."""
    rows, columns = -(-len(drawn) // columns), min(columns, len(drawn))
    with style.style():
        figure = style.canvas(2.8 * columns, 2.6 * rows + 0.4)
        places = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes, panel in itertools.zip_longest(places, drawn):
            if panel is None:
                axes.set_visible(False)
                continue
            axes.set(title=panel.title, xlabel=panel.x, ylabel=panel.y, yscale=panel.scale)
            (_lines if panel.counts is None else _cells)(axes, panel)
        handles, labels = places[0].get_legend_handles_labels()
        if handles:
            look = {"ncols": 4, "frameon": False, "labelcolor": "linecolor"}
            figure.legend(handles, labels, loc="outside upper left", **look)
        pathlib.Path(path).write_bytes(png(figure))


def _lines(axes: Any, panel: Panel) -> None:
    looks = itertools.product(("-", "--", ":"), style.SERIES)
    for (name, (places, values)), (dash, color) in zip(panel.lines.items(), looks, strict=False):
        table, ink = np.asarray(values, float), {"color": style.PALETTE[color]}
        axes.plot(places, np.median(table, axis=1), dash, label=name, **ink)
        if table.shape[1] > 1:
            low, high = table.min(axis=1), table.max(axis=1)
            axes.fill_between(places, low, high, alpha=0.18, linewidth=0, **ink)
            axes.plot(places, np.stack([low, high], axis=1), dash, linewidth=0.5, **ink)


def _cells(axes: Any, panel: Panel) -> None:
    """Counts as percents of their row."""
    counts = np.asarray(panel.counts, float)
    part = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    axes.imshow(part, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    axes.grid(visible=False)
    for (row, column), value in np.ndenumerate(np.rint(100 * part)):
        ink = style.PALETTE["paper" if value > 50 else "ink"]
        if value:
            axes.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=5, color=ink)

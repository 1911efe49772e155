# SPDX-License-Identifier: Apache-2.0
"""Figures of several panels, as the papers print them.

A panel is a table of counts, or lines that each show the median of their seeds with the smallest
and largest value.  A line has one color and one dash in all panels of a figure, which share one
legend.  The number of seeds of its bands is printed below the title of a panel.
"""

from __future__ import annotations

import itertools
import math
import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from dpjax.cli.report import style
from dpjax.cli.report.style import png

LOOKS = tuple(itertools.product(("-", "--"), style.SERIES))  # dash and color, of 12 lines
MARKED = 12  # most points of a line that are shown as dots too


class Panel(NamedTuple):
    """One drawing of a figure: lines, or a table of counts."""

    title: str
    x: str
    y: str
    lines: Mapping[str, tuple[Any, Any]] = MappingProxyType({})  # places, values [points, seeds]
    counts: Any = None  # [right class, predicted class]
    scale: str = "linear"
    x_scale: str = "linear"
    joined: bool = True  # whether a line joins its points
    fit: tuple[Any, Any] | None = None  # a line to compare with, in grey: places, values
    measured: bool = True  # by runs, and not a formula


def image(drawn: Sequence[Panel], columns: int = 3) -> bytes:
    """Panels as the bytes of a PNG file."""
    looks = looks_of(name for panel in drawn for name in panel.lines)
    rows = -(-len(drawn) // columns)
    columns = min(columns, len(drawn))
    with style.style():
        width = max(4.2, 2.8 * columns)
        longest = max(map(len, looks), default=1)
        in_a_row = max(1, int(width / (0.06 * longest + 0.5)))  # names of 7 points
        figure = style.canvas(width, 2.7 * rows + 0.2 * math.ceil(len(looks) / in_a_row))
        places = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes, panel in itertools.zip_longest(places, drawn):
            if panel is None:
                axes.set_visible(False)
                continue
            words = [panel.title, seeds_of(panel)]
            axes.set_title("\n".join(filter(None, words)), fontsize=7)
            axes.set(xlabel=panel.x, ylabel=panel.y, xscale=panel.x_scale, yscale=panel.scale)
            _ticks(axes)
            if panel.counts is None:
                _lines(axes, panel, looks)
            else:
                _cells(axes, panel)
        # A name is in the legend once, though several panels have its line.
        by_name = {}
        for axes in places:
            for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
                by_name[name] = handle
        if by_name:
            figure.legend(
                by_name.values(),
                by_name,
                loc="outside upper left",
                ncols=in_a_row,
                frameon=False,
                labelcolor="linecolor",
                fontsize=7,
            )
        return png(figure)


def bars(values: Mapping[str, Sequence[float | None]], names: Sequence[str], x: str) -> bytes:
    """A group of bars for each name, on a logarithmic axis with a line at 1."""
    with style.style():
        figure = style.canvas(6.4, 0.55 * len(names) + 0.6)
        axes = style.panel(figure, x, "")
        height = 0.8 / len(values)
        for i, (who, lengths) in enumerate(values.items()):
            offset = (i - (len(values) - 1) / 2) * height
            places = [place + offset for place in range(len(names))]
            widths = np.array(lengths, float)  # NaN for None
            color = style.PALETTE[style.SERIES[i]]
            # Bars begin at 1, because the axis has no zero.
            bars = axes.barh(places, widths - 1, 0.9 * height, left=1, label=who, color=color)
            axes.bar_label(bars, [f"{width:.3g}" for width in widths], padding=2, fontsize=7)
        axes.axvline(1, color=style.PALETTE["ink"], linewidth=0.8)
        axes.set_xscale("log")
        axes.margins(x=0.1)
        _ticks(axes)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        style.legend(axes)
        return png(figure)


def looks_of(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """The dash and the color of each line; an error if there are more lines than looks."""
    names = list(dict.fromkeys(names))
    if len(names) > len(LOOKS):
        raise ValueError(f"pictures.draw: {len(names)} lines; at most {len(LOOKS)} have a look.")
    return dict(zip(names, LOOKS, strict=False))


def seeds_of(panel: Panel) -> str:
    """The number of seeds that the bands of a panel show, which may differ between its lines."""
    if not (panel.lines and panel.measured):
        return ""
    counts = {}
    for name, (_, values) in panel.lines.items():
        of_points = np.isfinite(padded(values)).sum(1)
        counts[name] = int(of_points.max())
    usual = statistics.mode(counts.values())
    words = f"{usual} seeds" if usual > 1 else f"{usual} seed"
    others = [f"{count} of {name}" for name, count in counts.items() if count != usual]
    return textwrap.fill("; ".join([words, *others]), 44)


def padded(values: Any) -> np.ndarray:
    """Values ``[points, seeds]``; a point with fewer seeds than others ends in NaN."""
    rows = [np.asarray(row, float).ravel() for row in values]
    table = np.full((len(rows), max((row.size for row in rows), default=0)), np.nan)
    for place, row in zip(table, rows, strict=True):
        place[: row.size] = row
    return table


def _ticks(axes: Any) -> None:
    """Few ticks, since labels meet in a small panel; plain numbers on logarithmic axes."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log":
            axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=6))
            axis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axis.set_minor_formatter(NullFormatter())
        elif axis.get_scale() == "linear":
            axes.locator_params(axis.axis_name, nbins=5)


def _lines(axes: Any, panel: Panel, looks: Mapping[str, tuple[str, str]]) -> None:
    """The median over seeds of each line, and the range around it."""
    if panel.fit is not None:
        axes.plot(*panel.fit, color=style.PALETTE["muted"], linewidth=0.8)
    for name, (places, values) in panel.lines.items():
        dash, color = looks[name]
        ink = style.PALETTE[color]
        places = np.asarray(places, float)
        table = padded(values)
        middle = _over_seeds(table, np.nanmedian)
        low = _over_seeds(table, np.nanmin)
        high = _over_seeds(table, np.nanmax)
        dots = style.DOTS if len(places) <= MARKED or not panel.joined else {}
        dash = dash if panel.joined else "none"
        axes.plot(places, middle, label=name, linestyle=dash, color=ink, **dots)
        if table.shape[1] == 1:
            continue
        if panel.joined:
            axes.fill_between(places, low, high, alpha=0.18, linewidth=0, color=ink)
        else:
            axes.vlines(places, low, high, color=ink, linewidth=0.8)


def _over_seeds(table: np.ndarray, reduce: Callable[..., Any]) -> np.ndarray:
    """A statistic of each point; NaN at a point without a number, which is a gap in the line."""
    known = ~np.isnan(table).all(axis=1)
    line = np.full(len(table), np.nan)
    line[known] = reduce(table[known], axis=1)
    return line


def _cells(axes: Any, panel: Panel) -> None:
    """Counts as percents of their row."""
    counts = np.asarray(panel.counts, float)
    totals = counts.sum(axis=1, keepdims=True)
    shares = counts / np.maximum(totals, 1)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    axes.grid(visible=False)
    look = {"ha": "center", "va": "center", "fontsize": 5}
    for (row, column), percent in np.ndenumerate(np.rint(100 * shares)):
        if percent:
            ink = style.PALETTE["paper" if percent > 50 else "ink"]
            axes.text(column, row, f"{percent:.0f}", color=ink, **look)

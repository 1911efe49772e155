# SPDX-License-Identifier: Apache-2.0
"""The look of all figures, and their files: colors, Matplotlib settings, lines, SVG and PNG.

Matplotlib is optional; the user's settings of it are neither read nor changed.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Iterator
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = {  # of the light page, and of the dark one
    "ink": ("#20262e", "#e4e6e8"),
    "muted": ("#66707c", "#97a1ac"),
    "rule": ("#dddfdc", "#343b44"),
    "paper": ("#fdfdfb", "#15191e"),
    "blue": ("#2b5f93", "#7db1e4"),
    "clay": ("#b4562b", "#e8956a"),
    "green": ("#3d7a57", "#7fc49c"),
    "violet": ("#75549a", "#b99ae0"),
    "ochre": ("#94701c", "#d3b05c"),
    "teal": ("#23797d", "#6fc2c6"),
}
PALETTE = {name: light for name, (light, _) in _COLORS.items()}
DARK = {name: dark for name, (_, dark) in _COLORS.items()}
SERIES = ("blue", "clay", "green", "violet", "ochre", "teal")

WIDTH = 5.4  # inches; at this width the text is 8 pixels high on a screen of 400

DOTS: dict[str, Any] = {"marker": "o", "markersize": 4, "markeredgecolor": PALETTE["paper"]}

_INK = PALETTE["ink"]
_MUTED = PALETTE["muted"]
_RULE = PALETTE["rule"]
_PAPER = PALETTE["paper"]
_STYLE: dict[Any, Any] = {
    "figure.facecolor": _PAPER,
    "axes.facecolor": "none",
    "axes.edgecolor": _MUTED,
    "axes.labelcolor": _MUTED,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 8.5,
    "axes.titlecolor": _MUTED,
    "grid.color": _RULE,
    "grid.linewidth": 0.6,
    "text.color": _INK,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "font.size": 8.5,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
    # Text stays text in the SVG: it can be searched and read aloud, and takes the page's font.
    "svg.fonttype": "none",
}


@contextlib.contextmanager
def style() -> Iterator[None]:
    """A context in which figures are drawn and saved in the style of the page."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def canvas(width: float = 6.4, height: float = 3.1) -> Figure:
    """An empty figure without a window; sizes in inches."""
    from matplotlib.figure import Figure

    # Pyplot keeps every figure alive and may need a display.
    return Figure(figsize=(width, height), layout="constrained")


def panel(figure: Figure, x: str, y: str) -> Axes:
    """The only axes of a figure, with their labels, in which a dollar sign is one."""
    axes = figure.subplots()
    axes.set_xlabel(x, parse_math=False)
    axes.set_ylabel(y, parse_math=False)
    return axes


def band(
    axes: Axes, x: np.ndarray, table: np.ndarray, color: str, label: str = "", **look: Any
) -> None:
    """A line through the mean of each row, a band over its range, and gaps for NaN."""
    middle = _by_row(table, np.nanmean)
    low = _by_row(table, np.nanmin)
    high = _by_row(table, np.nanmax)
    axes.plot(x, middle, color=PALETTE[color], label=label, **look)
    if np.any(low < high):  # NaN compares as False
        axes.fill_between(x, low, high, color=PALETTE[color], alpha=0.18, linewidth=0)


def _by_row(table: np.ndarray, reduce: Callable[..., np.ndarray]) -> np.ndarray:
    """Reduces each row; a row without a number is NaN, for which NumPy warns."""
    values = np.full(len(table), np.nan)
    has_number = ~np.isnan(table).all(axis=1)
    values[has_number] = reduce(table[has_number], axis=1)
    return values


def legend(axes: Axes) -> None:
    """A legend above the axes, where it hides no line."""
    where = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 4}
    # The handles are passed because Matplotlib warns where it finds none.
    named = axes.get_legend_handles_labels()
    axes.legend(*named, frameon=False, borderpad=0, labelcolor="linecolor", **where)


def svg(figure: Figure, name: str, label: str) -> str:
    """A figure as an SVG element; ``label`` is for screen readers, and ids begin with ``name``."""
    file = io.StringIO()
    # None leaves an entry out: without it Matplotlib writes its version and the date into the SVG.
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(file, format="svg", transparent=True, metadata=metadata)
    text = file.getvalue()
    # An XML declaration precedes the element, and is allowed only at the start of a file.
    text = text[text.index("<svg") :]
    # The first view box is that of the figure; it is empty if the SVG has none.
    view_boxes = [*re.findall(r'viewBox="([^"]*)"', text), ""]
    opening_tag = (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="{view_boxes[0]}" role="img" aria-label="{escape(label)}">'
    )
    # Matplotlib writes a style sheet into each SVG; the page has one for all figures.
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)
    # The new tag has no width and height, because the page scales the view box to its column. It is
    # returned by a function, because a string may have backslashes, which `re` reads as groups.
    text = re.sub(r"<svg[^>]*>", lambda _: opening_tag, text, count=1)
    # Ids are unique in one figure only, and a page holds many: definitions and references of ids
    # get the name of the figure.
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    # Colours become CSS variables: one drawing serves the light and the dark page.
    for color, value in PALETTE.items():
        text = text.replace(value, f"var(--{color})")
    return text.strip()


def png(figure: Figure, note: str = "") -> bytes:
    """A figure as PNG, with ``note`` drawn into the image, which copies then keep."""
    if note:
        figure.suptitle(note, fontsize=7, color=PALETTE["clay"])
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=160)
    return file.getvalue()

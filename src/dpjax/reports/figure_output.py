# SPDX-License-Identifier: Apache-2.0
"""Writes a figure as SVG for the page, and as PNG for use elsewhere.

In the SVG every color of the palette is a CSS variable, so the page can show the figure in
light and dark mode. Text stays text. Every id begins with the figure's name, because the
figures share one page.
"""

from __future__ import annotations

import io
import re
from html import escape
from typing import TYPE_CHECKING

from dpjax.reports.style import PALETTE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_OPENING = (
    '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
    'viewBox="{box}" role="img" aria-label="{label}">'
)


def svg(figure: Figure, name: str, label: str) -> str:
    """A figure as an SVG element that fills the width of its container.

    Args:
      figure: Drawn with the colors of `style.PALETTE`.
      name: The prefix of its ids; unique on the page.
      label: The description for screen readers.
    """
    file = io.StringIO()
    # Without dates and versions: an equal run gives an equal file, and `git diff` stays silent.
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    text = file.getvalue()
    box = re.search(r'viewBox="([^"]*)"', text)
    opening = _OPENING.format(box=box.group(1) if box else "", label=escape(label))
    # Matplotlib writes a style sheet into each SVG; the page has one for all figures.
    text = re.sub(r"<style.*?</style>", "", text[text.index("<svg") :], flags=re.DOTALL)
    # Matplotlib's own size is in points; the page scales the view box to its column.
    text = re.sub(r"<svg[^>]*>", lambda _: opening, text, count=1)
    # Ids are unique in a figure only, and a page holds many figures.
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    # Colours become CSS variables, so that one drawing serves the light and the dark page.
    for color, value in PALETTE.items():
        text = text.replace(value, f"var(--{color})")
    return text.strip()


def png(figure: Figure, note: str = "") -> bytes:
    """A figure as PNG, with ``note`` drawn into the image, so that copies keep it."""
    if note:
        figure.suptitle(note, fontsize=7, color=PALETTE["clay"])
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=160)
    return file.getvalue()

# SPDX-License-Identifier: Apache-2.0
"""How one drawing becomes an SVG for a page and a PNG for everything else.

In the SVG every color of the palette is a CSS variable, so the page that holds it decides
what ink and paper are, by day and by night.  Text stays text, and every id begins with the
figure's name, because the ids of all figures share one page.

This file must never know what is drawn, nor load anything from elsewhere.
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
    """A figure as an element of a page, as wide as the page lets it be.

    Args:
      figure: Drawn with the colors of `drawing.PALETTE`.
      name: Its ids begin with this; different for each figure of a page.
      label: What is read to those who do not see it.
    """
    file = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    text = file.getvalue()
    box = re.search(r'viewBox="([^"]*)"', text)
    opening = _OPENING.format(box=box.group(1) if box else "", label=escape(label))
    # The page has one rule for the lines of all figures, in place of each figure's own.
    text = re.sub(r"<style.*?</style>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r"<svg[^>]*>", lambda _: opening, text, count=1)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    for color, value in PALETTE.items():
        text = text.replace(value, f"var(--{color})")
    return text.strip()


def png(figure: Figure, note: str = "") -> bytes:
    """A figure as a picture; ``note`` stands in it, where it cannot be lost."""
    if note:
        figure.suptitle(note, fontsize=7, color=PALETTE["clay"])
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=160)
    return file.getvalue()

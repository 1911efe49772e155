# SPDX-License-Identifier: Apache-2.0
"""The frame of a page, its sections and its tables; every text is escaped."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

from dpjax.cli.report.style import DARK, PALETTE


def page(title: str, body: Iterable[str]) -> str:
    """A whole page from parts that are HTML already; it is also well-formed XML."""
    css = resources.files("dpjax.cli.report").joinpath("page.css").read_text(encoding="utf-8")
    light = _variables(PALETTE)
    dark = _variables(DARK)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        '<meta name="robots" content="noindex"/>\n'
        f"<title>{escape(title)}</title>\n"
        f"<style>\n:root{{color-scheme:light dark;{light}}}\n"
        f"@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n{css}</style>\n"
        "</head>\n<body>\n<main>\n" + "\n".join(body) + "\n</main>\n</body>\n</html>\n"
    )


def section(note: str, plate: str, *, tag: str = "section", name: str = "") -> str:
    """A note and the figure or text that it explains; both are HTML."""
    inner = "figcaption" if tag == "figure" else "div"
    identity = f' id="{escape(name)}"' if name else ""
    return (
        f'<{tag} class="row"{identity}>\n<{inner} class="note">{note}</{inner}>\n'
        f'<div class="plate">{plate}</div>\n</{tag}>'
    )


def table(rows: Mapping[str, Any], kind: str = "facts") -> str:
    """A table of names and values, both escaped."""
    lines = (
        f'<tr><th scope="row">{escape(str(name))}</th><td>{escape(_value(entry))}</td></tr>'
        for name, entry in rows.items()
    )
    return f'<table class="{kind}"><tbody>{"".join(lines)}</tbody></table>'


def typeset(text: str) -> Iterator[str]:
    """Typesets a plain text as HTML, one element for each block between empty lines.

    A block that is not indented is a heading. An indented one is a list if it begins with ``-``, a
    table if two spaces or more separate cells in all of its lines, and else a paragraph.
    """
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        lines = [line.strip() for line in block.splitlines()]
        rows = [re.split(r" {2,}", line) for line in lines]  # the cells of each line
        if not block.startswith(" "):
            yield f"<h4>{escape(block)}</h4>"
        elif lines[0].startswith("- "):
            items = [f"<li>{escape(line.removeprefix('- '))}</li>" for line in lines]
            yield f"<ul>{''.join(items)}</ul>"
        elif all(len(row) > 1 for row in rows):
            yield f'<table class="columns">{"".join(map(_row, rows))}</table>'
        else:
            yield f"<p>{escape(' '.join(lines))}</p>"


def _row(cells: Sequence[str]) -> str:
    """A row of a table whose cells are percentages, or the names of its columns."""
    tag = "td" if any("%" in cell for cell in cells) else "th"
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"


def _variables(colors: Mapping[str, str]) -> str:
    return "".join(f"--{name}:{color};" for name, color in colors.items())


def _value(entry: Any) -> str:
    if entry is None:
        return "not set"
    if isinstance(entry, str):
        return entry
    if isinstance(entry, list) and all(isinstance(word, str) for word in entry):
        return ", ".join(entry) or "none"
    return json.dumps(entry, ensure_ascii=False)

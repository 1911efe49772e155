# SPDX-License-Identifier: Apache-2.0
"""The privacy statement as HTML, for notebooks and for the page of a run.

The HTML is made from the text, which is what a folder holds, and has all its words. Labels and
values become a table, so that a narrow screen wraps a value within its own column.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from dpjax._display import table

_VALUES = 16  # the column of the text in which values begin


class Statement(str):
    """The text of a statement; a notebook shows it as HTML."""

    __slots__ = ()

    # A terminal that echoes the object shows its lines, not one line with escapes.
    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f"<p><strong>Privacy statement</strong></p>\n{as_html(self)}"


def as_html(text: str) -> str:
    """The HTML of a statement, without its title."""
    words, _, references = text.partition("\nReferences\n")
    words, _, open_ends = words.partition("\nNot covered\n")
    verdict, *facts = words.removeprefix("Privacy statement").strip("\n").split("\n\n")
    parts = [f"<p>{escape(' '.join(verdict.split()))}</p>"]
    parts += [table("", _rows(block.splitlines())) for block in facts]
    if open_ends.strip():
        ends = (f"<li>{escape(line.strip(' -'))}</li>" for line in open_ends.strip().splitlines())
        parts.append(f"<p>Not covered</p>\n<ul>{''.join(ends)}</ul>")
    if references.strip():
        parts.append(
            "<details><summary>References, as BibTeX</summary>"
            f"<pre>{escape(references.strip())}</pre></details>"
        )
    return "\n".join(parts)


def _rows(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Labels with their values; a line without a label continues the value above it."""
    label, values = "", []
    for line in lines:
        if (name := line[:_VALUES].strip()) and values:
            yield label, "\n".join(values)
            values = []
        label = name or label
        values.append(" ".join(line[_VALUES:].split()))
    yield label, "\n".join(values)

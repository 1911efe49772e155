# SPDX-License-Identifier: Apache-2.0
"""The layout of a privacy statement: as text, read back from text, and as HTML.

A statement has a verdict, tables of labelled values, a list of what is not covered, and references.
This file is the only one that knows how the text is indented.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from html import escape
from typing import NamedTuple

from dpjax import _display

_TITLE = "Privacy statement"
_NOT_COVERED = "Not covered"
_REFERENCES = "References"
COLUMN = 16
"""The column in which values begin."""


PAPER = "in a paper"
"""The label of the one row whose value is a paragraph."""


class Row(NamedTuple):
    """A label, and the lines of its value."""

    label: str
    lines: list[str]


class Document(NamedTuple):
    """The content of a statement."""

    verdict: list[str]
    tables: list[list[Row]]
    not_covered: list[str]
    references: str


def row(label: str, *lines: str) -> Row:
    """A row from the lines of its value."""
    return Row(label, list(lines))


def text_of(document: Document) -> str:
    """The text of a statement."""
    lines = [_TITLE, ""]
    lines += [f"  {sentence}" for sentence in document.verdict]
    lines.append("")
    for table in document.tables:
        for entry in table:
            lines += _indented(entry)
        lines.append("")
    lines.append(_NOT_COVERED)
    lines += [f"  - {words}" for words in document.not_covered]
    lines += ["", _REFERENCES, document.references]
    return "\n".join(lines)


def read(text: str) -> Document:
    """Reads the text of a statement back; parts that it lacks are empty."""
    words, _, references = text.partition(f"\n{_REFERENCES}\n")
    words, _, uncovered = words.partition(f"\n{_NOT_COVERED}\n")
    verdict, *blocks = words.removeprefix(_TITLE).strip("\n").split("\n\n")
    return Document(
        verdict=[line.strip() for line in verdict.splitlines()],
        tables=[list(_rows(block.splitlines())) for block in blocks],
        not_covered=[line.strip(" -") for line in uncovered.strip().splitlines()],
        references=references.strip(),
    )


def html_of(document: Document) -> str:
    """The HTML of a statement, without its title; it has all words of the text."""
    parts = [f"<p>{escape(' '.join(document.verdict))}</p>"]
    for table in document.tables:
        pairs = [(entry.label, _value_of(entry)) for entry in table]
        parts.append(_display.table(title="", rows=pairs))
    if document.not_covered:
        items = [f"<li>{escape(words)}</li>" for words in document.not_covered]
        parts.append(f"<p>{_NOT_COVERED}</p>\n<ul>{''.join(items)}</ul>")
    # Numbers such as 1e-05 become powers of ten. BibTeX is added afterwards, to keep its numbers.
    html = re.sub(r"\b[\d.]+e-\d+\b", lambda match: _display.power(match[0]), "\n".join(parts))
    if document.references:
        html += (
            f"\n<details><summary>{_REFERENCES}, as BibTeX</summary>"
            f"<pre>{escape(document.references)}</pre></details>"
        )
    return html


def _value_of(entry: Row) -> str:
    """The value of a row; a paragraph is broken by the page that shows it."""
    if entry.label == PAPER:
        return " ".join(entry.lines)
    return "\n".join(entry.lines)


def _indented(entry: Row) -> Iterator[str]:
    first, *others = entry.lines
    yield f"  {entry.label}".ljust(COLUMN) + first
    for line in others:
        yield " " * COLUMN + line


def _rows(lines: Iterable[str]) -> Iterator[Row]:
    """The rows of a table; a line without a label continues the value above it."""
    entry = row("")  # a start without lines, which is not a row of the table
    for line in lines:
        label = line[:COLUMN].strip()
        if label:
            if entry.lines:
                yield entry
            entry = row(label)
        value = " ".join(line[COLUMN:].split())
        entry.lines.append(value)
    yield entry

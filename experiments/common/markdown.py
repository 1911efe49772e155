# SPDX-License-Identifier: Apache-2.0
"""Tables in Markdown, and pages on which the text between two markers is written again."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterable, Mapping


def line(*cells: str) -> str:
    """A line of a table."""
    return f"| {' | '.join(cells)} |"


def table(head: str, lines: Iterable[str]) -> str:
    """The lines of a table below its head, which is given as Markdown writes it."""
    columns = head.count("|") - 1
    rule = line(*["---"] * columns).replace(" ", "")
    return "\n".join([head, rule, *lines])


def filled(page: str, texts: Mapping[str, str]) -> str:
    """The page with each text between the markers of its name; blank lines around it stay."""
    for name, text in texts.items():
        begin = f"<!-- {name}: begin -->"
        end = f"<!-- {name}: end -->"
        found = re.fullmatch(rf"(.*{begin}\n+).*?(\n+{end}.*)", page, re.DOTALL)
        if found is None:
            raise ValueError(f"{name}: expected its two markers. Usually this is another page.")
        page = found[1] + text + found[2]
    return page


def rewrite(path: str | None, texts: Mapping[str, str]) -> None:
    """Writes the texts into a page, if there is one."""
    if path:
        page = pathlib.Path(path)
        page.write_text(filled(page.read_text(), texts))

# SPDX-License-Identifier: Apache-2.0
"""The parts of an HTML page that loads no other file and runs no script.

All text from a run passes through `escape`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from importlib import resources
from typing import Any

from dpjax import _display
from dpjax.accounting.rounding import upwards
from dpjax.reports.style import DARK, PALETTE


def page(title: str, body: Iterable[str]) -> str:
    """A whole page from parts that are HTML already; it is also well-formed XML."""
    css = resources.files("dpjax.reports").joinpath("page.css").read_text(encoding="utf-8")
    light, dark = (
        "".join(f"--{name}:{color};" for name, color in colors.items())
        for colors in (PALETTE, DARK)
    )
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
    inner = {"figure": "figcaption", "section": "div"}[tag]
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


def power(number: float) -> str:
    """A small number, such as delta, as HTML with a power of ten, rounded up."""
    return _as_power(upwards(number, ".3g"))


def _as_power(text: str) -> str:
    mantissa, _, exponent = text.partition("e")
    if not exponent:
        return escape(mantissa)
    tens = f"10<sup>{int(exponent)}</sup>".replace("-", "\N{MINUS SIGN}")
    return tens if mantissa == "1" else f"{mantissa} × {tens}"


def statement_html(text: str) -> str:
    """The HTML of a privacy statement, without its title; it has all words of the text."""
    words, _, references = text.partition("\nReferences\n")
    words, _, open_ends = words.partition("\nNot covered\n")
    verdict, *facts = words.removeprefix("Privacy statement").strip("\n").split("\n\n")
    parts = [f"<p>{escape(' '.join(verdict.split()))}</p>"]
    parts += [_display.table("", _labelled(block.splitlines())) for block in facts]
    if open_ends.strip():
        ends = (f"<li>{escape(line.strip(' -'))}</li>" for line in open_ends.strip().splitlines())
        parts.append(f"<p>Not covered</p>\n<ul>{''.join(ends)}</ul>")
    # Delta as the head of the page writes it; BibTeX stays as it is.
    told = re.sub(r"\b[\d.]+e-\d+\b", lambda number: _as_power(number[0]), "\n".join(parts))
    if references.strip():
        told += (
            "\n<details><summary>References, as BibTeX</summary>"
            f"<pre>{escape(references.strip())}</pre></details>"
        )
    return told


def _labelled(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Labels with their values; a line without a label continues the value above it."""
    label, values = "", []
    for line in lines:
        # Values begin in column 16.
        name, value = line[:16].strip(), " ".join(line[16:].split())
        if name and values:
            yield label, "\n".join(values)
            values = []
        label = name or label
        values.append(value)
    yield label, "\n".join(values)


def _value(entry: Any) -> str:
    if entry is None:
        return "not set"
    if isinstance(entry, str):
        return entry
    if isinstance(entry, list) and all(isinstance(word, str) for word in entry):
        return ", ".join(entry) or "none"
    return json.dumps(entry, ensure_ascii=False)

# SPDX-License-Identifier: Apache-2.0
"""The frame of a page, its sections and its tables; every text is escaped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
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

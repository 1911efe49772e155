# SPDX-License-Identifier: Apache-2.0
"""How objects of dpjax look in a terminal and in a notebook.

The dataclasses of dpjax hold functions, and a generated `__repr__` prints their addresses.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from html import escape
from typing import Any

_REPR = reprlib.Repr()
_REPR.maxother = 400  # a mechanism within an algorithm is not cut
_REPR.maxtuple = 4

# The style is inline, because a notebook has no style sheet for it.
_CELL = 'style="text-align:left;vertical-align:top;padding-right:1.2em"'


def short(thing: Any, *names: str) -> str:
    """A line with these fields: ``Name(field=value, ...)``; long tuples are cut."""
    fields = (f"{name}={brief(getattr(thing, name))}" for name in names)
    return f"{type(thing).__name__}({', '.join(fields)})"


def veiled(thing: Any, *secrets: str) -> str:
    """The line of a named tuple, without the values that no cell of a notebook may show."""
    fields = []
    for name, value in zip(thing._fields, thing, strict=True):
        shown = "<secret>" if name in secrets else brief(value)
        fields.append(f"{name}={shown}")
    return f"{type(thing).__name__}({', '.join(fields)})"


def brief(value: Any) -> str:
    """A `repr` of limited length."""
    return _REPR.repr(value)


def rate(value: float) -> str:
    """A number per second with three digits, also of slow runs: 12,300 or 0.4."""
    return f"{float(f'{value:.3g}'):,.12g}"


def duration(seconds: float) -> str:
    """A time as terminal and page print it: ``9.5 s`` or ``2 min 3 s``."""
    minutes, rest = divmod(seconds, 60)
    if not minutes:
        return f"{rest:.1f} s"
    return f"{int(minutes):,} min {int(rest)} s"


def table(title: str, rows: Iterable[tuple[str, str]]) -> str:
    """A table of names and values, which are escaped; a line break in a value stays one."""
    lines = "".join(
        f'<tr><th scope="row" {_CELL}>{escape(name)}</th>'
        f"<td {_CELL}>{escape(value).replace(chr(10), '<br/>')}</td></tr>"
        for name, value in rows
    )
    head = f"<p><strong>{escape(title)}</strong></p>\n" if title else ""
    return f'{head}<table class="said"><tbody>{lines}</tbody></table>'


def power(number: str) -> str:
    """A printed number, such as ``1e-05``, as HTML with a power of ten."""
    mantissa, _, exponent = number.partition("e")
    if not exponent:
        return escape(mantissa)
    tens = f"10<sup>{int(exponent)}</sup>".replace("-", "\N{MINUS SIGN}")
    if mantissa == "1":
        return tens
    return f"{mantissa} × {tens}"

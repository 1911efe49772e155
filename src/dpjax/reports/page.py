# SPDX-License-Identifier: Apache-2.0
"""The parts of an HTML page that loads no other file and runs no script.

All text from a run passes through `escape`. Notes are on the left and figures on the right; on
a narrow screen and on paper they are stacked. Colors follow the light or dark mode of the
reader's browser.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from dpjax.accounting.rounding import upwards
from dpjax.reports.style import DARK, PALETTE


def page(title: str, body: Iterable[str]) -> str:
    """A whole page from parts that are HTML already; it is also well-formed XML."""
    # The page loads no file and runs no script, so that it can be mailed and opened offline; its
    # colours follow the reader's setting.
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
        f"@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n{_STYLE}</style>\n"
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


def badge(words: str, *, warns: bool) -> str:
    """A label that says whether a figure may be published."""
    return f'<p class="badge {"private" if warns else "open"}">{escape(words)}</p>'


def table(rows: Mapping[str, Any], kind: str = "facts") -> str:
    """A table of names and values, both escaped."""
    lines = (
        f'<tr><th scope="row">{escape(str(name))}</th><td>{escape(value(entry))}</td></tr>'
        for name, entry in rows.items()
    )
    return f'<table class="{kind}"><tbody>{"".join(lines)}</tbody></table>'


def grid(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table with column names and one row per compared item; all entries are escaped."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    lines = (
        f'<tr><th scope="row">{escape(first)}</th>'
        f"{''.join(f'<td>{escape(entry)}</td>' for entry in rest)}</tr>"
        for first, *rest in rows
    )
    return (
        f'<table class="grid"><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table>'
    )


def value(entry: Any) -> str:
    """A value as text: strings as they are, other values as JSON."""
    if entry is None:
        return "not set"
    if isinstance(entry, str):
        return entry
    if isinstance(entry, list) and all(isinstance(part, str) for part in entry):
        return ", ".join(entry) or "none"
    return json.dumps(entry, ensure_ascii=False)


def power(number: float) -> str:
    """A small number, such as delta, as HTML with a power of ten, rounded up."""
    mantissa, _, exponent = upwards(number, ".3g").partition("e")
    # Rounded up like every claim: a delta must not be printed below its value.
    if not exponent:
        return escape(mantissa)
    tens = f"10<sup>{int(exponent)}</sup>".replace("-", "\N{MINUS SIGN}")
    return tens if mantissa == "1" else f"{mantissa} × {tens}"


def three_digits(claim: float) -> str:
    """A claim, rounded up, with all of its three digits: ``3.00`` and not ``3``."""
    return f"{float(upwards(claim, '.3g')):#.3g}".rstrip(".")


_STYLE = """\
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
  font:1.0625rem/1.55 Charter,"Bitstream Charter","Iowan Old Style",Palatino,Cambria,Georgia,serif}
main{max-width:66rem;margin:0 auto;padding:4rem 2rem 6rem}
h1{font-size:2.3rem;line-height:1.15;font-weight:500;letter-spacing:-.012em;margin:0}
h2{font-size:1.45rem;font-weight:500;margin:4.5rem 0 0;padding-top:1.1rem;
  border-top:1px solid var(--rule)}
h3{font-size:1.09rem;line-height:1.3;font-weight:600;margin:0 0 .5rem}
p{margin:0 0 .6rem}
sup{font-size:.68em;line-height:0}
.kicker{color:var(--muted);margin-bottom:.5rem}
.verdict{font-size:1.3rem;line-height:1.45;max-width:40rem;margin:1.1rem 0 0}
.notice{border-left:3px solid var(--clay);padding-left:1rem;max-width:44rem;margin:1.4rem 0 0}
.numbers{display:flex;flex-wrap:wrap;gap:1.5rem 3rem;margin:2.4rem 0 0}
.numbers dt{color:var(--muted);font-size:.9rem}
.numbers dd{margin:0}
.numbers .big{font-size:2rem;line-height:1.25}
.numbers small{color:var(--muted);font-size:.84rem}
.row{display:grid;grid-template-columns:17rem minmax(0,1fr);gap:1rem 3rem;margin:2.8rem 0 0;
  align-items:start}
.note{font-size:.94rem;line-height:1.5;color:var(--muted)}
.note h3,.note .seen{color:var(--ink)}
.badge{display:inline-block;font:500 .74rem/1.35 system-ui,sans-serif;border-radius:.3rem;
  padding:.16rem .5rem;margin:0 0 .7rem;border:1px solid}
.open{color:var(--green);border-color:color-mix(in srgb,var(--green) 40%,transparent)}
.private{color:var(--clay);border-color:color-mix(in srgb,var(--clay) 50%,transparent);
  background:color-mix(in srgb,var(--clay) 9%,transparent)}
svg{display:block;width:100%;max-width:36rem;height:auto}
svg *{stroke-linejoin:round;stroke-linecap:butt}
svg [id*=PatchCollection]{shape-rendering:crispEdges}
svg text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif!important}
pre,td,code{font:.8rem/1.6 ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace}
pre{margin:0;white-space:pre-wrap;overflow-wrap:anywhere}
details{margin-top:1rem}
summary{cursor:pointer;color:var(--muted);font-size:.94rem;margin-bottom:.6rem}
.plate{overflow-x:auto}
.plate ul{margin:0;padding-left:1.2rem;font-size:.94rem}
table{border-collapse:collapse;width:100%}
th{font-weight:400;text-align:left;color:var(--muted);font-size:.9rem}
th,td{padding:.22rem 1.2rem .22rem 0;vertical-align:baseline;border-bottom:1px solid var(--rule);
  overflow-wrap:anywhere}
.facts th{width:11rem}
.said{margin:0 0 1.2rem;font-size:.94rem}
.said th{width:7rem}
.said td{font:inherit}
.flags{display:block;columns:2;column-gap:2.5rem}
.flags tbody{display:block}
.flags tr{display:flex;break-inside:avoid;border-bottom:1px solid var(--rule)}
.flags th,.flags td{border:0;padding-right:.6rem;font-size:.78rem}
.flags th{flex:0 0 10rem}
.grid th[scope=col]{white-space:nowrap}
.grid th[scope=row]{color:var(--ink);min-width:9rem}
.grid td{font-variant-numeric:tabular-nums;white-space:nowrap}
.aside{color:var(--muted);font-size:.94rem;max-width:46rem;margin:1rem 0 0}
h2+.row{margin-top:1.6rem}
@media (max-width:56rem){main{padding:2rem 1.1rem 4rem}
  .row{grid-template-columns:minmax(0,1fr)} h1{font-size:1.8rem} .flags{columns:1}
  }
@media print{main{max-width:none;padding:0} .row{break-inside:avoid}
  .row{grid-template-columns:minmax(0,1fr)}}
"""

# SPDX-License-Identifier: Apache-2.0
"""The HTML page of a run: verdict and privacy statement first, then the figures."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Iterator
from html import escape
from typing import Any

from dpjax._display import duration
from dpjax._files import replace
from dpjax.accounting.rounding import three_digits
from dpjax.reports.figures import PLOTS, RELEASED, Plot
from dpjax.reports.load_run import MEASURES, Missing, SavedRun, read, shown
from dpjax.reports.page import page, power, section, statement_html, table
from dpjax.reports.statement import SUPPLIED
from dpjax.reports.style import WIDTH, canvas, png, style, svg

_SEEN_BY = (
    "Figures with the badge “released” are computed from what the mechanism released and from test "
    "examples; the guarantee does not cover test examples. All other figures show private training "
    "data without noise, or with noise that anyone can subtract, so only people who may see the "
    "data may see this page. To publish, take single figures from the folder figures."
)

_PARAMETERS = (
    "Test results, and norms at the end, are at the parameters that params.msgpack holds. Training "
    "losses, norms and clipping over time are at the parameters of the steps, before any average."
)


def report(directory: str | pathlib.Path) -> pathlib.Path:
    """Writes ``report.html`` and ``figures/*.png`` into the folder of a run.

    Args:
      directory: Where `dpjax.fit` wrote ``metrics.jsonl``. It may also hold ``privacy.json``,
        ``statement.txt``, ``board.txt``, ``config.json``, ``evaluation.npz`` and
        ``diagnostics.npz``.

    Returns:
      The path of the page: one file that loads no other file.

    Privacy:
      Figures that were computed before the noise say so, in their badge and in their PNG.

    Example:
      >>> import json, tempfile
      >>> folder = pathlib.Path(tempfile.mkdtemp())
      >>> row = {"step": 1, "epsilon": 0.5, "delta": 1e-5, "accuracy": 0.9}
      >>> _ = (folder / "metrics.jsonl").write_text(json.dumps(row))
      >>> report(folder).name
      'report.html'
    """
    run = read(directory)
    folder = run.path / "figures"
    folder.mkdir(exist_ok=True)
    figures, absent = [], []
    for plot in PLOTS:
        label, path = plot.badge(run), folder / f"{plot.name}.png"
        try:
            sentence, image, picture = _drawn(plot, run, label)
        # A file may hold anything, and one figure of it must not cost the page.
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            why = str(error) if isinstance(error, Missing) else f"its data cannot be drawn: {error}"
            absent.append(f"{plot.title.lower()} ({why})")
            path.unlink(missing_ok=True)  # an earlier page may have written it, from other data
            continue
        replace(path, picture, public=label == RELEASED)
        note = (
            f"<h3>{len(figures) + 1}. {escape(plot.title)}</h3>"
            f'<p class="badge {"open" if label == RELEASED else "private"}">{escape(label)}</p>'
            f'<p>{escape(plot.words)}</p><p class="seen">{escape(sentence)}</p>'
        )
        figures.append(section(note, image, tag="figure", name=plot.name))
    if absent:
        left_out = escape("; ".join(absent))
        figures.append(f'<p class="aside" id="left-out">Left out: {left_out}.</p>')
    body = [*_header(run), *_promise(run), *figures, *_made_with(run.config or {})]
    # Figures first, page last: a page never names an image that is not there yet.
    replace(run.path / "report.html", page(_name(run), body))
    return run.path / "report.html"


def _drawn(plot: Plot, run: SavedRun, label: str) -> tuple[str, str, bytes]:
    """A sentence, the figure as SVG, and as PNG."""
    with style():
        figure = canvas(WIDTH, 2.9)
        sentence = plot.draw(figure, run)
        image = svg(figure, plot.name, f"{plot.title}. {sentence}")
        return sentence, image, png(figure, "" if label == RELEASED else label)


def _header(run: SavedRun) -> Iterator[str]:
    last, config = run.rows[-1], run.config or {}
    units = f"{run.mechanism.get('unit', 'example')}s"
    yield f'<header>\n<p class="kicker">A run of dpjax, in {escape(run.path.resolve().name)}</p>'
    yield f"<h1>{escape(_name(run))}</h1>"
    reached = [(MEASURES[name], shown(name, value)) for name, value in run.measures.items()]
    yield f'<p class="verdict">{_verdict(run, *reached[:1])}</p>'
    if run.supplied:
        yield f'<p class="notice">{SUPPLIED}</p>'
    if run.foreign:
        words = f"privacy.json is of an earlier run in this folder: {run.foreign}."
        yield f'<p class="notice">{escape(words)} The page leaves out what belongs to it.</p>'
    # The best proven bound is the claim; the small print has the others.
    (best, _), *others = run.epsilons.items()
    bounds = [f"by {best}", *(f"{three_digits(value)} by {name}" for name, value in others)]
    numbers = [
        ("epsilon", three_digits(run.epsilon), "; ".join(bounds)),
        ("delta", power(run.delta), ""),
        *((name, value, run.beside_a_guess) for name, value in reached[:1]),
        *((name, value, "") for name, value in reached[1:]),
        ("steps", f"{last['step']:,}", ""),
        (f"{units} per second", run.speed, "median, in steps alone"),
        ("training time", duration(config["seconds"]) if "seconds" in config else "", ""),
    ]
    yield '<dl class="numbers">'
    for name, number, small in numbers:
        if number:  # one that this run does not have leaves no empty tile
            words = f"<dd><small>{escape(small)}</small></dd>" if small else ""
            yield f'<div><dt>{escape(name)}</dt><dd class="big">{number}</dd>{words}</div>'
    yield "</dl>\n</header>"


def _verdict(run: SavedRun, *reached: tuple[str, str]) -> str:
    right = "".join(f", with {value} {name}" for name, value in reached)
    # An infinite epsilon means two things: known not to be private, or merely not proved.
    if not math.isinf(run.epsilon):
        return f"({three_digits(run.epsilon)}, {power(run.delta)})-differentially private{right}."
    if run.card is not None and run.card.get("not_private"):
        return f"<strong>Not</strong> differentially private: epsilon is infinite{right}."
    return f"<strong>Not proved</strong> to be differentially private{right}."


def _promise(run: SavedRun) -> Iterator[str]:
    yield "<h2>What is promised</h2>"
    missing = f"<p>{str(run.missing('statement.txt')).capitalize()}.</p>"
    note = (
        "<h3>Privacy statement</h3><p>Who is protected, how, how much, and what is not covered. "
        "Publish it with the model: statement.txt.</p>"
    )
    yield section(note, missing if run.statement is None else statement_html(run.statement))
    if run.board is not None:
        note = "<h3>Statement for a board</h3><p>The promise in plain words: board.txt.</p>"
        yield section(note, f"<pre>{escape(run.board.partition(chr(10))[2].strip())}</pre>")
    yield f'<h2>What happened</h2>\n<p class="aside">{_SEEN_BY}</p>'
    if run.evaluation is not None or run.diagnostics is not None:
        yield f'<p class="aside">{_PARAMETERS}</p>'


def _made_with(config: dict[str, Any]) -> Iterator[str]:
    if not config:
        return
    yield "<h2>What it was made with</h2>"
    nested = {name: entries for name, entries in config.items() if isinstance(entries, dict)}
    yield section("<h3>Run</h3>", table({k: v for k, v in config.items() if k not in nested}))
    for name, entries in nested.items():
        if entries:
            kind = "flags" if name == "flags" else "facts"
            yield section(f"<h3>{escape(name.capitalize())}</h3>", table(entries, kind))


def _name(run: SavedRun) -> str:
    config = run.config or {}
    model, dataset = config.get("model"), config.get("dataset")
    return f"{model} on {dataset}" if model and dataset else run.path.resolve().name

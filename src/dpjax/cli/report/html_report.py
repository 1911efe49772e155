# SPDX-License-Identifier: Apache-2.0
"""The HTML page of a run: verdict and privacy statement first, then the figures."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any, NamedTuple

from absl import app, flags

from dpjax import _display
from dpjax._files import replace
from dpjax._rounding import three_digits, upwards
from dpjax.cli.flag_checks import require
from dpjax.cli.report.figures import PLOTS, RELEASED, Plot, note_of
from dpjax.cli.report.load_run import Missing, SavedRun, read, speed_of
from dpjax.cli.report.measures import MEASURES, first_and_guess, measured, shown
from dpjax.cli.report.page import page, section, table, typeset
from dpjax.cli.report.style import WIDTH, canvas, png, style, svg
from dpjax.reports.statement import SUPPLIED, Statement

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


def run(given: flags.FlagValues, argv: Sequence[str]) -> None:
    """Writes a page into each folder that the command line names."""
    if not argv[1:]:
        raise app.UsageError("expected the folder of a run: dpjax report runs/demo")
    require("dpjax report", "matplotlib.figure")
    for folder in argv[1:]:
        try:
            print(f"To look at: {report(folder)}")
        except (ImportError, OSError, ValueError) as error:
            raise app.UsageError(f"{folder}: {error}") from error


def report(directory: str | pathlib.Path) -> pathlib.Path:
    """Writes ``report.html`` and ``figures/*.png`` into the folder of a run.

    Args:
      directory: Where `dpjax.fit` wrote ``metrics.jsonl``. It may also hold ``privacy.json``,
        ``statement.txt``, ``board.txt``, ``config.json``, ``evaluation.npz`` and
        ``diagnostics.npz``.

    Returns:
      The path of the page: one file that loads no other file.

    Privacy:
      Figures of private data without noise are marked as such in their badge and in their PNG.

    Example:
      >>> import json, tempfile
      >>> folder = pathlib.Path(tempfile.mkdtemp())
      >>> row = {"step": 1, "epsilon": 0.5, "delta": 1e-5, "accuracy": 0.9}
      >>> _ = (folder / "metrics.jsonl").write_text(json.dumps(row))
      >>> report(folder).name
      'report.html'
    """
    run = read(directory)
    (run.path / "figures").mkdir(exist_ok=True)
    sections = []  # HTML, one for each figure that could be drawn
    left_out = []  # the titles of the other figures, each with the reason
    for plot in PLOTS:
        try:
            sections.append(_write_figure(plot, run, number=len(sections) + 1))
        # A file may hold anything, and a figure that fails must not prevent the page. `Missing`,
        # a LookupError, means that this run has no such data.
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            why = f"its data cannot be drawn: {error}"
            if isinstance(error, Missing):
                why = str(error)
            left_out.append(f"{plot.title.lower()} ({why})")
            # The PNG of an earlier page may show other data.
            _file_of(plot, run).unlink(missing_ok=True)
    if left_out:
        words = escape("; ".join(left_out))
        sections.append(f'<p class="aside" id="left-out">Left out: {words}.</p>')
    body = [*_header(run), *_promise(run), *sections, *_made_with(run.config or {})]
    path = run.path / "report.html"
    replace(path, page(_name(run), body))
    return path


def _file_of(plot: Plot, run: SavedRun) -> pathlib.Path:
    return run.path / "figures" / f"{plot.name}.png"


def _write_figure(plot: Plot, run: SavedRun, number: int) -> str:
    """Writes a figure as ``figures/NAME.png``; returns its section of the page, with an SVG.

    The text of the section is title, badge (whether the figure may be published), caption, and the
    sentence that `Plot.draw` returns, with the numbers of this run.
    """
    badge = plot.badge(run)
    is_public = badge == RELEASED
    css_class = "open" if is_public else "private"
    with style():
        figure = canvas(WIDTH, height=2.9)
        sentence = plot.draw(figure, run)
        # The SVG is made first, because `png` adds a note to the figure unless it may be published.
        svg_image = svg(figure, plot.name, label=f"{plot.title}. {sentence}")
        png_image = png(figure, note_of(badge))
    # Only the owner can read a file that is not public.
    replace(_file_of(plot, run), png_image, public=is_public)
    text = (
        f"<h3>{number}. {escape(plot.title)}</h3>"
        f'<p class="badge {css_class}">{escape(badge)}</p>'
        f'<p>{escape(plot.words)}</p><p class="seen">{escape(sentence)}</p>'
    )
    return section(text, svg_image, tag="figure", name=plot.name)


class _Tile(NamedTuple):
    """A number at the head of the page."""

    name: str
    value: str  # HTML; empty where the run has no such number, which is then not shown
    small: str = ""  # the text below the number, in small type


def _header(run: SavedRun) -> Iterator[str]:
    """The head of the page, as HTML: title, verdict, notices, and the numbers of the run."""
    yield f'<header>\n<p class="kicker">A run of dpjax, in {escape(run.path.resolve().name)}</p>'
    yield f"<h1>{escape(_name(run))}</h1>"
    yield f'<p class="verdict">{_verdict(run)}</p>'
    if run.supplied:  # the caller supplied the key of the noise
        yield f'<p class="notice">{SUPPLIED}</p>'
    if run.foreign:  # why the privacy card is an earlier run's
        words = f"privacy.json is of an earlier run in this folder: {run.foreign}."
        yield f'<p class="notice">{escape(words)} The page leaves out what belongs to it.</p>'
    yield '<dl class="numbers">'
    for tile in _tiles(run):
        if tile.value:
            yield _tile_html(tile)
    yield "</dl>\n</header>"


def _tiles(run: SavedRun) -> Iterator[_Tile]:
    """The tiles for privacy, the measures of test examples, steps, speed and time."""
    # Each accounting method proves an epsilon. They are sorted, and the smallest, `run.epsilon`, is
    # what the run claims.
    (best_method, _), *others = run.epsilons.items()
    methods = [f"by {best_method}", *(f"{three_digits(value)} by {name}" for name, value in others)]
    yield _Tile("epsilon", three_digits(run.epsilon), "; ".join(methods))
    yield _Tile("delta", _delta(run))
    # A sentence that compares the first measure with that of a model that always gives one answer.
    comparison = first_and_guess(run)
    for name, value in measured(run).items():
        yield _Tile(MEASURES[name], shown(name, value), comparison)
        comparison = ""  # the tiles of the other measures have none
    yield _Tile("steps", f"{run.rows[-1]['step']:,}")
    yield _Tile(f"{run.unit}s per second", speed_of(run), "median, in steps alone")
    config = run.config or {}
    if "seconds" in config:
        yield _Tile("training time", _display.duration(config["seconds"]))


def _tile_html(tile: _Tile) -> str:
    small = f"<dd><small>{escape(tile.small)}</small></dd>" if tile.small else ""
    return f'<div><dt>{escape(tile.name)}</dt><dd class="big">{tile.value}</dd>{small}</div>'


def _delta(run: SavedRun) -> str:
    return _display.power(upwards(run.delta, ".3g"))


def _verdict(run: SavedRun) -> str:
    reached = ""
    for name, value in list(measured(run).items())[:1]:
        reached = f", with {shown(name, value)} {MEASURES[name]}"
    if not math.isinf(run.epsilon):
        return f"({three_digits(run.epsilon)}, {_delta(run)})-differentially private{reached}."
    # An infinite epsilon means two things: known not to be private, or merely not proved.
    if run.card is not None and run.card.get("not_private"):
        return f"<strong>Not</strong> differentially private: epsilon is infinite{reached}."
    return f"<strong>Not proved</strong> to be differentially private{reached}."


def _promise(run: SavedRun) -> Iterator[str]:
    """HTML of the two statements, and the heading of the figures that follow."""
    yield "<h2>What is promised</h2>"
    note = (
        "<h3>Privacy statement</h3><p>Who is protected, how, how much, and what is not covered. "
        "Publish it with the model: statement.txt.</p>"
    )
    if run.statement is None:
        # `missing` is the error for this file: the page shows its message, and does not raise it.
        yield section(note, f"<p>{str(run.missing('statement.txt')).capitalize()}.</p>")
    else:
        yield section(note, Statement(run.statement).html)
    if run.board is not None:
        # The first line is the title, which the note has.
        _, _, text = run.board.partition("\n")
        note = "<h3>Statement for a board</h3><p>The promise in plain words: board.txt.</p>"
        yield section(note, "\n".join(typeset(text)))
    yield f'<h2>What happened</h2>\n<p class="aside">{_SEEN_BY}</p>'
    if run.evaluation is not None or run.diagnostics is not None:
        yield f'<p class="aside">{_PARAMETERS}</p>'


def _made_with(config: dict[str, Any]) -> Iterator[str]:
    """HTML of `config.json`: a section for its plain facts, and one for each group of facts."""
    if not config:  # only `dpjax train` writes the file
        return
    yield "<h2>What it was made with</h2>"
    nested = {name: entries for name, entries in config.items() if isinstance(entries, dict)}
    plain = {name: entry for name, entry in config.items() if name not in nested}
    yield section("<h3>Run</h3>", table(plain))
    for name, entries in nested.items():
        if entries:
            # The flags are many: page.css sets them in two columns.
            css_class = "flags" if name == "flags" else "facts"
            yield section(f"<h3>{escape(name.capitalize())}</h3>", table(entries, css_class))


def _name(run: SavedRun) -> str:
    config = run.config or {}
    model = config.get("model")
    dataset = config.get("dataset")
    if model and dataset:
        return f"{model} on {dataset}"
    return run.path.resolve().name

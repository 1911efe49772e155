# SPDX-License-Identifier: Apache-2.0
"""The page of several runs: their curves, a table, and what all of them cost together."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from html import escape
from typing import Any, NamedTuple

import numpy as np
from absl import app, flags

from dpjax._files import replace
from dpjax.accounting.rounding import upwards
from dpjax.cli.flag_checks import require_matplotlib, writable_folder
from dpjax.cli.train.flags import idle
from dpjax.mechanism.card import protects
from dpjax.reports import page, style
from dpjax.reports.figure_output import png, svg
from dpjax.reports.figures import PRIVATE, RELEASED, SEEDED, of_what_was_released
from dpjax.reports.load_run import Missing, SavedRun, read
from dpjax.reports.statement import seed_notice

REPEATED = ("seed", "out")  # flags in which the runs of a group may differ
COLUMNS = ("runs", "test accuracy", "of", "epsilon", "delta", "time of one")


class RunGroup(NamedTuple):
    """Runs of one and the same configuration."""

    label: str
    runs: list[SavedRun]

    def finals(self) -> np.ndarray:
        """The accuracy of each run that has one, in per cent."""
        found = 100 * np.array([run.accuracy for run in self.runs])
        return found[~np.isnan(found)]

    def epsilon(self) -> float:
        """What the dearest of the runs cost, by its best proven method."""
        return max(run.epsilon for run in self.runs)


def groups_of(runs: Iterable[SavedRun]) -> list[RunGroup]:
    """Groups runs by their flags, and names each group by the flags in which groups differ."""
    found: dict[str, list[SavedRun]] = {}
    for run in runs:
        found.setdefault(experiment(run), []).append(run)
    labels = labels_of([members[0] for members in found.values()])
    return [RunGroup(*each) for each in zip(labels, found.values(), strict=True)]


def experiment(run: SavedRun) -> str:
    """A text that is equal for runs of equal flags, data, program and versions."""
    if configuration(run) is None:
        return f"folder {run.path}"
    return f"{planned(run)} {program_of(run)}"


def planned(run: SavedRun) -> str:
    """A text that is equal for runs of equal flags, data and versions."""
    return json.dumps([configuration(run), data_of(run), traced(run)], sort_keys=True)


def data_of(run: SavedRun) -> tuple[str | None, str | None]:
    """Hashes of the training and of the test part of the data, as far as they are comparable."""
    known = run.identity or {}
    there, test = known.get("data"), known.get("test data")
    # The scale of features may have noise, and a stream is hashed by some rows alone.
    derived = (configuration(run) or {}).get("features", "none") != "none"
    return (None if derived or " streamed, " in str(there) else there), test


def traced(run: SavedRun) -> dict[str, Any]:
    """Versions and settings under which a program was traced; others give other programs."""
    return (run.identity or {}).get("numerics", {})


def program_of(run: SavedRun) -> str | None:
    """The hash of loss and optimizer."""
    return (run.identity or {}).get("program", {}).get("functions")


def configuration(run: SavedRun) -> dict[str, Any] | None:
    """The flags that make two runs the same experiment."""
    if run.config is None or "flags" not in run.config:
        return None
    return {name: v for name, v in run.config["flags"].items() if name not in REPEATED}


def labels_of(runs: list[SavedRun]) -> list[str]:
    """The names of groups with these first runs: the flags and versions in which they differ."""
    settings = [shown(run) for run in runs]
    names = sorted({name for each in settings for name in each})
    varied = [n for n in names if len({json.dumps(s.get(n)) for s in settings if s}) > 1]
    labels = []
    of_runs = list(zip(runs, settings, strict=True))
    for run, each in of_runs:
        words = (f"{name}={page.value(each[name])}" for name in varied if name in each)
        labels.append(", ".join(words) or run.path.resolve().name)
    # The page may be public, and a hash confirms a guess of all the data: a folder stands for it.
    data = [found if each and any(found := data_of(run)) else None for run, each in of_runs]
    sets = [(each.get("dataset"), each.get("features")) for each in settings]
    labels = _told_apart(labels, runs, "data", sets, data)
    labels = _told_apart(
        labels, runs, "program", list(map(planned, runs)), list(map(program_of, runs))
    )
    places = [str(run.path) for run in runs]
    return [
        label if labels.count(label) == 1 else f"{label} ({place})"
        for label, place in zip(labels, places, strict=True)
    ]


def shown(run: SavedRun) -> dict[str, Any]:
    """The flags that have an effect, and the versions; empty without known flags."""
    settings = configuration(run)
    if settings is None:
        return {}
    without = {name for name, _ in idle(settings)}
    for name, instead in (("target_epsilon", "noise_multiplier"), ("epochs", "steps")):
        if settings.get(instead) is not None:
            without.add(name)
    known = {**settings, **traced(run)}
    return {n: value for n, value in known.items() if n not in without and value is not None}


def _told_apart(
    labels: list[str], runs: list[SavedRun], what: str, scopes: Sequence[Any], values: Sequence[Any]
) -> list[str]:
    """Labels, with the first folder of its value where groups of one scope have several values."""
    found = []
    for label, scope, value in zip(labels, scopes, values, strict=True):
        of_scope = {v for s, v in zip(scopes, values, strict=True) if s == scope and v is not None}
        words = f", {what} as in {runs[values.index(value)].path}"
        found.append(label + words * (value is not None and len(of_scope) > 1))
    return found


def curve(group: RunGroup) -> tuple[np.ndarray, np.ndarray]:
    """Epsilon at each evaluated step, and the accuracies of all runs there, in per cent.

    A step is left out where any of its runs has no finite epsilon: it has no place on that axis.
    """
    if any(run.series("accuracy").shape[1] > 1 for run in group.runs):
        raise Missing("its accuracy is not one number")
    series = [
        [run.series(name)[:, 0] for name in ("step", "epsilon", "accuracy")] for run in group.runs
    ]
    steps = np.unique(np.concatenate([of for of, _, _ in series]))
    epsilon = np.zeros(len(steps))
    accuracy = np.full((len(steps), len(series)), np.nan)
    for column, (of, spent, right) in enumerate(series):
        at = np.searchsorted(steps, of)
        epsilon[at] = np.maximum(epsilon[at], spent)  # never shown for less than it cost; NaN stays
        accuracy[at, column] = 100 * right
    finite = np.isfinite(epsilon)
    if not finite.any():
        raise Missing("at no step has every run a finite epsilon")
    return epsilon[finite], accuracy[finite]


def draw(groups: list[RunGroup], badge: str) -> tuple[str, bytes, list[str]]:
    """The curves as SVG and PNG, and why groups are missing from them."""
    absent = []
    with style.style():
        figure = style.canvas(height=3.6 + 0.16 * len(groups))
        # A run without rows states nothing.
        stated = " or".join(sorted({run.stated for group in groups for run in group.runs} - {""}))
        units = sorted({run.mechanism.get("unit", "") for group in groups for run in group.runs})
        of_one = f" for one {' or one '.join(filter(None, units))}" if len(units) > 1 else ""
        axes = style.panel(figure, f"epsilon spent{of_one}{stated}", "test accuracy (%)")
        for number, group in enumerate(groups):
            round_of, color = divmod(number, len(style.SERIES))
            look = {**style.DOTS, "linestyle": ("-", "--", ":", "-.")[round_of % 4]}
            try:
                # The figure has room for the beginning of a label; the table has all of it.
                label = group.label if len(group.label) <= 90 else f"{group.label[:89]}…"
                # Matplotlib leaves a label with an underscore in front out of its legend.
                label = f" {label}" if label.startswith("_") else label
                style.band(axes, *curve(group), style.SERIES[color], label, **look)
            except Missing as reason:
                absent.append(f"{group.label} ({reason})")
        if axes.lines:
            legend = figure.legend(loc="outside lower left", frameon=False, labelcolor="linecolor")
            for words in legend.get_texts():
                words.set_parse_math(False)
        image = svg(figure, "compared", "Test accuracy against epsilon, a line for each group")
        return image, png(figure, "" if badge == RELEASED else badge), absent


def protected(runs: Iterable[SavedRun]) -> list[str]:
    """Whose data these runs protect, as far as their folders say it."""
    return sorted({protects(run.mechanism) for run in runs if run.mechanism})


def line(group: RunGroup) -> list[str]:
    """A group as a line of the table."""
    finals, count = group.finals(), len(group.runs)
    spread = f" ± {finals.std(ddof=1):.2f}" if len(finals) > 1 else ""
    seconds = [
        run.config["seconds"] for run in group.runs if run.config and "seconds" in run.config
    ]
    return [
        group.label,
        f"{finals.mean():.2f} %{spread}" if len(finals) else "none",
        _runs(count),
        upwards(group.epsilon(), ".3g"),
        upwards(group.runs[0].delta, ".6g"),
        f"{np.mean(seconds):.1f} s" if seconds else "not written",
    ]


def _runs(count: int) -> str:
    return f"{count} run{'s' * (count > 1)}"


def compare(
    directories: Iterable[str | pathlib.Path],
    out: str | pathlib.Path,
    cost: str = "",
    badge: str = RELEASED,
) -> pathlib.Path:
    """Writes the page, and its figure as a PNG of the same name; returns the page's path.

    ``cost`` says what the runs cost together, if it is known better than from the runs alone, and
    ``badge`` why the page may not be released, if the runs alone do not say it.
    """
    require_matplotlib()
    out = pathlib.Path(out)
    if out.suffix.lower() == ".png":
        raise app.UsageError(
            f"--out={out}: expected the name of the page, such as {out.with_suffix('.html')}; its "
            "figure is written beside it, as a PNG of the same name, and would replace it."
        )
    for path in (out, out.parent / f"{out.stem}.png"):
        if path.is_dir():
            raise app.UsageError(
                f"--out={out}: {path} is a folder; expected the name of the page, with a place for "
                f"its figure beside it, such as {path / 'comparison.html'}."
            )
    writable_folder(out, out.parent)
    runs, unread = [], []
    # One folder under two names, as a1 and a1/, is one run.
    for directory in {pathlib.Path(each).resolve(): each for each in directories}.values():
        try:
            runs.append(read(directory, arrays=False))
        except (OSError, ValueError) as error:
            unread.append(f"{directory} ({error})")
    if not runs:
        raise app.UsageError("none of these folders can be read: " + "; ".join(unread))
    for words in unread:
        print(f"Could not be read, and is not on the page: {words}", flush=True)
    groups = groups_of(runs)
    badges = {badge, *map(of_what_was_released, runs)}
    # The figure shows all runs, so the strictest of their badges holds for it.
    badge = next(each for each in (PRIVATE, SEEDED, badge) if each in badges)
    image, picture, absent = draw(groups, badge)
    replace(out.with_suffix(".png"), picture, public=badge == RELEASED)
    notices = [
        cost or price(runs),
        *shorter(runs),
        *seeds(runs),
        *(f"Could not be read: {words}" for words in unread),
    ]
    if unread:
        notices[0] += " What could not be read is not in these numbers."
    body = body_of(groups, image, absent, badge, notices)
    replace(out, page.page("Runs compared", body), public=badge == RELEASED)
    return out


def seeds(runs: list[SavedRun]) -> Iterator[str]:
    """Which runs are not for release although they had noise."""
    named: dict[str, list[str]] = {}
    for run in runs:
        if run.seed is not None:
            named.setdefault(seed_notice(run.seed), []).append(run.path.resolve().name)
    yield from (f"{', '.join(names)}: {words}" for words, names in named.items())


def shorter(runs: list[SavedRun]) -> Iterator[str]:
    """Which runs took fewer steps than planned: means hold them like the others."""
    found = []
    for run in runs:
        done = run.rows[-1]["step"]
        planned = sum(steps for _, steps in run.mechanism.get("multiplier_and_steps", ()))
        if done < planned:
            found.append(f"{run.path.resolve().name} ({done:,} of {planned:,})")
    if found:
        yield f"Fewer steps than planned ran, and means hold these runs too: {', '.join(found)}."


def price(runs: list[SavedRun]) -> str:
    """What all runs cost together, by adding up, or why their costs do not add."""
    chosen = (
        "To choose among runs by looking at private data, be it a part held out of them, has a "
        "cost of its own, which no number here includes. "
    )
    if why := apart(runs):
        return f"{chosen}Their costs do not add: {why}."
    epsilon = sum(run.epsilon for run in runs)
    if any(run.not_private for run in runs):
        return "One of these runs is not private, so neither are all of them together."
    if math.isinf(epsilon):
        return (
            "One of these runs is not proved to be private, so nothing is proved of all of them "
            "together."
        )
    delta = float(sum(Decimal(repr(run.delta)) for run in runs))  # three times 1e-5 is 3e-5
    return (
        f"{chosen}All {len(runs)} together, trained on the same data for the same neighbours, cost "
        f"at most epsilon {upwards(epsilon, '.3g')} at delta {upwards(delta, '.3g')}."
    )


def apart(runs: list[SavedRun]) -> str:
    """Why the costs of runs do not add, or an empty text."""
    if len(kinds := protected(runs)) > 1:
        return f"these runs protect {' and '.join(kinds)}"
    trained, tested = map(set, zip(*map(data_of, runs), strict=True))
    # The test part tells where the training part is not comparable, as of features.
    differ = len(trained - {None}) > 1 or (None in trained and len(tested - {None}) > 1)
    return "these runs were trained on different data" if differ else ""


def body_of(
    groups: list[RunGroup], image: str, absent: list[str], words: str, notices: list[str]
) -> Iterator[str]:
    """The page's body."""
    count = sum(len(group.runs) for group in groups)
    yield f'<header><p class="kicker">{_runs(count)} of dpjax</p><h1>Runs compared</h1>'
    yield (
        '<p class="notice">Each epsilon below is the price of one run alone. '
        f"{escape(notices[0]).replace(chr(10), '<br>')}</p>"
    )
    yield from (f'<p class="notice">{escape(notice)}</p>' for notice in notices[1:])
    yield "</header>"
    yield "<h2>Accuracy and its price</h2>"
    note = (
        f"<h3>Test accuracy against epsilon</h3>{page.badge(words, warns=words != RELEASED)}"
        "<p>A line is the mean of runs that differ only in their seed, its band reaches from the "
        "worst to the best of them. Further up for less epsilon is better.</p>"
    )
    yield page.section(note, image, tag="figure", name="compared")
    note = (
        "<h3>At the end</h3><p>Accuracy as mean and standard deviation over runs. Epsilon is the "
        "smallest that an accountant proves, of the dearest run; curves have the one that the run "
        "was logged with.</p>"
    )
    kinds = [", ".join(protected(group.runs)) or "not written" for group in groups]
    lines = list(map(line, groups))
    if len(set(kinds)) > 1:
        lines = [[*each, kind] for each, kind in zip(lines, kinds, strict=True)]
    names = (*COLUMNS, "protects")[: len(lines[0])]
    yield page.section(note, page.grid(names, lines))
    if absent:
        yield f'<p class="aside" id="left-out">Not drawn: {escape("; ".join(absent))}.</p>'


def run(given: flags.FlagValues, argv: Sequence[str]) -> None:
    """Writes the page of the runs that the command line names."""
    if not argv[1:]:
        raise app.UsageError("expected folders of runs: dpjax compare runs/a runs/b ...")
    out = compare(argv[1:], given.out)
    print(f"Wrote {out} and {out.with_suffix('.png')}")
    print("To choose among these runs by private data has a cost that their epsilons leave out.")

# SPDX-License-Identifier: Apache-2.0
"""The page of several runs: a table, two plots, and what all of them cost together.

Runs with equal flags but for seed and folder are one group: a line of the table, and in the plots
a mean with its range.
"""

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
from dpjax.cli.flag_checks import require_matplotlib
from dpjax.mechanism.card import protects
from dpjax.reports import page, style
from dpjax.reports.figure_output import png, svg
from dpjax.reports.figures import RELEASED, of_what_was_released
from dpjax.reports.load_run import Missing, SavedRun, read

COLUMNS = ("runs", "test accuracy", "of", "steps", "epsilon", "delta", "time of one", "protects")


class RunGroup(NamedTuple):
    """Runs of one and the same configuration."""

    label: str
    runs: list[SavedRun]

    def finals(self) -> np.ndarray:
        """The last accuracy of each run that has one, in per cent."""
        accuracies = 100 * np.array([run.accuracy for run in self.runs])
        return accuracies[~np.isnan(accuracies)]

    def epsilon(self) -> float:
        """What the dearest of the runs cost, by its best proven method."""
        return max(run.epsilon for run in self.runs)


def run(given: flags.FlagValues, argv: Sequence[str]) -> None:
    """Writes the page of the runs that the command line names."""
    if not argv[1:]:
        raise app.UsageError("expected folders of runs: dpjax compare runs/a runs/b ...")
    out = compare(argv[1:], given.out)
    print(f"Wrote {out} and {out.with_suffix('.png')}")
    print("To choose among these runs by private data has a cost that their epsilons leave out.")


def compare(
    folders: Iterable[str | pathlib.Path],
    out: str | pathlib.Path,
    cost: str = "",
    badge: str = RELEASED,
) -> pathlib.Path:
    """Writes the page, and its figure as a PNG of the same name; returns the page's path.

    ``cost`` says what the runs cost together, if it is known better than from the runs alone, and
    ``badge`` why the page may not be released, if the runs alone do not say it.
    """
    require_matplotlib()
    out, runs = pathlib.Path(out), []
    # One folder under two names, as a1 and a1/, is one run.
    for folder in {pathlib.Path(folder).resolve(): folder for folder in folders}.values():
        try:
            runs.append(read(folder, arrays=False))
        except (OSError, ValueError) as error:
            print(f"Not on the page: {folder} ({error})", flush=True)
    if not runs:
        raise app.UsageError("none of these folders can be read.")
    groups = groups_of(runs)
    # The figure shows all runs, so a badge of one of them holds for it.
    badges = [badge, *map(of_what_was_released, runs)]
    badge = next((words for words in badges if words != RELEASED), RELEASED)
    image, picture, absent = draw(groups, badge)
    out.parent.mkdir(parents=True, exist_ok=True)
    body = body_of(groups, image, absent, badge, cost or price(runs))
    replace(out.with_suffix(".png"), picture, public=badge == RELEASED)
    replace(out.with_suffix(".html"), page.page("Runs compared", body), public=badge == RELEASED)
    return out.with_suffix(".html")


def groups_of(runs: Iterable[SavedRun]) -> list[RunGroup]:
    """Groups runs by their flags, and names each group by the flags in which groups differ."""
    members: dict[str, list[SavedRun]] = {}
    for run in runs:
        # Without flags nothing says that two runs are repeats.
        key = json.dumps(flags_of(run), sort_keys=True) if flags_of(run) else str(run.path)
        members.setdefault(key, []).append(run)
    settings = [flags_of(group[0]) for group in members.values()]
    names = sorted({name for known in settings for name in known})
    varied = [n for n in names if len({json.dumps(s.get(n)) for s in settings if s}) > 1]
    groups: list[RunGroup] = []
    for known, group in zip(settings, members.values(), strict=True):
        words = ", ".join(f"{name}={page.value(known[name])}" for name in varied if name in known)
        label = words or group[0].path.resolve().name
        if label in {other.label for other in groups}:
            label = f"{label} ({group[0].path})"
        groups.append(RunGroup(label, group))
    return groups


def flags_of(run: SavedRun) -> dict[str, Any]:
    """The flags that make two runs the same experiment: all but seed and folder."""
    known = (run.config or {}).get("flags", {})
    return {name: value for name, value in known.items() if name not in ("seed", "out")}


def curve(group: RunGroup, axis: str) -> tuple[np.ndarray, np.ndarray]:
    """Epsilon or step at each evaluation, and the accuracies of all runs there, in per cent.

    A step is left out where any of its runs has no finite epsilon: it has no place on that axis.
    """
    if any(run.series("accuracy").shape[1] > 1 for run in group.runs):
        raise Missing("its accuracy is not one number")
    series = [[run.series(name)[:, 0] for name in ("step", axis, "accuracy")] for run in group.runs]
    steps = np.unique(np.concatenate([at for at, _, _ in series]))
    places = np.zeros(len(steps))
    accuracy = np.full((len(steps), len(series)), np.nan)
    for column, (at, place, right) in enumerate(series):
        rows = np.searchsorted(steps, at)
        places[rows] = np.maximum(places[rows], place)  # never shown for less than it cost
        accuracy[rows, column] = 100 * right
    finite = np.isfinite(places)
    if not finite.any():
        raise Missing("at no step has every run a finite epsilon")
    return places[finite], accuracy[finite]


def draw(groups: list[RunGroup], badge: str) -> tuple[str, bytes, list[str]]:
    """Accuracy against epsilon and against steps, as SVG and PNG, and why groups are missing."""
    absent = []
    stated = " or".join(sorted({run.stated for group in groups for run in group.runs} - {""}))
    with style.style():
        figure = style.canvas(height=3.6 + 0.16 * len(groups))
        spent, taken = figure.subplots(1, 2, sharey=True)
        spent.set_xlabel(f"epsilon spent{stated}", parse_math=False)
        spent.set_ylabel("test accuracy (%)", parse_math=False)
        taken.set_xlabel("steps")
        for number, group in enumerate(groups):
            round_of, color = divmod(number, len(style.SERIES))
            look = {**style.DOTS, "linestyle": ("-", "--", ":", "-.")[round_of % 4]}
            # The figure has room for the beginning of a label; the table has all of it. Matplotlib
            # leaves a label with an underscore in front out of its legend.
            label = f" {group.label[:89]}…" if len(group.label) > 90 else f" {group.label}"
            try:
                style.band(spent, *curve(group, "epsilon"), style.SERIES[color], label, **look)
                style.band(taken, *curve(group, "step"), style.SERIES[color], **look)
            except Missing as reason:
                absent.append(f"{group.label} ({reason})")
        if spent.lines:
            handles, labels = spent.get_legend_handles_labels()
            where = {"loc": "outside lower left", "frameon": False, "labelcolor": "linecolor"}
            for words in figure.legend(handles, labels, **where).get_texts():
                words.set_parse_math(False)
        image = svg(figure, "compared", "Test accuracy against epsilon and against steps")
        return image, png(figure, "" if badge == RELEASED else badge), absent


def line(group: RunGroup) -> list[str]:
    """A group as a line of the table."""
    finals, count = group.finals(), len(group.runs)
    spread = f" ± {finals.std(ddof=1):.2f}" if len(finals) > 1 else ""
    configs = [run.config for run in group.runs if run.config and "seconds" in run.config]
    # Fewer steps than others of the group is shown: the mean holds such a run too.
    steps = sorted({int(run.rows[-1]["step"]) for run in group.runs})
    return [
        group.label,
        f"{finals.mean():.2f} %{spread}" if len(finals) else "none",
        f"{count} run{'s' * (count > 1)}",
        f"{steps[0]:,}" + f" to {steps[-1]:,}" * (len(steps) > 1),
        upwards(group.epsilon(), ".3g"),
        upwards(group.runs[0].delta, ".6g"),
        f"{np.mean([config['seconds'] for config in configs]):.1f} s" if configs else "not written",
        ", ".join(protected(group.runs)) or "not written",
    ]


def protected(runs: Iterable[SavedRun]) -> list[str]:
    """Whose data these runs protect, as far as their folders say it."""
    return sorted({protects(run.mechanism) for run in runs if run.mechanism})


def price(runs: list[SavedRun]) -> str:
    """What all runs cost together, by adding up, or why their costs do not add."""
    chosen = (
        "To choose among runs by looking at private data, be it a part held out of them, has a "
        "cost of its own, which no number here includes. "
    )
    if len(kinds := protected(runs)) > 1:
        return f"{chosen}Their costs do not add: these runs protect {' and '.join(kinds)}."
    epsilon = sum(run.epsilon for run in runs)
    delta = float(sum(Decimal(repr(run.delta)) for run in runs))  # three times 1e-5 is 3e-5
    if math.isinf(epsilon):
        return "One of these runs has no proven epsilon, so neither have all of them together."
    return (
        f"{chosen}All {len(runs)} together cost at most epsilon {upwards(epsilon, '.3g')} at delta "
        f"{upwards(delta, '.3g')}."
    )


def body_of(
    groups: list[RunGroup], image: str, absent: list[str], badge: str, cost: str
) -> Iterator[str]:
    """The page's body."""
    yield '<header><p class="kicker">dpjax</p><h1>Runs compared</h1><p class="notice">'
    yield "Each epsilon below is the price of one run alone. "
    yield f"{escape(cost).replace(chr(10), '<br/>')}</p></header>"
    yield "<h2>Accuracy and its price</h2>"
    note = (
        f"<h3>Test accuracy</h3>{page.badge(badge, warns=badge != RELEASED)}"
        "<p>A line is the mean of runs that differ only in their seed, its band reaches from the "
        "worst to the best of them. Further up for less epsilon is better.</p>"
    )
    yield page.section(note, image, tag="figure", name="compared")
    note = (
        "<h3>At the end</h3><p>Accuracy as mean and standard deviation over runs. Epsilon is the "
        "smallest that an accountant proves, of the dearest run; curves have the one that the run "
        "was logged with.</p>"
    )
    yield page.section(note, page.grid(COLUMNS, map(line, groups)))
    if absent:
        yield f'<p class="aside" id="left-out">Not drawn: {escape("; ".join(absent))}.</p>'

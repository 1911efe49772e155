# SPDX-License-Identifier: Apache-2.0
"""Several runs: a table, two plots, and the cost of all of them together.

Runs whose flags differ only in seed and folder are a group: a line of the table, a curve of a plot.
A measure is a metric of the test examples, such as the accuracy.
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
from absl import app, flags

from dpjax._display import duration
from dpjax._files import replace
from dpjax._rounding import three_digits, upwards
from dpjax.cli.flag_checks import require
from dpjax.cli.report import style
from dpjax.cli.report.figures import RELEASED, note_of, of_what_was_released
from dpjax.cli.report.load_run import Missing, SavedRun, protects, read, stated_at
from dpjax.cli.report.measures import (
    MEASURES,
    PER_CENT,
    answer_of_guess,
    guessed,
    measured,
    shown,
)

COLUMNS = ("of", "steps", "epsilon", "delta", "time of one", "protects")


_LONGEST = 40  # characters of the flags that name a row; the folder names other rows


class RunGroup(NamedTuple):
    """Runs with equal flags but for seed and folder."""

    label: str
    runs: list[SavedRun]


def run(given: flags.FlagValues, argv: Sequence[str]) -> None:
    """Prints the table of the runs that the command line names, and draws their plots."""
    require("dpjax compare", "matplotlib.figure")  # an optional package, which draws the plots
    runs = []
    # One folder under two names, as a1 and a1/, is one run.
    folders = {pathlib.Path(folder).resolve(): folder for folder in argv[1:]}
    for folder in folders.values():
        try:
            runs.append(read(folder))
        except (OSError, ValueError) as error:
            print(f"Left out: {folder} ({error})")
    if not runs:
        raise app.UsageError("expected folders of runs: dpjax compare runs/a runs/b ...")
    print(f"{table(groups_of(runs))}\n{guess(runs)}")
    print(f"Each epsilon is the price of one run alone. {price(runs)}")
    out = pathlib.Path(given.out)
    if out.is_dir() or not out.suffix:  # a folder, which may not exist yet
        out = out / "comparison.png"
    plot(runs, out)
    print(f"Wrote {out}")


def plot(runs: list[SavedRun], out: pathlib.Path, badge: str = RELEASED) -> None:
    """Writes the plots; ``badge`` is a reason against their release, in addition to the runs'.

    A badge is `RELEASED`, or the reason why a picture must not be published.
    """
    # The plots show all runs, so a badge of one of them holds for all.
    for words in map(of_what_was_released, runs):
        if badge == RELEASED:
            badge = words
    out.parent.mkdir(parents=True, exist_ok=True)
    replace(out, draw(groups_of(runs), badge), public=badge == RELEASED)


def groups_of(runs: Iterable[SavedRun]) -> list[RunGroup]:
    """Groups runs by their flags, and names each group by the flags in which groups differ.

    A group without such flags, or with too many for a line, has the name of its first folder.
    """
    runs_by_flags: dict[str, list[SavedRun]] = {}
    for run in runs:
        key = str(run.path)  # a run without known flags does not repeat another
        if flags_of(run):
            key = json.dumps(flags_of(run), sort_keys=True)
        runs_by_flags.setdefault(key, []).append(run)
    settings = [flags_of(members[0]) for members in runs_by_flags.values()]
    varied = _varied(settings)
    groups = []
    for setting, members in zip(settings, runs_by_flags.values(), strict=True):
        label = ", ".join(f"{name}={setting[name]}" for name in varied if name in setting)
        if not label or len(label) > _LONGEST:
            label = _short_name(members)
        groups.append(RunGroup(label, members))
    return groups


def _varied(settings: Sequence[dict[str, Any]]) -> list[str]:
    """The flags that do not have one value in all settings; an empty setting is unknown."""
    known = [setting for setting in settings if setting]
    values: dict[str, set[str]] = {}
    for name in {name for setting in known for name in setting}:
        values[name] = {json.dumps(setting.get(name)) for setting in known}
    return sorted(name for name, texts in values.items() if len(texts) > 1)


def _short_name(group: Sequence[SavedRun]) -> str:
    """The folder of the first run of a group, and how many others the group has."""
    name = str(group[0].path)
    if len(group) > 1:
        name += f" and {len(group) - 1} more"
    return name


def flags_of(run: SavedRun) -> dict[str, Any]:
    """The flags that make two runs the same experiment: all but seed and folder."""
    values = dict((run.config or {}).get("flags", {}))
    values.pop("seed", None)
    values.pop("out", None)
    return values


def measures_of(runs: Iterable[SavedRun]) -> list[str]:
    """The measures that any of the runs has; accuracy if none has one."""
    names = {name for run in runs for name in measured(run)}
    return [name for name in MEASURES if name in names] or ["accuracy"]


def guess(runs: Sequence[SavedRun]) -> str:
    """A line with the measures of a constant guess on the test examples of all these runs.

    It is empty if no run has its test labels.
    """
    measures = measures_of(runs)
    guesses = [guessed(run) for run in runs]  # of each run, the value of each measure by its name
    if not any(guesses):
        return ""
    words = []
    for name in measures:
        values = {guess_of_run.get(name, math.nan) for guess_of_run in guesses}
        # The values differ if runs have other test examples, or if one has no test labels, which is
        # a NaN here. Then no value is that of all runs.
        if len(values) == 1:
            words.append(f"{MEASURES[name]} {shown(name, values.pop())}")
    return f"Always guessing the {answer_of_guess(measures[0])}: {', '.join(words)}.\n"


def curve(group: RunGroup, along: str, measure: str) -> tuple[np.ndarray, np.ndarray]:
    """The x of each step at which a run was evaluated, and the values of all runs there.

    ``along``, ``"epsilon"`` or ``"step"``, is the quantity along x. The x are ``[steps]``, and the
    values of the measure ``[steps, runs]``, with NaN for a run without an evaluation at that step.
    Steps at which epsilon is infinite for any run are left out.
    """
    steps = np.unique(np.concatenate([run.steps for run in group.runs]))
    x = np.zeros(len(steps))
    values = np.full((len(steps), len(group.runs)), np.nan)
    for column, run in enumerate(group.runs):
        places = np.searchsorted(steps, run.steps)  # of the run's steps in `steps`
        # Each series is [evaluations, 1], a number per evaluation. The largest epsilon of a step
        # counts, so no run is shown for less than it cost.
        x[places] = np.maximum(x[places], run.series(along)[:, 0])
        values[places, column] = run.series(measure)[:, 0]
    if measure in PER_CENT:
        values *= 100
    # `series` gives NaN for an infinite epsilon, and `np.maximum` keeps a NaN.
    finite = np.isfinite(x)
    if not finite.any():
        raise Missing("at no step has every run a finite epsilon")
    return x[finite], values[finite]


def draw(groups: list[RunGroup], badge: str) -> bytes:
    """The first measure of the runs against epsilon and against steps, as PNG.

    ``badge`` is drawn into the picture, unless it is `RELEASED`.
    """
    runs = [run for group in groups for run in group.runs]
    # Each of these texts begins with a space: " at delta 1e-5, by pld".
    delta_and_method = " or".join(sorted({stated_at(run) for run in runs} - {""}))
    measure = measures_of(runs)[0]
    unit = " (%)" if measure in PER_CENT else ""
    with style.style():
        # Each group has a line of the legend below the axes.
        figure = style.canvas(height=3.6 + 0.16 * len(groups))
        by_epsilon, by_step = figure.subplots(1, 2, sharey=True)
        by_epsilon.set(
            xlabel=f"epsilon spent{delta_and_method}", ylabel=f"{MEASURES[measure]}{unit}"
        )
        by_step.set_xlabel("steps")
        for number, group in enumerate(groups):
            color = style.SERIES[number % len(style.SERIES)]
            _draw_group(by_epsilon, by_step, group, measure, color)
        if by_epsilon.lines:  # a group that was drawn has a label there
            look = {"loc": "outside lower left", "frameon": False, "labelcolor": "linecolor"}
            figure.legend(*by_epsilon.get_legend_handles_labels(), **look)
        return style.png(figure, note_of(badge))


def _draw_group(by_epsilon: Any, by_step: Any, group: RunGroup, measure: str, color: str) -> None:
    """Draws the curves of a group on both axes; prints why, if the group is not drawn.

    A curve is the mean of the group's runs, with a band over their range. Runs without an epsilon,
    such as those without noise, have no curve by epsilon: a dashed line at their last mean is there
    instead, to compare with.
    """
    # The space is there because no legend shows a label that begins with an underscore.
    label = f" {group.label}"
    end = None  # the last mean, once a curve is drawn
    try:
        # The curve by steps is first, because runs without an epsilon need its `end`. It has no
        # label, because the legend is made of the other axes.
        for axes, along, name in ((by_step, "step", ""), (by_epsilon, "epsilon", label)):
            x, values = curve(group, along, measure)  # [steps] and [steps, runs]
            style.band(axes, x, values, color, name, **style.DOTS)
            end = np.nanmean(values[-1])
            axes.scatter(x[-1], end, s=36, color=style.PALETTE[color])  # a larger dot at the end
    except Missing as reason:
        if end is None:
            print(f"Not drawn: {group.label} ({reason})")
        else:
            by_epsilon.axhline(end, label=label, color=style.PALETTE[color], linestyle="--")


def table(groups: list[RunGroup]) -> str:
    """A line for each group, and the names of the columns above them."""
    measures = measures_of(run for group in groups for run in group.runs)
    rows = [["runs", *[MEASURES[name] for name in measures], *COLUMNS]]
    rows += [line(group, measures) for group in groups]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = map(str.ljust, row, widths)
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def line(group: RunGroup, measures: Sequence[str] = ("accuracy",)) -> list[str]:
    """A group as a line of the table."""
    count = len(group.runs)
    # The mean also holds a run that stopped early, so the range of steps is shown.
    steps = sorted({int(run.rows[-1]["step"]) for run in group.runs})
    taken = f"{steps[0]:,}"
    if len(steps) > 1:
        taken += f" to {steps[-1]:,}"
    seconds = float(np.mean([(run.config or {}).get("seconds", np.nan) for run in group.runs]))
    return [
        group.label,
        *[mean(group, measure) for measure in measures],
        "1 run" if count == 1 else f"{count} runs",
        taken,
        three_digits(max(run.epsilon for run in group.runs)),
        upwards(group.runs[0].delta, ".3g"),
        "not written" if np.isnan(seconds) else duration(seconds),
        ", ".join(protected(group.runs)) or "not written",
    ]


def mean(group: RunGroup, measure: str) -> str:
    """The mean of the last measurements of the runs, and their standard deviation."""
    ends = [measured(run) for run in group.runs]
    finals = np.array([end[measure] for end in ends if measure in end])
    if not len(finals):
        return "none"
    words = shown(measure, finals.mean(), 2)
    if len(finals) > 1:
        words += f" ± {shown(measure, finals.std(ddof=1), 2).removesuffix(' %')}"
    return words


def protected(runs: Iterable[SavedRun]) -> list[str]:
    """The neighbours for which the runs' guarantees hold, where known."""
    return sorted({protects(run.mechanism) for run in runs if run.mechanism})


def price(runs: list[SavedRun]) -> str:
    """The cost of all runs together, by adding up, or why their costs do not add."""
    caveat = (
        "To choose among runs by private data, also by a part held out of them, has a cost of its "
        "own, which no number here includes. "
    )
    kinds = protected(runs)  # the kinds of neighbours, in words
    if len(kinds) > 1:
        return f"{caveat}Their costs do not add: these runs protect {' and '.join(kinds)}."
    epsilon = sum(run.epsilon for run in runs)
    # Deltas are added as decimals: in floats 1e-5 three times is more than 3e-5, and the price is
    # rounded up.
    delta = float(sum(Decimal(repr(run.delta)) for run in runs))
    if math.isinf(epsilon):
        return "One of these runs has no proven epsilon, so neither have all of them together."
    together = f"All {len(runs)} together cost" if len(runs) > 1 else "It costs"
    return (
        f"{caveat}{together} at most epsilon {three_digits(epsilon)} at delta "
        f"{upwards(delta, '.3g')}."
    )

# SPDX-License-Identifier: Apache-2.0
"""The gallery: every figure of a run, a short function each, and the table of their badges.

A figure is a function ``(figure, run) -> sentence``, or raises `Missing`; its docstring is title
and caption. Only `PLOTS` holds the badge, so no function that draws can decide it.

A series of a run is ``[evaluations, width]``: each evaluation has one number, or one for each group
of parameters with a clipping bound of its own. `band` draws the mean of each row as a line, and its
range as a band.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dpjax import metrics
from dpjax.cli.report.load_run import Missing, SavedRun, stated_at
from dpjax.cli.report.measures import first_and_guess, guessed
from dpjax.cli.report.style import DOTS, PALETTE, WIDTH, band, legend, panel
from dpjax.schedules import first_steps

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_CLASSES = 16  # with more classes, the numbers in cells and on axes are too small to read
# Histograms, one for each group of parameters: more are too small to read.
_MOST_GROUPS = 12
_COLUMNS = 3  # of histograms, which is all that fits into the column of the page
_LONGEST = 26  # characters of a title above a histogram
_BLUE = PALETTE["blue"]
_CLAY = PALETTE["clay"]
_MUTED = PALETTE["muted"]
_DASHED: dict[str, Any] = {"linewidth": 1.2, "linestyle": "--", "label": "bound"}
_LABEL: dict[str, Any] = {"fontsize": 8.5, "color": _MUTED}


def accuracy(figure: Figure, run: SavedRun) -> str:
    """Test accuracy against epsilon.

    A dot is an evaluation; the epsilon spent grows to the right. Where the curve is flat, more
    epsilon did not improve accuracy. The dashed line is always guessing the most frequent class.
    """
    y = 100 * run.series("accuracy")
    guess = 100 * guessed(run).get("accuracy", np.nan)
    _with_guess(figure, run, y, "test accuracy (%)", guess)
    best = f"{_last_mean(y, '{:.1f} %')} at the end, {np.nanmax(_group_means(y)):.1f} % at best."
    return f"{best}{_words_on_groups(y)} {first_and_guess(run)}".rstrip()


def error(figure: Figure, run: SavedRun) -> str:
    """Test error against epsilon.

    The root of the mean squared error (RMSE) on test examples, in units of the target. The dashed
    line is always guessing the mean of the test targets.
    """
    y = run.series("rmse")
    _with_guess(figure, run, y, "RMSE of test examples", guessed(run).get("rmse", np.nan))
    return f"{_last_mean(y)} at the end, {np.nanmin(_group_means(y)):.3g} at best."


def test_loss(figure: Figure, run: SavedRun) -> str:
    """Test loss against epsilon.

    The loss on test examples also depends on how confident the model is. If it rises while
    accuracy stays, the model becomes overconfident.
    """
    is_classifier = any("nll" in row for row in run.rows)
    y = run.series("nll" if is_classifier else "test_loss")
    against_epsilon(figure.subplots(), run, y, "mean loss of test examples", "blue")
    best = np.nanmin(_group_means(y))
    return f"{_last_mean(y)} at the end, {best:.3g} at best.{_words_on_groups(y)}"


def training_loss(figure: Figure, run: SavedRun) -> str:
    """Training loss against epsilon.

    The mean loss of the examples that were drawn since the previous evaluation. A value far below
    the test loss means that the model overfits.
    """
    y = run.series("private", "loss")
    against_epsilon(figure.subplots(), run, y, "mean loss of drawn examples", "clay")
    return f"{_last_mean(y)} at the end."


def noise(figure: Figure, run: SavedRun) -> str:
    """Noise schedule.

    The noise multiplier that is accounted at each step. If noise is fresh and bounds are fixed, it
    is the standard deviation of the noise on the sum, divided by the sensitivity of the sum. It
    follows from the mechanism alone.
    """
    if run.card is None:
        raise run.missing("privacy.json")
    # Pairs of a multiplier and the number of consecutive steps that have it. The plan is cut at the
    # last step that the card counts, because a run may stop before its plan ends.
    levels = first_steps(run.mechanism["multiplier_and_steps"], run.card["steps"])
    if not levels:
        raise Missing("privacy.json says that no step counts")
    multipliers, step_counts = np.array(levels, float).T
    first, last = multipliers[[0, -1]]
    if np.all(multipliers == first):
        raise Missing(f"it is {first:.4g} at every step")
    # The steps at which the multiplier changes, with 0 and the last step.
    edges = np.concatenate([[0], np.cumsum(step_counts)])
    axes = panel(figure, "step", "noise multiplier")
    # Stairs show that a multiplier holds from one change to the next.
    axes.stairs(multipliers, edges, baseline=None, color=_BLUE, linewidth=1.6)
    axes.set_ylim(0, 1.2 * multipliers.max())
    sentence = f"From {first:.4g} to {last:.4g}, over {int(edges[-1]):,} accounted steps."
    if run.mechanism.get("before"):
        sentence += " Earlier runs are not drawn."
    return sentence


def clipping(figure: Figure, run: SavedRun) -> str:
    """What clipping does.

    If the fraction is near 1, nearly every gradient is clipped to the bound. The cosine says how
    far clipping turned the mean gradient of a sample: 1 is not at all.
    """
    clipped_fraction = run.series("private", "clipped")
    axes = panel(figure, "step", "")
    band(axes, run.steps, clipped_fraction, "blue", "fraction above the bound")
    percent = _last_mean(100 * clipped_fraction, "{:.0f} %")
    sentence = f"{percent} of the examples were above the bound"
    lowest = 0.0  # of both curves; only a cosine may be negative
    # A run that protects persons, or whose loss takes the epoch, logs no cosine.
    with contextlib.suppress(Missing):
        cosine = run.series("private", "cosine")
        band(axes, run.steps, cosine, "clay", "cosine of clipped and unclipped mean")
        sentence += f"; the cosine was {_last_mean(cosine, '{:.2f}')}"
        lowest = min(0, np.nanmin(cosine))
    axes.set_ylim(1.05 * lowest - 0.03, 1.03)  # a margin shows lines at 0 and 1
    legend(axes)
    return f"{sentence}.{_words_on_groups(clipped_fraction)}"


def norms(figure: Figure, run: SavedRun) -> str:
    """Gradient norms over time.

    The mean norm of the drawn examples' gradients before clipping. A bound far below it distorts
    the direction of the sum; a bound far above it adds more noise than necessary.
    """
    y = run.series("private", "norm")
    axes = panel(figure, "step", "mean gradient norm")
    band(axes, run.steps, y, "blue", "mean norm")
    axes.set_ylim(bottom=0)
    try:
        band(axes, run.steps, run.series("bound"), "clay", **_DASHED)
    except Missing:  # the log holds bounds only if they adapt
        bound = _fixed_bound(run)
        if bound is not None:
            axes.axhline(bound, color=_CLAY, **_DASHED)
    legend(axes)
    return f"{_last_mean(y)} at the end.{_words_on_groups(y)}"


def gradients(figure: Figure, run: SavedRun) -> str:
    """Gradient norms at the end.

    The gradient norms of single training examples in the trained model, on a logarithmic axis.
    Gradients to the right of the bound are clipped to it.
    """
    # Norms are stored as [examples, groups], but without the last axis if there is a single group.
    stored = run.array("diagnostics", "norms")
    gradient_norms = stored.reshape(len(stored), -1).astype(float)  # [examples, groups]
    bounds = np.atleast_1d(run.array("diagnostics", "bounds")).astype(float)  # [groups]
    _histograms(figure, run, gradient_norms, bounds)
    # The sentence is on the finite norms of all groups, as histograms show only finite ones.
    finite = np.isfinite(gradient_norms)
    above = np.sum(finite & (gradient_norms > bounds)) / max(1, finite.sum())
    median = np.median(gradient_norms[finite]) if finite.any() else np.nan
    sentence = (
        f"Of {len(gradient_norms):,} training examples, {above:.0%} are above the bound; "
        f"median {median:.3g}."
    )
    if not finite.all():
        sentence += f" {np.sum(~finite):,} norms are not finite."
    groups = gradient_norms.shape[1]
    if groups > _MOST_GROUPS:
        sentence += f" The first {_MOST_GROUPS} of {groups} groups are drawn."
    return sentence


def classes(figure: Figure, run: SavedRun) -> str:
    """Accuracy by class.

    Privacy costs rare and hard classes the most, and the total hides it. A dot is a class; its line
    is the distance from the total accuracy.
    """
    logits, labels = _predictions(run)
    accuracies = 100 * np.asarray(metrics.per_class_accuracy(logits, labels))
    total = 100 * float(metrics.accuracy(logits, labels))
    numbers = np.arange(len(accuracies))
    axes = panel(figure, "class", "accuracy (%)")
    axes.vlines(numbers, total, accuracies, color=_BLUE, linewidth=1.6)
    axes.plot(numbers, accuracies, "o", color=_BLUE, markersize=5, label="one class")
    axes.axhline(total, color=_CLAY, linewidth=1.2, label=f"all: {total:.1f} %")
    axes.grid(visible=False, axis="x")
    if len(numbers) <= _MOST_CLASSES:
        axes.set_xticks(numbers)
    legend(axes)
    worst = int(np.nanargmin(accuracies))  # a class without test examples has NaN
    example_count = int((labels == worst).sum())
    return f"Lowest: class {worst}, {accuracies[worst]:.1f} % of {example_count:,} examples."


def confusion(figure: Figure, run: SavedRun) -> str:
    """Confusion matrix.

    Rows are true classes, columns are predictions. Numbers count test examples; shades are
    fractions of the row.
    """
    counts = np.asarray(metrics.confusion(*_predictions(run)))  # [true class, predicted class]
    class_count = len(counts)
    # Fractions of the row; a class without test examples has a row of zeros.
    fractions = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    figure.set_size_inches(WIDTH, 4.6)  # nearly a square, as the matrix is
    axes = panel(figure, "predicted class", "true class")
    edges = np.arange(class_count + 1) - 0.5  # of cells, whose centers are the classes
    # A small fraction stays visible at an opacity of 0.1.
    opacity = np.where(counts, 0.1 + 0.9 * fractions, 0)
    _cells(axes, edges, edges, opacity.T)  # [predicted, true], because x is the first axis there
    # Class 0 is the top row.
    axes.set(xlim=(-0.5, class_count - 0.5), ylim=(class_count - 0.5, -0.5), aspect="equal")
    if class_count <= _MOST_CLASSES:
        axes.set_xticks(range(class_count))
        axes.set_yticks(range(class_count))
        for row, column in np.argwhere(counts):
            # A number on a dark cell is light.
            ink = "paper" if fractions[row, column] > 0.5 else "ink"
            look = {"ha": "center", "va": "center", "color": PALETTE[ink], "fontsize": 7.5}
            axes.text(column, row, str(counts[row, column]), **look)
    mistakes = counts * (1 - np.eye(class_count, dtype=int))
    if not mistakes.any():
        return "There are no mistakes."
    true, predicted = np.unravel_index(mistakes.argmax(), mistakes.shape)
    how_often = f"{mistakes[true, predicted]} of {counts[true].sum():,} examples"
    return f"Most often class {true} was taken for class {predicted}: {how_often}."


def calibration(figure: Figure, run: SavedRun) -> str:
    """Reliability diagram.

    Accuracy against confidence. Dots below the dashed line are predictions that are correct less
    often than the model claims. Larger dots stand for more predictions; the lower panel counts
    them.
    """
    logits, labels = _predictions(run)
    # Predictions are sorted into bins of equal width by confidence, the largest probability. Each
    # array is [bins]: the number of predictions, their mean confidence, and their accuracy.
    counts, confidences, accuracies = map(np.asarray, metrics.reliability(logits, labels))
    # An empty bin has no accuracy; a dot at 0 claims one.
    filled = counts > 0
    x = confidences[filled]
    y = accuracies[filled]
    figure.set_size_inches(WIDTH, 4.0)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    # The dashed line is where accuracy equals confidence.
    upper.plot([0, 1], [0, 1], "--", color=PALETTE["muted"], linewidth=1, label="confidence")
    # A line from each dot to the dashed line is its error.
    upper.vlines(x, x, y, color=_BLUE)
    # The last bin usually holds most predictions, and the square root keeps the other dots visible.
    areas = 8 + 90 * np.sqrt(counts[filled] / counts.sum())
    look = {"color": _BLUE, "label": "accuracy", "linewidths": 0, "zorder": 3}
    upper.scatter(x, y, areas, **look)
    upper.set(ylabel="accuracy", ylim=(-0.03, 1.03))
    legend(upper)
    lower.stairs(counts, np.linspace(0, 1, len(counts) + 1), fill=True, color=_BLUE, alpha=0.55)
    lower.set(xlabel="confidence", ylabel="examples", xlim=(-0.02, 1.02))
    expected = float(metrics.ece(logits, labels))
    largest = float(metrics.mce(logits, labels))
    return f"Expected calibration error (ECE) {expected:.3f}, largest (MCE) {largest:.3f}."


RELEASED = "released"
PRIVATE = "computed from private data without noise: do not publish"
SEEDED = "its key was supplied: do not publish it to those who know the key"


def of_what_was_released(run: SavedRun) -> str:
    """The badge of a figure that is computed from the trained model, protected by its noise."""
    if math.isinf(run.epsilon):
        # The parameters protect no one, and neither does their figure.
        return PRIVATE
    if run.supplied:
        return SEEDED
    return RELEASED


def note_of(badge: str) -> str:
    """The note that is drawn into a picture which is not for release; else empty."""
    return "" if badge == RELEASED else badge


class Plot(NamedTuple):
    """A figure that a run can have."""

    draw: Callable[[Figure, SavedRun], str]
    shows: str | Callable[[SavedRun], str]  # the badge, or what gives it

    def badge(self, run: SavedRun) -> str:
        """Whether the figure of this run may be published."""
        if isinstance(self.shows, str):
            return self.shows
        return self.shows(run)

    @property
    def name(self) -> str:
        """The name of its file and its id on the page."""
        return getattr(self.draw, "__name__", "")

    @property
    def title(self) -> str:
        """The first line of the function's docstring."""
        return (inspect.getdoc(self.draw) or "").partition(".\n")[0]

    @property
    def words(self) -> str:
        """The caption: the rest of the docstring."""
        return " ".join((inspect.getdoc(self.draw) or "").partition(".\n")[2].split())


PLOTS = (
    Plot(accuracy, of_what_was_released),
    Plot(error, of_what_was_released),
    Plot(test_loss, of_what_was_released),
    Plot(training_loss, PRIVATE),
    Plot(noise, RELEASED),
    Plot(clipping, PRIVATE),
    Plot(norms, PRIVATE),
    Plot(gradients, PRIVATE),
    Plot(classes, of_what_was_released),
    Plot(confusion, of_what_was_released),
    Plot(calibration, of_what_was_released),
)


def against_epsilon(axes: Axes, run: SavedRun, y: np.ndarray, name: str, color: str) -> None:
    """One number per evaluation against epsilon; against steps if epsilon is not finite."""
    try:
        x = run.series("epsilon")[:, 0]
        label = f"epsilon spent{stated_at(run)}"
    except Missing:
        x = run.steps
        label = "step (epsilon is not finite)"
    axes.set_xlabel(label, parse_math=False)
    axes.set_ylabel(name, parse_math=False)
    band(axes, x, y, color, **DOTS)


def _with_guess(figure: Figure, run: SavedRun, y: np.ndarray, name: str, guess: float) -> None:
    """One number per evaluation, and a dashed line for that of a guess."""
    axes = figure.subplots()
    against_epsilon(axes, run, y, name, "blue")
    if not math.isnan(guess):
        axes.axhline(guess, color=_CLAY, linewidth=1.2, linestyle="--")


def _cells(axes: Axes, x_edges: np.ndarray, y_edges: np.ndarray, opacity: np.ndarray) -> None:
    """Draws the cells of a grid with these edges along x and along y, each with its opacity.

    The opacities are ``[cells along x, cells along y]``; cells with 0 are left out. All cells have
    one color, because the page replaces colors by variables for its light and dark theme.
    """
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    # Without antialiasing there are no thin lines between neighbouring cells.
    look: dict[str, Any] = {"facecolor": _BLUE, "linewidth": 0, "antialiased": False}
    widths = np.diff(x_edges)
    heights = np.diff(y_edges)
    cells = []
    for i, j in np.argwhere(opacity):
        corner = (float(x_edges[i]), float(y_edges[j]))
        size = (float(widths[i]), float(heights[j]))
        cells.append(Rectangle(corner, *size, alpha=float(opacity[i, j]), **look))
    # Otherwise the collection gives all cells the look of its defaults.
    axes.add_collection(PatchCollection(cells, match_original=True))
    axes.grid(visible=False)


def _fixed_bound(run: SavedRun) -> float | None:
    """The bound of all groups, if it is one finite number that no schedule changes."""
    if (run.identity or {}).get("bound schedule") is not None:
        return None  # the log does not hold the values of the schedule
    bounds = {float(bound) for bound in run.mechanism.get("clipping", {}).get("bounds", [])}
    if len(bounds) != 1:
        return None
    (bound,) = bounds
    return bound if math.isfinite(bound) else None


def _histograms(figure: Figure, run: SavedRun, norms: np.ndarray, bounds: np.ndarray) -> None:
    """A histogram for each of the first groups of norms, in a grid.

    ``norms`` is ``[examples, groups]``, and ``bounds`` ``[groups]``.
    """
    shown = min(norms.shape[1], _MOST_GROUPS)  # groups
    columns = min(shown, _COLUMNS)
    rows = math.ceil(shown / columns)
    # The height is in inches; a single row is about as high as the other figures.
    figure.set_size_inches(WIDTH, 1.6 * rows if rows > 1 else 2.9)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in grid[shown:]:  # places without a histogram
        axes.set_axis_off()
    names = run.mechanism.get("clipping", {}).get("groups", [])
    for group, axes in enumerate(grid[:shown]):
        _histogram(axes, norms[:, group], bounds[group])
        if shown > 1:
            axes.set_title(_group_name(names, group), parse_math=False)
    figure.supxlabel("gradient norm of an example", **_LABEL)
    figure.supylabel("examples", **_LABEL)
    # A legend is drawn above the axes, where several histograms have their titles.
    if shown == 1:
        legend(grid[0])


def _group_name(names: Sequence[Any], group: int) -> str:
    """The name of a group, cut to the width of its histogram."""
    if group >= len(names):
        return f"group {group}"
    name = str(names[group])
    if len(name) > _LONGEST:
        # The end of a path names the layer.
        return f"…{name[1 - _LONGEST :]}"
    return name


def _histogram(axes: Axes, norms: np.ndarray, bound: float) -> None:
    """A histogram of the norms of one group, ``[examples]``, and a line at the bound.

    The axis of norms is logarithmic, because a few gradients are often a hundred times longer.
    """
    norms = norms[np.isfinite(norms)]
    # A logarithmic axis needs a positive end, also if all norms are 0 or not finite.
    longest = float(norms.max(initial=0)) or 1.0
    shortest = float(norms.min(initial=longest, where=norms > 0))  # of the positive norms
    # The axis has at most four decades below the longest norm, and a margin of a tenth. The first
    # bin also holds all norms below the axis.
    low = max(shortest / 1.1, longest * 1e-4)
    edges = np.geomspace(low, 1.1 * longest, 41)  # of 40 bins
    counts, _ = np.histogram(np.maximum(norms, low), edges)
    axes.stairs(counts, edges, fill=True, color=_BLUE, alpha=0.55)
    axes.set_xscale("log")
    # With more than a decade the labels at powers of ten are enough; those between them overlap.
    if longest > 10 * low:
        axes.xaxis.set_minor_formatter("")
    # A bound that is far away squeezes the histogram, and is not drawn.
    if low * 1e-4 < bound < longest * 1e4:
        axes.axvline(bound, color=_CLAY, linestyle="--", label=f"bound {bound:.3g}")


def _predictions(run: SavedRun) -> tuple[Array, Array]:
    """Logits and labels; the logits are log probabilities, which softmax inverts."""
    labels = run.array("evaluation", "labels")
    probabilities = run.array("evaluation", "probabilities")
    if not np.isfinite(probabilities).all():
        raise Missing("evaluation.npz holds probabilities that are not finite")
    logits = np.log(np.maximum(probabilities, np.finfo(np.float32).tiny))
    return jnp.asarray(logits, jnp.float32), jnp.asarray(labels)


def _words_on_groups(table: np.ndarray) -> str:
    """A sentence on the line and the band of several groups; empty for one group."""
    width = table.shape[1]
    if width == 1:
        return ""
    return f" The line is the mean of {width} groups, the band their range."


def _group_means(table: np.ndarray) -> np.ndarray:
    """The mean over groups of each row that has a number."""
    return np.nanmean(table[~np.isnan(table).all(axis=1)], axis=1)


def _last_mean(table: np.ndarray, form: str = "{:.3g}") -> str:
    """The mean over groups of the last row, as text; an earlier row is of other parameters."""
    last = table[-1]
    numbers = last[~np.isnan(last)]
    return form.format(numbers.mean()) if numbers.size else "no number"

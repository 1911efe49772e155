# SPDX-License-Identifier: Apache-2.0
"""The gallery: every figure of a run, a short function each, and the table of their badges.

A figure is a function ``(figure, run) -> sentence``, or raises `Missing`; its docstring is title
and caption. The badge stands in `PLOTS` alone, so no function that draws can decide it.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dpjax import metrics
from dpjax.mechanism.card import first_steps
from dpjax.reports.load_run import Missing, SavedRun
from dpjax.reports.style import DOTS, PALETTE, WIDTH, band, legend, panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FEW = 16  # with more classes, the numbers in the cells are too small to read
_GROUPS = 12  # more histograms would be too small to read
_BLUE, _CLAY = PALETTE["blue"], PALETTE["clay"]


def accuracy(figure: Figure, run: SavedRun) -> str:
    """Test accuracy against epsilon.

    A dot is an evaluation; the epsilon spent grows to the right. Where the curve is flat, more
    epsilon did not improve accuracy. The dashed line is always guessing the most frequent class.
    """
    y = 100 * run.series("accuracy")
    _beside_a_guess(figure, run, y, "test accuracy (%)", 100 * run.guesses.get("accuracy", np.nan))
    best = f"{_end(y, '{:.1f} %')} at the end, {np.nanmax(_means(y)):.1f} % at best."
    return f"{best}{_groups(y)} {run.beside_a_guess}".rstrip()


def error(figure: Figure, run: SavedRun) -> str:
    """Test error against epsilon.

    The root of the mean squared error (RMSE) on test examples, in units of the target. The dashed
    line is always guessing the mean of the test targets.
    """
    y = run.series("rmse")
    _beside_a_guess(figure, run, y, "RMSE of test examples", run.guesses.get("rmse", np.nan))
    return f"{_end(y)} at the end, {np.nanmin(_means(y)):.3g} at best."


def test_loss(figure: Figure, run: SavedRun) -> str:
    """Test loss against epsilon.

    The loss on test examples also depends on how confident the model is. If it rises while
    accuracy stays, the model becomes overconfident.
    """
    is_classifier = any("nll" in row for row in run.rows)
    y = run.series("nll" if is_classifier else "test_loss")
    against_epsilon(figure.subplots(), run, y, "mean loss of test examples", "blue")
    return f"{_end(y)} at the end, {np.nanmin(_means(y)):.3g} at best.{_groups(y)}"


def training_loss(figure: Figure, run: SavedRun) -> str:
    """Training loss against epsilon.

    The mean loss of the examples that were drawn since the previous evaluation. A value far below
    the test loss means that the model overfits.
    """
    y = run.series("private", "loss")
    against_epsilon(figure.subplots(), run, y, "mean loss of drawn examples", "clay")
    return f"{_end(y)} at the end."


def noise(figure: Figure, run: SavedRun) -> str:
    """Noise schedule.

    The noise multiplier that is accounted at each step. Of fresh noise under fixed bounds it is the
    standard deviation of the noise on the sum, divided by the sensitivity of the sum. It follows
    from the mechanism alone.
    """
    if run.card is None:
        raise run.missing("privacy.json")
    runs = first_steps(run.mechanism["multiplier_and_steps"], run.card["steps"])
    if not runs:
        raise Missing("privacy.json says that no step counts")
    z, counts = (np.array(side, float) for side in zip(*runs, strict=True))
    if np.all(z == z[0]):
        raise Missing(f"it is {z[0]:.4g} at every step")
    edges = np.concatenate([[0], np.cumsum(counts)])
    axes = panel(figure, "step", "noise multiplier")
    # Steps, not a line: a multiplier holds from one change to the next.
    axes.stairs(z, edges, baseline=None, color=_BLUE, linewidth=1.6)
    axes.set_ylim(0, 1.2 * z.max() or 1)
    earlier = " Earlier runs are not drawn." if run.mechanism.get("before") else ""
    steps = f"over {int(edges[-1]):,} accounted steps"
    return f"From {z[0]:.4g} to {z[-1]:.4g}, {steps}.{earlier}"


def clipping(figure: Figure, run: SavedRun) -> str:
    """What clipping does.

    If the fraction is near 1, nearly every gradient is clipped to the bound. The cosine says how
    far clipping turned the mean gradient of a sample: 1 is not at all.
    """
    cut = run.series("private", "clipped")
    axes = panel(figure, "step", "")
    band(axes, run.steps, cut, "blue", "fraction above the bound")
    sentence, lowest = f"{_end(100 * cut, '{:.0f} %')} of the examples were above the bound", 0.0
    with contextlib.suppress(Missing):
        turned = run.series("private", "cosine")
        band(axes, run.steps, turned, "clay", "cosine of clipped and unclipped mean")
        sentence += f"; the cosine was {_end(turned, '{:.2f}')}"
        lowest = min(0, np.nanmin(turned))
    axes.set_ylim(1.05 * lowest - 0.03, 1.03)
    legend(axes)
    return f"{sentence}.{_groups(cut)}"


def norms(figure: Figure, run: SavedRun) -> str:
    """Gradient norms over time.

    The mean norm of the drawn examples' gradients before clipping. A bound far below it distorts
    the direction of the sum; a bound far above it adds more noise than necessary.
    """
    y = run.series("private", "norm")
    axes = panel(figure, "step", "mean gradient norm")
    band(axes, run.steps, y, "blue", "mean norm")
    axes.set_ylim(bottom=0)
    dashed = {"linewidth": 1.2, "linestyle": "--", "label": "bound"}
    try:
        band(axes, run.steps, run.series("bound"), "clay", **dashed)  # adapted bounds
    except Missing:
        bounds = {float(bound) for bound in run.mechanism.get("clipping", {}).get("bounds", [])}
        # The log does not hold the values of a scheduled bound.
        fixed = (run.identity or {}).get("bound schedule") is None and len(bounds) == 1
        if fixed and math.isfinite(bound := bounds.pop()):
            axes.axhline(bound, color=_CLAY, **dashed)
    legend(axes)
    return f"{_end(y)} at the end.{_groups(y)}"


def gradients(figure: Figure, run: SavedRun) -> str:
    """Gradient norms at the end.

    The gradient norms of single training examples in the trained model, on a logarithmic axis.
    Gradients to the right of the bound are clipped to it.
    """
    # One group is stored without its axis.
    norms = run.array("diagnostics", "norms")
    norms = norms.reshape(len(norms), -1).astype(float)
    bounds = np.atleast_1d(run.array("diagnostics", "bounds")).astype(float)
    shown = min(norms.shape[1], _GROUPS)
    columns = min(shown, 3)  # more do not fit into the column of the page
    rows = -(-shown // columns)
    figure.set_size_inches(WIDTH, 2.9 if rows == 1 else 1.6 * rows)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in grid[shown:]:
        axes.set_axis_off()
    names = run.mechanism.get("clipping", {}).get("groups", [])
    for group, axes in enumerate(grid[:shown]):
        _histogram(axes, norms[:, group], bounds[group])
        if shown > 1:
            name = str(names[group]) if group < len(names) else f"group {group}"
            # Cut to the width of the histogram; the end of a path names the layer.
            axes.set_title(name if len(name) <= 26 else f"…{name[-25:]}", parse_math=False)
    figure.supxlabel("gradient norm of an example", fontsize=8.5, color=PALETTE["muted"])
    figure.supylabel("examples", fontsize=8.5, color=PALETTE["muted"])
    if shown == 1:
        legend(grid[0])
    finite = np.isfinite(norms)  # no bin can hold the others
    above = np.sum(finite & (norms > bounds)) / max(1, finite.sum())
    middle = np.median(norms[finite]) if finite.any() else np.nan
    left_out = f" {np.sum(~finite):,} norms are not finite." if not finite.all() else ""
    if shown < norms.shape[1]:
        left_out += f" The first {shown} of {norms.shape[1]} groups are drawn."
    share = f"Of {len(norms):,} training examples, {above:.0%} are above the bound"
    return f"{share}; median {middle:.3g}.{left_out}"


def classes(figure: Figure, run: SavedRun) -> str:
    """Accuracy by class.

    Privacy costs rare and hard classes the most, and the total hides it. A dot is a class; its line
    is the distance from the total accuracy.
    """
    logits, labels = _predictions(run)
    rates = 100 * np.asarray(metrics.per_class_accuracy(logits, labels))
    total = 100 * float(metrics.accuracy(logits, labels))
    at = np.arange(len(rates))
    axes = panel(figure, "class", "accuracy (%)")
    axes.vlines(at, total, rates, color=_BLUE, linewidth=1.6)
    axes.plot(at, rates, "o", color=_BLUE, markersize=5, label="one class")
    axes.axhline(total, color=_CLAY, linewidth=1.2, label=f"all: {total:.1f} %")
    axes.grid(visible=False, axis="x")
    if len(at) <= _FEW:
        axes.set_xticks(at)
    legend(axes)
    worst = int(np.nanargmin(rates))
    size = int((labels == worst).sum())
    return f"Lowest: class {worst}, {rates[worst]:.1f} % of {size:,} examples."


def confusion(figure: Figure, run: SavedRun) -> str:
    """Confusion matrix.

    Rows are true classes, columns are predictions. Numbers count test examples; shades are
    fractions of the row.
    """
    counts = np.asarray(metrics.confusion(*_predictions(run)))
    size, share = len(counts), counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    figure.set_size_inches(WIDTH, 4.6)
    axes, edges = panel(figure, "predicted class", "true class"), np.arange(len(counts) + 1) - 0.5
    # An opacity at which even a small fraction stays visible.
    _cells(axes, edges, edges, np.where(counts, 0.1 + 0.9 * share, 0).T)
    axes.set(xlim=(-0.5, size - 0.5), ylim=(size - 0.5, -0.5), aspect="equal")
    if size <= _FEW:
        axes.set_xticks(range(size))
        axes.set_yticks(range(size))
        for row, column in np.argwhere(counts):
            ink = PALETTE["paper" if share[row, column] > 0.5 else "ink"]
            look = {"ha": "center", "va": "center", "color": ink, "fontsize": 7.5}
            axes.text(column, row, str(counts[row, column]), **look)
    wrong = counts * (1 - np.eye(size, dtype=int))
    if not wrong.any():
        return "There are no mistakes."
    row, column = np.unravel_index(wrong.argmax(), wrong.shape)
    of = f"{wrong[row, column]} of {counts[row].sum():,} examples"
    return f"Most often class {row} was taken for class {column}: {of}."


def calibration(figure: Figure, run: SavedRun) -> str:
    """Reliability diagram.

    Accuracy against confidence. Dots below the dashed line are predictions that are correct less
    often than the model claims. Larger dots stand for more predictions; the lower panel counts
    them.
    """
    logits, labels = _predictions(run)
    counts, confidence, right = map(np.asarray, metrics.reliability(logits, labels))
    # An empty bin has no accuracy, and a dot at 0 would claim one.
    filled = counts > 0
    figure.set_size_inches(WIDTH, 4.0)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    above.plot([0, 1], [0, 1], "--", color=PALETTE["muted"], linewidth=1, label="confidence")
    above.vlines(confidence[filled], confidence[filled], right[filled], color=_BLUE)
    # The root keeps small bins visible beside the last one, which usually holds most predictions.
    areas = 8 + 90 * np.sqrt(counts[filled] / counts.sum())
    look = {"color": _BLUE, "label": "accuracy", "linewidths": 0, "zorder": 3}
    above.scatter(confidence[filled], right[filled], areas, **look)
    above.set(ylabel="accuracy", ylim=(-0.03, 1.03))
    legend(above)
    below.stairs(counts, np.linspace(0, 1, len(counts) + 1), fill=True, color=_BLUE, alpha=0.55)
    below.set(xlabel="confidence", ylabel="examples", xlim=(-0.02, 1.02))
    ece, mce = (float(error(logits, labels)) for error in (metrics.ece, metrics.mce))
    return f"Expected calibration error (ECE) {ece:.3f}, largest (MCE) {mce:.3f}."


RELEASED = "released"
PRIVATE = "computed from private data without noise: do not publish"
SEEDED = "its key was supplied: do not publish it to those who know the key"


def of_what_was_released(run: SavedRun) -> str:
    """The badge of a figure that is computed from the trained model, protected by its noise."""
    # Without a finite proven epsilon the parameters protect no one, and neither does their figure.
    if math.isinf(run.epsilon):
        return PRIVATE
    return SEEDED if run.supplied else RELEASED


class Plot(NamedTuple):
    """A figure that a run can have."""

    draw: Callable[[Figure, SavedRun], str]
    shows: str | Callable[[SavedRun], str]  # the badge, or what gives it

    def badge(self, run: SavedRun) -> str:
        """Whether the figure of this run may be published."""
        return self.shows if isinstance(self.shows, str) else self.shows(run)

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
        x, label = run.series("epsilon")[:, 0], f"epsilon spent{run.stated}"
    except Missing:
        x, label = run.steps, "step (epsilon is not finite)"
    axes.set_xlabel(label, parse_math=False)
    axes.set_ylabel(name, parse_math=False)
    band(axes, x, y, color, **DOTS)


def _beside_a_guess(figure: Figure, run: SavedRun, y: np.ndarray, name: str, guess: float) -> None:
    axes = figure.subplots()
    against_epsilon(axes, run, y, name, "blue")
    if not math.isnan(guess):
        axes.axhline(guess, color=_CLAY, linewidth=1.2, linestyle="--")


def _cells(axes: Axes, x: np.ndarray, y: np.ndarray, shade: np.ndarray) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    look = {"facecolor": _BLUE, "linewidth": 0, "antialiased": False}
    left, low, wide, high = (side.tolist() for side in (x, y, np.diff(x), np.diff(y)))
    cells = [
        Rectangle((left[i], low[j]), wide[i], high[j], alpha=float(shade[i, j]), **look)
        for i, j in np.argwhere(shade)
    ]
    axes.add_collection(PatchCollection(cells, match_original=True))
    axes.grid(visible=False)


def _histogram(axes: Axes, norms: np.ndarray, bound: float) -> None:
    """Counts on a logarithmic axis, because a few gradients are often a hundred times longer."""
    norms = norms[np.isfinite(norms)]
    top = float(norms.max(initial=0)) or 1.0
    # Four decades at most; the first bin holds all norms below.
    low = max(float(norms.min(initial=top, where=norms > 0)) / 1.1, top * 1e-4)
    edges = np.geomspace(low, 1.1 * top, 41)
    counts, _ = np.histogram(np.maximum(norms, low), edges)
    axes.stairs(counts, edges, fill=True, color=_BLUE, alpha=0.55)
    axes.set_xscale("log")
    if top > 10 * low:  # the powers of ten have labels, and others would overlap
        axes.xaxis.set_minor_formatter("")
    if low * 1e-4 < bound < top * 1e4:  # else it would squeeze the histogram
        axes.axvline(bound, color=_CLAY, linestyle="--", label=f"bound {bound:.3g}")


def _predictions(run: SavedRun) -> tuple[Array, Array]:
    """Logits and labels; the logits are log probabilities, which softmax inverts."""
    labels, p = run.array("evaluation", "labels"), run.array("evaluation", "probabilities")
    if not np.isfinite(p).all():
        raise Missing("evaluation.npz holds probabilities that are not finite")
    logits = np.log(np.maximum(p, np.finfo(np.float32).tiny))
    return jnp.asarray(logits, jnp.float32), jnp.asarray(labels)


def _groups(table: np.ndarray) -> str:
    width = table.shape[1]
    return f" The line is the mean of {width} groups, the band their range." if width > 1 else ""


def _means(table: np.ndarray) -> np.ndarray:
    """The mean over groups of each row that has a number."""
    return np.nanmean(table[~np.isnan(table).all(axis=1)], axis=1)


def _end(table: np.ndarray, form: str = "{:.3g}") -> str:
    """The mean over groups of the last row; an earlier row is of other parameters."""
    last = table[-1][~np.isnan(table[-1])]
    return form.format(last.mean()) if last.size else "no number"

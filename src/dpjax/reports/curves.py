# SPDX-License-Identifier: Apache-2.0
"""How a run went: accuracy, loss, noise and gradient norms, evaluation by evaluation.

Each function draws one figure from a `load_run.SavedRun` and returns a sentence that says what the
figure shows, or raises `load_run.Missing`. Lines have gaps where numbers were not finite. With
several groups, the line is their mean and the band their range.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike

from dpjax.mechanism.card import first_steps
from dpjax.reports.load_run import Missing, SavedRun
from dpjax.reports.style import DOTS, PALETTE, band, legend, panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 60  # a column of `shades` would otherwise be thinner than a pixel


def accuracy(figure: Figure, run: SavedRun) -> str:
    """Test accuracy against the epsilon spent."""
    y = 100 * run.series("accuracy")
    against_epsilon(figure.subplots(), run, y, "test accuracy (%)", "blue")
    return f"{_end(y, '{:.1f} %')} at the end, {_means(y).max():.1f} % at best.{_groups(y)}"


def test_loss(figure: Figure, run: SavedRun) -> str:
    """The loss on test examples (logged as ``nll`` or ``test_loss``) against the epsilon spent."""
    try:
        # Classifiers log `nll`, other models `test_loss`; a run has at most one of them.
        y = run.series("nll")
    except Missing:
        y = run.series("test_loss")
    against_epsilon(figure.subplots(), run, y, "mean loss of test examples", "blue")
    return f"{_end(y)} at the end, {_means(y).min():.3g} at best.{_groups(y)}"


def training_loss(figure: Figure, run: SavedRun) -> str:
    """The mean loss of the drawn examples against the epsilon spent."""
    y = run.series("private", "loss")
    against_epsilon(figure.subplots(), run, y, "mean loss of drawn examples", "clay")
    return f"{_end(y)} at the end."


def noise(figure: Figure, run: SavedRun) -> str:
    """The noise multiplier of each step that counts."""
    if run.card is None:
        raise run.missing("privacy.json")
    runs = first_steps(run.mechanism["multiplier_and_steps"], run.card["steps"])
    if not runs:
        raise Missing("privacy.json says that no step counts")
    z, counts = (np.array(side, float) for side in zip(*runs, strict=True))
    edges = np.concatenate([[0], np.cumsum(counts)])
    axes = panel(figure, "step", "noise multiplier")
    # Steps, not a line: a multiplier holds from one change to the next.
    axes.stairs(z, edges, baseline=None, color=PALETTE["blue"], linewidth=1.6)
    axes.set_ylim(0, 1.2 * z.max() or 1)
    each = f"{z[0]:.4g}" if np.all(z == z[0]) else f"From {z[0]:.4g} to {z[-1]:.4g}"
    earlier = " Earlier runs are not drawn." if run.mechanism.get("before") else ""
    return f"{each}, over {int(edges[-1]):,} accounted steps.{earlier}"


def clipping(figure: Figure, run: SavedRun) -> str:
    """The fraction of clipped examples, and how far clipping turned their mean gradient."""
    cut = run.series("private", "clipped")
    since = 0 if len(run.rows) < 2 else run.rows[-2]["step"]
    axes = panel(figure, "step", "")
    band(axes, _steps(run), cut, "blue", "fraction above the bound")
    share = _end(100 * cut, "{:.0f} %")
    seen = f"{share} of the examples drawn after step {since:,} were above the bound"
    lowest = 0.0
    try:
        turned = run.series("private", "cosine")
        band(axes, _steps(run), turned, "clay", "cosine of clipped and unclipped mean")
        seen = f"{seen}; the cosine was {_end(turned, '{:.2f}')}"
        lowest = min(0, np.nanmin(turned))
    except Missing:
        pass
    axes.set_ylim(1.05 * lowest - 0.03, 1.03)
    legend(axes)
    return f"{seen}.{_groups(cut)}"


def norms(figure: Figure, run: SavedRun) -> str:
    """The mean gradient norm of the drawn examples before clipping, and the bound."""
    y = run.series("private", "norm")
    axes = panel(figure, "step", "mean gradient norm")
    band(axes, _steps(run), y, "blue", "mean norm")
    axes.set_ylim(bottom=0)
    _draw_bound(axes, run)
    return f"{_end(y)} at the end.{_groups(y)}"


def shades(figure: Figure, run: SavedRun) -> str:
    """A histogram of gradient norms per evaluation, as a column of shades."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    counts = np.nan_to_num(run.series("private", "norm_histogram"))
    kept = np.unique(np.linspace(0, len(counts) - 1, _COLUMNS).astype(int))
    # Columns are shares of their own evaluation, because draws of different sizes lie between
    # evaluations.
    share = counts[kept] / np.maximum(counts[kept].sum(axis=1, keepdims=True), 1)
    ends = _steps(run)[kept]
    starts = np.concatenate([[0], ends[:-1]])
    edges = _edges(counts.shape[1])
    axes = panel(figure, "step", "gradient norm, in bounds")
    look = {"facecolor": PALETTE["blue"], "linewidth": 0}
    cells = [
        Rectangle(
            (start, low), end - start, high - low, alpha=float(part), antialiased=False, **look
        )
        for start, end, column in zip(starts, ends, share / (share.max() or 1), strict=True)
        for low, high, part in zip(edges, edges[1:], column, strict=False)
        # Cells that no eye can see would make the page several times larger.
        if part > 0.005
    ]
    axes.add_collection(PatchCollection(cells, match_original=True))
    seen = np.flatnonzero(share.sum(axis=0))
    # The axis shows the bins that ever held an example, not all four decades.
    low, high = (seen.min(), seen.max() + 1) if len(seen) else (0, len(edges) - 1)
    axes.set(xlim=(0, ends[-1]), ylim=(edges[low] / 2, 2 * edges[high]), yscale="log")
    axes.axhline(1, color=PALETTE["clay"], linewidth=1.2, linestyle="--")
    axes.grid(visible=False)
    # The bin at an end holds all norms beyond it, which its place on the axis does not say.
    for at in {0, len(edges) - 2} & set(seen.tolist()):
        middle, words = math.sqrt(edges[at] * edges[at + 1]), {"va": "center", "fontsize": 7.5}
        axes.annotate(
            f" {_name(edges, at)}", (1, middle), xycoords=("axes fraction", "data"), **words
        )
    if not share[-1].any():
        return "No norm at the end is a finite number of bounds."
    fullest = _name(edges, int(share[-1].argmax()))
    return f"In bounds, the fullest bin at the end is {fullest}."


def norm_counts(
    norms: Float[ArrayLike, "batch groups"], bounds: Sequence[float], bins: int = 40
) -> np.ndarray:
    """A histogram of gradient norms in units of their bounds, as `shades` draws it.

    Args:
      norms: The norm of each example's gradient in each group, before clipping.
      bounds: The bound of each group; a group without a positive, finite bound is left out.
      bins: The number of bins, equally wide in the logarithm, from 0.01 to 100 bounds. The
        outer bins also count the finite norms beyond; NaN and infinite norms are left out.

    Example:
      >>> norm_counts([[0.5], [3.0], [1e9]], bounds=[1.0], bins=4).tolist()
      [0, 1, 1, 1]
    """
    # A group without a finite positive bound has no norm in bounds.
    edges, finite = _edges(bins), np.isfinite(bounds) & (np.asarray(bounds) > 0)
    relative = np.asarray(norms)[:, finite] / np.asarray(bounds)[finite]
    kept = relative[np.isfinite(relative)]
    return np.histogram(np.clip(kept, edges[0], edges[-1]), edges)[0]


def _edges(bins: int) -> np.ndarray:
    return np.geomspace(1e-2, 1e2, bins + 1)


def _name(edges: np.ndarray, at: int) -> str:
    """A bin of `norm_counts` in words: the outer ones have no end."""
    low, high = f"{edges[at]:.2g}", f"{edges[at + 1]:.2g}"
    if at == 0:
        return f"{high} and less"
    return f"{low} and more" if at == len(edges) - 2 else f"{low} to {high}"


def against_epsilon(axes: Axes, run: SavedRun, y: np.ndarray, name: str, color: str) -> None:
    """One number per evaluation against epsilon; against steps if epsilon is not finite."""
    try:
        x, label = run.series("epsilon")[:, 0], f"epsilon spent{run.stated}"
    except Missing:
        x, label = _steps(run), "step (epsilon is not finite)"
    axes.set_xlabel(label, parse_math=False)
    axes.set_ylabel(name, parse_math=False)
    band(axes, x, y, color, **DOTS)


def _draw_bound(axes: Axes, run: SavedRun) -> None:
    """The adapted bounds from the log, or else one fixed bound of all groups and all steps."""
    dashed = {"linewidth": 1.2, "linestyle": "--", "label": "bound"}
    try:
        band(axes, _steps(run), run.series("bound"), "clay", **dashed)
    except Missing:
        bounds = {float(bound) for bound in run.mechanism.get("clipping", {}).get("bounds", [])}
        # A scheduled bound moves, and the log does not hold its values.
        scheduled = (run.identity or {}).get("bound schedule") is not None
        if scheduled or len(bounds) != 1 or not np.isfinite(bound := bounds.pop()):
            return
        axes.axhline(bound, color=PALETTE["clay"], **dashed)
    legend(axes)


def _steps(run: SavedRun) -> np.ndarray:
    return run.series("step")[:, 0]


def _groups(table: np.ndarray) -> str:
    width = table.shape[1]
    return f" The line is the mean of {width} groups, the band their range." if width > 1 else ""


def _means(table: np.ndarray) -> np.ndarray:
    """The mean over groups of each row that has a number."""
    return np.nanmean(table[~np.isnan(table).all(axis=1)], axis=1)


def _end(table: np.ndarray, form: str = "{:.3g}") -> str:
    """The mean over groups of the last row; an earlier row is of other parameters."""
    kept = table[-1][~np.isnan(table[-1])]
    return form.format(kept.mean()) if kept.size else "no number"

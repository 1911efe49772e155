# SPDX-License-Identifier: Apache-2.0
"""Figures of test predictions: accuracy by class, confusion matrix, reliability diagram.

All three use the labels and probabilities of ``evaluation.npz`` and the functions of
`dpjax.metrics`, so figures and logged numbers agree. Each function draws one figure and returns
a sentence that says what it shows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dpjax import metrics
from dpjax.reports.load_run import Missing, SavedRun
from dpjax.reports.style import PALETTE, WIDTH, legend, panel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FEW = 16  # with more classes, the numbers in the cells are too small to read


def classes(figure: Figure, run: SavedRun) -> str:
    """The accuracy of each class, and its distance from the total accuracy."""
    logits, labels = _predictions(run)
    each = 100 * np.asarray(metrics.per_class_accuracy(logits, labels))
    total = 100 * float(metrics.accuracy(logits, labels))
    at = np.arange(len(each))
    axes = panel(figure, "class", "accuracy (%)")
    axes.vlines(at, total, each, color=PALETTE["blue"], linewidth=1.6)
    axes.plot(at, each, "o", color=PALETTE["blue"], markersize=5, label="one class")
    axes.axhline(total, color=PALETTE["clay"], linewidth=1.2, label=f"all: {total:.1f} %")
    axes.grid(visible=False, axis="x")
    if len(at) <= _FEW:
        axes.set_xticks(at)
    legend(axes)
    worst = int(np.nanargmin(each))
    count = int((labels == worst).sum())
    return f"Lowest: class {worst}, {each[worst]:.1f} % of {count:,} examples."


def confusion(figure: Figure, run: SavedRun) -> str:
    """How often each class was predicted for each true class, as a fraction of its examples."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    # Counts are of test examples. The guarantee does not cover test data, and the page says so.
    counts = np.asarray(metrics.confusion(*_predictions(run)))
    size = len(counts)
    part = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    figure.set_size_inches(WIDTH, 4.6)
    axes = panel(figure, "predicted class", "true class")
    look = {"facecolor": PALETTE["blue"], "linewidth": 0}
    cells = [
        # An opacity at which even a small fraction stays visible.
        Rectangle(
            (column - 0.5, row - 0.5), 1, 1, alpha=0.1 + 0.9 * float(part[row, column]), **look
        )
        for row, column in np.argwhere(counts)
    ]
    axes.add_collection(PatchCollection(cells, match_original=True))
    axes.set(xlim=(-0.5, size - 0.5), ylim=(size - 0.5, -0.5), aspect="equal")
    axes.grid(visible=False)
    if size <= _FEW:
        axes.set_xticks(range(size))
        axes.set_yticks(range(size))
        for row, column in np.argwhere(counts):
            ink = "paper" if part[row, column] > 0.5 else "ink"
            words = {"ha": "center", "va": "center", "color": PALETTE[ink], "fontsize": 7.5}
            axes.text(column, row, str(counts[row, column]), **words)
    wrong = counts * (1 - np.eye(size, dtype=int))
    if not wrong.any():
        return "There are no mistakes."
    row, column = np.unravel_index(wrong.argmax(), wrong.shape)
    words = f"Most often class {row} was taken for class {column}"
    return f"{words}: {wrong[row, column]} of {counts[row].sum():,} examples."


def calibration(figure: Figure, run: SavedRun) -> str:
    """Accuracy against confidence, in bins, and how many predictions each bin holds."""
    logits, labels = _predictions(run)
    table = metrics.reliability(logits, labels)
    counts, confidence, right = (np.asarray(column) for column in table)
    # An empty bin has no accuracy, and a dot at 0 would claim one.
    filled = counts > 0
    figure.set_size_inches(WIDTH, 4.0)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    above.plot([0, 1], [0, 1], "--", color=PALETTE["muted"], linewidth=1, label="confidence")
    above.vlines(confidence[filled], confidence[filled], right[filled], color=PALETTE["blue"])
    # The root keeps small bins visible beside the last one, which usually holds most predictions.
    areas = 8 + 90 * np.sqrt(counts[filled] / counts.sum())
    look = {"color": PALETTE["blue"], "label": "accuracy", "linewidths": 0, "zorder": 3}
    above.scatter(confidence[filled], right[filled], areas, **look)
    above.set(ylabel="accuracy", ylim=(-0.03, 1.03))
    legend(above)
    edges = np.linspace(0, 1, len(counts) + 1)
    below.stairs(counts, edges, fill=True, color=PALETTE["blue"], alpha=0.55)
    below.set(xlabel="confidence", ylabel="examples", xlim=(-0.02, 1.02))
    ece, mce = (float(error(logits, labels)) for error in (metrics.ece, metrics.mce))
    return f"Expected calibration error (ECE) {ece:.3f}, largest (MCE) {mce:.3f}."


def _predictions(run: SavedRun) -> tuple[Array, Array]:
    """Logits and labels; the logits are log probabilities, which softmax inverts."""
    labels, p = run.array("evaluation", "labels"), run.array("evaluation", "probabilities")
    # A diverged model has no reliability; the reason is said on the page instead of a drawing of
    # NaN.
    if not np.isfinite(p).all():
        raise Missing("evaluation.npz holds probabilities that are not finite")
    logits = np.log(np.maximum(p, np.finfo(np.float32).tiny))
    return jnp.asarray(logits, jnp.float32), jnp.asarray(labels)

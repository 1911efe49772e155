# SPDX-License-Identifier: Apache-2.0
"""Figures of the trained model: gradient norms with the bound, and norms layer by layer.

The histogram says whether the bound fits the gradients. The norms of weights and of
pre-activations say whether the network stayed small. Each function draws one figure and
returns a sentence that says what it shows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dpjax.reports.load_run import Missing, SavedRun
from dpjax.reports.style import PALETTE, WIDTH, legend, panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GROUPS = 12  # more histograms would be too small to read
_DECADES = 1e-4  # shorter norms, relative to the longest, share the first bin


def gradients(figure: Figure, run: SavedRun) -> str:
    """A histogram of per-example gradient norms for each group, with its bound."""
    norms = run.array("diagnostics", "norms")
    bounds = np.atleast_1d(run.array("diagnostics", "bounds")).astype(float)
    # One group is stored without its axis.
    norms = norms.reshape(len(norms), -1).astype(float)
    shown = min(norms.shape[1], _GROUPS)
    # Three histograms side by side are the most that a column of text can hold.
    columns = min(shown, 3)
    rows = -(-shown // columns)
    figure.set_size_inches(WIDTH, 2.9 if rows == 1 else 1.6 * rows)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in grid[shown:]:
        axes.set_axis_off()
    names = run.mechanism.get("clipping", {}).get("groups", [])
    below = 0
    for group, axes in enumerate(grid[:shown]):
        below += _histogram(axes, norms[:, group], bounds[group])
        if shown > 1:
            name = str(names[group]) if group < len(names) else f"group {group}"
            # Cut to the width of the histogram; the end of a path names the layer.
            axes.set_title(name if len(name) <= 26 else f"…{name[-25:]}", parse_math=False)
            low, high = axes.get_xlim()
            if high > 10 * low:  # the powers of ten have labels, and others would overlap
                axes.xaxis.set_minor_formatter("")
    figure.supxlabel("gradient norm of an example", fontsize=8.5, color=PALETTE["muted"])
    figure.supylabel("examples", fontsize=8.5, color=PALETTE["muted"])
    if shown == 1:
        legend(grid[0])
    return _cut(norms, bounds, shown, below, run.measured_at)


def weights(figure: Figure, run: SavedRun) -> str:
    """The norm of each layer's weights at the end."""
    names, values = _layers(run, "weight")
    _lollipops(figure, names, values, "norm of the weights", "blue")
    return _largest(names, values)


def activations(figure: Figure, run: SavedRun) -> str:
    """The mean norm of each layer's pre-activations at the end."""
    names, values = _layers(run, "activation")
    _lollipops(figure, names, values, "norm of the pre-activations", "green")
    return _largest(names, values)


def _histogram(axes: Axes, norms: np.ndarray, bound: float) -> int:
    """Counts on a logarithmic axis, because a few gradients are often a hundred times longer.

    Returns how many norms are below the axis; the first bin holds them too.
    """
    norms = norms[np.isfinite(norms)]
    top = float(norms.max(initial=0)) or 1.0
    # The axis begins just below the smallest positive norm, but spans a few decades at most.
    low = max(float(norms.min(initial=top, where=norms > 0)) / 1.1, top * _DECADES)
    edges = np.geomspace(low, 1.1 * top, 41)
    counts, _ = np.histogram(np.maximum(norms, low), edges)
    axes.stairs(counts, edges, fill=True, color=PALETTE["blue"], alpha=0.55)
    axes.set_xscale("log")
    if low * _DECADES < bound < top / _DECADES:  # else it would squeeze the histogram
        axes.axvline(bound, color=PALETTE["clay"], linestyle="--", label=f"bound {bound:.3g}")
    return int(np.sum(norms < low))


def _cut(norms: np.ndarray, bounds: np.ndarray, shown: int, below: int, at: str) -> str:
    """A sentence: what the histograms show, and what they leave out."""
    # Norms that are not finite are counted in words, since no bin can hold them.
    finite = np.isfinite(norms)
    above = np.sum(finite & (norms > bounds)) / max(1, finite.sum())
    middle = np.median(norms[finite]) if finite.any() else np.nan
    words = (
        f"Of {len(norms):,} training examples {at}, {above:.0%} of the norms are above the bound; "
        f"median {middle:.3g}."
    )
    if below:
        words += f" The first bin also holds the {below:,} norms below it."
    if not finite.all():
        words += f" {np.sum(~finite):,} norms are not finite, and are not drawn."
    if shown < norms.shape[1]:
        words += f" The first {shown} of {norms.shape[1]} groups are drawn."
    return words


def _layers(run: SavedRun, what: str) -> tuple[list[str], np.ndarray]:
    values = run.array("diagnostics", f"{what}_norms").astype(float).ravel()
    names = [str(name) for name in run.array("diagnostics", f"{what}_names").ravel()]
    if len(names) != len(values):
        raise Missing(f"diagnostics.npz has {len(values)} {what}_norms and {len(names)} names")
    return names, np.where(np.isfinite(values), values, np.nan)


def _lollipops(
    figure: Figure, names: list[str], values: np.ndarray, label: str, color: str
) -> None:
    """A line and a dot for each layer, the first layer at the top."""
    figure.set_size_inches(WIDTH, 0.9 + 0.22 * max(3, len(names)))
    axes, rows = panel(figure, label, ""), np.arange(len(names))
    axes.hlines(rows, 0, values, color=PALETTE[color], linewidth=1.6)
    axes.plot(values, rows, "o", color=PALETTE[color], markersize=5)
    axes.set_yticks(rows, names, parse_math=False)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")


def _largest(names: list[str], values: np.ndarray) -> str:
    if np.isnan(values).all():
        return "None of them is finite."
    at = int(np.nanargmax(values))
    return f"The largest is {values[at]:.3g}, of {names[at]}."

# SPDX-License-Identifier: Apache-2.0
"""The table of figures: their titles, captions, drawing functions and badges.

A badge says whether a figure may be published. A figure that was computed from private data
before the noise must not be, and its badge and its PNG say so. All other figures are computed
from what the mechanism released; they may be published unless epsilon is infinite or the seed
of the noise is published, and then their badges say so too.

A figure whose data are not in the folder is left out, with a reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from dpjax.reports import curves, layers, predictions
from dpjax.reports.figure_output import png, svg
from dpjax.reports.load_run import SavedRun
from dpjax.reports.style import WIDTH, canvas, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RELEASED = "released"
PRIVATE = "computed from private data without noise: do not publish"
SEEDED = "its key was supplied: do not publish it to those who know the key"


# A badge is a function of the run and stands in this one table, so no drawing function can decide
# for itself that private data may be shown.
class Plot(NamedTuple):
    """A figure that a run can have; ``draw`` and ``badge`` take the `SavedRun`."""

    name: str
    title: str
    words: str
    draw: Callable[[Figure, SavedRun], str]
    badge: Callable[[SavedRun], str]


class Drawn(NamedTuple):
    """A figure of one run, drawn; ``seen`` is the sentence about this run."""

    plot: Plot
    badge: str
    seen: str
    svg: str
    png: bytes


def draw(plot: Plot, run: SavedRun) -> Drawn:
    """Draws a figure of a run as SVG and PNG.

    Raises:
      Missing: The folder of the run lacks the data of the figure.
    """
    badge = plot.badge(run)
    with style():
        figure = canvas(WIDTH, 2.9)
        seen = plot.draw(figure, run)
        image = svg(figure, plot.name, f"{plot.title}. {seen}")
        return Drawn(plot, badge, seen, image, png(figure, "" if badge == RELEASED else badge))


def of_what_was_released(run: SavedRun) -> str:
    """The badge of a figure that is computed from the trained model, protected by its noise."""
    # Without a finite proven epsilon the parameters protect no one, and neither does a figure of
    # them.
    if math.isinf(run.epsilon):
        return PRIVATE
    return SEEDED if run.supplied else RELEASED


def _private(_: SavedRun) -> str:
    return PRIVATE


def _of_activations(run: SavedRun) -> str:
    # A diagnostics file that does not say whose activations it holds counts as training data.
    of = (run.diagnostics or {}).get("activations_of", "train")
    return of_what_was_released(run) if str(of) == "test" else PRIVATE


PLOTS = (
    Plot(
        "accuracy",
        "Test accuracy against epsilon",
        "A dot is an evaluation; the epsilon spent grows to the right. Where the curve is flat, "
        "more epsilon did not improve accuracy.",
        curves.accuracy,
        of_what_was_released,
    ),
    Plot(
        "test_loss",
        "Test loss against epsilon",
        "The loss on test examples also depends on how confident the model is. If it rises while "
        "accuracy stays, the model becomes overconfident.",
        curves.test_loss,
        of_what_was_released,
    ),
    Plot(
        "training_loss",
        "Training loss against epsilon",
        "The mean loss of the examples that were drawn since the previous evaluation. A value far "
        "below the test loss means that the model overfits.",
        curves.training_loss,
        _private,
    ),
    Plot(
        "noise",
        "Noise schedule",
        "The noise multiplier that is accounted at each step. Of fresh noise under fixed bounds it "
        "is the standard deviation of the noise on the sum, divided by the sensitivity of the sum. "
        "It follows from the mechanism alone.",
        curves.noise,
        lambda _: RELEASED,  # a function of the mechanism alone
    ),
    Plot(
        "clipping",
        "What clipping does",
        "If the fraction is near 1, nearly every gradient is clipped to the bound. The cosine says "
        "how far clipping turned the mean gradient of a sample: 1 is not at all.",
        curves.clipping,
        _private,
    ),
    Plot(
        "norms",
        "Gradient norms over time",
        "The mean norm of the drawn examples' gradients before clipping. A bound far below it "
        "distorts the direction of the sum; a bound far above it adds more noise than necessary.",
        curves.norms,
        _private,
    ),
    Plot(
        "shades",
        "Histograms of norms over time",
        "Each column is an evaluation: a histogram of the gradient norms of a sample of training "
        "examples, at the parameters of that step. The stronger the shade, the more examples.",
        curves.shades,
        _private,
    ),
    Plot(
        "gradients",
        "Gradient norms at the end",
        "The gradient norms of single training examples in the trained model, on a logarithmic "
        "axis. Gradients to the right of the bound are clipped to it.",
        layers.gradients,
        _private,
    ),
    Plot(
        "classes",
        "Accuracy by class",
        "Privacy costs rare and hard classes the most, and the total hides it. A dot is a class; "
        "its line is the distance from the total accuracy.",
        predictions.classes,
        of_what_was_released,
    ),
    Plot(
        "confusion",
        "Confusion matrix",
        "Rows are true classes, columns are predictions. Numbers count test examples; shades are "
        "fractions of the row.",
        predictions.confusion,
        of_what_was_released,
    ),
    Plot(
        "calibration",
        "Reliability diagram",
        "Accuracy against confidence. Dots below the dashed line are predictions that are correct "
        "less often than the model claims. Larger dots stand for more predictions; the lower "
        "panel counts them.",
        predictions.calibration,
        of_what_was_released,
    ),
    Plot(
        "weights",
        "Weight norms",
        "The norm of each layer's weights. Noise makes all of them grow. A layer with a much "
        "larger norm than the others saturates the next activation.",
        layers.weights,
        of_what_was_released,
    ),
    Plot(
        "activations",
        "Pre-activation norms",
        "The norm of each layer's output before its activation. The larger it is, the more units "
        "are saturated, and the larger are the gradients that are clipped.",
        layers.activations,
        _of_activations,
    ),
)

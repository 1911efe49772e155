# SPDX-License-Identifier: Apache-2.0
"""The figures of a run: what each is called, how to read it, and who may see it.

The table says of each figure whether it was computed from private data before any noise was
added.  Such a figure is for those who may see the data; its badge says so, and so does a line
in its PNG.  All others are computed from what the mechanism released, which protects nobody
where there was no noise, or noise from a seed that is published: then they have such a badge too.

A figure whose data are not in the folder is left out, with a reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from dpjax.reports import curves, layers, predictions
from dpjax.reports.figure_output import png, svg
from dpjax.reports.load_run import Run
from dpjax.reports.style import canvas, style

RELEASED = "released"
PRIVATE = "computed from private data without noise: do not publish"
SEEDED = "its noise is of a published seed, and can be subtracted: do not publish"


class Plot(NamedTuple):
    """A figure that a run may have."""

    name: str
    title: str
    words: str
    draw: Callable[..., str]
    badge: Callable[[Run], str]


class Drawn(NamedTuple):
    """A figure that a run has."""

    plot: Plot
    badge: str
    seen: str
    svg: str
    png: bytes


def draw(plot: Plot, run: Run) -> Drawn:
    """Draws a figure of a run, once, for both forms.

    Raises:
      Missing: The run did not leave what it needs.
    """
    badge = plot.badge(run)
    with style():
        figure = canvas()
        seen = plot.draw(figure, run)
        image = svg(figure, plot.name, f"{plot.title}. {seen}")
        return Drawn(plot, badge, seen, image, png(figure, "" if badge == RELEASED else badge))


def of_what_was_released(run: Run) -> str:
    """The badge of what the model shows: the noise of its training protects it, if any does."""
    if math.isinf(min(run.epsilons.values())):
        return PRIVATE
    return RELEASED if run.seed is None else SEEDED


def _private(_: Run) -> str:
    return PRIVATE


def _of_the_mechanism(_: Run) -> str:
    return RELEASED


def _of_activations(run: Run) -> str:
    of = (run.diagnostics or {}).get("activations_of", "train")
    return of_what_was_released(run) if str(of) == "test" else PRIVATE


PLOTS = (
    Plot(
        "accuracy",
        "Test accuracy against epsilon",
        "What each unit of privacy bought: a dot is an evaluation, and further to the right more "
        "had been spent. Where the curve is flat, more spending bought nothing.",
        curves.accuracy,
        of_what_was_released,
    ),
    Plot(
        "test_loss",
        "Test loss against epsilon",
        "The same for the loss, which also counts how sure the model was. If it rises while "
        "accuracy holds, the model grows too sure of itself.",
        curves.test_loss,
        of_what_was_released,
    ),
    Plot(
        "training_loss",
        "Training loss against epsilon",
        "The mean loss of the examples that were drawn since the evaluation before. Below the "
        "test loss by much, the model has learnt its examples by heart.",
        curves.training_loss,
        _private,
    ),
    Plot(
        "noise",
        "Noise schedule",
        "The standard deviation of the noise on the sum, divided by what one example can move "
        "the sum. It follows from the mechanism alone, and is part of what is accounted.",
        curves.noise,
        _of_the_mechanism,
    ),
    Plot(
        "clipping",
        "What clipping does",
        "Near 1, nearly every example is cut and the bound is the only length left. The cosine "
        "says how far cutting turned the mean gradient: 1 is not at all.",
        curves.clipping,
        _private,
    ),
    Plot(
        "norms",
        "Gradient norms over time",
        "The mean length of the examples' gradients before they are clipped. The bound should "
        "stay within reach of it: far below, direction is lost; far above, noise is wasted.",
        curves.norms,
        _private,
    ),
    Plot(
        "shades",
        "Histograms of norms over time",
        "Each column is a histogram of gradient norms between two evaluations; the stronger "
        "the shade, the more examples.",
        curves.shades,
        _private,
    ),
    Plot(
        "gradients",
        "Gradient norms at the end",
        "How long the gradients of single examples are in the trained model, on a logarithmic "
        "axis. What is to the right of the bound is shortened to it.",
        layers.gradients,
        _private,
    ),
    Plot(
        "classes",
        "Accuracy by class",
        "Privacy costs rare and hard classes the most, which the total hides. A dot is a class, "
        "its line the distance from the accuracy of all.",
        predictions.classes,
        of_what_was_released,
    ),
    Plot(
        "confusion",
        "Confusion matrix",
        "Rows are right classes, columns what was predicted. Numbers count test examples; shades "
        "are parts of the row.",
        predictions.confusion,
        of_what_was_released,
    ),
    Plot(
        "calibration",
        "Reliability diagram",
        "Whether the model knows how sure it may be. Where dots are below the dashed line, it is "
        "right less often than it claims. The larger a dot, the more predictions it stands for; "
        "the lower panel counts them.",
        predictions.calibration,
        of_what_was_released,
    ),
    Plot(
        "weights",
        "Weight norms",
        "The length of each layer's weights. Noise makes all of them grow; a layer that is much "
        "longer than the others saturates what comes after it.",
        layers.weights,
        of_what_was_released,
    ),
    Plot(
        "activations",
        "Pre-activation norms",
        "The length of what each layer hands to its activation. The larger, the more units are "
        "saturated, and the longer the gradients that clipping has to cut.",
        layers.activations,
        _of_activations,
    ),
)

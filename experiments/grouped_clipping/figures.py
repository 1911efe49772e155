# SPDX-License-Identifier: Apache-2.0
"""Figures of grouped_gradient_clipping_2021: loss and accuracy, by step and by epsilon.

Each data set and number of steps, which stands for a printed epsilon, has a panel of its own.  Each
way of clipping has one line there: the best of the rates that ran, by mean accuracy at the end.
"""

from __future__ import annotations

from experiments.common.figures import Draw, Figure, logged
from experiments.grouped_clipping.settings import SETTINGS, WORDS, keys

_ACCURACY = "test accuracy, %"
_WAYS = ("flat", "paper", "equal")
LINES = {
    f"{dataset}, {steps} steps": {way: keys(dataset, way, steps, "tanh", "relu") for way in _WAYS}
    for dataset in WORDS
    for steps in SETTINGS[dataset].steps.values()
}


def _figure(title: str, shows: str, draw: Draw) -> Figure:
    return Figure(title, shows, [draw], LINES, judged=True)


FIGURES = {
    "2": _figure(
        "Training loss by step, one group and several",
        "Training loss: the proposed groups converge faster than DP-SGD and come close to training "
        "without noise. Here the loss is that of the drawn batches.",
        logged("step", "loss", ("step", "training loss")),
    ),
    "3": _figure(
        "Test accuracy by step, one group and several",
        "Test accuracy by step: the groups are above DP-SGD at all times.",
        logged("step", "accuracy", ("step", _ACCURACY), 100),
    ),
    "4": _figure(
        "Test accuracy by epsilon, one group and several",
        "Test accuracy by epsilon: at any printed epsilon the groups are above DP-SGD. Here "
        "epsilon is the true one, so groups with the paper's noise lie far to the right.",
        logged("epsilon", "accuracy", ("epsilon (rdp)", _ACCURACY), 100, "log"),
    ),
}

# SPDX-License-Identifier: Apache-2.0
"""Figures of grouped_gradient_clipping_2021: loss and accuracy, by step and by epsilon.

Each data set and number of steps, which stands for a printed epsilon, has a panel of its own.  Each
way of clipping has one line there: the best of the rates that ran, by mean accuracy at the end.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from common.multi_panel_figure import Panel
from common.paper_figures import COPY, Draw, Figure, Found, logged, one_of

BINARY = "liu2021_grouped_clipping.py"
DATASETS = ("mnist", "fashion_mnist", "cifar10")
ROWS = (
    one_of("title", DATASETS, COPY)
    + r" (?P<line>(?:flat|paper|equal|full).*), (?P<length>\d+ steps)"
)
_AT: dict[str, Any] = {"titles": DATASETS, "rows": ROWS}
_ACCURACY = "test accuracy, %"


def best(draw: Draw, x_scale: str = "linear") -> Draw:
    """Draws each way at its best rate; a reader compares ways, and rates are in the table."""

    def drawn(title: str, found: Found) -> list[Panel]:
        ways: dict[str, tuple[float, Any]] = {}
        for name, runs in found.items():
            way = re.sub(r"((?:^|.* )(?:flat|\w+, \d+ groups)).*", r"\1", name)
            mean = float(np.mean([each["accuracy"] for each in runs]))
            ways[way] = max(ways.get(way, (-1.0, runs)), (mean, runs), key=lambda each: each[0])
        panels = draw(title, {way: runs for way, (_, runs) in sorted(ways.items())})
        return [panel._replace(x_scale=x_scale) for panel in panels]

    return drawn


FIGURES = {
    "2": Figure(
        "Training loss: the proposed groups converge faster than DP-SGD and come close to training "
        "without noise. Here the loss is that of the drawn batches; its training accuracy, and "
        "training without noise, are not drawn.",
        [best(logged("step", "loss", ("step", "training loss")))],
        **_AT,
        command="--figure=2 --table=3 --seeds=3",
        claims="groups",
    ),
    "3": Figure(
        "Test accuracy by step: the groups are above DP-SGD at all times.",
        [best(logged("step", "accuracy", ("step", _ACCURACY), 100))],
        **_AT,
        command="--figure=3 --table=3 --seeds=3",
        claims="groups",
    ),
    "4": Figure(
        "Test accuracy by epsilon: at any printed epsilon the groups are above DP-SGD. Here "
        "epsilon is the true one, so groups with the paper's noise lie far to the right.",
        [best(logged("epsilon", "accuracy", ("epsilon (rdp)", _ACCURACY), 100), "log")],
        **_AT,
        command="--figure=4 --table=3 --seeds=3",
        claims="groups",
    ),
}

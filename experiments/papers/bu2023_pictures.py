# SPDX-License-Identifier: Apache-2.0
"""Figures of convergence_calibration_2023, drawn from the runs of its tables.

Accuracy and calibration by bound, loss by step, and histograms of confidence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from common import paper_runs

BINS = 15  # of confidence


def draw(path: str, what: str, found: Mapping[str, list[Mapping[str, Any]]]) -> None:
    """Draws the runs of some rows, each with its range over seeds."""
    if what == "bounds":
        x, y, places = "bound", "accuracy, and ECE (%)", [float(name.split()[-1]) for name in found]
        rows = [found[name] for name in found]
        drawn = {
            "accuracy": (places, [[each["accuracy"] for each in runs] for runs in rows]),
            "ECE": (places, [[100 * each["ece"] for each in runs] for runs in rows]),
        }
    elif what == "curves":
        x, y, places = "step", "test loss (NLL)", None
        drawn = {
            name: (
                [row["step"] for row in runs[0]["way"]],
                np.transpose([[row["nll"] for row in each["way"]] for each in runs]),
            )
            for name, runs in found.items()
        }
    else:
        x = "confidence" if what != "of the right class" else "probability of the right class"
        y = "accuracy" if what == "reliability" else "part of the examples"
        middles = (np.arange(BINS) + 0.5) / BINS
        drawn = {
            name: (middles, np.transpose([np.asarray(each[what], float) for each in runs]))
            for name, runs in found.items()
        }
        if what == "reliability":
            drawn["as sure as right"] = (middles, middles[:, None])
    paper_runs.plot(path, x, y, drawn)

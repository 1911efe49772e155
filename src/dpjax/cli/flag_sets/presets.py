# SPDX-License-Identifier: Apache-2.0
"""Presets of `dpjax train`: the flags of a row of accuracies by its name, and its result.

Settings were chosen on a part of the training data, never on test data. The rows, and what their
search would cost, are in `experiments/results/README.md`; `experiments/accuracy.py` runs them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from absl import flags


class Preset(NamedTuple):
    """The test accuracy in per cent, over seeds, and the flags that reach it."""

    result: str
    flags: Mapping[str, Any]


def _wavelets(
    result: str, dataset: str, epsilon: float, batch: int, epochs: float, rate: float, **more: Any
) -> Preset:
    """A linear model on wavelets."""
    model = {"features": "scattering", "model": "scatter_linear", "torch_init": True, "bound": 0.1}
    plan = {"target_epsilon": epsilon, "batch_size": batch, "epochs": epochs, "learning_rate": rate}
    return Preset(result, {"dataset": dataset, **model, **plan, **more})


PRESETS = {
    "mnist_eps1": _wavelets("98.1", "mnist", 1.0, 2048, 15.0, 8.0),
    "mnist_eps2": _wavelets("98.1", "mnist", 2.0, 2048, 15.0, 8.0),
}


def apply(given: flags.FlagValues) -> None:
    """Sets the flags of the preset, if there is one; flags that were typed win."""
    for name, value in PRESETS[given.preset].flags.items() if given.preset else ():
        if not given[name].present:
            given[name].value = value

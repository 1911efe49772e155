# SPDX-License-Identifier: Apache-2.0
"""Presets of `dpjax train`: rows of accuracies by name, each with its result and its flags.

A part of the training data chose the settings, and no test data; `experiments/accuracy.py` runs
the rows, and `experiments/results/README.md` says what their search would cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from absl import flags


class Preset(NamedTuple):
    """Test accuracy in per cent over seeds, and the flags that reach it."""

    result: str
    flags: Mapping[str, Any]


def _linear(of: str, epsilon: float, batch: int, epochs: float, rate: float, **more: Any) -> Any:
    """The flags of a linear model on wavelets."""
    fixed = {"features": "scattering", "model": "scatter_linear", "torch_init": True, "bound": 0.1}
    chosen = {"batch_size": batch, "epochs": epochs, "learning_rate": rate}
    return {"dataset": of, "target_epsilon": epsilon, **fixed, **chosen, **more}


PRESETS = {
    "mnist_eps1": Preset(
        "98.3 (98.2 to 98.3, 5 seeds)", _linear("mnist", 1.0, 2048, 15.0, 4.0, average=0.98)
    ),
    "mnist_eps2": Preset("98.5 (98.4 to 98.5, 5 seeds)", _linear("mnist", 2.0, 2048, 15.0, 8.0)),
    "mnist_eps3": Preset("98.6 (98.6 to 98.7, 5 seeds)", _linear("mnist", 3.0, 2048, 15.0, 8.0)),
    "mnist_eps8": Preset("98.8 (98.7 to 98.8, 5 seeds)", _linear("mnist", 8.0, 2048, 15.0, 16.0)),
    "fashion_mnist_eps1": Preset(
        "88.3 (88.2 to 88.5, 5 seeds)", _linear("fashion_mnist", 1.0, 8192, 30.0, 0.8, bound=1.0)
    ),
    "fashion_mnist_eps2": Preset(
        "89.3 (89.1 to 89.6, 5 seeds)", _linear("fashion_mnist", 2.0, 8192, 30.0, 1.6, bound=1.0)
    ),
    "fashion_mnist_eps3": Preset(
        "89.7 (89.6 to 89.9, 5 seeds)", _linear("fashion_mnist", 3.0, 8192, 30.0, 1.6, bound=1.0)
    ),
    "fashion_mnist_eps8": Preset(
        "90.5 (90.4 to 90.5, 5 seeds)", _linear("fashion_mnist", 8.0, 8192, 30.0, 3.2, bound=1.0)
    ),
}


def apply(given: flags.FlagValues) -> None:
    """Sets the flags of the preset, where there is one; flags that were typed win."""
    for name, value in PRESETS[given.preset].flags.items() if given.preset else ():
        if not given[name].present:
            given[name].value = value

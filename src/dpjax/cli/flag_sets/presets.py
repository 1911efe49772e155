# SPDX-License-Identifier: Apache-2.0
"""Presets of `dpjax train`: rows of accuracies by name, each with its result and its flags.

A part of the training data chose the settings, and no test data; `experiments/accuracy.py` runs
the rows, and `experiments/results/README.md` has the cost of their search.
"""

from __future__ import annotations

from typing import Any

from absl import flags

_LINEAR = {"features": "scattering", "model": "scatter_linear", "torch_init": True}
_CNN = {
    "features": "scattering",
    "model": "scatter_cnn",
    "torch_init": True,
    "loss": "composite",
    "loss_options": ["threshold=2", "beta=11", "gamma=10"],
}
_NUMBERS = ("batch_size", "epochs", "learning_rate", "average", "bound")
# Each has the test accuracy in per cent, the model, and the values of `_NUMBERS`.
ROWS: dict[str, Any] = {
    "mnist_eps1": ("98.3 (98.2 to 98.3, 5 seeds)", _LINEAR, 2048, 15.0, 4.0, 0.98, 0.1),
    "mnist_eps2": ("98.5 (98.3 to 98.7, 10 seeds)", _CNN, 4096, 40.0, 4.0, 0.98, 0.1),
    "mnist_eps3": ("98.8 (98.6 to 98.9, 10 seeds)", _CNN, 4096, 40.0, 4.0, 0.98, 0.1),
    "mnist_eps8": ("98.9 (98.8 to 99.0, 5 seeds)", _CNN, 4096, 40.0, 8.0, 0.98, 0.1),
    "fashion_mnist_eps1": ("88.3 (88.2 to 88.5, 5 seeds)", _LINEAR, 8192, 30.0, 0.8, 0.95, 1.0),
    "fashion_mnist_eps2": ("89.3 (89.1 to 89.6, 5 seeds)", _LINEAR, 8192, 30.0, 1.6, 0.95, 1.0),
    "fashion_mnist_eps3": ("89.7 (89.6 to 89.9, 5 seeds)", _LINEAR, 8192, 30.0, 1.6, 0.95, 1.0),
    "fashion_mnist_eps8": ("90.5 (90.4 to 90.5, 5 seeds)", _LINEAR, 8192, 30.0, 3.2, 0.95, 1.0),
}


def flags_of(name: str) -> dict[str, Any]:
    """The flags of a preset."""
    dataset, _, epsilon = name.rpartition("_eps")
    _, model, *numbers = ROWS[name]
    named = zip(_NUMBERS, numbers, strict=True)
    return {"dataset": dataset, "target_epsilon": float(epsilon), **model, **dict(named)}


def apply(given: flags.FlagValues) -> None:
    """Sets the flags of the preset, where there is one; flags that were typed win."""
    if not given.preset:
        return
    for name, value in flags_of(given.preset).items():
        if not given[name].present:
            given[name].value = value

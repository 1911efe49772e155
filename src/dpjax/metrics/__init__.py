# SPDX-License-Identifier: Apache-2.0
"""What a model reaches on examples with known answers.

| from | metrics | computed by |
|---|---|---|
| logits and labels | accuracy, calibration | JAX, also inside `jax.jit` |
| one score an example, labels 0 and 1 | `auroc`, `average_precision` | NumPy, in float64 |
| predicted quantities | `rmse`, `mae`, `r2` | NumPy, in float64 |

These numbers have no noise: on training data they are as private as the data.
"""

from dpjax.metrics.logits import (
    Reliability,
    accuracy,
    balanced_accuracy,
    brier,
    confusion,
    ece,
    mce,
    nll,
    per_class_accuracy,
    reliability,
)
from dpjax.metrics.scores import auroc, average_precision, bootstrap, mae, r2, rmse

__all__ = [
    "Reliability",
    "accuracy",
    "auroc",
    "average_precision",
    "balanced_accuracy",
    "bootstrap",
    "brier",
    "confusion",
    "ece",
    "mae",
    "mce",
    "nll",
    "per_class_accuracy",
    "r2",
    "reliability",
    "rmse",
]

# SPDX-License-Identifier: Apache-2.0
"""The network and the data of convergence_calibration_2023 that are at hand: a CNN for MNIST.

MNIST is scaled by 0.1307 and 0.3081, as the paper's example has it and as is common.  These two
numbers are moments of the private training images, and epsilon does not count them.  With public
constants, such as 0.5 and 0.5, epsilon would cover everything, but every MNIST result would change.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn

from dpjax import data, models
from experiments.common import runs


def prepared() -> tuple[data.Dataset, Any]:
    """Data and model; with --smoke small ones."""
    if runs.SMOKE.value:
        return data.load("digits"), models.MLP(features=(32,), activation=nn.relu)
    dataset = runs.loaded("mnist")
    # By the constants of the example that the paper follows, Opacus' mnist.py.
    train, test = (
        (data.standardize(x, mean=0.1307, scale=0.3081), y)
        for x, y in (dataset.train, dataset.test)
    )
    model = models.TemperedCNN(activation=nn.relu, torch_init=True)
    return dataset._replace(train=train, test=test), model

# SPDX-License-Identifier: Apache-2.0
"""Losses of one example, and the step from a model to a function of parameters.

A private gradient is clipped example by example, so a loss here takes the output for **one**
example and returns one number, in float32 or wider. `of` joins a Linen module and such a loss
into the ``loss(params, example)`` that the rest of dpjax takes; any other pure function of that
form, made with NNX or Equinox, works too. `augmented` averages a loss over views of an example.

`classification` and `regression` hold the plain losses, `combined` the loss of losing_less_2022,
which also reads the epoch and the pre-activations.
"""

from dpjax.losses.augmentation import augmented
from dpjax.losses.classification import cross_entropy, focal, one_hot
from dpjax.losses.combined import composite
from dpjax.losses.modules import ExampleLoss, of
from dpjax.losses.regression import absolute, huber, squared_error

__all__ = [
    "ExampleLoss",
    "absolute",
    "augmented",
    "composite",
    "cross_entropy",
    "focal",
    "huber",
    "of",
    "one_hot",
    "squared_error",
]

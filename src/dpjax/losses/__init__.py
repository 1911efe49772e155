# SPDX-License-Identifier: Apache-2.0
"""Losses of one example, and the step from a model to a function of parameters.

Private gradients are clipped example by example, so a loss here takes the output for **one**
example and returns one number, in float32 or wider. Any other pure ``loss(params, example)``, made
with NNX or Equinox, works too.
"""

from dpjax.losses.augmentation import augmented
from dpjax.losses.classification import cross_entropy, focal, one_hot, weighted
from dpjax.losses.combined import composite
from dpjax.losses.modules import ExampleLoss, of
from dpjax.losses.people import of_person
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
    "of_person",
    "one_hot",
    "squared_error",
    "weighted",
]

# SPDX-License-Identifier: Apache-2.0
"""Losses of one example, and the step from a model to a function of parameters.

A private gradient is clipped example by example, so a loss here takes the output for
**one** example and returns one number; averaging is not its business.  `classification`
and `regression` hold the plain ones, `combined` the one of losing_less_2022, which also
looks at the epoch and at pre-activations.  `of` joins a module and a loss into the
``loss(params, example)`` that the rest of dpjax asks for; any other pure function of that
form, made with NNX or Equinox, does as well.  `augmented` averages it over views of an
example.

All are computed in float32 or wider.  This room must never know of batches, clipping or
noise.
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

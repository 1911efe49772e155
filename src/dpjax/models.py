# SPDX-License-Identifier: Apache-2.0
"""The networks of the papers, and two plain friends, as Flax Linen modules.

Each takes **one example**, without a batch axis, because a private loss is a function
of one example; a batch on leading axes gives the same answers.  Images are channels-last.
None has batch normalisation: it mixes the examples of a batch, and then no bound on one
example's influence holds.

A model maps an input to logits (or predictions).  It must never know how it is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

__all__ = ["CIFARCNN", "MLP", "TemperedCNN", "by_name"]

Activation: TypeAlias = Callable[[Array], Array]


class MLP(nn.Module):
    """A multilayer perceptron; with no hidden layers, a linear model.

    ==================  =======================================
    shape of the input  read as
    ==================  =======================================
    ``(d,)``            one vector
    ``(batch, d)``      a batch of vectors
    ``(h, w, c)``       one image, flattened
    ``(..., h, w, c)``  a batch of images, each flattened
    ==================  =======================================

    Attributes:
      features: Widths of the hidden layers.
      classes: Width of the output; 1 for regression of one number.
      activation: Applied after every hidden layer.

    Example:
      >>> import jax
      >>> image = jax.ShapeDtypeStruct((8, 8, 1), jnp.float32)
      >>> jax.eval_shape(MLP(features=(32,)).init_with_output, jax.random.key(0), image)[0].shape
      (10,)
    """

    features: Sequence[int] = (64, 64)
    classes: int = 10
    activation: Activation = jnp.tanh

    @nn.compact
    def __call__(self, x: Float[Array, "*example"]) -> Float[Array, "*batch classes"]:
        """Gives the logits of one example, or of a batch."""
        if x.ndim >= 3:
            x = x.reshape(*x.shape[:-3], -1)
        for width in self.features:
            x = self.activation(nn.Dense(width)(x))
        return nn.Dense(self.classes)(x)


class TemperedCNN(nn.Module):
    """The small convolutional network of the MNIST papers: 26,010 parameters.

    Conv 16, 8x8, stride 2 - max-pool 2x2, stride 1 - Conv 32, 4x4, stride 2, no padding -
    max-pool 2x2, stride 1 - dense 32 - dense ``classes``, each hidden layer activated.
    Two paddings of the first layer are in use, with the same parameters: "SAME" (sides
    28, 14, 13, 5, 4) and 2 (sides 28, 13, 12, 5, 4).

    Attributes:
      classes: Number of logits.
      activation: Applied after every hidden layer.
      padding: Of the first convolution: "SAME", or pixels on each side.

    Example:
      >>> import jax
      >>> image = jax.ShapeDtypeStruct((28, 28, 1), jnp.float32)
      >>> jax.eval_shape(TemperedCNN().init_with_output, jax.random.key(0), image)[0].shape
      (10,)

    References:
      Papernot et al., "Tempered Sigmoid Activations for Deep Learning with Differential
      Privacy", 2021, table 1 ("SAME").  Tramer and Boneh, "Differentially Private Learning
      Needs Better Features (or Much More Data)", 2021, appendix (2).
    """

    classes: int = 10
    activation: Activation = jnp.tanh
    padding: str | int = "SAME"

    @nn.compact
    def __call__(self, x: Float[Array, "*batch height width channels"]) -> Float[Array, "..."]:
        """Gives the logits of one image, or of a batch."""
        _expect_image("TemperedCNN", x, smallest=16)
        pool = partial(nn.max_pool, window_shape=(2, 2), strides=(1, 1))
        x = pool(self.activation(nn.Conv(16, (8, 8), strides=2, padding=self.padding)(x)))
        x = pool(self.activation(nn.Conv(32, (4, 4), strides=2, padding="VALID")(x)))
        x = x.reshape(*x.shape[:-3], -1)
        x = self.activation(nn.Dense(32)(x))
        return nn.Dense(self.classes)(x)


class CIFARCNN(nn.Module):
    """An all-convolutional network for 32x32 colour images: 605,226 parameters.

    Three blocks of [conv, conv, average-pool 2x2] with 32, 64 and 128 channels, a
    convolution of 256, one of ``classes`` channels, and the mean over what is left of the
    image.  All convolutions are 3x3 and keep the size; all but the last are activated.

    Attributes:
      classes: Number of logits.
      activation: Applied after every convolution but the last.

    Example:
      >>> import jax
      >>> image = jax.ShapeDtypeStruct((32, 32, 3), jnp.float32)
      >>> jax.eval_shape(CIFARCNN().init_with_output, jax.random.key(0), image)[0].shape
      (10,)

    References:
      Papernot et al., "Tempered Sigmoid Activations for Deep Learning with Differential
      Privacy", 2021, table 2.
    """

    classes: int = 10
    activation: Activation = jnp.tanh

    @nn.compact
    def __call__(self, x: Float[Array, "*batch height width channels"]) -> Float[Array, "..."]:
        """Gives the logits of one image, or of a batch."""
        _expect_image("CIFARCNN", x, smallest=8)
        for channels in (32, 64, 128):
            x = self.activation(nn.Conv(channels, (3, 3))(x))
            x = self.activation(nn.Conv(channels, (3, 3))(x))
            x = nn.avg_pool(x, (2, 2), strides=(2, 2))
        x = self.activation(nn.Conv(256, (3, 3))(x))
        x = nn.Conv(self.classes, (3, 3))(x)
        return x.mean(axis=(-3, -2))


_NAMED: MappingProxyType[str, Callable[..., nn.Module]] = MappingProxyType(
    {
        "cifar_cnn": CIFARCNN,
        "linear": partial(MLP, features=()),
        "mlp": MLP,
        "tempered_cnn": TemperedCNN,
    }
)


def by_name(
    name: str, classes: int, *, activation: Activation = jnp.tanh, **options: Any
) -> nn.Module:
    """Finds a model by the word that users type on a command line.

    Args:
      name: ``"linear"``, ``"mlp"`` (any shape of input), ``"tempered_cnn"`` (28x28 images)
        or ``"cifar_cnn"`` (32x32 images).
      classes: Number of outputs.
      activation: Of the hidden layers.
      **options: Further fields of the module, such as ``features`` of an MLP.

    Returns:
      The module, not yet initialised.

    Example:
      >>> by_name("mlp", classes=10).features
      (64, 64)
    """
    if name not in _NAMED:
        raise ValueError(
            f"models.by_name({name!r}): expected one of {', '.join(_NAMED)}. "
            "A module of your own needs no name: pass it to losses.of."
        )
    return _NAMED[name](classes=classes, activation=activation, **options)


def _expect_image(name: str, x: Array, *, smallest: int) -> None:
    if x.ndim < 3 or min(x.shape[-3:-1]) < smallest:
        raise ValueError(
            f"models.{name}: got an input of shape {x.shape}; expected [..., height, width, "
            f"channels] with sides of at least {smallest}. A missing channel axis is the usual "
            "cause (x[..., None] adds it); for smaller images use models.MLP."
        )

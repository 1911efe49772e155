# SPDX-License-Identifier: Apache-2.0
"""The networks of the five papers, parameter for parameter, for pixels and wavelet features."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from dpjax.models import _parts

_LECUN: _parts.Initializer = nn.initializers.lecun_normal()
Images = Float[Array, "*batch height width channels"]
Logits = Float[Array, "*batch classes"]


class MLP(nn.Module):
    """A multilayer perceptron; with no hidden layers, a linear model.

    The last three axes of an input of three or more are an image, which is flattened. On wavelet
    features the linear model has 39,700 parameters for ``(7, 7, 81)`` and 155,530 for
    ``(8, 8, 243)``.

    Attributes:
      features: Widths of the hidden layers; ``(64, 64, 32)`` with ``classes=1`` and ReLU
        is the regression network of convergence_calibration_2023.
      classes: Width of the output; 1 for regression of one number.
      activation: Applied after every hidden layer.
      kernel_init: Draws the kernels; biases start at 0.
      torch_init: Kernels and biases start as in PyTorch instead.

    Example:
      >>> import jax
      >>> image = jax.ShapeDtypeStruct((8, 8, 1), jnp.float32)
      >>> jax.eval_shape(MLP(features=(32,)).init_with_output, jax.random.key(0), image)[0].shape
      (10,)

    References:
      Bu et al., "On the Convergence and Calibration of Deep Learning with Differential Privacy",
      2023, appendix on regression.
    """

    features: Sequence[int] = (64, 64)
    classes: int = 10
    activation: _parts.Activation = jnp.tanh
    kernel_init: _parts.Initializer = _LECUN
    torch_init: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "*example"]) -> Logits:
        """Gives the logits of one example, or of a batch."""
        if x.ndim >= 3:  # two axes are a batch of vectors, not an image
            x = _parts.flat(x)
        for width in self.features:
            h = _parts.dense(self, x, width)
            x = _parts.activated(self, self.activation, h)
        return _parts.dense(self, x, self.classes)


class TemperedCNN(nn.Module):
    """The small convolutional network of the MNIST papers: 26,010 parameters.

    Conv 16, 8x8, stride 2 - max-pool 2x2, stride 1 - Conv 32, 4x4, stride 2, no padding -
    max-pool 2x2, stride 1 - dense 32 - dense ``classes``, each hidden layer activated.
    Two paddings of the first layer are in use, with the same parameters: "SAME" (sides
    28, 14, 13, 5, 4) and 2 (sides 28, 13, 12, 5, 4). The other fields are as in `MLP`.

    Attributes:
      padding: Of the first convolution: "SAME", or pixels on each side.

    Example:
      >>> import jax
      >>> image = jax.ShapeDtypeStruct((28, 28, 1), jnp.float32)
      >>> jax.eval_shape(TemperedCNN().init_with_output, jax.random.key(0), image)[0].shape
      (10,)

    References:
      Papernot et al., "Tempered Sigmoid Activations", 2021, table 1 ("SAME"). Tramer and Boneh,
      "Differentially Private Learning Needs Better Features", 2021, appendix (2).
    """

    classes: int = 10
    activation: _parts.Activation = jnp.tanh
    padding: str | int = "SAME"
    kernel_init: _parts.Initializer = _LECUN
    torch_init: bool = False

    @nn.compact
    def __call__(self, x: Images) -> Logits:
        """Gives the logits of one image, or of a batch."""
        # The last pooling needs this many pixels with padding=2.
        _parts.expect_image("TemperedCNN", x, smallest=16)
        activated = partial(_parts.activated, self, self.activation)
        x = activated(_parts.conv(self, x, 16, 8, strides=2, padding=self.padding))
        x = nn.max_pool(x, (2, 2), strides=(1, 1))
        x = activated(_parts.conv(self, x, 32, 4, strides=2, padding="VALID"))
        x = nn.max_pool(x, (2, 2), strides=(1, 1))
        x = activated(_parts.dense(self, _parts.flat(x), 32))
        return _parts.dense(self, x, self.classes)


class CIFARCNN(nn.Module):
    """An all-convolutional network for 32x32 colour images: 605,226 parameters.

    Three blocks of [conv, conv, average-pool 2x2] with 32, 64 and 128 channels, a convolution of
    256, one of ``classes`` channels, and the mean over the image. All convolutions are 3x3 and keep
    the size; all but the last are activated. The other fields are as in `MLP`.

    Example:
      >>> import jax
      >>> image = jax.ShapeDtypeStruct((32, 32, 3), jnp.float32)
      >>> jax.eval_shape(CIFARCNN().init_with_output, jax.random.key(0), image)[0].shape
      (10,)

    References:
      Papernot et al., "Tempered Sigmoid Activations", 2021, table 2.
    """

    classes: int = 10
    activation: _parts.Activation = jnp.tanh
    kernel_init: _parts.Initializer = _LECUN
    torch_init: bool = False

    @nn.compact
    def __call__(self, x: Images) -> Logits:
        """Gives the logits of one image, or of a batch."""
        _parts.expect_image("CIFARCNN", x, smallest=8)  # three poolings halve the sides
        x = self._blocks(x, nn.avg_pool)
        h = _parts.conv(self, x, 256, 3)
        x = _parts.activated(self, self.activation, h)
        return _parts.conv(self, x, self.classes, 3).mean(axis=(-3, -2))

    def _blocks(self, x: Images, pooling: _parts.Pooling) -> Array:
        """The three blocks that both networks for CIFAR-10 share."""
        for channels in (32, 64, 128):
            for _ in range(2):
                h = _parts.conv(self, x, channels, 3)
                x = _parts.activated(self, self.activation, h)
            x = pooling(x, (2, 2), strides=(2, 2))
        return x


class CIFARDenseCNN(CIFARCNN):
    """A network for 32x32 colour images with a dense head: 550,570 parameters.

    Three blocks of [conv, conv, max-pool 2x2] with 32, 64 and 128 channels, a dense layer
    of 128 and one of ``classes``. The fields are the same as in `CIFARCNN`.

    Example:
      >>> import jax
      >>> image = jax.ShapeDtypeStruct((32, 32, 3), jnp.float32)
      >>> jax.eval_shape(CIFARDenseCNN().init_with_output, jax.random.key(0), image)[0].shape
      (10,)

    References:
      Shamsabadi and Papernot, "Losing Less", 2022, table 2.
    """

    @nn.compact
    def __call__(self, x: Images) -> Logits:
        """Gives the logits of one image, or of a batch."""
        _parts.expect_image("CIFARDenseCNN", x, smallest=8)  # three poolings halve the sides
        x = self._blocks(x, nn.max_pool)
        h = _parts.dense(self, _parts.flat(x), 128)
        x = _parts.activated(self, self.activation, h)
        return _parts.dense(self, x, self.classes)


class ScatterCNN(nn.Module):
    """A network on ``(7, 7, 81)`` wavelet features of 28x28 images: 33,066 parameters.

    Conv 16, 3x3, stride 2 - Conv 32, 3x3 - dense 32 - dense ``classes``. The other fields are
    as in `MLP`.

    Attributes:
      as_printed: With the two 2x2 poolings of stride 1 that the table of losing_less_2022
        prints and the published code does not have: 20,778 parameters.

    Example:
      >>> import jax
      >>> features = jax.ShapeDtypeStruct((7, 7, 81), jnp.float32)
      >>> jax.eval_shape(ScatterCNN().init_with_output, jax.random.key(0), features)[0].shape
      (10,)

    References:
      Tramer and Boneh, "Differentially Private Learning Needs Better Features", 2021, and its
      code. Shamsabadi and Papernot, "Losing Less", 2022, table 3.
    """

    classes: int = 10
    activation: _parts.Activation = jnp.tanh
    as_printed: bool = False
    kernel_init: _parts.Initializer = _LECUN
    torch_init: bool = False

    @nn.compact
    def __call__(self, x: Images) -> Logits:
        """Gives the logits of one example's features, or of a batch."""
        # Each side is halved, and then loses a pixel to each of the two poolings.
        _parts.expect_image("ScatterCNN", x, smallest=5)
        for channels, stride in ((16, 2), (32, 1)):
            # The padding is given, because "SAME" with stride 2 pads even sides at one end only.
            h = _parts.conv(self, x, channels, 3, strides=stride, padding=1)
            x = _parts.activated(self, self.activation, h)
            if self.as_printed:
                x = nn.max_pool(x, (2, 2), strides=(1, 1))
        h = _parts.dense(self, _parts.flat(x), 32)
        x = _parts.activated(self, self.activation, h)
        return _parts.dense(self, x, self.classes)


class ScatterCIFARCNN(ScatterCNN):
    """A network on ``(8, 8, 243)`` wavelet features of 32x32 images: 187,210 parameters.

    Conv 64, 3x3 - max-pool 2x2, stride 2 - Conv 64, 3x3 - dense ``classes``. The other fields
    are the same as in `ScatterCNN`.

    Attributes:
      as_printed: Two convolutions and a pooling in each block, as the table of
        losing_less_2022 prints and the published code does not: 253,386 parameters.

    Example:
      >>> import jax
      >>> features = jax.ShapeDtypeStruct((8, 8, 243), jnp.float32)
      >>> jax.eval_shape(ScatterCIFARCNN().init_with_output, jax.random.key(0), features)[0].shape
      (10,)

    References:
      As `ScatterCNN`; table 4.
    """

    @nn.compact
    def __call__(self, x: Images) -> Logits:
        """Gives the logits of one example's features, or of a batch."""
        _parts.expect_image("ScatterCIFARCNN", x, smallest=4)  # two poolings may halve the sides
        convolutions = 2 if self.as_printed else 1
        for block in range(2):
            for _ in range(convolutions):
                h = _parts.conv(self, x, 64, 3)
                x = _parts.activated(self, self.activation, h)
            # The published code, which is the default, pools once; the table of the paper twice.
            if block == 0 or self.as_printed:
                x = nn.max_pool(x, (2, 2), strides=(2, 2))
        return _parts.dense(self, _parts.flat(x), self.classes)

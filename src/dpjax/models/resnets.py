# SPDX-License-Identifier: Apache-2.0
"""Wide residual networks without batch statistics, for large-batch private training on images."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
from jaxtyping import Array, Float

from dpjax.models import _parts

_HE: _parts.Initializer = nn.initializers.he_normal()


class WideResNet(nn.Module):
    """A wide residual network with group normalisation.

    Conv 3x3 of 16 channels; three stages of ``(depth - 4) / 6`` blocks with 16, 32 and 64
    times ``width`` channels, the later two halving the sides; norm, activation, mean over
    the image, dense ``classes``. A block is [norm, activation, conv 3x3] twice, added to
    its input; where channels or sides change, the input passes a 1x1 convolution.
    WRN-28-10 has 36,479,194 parameters, WRN-16-4 has 2,748,890.

    Attributes:
      depth: 6 n + 4 layers.
      width: Factor of the channels.
      groups: Of every norm; must divide 16.
      standardized: Whether the kernels of convolutions are standardised, which regains part of the
        accuracy of batch normalisation.
      kernel_init: As in `MLP`, like ``torch_init``.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> image = jax.ShapeDtypeStruct((32, 32, 3), jnp.float32)
      >>> model = WideResNet(depth=10, width=1)
      >>> jax.eval_shape(model.init_with_output, jax.random.key(0), image)[0].shape
      (10,)

    References:
      Zagoruyko and Komodakis, "Wide Residual Networks", 2016. De et al., "Unlocking High-Accuracy
      Differentially Private Image Classification through Scale", 2022, section 3.
    """

    classes: int = 10
    depth: int = 16
    width: int = 4
    groups: int = 16
    activation: _parts.Activation = nn.relu
    standardized: bool = False
    kernel_init: _parts.Initializer = _HE
    torch_init: bool = False

    @nn.compact
    def __call__(
        self, x: Float[Array, "*batch height width channels"]
    ) -> Float[Array, "*batch classes"]:
        """Gives the logits of one image, or of a batch."""
        _parts.expect_image("WideResNet", x, smallest=4)  # two stages halve the sides
        # The depth counts convolutions: the first one, 2 in each block of the 3 stages, and one
        # shortcut in each stage. Width 1 needs none in the first stage, but counts it.
        blocks_per_stage, rest = divmod(self.depth - 4, 6)
        if rest or blocks_per_stage < 1:
            raise ValueError(f"models.WideResNet(depth={self.depth}): depth must be 6 n + 4.")
        x = self._conv(x, 16, 3)
        for stage in range(3):
            channels = 2**stage * 16 * self.width
            for block in range(blocks_per_stage):
                halves_sides = stage > 0 and block == 0
                x = self._block(x, channels, stride=2 if halves_sides else 1)
        x = self._activated_norm(x).mean(axis=(-3, -2))  # over the image: [*batch, channels]
        return _parts.dense(self, x, self.classes)

    def _block(self, x: Array, channels: int, stride: int) -> Array:
        """Twice norm, activation and convolution, added to the input."""
        h = self._activated_norm(x)
        if stride != 1 or x.shape[-1] != channels:
            # The shortcut branches off behind the norm, as in all pre-activation blocks.
            x = self._conv(h, channels, 1, strides=stride)
        h = self._activated_norm(self._conv(h, channels, 3, strides=stride))
        return x + self._conv(h, channels, 3)

    def _activated_norm(self, x: Array) -> Array:
        return _parts.activated(self, self.activation, _parts.group_norm(x, self.groups))

    def _conv(self, x: Array, channels: int, kernel: int, **options: Any) -> Array:
        if self.standardized:
            # This hook of Flax keeps the published names of the parameters.
            options["conv_general_dilated"] = _parts.standardized
        return _parts.conv(self, x, channels, kernel, use_bias=False, **options)

# SPDX-License-Identifier: Apache-2.0
"""Where weights begin: Flax's defaults, one's own, or PyTorch's.

The published private results were trained in PyTorch, whose layers begin with uniform
kernels *and* biases of a width given by the fan-in; Flax begins with normal kernels and
zero biases.  Private training has few steps and feels the difference, so every model of
this room takes ``torch_init=True``.

Only shapes matter here.  This file must never know what a layer is for.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax.linen import initializers
from jaxtyping import Array

from dpjax.types import Key


class Initializer(Protocol):
    """Anything that makes an array from a key, a shape and a dtype."""

    def __call__(self, key: Key, shape: Any, dtype: Any = ..., /) -> Any:
        """Draws the array."""
        ...


class Styled(Protocol):
    """What a model says about its beginnings."""

    @property
    def kernel_init(self) -> Initializer:
        """Draws kernels; biases begin at 0."""
        ...

    @property
    def torch_init(self) -> bool:
        """Whether kernels and biases begin as PyTorch's do instead."""
        ...


def symmetric(limit: float) -> Initializer:
    """Uniform draws between ``-limit`` and ``limit``.

    Example:
      >>> draws = symmetric(0.5)(jax.random.key(0), (1000,), jnp.float32)
      >>> bool((abs(draws) <= 0.5).all() and draws.min() < -0.4)
      True
    """

    def init(key: Key, shape: Any, dtype: Any = jnp.float32, /) -> Array:
        return jax.random.uniform(key, shape, dtype, -limit, limit)

    return init


def layer(style: Styled, fan_in: int) -> dict[str, Any]:
    r"""The initialisers of a dense or convolutional layer, as arguments for Flax.

    PyTorch's: kernel and bias uniform in :math:`\pm 1/\sqrt{\text{fan-in}}`.

    Args:
      style: The model.
      fan_in: How many inputs each output sums over.

    Returns:
      ``kernel_init`` and ``bias_init``.

    References:
      He, Zhang, Ren and Sun, "Delving Deep into Rectifiers", 2015, section 2.2, with the
      slope of the square root of 5 that PyTorch's `Linear` and `Conv2d` pass.
    """
    if style.torch_init:
        uniform = symmetric(1 / math.sqrt(fan_in))
        return {"kernel_init": uniform, "bias_init": uniform}
    return {"kernel_init": style.kernel_init, "bias_init": initializers.zeros}


def attention(style: Styled, width: int) -> dict[str, Any]:
    r"""The initialisers of an attention layer, as arguments for Flax.

    PyTorch's: query, key and value are one matrix of ``width`` by ``3 width``, uniform in
    :math:`\pm\sqrt{6 / (4\,\text{width})}`; the output as any layer's; biases 0.
    """
    if not style.torch_init:
        return {"kernel_init": style.kernel_init, "bias_init": initializers.zeros}
    return {
        "kernel_init": symmetric(math.sqrt(6 / (4 * width))),
        "out_kernel_init": symmetric(1 / math.sqrt(width)),
        "bias_init": initializers.zeros,
    }


def embedding(style: Styled) -> Initializer:
    """The initialiser of a table of embeddings: PyTorch's has deviation 1, others 0.02."""
    return initializers.normal(1.0 if style.torch_init else 0.02)

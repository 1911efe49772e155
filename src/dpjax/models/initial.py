# SPDX-License-Identifier: Apache-2.0
"""Initialisers: Flax's defaults, the caller's own, or PyTorch's.

The published private results were trained in PyTorch, which draws kernels *and* biases uniformly,
with a width given by the fan-in. Flax draws normal kernels and sets biases to zero. Private
training has few steps, so the difference is visible in accuracy; every model of this room takes
``torch_init=True``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax.linen import initializers
from jaxtyping import Array

from dpjax.types import Key

Initializer: TypeAlias = Callable[..., Any]
"""``(key, shape, dtype) -> array``, as the initialisers of Flax are.

Models hold one as ``kernel_init``; functions here take the model as ``style``.
"""


def symmetric(limit: float) -> Initializer:
    """Uniform draws between ``-limit`` and ``limit``."""

    def init(key: Key, shape: Any, dtype: Any = jnp.float32, /) -> Array:
        return jax.random.uniform(key, shape, dtype, -limit, limit)

    return init


def layer(style: Any, fan_in: int) -> dict[str, Any]:
    r"""The initialisers of a dense or convolutional layer, as arguments for Flax.

    PyTorch's are uniform in $\pm 1/\sqrt{\text{fan-in}}$, for the kernel and the bias; the fan-in
    is the number of inputs that each output sums over.

    References:
      He, Zhang, Ren and Sun, "Delving Deep into Rectifiers", 2015, section 2.2, with the
      slope of the square root of 5 that PyTorch's `Linear` and `Conv2d` pass.
    """
    if style.torch_init:
        uniform = symmetric(1 / math.sqrt(fan_in))
        return {"kernel_init": uniform, "bias_init": uniform}
    return {"kernel_init": style.kernel_init, "bias_init": initializers.zeros}


def attention(style: Any, width: int) -> dict[str, Any]:
    r"""The initialisers of an attention layer, as arguments for Flax.

    In PyTorch, query, key and value are one matrix of ``width`` by ``3 width``, uniform in
    $\pm\sqrt{6 / (4\,\text{width})}$; the output layer is as in `layer`, without the bias.
    """
    if not style.torch_init:
        return {"kernel_init": style.kernel_init, "bias_init": initializers.zeros}
    # Xavier's bound with fan-in `width` and fan-out `3 width`: PyTorch draws the three together.
    return {
        "kernel_init": symmetric(math.sqrt(6 / (4 * width))),
        "out_kernel_init": symmetric(1 / math.sqrt(width)),
        "bias_init": initializers.zeros,
    }


def embedding(style: Any) -> Initializer:
    """The initialiser of a table of embeddings: PyTorch's has deviation 1, others 0.02."""
    # 0.02 is BERT's and GPT's; deviation 1 is nn.Embedding's default.
    return initializers.normal(1.0 if style.torch_init else 0.02)

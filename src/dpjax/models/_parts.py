# SPDX-License-Identifier: Apache-2.0
"""The parts of the networks: initialisers, layers, norms, kept pre-activations.

Helpers are called inside a module's ``__call__``; ``style`` is the module, which chooses the
initialisers. Published private results used PyTorch's. Private training has few steps, so their
difference from Flax's is visible in accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import initializers
from jaxtyping import Array, Float

from dpjax.models.activations import Activation
from dpjax.types import Key

Initializer: TypeAlias = Callable[..., Any]
"""``(key, shape, dtype) -> array``, as the initialisers of Flax are."""
Pooling: TypeAlias = Callable[..., Array]
"""``(x, window_shape, strides=...) -> x``, as `flax.linen.max_pool` is."""


def _uniform(limit: float) -> Initializer:
    """Draws evenly from ``-limit`` to ``limit``."""

    def init(key: Key, shape: Any, dtype: Any = jnp.float32, /) -> Array:
        return jax.random.uniform(key, shape, dtype, -limit, limit)

    return init


def _layer(style: Any, fan_in: int) -> dict[str, Any]:
    r"""The initialisers of a dense or convolutional layer, as arguments for Flax.

    PyTorch's are uniform in $\pm 1/\sqrt{\text{fan-in}}$, for the kernel and the bias.
    """
    if style.torch_init:
        uniform = _uniform(1 / math.sqrt(fan_in))
        return {"kernel_init": uniform, "bias_init": uniform}
    return {"kernel_init": style.kernel_init, "bias_init": initializers.zeros}


def attention_init(style: Any, width: int) -> dict[str, Any]:
    """The initialisers of an attention layer, as arguments for Flax."""
    if not style.torch_init:
        return {"kernel_init": style.kernel_init, "bias_init": initializers.zeros}
    # Xavier's bound has fan-in `width` and fan-out `3 width`, since PyTorch draws three kernels as
    # one.
    return {
        "kernel_init": _uniform(math.sqrt(6 / (4 * width))),
        "out_kernel_init": _uniform(1 / math.sqrt(width)),
        "bias_init": initializers.zeros,
    }


def embedding_init(style: Any) -> Initializer:
    """The initialiser of a table of embeddings: of deviation 1 in PyTorch, 0.02 in BERT and GPT."""
    deviation = 1.0 if style.torch_init else 0.02
    return initializers.normal(deviation)


def dense(
    style: Any, x: Float[Array, "*batch width"], features: int, name: str | None = None
) -> Float[Array, "*batch features"]:
    """A dense layer."""
    return nn.Dense(features, name=name, **_layer(style, x.shape[-1]))(x)


def conv(
    style: Any,
    x: Float[Array, "*batch height width channels"],
    features: int,
    kernel: int,
    name: str | None = None,
    **options: Any,
) -> Float[Array, "*batch rows columns features"]:
    """A convolution with a square kernel; options go to `flax.linen.Conv`."""
    initial = _layer(style, kernel * kernel * x.shape[-1])
    layer = nn.Conv(features, (kernel, kernel), name=name, **initial, **options)
    return layer(x)


def activated(module: nn.Module, activation: Activation, h: Float[Array, "..."]) -> Array:
    """Keeps a pre-activation in the collection "preactivations" and applies the activation."""
    if not module.is_initializing():  # `init` returns everything that is sown as variables
        module.sow("preactivations", "hidden", h)
    return activation(h)


def flat(x: Float[Array, "*batch height width channels"]) -> Float[Array, "*batch pixels"]:
    """An image, or each of a batch, as one vector."""
    # Axes count from the end, because models take one example (in losses) or a batch.
    return x.reshape(*x.shape[:-3], -1)


def group_norm(
    x: Float[Array, "*batch height width channels"], groups: int
) -> Float[Array, "*batch height width channels"]:
    """Normalises each example by itself, channels in groups, with a learnt scale and bias."""
    # The axes are given, because Flax takes the first axis of an unbatched image for a batch and
    # normalises each row. The variance is that of one pass, E[x^2] - E[x]^2: a second pass adds a
    # fourth to the cycles of a WRN-16-4 on a v5e, and helps only where means are hundreds of
    # deviations.
    return nn.GroupNorm(groups, epsilon=1e-5, reduction_axes=(-3, -2, -1))(x)


def standardized(x: Array, kernel: Array, *arguments: Any, **options: Any) -> Array:
    r"""A convolution whose kernel is standardised, for ``Conv(conv_general_dilated=...)``.

    $$ \hat w = (w - \mu_o) / \sqrt{n \, \sigma_o^2 + 10^{-4}} $$

    for each output channel $o$ with $n$ inputs. So the output has the input's variance (Qiao et
    al., "Weight Standardization", 2019; with the factor n of Brock, De and Smith, "Characterizing
    Signal Propagation ... in Unnormalized ResNets", 2021, section 4).
    """
    fan_in = math.prod(kernel.shape[:-1])
    centred = kernel - jnp.mean(kernel, axis=(0, 1, 2), keepdims=True)
    variance = jnp.mean(centred * centred, axis=(0, 1, 2), keepdims=True)
    # The kernel depends only on parameters, so the engine follows it as a view and materialises no
    # kernel gradient per example.
    kernel = centred * jax.lax.rsqrt(fan_in * variance + 1e-4)
    return jax.lax.conv_general_dilated(x, kernel, *arguments, **options)


def expect_image(name: str, x: Array, *, smallest: int) -> None:
    """Raises unless ``x`` ends in ``height, width, channels`` with sides that are long enough."""
    if x.ndim < 3 or min(x.shape[-3:-1]) < smallest:
        raise ValueError(
            f"models.{name}: got an input of shape {x.shape}; expected [..., height, width, "
            f"channels], sides from {smallest}. For a missing channel axis write x[..., None]."
        )

# SPDX-License-Identifier: Apache-2.0
"""Activations. Bounded ones keep gradients from growing, so clipping removes less."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dpjax import checks

Activation: TypeAlias = Callable[[Float[Array, "..."]], Float[Array, "..."]]


def tempered_sigmoid(
    scale: float = 2.0, inverse_temperature: float = 2.0, offset: float = 1.0
) -> Activation:
    r"""Makes a sigmoid of chosen height, steepness and position.

    $$ \phi(x) = s \, \sigma(T x) - o = \tfrac{s}{2} \tanh(\tfrac{T x}{2}) + \tfrac{s}{2} - o $$

    ``scale`` is $s$, the height between the two asymptotes, ``inverse_temperature`` $T$, and
    ``offset`` $o$, how far the lower asymptote lies below zero. The defaults give tanh, to the last
    bit.

    Example:
      >>> import jax.numpy as jnp
      >>> tempered_sigmoid(scale=1.0, inverse_temperature=1.0, offset=0.0)(jnp.zeros(2))
      Array([0.5, 0.5], dtype=float32)

    References:
      Papernot et al., "Tempered Sigmoid Activations for Deep Learning with Differential Privacy",
      2021, equation 3.
    """
    call = "models.tempered_sigmoid"
    scale = checks.positive(call, "scale", scale)
    inverse_temperature = checks.positive(call, "inverse_temperature", inverse_temperature)
    # The code has the second form, because the first subtracts nearly equal numbers around zero.
    # With the defaults both floats are exact, 1 and 0, so the result is tanh.
    half = scale / 2
    centre = half - float(offset)

    def activation(x: Float[Array, "..."]) -> Float[Array, "..."]:
        return half * jnp.tanh((inverse_temperature / 2) * x) + centre

    return activation


# Unbounded ones are here too, because the papers compare tempered sigmoids with them.
_NAMED = MappingProxyType(
    {
        "elu": jax.nn.elu,
        "gelu": jax.nn.gelu,
        "hard_tanh": jax.nn.hard_tanh,
        "identity": lambda x: x,
        "leaky_relu": jax.nn.leaky_relu,
        "mish": jax.nn.mish,
        "relu": jax.nn.relu,
        "selu": jax.nn.selu,
        "sigmoid": jax.nn.sigmoid,
        "silu": jax.nn.silu,
        "softplus": jax.nn.softplus,
        "softsign": jax.nn.soft_sign,
        "tanh": jnp.tanh,
        "tempered_sigmoid": tempered_sigmoid(),
    }
)


def by_name(name: str) -> Activation:
    """Finds an activation by its lower-case name, for command lines and configurations."""
    checks.one_of("models.activations.by_name", "name", name, _NAMED)
    return _NAMED[name]

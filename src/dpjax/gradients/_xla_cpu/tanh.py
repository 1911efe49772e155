# SPDX-License-Identifier: Apache-2.0
"""tanh that XLA on CPU vectorises after a bias of few channels.

Symptom (jaxlib 0.10.2, CPU): XLA fuses tanh with the bias before it and does not vectorise the
fused loop where channels are few. ``make bench BENCH=primitives`` times it ("tanh after a bias").
This file may go when that row shows no gain; ``tests/test_ghost.py`` ("tanh of few channels")
tests its values and derivatives.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dpjax.gradients._xla_cpu.fusion_barrier import apart

# Smaller images, or more channels, gain nothing from a program of their own.
_LEAST, _CHANNELS = 512, 32


def tanh(parameters: dict[str, Any], x: Array) -> Array:
    """The hyperbolic tangent, on CPU in a program of its own."""

    def as_written(x: Array) -> Array:
        return jax.lax.tanh_p.bind(x, **parameters)

    if x.size < _LEAST or x.shape[-1] > _CHANNELS or jnp.iscomplexobj(x):
        return as_written(x)
    alone = apart(as_written)
    separate = jax.custom_vjp(alone)
    # From the output, so that tanh is not computed again on the way back.
    separate.defvjp(lambda x: (y := alone(x), y), lambda y, g: (g * (1 + y) * (1 - y),))
    return separate(x)

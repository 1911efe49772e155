# SPDX-License-Identifier: Apache-2.0
"""Computations of their own: `apart`, which XLA's fusion does not cross on CPU, and `tanh` in one.

Symptom (jaxlib 0.10.2, CPU): XLA fuses neighbouring equations into one loop, and removes barriers
before that. The branch of a `jax.lax.cond` stays a computation of its own. `max_pool` needs it for
correct gradients: `apart` may go when
``test_a_max_pool_in_a_loop_reads_what_nothing_has_written_over`` in ``tests/test_ghost.py`` passes
with ``apart = lambda function: function``. XLA does not vectorise tanh in a loop that is fused with
the bias before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

# Smaller images, or more channels, gain nothing from a tanh of their own.
_LEAST, _CHANNELS = 512, 32


def apart(function: Callable[..., Array]) -> Callable[..., Array]:
    """A function that computes `function`, on CPU in a computation of its own."""

    def on_cpu(x: Array, *others: Array) -> Array:
        # Always true, but behind a barrier XLA cannot fold the condition. NaN in the branch that
        # is never taken would reveal an error.
        always = jax.lax.optimization_barrier(jnp.array(True))
        return jax.lax.cond(always, function, lambda x, *_: jnp.full_like(x, jnp.nan), x, *others)

    return lambda *inputs: jax.lax.platform_dependent(*inputs, cpu=on_cpu, default=function)


def tanh(parameters: dict[str, Any], x: Array) -> Array:
    """The hyperbolic tangent, on CPU in a computation of its own."""

    def as_written(x: Array) -> Array:
        return jax.lax.tanh_p.bind(x, **parameters)

    if x.size < _LEAST or x.shape[-1] > _CHANNELS or jnp.iscomplexobj(x):
        return as_written(x)
    alone = apart(as_written)
    separate = jax.custom_vjp(alone)
    # From the output, so that tanh is not computed again on the way back.
    separate.defvjp(lambda x: (y := alone(x), y), lambda y, g: (g * (1 + y) * (1 - y),))
    return separate(x)

# SPDX-License-Identifier: Apache-2.0
"""Separate computations: `apart`, which XLA's fusion does not cross on CPU, and a `tanh` in one.

Symptom (jaxlib 0.10.2, CPU): XLA fuses neighbouring equations into one loop, and removes barriers
before that. The branch of a `jax.lax.cond` stays a computation of its own. `max_pool` needs it for
correct gradients: `apart` may go when, with ``apart = lambda function: function``,
``test_a_max_pool_in_a_loop_reads_what_nothing_has_written_over`` in ``tests/test_xla_cpu.py``
passes. XLA does not vectorise tanh in a loop that is fused with
the bias before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

# Smaller arrays, or more channels, gain nothing from a separate tanh.
_LEAST_NUMBERS = 512
_MOST_CHANNELS = 32


def apart(function: Callable[..., Array]) -> Callable[..., Array]:
    """The function, on CPU as a separate computation."""

    def never(x: Array, *_: Array) -> Array:
        return jnp.full_like(x, jnp.nan)  # NaN reveals an error

    def on_cpu(x: Array, *others: Array) -> Array:
        # The condition is always true, but XLA cannot fold it behind a barrier.
        always = jax.lax.optimization_barrier(jnp.array(True))
        return jax.lax.cond(always, function, never, x, *others)

    return lambda *inputs: jax.lax.platform_dependent(*inputs, cpu=on_cpu, default=function)


def tanh(parameters: dict[str, Any], x: Array) -> Array:
    """The hyperbolic tangent; on CPU a separate computation for real arrays that gain from it."""

    def as_written(x: Array) -> Array:
        return jax.lax.tanh_p.bind(x, **parameters)

    if x.size < _LEAST_NUMBERS or x.shape[-1] > _MOST_CHANNELS or jnp.iscomplexobj(x):
        return as_written(x)
    separate = apart(as_written)

    def forward(x: Array) -> tuple[Array, Array]:
        y = separate(x)
        return y, y

    def backward(y: Array, cotangent: Array) -> tuple[Array]:
        # The derivative is a function of the output, so tanh is not computed again.
        return (cotangent * (1 + y) * (1 - y),)

    differentiable = jax.custom_vjp(separate)
    differentiable.defvjp(forward, backward)
    return differentiable(x)

# SPDX-License-Identifier: Apache-2.0
"""A barrier that XLA's fusion does not cross on CPU.

Symptom (jaxlib 0.10.2, CPU): XLA fuses neighbouring equations into one loop over the last result.
`jax.lax.optimization_barrier` does not prevent it, because XLA removes barriers before fusion. The
branch of a `jax.lax.cond` is a computation of its own and stays one, so `apart` puts a function
into such a branch.

`max_pool` needs it for correct gradients, `tanh` for speed (``make bench BENCH=primitives``).
``test_a_max_pool_in_a_loop_reads_what_nothing_has_written_over`` in ``tests/test_ghost.py`` fails
without it; this file may go when that test passes with ``apart = lambda function, _: function``.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array


def apart(function: Callable[..., Array]) -> Callable[..., Array]:
    """A function that computes `function`, on CPU in a computation of its own."""

    def on_cpu(x: Array, *others: Array) -> Array:
        # Always true, but behind a barrier XLA cannot fold the condition. NaN in the branch that
        # is never taken would reveal an error.
        always = jax.lax.optimization_barrier(jnp.array(True))
        return jax.lax.cond(always, function, lambda x, *_: jnp.full_like(x, jnp.nan), x, *others)

    return lambda *inputs: jax.lax.platform_dependent(*inputs, cpu=on_cpu, default=function)

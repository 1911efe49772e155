# SPDX-License-Identifier: Apache-2.0
"""Pieces of a program that XLA on CPU is not to merge with what stands around them.

XLA merges neighbouring equations into one loop over their last result.  Mostly that saves
time, and a barrier between two equations does not prevent it: barriers are gone by then.
The branch of a condition is a program of its own and stays one.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array


def apart(
    function: Callable[..., Array], elsewhere: Callable[..., Array] | None = None
) -> Callable[..., Array]:
    """The same function of arrays, on CPU as a program of its own.

    Args:
      function: Its result has the shape and dtype of its first argument.
      elsewhere: What other devices do instead; by default `function` as it is.
    """

    def on_cpu(x: Array, *others: Array) -> Array:
        # Always true, which XLA cannot know beforehand; else a result of NaN would show it.
        always = jax.lax.optimization_barrier(jnp.array(True))
        return jax.lax.cond(always, function, lambda x, *_: jnp.full_like(x, jnp.nan), x, *others)

    return lambda *inputs: jax.lax.platform_dependent(
        *inputs, cpu=on_cpu, default=elsewhere or function
    )

# SPDX-License-Identifier: Apache-2.0
"""`vouched`: lets a function into a loss that dpjax cannot read, on its author's word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from dpjax._jaxpr import VOUCHED


def vouched(function: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a function as one of a single example, so that a loss may call it.

    dpjax refuses losses with host callbacks, batching rules of their own, primitives outside of
    JAX, foreign code or collectives, because it cannot see whether they mix the examples of a
    batch. This function is for the ones that do not.

    Args:
      function: The function, of one example. You vouch that its result follows from its
        arguments alone: under `jax.vmap` row by row, without a memory of earlier calls. The same
        holds for its derivatives.

    Returns:
      The same function, which dpjax does not read.

    Privacy:
      If your word is wrong, one example moves the sum by any amount, and epsilon does not hold.

    Example:
      >>> import numpy as np
      >>> import jax.numpy as jnp
      >>> def on_host(x):
      ...     shape = jax.ShapeDtypeStruct((), jnp.float32)
      ...     return jax.pure_callback(np.float32, shape, x, vmap_method="sequential")
      >>> loss = lambda w, x: w * jax.lax.stop_gradient(vouched(on_host)(x))
    """

    def call(*arguments: Any, **options: Any) -> Any:
        leaves, structure = jax.tree.flatten((arguments, options))
        arrays = [isinstance(leaf, jax.Array | np.ndarray | np.generic) for leaf in leaves]

        def inner(given: list[Any]) -> Any:
            # Activations and words, as modules of Equinox hold them, are no arguments of `jit`.
            rest = iter(given)
            full = [next(rest) if a else x for a, x in zip(arrays, leaves, strict=True)]
            positional, named = structure.unflatten(full)
            return function(*positional, **named)

        # The name of the jitted function stands in the program, where it is looked for.
        inner.__name__ = inner.__qualname__ = VOUCHED
        return jax.jit(inner)([x for a, x in zip(arrays, leaves, strict=True) if a])

    return call

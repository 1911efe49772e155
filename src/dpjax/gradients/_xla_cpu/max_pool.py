# SPDX-License-Identifier: Apache-2.0
"""Max-pools over windows, with a backward pass made of slices and comparisons alone.

Symptom (jaxlib 0.10.2, CPU): XLA's derivative of a max-pool (select-and-scatter) searches the
winner of each window one element after the other. Of equal winners the first takes the cotangent,
as in JAX. This file may go when it is no faster than JAX's derivative, with which
``tests/test_ghost.py`` ("a_max_pool") compares its values.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dpjax.gradients._xla_cpu.apart import apart

# Windows with more entries are left to XLA.
_LARGEST = 64


def pool_max(parameters: dict[str, Any], x: Array) -> Array:
    """The largest entry of each window."""

    def forward(x: Array) -> Array:
        return jax.lax.reduce_window_max_p.bind(x, **parameters)

    # Without the barrier XLA fused the backward pass with the derivative of the activation before
    # it, and wrote the result over the input that the next slice reads: gradients were wrong.
    def backward(inputs: tuple[Array, Array], cotangent: Array) -> tuple[Array]:
        return (apart(partial(_input_cotangent, parameters))(*inputs, cotangent),)

    if _unusual(parameters, x):
        return forward(x)
    pool = jax.custom_vjp(forward)
    pool.defvjp(lambda x: (y := forward(x), (x, y)), backward)
    return pool(x)


def _unusual(parameters: dict[str, Any], x: Array) -> bool:
    """Whether XLA's own version runs: dilated or large windows, no output, or no real numbers."""
    spread = max(*parameters["base_dilation"], *parameters["window_dilation"])
    large = math.prod(parameters["window_dimensions"]) > _LARGEST
    longest = [n + sum(pad) for n, pad in zip(x.shape, parameters["padding"], strict=True)]
    empty = any(w > n for w, n in zip(parameters["window_dimensions"], longest, strict=True))
    return spread > 1 or large or empty or not jnp.issubdtype(x.dtype, jnp.floating)


def _input_cotangent(
    parameters: dict[str, Any], x: Array, largest: Array, cotangent: Array
) -> Array:
    """The cotangent of the input: that of each window goes to its winner."""
    strides, counts = parameters["window_strides"], largest.shape
    edges = [(low, high, 0) for low, high in parameters["padding"]]
    padded, back = jax.vjp(lambda x: jax.lax.pad(x, jnp.asarray(-jnp.inf, x.dtype), edges), x)
    total, open_ = jnp.zeros_like(padded), jnp.ones(counts, bool)
    for place in itertools.product(*map(range, parameters["window_dimensions"])):
        ends = [p + (n - 1) * s + 1 for p, n, s in zip(place, counts, strides, strict=True)]
        won = open_ & (jax.lax.slice(padded, place, ends, strides) == largest)
        open_ = open_ & ~won
        around = zip(place, padded.shape, ends, strides, strict=True)
        moved = [(p, size - end, s - 1) for p, size, end, s in around]
        zero = jnp.zeros((), cotangent.dtype)
        total = total + jax.lax.pad(jnp.where(won, cotangent, zero), zero, moved)
    return back(total)[0]

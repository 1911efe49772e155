# SPDX-License-Identifier: Apache-2.0
"""Max-pools over windows, with a backward pass of only slices and comparisons.

Symptom (jaxlib 0.10.2, CPU): XLA's derivative of a max-pool (select-and-scatter) searches the
winner of each window one element after the other. The first of equal winners takes the cotangent,
as in JAX. This file may go when it is no faster than JAX's derivative, with which
``tests/test_xla_cpu.py`` ("a_max_pool") compares its values.
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
    """The largest entry of each window; unusual windows are left to XLA."""

    def as_written(x: Array) -> Array:
        return jax.lax.reduce_window_max_p.bind(x, **parameters)

    def forward(x: Array) -> tuple[Array, tuple[Array, Array]]:
        largest = as_written(x)
        return largest, (x, largest)

    def backward(x_and_largest: tuple[Array, Array], cotangent: Array) -> tuple[Array]:
        # Fused with the derivative of the activation before it, the backward pass gave wrong
        # gradients: XLA wrote the result over the input that the next slice reads.
        separate = apart(partial(_input_cotangent, parameters))
        return (separate(*x_and_largest, cotangent),)

    if _is_unusual(parameters, x):
        return as_written(x)
    pool = jax.custom_vjp(as_written)
    pool.defvjp(forward, backward)
    return pool(x)


def _is_unusual(parameters: dict[str, Any], x: Array) -> bool:
    """Whether XLA's own version runs: dilated or large windows, no output, or no real numbers."""
    window = parameters["window_dimensions"]
    dilation = max(*parameters["base_dilation"], *parameters["window_dilation"])
    if dilation > 1 or math.prod(window) > _LARGEST:
        return True
    sides = zip(x.shape, parameters["padding"], window, strict=True)
    has_no_output = any(length + sum(padding) < size for length, padding, size in sides)
    return has_no_output or not jnp.issubdtype(x.dtype, jnp.floating)


def _input_cotangent(
    parameters: dict[str, Any], x: Array, largest: Array, cotangent: Array
) -> Array:
    """The cotangent of the input: that of each window goes to its first largest entry, the winner.

    The loop is over the entries of a window, for all windows together: ``largest`` and
    ``cotangent`` have a number for each window.
    """
    strides = parameters["window_strides"]
    edges = [(low, high, 0) for low, high in parameters["padding"]]

    def pad(x: Array) -> Array:
        # A padding of -inf never exceeds the entries of a window.
        return jax.lax.pad(x, jnp.asarray(-jnp.inf, x.dtype), edges)

    padded, pull_back = jax.vjp(pad, x)
    total = jnp.zeros_like(padded)
    has_no_winner = jnp.ones(largest.shape, bool)
    zero = jnp.zeros((), cotangent.dtype)
    for start in itertools.product(*map(range, parameters["window_dimensions"])):
        # This entry of every window: of the first at `start`, of each next one a stride further.
        by_axis = zip(start, largest.shape, strides, strict=True)
        ends = [first + (count - 1) * stride + 1 for first, count, stride in by_axis]
        entries = jax.lax.slice(padded, start, ends, strides)  # the shape of `largest`
        wins = has_no_winner & (entries == largest)
        has_no_winner = has_no_winner & ~wins
        # Zeros before, after and between the entries' cotangents put them where the entries were.
        by_axis = zip(start, padded.shape, ends, strides, strict=True)
        zeros = [(first, length - end, stride - 1) for first, length, end, stride in by_axis]
        total = total + jax.lax.pad(jnp.where(wins, cotangent, zero), zero, zeros)
    (input_cotangent,) = pull_back(total)  # without the padding
    return input_cotangent

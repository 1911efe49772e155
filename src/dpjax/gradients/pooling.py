# SPDX-License-Identifier: Apache-2.0
"""Pools over windows, with a backward pass made of slices and comparisons alone.

The derivative of a max-pool as XLA runs it looks for each window's winner one element
after the other.  Here the winner's place in its window is noted as a small number, and
each input asks the few windows that it lies in whether it won: all element by element.
Of equal winners the first takes the cotangent, as in JAX.

Inputs fall into *phases* by their position modulo the stride.  Inputs of one phase see
their windows from the same places, so each phase is a few plain slices; at the end the
phases are woven together.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

__all__ = ["pool_max", "pool_sum"]

# Windows with more entries than this are left to XLA; a winner's number fits eight bits.
_LARGEST = 64

Window = tuple[tuple[int, ...], tuple[int, ...]]
"""Dimensions and strides."""


def pool_max(parameters: dict[str, Any], x: Array) -> Array:
    """The largest entry of each window.

    Args:
      parameters: Those of the ``reduce_window_max`` equation.
      x: The input.
    """
    if _unusual(parameters, x):
        return jax.lax.reduce_window_max_p.bind(x, **parameters)
    window = (parameters["window_dimensions"], parameters["window_strides"])

    def forward(x: Array) -> Array:
        return functools.reduce(jnp.maximum, _entries(window, x))

    def backward(inputs: tuple[Array, Array], cotangent: Array) -> tuple[Array]:
        x, largest = inputs
        winner = jnp.full(largest.shape, _LARGEST, jnp.int8)
        for place, entry in reversed(list(enumerate(_entries(window, x)))):
            winner = jnp.where(entry == largest, jnp.int8(place), winner)
        return (_to_inputs(window, x.shape, cotangent, winner),)

    pool = jax.custom_vjp(forward)
    pool.defvjp(lambda x: (y := forward(x), (x, y)), backward)
    return pool(_padded(parameters, x, -jnp.inf))


def pool_sum(parameters: dict[str, Any], x: Array) -> Array:
    """The sum of each window.

    Args:
      parameters: Those of the ``reduce_window_sum`` equation.
      x: The input.
    """
    if _unusual(parameters, x):
        return jax.lax.reduce_window_sum_p.bind(x, **parameters)
    window = (parameters["window_dimensions"], parameters["window_strides"])

    def forward(x: Array) -> Array:
        return functools.reduce(jnp.add, _entries(window, x))

    x = _padded(parameters, x, 0)
    shape = x.shape
    pool = jax.custom_vjp(forward)
    pool.defvjp(lambda x: (forward(x), None), lambda _, g: (_to_inputs(window, shape, g),))
    return pool(x)


def _unusual(parameters: dict[str, Any], x: Array) -> bool:
    """Whether the window is left to XLA: dilated, very large, or not of real numbers."""
    spread = max(*parameters["base_dilation"], *parameters["window_dilation"])
    large = math.prod(parameters["window_dimensions"]) > _LARGEST
    return spread > 1 or large or not jnp.issubdtype(x.dtype, jnp.floating)


def _padded(parameters: dict[str, Any], x: Array, filling: float) -> Array:
    edges = [(low, high, 0) for low, high in parameters["padding"]]
    return jax.lax.pad(x, jnp.asarray(filling, x.dtype), edges) if edges else x


def _entries(window: Window, x: Array) -> Iterator[Array]:
    """For each place of the window, the entries of all windows at that place."""
    dimensions, strides = window
    counts = [(n - d) // s + 1 for n, d, s in zip(x.shape, dimensions, strides, strict=True)]
    for place in itertools.product(*map(range, dimensions)):
        ends = [p + (n - 1) * s + 1 for p, n, s in zip(place, counts, strides, strict=True)]
        yield jax.lax.slice(x, place, ends, strides)


def _to_inputs(
    window: Window,
    shape: tuple[int, ...],
    cotangent: Array,
    winner: Int[Array, "..."] | None = None,
) -> Array:
    """Gives the cotangent of each window to its inputs; with winners, to those alone."""
    dimensions, strides = window
    reach = [(d - 1) // s for d, s in zip(dimensions, strides, strict=True)]
    lengths = [-(-n // s) for n, s in zip(shape, strides, strict=True)]
    edges = [(r, max(0, n - m), 0) for r, n, m in zip(reach, lengths, cotangent.shape, strict=True)]
    cotangent = jax.lax.pad(cotangent, jnp.zeros((), cotangent.dtype), edges)
    if winner is not None:
        winner = jax.lax.pad(winner, jnp.int8(-1), edges)

    def phase(first: Sequence[int]) -> Array:
        total = jnp.zeros(lengths, cotangent.dtype)
        for number, place in enumerate(itertools.product(*map(range, dimensions))):
            apart = [p - f for p, f in zip(place, first, strict=True)]
            if any(a % s for a, s in zip(apart, strides, strict=True)):
                continue
            start = [r - a // s for r, a, s in zip(reach, apart, strides, strict=True)]
            end = [a + n for a, n in zip(start, lengths, strict=True)]
            part = jax.lax.slice(cotangent, start, end)
            if winner is not None:
                part = jnp.where(jax.lax.slice(winner, start, end) == number, part, 0)
            total = total + part
        return total

    return jax.lax.slice(_woven(phase, strides), [0] * len(shape), shape)


def _woven(phase: Any, strides: Sequence[int], first: tuple[int, ...] = ()) -> Array:
    """Interleaves the phases along every axis."""
    axis = len(first)
    if axis == len(strides):
        return phase(first)
    parts = [_woven(phase, strides, (*first, f)) for f in range(strides[axis])]
    if len(parts) == 1:
        return parts[0]
    shape = list(parts[0].shape)
    shape[axis] *= len(parts)
    return jnp.stack(parts, axis + 1).reshape(shape)

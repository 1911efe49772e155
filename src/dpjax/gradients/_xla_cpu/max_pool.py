# SPDX-License-Identifier: Apache-2.0
"""Max-pools over windows, with a backward pass made of slices and comparisons alone.

The derivative of a max-pool as XLA runs it on CPU looks for each window's winner one
element after the other.  Here the winner's place in its window is noted as a small number,
and each input asks the few windows that it lies in whether it won: all element by element.
Of equal winners the first takes the cotangent, as in JAX.

Inputs fall into *phases* by their position modulo the stride.  Inputs of one phase see
their windows from the same places, so each phase is a few plain slices; at the end the
phases are woven together.

The backward pass is a program of its own.  In one with what surrounds it, XLA on CPU was
seen to merge it with the derivative of the activation below and to write the result over
the very input that the next slice reads: gradients were silently wrong.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from dpjax.gradients._xla_cpu.fusion_barrier import apart

# Windows with more entries than this are left to XLA; a winner's number fits eight bits.
_LARGEST = 64
# Windows with at most so many have what their winners take moved, not what they look at: 0.26 ms
# for 0.46 on 32 images of 14 x 14 x 16, 0.24 of it the loop; with 9 entries three times slower.
_FEW = 4

Window = tuple[tuple[int, ...], tuple[int, ...]]
"""Dimensions and strides."""

Wins = Callable[[int, Sequence[int]], Array]
"""What inputs of a phase get as entry so many of the window that begins so far behind."""


def pool_max(parameters: dict[str, Any], x: Array) -> Array:
    """The largest entry of each window.

    Args:
      parameters: Those of the ``reduce_window_max`` equation.
      x: The input.
    """

    def forward(x: Array) -> Array:
        return jax.lax.reduce_window_max_p.bind(x, **parameters)

    def as_written(x: Array, _: Array, cotangent: Array) -> Array:
        return jax.vjp(forward, x)[1](cotangent)[0]

    def fast(x: Array, largest: Array, cotangent: Array) -> Array:
        return _input_cotangent(parameters, x, largest, cotangent)

    def backward(inputs: tuple[Array, Array], cotangent: Array) -> tuple[Array]:
        return (apart(fast, elsewhere=as_written)(*inputs, cotangent),)

    if _unusual(parameters, x):
        return forward(x)
    pool = jax.custom_vjp(forward)
    pool.defvjp(lambda x: (y := forward(x), (x, y)), backward)
    return pool(x)


def _unusual(parameters: dict[str, Any], x: Array) -> bool:
    """Whether the window is left to XLA: dilated, very large, too large, or of no real numbers."""
    spread = max(*parameters["base_dilation"], *parameters["window_dilation"])
    large = math.prod(parameters["window_dimensions"]) > _LARGEST
    padding = parameters["padding"]
    longest = [n + sum(pad) for n, pad in zip(x.shape, padding, strict=True)]
    empty = any(w > n for w, n in zip(parameters["window_dimensions"], longest, strict=True))
    return spread > 1 or large or empty or not jnp.issubdtype(x.dtype, jnp.floating)


def _input_cotangent(
    parameters: dict[str, Any], x: Array, largest: Array, cotangent: Array
) -> Array:
    """The cotangent of the input: that of each window goes to its winner."""
    window = (parameters["window_dimensions"], parameters["window_strides"])
    padded, inside = jax.vjp(lambda x: _padded(parameters, x), x)
    winner = jnp.full(largest.shape, _LARGEST, jnp.int8)
    for place, entry in reversed(list(enumerate(_entries(window, padded)))):
        winner = jnp.where(entry == largest, jnp.int8(place), winner)
    return inside(_to_winners(window, padded.shape, cotangent, winner))[0]


def _padded(parameters: dict[str, Any], x: Array) -> Array:
    edges = [(low, high, 0) for low, high in parameters["padding"]]
    return jax.lax.pad(x, jnp.asarray(-jnp.inf, x.dtype), edges)


def _entries(window: Window, x: Array) -> Iterator[Array]:
    """For each place of the window, the entries of all windows at that place."""
    dimensions, strides = window
    counts = [(n - d) // s + 1 for n, d, s in zip(x.shape, dimensions, strides, strict=True)]
    for place in itertools.product(*map(range, dimensions)):
        ends = [p + (n - 1) * s + 1 for p, n, s in zip(place, counts, strides, strict=True)]
        yield jax.lax.slice(x, place, ends, strides)


def _to_winners(
    window: Window, shape: tuple[int, ...], cotangent: Array, winner: Int[Array, "..."]
) -> Array:
    """Gives the cotangent of each window to the input that won it."""
    dimensions, strides = window
    places = list(itertools.product(*map(range, dimensions)))
    lengths = [-(-n // s) for n, s in zip(shape, strides, strict=True)]
    if len(places) <= _FEW:
        wins = _few_wins(cotangent, winner, lengths)
    else:
        reach = [(d - 1) // s for d, s in zip(dimensions, strides, strict=True)]
        wins = _many_wins(cotangent, winner, lengths, reach)

    def phase(first: Sequence[int]) -> Array:
        total = jnp.zeros(lengths, cotangent.dtype)
        for number, place in enumerate(places):
            ahead = [p - f for p, f in zip(place, first, strict=True)]
            if not any(a % s for a, s in zip(ahead, strides, strict=True)):
                behind = [a // s for a, s in zip(ahead, strides, strict=True)]
                total = total + wins(number, behind)
        return total

    return jax.lax.slice(_woven(phase, strides), [0] * len(shape), shape)


def _few_wins(cotangent: Array, winner: Array, lengths: Sequence[int]) -> Wins:
    """Masks first, and then moves what is left: faster where there are few places."""

    def wins(number: int, behind: Sequence[int]) -> Array:
        won = jnp.where(winner == number, cotangent, 0)
        edges = [(b, n - m - b, 0) for b, n, m in zip(behind, lengths, won.shape, strict=True)]
        return jax.lax.pad(won, jnp.zeros((), won.dtype), edges)

    return wins


def _many_wins(
    cotangent: Array, winner: Array, lengths: Sequence[int], reach: Sequence[int]
) -> Wins:
    """Makes room around both once, and then reads them at each place."""
    sizes = zip(reach, lengths, cotangent.shape, strict=True)
    edges = [(r, max(0, n - m), 0) for r, n, m in sizes]
    cotangent = jax.lax.pad(cotangent, jnp.zeros((), cotangent.dtype), edges)
    winner = jax.lax.pad(winner, jnp.int8(-1), edges)

    def wins(number: int, behind: Sequence[int]) -> Array:
        start = [r - b for r, b in zip(reach, behind, strict=True)]
        end = [a + n for a, n in zip(start, lengths, strict=True)]
        won = jax.lax.slice(winner, start, end) == number
        return jnp.where(won, jax.lax.slice(cotangent, start, end), 0)

    return wins


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

# SPDX-License-Identifier: Apache-2.0
"""Max-pools over windows, with a backward pass made of slices and comparisons alone.

Symptom (jaxlib 0.10.2, CPU): XLA's derivative of a max-pool (select-and-scatter) searches the
winner of each window one element after the other. Here the place of the winner in its window is
stored as a small integer, and each input compares it for the few windows that contain the input;
both are elementwise. Of equal winners the first takes the cotangent, as in JAX.

Inputs fall into *phases* by their position modulo the stride. All inputs of one phase have the
same places in their windows, so a phase is a few plain slices. At the end phases are interleaved.

``make bench BENCH=primitives`` times it ("max-pool ..."). This file may go when those rows show no
gain; ``tests/test_ghost.py`` ("a_max_pool") compares it with JAX's derivative.
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

# Windows with more entries are left to XLA. The place of a winner fits eight bits.
_LARGEST = 64
# For windows of at most 4 entries it is faster to shift the cotangents that winners take, for
# larger ones to shift the winners (``make bench BENCH=primitives``).
_FEW = 4

Window = tuple[tuple[int, ...], tuple[int, ...]]
"""Dimensions and strides."""

Wins = Callable[[int, Sequence[int]], Array]
"""``(place, behind) -> cotangents`` for the inputs of a phase that are at that place of the window
that begins ``behind`` windows earlier."""


def pool_max(parameters: dict[str, Any], x: Array) -> Array:
    """The largest entry of each window.

    Args:
      parameters: The parameters of the ``reduce_window_max`` equation.
      x: The input.
    """

    def forward(x: Array) -> Array:
        return jax.lax.reduce_window_max_p.bind(x, **parameters)

    def fast(x: Array, largest: Array, cotangent: Array) -> Array:
        return _input_cotangent(parameters, x, largest, cotangent)

    # Without the barrier XLA fused the backward pass with the derivative of the activation before
    # it, and wrote the result over the input that the next slice reads: gradients were wrong.
    def backward(inputs: tuple[Array, Array], cotangent: Array) -> tuple[Array]:
        return (apart(fast)(*inputs, cotangent),)

    if _unusual(parameters, x):
        return forward(x)
    pool = jax.custom_vjp(forward)
    pool.defvjp(lambda x: (y := forward(x), (x, y)), backward)
    return pool(x)


def _unusual(parameters: dict[str, Any], x: Array) -> bool:
    """Whether XLA's own version runs: dilated or large windows, no output, or no real numbers."""
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
    # In reverse, so that of equal entries the first wins, as in XLA.
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

    # Inputs that share their remainder by the stride form a phase; within one, windows are plain
    # shifts.
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
    # No window wins at -1, so what lies outside takes nothing.
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

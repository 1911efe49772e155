# SPDX-License-Identifier: Apache-2.0
"""Patches: what each entry of a kernel sees of the images, in the platform's fastest form."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dpjax.gradients import platforms

# Patches are written for kernel entries with this many inputs together, each group with a product
# of its own: as fast as all entries together, with less memory. One entry alone is a slow copy.
_PIECE = 256
# Patches of larger kernels are written in a loop, on accelerators by a convolution: unrolled,
# compilation takes minutes.
_WRITTEN_OUT = 25


def patches(
    p: dict[str, Any], x: Array, kernel: Sequence[int], places: Sequence[int]
) -> list[Array]:
    """``[.., entries, channels, images, *places]``: strided slices of the padded input."""
    strides = p["window_strides"]
    # Interior padding is the dilation of the input.
    pairs, none = zip(p["padding"], p["lhs_dilation"], strict=True), (0, 0, 0)
    edges = [(low, high, spread - 1) for (low, high), spread in pairs]
    x = jax.lax.pad(x, jnp.zeros((), x.dtype), [none, none, *edges, none])
    if tuple(strides) == tuple(kernel) and set(p["rhs_dilation"]) == {1}:
        return [_tiles(x, kernel, places)]

    def entry_of(entry: tuple[int, ...]) -> Array:
        # Where the entry first touches the padded input; from there it moves on by the stride.
        starts = [e * spread for e, spread in zip(entry, p["rhs_dilation"], strict=True)]
        ends = [a + (n - 1) * s + 1 for a, n, s in zip(starts, places, strides, strict=True)]
        x_seen = jax.lax.slice(
            x, [0, 0, *starts, 0], [*x.shape[:2], *ends, x.shape[-1]], [1, 1, *strides, 1]
        )
        return jnp.moveaxis(x_seen, -1, 1)

    entries = list(itertools.product(*map(range, kernel)))
    inputs = x.shape[-1] // p["feature_group_count"]
    # On accelerators all entries are one product, which reads the cotangents once.
    few = min(-(-_PIECE // inputs), len(entries)) if platforms.on_cpu() else len(entries)
    if len(entries) > _WRITTEN_OUT and not platforms.on_cpu():
        return [_convolved(x, kernel, strides, p["rhs_dilation"])]
    pieces = [entries[i : i + few] for i in range(0, len(entries), few)]
    if len(entries) > _WRITTEN_OUT:
        x, spread = jnp.moveaxis(x, -1, 1), np.array(p["rhs_dilation"])
        return [_in_turn(x, np.array(piece) * spread, places, strides) for piece in pieces]
    return [jnp.stack([entry_of(entry) for entry in piece], axis=1) for piece in pieces]


def _convolved(
    x: Array, kernel: Sequence[int], strides: Sequence[int], spreads: Sequence[int]
) -> Array:
    """Patches of channels-last images, written by a convolution with ones and zeros."""
    lead, axes, channels = x.shape[:2], "STUVWXYZ"[: len(kernel)], x.shape[-1]
    written = jax.lax.conv_general_dilated_patches(
        x.reshape(-1, *x.shape[2:]),
        kernel,
        strides,
        "VALID",
        rhs_dilation=spreads,
        dimension_numbers=(f"N{axes}C", f"{axes}IO", f"N{axes}C"),
        precision=jax.lax.Precision.HIGHEST,
    )
    written = written.reshape(*lead, *written.shape[1:-1], channels, -1)
    return jnp.moveaxis(written, (-1, -2), (1, 2))


def _in_turn(x: Array, starts: np.ndarray, places: Sequence[int], strides: Sequence[int]) -> Array:
    """Patches of channels-first images, written in a loop over the entries of the kernel."""
    lead = x.shape[:3]
    spans = [(n - 1) * s + 1 for n, s in zip(places, strides, strict=True)]

    def write(i: Array, written: Array) -> Array:
        at = jnp.asarray(starts)[i]
        patch = jax.lax.dynamic_slice(x, (0, 0, 0, *at), (*lead, *spans))
        patch = jax.lax.slice(patch, [0] * patch.ndim, patch.shape, [1, 1, 1, *strides])
        return jax.lax.dynamic_update_index_in_dim(written, patch, i, 1)

    nothing = jnp.zeros((lead[0], len(starts), *lead[1:], *places), x.dtype)
    return jax.lax.fori_loop(0, len(starts), write, nothing)


def _tiles(x: Array, kernel: Sequence[int], places: Sequence[int]) -> Array:
    """Patches that do not overlap: together they are one transposed view of the image."""
    rank = len(kernel)
    # With VALID padding a rest of the image may lie in no patch.
    used = [n * k for n, k in zip(places, kernel, strict=True)]
    x = jax.lax.slice(x, [0] * x.ndim, [*x.shape[:2], *used, x.shape[-1]])
    pairs = [m for pair in zip(places, kernel, strict=True) for m in pair]
    x = x.reshape(*x.shape[:2], *pairs, x.shape[-1])
    order = [0, *range(3, 3 + 2 * rank, 2), 2 + 2 * rank, 1, *range(2, 2 + 2 * rank, 2)]
    x = jnp.transpose(x, order)
    return x.reshape(x.shape[0], math.prod(kernel), *x.shape[1 + rank :])

# SPDX-License-Identifier: Apache-2.0
"""Patches: the pixels that each entry of a kernel multiplies, in the platform's fastest form."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dpjax.gradients import _platforms

# Patches are written for kernel entries with this many inputs together, each group with a product
# of its own: as fast as all entries together, with less memory. One entry by itself is a slow copy.
_PIECE = 256
# Patches of larger kernels are written in a loop, on accelerators by a convolution. Unrolled, they
# take minutes to compile.
_UNROLLED = 25


def patches(
    parameters: dict[str, Any], x: Array, kernel: Sequence[int], places: Sequence[int]
) -> list[Array]:
    """``[.., entries, channels, images, *places]``: strided slices of the padded input."""
    strides = parameters["window_strides"]
    spreads = parameters["rhs_dilation"]
    x = _padded(x, parameters)
    if tuple(strides) == tuple(kernel) and set(spreads) == {1}:
        return [_tiles(x, kernel, places)]
    entries = list(itertools.product(*map(range, kernel)))
    is_large = len(entries) > _UNROLLED
    if _platforms.on_cpu():
        inputs = x.shape[-1] // parameters["feature_group_count"]
        in_piece = min(-(-_PIECE // inputs), len(entries))
    elif is_large:
        return [_by_convolution(x, kernel, strides, spreads)]
    else:
        in_piece = len(entries)  # one product, which reads the cotangents once
    starts = np.array(entries) * np.array(spreads)
    pieces = [starts[i : i + in_piece] for i in range(0, len(starts), in_piece)]
    if is_large:
        x = jnp.moveaxis(x, -1, 1)
        return [_in_loop(x, piece, places, strides) for piece in pieces]
    stacks = []
    for piece in pieces:
        seen = [_seen_from(x, start, places, strides) for start in piece.tolist()]
        stacks.append(jnp.stack(seen, axis=1))
    return stacks


def _padded(x: Array, parameters: dict[str, Any]) -> Array:
    """Channels-last images with their padding and dilation, which is interior padding."""
    unpadded = (0, 0, 0)
    pairs = zip(parameters["padding"], parameters["lhs_dilation"], strict=True)
    edges = [(low, high, dilation - 1) for (low, high), dilation in pairs]
    return jax.lax.pad(x, jnp.zeros((), x.dtype), [unpadded, unpadded, *edges, unpadded])


def _seen_from(
    x: Array, start: Sequence[int], places: Sequence[int], strides: Sequence[int]
) -> Array:
    """The pixels that one entry of the kernel multiplies: from its start on, by the stride."""
    triples = zip(start, places, strides, strict=True)
    ends = [first + (count - 1) * stride + 1 for first, count, stride in triples]
    pixels = jax.lax.slice(
        x, [0, 0, *start, 0], [*x.shape[:2], *ends, x.shape[-1]], [1, 1, *strides, 1]
    )
    return jnp.moveaxis(pixels, -1, 1)


def _by_convolution(
    x: Array, kernel: Sequence[int], strides: Sequence[int], spreads: Sequence[int]
) -> Array:
    """Patches of channels-last images, written by a convolution with ones and zeros."""
    space = "STUVWXYZ"[: len(kernel)]
    written = jax.lax.conv_general_dilated_patches(
        x.reshape(-1, *x.shape[2:]),
        kernel,
        strides,
        "VALID",
        rhs_dilation=spreads,
        dimension_numbers=(f"N{space}C", f"{space}IO", f"N{space}C"),
        precision=jax.lax.Precision.HIGHEST,
    )
    places = written.shape[1:-1]
    written = written.reshape(*x.shape[:2], *places, x.shape[-1], -1)
    return jnp.moveaxis(written, (-1, -2), (1, 2))


def _in_loop(x: Array, starts: np.ndarray, places: Sequence[int], strides: Sequence[int]) -> Array:
    """Patches of channels-first images, written in a loop over the entries of the kernel."""
    examples, channels, images = x.shape[:3]
    pairs = zip(places, strides, strict=True)
    spans = [(count - 1) * stride + 1 for count, stride in pairs]

    def write(i: Array, written: Array) -> Array:
        start = jnp.asarray(starts)[i]
        patch = jax.lax.dynamic_slice(x, (0, 0, 0, *start), (examples, channels, images, *spans))
        patch = jax.lax.slice(patch, [0] * patch.ndim, patch.shape, [1, 1, 1, *strides])
        return jax.lax.dynamic_update_index_in_dim(written, patch, i, 1)

    shape = (examples, len(starts), channels, images, *places)
    return jax.lax.fori_loop(0, len(starts), write, jnp.zeros(shape, x.dtype))


def _tiles(x: Array, kernel: Sequence[int], places: Sequence[int]) -> Array:
    """Patches that do not overlap: together they are one transposed view of the image."""
    examples, images, *_, channels = x.shape
    rank = len(kernel)
    # The end of the image may lie in no patch with VALID padding.
    pairs = list(zip(places, kernel, strict=True))
    used = [count * size for count, size in pairs]
    x = jax.lax.slice(x, [0] * x.ndim, [examples, images, *used, channels])
    x = x.reshape(examples, images, *itertools.chain(*pairs), channels)
    place_axes = range(2, 2 + 2 * rank, 2)
    entry_axes = range(3, 3 + 2 * rank, 2)
    x = jnp.transpose(x, [0, *entry_axes, 2 + 2 * rank, 1, *place_axes])
    return x.reshape(examples, math.prod(kernel), *x.shape[1 + rank :])

# SPDX-License-Identifier: Apache-2.0
"""Patches: the pixels that each entry of a kernel multiplies, in the platform's fastest form.

Images are ``[examples, images, *space, channels]``: an example may have several images. The kernel
has an *entry* for each offset, so 9 if it is 3 x 3. It covers a *window* of an image for each pixel
of the output, and an entry multiplies one pixel in each window.
"""

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
    parameters: dict[str, Any], x: Array, kernel: Sequence[int], windows: Sequence[int]
) -> list[Array]:
    """The patches of images for a convolution with these parameters, in pieces along the entries.

    Args:
      parameters: The parameters of the convolution's equation.
      x: ``[examples, images, *space, channels]``, not padded.
      kernel: The lengths of the kernel along the axes of space.
      windows: The numbers of windows along the axes of space: the lengths of the output.

    Returns:
      Arrays ``[examples, entries, channels, images, *windows]``. The first has the first entries of
      the kernel, and so on.
    """
    strides = parameters["window_strides"]
    dilations = parameters["rhs_dilation"]
    x = _padded(x, parameters)
    if tuple(strides) == tuple(kernel) and set(dilations) == {1}:
        return [_tiles(x, kernel, windows)]  # patches do not overlap, so no pixel is copied twice
    entries = list(itertools.product(*map(range, kernel)))
    is_large = len(entries) > _UNROLLED
    on_cpu = _platforms.on_cpu()
    if is_large and not on_cpu:
        # One slice for each entry, as below, takes minutes to compile.
        return [_by_convolution(x, kernel, strides, dilations)]
    if on_cpu:
        # A piece has enough entries for a fast product, and needs less memory than all entries.
        inputs_of_entry = x.shape[-1] // parameters["feature_group_count"]
        entries_of_piece = min(math.ceil(_PIECE / inputs_of_entry), len(entries))
    else:
        entries_of_piece = len(entries)  # one product, which reads the cotangents once
    starts = np.array(entries) * np.array(dilations)  # each entry's pixel in the first window
    firsts = range(0, len(starts), entries_of_piece)
    starts_of_pieces = [starts[first : first + entries_of_piece] for first in firsts]
    if is_large:
        # On a CPU a loop compiles one slice for all entries.
        x = jnp.moveaxis(x, -1, 1)  # [examples, channels, images, *space]
        return [_in_loop(x, piece, windows, strides) for piece in starts_of_pieces]
    pieces = []
    for piece in starts_of_pieces:
        # [examples, channels, images, *windows] for each entry
        pixels = [_pixels_of_entry(x, start, windows, strides) for start in piece.tolist()]
        pieces.append(jnp.stack(pixels, axis=1))
    return pieces


def _padded(x: Array, parameters: dict[str, Any]) -> Array:
    """Channels-last images with their padding and dilation, which is interior padding."""
    unpadded = (0, 0, 0)
    pairs = zip(parameters["padding"], parameters["lhs_dilation"], strict=True)
    edges = [(low, high, dilation - 1) for (low, high), dilation in pairs]
    return jax.lax.pad(x, jnp.zeros((), x.dtype), [unpadded, unpadded, *edges, unpadded])


def _pixels_of_entry(
    x: Array, start: Sequence[int], windows: Sequence[int], strides: Sequence[int]
) -> Array:
    """The pixels that one entry multiplies: from its start on, by the stride, channels first."""
    triples = zip(start, windows, strides, strict=True)
    ends = [first + (count - 1) * stride + 1 for first, count, stride in triples]
    pixels = jax.lax.slice(
        x, [0, 0, *start, 0], [*x.shape[:2], *ends, x.shape[-1]], [1, 1, *strides, 1]
    )
    return jnp.moveaxis(pixels, -1, 1)


def _by_convolution(
    x: Array, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> Array:
    """Patches of channels-last images, written by a convolution with ones and zeros."""
    space = "STUVWXYZ"[: len(kernel)]
    written = jax.lax.conv_general_dilated_patches(
        x.reshape(-1, *x.shape[2:]),
        kernel,
        strides,
        "VALID",
        rhs_dilation=dilations,
        dimension_numbers=(f"N{space}C", f"{space}IO", f"N{space}C"),
        precision=jax.lax.Precision.HIGHEST,
    )
    # JAX counts channels and entries on one axis, the last, and entries faster.
    windows = written.shape[1:-1]
    # [examples, images, *windows, channels, entries]
    written = written.reshape(*x.shape[:2], *windows, x.shape[-1], -1)
    return jnp.moveaxis(written, (-1, -2), (1, 2))


def _in_loop(x: Array, starts: np.ndarray, windows: Sequence[int], strides: Sequence[int]) -> Array:
    """Patches of images ``[examples, channels, images, *space]``, entry by entry in a loop.

    ``starts`` ``[entries, space]`` has each entry's pixel in the first window. The result has the
    shape ``[examples, entries, channels, images, *windows]``.
    """
    examples, channels, images = x.shape[:3]
    pairs = zip(windows, strides, strict=True)
    # The number of pixels from the one in the first window to the one in the last.
    spans = [(count - 1) * stride + 1 for count, stride in pairs]

    def write(entry: Array, written: Array) -> Array:
        start = jnp.asarray(starts)[entry]
        # A dynamic slice has no strides: the second slice takes one pixel for each window.
        pixels = jax.lax.dynamic_slice(x, (0, 0, 0, *start), (examples, channels, images, *spans))
        pixels = jax.lax.slice(pixels, [0] * pixels.ndim, pixels.shape, [1, 1, 1, *strides])
        return jax.lax.dynamic_update_index_in_dim(written, pixels, entry, 1)

    shape = (examples, len(starts), channels, images, *windows)
    return jax.lax.fori_loop(0, len(starts), write, jnp.zeros(shape, x.dtype))


def _tiles(x: Array, kernel: Sequence[int], windows: Sequence[int]) -> Array:
    """Patches that do not overlap: together they are the images in another order of axes."""
    examples, images, *_, channels = x.shape
    rank = len(kernel)
    # Without padding the last pixels of an image may lie in no patch, and are dropped.
    pairs = list(zip(windows, kernel, strict=True))
    used = [count * size for count, size in pairs]
    x = jax.lax.slice(x, [0] * x.ndim, [examples, images, *used, channels])
    # Each axis of the image becomes two: the windows, and the entries of the kernel in a window.
    x = x.reshape(examples, images, *itertools.chain(*pairs), channels)
    window_axes = range(2, 2 + 2 * rank, 2)
    entry_axes = range(3, 3 + 2 * rank, 2)
    channel_axis = 2 + 2 * rank
    # [examples, *entries, channels, images, *windows]
    x = jnp.transpose(x, [0, *entry_axes, channel_axis, 1, *window_axes])
    return x.reshape(examples, math.prod(kernel), *x.shape[1 + rank :])

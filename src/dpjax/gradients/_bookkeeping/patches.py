# SPDX-License-Identifier: Apache-2.0
"""Patches: what each entry of a kernel sees of the images that it moves over.

The gradient of a kernel is patches times cotangents. Here patches are written in the form that the
platform multiplies fastest, or their inner products are computed without them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dpjax.gradients import platforms
from dpjax.gradients.sharding_checks import may_be_split

# Patches are written for kernel entries with this many inputs together, each group with a product
# of its own: as fast as all entries together, with less memory. One entry alone is a slow copy.
_PIECE = 256
# On a TPU entries of this many inputs are products of their own: a shifted image is read as it
# lies, and no patches are written. For fewer inputs the grouped convolution that `jax.vmap` makes
# of the VJP takes a fifth of the time that the compiler of a v5e expects of patches, unless a
# whole patch has fewer numbers. XLA for a GPU writes what its products read: there patches of all
# entries are one product, which reads the cotangents once.
_SHIFTED = 32
# Patches of larger kernels are written in a loop: unrolled, compilation takes minutes. Where an
# accelerator needs them, a convolution writes them.
_WRITTEN_OUT = 25


class Pixels(NamedTuple):
    """The image ``[batch, *space, channels]`` that a kernel sees, and how it moves over it.

    Args:
      image: One image for each example.
      kernel: The lengths of the kernel.
      edges: For each axis what is padded before, after, and between pixels.
      strides: How far the kernel moves.
      spreads: The distance of its entries.
    """

    image: Array
    kernel: Sequence[int]
    edges: Sequence[tuple[int, int, int]]
    strides: Sequence[int]
    spreads: Sequence[int]

    def inner(self, precision: Any) -> Array:
        """Inner products ``[batch, positions, positions]`` of patches, which are never written.

        Two patches have the inner product of their pixels, entry by entry, so the inner products of
        all pixels are summed along diagonals, one axis of the kernel after the other.
        """
        flat = self.image.reshape(len(self.image), -1, self.image.shape[-1])
        pairs = jnp.einsum("bpc,bqc->bpq", flat, flat, precision=precision)
        rank, space = len(self.kernel), self.image.shape[1:-1]
        pairs = pairs.reshape(-1, *space, *space)
        for axis in range(rank):
            pairs = self._over(pairs, axis)
        return pairs.reshape(len(pairs), math.prod(pairs.shape[1 : 1 + rank]), -1)

    def _over(self, pairs: Array, axis: int) -> Array:
        """Sums over what the entries along one axis of the kernel see."""
        both = (1 + axis, 1 + axis + len(self.kernel))
        edges = [self.edges[axis] if a in both else (0, 0, 0) for a in range(pairs.ndim)]
        pairs = jax.lax.pad(pairs, jnp.zeros((), pairs.dtype), edges)
        stride, spread = self.strides[axis], self.spreads[axis]
        last = pairs.shape[both[0]] - 1 - (self.kernel[axis] - 1) * spread

        def seen(entry: int) -> Array:
            found, start = pairs, entry * spread
            for a in both:
                found = jax.lax.slice_in_dim(found, start, start + last + 1, stride, axis=a)
            return found

        return sum(map(seen, range(1, self.kernel[axis])), seen(0))


def patches(
    p: dict[str, Any], x: Array, kernel: Sequence[int], places: Sequence[int]
) -> list[Array]:
    """``[.., entries, channels, images, *places]``: what each entry of the kernel sees.

    Patches are strided slices of the padded input. A convolution with an identity kernel would
    compute the same with many multiplications by 0. Places are the last axis, as the product needs.
    """
    strides, shifted = p["window_strides"], _shifted(p, x, kernel, places)
    x = jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0)] * 2 + edges_of(p) + [(0, 0, 0)])
    if _disjoint(p, kernel):
        return [_tiles(x, kernel, places)]

    def sliced(entry: tuple[int, ...]) -> Array:
        # Where the entry of the kernel first touches the padded input; it moves on by the stride.
        starts = [e * spread for e, spread in zip(entry, p["rhs_dilation"], strict=True)]
        ends = [a + (n - 1) * s + 1 for a, n, s in zip(starts, places, strides, strict=True)]
        x_seen = jax.lax.slice(
            x, [0, 0, *starts, 0], [*x.shape[:2], *ends, x.shape[-1]], [1, 1, *strides, 1]
        )
        return jnp.moveaxis(x_seen, -1, 1)

    inputs, seen = x.shape[-1] // p["feature_group_count"], shifted or sliced
    entries = list(itertools.product(*map(range, kernel)))
    least = _SHIFTED if platforms.on_tpu() else _PIECE if platforms.on_cpu() else math.inf
    few = math.ceil(min(least / inputs, len(entries)))
    if len(entries) > _WRITTEN_OUT and not platforms.on_cpu():
        return [_convolved(x, kernel, strides, p["rhs_dilation"])]
    pieces = [entries[i : i + few] for i in range(0, len(entries), few)]
    if len(entries) > _WRITTEN_OUT:
        x, spread = jnp.moveaxis(x, -1, 1), np.array(p["rhs_dilation"])
        return [_in_turn(x, np.array(piece) * spread, places, strides) for piece in pieces]
    return [jnp.stack([seen(entry) for entry in piece], axis=1) for piece in pieces]


def edges_of(p: dict[str, Any]) -> list[tuple[int, int, int]]:
    """Padding of each axis; interior padding is the dilation of the input."""
    pairs = zip(p["padding"], p["lhs_dilation"], strict=True)
    return [(low, high, spread - 1) for (low, high), spread in pairs]


def may_group(p: dict[str, Any], kernel: Sequence[int], inputs: int) -> bool:
    """Whether kernel gradients may be left to the VJP: under `jax.vmap` one grouped convolution."""
    few = inputs < _SHIFTED or math.prod(kernel) > _WRITTEN_OUT
    # XLA partitions such a convolution wrongly, so it has to be sure that it will not. On an H100
    # it takes several times as long as the rest of a step (`make bench BENCH=devices`).
    if not few or not platforms.on_tpu() or may_be_split() or _disjoint(p, kernel):
        return False
    # A patch of 3 x 3 x 3 numbers costs less than a group, by both estimates of the compiler.
    return inputs * math.prod(kernel) >= _SHIFTED


def _disjoint(p: dict[str, Any], kernel: Sequence[int]) -> bool:
    """Whether no two patches overlap: then all of them are one view of the image."""
    return tuple(p["window_strides"]) == tuple(kernel) and set(p["rhs_dilation"]) == {1}


def _shifted(
    p: dict[str, Any], x: Array, kernel: Sequence[int], places: Sequence[int]
) -> Callable[[tuple[int, ...]], Array] | None:
    """What an entry of the kernel sees, if a TPU reads it as a shift of one long axis.

    XLA for TPU moves the image to the layout of the product once, and shifts and masks as the
    product reads. It would move each slice of a padded image by itself. None for a convolution
    that changes the sides of the image.
    """
    lead, sides, channels = x.shape[:2], x.shape[2:-1], x.shape[-1]
    stays = tuple(places) == sides and {*p["window_strides"], *p["lhs_dilation"]} == {1}
    if not platforms.on_tpu() or not stays:
        return None
    # How far an entry looks along each axis, and along the long axis.
    steps = [math.prod(sides[a + 1 :]) for a in range(len(sides))]
    low = [edge for edge, _ in p["padding"]]
    size, spreads = math.prod(sides), p["rhs_dilation"]
    looks = zip(low, kernel, spreads, steps, strict=True)
    most = sum(max(b, (k - 1) * d - b) * n for b, k, d, n in looks)
    x = jnp.moveaxis(x.reshape(*lead, size, channels), -1, 1)
    x = jnp.pad(x, [(0, 0)] * 3 + [(most, most)])

    def seen(entry: tuple[int, ...]) -> Array:
        looks = [e * d - b for e, d, b in zip(entry, spreads, low, strict=True)]
        start = most + sum(look * n for look, n in zip(looks, steps, strict=True))
        found = jax.lax.slice_in_dim(x, start, start + size, axis=-1)
        # A pixel beyond an end of an axis lies in the next row; beyond both ends of the image are
        # zeros.
        for look, step, n in zip(looks[1:], steps[1:], sides[1:], strict=True):
            if look:
                place = jnp.arange(size) // step % n + look
                found = jnp.where((place >= 0) & (place < n), found, 0)
        return found

    return seen


def _convolved(
    x: Array, kernel: Sequence[int], strides: Sequence[int], spreads: Sequence[int]
) -> Array:
    """Patches of channels-last images, written by a convolution with ones and zeros."""
    lead, axes, channels = x.shape[:2], "STUVWXYZ"[: len(kernel)], x.shape[-1]
    seen = jax.lax.conv_general_dilated_patches(
        x.reshape(-1, *x.shape[2:]),
        kernel,
        strides,
        "VALID",
        rhs_dilation=spreads,
        dimension_numbers=(f"N{axes}C", f"{axes}IO", f"N{axes}C"),
        precision=jax.lax.Precision.HIGHEST,
    )
    seen = seen.reshape(*lead, *seen.shape[1:-1], channels, -1)
    # [batch, entries, channels, images, places]
    return jnp.moveaxis(seen, (-1, -2), (1, 2))


def _in_turn(x: Array, starts: np.ndarray, places: Sequence[int], strides: Sequence[int]) -> Array:
    """Patches of channels-first images, written in a loop over the entries of the kernel."""
    lead = x.shape[:3]
    spans = [(n - 1) * s + 1 for n, s in zip(places, strides, strict=True)]

    def write(i: Array, seen: Array) -> Array:
        at = jnp.asarray(starts)[i]
        patch = jax.lax.dynamic_slice(x, (0, 0, 0, *at), (*lead, *spans))
        patch = jax.lax.slice(patch, [0] * patch.ndim, patch.shape, [1, 1, 1, *strides])
        return jax.lax.dynamic_update_index_in_dim(seen, patch, i, 1)

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

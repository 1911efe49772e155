# SPDX-License-Identifier: Apache-2.0
"""Checksums of trees, which depend on their bits and not on devices or compilers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt32

from dpjax import trees
from dpjax._packing import packed, together
from dpjax.types import PyTree

__all__ = ["checksum", "checksum_of_buffers", "places"]

# Odd constants: multiplication by one of them permutes the 32-bit words.
_STRIDE, _MIXERS = 0x9E3779B9, (0x85EBCA6B, 0xC2B2AE35)


def checksum(
    tree: PyTree, in_parts: bool = False, mixers: Sequence[Any] = _MIXERS
) -> UInt32[Array, " mixers"]:
    """32 bits per mixer that differ, but for chance, where two trees of equal shapes differ.

    Args:
      tree: Floats of any dtype.
      in_parts: Whether a mesh splits the leaves. Then no leaf is flattened, which would gather it
        on every device. The bits are the same; on one device they take half as long again.
      mixers: Odd numbers, one for each 32 bits.
    """
    # Sums of integers are exact in every order, so a checksum depends on the bits of the tree and
    # not on devices or compilers.
    totals = [jnp.zeros((), jnp.uint32)] * len(mixers)
    leaves = jax.tree.leaves(trees.widened(tree))
    for run in together(leaves):
        several = [leaves[i] for i in run]
        start, found = 0, [jnp.zeros((), jnp.uint32)] * len(mixers)
        for array in several if in_parts else packed(several):
            words = jax.lax.bitcast_convert_type(array, jnp.uint32)
            words = words if in_parts else words.reshape(-1)
            # The place of a word counts: a sum that was permuted is another sum.
            where = places(words.shape, start)
            start += words.size
            for i, mixer in enumerate(mixers):
                mixed = (words ^ (where * jnp.uint32(_STRIDE))) * jnp.uint32(mixer)
                mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(_STRIDE)
                found[i] += jnp.sum(mixed ^ (mixed >> 13), dtype=jnp.uint32)
        totals = [a * jnp.uint32(_STRIDE) + b for a, b in zip(totals, found, strict=True)]
    return jnp.stack(totals)


@jax.jit
def checksum_of_buffers(tree: PyTree) -> UInt32[Array, "2"]:
    """The `checksum` of the arrays that a program returns."""
    # XLA may compute an array again for each reader, and round it otherwise. The operands of a loop
    # are in memory, so a loop reads the same bits that the program returns.
    mixers = jnp.asarray(_MIXERS, jnp.uint32)
    return jax.lax.map(lambda mixer: checksum(tree, mixers=[mixer])[0], mixers)


def places(shape: tuple[int, ...], start: int = 0) -> UInt32[Array, "..."]:
    """Where each entry of an array stands in the flat array, computed from its indices alone.

    Args:
      shape: The shape of the array.
      start: The place of the first entry.

    Example:
      >>> places((2, 3)).tolist()
      [[0, 1, 2], [3, 4, 5]]
    """
    place = jnp.full(shape, start, jnp.uint32)
    for axis in range(len(shape)):
        stride = jnp.uint32(math.prod(shape[axis + 1 :]))
        place += stride * jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    return place

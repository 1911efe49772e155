# SPDX-License-Identifier: Apache-2.0
"""Trees read as vectors: inner product, length, angle.

Angles and lengths divide by the largest entry first, so no square overflows or rounds to 0.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dpjax import trees
from dpjax.types import PyTree


def cosine(a: PyTree, b: PyTree) -> Float[Array, ""]:
    """The cosine of the angle between two trees of one structure, each read as one vector.

    It is NaN if either tree is zero or not finite.

    Example:
      >>> float(cosine({"w": jnp.array([1.0, 0.0])}, {"w": jnp.array([2.0, 0.0])}))
      1.0
    """
    a, _ = _within_one(a)
    b, _ = _within_one(b)
    quotient = inner(a, b) / jnp.sqrt(inner(a, a)) / jnp.sqrt(inner(b, b))
    # Rounding gives 1.0000001 for (1, 1, 1) with itself, whose arccos is NaN.
    return jnp.clip(quotient, -1, 1)


def inner(a: PyTree, b: PyTree) -> Float[Array, ""]:
    """The inner product of two trees of the same structure."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    # The products are elementwise, because accelerators round the inputs of a dot product.
    products = (jnp.sum(x.astype(trees.wide(x.dtype)) * y) for x, y in pairs)
    return sum(products, jnp.zeros((), jnp.float32))


def length(tree: PyTree) -> Float[Array, ""]:
    """The Euclidean norm of all leaves together."""
    tree, largest = _within_one(tree)
    return largest * jnp.sqrt(inner(tree, tree))


def _within_one(tree: PyTree) -> tuple[PyTree, Float[Array, ""]]:
    """The tree divided by its largest entry, and that entry; by 1 if it is 0 or not finite."""
    wide = trees.widened(tree)
    entries = [jnp.max(jnp.abs(leaf), initial=0.0) for leaf in jax.tree.leaves(wide)]
    largest = functools.reduce(jnp.maximum, entries, jnp.zeros((), jnp.float32))
    scale = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1)
    # XLA multiplies by the reciprocal, which it flushes to 0 for larger numbers.
    scale = jnp.minimum(scale, jnp.finfo(scale.dtype).max / 4)
    return jax.tree.map(lambda leaf: leaf / scale, wide), scale

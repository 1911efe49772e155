# SPDX-License-Identifier: Apache-2.0
"""Trees read as vectors: inner product, length, angle.

A gradient or a set of parameters is a point in one space, however many arrays hold it.
Products are taken and summed in float32 or wider, whatever the leaves are, and are no
matrix products, whose inputs accelerators round.

This file must never know what the vectors mean.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dpjax import trees
from dpjax.types import PyTree


def cosine(a: PyTree, b: PyTree) -> Float[Array, ""]:
    """The cosine of the angle between two trees, each read as one vector; NaN for a zero.

    Example:
      >>> float(cosine({"w": jnp.array([1.0, 0.0])}, {"w": jnp.array([2.0, 0.0])}))
      1.0
    """
    return inner(a, b) / (length(a) * length(b))


def inner(a: PyTree, b: PyTree) -> Float[Array, ""]:
    """The inner product of two trees of one structure."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    products = (jnp.sum(x.astype(trees.wide(x.dtype)) * y) for x, y in pairs)
    return sum(products, jnp.zeros((), jnp.float32))


def length(tree: PyTree) -> Float[Array, ""]:
    """The norm of all leaves together."""
    return jnp.sqrt(inner(tree, tree))


def unit(tree: PyTree, instead: PyTree) -> PyTree:
    """The tree with length 1; ``instead`` where it has none."""
    size = length(tree)
    return jax.tree.map(
        lambda x, y: jnp.where(size > 0, x / jnp.where(size > 0, size, 1), y).astype(x.dtype),
        tree,
        instead,
    )

# SPDX-License-Identifier: Apache-2.0
"""Trees read as vectors: inner product, length, angle.

All leaves of a gradient or of parameters form one vector. Products are computed and summed in
float32 or wider. They are elementwise and not matrix products, because accelerators round the
inputs of matrix products.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dpjax import trees
from dpjax.types import PyTree


def cosine(a: PyTree, b: PyTree) -> Float[Array, ""]:
    """The cosine of the angle between two trees of one structure, each read as one vector.

    Returns:
      A number from -1 to 1; NaN if either tree is zero.

    Example:
      >>> float(cosine({"w": jnp.array([1.0, 0.0])}, {"w": jnp.array([2.0, 0.0])}))
      1.0
    """
    return inner(a, b) / (length(a) * length(b))


def inner(a: PyTree, b: PyTree) -> Float[Array, ""]:
    """The inner product of two trees of the same structure."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    # Elementwise products and a sum: accelerators round the inputs of a dot product.
    products = (jnp.sum(x.astype(trees.wide(x.dtype)) * y) for x, y in pairs)
    return sum(products, jnp.zeros((), jnp.float32))


def length(tree: PyTree) -> Float[Array, ""]:
    """The Euclidean norm of all leaves together."""
    return jnp.sqrt(inner(tree, tree))


def unit(tree: PyTree, instead: PyTree) -> PyTree:
    """The tree scaled to length 1; ``instead`` if the length is 0."""
    size = length(tree)
    return jax.tree.map(
        lambda x, y: jnp.where(size > 0, x / jnp.where(size > 0, size, 1), y).astype(x.dtype),
        tree,
        instead,
    )

# SPDX-License-Identifier: Apache-2.0
"""Streams: memory of earlier arrays on each leaf, read by a weighted sum over a leading axis.

The sum is elementwise in the axes of a leaf, so leaves that a mesh splits need no communication. A
ring overwrites its oldest row in place, and the weights rotate instead.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dpjax import trees
from dpjax.types import PyTree


def stacked(tree: PyTree, size: int) -> PyTree:
    """Zeros with ``size`` rows for each leaf, placed as the leaf is, in float32 or wider."""

    def rows(leaf: Array) -> Array:
        leaf = jnp.asarray(leaf)
        empty = jnp.zeros_like(leaf, dtype=trees.wide(leaf.dtype))
        return jnp.broadcast_to(empty, (size, *leaf.shape))

    return jax.tree.map(rows, tree)


def ages(step: Any, size: int) -> Int[Array, " size"]:
    """How many steps ago each slot of a ring was written, from 1 to ``size``."""
    # Step t - k wrote slot (t - k) % size.
    return (jnp.asarray(step) - 1 - jnp.arange(size)) % size + 1


def weighted(weights: Float[Array, " size"], rows: Float[Array, "size ..."]) -> Float[Array, "..."]:
    """``sum_k weights[k] rows[k]``."""
    weights = weights.astype(rows.dtype)
    # Accelerators round the noise to bfloat16 at a lower precision.
    return jnp.tensordot(weights, rows, axes=1, precision=jax.lax.Precision.HIGHEST)


def replaced(rows: Float[Array, "size ..."], row: Float[Array, "..."], slot: Any) -> Array:
    """The rows with one overwritten."""
    return jax.lax.dynamic_update_index_in_dim(rows, row.astype(rows.dtype), slot, 0)


def one_within_run(step: Any, steps: int) -> Any:
    """1 within the run and NaN outside it, for a step that may be traced."""
    step = jnp.asarray(step)
    within = (step >= 0) & (step < steps)
    # The accounting knows no noise outside the run, and NaN cannot be mistaken for a release.
    return jnp.where(within, 1.0, jnp.nan).astype(jnp.float32)


def mapped(function: Any, z: PyTree, memory: PyTree) -> tuple[PyTree, PyTree]:
    """``(noise, memory)`` of ``function(leaf of z, its rows)`` on each leaf."""
    leaves, structure = jax.tree.flatten(z)
    noise = []
    next_rows = []
    for leaf, rows in zip(leaves, structure.flatten_up_to(memory), strict=True):
        leaf_noise, leaf_rows = function(leaf, rows)
        noise.append(leaf_noise)
        next_rows.append(leaf_rows)
    return structure.unflatten(noise), structure.unflatten(next_rows)

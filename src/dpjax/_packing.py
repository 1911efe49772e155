# SPDX-License-Identifier: Apache-2.0
"""The numbers of many leaves in few arrays.

XLA on CPU compiles what is done to each leaf by itself, and a network has many small leaves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dpjax.trees import cut
from dpjax.types import PyTree

__all__ = ["packed", "together", "unpacked"]

# Numbers of the largest leaf that is copied beside others.
_SMALL = 2**14


def packed(tree: PyTree) -> list[Array]:
    """The numbers of a tree in few arrays: all small leaves of a dtype are one flat array.

    Large ones stay as they are, because at every step a copy of them would take time.
    """
    leaves = jax.tree.leaves(tree)
    return [
        jnp.concatenate([leaves[i].reshape(-1) for i in places])
        if len(places) > 1
        else leaves[places[0]]
        for places in together(leaves)
    ]


def unpacked(arrays: Sequence[Array], like: PyTree) -> PyTree:
    """The tree that `packed` has packed; ``like`` gives structure and shapes."""
    leaves, structure = jax.tree.flatten(like)
    found: list[Any] = list(leaves)
    for array, places in zip(arrays, together(leaves), strict=True):
        pieces = cut(array, [jnp.shape(leaves[i]) for i in places])
        for i, piece in zip(places, pieces, strict=True):
            found[i] = piece
    return structure.unflatten(found)


def together(leaves: Sequence[Array]) -> list[list[int]]:
    """Which leaves `packed` makes one array of, by their places in the tree."""
    groups: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        large = math.prod(jnp.shape(leaf)) > _SMALL
        groups.setdefault(i if large else leaf.dtype, []).append(i)
    return list(groups.values())

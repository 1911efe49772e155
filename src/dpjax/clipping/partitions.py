# SPDX-License-Identifier: Apache-2.0
"""Partitions: which leaves of a gradient are clipped together.

A partition assigns every leaf to a group by its place, its name or its path. Groups are orthogonal
blocks, so their bounds add up as squares. A leaf is never split.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax

from dpjax import checks, trees
from dpjax.types import Partition, PyTree

Groups: TypeAlias = int | Partition


def balanced(groups: int) -> Partition:
    """Cuts the leaves, in their order, into groups whose largest is as small as possible.

    The size of a group is the number of entries in its leaves.

    Example:
      >>> import jax.numpy as jnp
      >>> balanced(2).assign([jnp.zeros(6), jnp.zeros(1), jnp.zeros(2), jnp.zeros(4)])
      (0, 0, 1, 1)
    """
    hint = "Give a positive number of groups, or a Partition."
    groups = checks.whole("clipping.balanced", "groups", groups, hint)

    def assign(tree: PyTree) -> tuple[int, ...]:
        leaves = jax.tree.leaves(tree)
        if len(leaves) < groups:
            raise ValueError(
                f"clipping.balanced(groups={groups}): there are only {len(leaves)} leaves, never "
                "split."
            )
        sizes = [leaf.size for leaf in leaves]
        # Bisection finds the least capacity of a group with which the leaves fit into this number
        # of groups. It is at least the largest leaf, and at most all leaves together.
        low = max(sizes)
        high = sum(sizes)
        while low < high:
            capacity = (low + high) // 2
            last_group = _fill(sizes, groups, capacity)[-1]  # counted from 0
            if last_group < groups:
                high = capacity
            else:
                low = capacity + 1
        return _fill(sizes, groups, low)

    return Partition(tuple(f"group {i}" for i in range(groups)), assign)


def _fill(sizes: Sequence[int], groups: int, capacity: int) -> tuple[int, ...]:
    """The group of each leaf, if groups are filled in order up to a capacity in entries.

    No group is empty. If the capacity is too small, there are more groups than ``groups``.
    """
    assigned = []
    group = 0
    load = 0
    for i, size in enumerate(sizes):
        leaves_left = len(sizes) - i  # with this one
        later_groups = groups - 1 - group
        # Every later group needs a leaf: an empty group costs noise and clips nothing.
        if load + size > capacity or leaves_left <= later_groups:
            group += 1
            load = 0
        assigned.append(group)
        load += size
    return tuple(assigned)


def by_leaf(params: PyTree) -> Partition:
    """One group a leaf.

    Example:
      >>> import jax.numpy as jnp
      >>> by_leaf({"a": jnp.zeros(2), "b": jnp.zeros(3)}).names
      ('a', 'b')
    """
    return _named("clipping.by_leaf", params, trees.leaf_names(params))


def by_layer(params: PyTree) -> Partition:
    """One group a layer: leaves that share all of their path but the last name.

    Leaves at the top of the tree, whose paths are one name, are one group, ``(top)``.

    Example:
      >>> import jax.numpy as jnp
      >>> layer = {"kernel": jnp.zeros((2, 3)), "bias": jnp.zeros(3)}
      >>> by_layer({"first": layer, "second": layer}).names
      ('first', 'second')
    """
    layers = [name.rpartition("/")[0] or "(top)" for name in trees.leaf_names(params)]
    return _named("clipping.by_layer", params, layers)


def by_path(params: PyTree, patterns: Mapping[str, Any]) -> Partition:
    """Groups leaves by regular expressions on their paths, each with the name of a group.

    The first that is found anywhere in a leaf's path counts; every leaf must match one.

    Example:
      >>> import jax.numpy as jnp
      >>> params = {"embed": jnp.zeros(3), "head": {"kernel": jnp.zeros(2)}}
      >>> by_path(params, {"^embed": "words", ".*": "rest"}).names
      ('words', 'rest')
    """

    def group(leaf: str) -> str:
        # The first pattern that matches, so special cases stand before the general one.
        for pattern, name in patterns.items():
            if re.search(pattern, leaf):
                return str(name)
        raise ValueError(
            f"clipping.by_path: no pattern of {list(patterns)} matches the leaf {leaf!r}. End with "
            "'.*' to catch the rest."
        )

    return _named("clipping.by_path", params, [group(leaf) for leaf in trees.leaf_names(params)])


def _named(call: str, params: PyTree, labels: Sequence[str]) -> Partition:
    names = tuple(dict.fromkeys(labels))
    groups = tuple(names.index(label) for label in labels)
    expected = trees.leaf_names(params)

    def assign(tree: PyTree) -> tuple[int, ...]:
        # Names are compared: another model with as many leaves is clipped in wrong groups.
        if trees.leaf_names(tree) != expected:
            raise ValueError(
                f"{call}: made for the leaves {list(expected)}; the tree has "
                f"{list(trees.leaf_names(tree))}."
            )
        return groups

    return Partition(names, assign)


def partition_of(groups: Groups) -> Partition:
    """A number of groups as the balanced `Partition` of that size; a partition as it is."""
    if isinstance(groups, Partition):
        return groups
    return balanced(groups)

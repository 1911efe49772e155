# SPDX-License-Identifier: Apache-2.0
"""Structure of views: along which axes they are constant, and which run along with a leaf's.

The norms of the columns of a kernel run along with its last axis: each depends on its own column
alone, so an example only scales the columns of one array (`common`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from dpjax.gradients._bookkeeping.primitives import known
from dpjax.gradients._bookkeeping.sites import Axes, View, union


def structure(
    equation: JaxprEqn, views: Sequence[View], output: Any
) -> tuple[frozenset[int], Mapping[int, Axes]]:
    """The axes of a result of views that are constant, and the leaves' axes with which it runs."""
    shape, leaves = jnp.shape(output), union(view.leaves for view in views)
    sources = _sources(equation, views, shape) if views else None
    if sources is None:
        return frozenset(), dict.fromkeys(leaves, (None,) * len(shape))
    pairs = list(zip(views, sources, strict=True))

    def constant(axis: int) -> bool:
        return all(source[axis] is None or source[axis] in view.constant for view, source in pairs)

    def own(leaf: int, axis: int) -> int | None:
        # Inputs that do not depend on the leaf have no say.
        axes = {
            None if source[axis] is None else view.own[leaf][source[axis]]
            for view, source in pairs
            if leaf in view.leaves
        }
        return axes.pop() if len(axes) == 1 else None

    every = range(len(shape))
    axes = {leaf: tuple(own(leaf, axis) for axis in every) for leaf in leaves}
    return frozenset(filter(constant, every)), axes


def slices(view: View) -> dict[int, tuple[int, ...]]:
    """The axes that count slices, for each leaf whose slices each move one entry of the view."""
    shape = view.value.shape
    counted = [a for a, size in enumerate(shape) if a not in view.constant and size > 1]
    axes = {leaf: [own[a] for a in counted] for leaf, own in view.own.items()}
    runs = {leaf: tuple(a for a in own if a is not None) for leaf, own in axes.items()}
    return {leaf: own for leaf, own in runs.items() if len(own) == len(counted)}


def _sources(
    equation: JaxprEqn, views: Sequence[View], shape: tuple[int, ...]
) -> Sequence[Sequence[Any]] | None:
    """For each input and each axis of the result, the input's axis; None where it is repeated."""
    name, p, before = equation.primitive.name, equation.params, jnp.shape(views[0].value)
    if known(name).entrywise:
        # A number among the inputs is repeated along all axes, an axis of length 1 along its own.
        shapes = [jnp.shape(view.value) for view in views]
        own = [[a if n == shape[a] else None for a, n in enumerate(of)] for of in shapes]
        return [axes or [None] * len(shape) for axes in own]
    if name in ("reduce_sum", "reduce_max", "squeeze"):
        gone = p["dimensions" if name == "squeeze" else "axes"]
        return [[a for a in range(len(before)) if a not in gone]]
    if name == "transpose":
        return [p["permutation"]]
    if name == "broadcast_in_dim":
        # An axis of length 1 is repeated if the result has more entries there.
        places = {k: a for a, k in enumerate(p["broadcast_dimensions"]) if before[a] == shape[k]}
        return [[places.get(k) for k in range(len(shape))]]
    if name == "slice" and all(m in (n, 1) for n, m in zip(before, shape, strict=True)):
        return [[a if n == shape[a] else None for a, n in enumerate(before)]]
    if name == "reshape" and [n for n in before if n > 1] == [n for n in shape if n > 1]:
        # Only axes of length 1 come and go.
        rest = iter(a for a, n in enumerate(before) if n > 1)
        return [[next(rest) if n > 1 else None for n in shape]]
    return None

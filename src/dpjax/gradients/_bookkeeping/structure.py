# SPDX-License-Identifier: Apache-2.0
"""Structure of views: their constant axes, and the axes that run along with an axis of a leaf.

A `View` is a value that depends only on leaves of the parameters. An axis of a view *runs along*
with an axis of a leaf if each entry of the view depends only on entries of the leaf with the same
index along that axis. The norms of the columns of a kernel run along with its last axis: each norm
depends on its own column only, so an example only scales the columns of one array (`common`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from dpjax.gradients._bookkeeping.primitives import known
from dpjax.gradients._bookkeeping.sites import Axes, View, union

_InputAxes = Sequence[int | None]
"""For each axis of a result the axis of an input; None if the input is repeated along it."""


def structure(
    equation: JaxprEqn, views: Sequence[View], output: Any
) -> tuple[frozenset[int], Mapping[int, Axes]]:
    """`View.constant` and `View.own` of the result of an equation whose inputs are all views.

    The first has the axes along which all entries are equal. The second has, for each leaf and each
    axis of the result, the axis of the leaf that runs along with it, or None.
    """
    rank = jnp.ndim(output)
    leaves = union(view.leaves for view in views)
    input_axes = None
    if views:  # an `iota`, for example, has no input
        input_axes = _input_axes(equation, views, jnp.shape(output))
    if input_axes is None:
        # Nothing is known of the result of an equation without a rule.
        return frozenset(), dict.fromkeys(leaves, (None,) * rank)
    inputs = list(zip(views, input_axes, strict=True))
    constant = frozenset(axis for axis in range(rank) if _is_constant(axis, inputs))
    axes_of_leaves: dict[int, Axes] = {}
    for leaf in leaves:
        axes_of_leaves[leaf] = tuple(_axis_of_leaf(leaf, axis, inputs) for axis in range(rank))
    return constant, axes_of_leaves


def _is_constant(axis: int, inputs: Sequence[tuple[View, _InputAxes]]) -> bool:
    """Whether all inputs are repeated, or constant, along an axis of the result."""
    return all(axes[axis] is None or axes[axis] in view.constant for view, axes in inputs)


def _axis_of_leaf(leaf: int, axis: int, inputs: Sequence[tuple[View, _InputAxes]]) -> int | None:
    """The axis of the leaf along which all inputs that depend on the leaf run, if it is one."""
    leaf_axes: set[int | None] = set()
    for view, axes in inputs:
        if leaf in view.leaves:
            input_axis = axes[axis]
            leaf_axes.add(None if input_axis is None else view.own[leaf][input_axis])
    return leaf_axes.pop() if len(leaf_axes) == 1 else None


def slices(view: View) -> dict[int, tuple[int, ...]]:
    """The axes that count slices, for each leaf whose slices each move one entry of the view.

    So every axis along which the view varies has to run along with an axis of the leaf.
    """
    lengths = enumerate(view.value.shape)
    varying = [axis for axis, length in lengths if axis not in view.constant and length > 1]
    slices_of_leaves: dict[int, tuple[int, ...]] = {}
    for leaf, axes in view.own.items():
        leaf_axes = [axes[axis] for axis in varying]
        along = tuple(axis for axis in leaf_axes if axis is not None)
        if len(along) == len(varying):
            slices_of_leaves[leaf] = along
    return slices_of_leaves


def _input_axes(
    equation: JaxprEqn, views: Sequence[View], shape: tuple[int, ...]
) -> Sequence[_InputAxes] | None:
    """For each input, the input axis of every result axis; None for an equation without a rule.

    The transpose of one matrix has ``[(1, 0)]``; its sum over the first axis has ``[[1]]``. An
    input that is repeated along a result axis has None there.
    """
    name = equation.primitive.name
    parameters = equation.params
    if known(name).entrywise:
        return [_broadcast_axes(jnp.shape(view.value), shape) for view in views]
    # The other rules are for primitives of one input.
    input_shape = jnp.shape(views[0].value)
    if name in ("reduce_sum", "reduce_max"):
        return [_without(parameters["axes"], len(input_shape))]
    if name == "squeeze":
        return [_without(parameters["dimensions"], len(input_shape))]
    if name == "transpose":
        return [parameters["permutation"]]
    if name == "broadcast_in_dim":
        axes: list[int | None] = [None] * len(shape)
        for input_axis, axis in enumerate(parameters["broadcast_dimensions"]):
            # An axis of length 1 is repeated if the result has more entries there.
            if input_shape[input_axis] == shape[axis]:
                axes[axis] = input_axis
        return [axes]
    if name == "slice":
        # Each axis must be kept whole or give one entry, which does not run along with it any more.
        # A longer part of an axis has no rule.
        lengths = zip(input_shape, shape, strict=True)
        if all(length in (input_length, 1) for input_length, length in lengths):
            return [_broadcast_axes(input_shape, shape)]
    if name == "reshape":
        return _reshaped_axes(input_shape, shape)
    return None


def _broadcast_axes(input_shape: Sequence[int], shape: Sequence[int]) -> _InputAxes:
    """An axis runs along the input's axis if their lengths are equal, and repeats it otherwise.

    The input has the rank of the result, or is a number, which all axes repeat.
    """
    axes: list[int | None] = [None] * len(shape)
    for axis, length in enumerate(input_shape):
        if length == shape[axis]:
            axes[axis] = axis
    return axes


def _without(removed: Sequence[int], rank: int) -> _InputAxes:
    """The input axes that remain after some are removed."""
    return [axis for axis in range(rank) if axis not in removed]


def _reshaped_axes(input_shape: Sequence[int], shape: Sequence[int]) -> list[_InputAxes] | None:
    """The axes of a reshape that only adds and removes axes of length 1; None for others."""
    longer = [axis for axis, length in enumerate(input_shape) if length > 1]
    if [input_shape[axis] for axis in longer] != [length for length in shape if length > 1]:
        return None
    remaining = iter(longer)
    return [[next(remaining) if length > 1 else None for length in shape]]

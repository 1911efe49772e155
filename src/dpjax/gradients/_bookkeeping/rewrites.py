# SPDX-License-Identifier: Apache-2.0
"""Rewrites: products of data with computed kernels, in the order that keeps leaves as they are.

With a kernel such as ``w + a @ b`` (LoRA) or ``w * gain``, the leaves' gradients are functions of
the kernel's; in ``x @ w + (x @ a) @ b`` the leaves meet the data as they are. A rewrite is applied
only in float32 or wider, where the order changes the last bits only.

A `View` is a value that depends on parameters only. It is *trained* if it has ``leaves``, by which
it is differentiated, and ``made`` is the equation that computed it, with the views that entered.

In all functions ``equation`` is the product, and its operand number ``operand``, 0 or 1, is the
``view``, which another equation made of views. The other operand is the ``data``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jaxtyping import Array

from dpjax.gradients._bookkeeping.sites import View

Rewritten = tuple[Callable[..., Array], list[Any]]
"""A function in place of an equation, and its arguments."""


def rewritten(equation: JaxprEqn, inputs: Sequence[Any]) -> Rewritten | None:
    """A product of data with a view in another order, if there is a better one.

    ``inputs`` of the equation are views, or values that depend on the data.
    """
    trained = [i for i, x in enumerate(inputs) if isinstance(x, View) and x.leaves]
    if equation.primitive.name != "dot_general" or len(trained) != 1:
        return None
    (operand,) = trained
    view = inputs[operand]
    data = inputs[1 - operand]
    output: Any = equation.outvars[0].aval
    one_dtype = output.dtype == view.value.dtype == data.dtype
    is_narrow = output.dtype.itemsize < 4  # another order changes more than the last bits
    # An empty view has no entries to bring into another order.
    if view.made is None or not one_dtype or is_narrow or not view.value.size:
        return None
    made_by, _ = view.made
    name = made_by.primitive.name
    if name in {"mul", "div"}:
        return _scaled(equation, view, data, operand)
    if name in {"add", "add_any", "sub"}:
        return _added(equation, view, data, operand)
    if name == "dot_general":
        return _multiplied(equation, view, data, operand)
    return None


def _scaled(equation: JaxprEqn, view: View, data: Any, operand: int) -> Rewritten | None:
    """``(x @ w) * s`` in place of ``x @ (w * s)``, with the base ``w`` and the scale ``s``.

    The scale has to be constant along the axes that the product contracts, as one number for each
    column of ``w`` is.
    """
    # The axes of the view: ``dimension_numbers`` has pairs, of the left and the right operand.
    contracted, batch = (sides[operand] for sides in equation.params["dimension_numbers"])
    base_and_scale = _base_and_scale(view, contracted)
    if base_and_scale is None or view.made is None:
        return None
    made_by, _ = view.made
    divides = made_by.primitive.name == "div"

    def run(x: Array, base: Array, scale: Array) -> Array:
        y = _product(equation, x, base, operand)
        if scale.ndim:
            scale = _like_output(scale, y, operand, contracted, batch)
        if divides:
            # The reciprocal is computed from parameters only. Its product with ``y`` is linear in
            # it, as a site has to be in its view; a quotient is not linear in the divisor.
            scale = 1 / scale
        return y * scale

    return run, [data, *base_and_scale]


def _like_output(
    scale: Array, y: Array, operand: int, contracted: Sequence[int], batch: Sequence[int]
) -> Array:
    """A scale with the axes of the view, broadcast to the product ``y`` that it scales.

    It is constant along the ``contracted`` axes of the view. The axes of a product are first the
    ``batch`` axes, then the free axes of the left operand, then the right one's.
    """
    free = [axis for axis in range(scale.ndim) if axis not in (*contracted, *batch)]
    # The first of the equal entries along contracted axes, which then have length 1.
    ends = list(scale.shape)
    for axis in contracted:
        ends[axis] = 1
    scale = jax.lax.slice(scale, [0] * scale.ndim, ends)
    scale = jax.lax.transpose(scale, [*batch, *free, *contracted])
    rank = len(batch) + len(free)
    scale = jax.lax.squeeze(scale, range(rank, scale.ndim))  # [*batch, *free]
    first_free = len(batch)
    if operand == 1:
        first_free = y.ndim - len(free)
    axes_of_output = (*range(len(batch)), *range(first_free, first_free + len(free)))
    return jax.lax.broadcast_in_dim(scale, y.shape, axes_of_output)


def _base_and_scale(view: View, axes: Sequence[int]) -> tuple[View, View] | None:
    """Base and scale of a product or quotient whose scale is constant along these axes."""
    assert view.made is not None
    equation, (left, right) = view.made
    if _is_scaled(view, left, right, axes):
        return left, right
    if equation.primitive.name == "mul" and _is_scaled(view, right, left, axes):
        return right, left
    return None


def _is_scaled(view: View, base: View, scale: View, axes: Sequence[int]) -> bool:
    """Whether a product has the shape of its base, and a scale that is constant along the axes."""
    if jnp.shape(base.value) != jnp.shape(view.value):
        return False
    is_number = not jnp.shape(scale.value)
    return is_number or scale.constant >= {*axes}


def _added(equation: JaxprEqn, view: View, data: Any, operand: int) -> Rewritten | None:
    """``x @ w + x @ v`` in place of ``x @ (w + v)``, if one is a product of thin matrices.

    The product of ``x`` with a thin addend is cheap, by `_multiplied`. Without a thin addend the
    result takes two products as large as the first.
    """
    assert view.made is not None
    made_by, addends = view.made
    shape = jnp.shape(view.value)
    # An addend that is broadcast does not have the axes of the product's operand.
    broadcasts = any(jnp.shape(addend.value) != shape for addend in addends)
    if broadcasts or not any(map(_is_thin, addends)):
        return None
    sign = -1 if made_by.primitive.name == "sub" else 1

    def run(x: Array, a: Array, b: Array) -> Array:
        return _product(equation, x, a, operand) + sign * _product(equation, x, b, operand)

    return run, [data, *addends]


def _is_thin(view: View) -> bool:
    """Whether the view is a product of matrices with few entries, times a number or not."""
    if view.made is None:
        return False
    equation, views = view.made
    name = equation.primitive.name
    if name in {"mul", "div"}:
        pair = _base_and_scale(view, range(view.value.ndim))
        return pair is not None and _is_thin(pair[0])
    entries = sum(factor.value.size for factor in views)
    return name == "dot_general" and 2 * entries <= view.value.size


def _multiplied(equation: JaxprEqn, view: View, data: Any, operand: int) -> Rewritten | None:
    """``(x @ a) @ b`` in place of ``x @ (a @ b)``, if the matrices ``a`` and ``b`` are thin."""
    assert view.made is not None
    made_by, factors = view.made
    contracted, batch = equation.params["dimension_numbers"]
    # Axis 1 of a is contracted with axis 0 of b, and there are no batch axes.
    is_matrix_product = made_by.params["dimension_numbers"] == (((1,), (0,)), ((), ()))
    if not is_matrix_product or view.value.ndim != 2 or not _is_thin(view):
        return None
    # The data have to meet the view in one axis, as in a product of matrices.
    if len(contracted[operand]) != 1 or batch != ((), ()):
        return None
    (view_axis,) = contracted[operand]
    (data_axis,) = contracted[1 - operand]
    precision = equation.params["precision"]

    def run(x: Array, a: Array, b: Array) -> Array:
        if view_axis == 1:
            # The data meet the transpose, which is b.T @ a.T.
            a, b = b.T, a.T
        # [*free axes of the data, thin], and then [*free axes of the data, free axis of the view]
        y = jnp.tensordot(x, a, ((data_axis,), (0,)), precision=precision)
        y = jnp.tensordot(y, b, 1, precision=precision)
        if operand == 1:
            return y
        # The free axis of the left operand, here the view, is the first of the product.
        return jnp.moveaxis(y, -1, 0)

    return run, [data, *factors]


def _product(equation: JaxprEqn, x: Array, view: Array, operand: int) -> Array:
    """The product of the equation, with these operands."""
    operands = [view, x] if operand == 0 else [x, view]
    return equation.primitive.bind(*operands, **equation.params)

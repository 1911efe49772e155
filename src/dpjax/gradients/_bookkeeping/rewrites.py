# SPDX-License-Identifier: Apache-2.0
"""Rewrites: products of data with computed kernels, in the order that keeps leaves as they are.

With a kernel such as ``w + a @ b`` (LoRA) or ``w * gain``, the leaves' gradients are functions of
the kernel's; in ``x @ w + (x @ a) @ b`` the leaves meet the data as they are. A rewrite is applied
in float32 or wider alone, where the order changes the last bits only.
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
    """A product of data with a view in another order, if there is a better one."""
    output: Any = equation.outvars[0].aval
    views = [i for i, x in enumerate(inputs) if isinstance(x, View) and x.leaves]
    if equation.primitive.name != "dot_general" or len(views) != 1:
        return None
    operand, view = views[0], inputs[views[0]]
    same = output.dtype == view.value.dtype == inputs[1 - operand].dtype
    if view.made is None or not same or output.dtype.itemsize < 4 or not view.value.size:
        return None
    name = view.made[0].primitive.name
    if name in {"mul", "div"}:
        return _scaled(equation, inputs, operand)
    if name in {"add", "add_any", "sub"}:
        return _added(equation, inputs, operand)
    return _multiplied(equation, inputs, operand) if name == "dot_general" else None


def _scaled(equation: JaxprEqn, inputs: Sequence[Any], operand: int) -> Rewritten | None:
    """``(x @ w) * s`` in place of ``x @ (w * s)``, if ``s`` is the same for all inputs."""
    contracted, batch = (sides[operand] for sides in equation.params["dimension_numbers"])
    pair = _scale_of(inputs[operand], contracted)
    if pair is None:
        return None
    divides = inputs[operand].made[0].primitive.name == "div"
    free = [a for a in range(pair[0].value.ndim) if a not in (*contracted, *batch)]

    def run(x: Array, base: Array, scale: Array) -> Array:
        y = _product(equation, x, base, operand)
        if scale.ndim:
            # Entries along contracted axes are equal: the first ones, in the order of the result.
            ends = [1 if a in contracted else n for a, n in enumerate(scale.shape)]
            scale = jax.lax.slice(scale, [0] * scale.ndim, ends)
            scale = jax.lax.transpose(scale, [*batch, *free, *contracted])
            scale = jax.lax.squeeze(scale, range(len(batch) + len(free), scale.ndim))
            first = len(batch) + (y.ndim - len(batch) - len(free)) * operand
            places = (*range(len(batch)), *range(first, first + len(free)))
            scale = jax.lax.broadcast_in_dim(scale, y.shape, places)
        # By the reciprocal: a product is linear in the scale, and a quotient is not.
        return y * (1 / scale if divides else scale)

    return run, [inputs[1 - operand], *pair]


def _scale_of(view: View, axes: Sequence[int]) -> tuple[View, View] | None:
    """Base and scale of a product or quotient whose scale is constant along these axes."""
    assert view.made is not None
    equation, (a, b) = view.made
    shape = jnp.shape(view.value)
    for base, by in ((a, b), (b, a))[: 1 if equation.primitive.name == "div" else 2]:
        if jnp.shape(base.value) == shape and (not jnp.shape(by.value) or by.constant >= {*axes}):
            return base, by
    return None


def _added(equation: JaxprEqn, inputs: Sequence[Any], operand: int) -> Rewritten | None:
    """``x @ w + x @ v`` in place of ``x @ (w + v)``, if one is a product of thin ones."""
    made, addends = inputs[operand].made
    shape = jnp.shape(inputs[operand].value)
    if any(jnp.shape(v.value) != shape for v in addends) or not any(map(_thin, addends)):
        return None
    sign = -1 if made.primitive.name == "sub" else 1

    def run(x: Array, a: Array, b: Array) -> Array:
        return _product(equation, x, a, operand) + sign * _product(equation, x, b, operand)

    return run, [inputs[1 - operand], *addends]


def _thin(view: View) -> bool:
    """Whether the view is a product of matrices with few entries, times a number or not."""
    if view.made is None:
        return False
    equation, views = view.made
    if equation.primitive.name in {"mul", "div"}:
        pair = _scale_of(view, range(view.value.ndim))
        return pair is not None and _thin(pair[0])
    few = 2 * sum(v.value.size for v in views) <= view.value.size
    return equation.primitive.name == "dot_general" and few


def _multiplied(equation: JaxprEqn, inputs: Sequence[Any], operand: int) -> Rewritten | None:
    """``(x @ a) @ b`` in place of ``x @ (a @ b)``, if the matrices ``a`` and ``b`` are thin."""
    view, x = inputs[operand], inputs[1 - operand]
    contracted, batch = equation.params["dimension_numbers"]
    made, (a, b) = view.made
    plain = made.params["dimension_numbers"] == (((1,), (0,)), ((), ()))
    matrices = plain and view.value.ndim == 2 and len(contracted[operand]) == 1
    if not (_thin(view) and matrices and batch == ((), ())):
        return None
    (mine,), (theirs,) = contracted[operand], contracted[1 - operand]
    precision = equation.params["precision"]

    def run(x: Array, a: Array, b: Array) -> Array:
        first, second = (a, b) if mine == 0 else (b.T, a.T)
        y = jnp.tensordot(x, first, ((theirs,), (0,)), precision=precision)
        y = jnp.tensordot(y, second, 1, precision=precision)
        return y if operand == 1 else jnp.moveaxis(y, -1, 0)

    return run, [x, a, b]


def _product(equation: JaxprEqn, x: Array, view: Array, operand: int) -> Array:
    both = [view, x] if operand == 0 else [x, view]
    return equation.primitive.bind(*both, **equation.params)

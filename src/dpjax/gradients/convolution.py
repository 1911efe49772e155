# SPDX-License-Identifier: Apache-2.0
"""Convolutions whose backward pass is as fast inside a loop as outside.

XLA on CPU rewrites convolutions to its fast form only at the top of a program.  Inside the
body of a loop the cotangents that autodiff writes are compiled to naive loops, many times
slower; forward convolutions stay fast there.  So the cotangent of the input is written
here as one more forward convolution.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

__all__ = ["convolution"]


def convolution(parameters: dict[str, Any], x: Array, kernel: Array) -> Array:
    """A convolution; the cotangent of its input is a forward convolution too.

    Args:
      parameters: Those of the ``conv_general_dilated`` equation.
      x: The input.
      kernel: Its cotangent is autodiff's own.
    """
    x, parameters = _padded(x, parameters)

    def forward(x: Array, kernel: Array) -> Array:
        return jax.lax.conv_general_dilated_p.bind(x, kernel, **parameters)

    empty = 0 in jax.eval_shape(forward, x, kernel).shape
    if parameters["batch_group_count"] != 1 or empty:
        return forward(x, kernel)

    def backward(inputs: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
        x, kernel = inputs
        (for_kernel,) = jax.vjp(lambda k: forward(x, k), kernel)[1](cotangent)
        return _input_cotangent(parameters, x.shape, kernel, cotangent), for_kernel

    canonical = jax.custom_vjp(forward)
    canonical.defvjp(lambda x, kernel: (forward(x, kernel), (x, kernel)), backward)
    return canonical(x, kernel)


def _padded(x: Array, parameters: dict[str, Any]) -> tuple[Array, dict[str, Any]]:
    """Pads beforehand where there are strides: then padding inside was twice as slow."""
    spec, padding = parameters["dimension_numbers"].lhs_spec, parameters["padding"]
    plain = all(spread == 1 for spread in parameters["lhs_dilation"])
    if not plain or not any(map(any, padding)) or set(parameters["window_strides"]) == {1}:
        return x, parameters
    edges = [(0, 0, 0)] * x.ndim
    for axis, (low, high) in zip(spec[2:], padding, strict=True):
        edges[axis] = (low, high, 0)
    x = jax.lax.optimization_barrier(jax.lax.pad(x, jnp.zeros((), x.dtype), edges))
    return x, {**parameters, "padding": ((0, 0),) * len(padding)}


def _input_cotangent(
    parameters: dict[str, Any], shape: tuple[int, ...], kernel: Array, cotangent: Array
) -> Array:
    """The cotangent of the input: the output's, convolved with the flipped kernel.

    What was stride becomes dilation of the input and the other way round.
    """
    numbers = parameters["dimension_numbers"]
    groups = parameters["feature_group_count"]
    strides, spreads = parameters["window_strides"], parameters["lhs_dilation"]
    out, channels, *space = numbers.rhs_spec
    flipped = _swap_channels(jax.lax.rev(kernel, space), out, channels, groups)
    # Without the barrier XLA folds the flip back into the form that it cannot run fast.
    flipped = jax.lax.optimization_barrier(flipped)
    padding = []
    for i, axis in enumerate(space):
        reach = (kernel.shape[axis] - 1) * parameters["rhs_dilation"][i]
        given = (shape[numbers.lhs_spec[2 + i]] - 1) * spreads[i]
        taken = (cotangent.shape[numbers.out_spec[2 + i]] - 1) * strides[i]
        low = reach - parameters["padding"][i][0]
        padding.append((low, given + reach - taken - low))
    return jax.lax.conv_general_dilated(
        cotangent,
        flipped,
        window_strides=spreads,
        padding=padding,
        lhs_dilation=strides,
        rhs_dilation=parameters["rhs_dilation"],
        dimension_numbers=jax.lax.ConvDimensionNumbers(
            numbers.out_spec, numbers.rhs_spec, numbers.lhs_spec
        ),
        feature_group_count=groups,
        precision=parameters["precision"],
    )


def _swap_channels(kernel: Array, out: int, channels: int, groups: int) -> Array:
    """Inputs become outputs, group by group."""
    kernel = jnp.moveaxis(kernel, (out, channels), (0, 1))
    split = kernel.reshape(groups, kernel.shape[0] // groups, *kernel.shape[1:])
    swapped = jnp.swapaxes(split, 1, 2)
    merged = swapped.reshape(groups * swapped.shape[1], *swapped.shape[2:])
    return jnp.moveaxis(merged, (0, 1), (out, channels))

# SPDX-License-Identifier: Apache-2.0
"""Convolutions whose backward pass is as fast inside a loop as outside.

XLA on CPU rewrites convolutions to its fast form only at the top of a program.  Inside the
body of a loop, where microbatches live, the cotangents that autodiff writes are compiled
to naive loops, many times slower; forward convolutions stay fast there.  So the cotangent
of the input is written here as one more forward convolution.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

__all__ = ["convolution"]


def convolution(parameters: dict[str, Any], x: Array, kernel: Array) -> Array:
    """A convolution, differentiated by its input alone.

    Args:
      parameters: Those of the ``conv_general_dilated`` equation.
      x: The input; its cotangent is a forward convolution where the parameters allow it.
      kernel: A constant of the backward pass.
    """

    def forward(x: Array) -> Array:
        return jax.lax.conv_general_dilated_p.bind(x, kernel, **parameters)

    grouped = parameters["feature_group_count"] != 1 or parameters["batch_group_count"] != 1
    if grouped or any(spread != 1 for spread in parameters["lhs_dilation"]):
        return forward(x)

    def backward(shape: tuple[int, ...], cotangent: Array) -> tuple[Array]:
        return (_input_cotangent(parameters, shape, kernel, cotangent),)

    canonical = jax.custom_vjp(forward)
    canonical.defvjp(lambda x: (forward(x), None), lambda _, g: backward(x.shape, g))
    return canonical(x)


def _input_cotangent(
    parameters: dict[str, Any], shape: tuple[int, ...], kernel: Array, cotangent: Array
) -> Array:
    """The cotangent of the input: the output's, convolved with the flipped kernel."""
    numbers = parameters["dimension_numbers"]
    out, channels, *space = numbers.rhs_spec
    flipped = jnp.swapaxes(jax.lax.rev(kernel, space), out, channels)
    # Without the barrier XLA folds the flip back into the form that it cannot run fast.
    flipped = jax.lax.optimization_barrier(flipped)
    padding = []
    for i, axis in enumerate(space):
        reach = (kernel.shape[axis] - 1) * parameters["rhs_dilation"][i]
        width = (cotangent.shape[numbers.out_spec[2 + i]] - 1) * parameters["window_strides"][i]
        low = reach - parameters["padding"][i][0]
        padding.append((low, shape[numbers.lhs_spec[2 + i]] + reach - 1 - width - low))
    return jax.lax.conv_general_dilated(
        cotangent,
        flipped,
        window_strides=(1,) * len(space),
        padding=padding,
        lhs_dilation=parameters["window_strides"],
        rhs_dilation=parameters["rhs_dilation"],
        dimension_numbers=jax.lax.ConvDimensionNumbers(
            numbers.out_spec, numbers.rhs_spec, numbers.lhs_spec
        ),
        precision=parameters["precision"],
    )

# SPDX-License-Identifier: Apache-2.0
"""Convolutions whose backward pass is as fast inside a loop as outside.

Symptom (jaxlib 0.10.2, CPU): in the body of a loop, where microbatches live, XLA compiles the input
cotangents that JAX writes to naive loops; forward convolutions stay fast. So both cotangents are
written as forward convolutions. One of few input channels is slow too; it computes several
neighbouring outputs together, as if they were channels.

``tests/test_ghost.py`` ("conv ...") tests values, norms and cotangents.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

# Inputs of at most 8 channels are slow; neighbours are added up to 48 output channels. Both were
# chosen by timing.
_FEW, _ENOUGH = 8, 48


def convolution(parameters: dict[str, Any], x: Array, kernel: Array) -> Array:
    """A convolution whose two cotangents are forward convolutions too."""
    x, parameters = _padded(x, parameters)

    as_written, forward = partial(_as_written, parameters), partial(_forward, parameters)
    out = jax.eval_shape(as_written, x, kernel)
    # Cases that no loss of the benchmark has run as written: right and merely slower.
    if parameters["batch_group_count"] != 1 or 0 in out.shape or out.dtype != x.dtype:
        return as_written(x, kernel)

    def backward(inputs: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
        x, kernel = inputs
        # The engine forms kernel gradients from patches; only `fast` losses take this one.
        if parameters["feature_group_count"] == 1:
            for_kernel = _kernel_cotangent(parameters, x, kernel.shape, cotangent)
        else:
            (for_kernel,) = jax.vjp(partial(as_written, x), kernel)[1](cotangent)
        return _input_cotangent(parameters, x.shape, kernel, cotangent), for_kernel

    canonical = jax.custom_vjp(forward)
    canonical.defvjp(lambda x, kernel: (forward(x, kernel), (x, kernel)), backward)
    return canonical(x, kernel)


def _padded(x: Array, parameters: dict[str, Any]) -> tuple[Array, dict[str, Any]]:
    """Pads before a strided convolution: padding inside it was twice as slow."""
    spec, padding = parameters["dimension_numbers"].lhs_spec, parameters["padding"]
    plain = all(spread == 1 for spread in parameters["lhs_dilation"])
    if not plain or not any(map(any, padding)) or set(parameters["window_strides"]) == {1}:
        return x, parameters
    edges = [(0, 0, 0)] * x.ndim
    for axis, (low, high) in zip(spec[2:], padding, strict=True):
        edges[axis] = (low, high, 0)
    x = jax.lax.optimization_barrier(jax.lax.pad(x, jnp.zeros((), x.dtype), edges))
    return x, {**parameters, "padding": ((0, 0),) * len(padding)}


def _forward(parameters: dict[str, Any], x: Array, kernel: Array) -> Array:
    as_written = partial(_as_written, parameters)
    count = _neighbours(parameters, x, kernel)
    if count <= 1:
        return as_written(x, kernel)
    abreast = partial(_abreast, parameters, count)
    return jax.lax.platform_dependent(x, kernel, cpu=abreast, default=as_written)


def _as_written(parameters: dict[str, Any], x: Array, kernel: Array) -> Array:
    return jax.lax.conv_general_dilated_p.bind(x, kernel, **parameters)


def _neighbours(parameters: dict[str, Any], x: Array, kernel: Array) -> int:
    """The number of neighbours of an output row to compute together."""
    numbers = parameters["dimension_numbers"]
    out, channels, *space = numbers.rhs_spec
    spreads = (*parameters["lhs_dilation"], *parameters["rhs_dilation"])
    groups = parameters["feature_group_count"] * parameters["batch_group_count"]
    # Neighbours along the last axis, next to the channels: the outputs are in order already.
    last = [numbers.out_spec[-1], numbers.out_spec[1]] == [x.ndim - 2, x.ndim - 1]
    if not last or x.dtype != jnp.float32 or {*spreads, groups} != {1}:
        return 1
    if kernel.shape[channels] > _FEW or kernel.shape[space[-1]] == 1:
        return 1
    return min(_columns(parameters, x, kernel)[0], -(-_ENOUGH // kernel.shape[out]))


def _columns(parameters: dict[str, Any], x: Array, kernel: Array) -> tuple[int, int]:
    """How many places the kernel has along the last axis, and the padded input there."""
    numbers = parameters["dimension_numbers"]
    size = x.shape[numbers.lhs_spec[-1]] + sum(parameters["padding"][-1])
    reach = kernel.shape[numbers.rhs_spec[-1]]
    return (size - reach) // parameters["window_strides"][-1] + 1, size


def _abreast(parameters: dict[str, Any], count: int, x: Array, kernel: Array) -> Array:
    """Computes `count` neighbouring outputs together: shifted copies of the kernel as channels."""
    numbers, (*others, stride) = parameters["dimension_numbers"], parameters["window_strides"]
    out, along = numbers.rhs_spec[0], numbers.rhs_spec[-1]
    *beside, (low, high) = parameters["padding"]
    columns, size = _columns(parameters, x, kernel)
    rounds = -(-columns // count)
    missing = (rounds * count - 1) * stride + kernel.shape[along] - size

    # Zeros let a non-finite pixel reach neighbours, but never another example.
    def moved(places: int) -> Array:
        edges = [(0, 0, 0)] * kernel.ndim
        edges[along] = (places * stride, (count - 1 - places) * stride, 0)
        return jax.lax.pad(kernel, jnp.zeros((), kernel.dtype), edges)

    changed = {
        **parameters,
        "window_strides": (*others, count * stride),
        "padding": (*beside, (low, high + max(0, missing))),
    }
    x, changed = _padded(x, changed)
    # Shifted copies of the kernel look like more output channels, which XLA vectorises.
    kernels = jnp.concatenate([moved(places) for places in range(count)], out)
    y = _as_written(changed, x, kernels)
    y = y.reshape(*y.shape[:-2], rounds * count, -1)
    return jax.lax.slice_in_dim(y, 0, columns, axis=y.ndim - 2)


def _input_cotangent(
    parameters: dict[str, Any], shape: tuple[int, ...], kernel: Array, cotangent: Array
) -> Array:
    """The cotangent of the input: the output's, convolved with the flipped kernel."""
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
        # Full correlation minus the padding that the forward pass had; the end takes what is left.
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


def _kernel_cotangent(
    parameters: dict[str, Any], x: Array, shape: tuple[int, ...], cotangent: Array
) -> Array:
    """The cotangent of the kernel: the input, convolved with the output's cotangent."""
    numbers, spreads = parameters["dimension_numbers"], parameters["lhs_dilation"]
    (batch, channels, *space), (first, out, *there) = numbers.lhs_spec, numbers.out_spec
    # Examples are the channels that are summed over, last, as XLA computes fast in a loop.
    images = jnp.transpose(x, (channels, *space, batch))
    kernel = jnp.transpose(cotangent, (*there, first, out))
    # Without the barrier XLA folds the transposes back into the form that it cannot run fast.
    images, kernel = jax.lax.optimization_barrier((images, kernel))
    padding = []
    for i, axis in enumerate(numbers.rhs_spec[2:]):
        given = (images.shape[1 + i] - 1) * spreads[i]
        reach = (kernel.shape[i] - 1) * parameters["window_strides"][i]
        taken = (shape[axis] - 1) * parameters["rhs_dilation"][i]
        # The forward pass may leave the end of the input unread: that padding is negative.
        low = parameters["padding"][i][0]
        padding.append((low, taken + reach - given - low))
    last, inner = len(space) + 1, range(1, len(space) + 1)
    for_kernel = jax.lax.conv_general_dilated(
        images,
        kernel,
        window_strides=parameters["rhs_dilation"],
        padding=padding,
        lhs_dilation=spreads,
        rhs_dilation=parameters["window_strides"],
        dimension_numbers=jax.lax.ConvDimensionNumbers(
            (0, last, *inner), (last, last - 1, *range(len(space))), (0, last, *inner)
        ),
        precision=parameters["precision"],
    )
    return jnp.moveaxis(for_kernel, (last, 0, *inner), numbers.rhs_spec)


def _swap_channels(kernel: Array, out: int, channels: int, groups: int) -> Array:
    kernel = jnp.moveaxis(kernel, (out, channels), (0, 1))
    split = kernel.reshape(groups, kernel.shape[0] // groups, *kernel.shape[1:])
    swapped = jnp.swapaxes(split, 1, 2)
    merged = swapped.reshape(groups * swapped.shape[1], *swapped.shape[2:])
    return jnp.moveaxis(merged, (0, 1), (out, channels))

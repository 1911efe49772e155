# SPDX-License-Identifier: Apache-2.0
"""Convolutions whose backward pass is as fast inside a loop as outside.

Symptom (jaxlib 0.10.2, CPU): in the body of a loop, where microbatches live, XLA compiles the input
cotangents that JAX writes to naive loops; forward convolutions stay fast. So both cotangents are
written as forward convolutions. A forward convolution with few input channels is slow too: it is
written as one that computes several neighbouring outputs together, as if they were channels.

``tests/test_ghost_definition.py`` ("conv ...") tests norms, ``tests/test_xla_cpu.py`` the values.

``parameters`` belong to the equation of a convolution. Its ``dimension_numbers`` list axes: batch,
channels and space of the input (``lhs_spec``), output channels, input channels and space of the
kernel (``rhs_spec``), and batch, channels and space of the output (``out_spec``). ``lhs_dilation``
spreads the input, ``rhs_dilation`` the kernel.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

# Inputs with at most 8 channels are slow, and outputs with 48 channels are fast: chosen by timing.
_SLOW_INPUT_CHANNELS = 8
_FAST_OUTPUT_CHANNELS = 48


def convolution(parameters: dict[str, Any], x: Array, kernel: Array) -> Array:
    """A convolution whose two cotangents are forward convolutions too."""
    # JAX differentiates the padding; the cotangents below belong to the padded input.
    x, parameters = _padded(x, parameters)
    as_written = partial(_as_written, parameters)
    forward = partial(_forward, parameters)
    output = jax.eval_shape(as_written, x, kernel)
    # No loss of the benchmark has these cases: they run as written, which is slower.
    if parameters["batch_group_count"] != 1 or 0 in output.shape or output.dtype != x.dtype:
        return as_written(x, kernel)

    def backward(inputs: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
        x, kernel = inputs
        # The book-keeping engine forms kernel gradients itself, from patches: this one is for
        # losses under `primitives.fast`. `_kernel_cotangent` takes no groups of channels.
        if parameters["feature_group_count"] == 1:
            kernel_cotangent = _kernel_cotangent(parameters, x, kernel.shape, cotangent)
        else:
            _, pull_back = jax.vjp(partial(as_written, x), kernel)
            (kernel_cotangent,) = pull_back(cotangent)
        return _input_cotangent(parameters, x.shape, kernel, cotangent), kernel_cotangent

    differentiable = jax.custom_vjp(forward)
    differentiable.defvjp(lambda x, kernel: (forward(x, kernel), (x, kernel)), backward)
    return differentiable(x, kernel)


def _padded(x: Array, parameters: dict[str, Any]) -> tuple[Array, dict[str, Any]]:
    """The input and parameters of a strided convolution with its padding as part of the input.

    Padding inside such a convolution was twice as slow. Other convolutions stay as they are. So do
    those with a dilated input, to which the padding is added after the dilation.
    """
    padding = parameters["padding"]
    is_padded = any(map(any, padding))
    is_strided = set(parameters["window_strides"]) != {1}
    is_dilated = any(dilation != 1 for dilation in parameters["lhs_dilation"])
    if not is_padded or not is_strided or is_dilated:
        return x, parameters
    edges = [(0, 0, 0)] * x.ndim
    space = parameters["dimension_numbers"].lhs_spec[2:]
    for axis, (low, high) in zip(space, padding, strict=True):
        edges[axis] = (low, high, 0)
    x = jax.lax.pad(x, jnp.zeros((), x.dtype), edges)
    # The barrier keeps XLA from folding the padding into the convolution again.
    x = jax.lax.optimization_barrier(x)
    return x, {**parameters, "padding": ((0, 0),) * len(padding)}


def _forward(parameters: dict[str, Any], x: Array, kernel: Array) -> Array:
    """The convolution, on a CPU with neighbouring outputs together where that is faster."""
    as_written = partial(_as_written, parameters)
    count = _neighbours(parameters, x, kernel)
    if count <= 1:
        return as_written(x, kernel)
    together = partial(_neighbours_together, parameters, count)
    return jax.lax.platform_dependent(x, kernel, cpu=together, default=as_written)


def _as_written(parameters: dict[str, Any], x: Array, kernel: Array) -> Array:
    return jax.lax.conv_general_dilated_p.bind(x, kernel, **parameters)


def _neighbours(parameters: dict[str, Any], x: Array, kernel: Array) -> int:
    """How many outputs along the last axis of space to compute together; 1 if it does not help.

    Outputs that are computed together look like one output with the channels of all of them. The
    result is the least number of outputs with `_FAST_OUTPUT_CHANNELS` channels in total, or the
    number of all outputs along the axis if that is less.
    """
    numbers = parameters["dimension_numbers"]
    dilations = (*parameters["lhs_dilation"], *parameters["rhs_dilation"])
    is_dilated = any(dilation != 1 for dilation in dilations)
    is_grouped = parameters["feature_group_count"] != 1 or parameters["batch_group_count"] != 1
    # If the channels come last, outputs along the last axis of space are neighbours in memory.
    channel_axis = numbers.out_spec[1]
    last_axis = numbers.out_spec[-1]  # of space; that of the channels if there is no space
    channels_last = channel_axis == x.ndim - 1 and last_axis == x.ndim - 2
    # The limits were timed in float32, and `_neighbours_together` is for one group and no dilation.
    if not channels_last or x.dtype != jnp.float32 or is_dilated or is_grouped:
        return 1
    output_axis, input_axis, *kernel_space = numbers.rhs_spec
    kernel_width = kernel.shape[kernel_space[-1]]
    # A convolution with many input channels is fast as written. Under a kernel of width 1,
    # neighbouring outputs have no pixel in common.
    if kernel.shape[input_axis] > _SLOW_INPUT_CHANNELS or kernel_width == 1:
        return 1
    enough = -(-_FAST_OUTPUT_CHANNELS // kernel.shape[output_axis])  # rounded up
    columns = _columns(parameters, _row_length(parameters, x), kernel)
    return min(columns, enough)


def _row_length(parameters: dict[str, Any], x: Array) -> int:
    """The length of the padded input along the last axis."""
    length = x.shape[parameters["dimension_numbers"].lhs_spec[-1]]
    return length + sum(parameters["padding"][-1])


def _columns(parameters: dict[str, Any], row_length: int, kernel: Array) -> int:
    """The number of outputs along the last axis."""
    kernel_length = kernel.shape[parameters["dimension_numbers"].rhs_spec[-1]]
    return (row_length - kernel_length) // parameters["window_strides"][-1] + 1


def _neighbours_together(parameters: dict[str, Any], count: int, x: Array, kernel: Array) -> Array:
    """The convolution in rounds: each computes ``count`` neighbouring outputs along the last axis.

    A round reads the pixels of all its outputs. Output number j of a round has a kernel for these
    pixels: the given one, moved by j strides, and zeros elsewhere. Together the kernels look like
    one with more output channels, which XLA vectorises. `_neighbours` requires channels to be the
    last axis of the output.
    """
    numbers = parameters["dimension_numbers"]
    output_axis = numbers.rhs_spec[0]
    last_axis = numbers.rhs_spec[-1]  # of the kernel's space
    *other_strides, stride = parameters["window_strides"]
    *other_padding, (low, high) = parameters["padding"]
    row_length = _row_length(parameters, x)
    columns = _columns(parameters, row_length, kernel)
    rounds = -(-columns // count)
    # The last round may compute outputs beyond the end: they read zeros and are cut off.
    pixels_read = (rounds * count - 1) * stride + kernel.shape[last_axis]
    missing = max(0, pixels_read - row_length)

    def moved(output: int) -> Array:
        """The kernel of output number ``output`` of a round, padded to what all outputs read."""
        # A non-finite pixel times a zero reaches neighbouring outputs, but never another example.
        edges = [(0, 0, 0)] * kernel.ndim
        edges[last_axis] = (output * stride, (count - 1 - output) * stride, 0)
        return jax.lax.pad(kernel, jnp.zeros((), kernel.dtype), edges)

    by_rounds = {
        **parameters,
        "window_strides": (*other_strides, count * stride),
        "padding": (*other_padding, (low, high + missing)),
    }
    x, by_rounds = _padded(x, by_rounds)
    kernels = jnp.concatenate([moved(output) for output in range(count)], output_axis)
    y = _as_written(by_rounds, x, kernels)  # [..., rounds, count * channels]
    y = y.reshape(*y.shape[:-2], rounds * count, -1)  # [..., rounds * count, channels]
    return jax.lax.slice_in_dim(y, 0, columns, axis=y.ndim - 2)


def _input_cotangent(
    parameters: dict[str, Any], shape: tuple[int, ...], kernel: Array, cotangent: Array
) -> Array:
    """The cotangent of an input of this shape: the output's, convolved with the flipped kernel.

    In the forward pass, entry k of the kernel takes entry i of the input to entry o of the output
    if ``lhs_dilation * i = stride * o + rhs_dilation * k - low``, with the padding ``low`` at the
    start. With k = length - 1 - j for entry j of the flipped kernel, this is
    ``stride * o = lhs_dilation * i + rhs_dilation * j - (kernel_reach - low)``, where
    ``kernel_reach = rhs_dilation * (length - 1)``. It is the same equation with o and i exchanged:
    now i counts the results, ``lhs_dilation`` is the stride, ``stride`` dilates the cotangent, and
    the padding at the start is ``kernel_reach - low``.
    """
    numbers = parameters["dimension_numbers"]
    groups = parameters["feature_group_count"]
    strides = parameters["window_strides"]
    dilations = parameters["lhs_dilation"]
    output_axis, channel_axis, *space = numbers.rhs_spec
    flipped = jax.lax.rev(kernel, space)
    flipped = _swap_channels(flipped, output_axis, channel_axis, groups)
    # The barrier keeps XLA from folding the flip into the form that it runs slowly.
    flipped = jax.lax.optimization_barrier(flipped)
    padding = []
    for dim, axis in enumerate(space):
        # A reach is the distance from the first entry of an axis to its last, after dilation.
        kernel_reach = (kernel.shape[axis] - 1) * parameters["rhs_dilation"][dim]
        input_reach = (shape[numbers.lhs_spec[2 + dim]] - 1) * dilations[dim]
        output_reach = (cotangent.shape[numbers.out_spec[2 + dim]] - 1) * strides[dim]
        low = kernel_reach - parameters["padding"][dim][0]
        # The last result reads up to the end of the padded cotangent: low + output_reach + high =
        # input_reach + kernel_reach.
        high = input_reach + kernel_reach - output_reach - low
        padding.append((low, high))
    return jax.lax.conv_general_dilated(
        cotangent,
        flipped,
        window_strides=dilations,
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
    """The cotangent of a kernel of this shape: the input, convolved with the output's cotangent.

    Entry k for channel c of the input and d of the output is the sum of ``x[n, i, c] *
    cotangent[n, o, d]`` over examples n and outputs o, with i as in `_input_cotangent`. A
    convolution sums over channels and space: so here n are its channels, o is the space of its
    kernel, c its batch and d its output channels. Now k counts the results, so ``rhs_dilation`` is
    the stride, and ``stride`` dilates the cotangent.
    """
    numbers = parameters["dimension_numbers"]
    dilations = parameters["lhs_dilation"]
    input_batch, channel_axis, *input_space = numbers.lhs_spec
    output_batch, output_axis, *output_space = numbers.out_spec
    # Examples are the last axis of the images, because XLA computes such convolutions fast in a
    # loop. Images are [c, *space of i, n], and the kernel of this convolution [*space of o, n, d].
    images = jnp.transpose(x, (channel_axis, *input_space, input_batch))
    kernel = jnp.transpose(cotangent, (*output_space, output_batch, output_axis))
    # The barrier keeps XLA from folding the transposes into the form that it runs slowly.
    images, kernel = jax.lax.optimization_barrier((images, kernel))
    padding = []
    for dim, axis in enumerate(numbers.rhs_spec[2:]):
        # A reach is the distance from the first entry of an axis to its last, after dilation.
        input_reach = (images.shape[1 + dim] - 1) * dilations[dim]
        output_reach = (kernel.shape[dim] - 1) * parameters["window_strides"][dim]
        kernel_reach = (shape[axis] - 1) * parameters["rhs_dilation"][dim]
        # The last result reads up to the end of the padded input: low + input_reach + high =
        # kernel_reach + output_reach. `high` is negative if the forward pass leaves the end unread.
        low = parameters["padding"][dim][0]
        high = kernel_reach + output_reach - input_reach - low
        padding.append((low, high))
    rank = len(input_space)
    last = rank + 1  # the axis of n in the images, and of d in kernel and result
    space = range(1, last)  # of the images and the result
    # The result is [c, *space of k, d].
    kernel_cotangent = jax.lax.conv_general_dilated(
        images,
        kernel,
        window_strides=parameters["rhs_dilation"],
        padding=padding,
        lhs_dilation=dilations,
        rhs_dilation=parameters["window_strides"],
        dimension_numbers=jax.lax.ConvDimensionNumbers(
            lhs_spec=(0, last, *space),
            rhs_spec=(last, rank, *range(rank)),
            out_spec=(0, last, *space),
        ),
        precision=parameters["precision"],
    )
    # `rhs_spec` lists the axes of d, c and space in the given kernel.
    return jnp.moveaxis(kernel_cotangent, (last, 0, *space), numbers.rhs_spec)


def _swap_channels(kernel: Array, output_axis: int, channel_axis: int, groups: int) -> Array:
    """Exchanges input and output channels, within each group of channels."""
    kernel = jnp.moveaxis(kernel, (output_axis, channel_axis), (0, 1))
    # [groups, output channels of a group, input channels of a group, *space]
    by_group = kernel.reshape(groups, kernel.shape[0] // groups, *kernel.shape[1:])
    swapped = jnp.swapaxes(by_group, 1, 2)
    merged = swapped.reshape(groups * swapped.shape[1], *swapped.shape[2:])
    return jnp.moveaxis(merged, (0, 1), (output_axis, channel_axis))

# SPDX-License-Identifier: Apache-2.0
r"""Outer products: one form for the gradients of matrix products, convolutions and embeddings.

A *site* is an equation of the loss in which a *view*, a value computed from leaves of the
parameters, such as a kernel, meets the data. One example's gradient of the view is a sum of outer
products over positions $s$,

$$ G_{hkd} = \sum_s x_{hks} \, g_{hsd}, $$

with blocks $h$, inputs $k$ and outputs $d$. The $x$ are made of the data at the site, the $g$ of
the cotangent of its output. For ``x @ w`` with a sequence ``x`` of tokens, positions are the
tokens, inputs the rows of ``w`` and outputs its columns. A use without such a form has the VJP of
the equation.

A form, an `Outer`, is made of data and cotangents with the leading axes ``[batch, *rounds]``: the
examples, and an axis for each scan around the site. ``lead`` is the number of these axes, and axis
numbers of equations do not count them. Until `without_stacks` removes the rounds, they also lead in
the arrays of the form.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dpjax.gradients import _platforms
from dpjax.gradients._bookkeeping.patches import patches
from dpjax.gradients._bookkeeping.sites import Site


class LeafAxes(NamedTuple):
    """Which axes of the leaf are blocks, inputs and outputs."""

    blocks: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class Outer(NamedTuple):
    """The gradient of a view as a sum of outer products."""

    # ``[batch, blocks, inputs, positions]``, in pieces that divide the inputs; or integers
    # ``[batch, blocks, positions]``, which stand for columns with a single 1.
    x: tuple[Array, ...]
    g: Array  # ``[batch, blocks, positions, outputs]``
    place: Callable[[Array], Array]  # ``[blocks, inputs, outputs]`` to the layout of the view
    axes: LeafAxes | None  # None if the view is not a transpose of a leaf
    copied: bool = False  # every product with `x` writes it out
    short: bool = False  # norm and sum may be of rounded numbers, exact in one pass

    @property
    def indexed(self) -> bool:
        """Whether `x` holds the indices of one-hot columns."""
        return self.x[0].ndim == 3

    @property
    def width(self) -> int:
        """The number of inputs."""
        return sum(piece.shape[2] for piece in self.x)

    def joined(self, parts: Sequence[Array]) -> Array:
        """Joins a part ``[blocks, inputs, outputs]`` of each piece in the layout of the view."""
        return self.place(jnp.concatenate(parts, axis=1))


HIGHEST = jax.lax.Precision.HIGHEST

Form = Callable[[Site, Sequence[Array], Array], "Outer | None"]
"""``(site, data, cotangent) -> outer products``, or None for a use without a form."""


def rounds_operands(site: Site) -> bool:
    """Whether one pass of a matrix unit computes the product of a site: it rounds its operands."""
    parameters = site.equation.params
    if _platforms.on_cpu() or "precision" not in parameters:
        return False
    dtypes = {x.dtype for x in (*site.data, site.output)}
    if not dtypes <= {jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)}:
        return False
    return precision_of(parameters) in (None, jax.lax.Precision.DEFAULT)


def rounded(x: Array) -> Array:
    """An array with the digits that one pass of the matrix unit reads: 8 on a TPU, 11 on a GPU."""
    # The precision of bfloat16 and of TF32. XLA may remove a cast to bfloat16 and back.
    return jax.lax.platform_dependent(
        x,
        tpu=lambda x: jax.lax.reduce_precision(x, 8, 7),
        default=lambda x: jax.lax.reduce_precision(x, 8, 10),
    )


def without_stacks(site: Site, outer: Outer) -> Outer:
    """Removes the axes of rounds from a form, whose arrays are ``[batch, *rounds, blocks, ...]``.

    ``site.stacks`` has a flag for each scan, the outermost first: whether it slices the view, as a
    scan over stacked layers does. Each round then has a gradient of its own slice: the rounds
    become blocks. If all rounds share the view, their gradients add up: the rounds become
    positions.
    """
    pieces = list(outer.x)
    g = outer.g
    place = outer.place
    # The innermost scan is merged first: its rounds are next to the blocks, and no axis before them
    # moves.
    for scan in reversed(range(len(site.stacks))):
        rounds_axis = 1 + scan
        blocks_axis = rounds_axis + 1
        if site.stacks[scan]:
            g = _merged(g, rounds_axis, blocks_axis)
            pieces = [_merged(piece, rounds_axis, blocks_axis) for piece in pieces]
            # The leading axes of the output are the rounds of the scans, in the same order.
            place = _by_round(place, rounds=site.output.shape[scan])
        else:
            # Positions come after the blocks in ``g``, which has outputs as its last axis. They are
            # the last axis of ``x``, with or without inputs before them.
            g = _merged(g, rounds_axis, blocks_axis + 1)
            pieces = [_merged(piece, rounds_axis, piece.ndim - 1) for piece in pieces]
    return outer._replace(x=tuple(pieces), g=g, place=place)


def _merged(array: Array, axis: int, into: int) -> Array:
    """Joins an axis to a later one, as its slower part."""
    array = jnp.moveaxis(array, axis, into - 1)
    return array.reshape(*array.shape[: into - 1], -1, *array.shape[into + 1 :])


def _by_round(place: Callable[[Array], Array], rounds: int) -> Callable[[Array], Array]:
    """Places a gradient ``[rounds * blocks, inputs, outputs]`` of stacked views, round by round."""

    def place_rounds(gradient: Array) -> Array:
        blocks = gradient.shape[0] // rounds
        return jax.vmap(place)(gradient.reshape(rounds, blocks, *gradient.shape[1:]))

    return place_rounds


def dot_general(site: Site, data: Sequence[Array], cotangent: Array) -> Outer | None:
    """The form of a matrix product of the view with the data.

    The axes that the product contracts are the inputs, and its batch axes, which are not the
    examples, the blocks. The free axes of the data are the positions, and the free axes of the view
    are the outputs.
    """
    if cotangent.size == 0 or data[0].size == 0:
        return None  # the VJP of the equation gives the zeros of an empty product
    view = site.operand  # the view is the left operand, 0, or the right one, 1
    other = 1 - view
    # Both have a tuple of axes for the left operand, and one for the right.
    contracted, batch_axes = site.equation.params["dimension_numbers"]
    # Pairs of a contracted axis of the view and one of the data, sorted by the leaf's axis. So two
    # uses of one leaf count its axes in the same order, and `cost.aligned` can compare them.
    pairs = list(zip(contracted[view], contracted[other], strict=True))
    pairs.sort(key=lambda pair: _leaf_axis(site, pair[0]))
    inputs = [view_axis for view_axis, _ in pairs]
    inputs_of_data = [data_axis for _, data_axis in pairs]
    view_axes = range(len(site.shape))
    outputs = [axis for axis in view_axes if axis not in (*inputs, *batch_axes[view])]

    (x,) = data  # the operand that is not the view
    lead = 1 + len(site.stacks)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        x = x.astype(cotangent.dtype)  # the square of an int8 overflows
    data_axes = range(x.ndim - lead)
    free = [axis for axis in data_axes if axis not in (*inputs_of_data, *batch_axes[other])]
    axes_of_data = (batch_axes[other], free, inputs_of_data)  # blocks, positions and inputs
    sizes = [math.prod(x.shape[lead + axis] for axis in axes) for axes in axes_of_data]
    # [batch, *rounds, blocks, positions, inputs]
    x = _arranged(x, lead, [*batch_axes[other], *free, *inputs_of_data], sizes)
    # [batch, *rounds, blocks, inputs, positions]
    x = jnp.swapaxes(x, -1, -2)
    blocks, positions, _ = sizes
    # The cotangent has the batch axes, then the free axes of the left operand, then of the right:
    # the outputs are the free axes of the view, so they are the last ones if it is on the right.
    # It becomes [batch, *rounds, blocks, positions, outputs].
    if view == 1:
        g = cotangent.reshape(*cotangent.shape[:lead], blocks, positions, -1)
    else:
        g = cotangent.reshape(*cotangent.shape[:lead], blocks, -1, positions)
        g = jnp.swapaxes(g, -1, -2)
    order = [*batch_axes[view], *inputs, *outputs]  # all axes of the view

    def place(gradient: Array) -> Array:
        """``[blocks, inputs, outputs]`` in the layout of the view."""
        split = gradient.reshape([site.shape[axis] for axis in order])
        return _transposed_back(split, order)

    return Outer((x,), g, place, _leaf_axes(site, batch_axes[view], inputs, outputs))


def convolution(site: Site, data: Sequence[Array], cotangent: Array) -> Outer | None:
    """The form of a convolution: patches of the images, times the cotangents of the output pixels.

    The kernel covers a *window* of an image for each pixel of the output, and a patch has the
    image's pixels in the window. An *entry* of the kernel is an offset in it: a kernel of 3 x 3 has
    9. Groups of channels are blocks, entries with the channels of a group are inputs, and the
    windows on all images of an example are positions.
    """
    parameters = site.equation.params
    (images,) = data
    is_empty = cotangent.size == 0 or images.size == 0
    # Images that are the view (the kernel is operand 1), groups of the batch and empty arrays have
    # the VJP of the equation instead of a form.
    if site.operand != 1 or parameters["batch_group_count"] != 1 or is_empty:
        return None
    numbers = parameters["dimension_numbers"]
    groups = parameters["feature_group_count"]
    output_axis, channel_axis, *space = numbers.rhs_spec  # the axes of the kernel
    kernel_shape = [site.shape[axis] for axis in space]
    lead = 1 + len(site.stacks)
    around = images.shape[:lead]  # [batch, *rounds]
    # These leading axes become one, as `patches` expects: [merged, images, *space, channels].
    x = _last_channels(images.reshape(-1, *images.shape[lead:]), numbers.lhs_spec)
    g = _last_channels(cotangent.reshape(-1, *cotangent.shape[lead:]), numbers.out_spec)
    dilates_input = max(parameters["lhs_dilation"]) > 1
    if groups == 1 and set(parameters["window_strides"]) == {1} and dilates_input:
        # This is a transposed convolution, whose patches are mostly zeros.
        return _transposed_convolution(site, around, x, g, kernel_shape)
    positions = math.prod(g.shape[1:-1])  # images and windows

    def by_group(patch: Array) -> Array:
        """``[merged, entries, channels, images, *windows]`` to a piece of `Outer.x`."""
        entries = patch.shape[1]
        # [*around, entries, groups, channels of a group, positions]
        patch = patch.reshape(*around, entries, groups, -1, positions)
        # [*around, groups, entries, channels of a group, positions]
        patch = jnp.moveaxis(patch, lead, lead + 1)
        return patch.reshape(*around, groups, -1, positions)  # entries * channels as inputs

    # Each piece has the pixels that some of the entries multiply.
    pieces = patches(parameters, x, kernel_shape, windows=g.shape[2:-1])
    g = g.reshape(*around, positions, groups, -1)
    g = jnp.moveaxis(g, -2, lead)  # [*around, groups, positions, outputs of a group]

    place = functools.partial(_kernel, site)
    axes = None  # groups divide the axis of outputs, so blocks and outputs are not axes of the leaf
    if groups == 1:
        axes = _leaf_axes(site, (), [*space, channel_axis], [output_axis])
    # Patches repeat pixels, so each product writes them to memory first: the form is `copied`.
    return Outer(tuple(map(by_group, pieces)), g, place, axes, copied=True)


def _kernel(site: Site, gradient: Array) -> Array:
    """``[groups, entries * channels, outputs of a group]`` in the layout of a kernel."""
    parameters = site.equation.params
    output_axis, channel_axis, *space = parameters["dimension_numbers"].rhs_spec
    groups = parameters["feature_group_count"]
    lengths = [site.shape[axis] for axis in (*space, channel_axis)]
    # [groups, *space, channels, outputs of a group]
    kernel = gradient.reshape(groups, *lengths, -1)
    # [*space, channels, groups, outputs of a group]: output channels are counted group by group.
    kernel = jnp.moveaxis(kernel, 0, -2)
    kernel = kernel.reshape(*kernel.shape[:-2], -1)  # [*space, channels, output channels]
    return _transposed_back(kernel, [*space, channel_axis, output_axis])


def _transposed_convolution(
    site: Site, around: Sequence[int], x: Array, g: Array, kernel_shape: Sequence[int]
) -> Outer:
    """The form of a transposed convolution, by patches of the cotangent instead of the input.

    The input ``x`` is dilated, so most numbers of its own patches are zeros. Each pixel of ``x``
    meets a patch of the cotangent ``g``, one pixel for each entry of the kernel. Inputs of the form
    are the channels of ``x``, outputs are the entries of the kernel with the channels of ``g``, and
    positions are the pixels of ``x``. Both arrays are ``[merged, images, *space, channels]``, where
    ``merged`` stands for the leading axes ``around``.
    """
    parameters = site.equation.params
    pixels = x.shape[2:-1]
    lead = len(around)
    padding = []
    sides = zip(
        parameters["padding"],
        parameters["lhs_dilation"],
        parameters["rhs_dilation"],
        kernel_shape,
        pixels,
        g.shape[2:-1],
        strict=True,
    )
    for (low, _), dilation, spread, entries, input_pixels, output_pixels in sides:
        # Input pixel q meets entry k of the kernel at output pixel q * dilation + low - k * spread.
        # The first of these pixels, with the last k and q = 0, is `before` pixels in front of the
        # output; the last, with k = 0 and the last q, is `after` pixels behind it.
        before = (entries - 1) * spread - low
        after = (input_pixels - 1) * dilation + low - (output_pixels - 1)
        padding.append((before, after))
    # Neighbouring pixels of the input are its dilation apart on the cotangent.
    parameters_for_cotangent = {
        **parameters,
        "padding": padding,
        "lhs_dilation": [1] * len(kernel_shape),
        "window_strides": parameters["lhs_dilation"],
    }
    # Each piece is [merged, entries, channels, images, *pixels of x], with some of the entries.
    pieces = patches(parameters_for_cotangent, g, kernel_shape, windows=pixels)
    # The axes of entries and of channels become one, the outputs of the form.
    outputs_of_pieces = [piece.reshape(piece.shape[0], -1, *piece.shape[3:]) for piece in pieces]
    patch = jnp.concatenate(outputs_of_pieces, axis=1)  # [merged, outputs, images, *pixels of x]
    patch = patch.reshape(*around, patch.shape[1], -1)  # [*around, outputs, positions]
    channels = x.shape[-1]
    output_channels = g.shape[-1]
    x = jnp.moveaxis(x.reshape(*around, -1, channels), -1, lead)  # [*around, inputs, positions]
    output_axis, channel_axis, *space = parameters["dimension_numbers"].rhs_spec

    def place(gradient: Array) -> Array:
        """``[1, channels, entries * output channels]`` in the layout of the kernel."""
        kernel = gradient.reshape(channels, *kernel_shape, output_channels)
        # The patches of the cotangent count the entries of the kernel from the last one.
        kernel = jnp.flip(kernel, range(1, 1 + len(kernel_shape)))
        return _transposed_back(kernel, [channel_axis, *space, output_axis])

    one_block_of_x = jnp.expand_dims(x, lead)
    one_block_of_g = jnp.expand_dims(jnp.swapaxes(patch, -1, -2), lead)
    # Other uses of the kernel do not count its entries from the last one, so the form has no axes
    # by which they could be compared.
    return Outer((one_block_of_x,), one_block_of_g, place, axes=None)


def _transposed_back(array: Array, order: Sequence[int]) -> Array:
    """Undoes ``jnp.transpose(original, order)``."""
    return jnp.transpose(array, np.argsort(order).tolist())


def _last_channels(x: Array, spec: Sequence[int]) -> Array:
    """``[merged, images, *space, channels]``, from an array with these axes in another order.

    ``spec`` has the axes of images, channels and space, counted behind the first one.
    """
    images, channels, *space = spec
    order = [1 + axis for axis in (images, *space, channels)]
    return jnp.transpose(x, (0, *order))


def gather(site: Site, data: Sequence[Array], cotangent: Array) -> Outer | None:
    """The form of rows taken from a table, as of an embedding; the data are the row numbers.

    `Outer.x` holds the row numbers themselves, which stand for one-hot columns: inputs are the rows
    of the table, outputs the numbers of a row, and positions all rows that the example takes.
    """
    parameters = site.equation.params
    if not _gathers_rows(parameters, site.shape) or cotangent.size == 0:
        return None
    (indices,) = data
    lead = 1 + len(site.stacks)
    around = cotangent.shape[:lead]  # [batch, *rounds]
    # ``offset_dims`` are the axes of the cotangent that count the numbers of a row.
    row_axes = parameters["dimension_numbers"].offset_dims
    position_axes = [axis for axis in range(cotangent.ndim - lead) if axis not in row_axes]
    width = math.prod(site.shape[1:])
    # There is one block: [*around, 1, positions, outputs] and [*around, 1, positions].
    g = _arranged(cotangent, lead, [*position_axes, *row_axes], [1, -1, width])
    indices = indices.reshape(*around, 1, -1)
    if indices.dtype.itemsize < 4:
        indices = indices.astype(jnp.int32)  # the number of rows may not fit in an int8
    rows = site.shape[0]
    is_inside = (indices >= 0) & (indices < rows)
    if parameters["mode"] != jax.lax.GatherScatterMode.CLIP:
        # Other modes drop the gradient of an index outside; CLIP moves it to the first or last row,
        # as `jnp.clip` below does.
        g = jnp.where(is_inside[..., None], g, 0)
    indices = jnp.clip(indices, 0, rows - 1)
    axes = _leaf_axes(site, (), [0], list(range(1, len(site.shape))))
    # A form with indices is never placed: `leaf_sums` adds its rows to the table.
    return Outer((indices,), g, lambda gradient: gradient, axes)


def _gathers_rows(parameters: dict[str, Any], shape: Sequence[int]) -> bool:
    """Whether a gather takes entire rows, in a mode whose derivative adds to these rows."""
    numbers = parameters["dimension_numbers"]
    rows = numbers.collapsed_slice_dims == (0,) and numbers.start_index_map == (0,)
    if not rows or numbers.operand_batching_dims:
        return False
    if tuple(parameters["slice_sizes"]) != (1, *shape[1:]):
        return False
    modes = jax.lax.GatherScatterMode
    # Other modes, such as one that wraps, have another derivative.
    return parameters["mode"] in (modes.CLIP, modes.FILL_OR_DROP, modes.PROMISE_IN_BOUNDS)


def _arranged(x: Array, lead: int, order: Sequence[int], sizes: Sequence[int]) -> Array:
    """Brings the axes behind the first ``lead`` into an order, and then to these sizes."""
    behind_lead = [lead + axis for axis in order]
    x = jnp.transpose(x, (*range(lead), *behind_lead))
    return x.reshape(*x.shape[:lead], *sizes)


def _leaf_axis(site: Site, axis: int) -> int:
    """The leaf's axis of an axis of the view in one round, or the same number if unknown."""
    if site.axes is None:
        return axis
    sliced_scans = sum(site.stacks)  # each has an axis in front of one round's axes
    return site.axes[sliced_scans + axis]


def _leaf_axes(
    site: Site, blocks: Sequence[int], inputs: Sequence[int], outputs: Sequence[int]
) -> LeafAxes | None:
    """Groups of a view's axes as axes of the leaf; the rounds of scans are blocks."""
    if site.axes is None:
        return None
    rounds = site.axes[: sum(site.stacks)]
    blocks, inputs, outputs = (
        tuple(_leaf_axis(site, axis) for axis in axes) for axes in (blocks, inputs, outputs)
    )
    return LeafAxes((*rounds, *blocks), inputs, outputs)


def product(formula: str, a: Array, b: Array, precision: Any = HIGHEST) -> Array:
    """An `einsum` of two arrays, by default at the highest precision."""
    return jnp.einsum(formula, a, b, precision=precision)


def precision_of(parameters: dict[str, Any]) -> Any:
    """The precision at which a kept gradient is formed: on accelerators the loss's own.

    An equation has a `jax.lax.Precision`, a pair for its two operands, None for the default, or the
    name of an algorithm. The result is one precision for both operands, or None for the default.
    """
    if _platforms.on_cpu():
        return HIGHEST  # a CPU takes the same time at each precision
    given = parameters.get("precision")
    if isinstance(given, tuple):
        left, right = given
        if left != right:
            return HIGHEST  # at least as precise as both
        given = left
    if given is None or isinstance(given, jax.lax.Precision):
        return given
    return HIGHEST  # an algorithm, such as BF16_BF16_F32, also sets the dtype of the operands

# SPDX-License-Identifier: Apache-2.0
r"""Outer products: one form for the gradients of matrix products, convolutions and embeddings.

The gradient of the view is a sum of outer products over positions, perhaps in several blocks,

$$ G_{hkd} = \sum_s x_{hks} \, g_{hsd}. $$

A use without such a form has the VJP of the equation.
"""

from __future__ import annotations

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


def rounds(site: Site) -> bool:
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
    """Makes blocks of the rounds of a scan if the scan slices the view, else positions."""
    pieces = list(outer.x)
    g = outer.g
    place = outer.place
    # The innermost scan is first, because each merge moves the axes behind it.
    for scan in reversed(range(len(site.stacks))):
        rounds_axis = 1 + scan
        blocks_axis = rounds_axis + 1
        if site.stacks[scan]:
            g = _merged(g, rounds_axis, blocks_axis)
            pieces = [_merged(piece, rounds_axis, blocks_axis) for piece in pieces]
            place = _by_round(place, site.output.shape[scan])
        else:
            g = _merged(g, rounds_axis, blocks_axis + 1)
            pieces = [_merged(piece, rounds_axis, piece.ndim - 1) for piece in pieces]
    return outer._replace(x=tuple(pieces), g=g, place=place)


def _merged(array: Array, axis: int, into: int) -> Array:
    """Joins an axis to a later one, as its slower part."""
    array = jnp.moveaxis(array, axis, into - 1)
    return array.reshape(*array.shape[: into - 1], -1, *array.shape[into + 1 :])


def _by_round(place: Callable[[Array], Array], rounds: int) -> Callable[[Array], Array]:
    def place_rounds(gradient: Array) -> Array:
        blocks = gradient.shape[0] // rounds
        return jax.vmap(place)(gradient.reshape(rounds, blocks, *gradient.shape[1:]))

    return place_rounds


def dot_general(site: Site, data: Sequence[Array], cotangent: Array) -> Outer | None:
    """A matrix product: it contracts inputs; free axes of the data are positions."""
    if cotangent.size == 0 or data[0].size == 0:
        return None  # the derivative gives the zeros of an empty product
    contracted, batch = site.equation.params["dimension_numbers"]
    view = site.operand
    other = 1 - view
    # Contracted axes in the order of the leaf, so transposed uses of the leaf can be compared.
    pairs = list(zip(contracted[view], contracted[other], strict=True))
    pairs.sort(key=lambda pair: _leaf_axis(site, pair[0]))
    inputs = [pair[0] for pair in pairs]
    inputs_of_data = [pair[1] for pair in pairs]
    outputs = [a for a in range(len(site.shape)) if a not in (*inputs, *batch[view])]

    (x,) = data
    lead = 1 + len(site.stacks)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        x = x.astype(cotangent.dtype)  # the square of an int8 overflows
    rank = x.ndim - lead
    free = [a for a in range(rank) if a not in (*inputs_of_data, *batch[other])]
    groups = (batch[other], free, inputs_of_data)
    sizes = [math.prod(x.shape[lead + axis] for axis in axes) for axes in groups]
    blocks, positions, _ = sizes
    x = _arranged(x, lead, [*batch[other], *free, *inputs_of_data], sizes)
    x = jnp.swapaxes(x, -1, -2)
    around = cotangent.shape[:lead]
    # The axes of the output are the batch, then the free axes of the left, then of the right.
    if view == 1:
        g = cotangent.reshape(*around, blocks, positions, -1)
    else:
        g = cotangent.reshape(*around, blocks, -1, positions)
        g = jnp.swapaxes(g, -1, -2)
    order = [*batch[view], *inputs, *outputs]

    def place(gradient: Array) -> Array:
        split = gradient.reshape([site.shape[axis] for axis in order])
        return jnp.transpose(split, np.argsort(order).tolist())

    return Outer((x,), g, place, _leaf_axes(site, batch[view], inputs, outputs))


def convolution(site: Site, data: Sequence[Array], cotangent: Array) -> Outer | None:
    """The gradient of a kernel is patches times cotangents; groups of channels are blocks."""
    parameters = site.equation.params
    (x,) = data
    empty = cotangent.size == 0 or x.size == 0
    if site.operand != 1 or parameters["batch_group_count"] != 1 or empty:
        return None
    numbers = parameters["dimension_numbers"]
    groups = parameters["feature_group_count"]
    output_axis, channel_axis, *space = numbers.rhs_spec
    lead = 1 + len(site.stacks)
    around = x.shape[:lead]
    kernel_shape = [site.shape[axis] for axis in space]
    # Rounds of a scan and the images of an example are one axis, as for the convolution.
    x = _last_channels(x.reshape(-1, *x.shape[lead:]), numbers.lhs_spec)
    g = _last_channels(cotangent.reshape(-1, *cotangent.shape[lead:]), numbers.out_spec)
    dilates = max(parameters["lhs_dilation"]) > 1
    if groups == 1 and set(parameters["window_strides"]) == {1} and dilates:
        return _transposed(site, around, x, g, kernel_shape)
    # The images of one example are further positions.
    positions = math.prod(g.shape[1:-1])

    def by_group(patch: Array) -> Array:
        patch = patch.reshape(*around, patch.shape[1], groups, -1, positions)
        return jnp.moveaxis(patch, lead, lead + 1).reshape(*around, groups, -1, positions)

    pieces = patches(parameters, x, kernel_shape, g.shape[2:-1])
    g = jnp.moveaxis(g.reshape(*around, positions, groups, -1), -2, lead)

    def place(gradient: Array) -> Array:
        channels = site.shape[channel_axis]
        kernel = gradient.reshape(groups, *kernel_shape, channels, -1)
        # Output channels are counted group by group, so the axis of groups stands in front of the
        # channels within one.
        kernel = jnp.moveaxis(kernel, 0, -2)
        kernel = kernel.reshape(*kernel.shape[:-2], -1)
        return jnp.transpose(kernel, np.argsort([*space, channel_axis, output_axis]).tolist())

    axes = None
    if groups == 1:
        axes = _leaf_axes(site, (), [*space, channel_axis], [output_axis])
    return Outer(tuple(map(by_group, pieces)), g, place, axes, copied=True)


def _transposed(
    site: Site, around: Sequence[int], x: Array, g: Array, kernel_shape: Sequence[int]
) -> Outer:
    """A transposed convolution, by patches of the cotangent.

    The input is dilated, so most numbers of its patches are zeros.
    """
    parameters = site.equation.params
    places = x.shape[2:-1]
    lead = len(around)
    padding = []
    sides = zip(
        parameters["padding"],
        parameters["lhs_dilation"],
        parameters["rhs_dilation"],
        kernel_shape,
        places,
        g.shape[2:-1],
        strict=True,
    )
    for (low, _), dilation, spread, entries, inputs, outputs in sides:
        # Input q meets entry k of the kernel at output q * dilation + low - k * spread.
        before = (entries - 1) * spread - low
        after = (inputs - 1) * dilation + low - (outputs - 1)
        padding.append((before, after))
    of_cotangent = {
        **parameters,
        "padding": padding,
        "lhs_dilation": [1] * len(kernel_shape),
        "window_strides": parameters["lhs_dilation"],
    }
    pieces = patches(of_cotangent, g, kernel_shape, places)
    flat = [piece.reshape(piece.shape[0], -1, *piece.shape[3:]) for piece in pieces]
    patch = jnp.concatenate(flat, axis=1)
    patch = patch.reshape(*around, patch.shape[1], -1)
    channels = x.shape[-1]
    outputs = g.shape[-1]
    x = jnp.moveaxis(x.reshape(*around, -1, channels), -1, lead)
    output_axis, channel_axis, *space = parameters["dimension_numbers"].rhs_spec

    def place(gradient: Array) -> Array:
        kernel = gradient.reshape(channels, *kernel_shape, outputs)
        # The patches of the cotangent count the entries of the kernel from the last one.
        kernel = jnp.flip(kernel, range(1, 1 + len(kernel_shape)))
        return jnp.transpose(kernel, np.argsort([channel_axis, *space, output_axis]).tolist())

    x = jnp.expand_dims(x, lead)
    g = jnp.expand_dims(jnp.swapaxes(patch, -1, -2), lead)
    return Outer((x,), g, place, None)


def _last_channels(x: Array, spec: Sequence[int]) -> Array:
    """Examples, images, space and channels, in this order."""
    image, channels, *space = spec
    order = [1 + axis for axis in (image, *space, channels)]
    return jnp.transpose(x, (0, *order))


def gather(site: Site, data: Sequence[Array], cotangent: Array) -> Outer | None:
    """Rows of a table: the data are their indices."""
    parameters = site.equation.params
    if not _gathers_rows(parameters, site.shape) or cotangent.size == 0:
        return None
    numbers = parameters["dimension_numbers"]
    (indices,) = data
    lead = 1 + len(site.stacks)
    around = cotangent.shape[:lead]
    rank = cotangent.ndim - lead
    positions = [axis for axis in range(rank) if axis not in numbers.offset_dims]
    width = math.prod(site.shape[1:])
    g = _arranged(cotangent, lead, [*positions, *numbers.offset_dims], [1, -1, width])
    indices = indices.reshape(*around, 1, -1)
    if indices.dtype.itemsize < 4:
        indices = indices.astype(jnp.int32)  # an int8 cannot be compared with 256 rows
    rows = site.shape[0]
    inside = (indices >= 0) & (indices < rows)
    if parameters["mode"] != jax.lax.GatherScatterMode.CLIP:
        # Other modes drop the gradient of an index outside; CLIP moves it to the last row.
        g = jnp.where(inside[..., None], g, 0)
    indices = jnp.clip(indices, 0, rows - 1)
    axes = _leaf_axes(site, (), [0], list(range(1, len(site.shape))))
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
    behind_lead = [lead + axis for axis in order]
    x = jnp.transpose(x, (*range(lead), *behind_lead))
    return x.reshape(*x.shape[:lead], *sizes)


def _leaf_axis(site: Site, axis: int) -> int:
    """The leaf's axis of an axis of the view in one round, or the same number if unknown."""
    if site.axes is None:
        return axis
    return site.axes[sum(site.stacks) + axis]


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
    """The precision at which a kept gradient is formed: on accelerators the loss's own."""
    given = parameters.get("precision")
    if _platforms.on_cpu():
        return HIGHEST  # in the same time
    if isinstance(given, tuple):
        left, right = given
        if left != right:
            return HIGHEST
        given = left
    # Other settings name a dtype of their own.
    if given is None or isinstance(given, jax.lax.Precision):
        return given
    return HIGHEST

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

from dpjax.gradients import platforms
from dpjax.gradients._bookkeeping.patches import patches
from dpjax.gradients._bookkeeping.sites import Site


class Outer(NamedTuple):
    """The gradient of a view as a sum of outer products."""

    # ``[batch, blocks, inputs, positions]``, in pieces that divide the inputs; or integers
    # ``[batch, blocks, positions]``, which stand for columns with a single 1.
    x: tuple[Array, ...]
    g: Array  # ``[batch, blocks, positions, outputs]``
    place: Callable[[Array], Array]  # ``[blocks, inputs, outputs]`` to the layout of the view
    # Which axes of the leaf are blocks, inputs and outputs, where that is known.
    axes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None
    copied: bool = False  # every product with `x` writes it out
    short: bool = False  # norm and sum may be of rounded numbers, exact in one pass

    @property
    def chosen(self) -> bool:
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
    """Whether one pass of a matrix unit computes the product of a site: it rounds what it reads."""
    p, dtypes = site.equation.params, {x.dtype for x in (*site.data, site.output)}
    if platforms.on_cpu() or "precision" not in p:
        return False
    known = dtypes <= {jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)}
    return known and precision_of(p) in (None, jax.lax.Precision.DEFAULT)


def rounded(x: Array) -> Array:
    """An array with the digits that one pass of the matrix unit reads: 8 on a TPU, 11 on a GPU."""
    # The precision of bfloat16 and of TF32. A cast to bfloat16 and back might be optimised away.
    return jax.lax.platform_dependent(
        x,
        tpu=lambda x: jax.lax.reduce_precision(x, 8, 7),
        default=lambda x: jax.lax.reduce_precision(x, 8, 10),
    )


def without_stacks(site: Site, outer: Outer) -> Outer:
    """Rounds of a scan become blocks if the scan slices the view, else positions."""
    x, g, place = outer.x, outer.g, outer.place
    # From the innermost scan outwards, because each merge moves the axes behind it.
    for i, sliced in reversed(list(enumerate(site.stacks))):
        g = _merged(g, 1 + i, 2 + i + (not sliced))
        x = [_merged(piece, 1 + i, 2 + i if sliced else piece.ndim - 1) for piece in x]
        if sliced:
            place = _by_round(place, site.output.shape[i])
    return outer._replace(x=tuple(x), g=g, place=place)


def _merged(a: Array, axis: int, into: int) -> Array:
    """Joins an axis to a later one, as its slower part."""
    a = jnp.moveaxis(a, axis, into - 1)
    return a.reshape(*a.shape[: into - 1], -1, *a.shape[into + 1 :])


def _by_round(place: Callable[[Array], Array], rounds: int) -> Callable[[Array], Array]:
    def placed(gradient: Array) -> Array:
        blocks = gradient.shape[0] // rounds
        return jax.vmap(place)(gradient.reshape(rounds, blocks, *gradient.shape[1:]))

    return placed


def dot_general(site: Site, data: Sequence[Array], cotangent: Array) -> Outer | None:
    """A matrix product: it contracts inputs; free axes of the data are positions."""
    # Empty products have no form; the derivative gives their zeros.
    if cotangent.size == 0 or data[0].size == 0:
        return None
    contract, batch = site.equation.params["dimension_numbers"]
    mine, theirs = site.operand, 1 - site.operand
    shape, leaf_axis = _view(site)
    # Contracted axes in the order of the leaf, so that transposed uses of it compare.
    pairs = sorted(
        zip(contract[mine], contract[theirs], strict=True), key=lambda p: leaf_axis(p[0])
    )
    inputs, other_inputs = [p[0] for p in pairs], [p[1] for p in pairs]
    outputs = [a for a in range(len(shape)) if a not in (*inputs, *batch[mine])]

    (x,), lead = data, 1 + len(site.stacks)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        x = x.astype(cotangent.dtype)  # the square of an int8 overflows
    rank = x.ndim - lead
    free = [a for a in range(rank) if a not in (*other_inputs, *batch[theirs])]
    groups = batch[theirs], free, other_inputs
    sizes = blocks, positions, _ = [math.prod(x.shape[lead + a] for a in g) for g in groups]
    x = jnp.swapaxes(_arranged(x, lead, [*batch[theirs], *free, *other_inputs], sizes), -1, -2)
    if mine == 1:
        # dot_general orders its output as batch, free axes of the left, free axes of the right.
        g = cotangent.reshape(*cotangent.shape[:lead], blocks, positions, -1)
    else:
        g = cotangent.reshape(*cotangent.shape[:lead], blocks, -1, positions)
        g = jnp.swapaxes(g, -1, -2)
    order = [*batch[mine], *inputs, *outputs]

    def place(gradient: Array) -> Array:
        split = gradient.reshape([shape[a] for a in order])
        return jnp.transpose(split, np.argsort(order).tolist())

    return Outer((x,), g, place, _axes(site, batch[mine], inputs, outputs))


def convolution(site: Site, data: Sequence[Array], cotangent: Array) -> Outer | None:
    """The gradient of a kernel is patches times cotangents; groups of channels are blocks."""
    p, (x,), lead = site.equation.params, data, 1 + len(site.stacks)
    if site.operand != 1 or p["batch_group_count"] != 1 or cotangent.size == 0 or x.size == 0:
        return None
    numbers, groups = p["dimension_numbers"], p["feature_group_count"]
    shape, _ = _view(site)
    out, channels, *space = numbers.rhs_spec
    # Rounds of a scan and the images of an example are one axis, as for the convolution.
    around, window = x.shape[:lead], [shape[a] for a in space]
    x = _last_channels(x.reshape(-1, *x.shape[lead:]), numbers.lhs_spec)
    g = _last_channels(cotangent.reshape(-1, *cotangent.shape[lead:]), numbers.out_spec)
    # The images of one example are further positions.
    positions = math.prod(g.shape[1:-1])

    def piece(patch: Array) -> Array:
        patch = patch.reshape(*around, patch.shape[1], groups, -1, positions)
        return jnp.moveaxis(patch, lead, lead + 1).reshape(*around, groups, -1, positions)

    if groups == 1 and set(p["window_strides"]) == {1} and max(p["lhs_dilation"]) > 1:
        return _transposed(site, around, x, g, window)
    pieces = patches(p, x, window, g.shape[2:-1])
    g = jnp.moveaxis(g.reshape(*around, positions, groups, -1), -2, lead)

    def place(gradient: Array) -> Array:
        kernel = gradient.reshape(groups, *window, shape[channels], -1)
        # Output channels are counted group by group, so the axis of groups stands in front of the
        # channels within one.
        kernel = jnp.moveaxis(kernel, 0, -2)
        kernel = kernel.reshape(*kernel.shape[:-2], -1)
        return jnp.transpose(kernel, np.argsort([*space, channels, out]).tolist())

    axes = _axes(site, (), [*space, channels], [out]) if groups == 1 else None
    return Outer(tuple(map(piece, pieces)), g, place, axes, copied=True)


def _transposed(
    site: Site, around: Sequence[int], x: Array, g: Array, kernel: Sequence[int]
) -> Outer:
    """A transposed convolution: patches of the cotangent; most of the input's would be zeros."""
    p, places, lead = site.equation.params, x.shape[2:-1], len(around)
    out, channels, *space = p["dimension_numbers"].rhs_spec
    spreads = p["padding"], p["lhs_dilation"], p["rhs_dilation"]
    sides = zip(*spreads, kernel, places, g.shape[2:-1], strict=True)
    # Input q meets entry k of the kernel at output q * dilation + low - k * spread.
    edges = [
        ((k - 1) * spread - low, (n - 1) * dilation + low - (m - 1))
        for (low, _), dilation, spread, k, n, m in sides
    ]
    turned = dict(
        p, padding=edges, lhs_dilation=[1] * len(kernel), window_strides=p["lhs_dilation"]
    )
    pieces = patches(turned, g, kernel, places)
    patch = jnp.concatenate([s.reshape(s.shape[0], -1, *s.shape[3:]) for s in pieces], axis=1)
    patch = patch.reshape(*around, patch.shape[1], -1)
    width, outputs = x.shape[-1], g.shape[-1]
    x = jnp.moveaxis(x.reshape(*around, -1, width), -1, lead)

    def place(gradient: Array) -> Array:
        kernel_gradient = gradient.reshape(width, *kernel, outputs)
        # The patches of the cotangent count the entries of the kernel from the last one.
        kernel_gradient = jnp.flip(kernel_gradient, range(1, 1 + len(kernel)))
        return jnp.transpose(kernel_gradient, np.argsort([channels, *space, out]).tolist())

    x, g = jnp.expand_dims(x, lead), jnp.expand_dims(jnp.swapaxes(patch, -1, -2), lead)
    return Outer((x,), g, place, None)


def _last_channels(x: Array, spec: Sequence[int]) -> Array:
    image, channels, *space = spec
    return jnp.transpose(x, (0, *(1 + a for a in (image, *space, channels))))


def gather(site: Site, data: Sequence[Array], cotangent: Array) -> Outer | None:
    """Rows of a table: the data are their indices."""
    p, (ids,), lead = site.equation.params, data, 1 + len(site.stacks)
    numbers, (shape, _) = p["dimension_numbers"], _view(site)
    rows = numbers.collapsed_slice_dims == (0,) and numbers.start_index_map == (0,)
    mode = jax.lax.GatherScatterMode
    entire_rows = tuple(p["slice_sizes"]) == (1, *shape[1:]) and not numbers.operand_batching_dims
    # Other modes, such as one that wraps, have another derivative.
    plain_mode = p["mode"] in (mode.CLIP, mode.FILL_OR_DROP, mode.PROMISE_IN_BOUNDS)
    if not (rows and entire_rows and plain_mode) or cotangent.size == 0:
        return None
    positions = [a for a in range(cotangent.ndim - lead) if a not in numbers.offset_dims]
    around, width = cotangent.shape[:lead], math.prod(shape[1:])
    g = _arranged(cotangent, lead, [*positions, *numbers.offset_dims], [1, -1, width])
    ids = ids.reshape(*around, 1, -1)
    if ids.dtype.itemsize < 4:
        ids = ids.astype(jnp.int32)  # an int8 cannot hold 256, the index after the last row
    inside = (ids >= 0) & (ids < shape[0])
    if p["mode"] != mode.CLIP:
        # These modes drop the gradient of indices outside the table; CLIP moves it to the last row.
        g = jnp.where(inside[..., None], g, 0)
    ids = jnp.clip(ids, 0, shape[0] - 1)
    return Outer((ids,), g, lambda x: x, _axes(site, (), [0], list(range(1, len(shape)))))


def _arranged(x: Array, lead: int, order: Sequence[int], sizes: Sequence[int]) -> Array:
    x = jnp.transpose(x, (*range(lead), *(lead + a for a in order)))
    return x.reshape(*x.shape[:lead], *sizes)


def _view(site: Site) -> tuple[tuple[int, ...], Callable[[int], int]]:
    """The view's shape in one round, and the leaf's axis of each of its axes."""
    sliced, axes = sum(site.stacks), site.axes
    return site.shape, (lambda a: a) if axes is None else (lambda a: axes[sliced + a])


def _axes(site: Site, *groups: Sequence[int]) -> Any:
    """The groups of a view's axes, as axes of the leaf; rounds are blocks."""
    if site.axes is None:
        return None
    rounds, (_, leaf_axis) = site.axes[: sum(site.stacks)], _view(site)
    blocks, inputs, outputs = (tuple(map(leaf_axis, group)) for group in groups)
    return (*rounds, *blocks), inputs, outputs


def product(formula: str, a: Array, b: Array, precision: Any = HIGHEST) -> Array:
    """An `einsum` of two arrays, by default at the highest precision."""
    return jnp.einsum(formula, a, b, precision=precision)


def precision_of(parameters: dict[str, Any]) -> Any:
    """The precision at which a kept gradient is formed: on accelerators the loss's own."""
    given = parameters.get("precision")
    pair = given if isinstance(given, tuple) else (given, given)
    # Other settings name a dtype of their own; a CPU takes the highest in the same time.
    known = all(p is None or isinstance(p, jax.lax.Precision) for p in pair)
    return HIGHEST if platforms.on_cpu() or not known or pair[0] != pair[1] else pair[0]

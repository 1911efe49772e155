# SPDX-License-Identifier: Apache-2.0
r"""Common gradients: one gradient for all examples, and each example only scales its slices.

A weight decay in the loss, $\ell_i + r(w)$, adds the same gradient $R = \nabla r$ to every
example. The gain of a normalised kernel adds $R$ with columns scaled by numbers $c_i$ of the
example: a *slice* of the leaf, here a column, has one number. No example's gradient of the leaf is
needed for them: with $D_i$ from all other sites,

$$ \lVert D_i + c_i R \rVert^2
   = \lVert D_i \rVert^2 + 2 \langle D_i, c_i R \rangle + \lVert c_i R \rVert^2, \qquad
   \sum_i f_i (D_i + c_i R) = \sum_i f_i D_i + \Big( \sum_i f_i c_i \Big) R. $$

An *entry* is a site with its data and cotangents of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dpjax.gradients._bookkeeping.cost import common_sites
from dpjax.gradients._bookkeeping.leaf_norms import norms
from dpjax.gradients._bookkeeping.leaf_sums import (
    Entry,
    Pieces,
    Squares,
    added,
    placed,
    pulled,
    weighted_sum,
)
from dpjax.gradients._bookkeeping.outer_products import Outer, product
from dpjax.gradients._bookkeeping.primitives import form_of

# Roundings of the squared norm of a sum, in units of eps and of the square of all terms.
_ROUNDINGS = 4


class Common(NamedTuple):
    """One gradient ``R`` for all examples, times ``scales`` ``[batch, *slices]`` along ``axes``."""

    gradient: Array
    scales: Array
    axes: tuple[int, ...]

    def spread(self, scales: Array) -> Array:
        """Scales with axes of length 1 for the other axes of the leaf; other axes may lead."""
        shape = _only(self.axes, range(self.gradient.ndim), self.gradient.shape)
        lead = scales.shape[: scales.ndim - len(self.axes)]
        return scales.reshape(*lead, *shape)

    def sum(self, factors: Squares) -> Array:
        """The sum over examples; an example with factor 0 contributes exactly 0."""
        # Otherwise scales that are not finite give 0 * NaN.
        counts = factors.reshape(-1, *(1,) * len(self.axes)) != 0
        scales = jnp.where(counts, self.scales, 0)
        total_scales = self.spread(weighted_sum(scales, factors))
        return jnp.where(total_scales != 0, total_scales * self.gradient, 0)


def _only(axes: Sequence[int], order: Sequence[int], shape: Sequence[int]) -> list[int]:
    """For each axis of ``order`` its length in ``shape`` if it is among ``axes``, otherwise 1."""
    return [shape[axis] if axis in axes else 1 for axis in order]


def divided(
    entries_of_leaves: Mapping[int, Sequence[Entry]], leaves: Sequence[Array]
) -> tuple[dict[int, list[Entry]], dict[int, list[Common]]]:
    """For each leaf the entries with a gradient for each example, and the common gradients."""
    others: dict[int, list[Entry]] = {}
    commons: dict[int, list[Common]] = {}
    # One entry may belong to several leaves, as the weight decay of all does. It is computed once,
    # and found by its identity, because arrays cannot be compared.
    entries_by_id = {id(e): e for entries in entries_of_leaves.values() for e in entries}
    forms_by_id = {key: form_of(*entry) for key, entry in entries_by_id.items()}
    common_by_id: dict[int, tuple[dict[int, Array], Array]] = {}  # gradients and scales
    for leaf, entries in entries_of_leaves.items():
        sites = [entry.site for entry in entries]
        forms = [forms_by_id[id(entry)] for entry in entries]
        # The numbers of the entries whose gradients are common.
        chosen = common_sites(leaf, leaves[leaf], sites, forms)
        others[leaf] = [entry for k, entry in enumerate(entries) if k not in chosen]
        if chosen:
            # Inner products with a common gradient read the numbers that the sum reads.
            others[leaf] = [entry.rounded() for entry in others[leaf]]
        commons[leaf] = []
        for k in chosen:
            key = id(entries[k])
            if key not in common_by_id:
                common_by_id[key] = _gradients_and_scales(entries[k], leaves)
            gradients, scales = common_by_id[key]
            axes = entries[k].site.slices[leaf]
            commons[leaf].append(_common(gradients[leaf], scales, axes))
    return others, commons


def _common(gradient: Array, scales: Array, axes: Sequence[int]) -> Common:
    """A common gradient, from scales whose axes are in the order of the view's axes."""
    order = sorted(range(len(axes)), key=lambda position: axes[position])
    return Common(gradient, _transposed(scales, order), tuple(sorted(axes)))


def _gradients_and_scales(entry: Entry, leaves: Sequence[Array]) -> tuple[dict[int, Array], Array]:
    """The common gradient of each leaf of an entry, and the scales ``[batch, *slices]`` of all."""
    site = entry.site
    ones = jnp.ones_like(site.unscaled(leaves))
    gradients = pulled(sorted(site.leaves), leaves, site.unscaled)(ones)
    scales = jax.vmap(site.scales, (None, 0, 0))(leaves, entry.data, entry.cotangent)
    return gradients, scales


def _transposed(scales: Array, order: Sequence[int]) -> Array:
    """Scales ``[batch, *slices]`` with the axes of their slices in another order."""
    slices = [1 + axis for axis in order]
    return jnp.transpose(scales, (0, *slices))


def norms_with(
    leaf: int, others: Sequence[Entry], commons: Sequence[Common], leaves: Sequence[Array]
) -> tuple[Squares, Pieces | None]:
    r"""As `leaf_norms.norms`, of gradients $D_i$ to which common ones $R_k$ are added, if any.

    $$ \Big\lVert D_i + \sum_k R_k \Big\rVert^2 = \lVert D_i \rVert^2 + \sum_k \Big(
       \sum_{j < k} 2 \langle R_k, R_j \rangle + \lVert R_k \rVert^2
       + 2 \langle D_i, R_k \rangle \Big) $$

    Here $R_k$ includes the scales of the example, and $D_i$ is a sum over the entries ``others``.
    """
    if others:
        squares, pieces = norms(leaf, others, leaves, exact=bool(commons))
    else:
        squares = jnp.zeros(())  # all gradients are common; their squares are added to this 0
        pieces = None
    if not commons:
        return squares, pieces
    total = squares
    lengths = jnp.sqrt(squares)  # of all terms, as if none cancelled
    for k, common in enumerate(commons):
        square = _dot(common, common)
        lengths = lengths + jnp.sqrt(square)
        with_earlier = [2 * _dot(common, earlier) for earlier in commons[:k]]
        total = total + sum([*with_earlier, square])
        total = total + 2 * sum(_cross(leaf, entry, common, leaves) for entry in others)
    # Terms that cancel leave an error relative to the terms. So the terms bound the rounding of the
    # squared norm, and then that of the gradient in the clipped sum.
    eps = jnp.finfo(leaves[leaf].dtype).eps
    squares = jnp.maximum(total, 0) + _ROUNDINGS * eps * lengths**2
    return (jnp.sqrt(squares) + eps * lengths) ** 2, pieces


def _dot(a: Common, b: Common) -> Squares:
    """Inner products ``[batch]`` of two common gradients, with the scales of each example."""
    # Along these axes both gradients have one scale.
    unscaled_axes = tuple(
        axis for axis in range(a.gradient.ndim) if axis not in a.axes and axis not in b.axes
    )
    inner = jnp.sum(a.gradient * b.gradient, axis=unscaled_axes, keepdims=True)
    return _total(a.spread(a.scales) * b.spread(b.scales) * inner[None])


def _cross(leaf: int, entry: Entry, common: Common, leaves: Sequence[Array]) -> Squares:
    r"""Inner products ``[batch]`` of a common gradient with an entry's own gradients.

    With the entry's outer products $x_s g_s^\top$ over positions s,

    $$ \Big\langle \sum_s x_s g_s^\top, R \Big\rangle
       = \sum_s \langle R^\top x_s, g_s \rangle. $$
    """
    form = form_of(*entry)
    assert form is not None  # by `cost.common_sites`
    if form.indexed:
        rows = common.gradient.reshape(len(common.gradient), -1)
        applied = rows[form.x[0]]  # one-hot columns times a matrix: rows of it
    else:
        applied = _applied(leaf, entry, form, common.gradient, leaves)
    terms = applied * form.g  # [batch, blocks, positions, outputs]
    if not common.axes:
        return common.scales * _total(terms)  # an example has one scale
    assert form.axes is not None
    # The slices are among the outputs, which the form counts in an order of its own. There is one
    # block, and the scales of an example are the same at all positions.
    shape = common.gradient.shape
    outputs = form.axes.outputs
    order = sorted(range(len(common.axes)), key=lambda k: outputs.index(common.axes[k]))
    scales = _transposed(common.scales, order)
    # Both are [batch, *outputs]; the scales have length 1 where they do not differ.
    scales = scales.reshape(-1, *_only(common.axes, outputs, shape))
    terms = jnp.sum(terms, axis=(1, 2)).reshape(-1, *(shape[axis] for axis in outputs))
    return _total(scales * terms)


def _applied(
    leaf: int, entry: Entry, form: Outer, gradient: Array, leaves: Sequence[Array]
) -> Array:
    """A common gradient times the inputs of a form: ``[batch, blocks, positions, outputs]``."""
    # The map from the form to the leaf only rearranges. So its VJP is the inverse map.
    place, _ = placed(leaf, entry, form._replace(x=()), leaves)
    outputs = form.g.shape[3]
    zeros = [jnp.zeros((x.shape[1], x.shape[2], outputs), x.dtype) for x in form.x]
    _, pull_back = jax.vjp(place, zeros)
    (matrices,) = pull_back(gradient)
    pairs = zip(form.x, matrices, strict=True)
    return added([_times_blocks(x, matrix) for x, matrix in pairs])


def _times_blocks(x: Array, matrices: Array) -> Array:
    """Inputs ``[batch, blocks, inputs, positions]`` times the matrix of each block."""
    if len(matrices) > 1:
        return product("bhks,hkd->bhsd", x, matrices)
    # XLA need not copy into its layout for a product of two matrices.
    x = jnp.swapaxes(x, 2, 3)
    batch, blocks, positions, inputs = x.shape
    products = product("nk,kd->nd", x.reshape(-1, inputs), matrices[0])
    return products.reshape(batch, blocks, positions, -1)


def _total(terms: Array) -> Squares:
    """The sum over all axes but that of the examples."""
    return jnp.sum(terms, axis=tuple(range(1, terms.ndim)))

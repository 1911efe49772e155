# SPDX-License-Identifier: Apache-2.0
r"""Common gradients: one gradient for all examples, and each example only scales its slices.

A weight decay in the loss, $\ell_i + r(w)$, adds the same gradient $R = \nabla r$ to every
example. The gain of a normalised kernel adds $R$ with columns scaled by numbers $c_i$ of the
example: a *slice* of the leaf, here a column, has one number. No example's gradient of the leaf is
needed for them: with $D_i$ from all other sites,

$$ \lVert D_i + c_i R \rVert^2
   = \lVert D_i \rVert^2 + 2 \langle D_i, c_i R \rangle + \lVert c_i R \rVert^2, \qquad
   \sum_i f_i (D_i + c_i R) = \sum_i f_i D_i + \Big( \sum_i f_i c_i \Big) R. $$

A *leaf* is an array of the parameters, and has a number. A *site* is an equation of the loss in
which a *view*, a value computed from leaves, meets the data; an *entry* is a site with the data and
cotangents of a batch. Its *form*, an `Outer`, has each example's gradient of the view as a sum of
outer products $\sum_s x_s g_s^\top$ over positions $s$.
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

# The rounding error of the squared norm of a sum is at most this many eps, times the square of the
# sum of the norms of its terms.
_ROUNDINGS = 4


class Common(NamedTuple):
    """A gradient ``R`` of a leaf, times ``scales`` ``[batch, *slices]`` along its ``axes``."""

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
    """Divides the entries of each leaf into those with a common gradient and others.

    Returns:
      For each leaf, by its number, the other entries, whose gradients differ between examples; and
      for each leaf the common gradients themselves.
    """
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
        # Indices of the entries with a common gradient. There are none if the form of another entry
        # does not give the inner products with it.
        chosen = common_sites(leaf, leaves[leaf], sites, forms)
        others[leaf] = [entry for k, entry in enumerate(entries) if k not in chosen]
        if chosen:
            # The clipped sum may round data and cotangents of an entry. Inner products with common
            # gradients, which the norm needs, have to read the same rounded numbers.
            others[leaf] = [entry.rounded() for entry in others[leaf]]
        commons[leaf] = []
        for k in chosen:
            key = id(entries[k])
            if key not in common_by_id:
                common_by_id[key] = _gradients_and_scales(entries[k], leaves)
            gradients, scales = common_by_id[key]
            slice_axes = entries[k].site.slices[leaf]  # axes of the leaf that count its slices
            commons[leaf].append(_common(gradients[leaf], scales, slice_axes))
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
    r"""Squared norms ``[batch]`` of a leaf's gradients $D_i$ with common ones $R_k$, if any.

    $$ \Big\lVert D_i + \sum_k R_k \Big\rVert^2 = \lVert D_i \rVert^2 + \sum_k \Big(
       \sum_{j < k} 2 \langle R_k, R_j \rangle + \lVert R_k \rVert^2
       + 2 \langle D_i, R_k \rangle \Big) $$

    Here $R_k$ includes the scales of the example, and $D_i$ is a sum over the entries ``others``.
    The second result has all $D_i$ if the clipped sum is to read them; otherwise it is None.
    """
    if others:
        # Inner products with common gradients are of the unrounded D_i, so norms have to be, too.
        squares, pieces = norms(leaf, others, leaves, exact=bool(commons))
    else:
        squares = jnp.zeros(())  # all gradients are common: their squares [batch] are added to it
        pieces = None
    if not commons:
        return squares, pieces
    total = squares
    lengths = jnp.sqrt(squares)  # becomes the sum of the norms of D_i and of all R_k
    for k, common in enumerate(commons):
        square = _dot(common, common)
        lengths = lengths + jnp.sqrt(square)
        with_earlier = [2 * _dot(common, earlier) for earlier in commons[:k]]
        total = total + sum([*with_earlier, square])
        total = total + 2 * sum(_cross(leaf, entry, common, leaves) for entry in others)
    # D_i and R_k may cancel, so rounding errors are relative to `lengths`. The squared norm grows
    # by a bound on its own rounding, and then the norm by a bound on the rounding of the gradient
    # in the clipped sum.
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
    r"""Inner products ``[batch]`` of a common gradient with each example's gradient at an entry.

    $$ \Big\langle \sum_s x_s g_s^\top, R \Big\rangle
       = \sum_s \langle R^\top x_s, g_s \rangle $$

    Scales of slices, which are columns of R, multiply the numbers of $g_s$.
    """
    form = form_of(*entry)
    assert form is not None  # otherwise `cost.common_sites` chooses no common gradient
    if form.indexed:
        # An x_s is one-hot and stored as the number of a row of R: R^T x_s is this row.
        rows = common.gradient.reshape(len(common.gradient), -1)
        (indices,) = form.x  # [batch, blocks, positions]
        applied = rows[indices]
    else:
        applied = _applied(leaf, entry, form, common.gradient, leaves)
    terms = applied * form.g  # both are [batch, blocks, positions, outputs]
    if not common.axes:
        return common.scales * _total(terms)  # an example has one scale
    assert form.axes is not None
    # The axes of slices are axes of outputs, and there is one block, by `cost.common_sites`. So the
    # terms are summed over positions, which share the scales, and each sum is scaled. Terms and
    # scales become [batch, *output_axes]; a scale has length 1 along an axis without slices.
    shape = common.gradient.shape
    output_axes = form.axes.outputs  # axes of the leaf, in the order of the form
    order = [common.axes.index(axis) for axis in output_axes if axis in common.axes]
    scales = _transposed(common.scales, order)
    scales = scales.reshape(-1, *_only(common.axes, output_axes, shape))
    terms = jnp.sum(terms, axis=(1, 2))
    terms = terms.reshape(-1, *(shape[axis] for axis in output_axes))
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

# SPDX-License-Identifier: Apache-2.0
r"""Common gradients: one gradient for all examples, and each example only scales its slices.

A weight decay in the loss, $\ell_i + r(w)$, adds the same gradient $R = \nabla r$ to every
example. The gain of a normalised kernel adds $R$ with columns scaled by numbers $c_i$ of the
example. No example's gradient of the leaf is needed for them: with $D_i$ from all other sites,

$$ \lVert D_i + c_i R \rVert^2
   = \lVert D_i \rVert^2 + 2 \langle D_i, c_i R \rangle + \lVert c_i R \rVert^2, \qquad
   \sum_i f_i (D_i + c_i R) = \sum_i f_i D_i + \Big( \sum_i f_i c_i \Big) R. $$
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dpjax.gradients._bookkeeping.cost import aside
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
from dpjax.gradients._bookkeeping.outer_products import product
from dpjax.gradients._bookkeeping.primitives import form_of

# Roundings of the squared norm of a sum, in units of eps and of the square of all parts.
_ROUNDINGS = 4


class Common(NamedTuple):
    """One gradient ``R`` for all examples, times ``scales`` ``[batch, *slices]`` along ``axes``."""

    gradient: Array
    scales: Array
    axes: tuple[int, ...]

    def spread(self, scales: Array) -> Array:
        """Scales with axes of length 1 for the other axes of the leaf; other axes may lead."""
        shape = [n if a in self.axes else 1 for a, n in enumerate(self.gradient.shape)]
        return scales.reshape(*scales.shape[: scales.ndim - len(self.axes)], *shape)

    def sum(self, factors: Squares) -> Array:
        """The sum over examples; those with factor 0 contribute exactly 0."""
        counts = factors.reshape(-1, *(1,) * len(self.axes)) != 0
        total = self.spread(weighted_sum(jnp.where(counts, self.scales, 0), factors))
        return jnp.where(total != 0, total * self.gradient, 0)


def divided(
    entries: Mapping[int, Sequence[Entry]], leaves: Sequence[Array]
) -> tuple[dict[int, list[Entry]], dict[int, list[Common]]]:
    """For each leaf the entries with a gradient for each example, and the common gradients."""
    rest, commons = dict[int, list[Entry]](), dict[int, list[Common]]()
    # What a weight decay of all leaves needs is computed once.
    every = {id(entry): entry for sites in entries.values() for entry in sites}
    forms = {key: form_of(*entry) for key, entry in every.items()}
    parts: dict[int, tuple[dict[int, Array], Array]] = {}
    for leaf, sites in entries.items():
        chosen = aside(leaf, leaves[leaf], [e.site for e in sites], [forms[id(e)] for e in sites])
        rest[leaf] = [entry for k, entry in enumerate(sites) if k not in chosen]
        if chosen:
            # Inner products with a common gradient are of the gradient as its sum has it.
            rest[leaf] = [entry.rounded() for entry in rest[leaf]]
        commons[leaf] = []
        for entry in (sites[k] for k in chosen):
            parts[id(entry)] = parts.get(id(entry)) or _parts(entry, leaves)
            gradients, scales = parts[id(entry)]
            # In the order of the leaf's axes, whatever the order of the view's.
            axes = entry.site.slices[leaf]
            order = sorted(range(len(axes)), key=lambda k: axes[k])
            scales = jnp.transpose(scales, (0, *(1 + k for k in order)))
            commons[leaf].append(Common(gradients[leaf], scales, tuple(sorted(axes))))
    return rest, commons


def _parts(entry: Entry, leaves: Sequence[Array]) -> tuple[dict[int, Array], Array]:
    """What the scales of an entry multiply in the gradient of each leaf; and the scales."""
    site = entry.site
    ones = jnp.ones_like(site.unscaled(leaves))
    gradients = pulled(sorted(site.leaves), leaves, site.unscaled)(ones)
    return gradients, jax.vmap(site.scales, (None, 0, 0))(leaves, entry.data, entry.cotangent)


def norms_with(
    leaf: int, rest: Sequence[Entry], commons: Sequence[Common], leaves: Sequence[Array]
) -> tuple[Squares, Pieces | None]:
    """As `leaf_norms.norms`, with common gradients beside the entries, if there are any."""
    squares, pieces = norms(leaf, rest, leaves, bool(commons)) if rest else (jnp.zeros(()), None)
    if not commons:
        return squares, pieces
    total, lengths = squares, jnp.sqrt(squares)
    for k, one in enumerate(commons):
        lengths = lengths + jnp.sqrt(_dot(one, one))
        total = total + sum((1 if b is one else 2) * _dot(one, b) for b in commons[: k + 1])
        total = total + 2 * sum(_cross(leaf, entry, one, leaves) for entry in rest)
    # What cancels between the parts is lost relative to them, in the norm and in the sum.
    eps = jnp.finfo(leaves[leaf].dtype).eps
    squares = jnp.maximum(total, 0) + _ROUNDINGS * eps * lengths**2
    return (jnp.sqrt(squares) + eps * lengths) ** 2, pieces


def _dot(a: Common, b: Common) -> Squares:
    both = {*a.axes, *b.axes}
    rest = tuple(axis for axis in range(a.gradient.ndim) if axis not in both)
    inner = jnp.sum(a.gradient * b.gradient, axis=rest, keepdims=True)
    return _total(a.spread(a.scales) * b.spread(b.scales) * inner[None])


def _cross(leaf: int, entry: Entry, common: Common, leaves: Sequence[Array]) -> Squares:
    """Inner products of a common gradient with an entry's own gradients."""
    form = form_of(*entry)
    assert form is not None
    if form.chosen:
        along = common.gradient.reshape(len(common.gradient), -1)[form.x[0]]
    else:
        # The place of a form only rearranges, so its VJP brings the common gradient into the form.
        place, _ = placed(leaf, entry, form._replace(x=()), leaves)
        parts = [jnp.zeros((x.shape[1], x.shape[2], form.g.shape[3]), x.dtype) for x in form.x]
        (parts,) = jax.vjp(place, parts)[1](common.gradient)
        along = added([_applied(*pair) for pair in zip(form.x, parts, strict=True)])
    terms, scales = along * form.g, common.scales
    if not common.axes:
        return scales * _total(terms)
    assert form.axes is not None
    # The slices are among the outputs, which the form counts in an order of its own.
    shape, outputs = common.gradient.shape, form.axes[2]
    order = sorted(range(len(common.axes)), key=lambda k: outputs.index(common.axes[k]))
    scales = jnp.transpose(scales, (0, *(1 + k for k in order)))
    scales = scales.reshape(-1, *(shape[a] if a in common.axes else 1 for a in outputs))
    terms = jnp.sum(terms, axis=(1, 2)).reshape(-1, *(shape[a] for a in outputs))
    return _total(scales * terms)


def _applied(x: Array, matrices: Array) -> Array:
    """Inputs ``[batch, blocks, inputs, positions]`` times the matrix of each block."""
    if len(matrices) > 1:
        return product("bhks,hkd->bhsd", x, matrices)
    # As a product of two matrices, for which XLA need not copy into its layout.
    x = jnp.swapaxes(x, 2, 3)
    return product("nk,kd->nd", x.reshape(-1, x.shape[3]), matrices[0]).reshape(*x.shape[:3], -1)


def _total(x: Array) -> Squares:
    return jnp.sum(x, axis=tuple(range(1, x.ndim)))

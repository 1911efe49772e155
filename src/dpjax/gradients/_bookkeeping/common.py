# SPDX-License-Identifier: Apache-2.0
r"""Common gradients: one gradient for all examples, which each example only scales.

A weight decay in the loss, $\ell_i + r(w)$, adds the same gradient $R = \nabla r$ to every
example; other numbers that are computed from parameters alone add $c_i R$. No example's gradient of
the leaf is needed for them: with $D_i$ from all other sites,

$$ \lVert D_i + c_i R \rVert^2
   = \lVert D_i \rVert^2 + 2 c_i \langle D_i, R \rangle + c_i^2 \lVert R \rVert^2, \qquad
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
    """The part of a leaf's gradients that is one gradient for all examples, up to a scale."""

    gradient: Array
    scales: Squares

    def sum(self, factors: Squares) -> Array:
        """The sum over examples; those with factor 0 contribute exactly 0."""
        total = weighted_sum(jnp.where(factors != 0, self.scales, 0), factors)
        return jnp.where(total != 0, total * self.gradient, 0)


def divided(
    entries: Mapping[int, Sequence[Entry]], leaves: Sequence[Array]
) -> tuple[dict[int, list[Entry]], dict[int, list[Common]]]:
    """For each leaf the entries with a gradient for each example, and the common gradients."""
    rest, commons = dict[int, list[Entry]](), dict[int, list[Common]]()
    # What a weight decay of all leaves needs is computed once, and not once for each leaf.
    every = {id(entry): entry for sites in entries.values() for entry in sites}
    forms = {key: form_of(*entry) for key, entry in every.items()}
    parts: dict[int, tuple[dict[int, Array], Array]] = {}
    for leaf, sites in entries.items():
        chosen = aside(leaves[leaf], [e.site for e in sites], [forms[id(e)] for e in sites])
        rest[leaf] = [entry for k, entry in enumerate(sites) if k not in chosen]
        if chosen:
            # Inner products with a common gradient are of the gradient as its sum has it.
            rest[leaf] = [entry.rounded() for entry in rest[leaf]]
        commons[leaf] = []
        for entry in (sites[k] for k in chosen):
            parts[id(entry)] = parts.get(id(entry)) or _parts(entry, leaves)
            gradients, scales = parts[id(entry)]
            commons[leaf].append(Common(gradients[leaf], scales))
    return rest, commons


def _parts(entry: Entry, leaves: Sequence[Array]) -> tuple[dict[int, Array], Array]:
    """The gradients of the number of an entry by its leaves; and its scales."""
    site = entry.site
    assert site.scale is not None
    assert site.unscaled is not None
    gradients = pulled(sorted(site.leaves), leaves, site.unscaled)(jnp.ones(()))
    return gradients, jax.vmap(site.scale, (None, 0, 0))(leaves, entry.data, entry.cotangent)


def norms_with(
    leaf: int, rest: Sequence[Entry], commons: Sequence[Common], leaves: Sequence[Array]
) -> tuple[Squares, Pieces | None]:
    """As `leaf_norms.norms`, with common gradients beside the entries.

    Args:
      leaf: Which leaf.
      rest: Its other entries, apart from the common gradients; maybe none.
      commons: What `divided` found beside them.
      leaves: All leaves, in full precision.
    """
    squares, kept = norms(leaf, rest, leaves, bool(commons)) if rest else (jnp.zeros(()), None)
    if not commons:
        return squares, kept
    total, lengths = squares, jnp.sqrt(squares)
    for k, one in enumerate(commons):
        lengths = lengths + jnp.sqrt(_dot(one, one))
        total = total + sum((1 if b is one else 2) * _dot(one, b) for b in commons[: k + 1])
        total = total + 2 * sum(_cross(leaf, entry, one, leaves) for entry in rest)
    # What cancels between the parts is lost relative to them, in the norm and in the sum.
    eps = jnp.finfo(leaves[leaf].dtype).eps
    squares = jnp.maximum(total, 0) + _ROUNDINGS * eps * lengths**2
    return (jnp.sqrt(squares) + eps * lengths) ** 2, kept


def _dot(a: Common, b: Common) -> Squares:
    """The inner products of two common gradients, for each example."""
    return a.scales * b.scales * jnp.sum(a.gradient * b.gradient)


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
    return common.scales * jnp.sum(along * form.g, axis=(1, 2, 3))


def _applied(x: Array, part: Array) -> Array:
    """Inputs ``[batch, blocks, inputs, positions]`` times the matrix of each block."""
    if len(part) > 1:
        return product("bhks,hkd->bhsd", x, part)
    # As a product of two matrices, for which XLA need not copy inputs and matrix into its layout.
    x = jnp.swapaxes(x, 2, 3)
    return product("nk,kd->nd", x.reshape(-1, x.shape[3]), part[0]).reshape(*x.shape[:3], -1)

# SPDX-License-Identifier: Apache-2.0
r"""Norms: the squared norm of each example's gradient of one leaf, from its sites.

Five rules lead to a norm; `cost.choose` takes the cheapest that fits:

* *product*: a single position, $\lVert x g^\top \rVert = \lVert x \rVert \lVert g \rVert$;
* *gram*: $\lVert \sum_s x_s g_s^\top \rVert^2 = \sum_{st} \langle x_s, x_t \rangle
  \langle g_s, g_t \rangle$, also across the sites of tied weights;
* *rows*: the cotangents of each row of a table are summed before they are squared;
* *instantiate*: the gradient of each example, as one batched product;
* *derivative*: the VJP of the equation itself, without a form.

A norm that is rounded down would let an example pass its bound. So each rule adds a bound on its
rounding error, and computes in float32 or wider at the highest precision, whatever the dtype of
the model.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from dpjax import trees
from dpjax.gradients import platforms
from dpjax.gradients._bookkeeping.cost import BLOCK, alike, choose, paired
from dpjax.gradients._bookkeeping.leaf_sums import (
    DROPPED,
    Entry,
    Pieces,
    Squares,
    added,
    instantiated,
    placed,
)
from dpjax.gradients._bookkeeping.outer_products import HIGHEST, Outer, form_of, product


def norms(
    leaf: int, entries: Sequence[Entry], leaves: Sequence[Array], exact: bool
) -> tuple[Squares, Pieces | None]:
    """Squared norms of each example's gradient of a leaf, and those gradients if they are kept.

    Args:
      leaf: Which leaf.
      entries: All its sites.
      leaves: All leaves, in full precision.
      exact: Whether kept gradients meet what data and cotangents give beside them.
    """
    forms = [form_of(*entry) for entry in entries]
    choice = choose(leaves[leaf], [entry.site for entry in entries], forms)
    if choice.rule == "gram":
        # The sum comes from a second product, of the same rounded numbers.
        forms = [form_of(*entry.rounded()) for entry in entries]
    outers = alike([form for form in forms if form is not None])
    if choice.rule == "product" and outers is not None:
        return _product_norms(outers[0]), None
    if choice.rule == "rows" and outers is not None:
        return _row_norms(outers[0]), None
    if choice.rule == "gram" and outers is not None:
        return _with_halves(_gram_norms(outers), outers), None
    # The pieces of one isometric site have the norm of the leaf's gradient, so they need not be put
    # together before they are squared.
    alone = forms[0] if len(entries) == 1 and entries[0].site.isometry else None
    if choice.rule == "instantiate" and alone is not None:
        place, gradients = placed(leaf, entries[0], alone, leaves, exact)
        kept = Pieces(gradients, place)
    else:
        kept = Pieces([instantiated([leaf], entries, forms, leaves, exact)[leaf]])
    squares = added([squared(x) for x in kept.gradients])
    if choice.keep:
        return squares, kept
    # The sum will come from another product than this norm, with other rounding errors.
    return (jnp.sqrt(squares) + _doubt(forms)) ** 2, None


def _product_norms(form: Outer) -> Squares:
    """One position: the norm of an outer product is the product of the norms."""
    x, g = _lengths(form)
    inputs, outputs = form.width, form.g.shape[3]
    # Rounding bound: a square may underflow to 0 while the other factor is huge.
    tiny = jnp.finfo(g.dtype).tiny
    return jnp.sum((x + inputs * tiny) * (g + outputs * tiny), axis=(1, 2))


def _gram_norms(forms: Sequence[Outer]) -> Squares:
    """Inner products between positions, within each site and between any two sites."""
    eps, positions = jnp.finfo(forms[0].g.dtype).eps, sum(form.g.shape[2] for form in forms)
    total = jnp.zeros(forms[0].g.shape[0], forms[0].g.dtype)
    for a, b in itertools.combinations_with_replacement(range(len(forms)), 2):
        p, q = forms[a], forms[b]
        precision = None if p.short and q.short else HIGHEST
        x, g = _inner(p, q, precision), _dots(p.g, q.g, precision)
        (px, pg), (qx, qg) = _lengths(p), _lengths(q)
        lengths_x = jnp.sqrt(px)[..., :, None] * jnp.sqrt(qx)[..., None, :]
        lengths_g = jnp.sqrt(pg)[..., :, None] * jnp.sqrt(qg)[..., None, :]
        inputs = 0 if p.chosen or q.chosen else roundings(p.width)  # one-hot columns are exact
        # Cotangents are always dense, so their products round even beside one-hot columns.
        outputs = roundings(p.g.shape[3])
        # Rounding bound: relative to the products that cancel, not to their sum. It grows with the
        # number of roundings of a term, because aligned roundings of wide layers do add up.
        doubt = inputs * lengths_x * jnp.abs(g) + outputs * jnp.abs(x) * lengths_g
        doubt = eps * (doubt / 2 + (positions + 2) * jnp.abs(x * g))
        total = total + (1 if a == b else 2) * jnp.sum(x * g + doubt, axis=(1, 2, 3))
    # Terms that cancel can leave a negative total, and its square root would drop the example.
    return jnp.maximum(total, 0) + _lost(forms)


def _row_norms(form: Outer) -> Squares:
    """The cotangents of each row of a table are summed, and each sum is squared once."""
    (ids,), (_, g), eps = form.x, _lengths(form), jnp.finfo(form.g.dtype).eps
    mates = (ids[..., :, None] == ids[..., None, :]).astype(g.dtype)
    rows = jnp.sqrt(jnp.sum(product("bhst,bhtd->bhsd", mates, form.g) ** 2, axis=3))
    # As one product, which takes less time than two reductions.
    seen = product("bhst,bhtk->bhsk", mates, jnp.stack([jnp.ones_like(g), jnp.sqrt(g)], axis=3))
    count, lengths = seen[..., 0], seen[..., 1]
    # Rounding bound: relative to the cotangents that cancel in a row. All positions that take a row
    # have its sum, and each adds its part of the square.
    return jnp.sum((rows + eps * count * lengths) ** 2 / count, axis=(1, 2)) + _lost([form])


def _doubt(forms: Sequence[Outer | None]) -> Squares:
    """A bound on the distance between two sums over positions with different rounding errors."""
    total = jnp.zeros(())
    for form in forms:
        if form is not None:
            # Relative to the lengths before cancellation: where positions cancel to the last
            # digits, both sums consist of rounding errors. Both may add one term after the other.
            terms = (form.g.shape[2] + 2) * jnp.finfo(form.g.dtype).eps
            total += terms * _uncancelled(form)
    return total


def _with_halves(squares: Squares, forms: Sequence[Outer]) -> Squares:
    """Squared norms, with a bound on what `leaf_sums.halves` drop of scaled cotangents."""
    short = [form for form in forms if form.short]
    if not short:
        return squares
    return (jnp.sqrt(squares) + DROPPED * added(list(map(_uncancelled, short)))) ** 2


def _uncancelled(form: Outer) -> Squares:
    """The sum over positions of the lengths of their outer products."""
    x, g = map(jnp.sqrt, _lengths(form))
    return jnp.sum(x * g, axis=(1, 2))


def _lost(forms: Sequence[Outer]) -> Squares:
    """A bound on the part of a squared norm that is lost where squares underflow to 0."""
    tiny, lost = jnp.finfo(forms[0].g.dtype).tiny, jnp.zeros(())
    for form in forms:
        x, g = _lengths(form)
        inputs, outputs = 1 if form.chosen else form.width, form.g.shape[3]
        # Data and cotangents are squared apart: data of 1e-22 square to 0 in float32, although
        # their product with a cotangent of 1e18 is a plain gradient.
        lost += jnp.sum(jnp.sqrt(inputs * tiny * g + outputs * tiny * x), axis=2)
    return jnp.sum(lost**2, axis=1)


def _lengths(form: Outer) -> tuple[Array, Array]:
    """Squared lengths ``[batch, blocks, positions]`` of inputs and of outputs."""
    # Inputs and outputs are squared apart: their product may be a plain number although one square
    # underflows.
    g = jnp.sum(form.g**2, axis=3)
    if form.chosen:
        return jnp.ones_like(g), g
    if form.pixels:
        # The same inner products as in `_gram_norms`, which XLA forms once.
        inner = _inner(form, form, None if form.short else HIGHEST)
        return jnp.sum(jnp.where(jnp.eye(g.shape[2], dtype=bool), inner, 0), axis=3), g
    return added([jnp.sum(x**2, axis=2) for x in form.x]), g


def _inner(p: Outer, q: Outer, precision: Any) -> Array:
    """Inner products of inputs ``[batch, blocks, positions of p, positions of q]``."""
    # The inner product is symmetric, so one mixed case is enough.
    if p.chosen and not q.chosen:
        return jnp.swapaxes(_inner(q, p, precision), 2, 3)
    if p.pixels and p is q:
        return p.pixels.inner(precision)[:, None]
    x, y = (jnp.concatenate(form.x, axis=2) for form in (p, q))
    if p.chosen:
        # Two one-hot columns have inner product 1 if their indices agree, and 0 otherwise: exact.
        return (x[:, :, :, None] == y[:, :, None, :]).astype(p.g.dtype)
    if q.chosen:
        return jnp.swapaxes(jnp.take_along_axis(x, y[:, :, :, None], axis=2), 2, 3)
    return _dots(jnp.swapaxes(x, 2, 3), jnp.swapaxes(y, 2, 3), precision)


def _dots(a: Array, b: Array, precision: Any) -> Array:
    """Inner products of rows, ``[.., s, n]`` and ``[.., t, n]``: in blocks, then in pairs.

    The rounding error of one long sum grows with the number of terms; here with `roundings`.
    """
    if not platforms.on_cpu():
        return product("bhsn,bhtn->bhst", a, b, precision)
    blocks = paired(a.shape[-1])

    def split(x: Array) -> Array:
        ends = [(0, 0)] * (x.ndim - 1) + [(0, blocks * BLOCK - x.shape[-1])]
        return jnp.pad(x, ends).reshape(*x.shape[:-1], blocks, BLOCK)

    parts = product("bhsjn,bhtjn->jbhst", split(a), split(b))
    while len(parts) > 1:
        parts = parts[::2] + parts[1::2]
    return parts[0]


def roundings(terms: int) -> int:
    """The number of roundings of a term in an inner product of this many terms."""
    if not platforms.on_cpu():
        # A matrix unit may add one term after the other, and rounds each product of six passes.
        return terms + 2
    # A term passes through one block and then through the levels of the pairwise sum.
    return min(terms, BLOCK) + round(math.log2(paired(terms)))


def squared(x: Array) -> Squares:
    """The squared norm of each example's array."""
    x = trees.widened_exactly(x)  # kept gradients may be bfloat16
    return jnp.sum(x * x, axis=tuple(range(1, x.ndim)))

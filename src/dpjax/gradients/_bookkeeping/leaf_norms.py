# SPDX-License-Identifier: Apache-2.0
r"""Norms: the squared norm of each example's gradient of one leaf, from its sites.

Five rules lead to a norm; `cost.choose` takes the cheapest that fits:

* *product*: a single position, $\lVert x g^\top \rVert = \lVert x \rVert \lVert g \rVert$;
* *gram*: $\lVert \sum_s x_s g_s^\top \rVert^2 = \sum_{st} \langle x_s, x_t \rangle
  \langle g_s, g_t \rangle$, also across the sites of tied weights;
* *rows*: the cotangents of each row of a table are summed before they are squared;
* *instantiate*: the gradient of each example, as one batched product;
* *derivative*: the VJP of the equation itself, without a form.

Norms are float32 or wider, at the highest precision. The margin of the noise covers their rounding,
and that of sums, where nothing cancels. Positions and uses of a leaf can cancel, and what is lost
is then relative to the terms: the gram rule first takes out what the positions share, and a norm
whose sum is another product grows by a bound on its rounding.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from dpjax import trees
from dpjax.gradients import platforms
from dpjax.gradients._bookkeeping.cost import alike, choose
from dpjax.gradients._bookkeeping.leaf_sums import (
    DROPPED,
    Entry,
    Pieces,
    Squares,
    added,
    instantiated,
    placed,
)
from dpjax.gradients._bookkeeping.outer_products import HIGHEST, Outer, product
from dpjax.gradients._bookkeeping.primitives import form_of

# Roundings of a Gram matrix, in units of eps and of the square of all terms.
_ROUNDINGS = 4


def norms(
    leaf: int, entries: Sequence[Entry], leaves: Sequence[Array], exact: bool
) -> tuple[Squares, Pieces | None]:
    """Squared norms of a leaf's gradients, and these if they are kept; ``exact`` as in `placed`."""
    forms = [form_of(*entry) for entry in entries]
    choice = choose(leaves[leaf], [entry.site for entry in entries], forms)
    if choice.rule == "gram":
        # The sum comes from a second product, of the same rounded numbers.
        forms = [form_of(*entry.rounded()) for entry in entries]
    outers = alike([form for form in forms if form is not None])
    if choice.rule == "product" and outers is not None:
        x, g = _lengths(outers[0])
        return jnp.sum(x * g, axis=(1, 2)), None
    if choice.rule == "rows" and outers is not None:
        return _with_doubt(_row_norms(outers[0]), outers), None
    if choice.rule == "gram" and outers is not None:
        return _with_doubt(_gram_norms(outers), outers), None
    # The pieces of one isometric site have the norm of the leaf's gradient.
    alone = forms[0] if len(entries) == 1 and entries[0].site.isometry else None
    if choice.rule == "instantiate" and alone is not None:
        place, gradients = placed(leaf, entries[0], alone, leaves, exact)
        pieces = Pieces(gradients, place)
    else:
        pieces = Pieces([instantiated([leaf], entries, forms, leaves, exact)[leaf]])
    squares = added([squared(x) for x in pieces.gradients])
    if choice.keep:
        return squares, pieces
    return _with_doubt(squares, [form for form in forms if form is not None]), None


def _gram_norms(forms: Sequence[Outer]) -> Squares:
    """Inner products between positions, within each site and between any two sites."""
    if platforms.on_cpu() and not any(form.chosen for form in forms):
        forms = [_centred(forms)]
    total = jnp.zeros(forms[0].g.shape[0], forms[0].g.dtype)
    for a, b in itertools.combinations_with_replacement(range(len(forms)), 2):
        p, q = forms[a], forms[b]
        precision = None if p.short and q.short else HIGHEST
        x, g = _inner(p, q, precision), product("bhsn,bhtn->bhst", p.g, q.g, precision)
        total = total + (1 if a == b else 2) * jnp.sum(x * g, axis=(1, 2, 3))
    # What cancels is lost relative to the terms. A negative total would drop the example.
    doubt = _ROUNDINGS * jnp.finfo(total.dtype).eps * _uncancelled(forms) ** 2
    return jnp.maximum(total, 0) + doubt


def _centred(forms: Sequence[Outer]) -> Outer:
    r"""All positions of a leaf as one form, apart from the mean of their inputs.

    $$ \sum_s x_s g_s^\top = \bar x \Big( \sum_s g_s \Big)^\top + \sum_s (x_s - \bar x) g_s^\top $$

    Where two positions nearly cancel, as with two views or under a norm layer, nothing cancels in
    the terms on the right.
    """
    x = jnp.concatenate([jnp.concatenate(form.x, axis=2) for form in forms], axis=3)
    g = jnp.concatenate([form.g for form in forms], axis=2)
    mean, total = jnp.mean(x, axis=3, keepdims=True), jnp.sum(g, axis=2, keepdims=True)
    x, g = jnp.concatenate([mean, x - mean], axis=3), jnp.concatenate([total, g], axis=2)
    return forms[0]._replace(x=(x,), g=g)


def _row_norms(form: Outer) -> Squares:
    """The cotangents of each row of a table are summed, and each sum is squared once."""
    (ids,) = form.x
    mates = (ids[..., :, None] == ids[..., None, :]).astype(form.g.dtype)
    rows = jnp.sum(product("bhst,bhtd->bhsd", mates, form.g) ** 2, axis=3)
    # All positions that take a row have its sum, and each adds its part of the square.
    return jnp.sum(rows / jnp.sum(mates, axis=3), axis=(1, 2))


def _with_doubt(squares: Squares, forms: Sequence[Outer]) -> Squares:
    """Squared norms of gradients that another product sums, with a bound on its rounding."""
    if not forms:
        return squares
    # Relative to the terms, which may cancel to the last digits.
    doubt = jnp.finfo(squares.dtype).eps / 2 * _uncancelled(forms)
    short = [form for form in forms if form.short]
    if short:
        doubt = doubt + DROPPED * _uncancelled(short)
    return (jnp.sqrt(squares) + doubt) ** 2


def _uncancelled(forms: Sequence[Outer]) -> Squares:
    """The sum over positions of the lengths of their outer products."""
    pairs = [map(jnp.sqrt, _lengths(form)) for form in forms]
    return added([jnp.sum(x * g, axis=(1, 2)) for x, g in pairs])


def _lengths(form: Outer) -> tuple[Array, Array]:
    """Squared lengths ``[batch, blocks, positions]`` of inputs and of outputs."""
    g = jnp.sum(form.g**2, axis=3)
    if form.chosen:
        return jnp.ones_like(g), g
    return added([jnp.sum(x**2, axis=2) for x in form.x]), g


def _inner(p: Outer, q: Outer, precision: Any) -> Array:
    """Inner products of inputs ``[batch, blocks, positions of p, positions of q]``."""
    # The inner product is symmetric, so one mixed case is enough.
    if p.chosen and not q.chosen:
        return jnp.swapaxes(_inner(q, p, precision), 2, 3)
    x, y = (jnp.concatenate(form.x, axis=2) for form in (p, q))
    if p.chosen:
        # Two one-hot columns have inner product 1 if their indices agree, and 0 otherwise.
        return (x[:, :, :, None] == y[:, :, None, :]).astype(p.g.dtype)
    if q.chosen:
        return jnp.swapaxes(jnp.take_along_axis(x, y[:, :, :, None], axis=2), 2, 3)
    return product("bhks,bhkt->bhst", x, y, precision)


def squared(x: Array) -> Squares:
    """The squared norm of each example's array."""
    x = trees.widened_exactly(x)  # kept gradients may be bfloat16
    return jnp.sum(x * x, axis=tuple(range(1, x.ndim)))

# SPDX-License-Identifier: Apache-2.0
r"""Norms: the squared norm of each example's gradient of one leaf, from its sites.

A *site* is an equation of the loss in which a *view*, a value computed from leaves of the
parameters, meets the data; an *entry* is a site with the data and cotangents of a batch. Its
*form*, an `Outer`, has the gradient of the view as a sum of outer products $x_s g_s^\top$ over
positions $s$. The view is an *isometry* if it only rearranges the entries of one leaf.

Five rules lead to a norm; `cost.choose` takes the cheapest that fits:

* *product*: a single position, $\lVert x g^\top \rVert = \lVert x \rVert \lVert g \rVert$;
* *gram*: $\lVert \sum_s x_s g_s^\top \rVert^2 = \sum_{st} \langle x_s, x_t \rangle
  \langle g_s, g_t \rangle$, also across the sites of tied weights;
* *rows*: the cotangents of each row of a table are summed before they are squared;
* *instantiate*: the gradient of each example, as one batched product;
* *derivative*: the VJP of the equation itself, without a form.

Norms are float32 or wider, at the highest precision. The margin of the noise covers their rounding,
and that of sums, where nothing cancels. Positions and uses of a leaf can cancel, and the rounding
error is then relative to the terms: the gram rule first subtracts the mean over positions, and a
norm whose sum is another product grows by a bound on its rounding.

An accelerator may multiply matrices in one pass, which rounds its operands. Where the loss does so
at a site, its form is *short*: norm and sum may both be of operands that are rounded first, whose
product in one pass is exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from dpjax import trees
from dpjax.gradients import _platforms
from dpjax.gradients._bookkeeping.cost import aligned, choose
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

# The rounding error of a squared norm by the gram rule is at most this many eps, times the square
# of the sum of the norms of its terms.
_ROUNDINGS = 4


def norms(
    leaf: int, entries: Sequence[Entry], leaves: Sequence[Array], exact: bool
) -> tuple[Squares, Pieces | None]:
    """The squared norm of each example's gradient of a leaf, by the rule that `choose` names.

    Args:
      leaf: The number of the leaf.
      entries: All sites of the leaf, with the data and cotangents of the batch.
      leaves: All leaves of the parameters.
      exact: If False, per-example gradients may be rounded as the loss rounds, or to bfloat16.

    Returns:
      Squared norms ``[batch]``, and the per-example gradients if the clipped sum is to read them;
      None if it comes from another product.
    """
    forms = [form_of(*entry) for entry in entries]
    choice = choose(leaves[leaf], [entry.site for entry in entries], forms)
    if choice.rule == "gram":
        # The clipped sum comes from a second product, which rounds data and cotangents of short
        # forms. The norm has to be of the same numbers.
        forms = [form_of(*entry.rounded()) for entry in entries]
    known_forms = [form for form in forms if form is not None]
    outers = aligned(known_forms)
    # These three rules are only chosen if all sites have forms, which can be aligned. The first two
    # have a single form.
    if choice.rule == "product" and outers is not None:
        # It is not rounded up, because with a single position nothing cancels.
        x_squares, g_squares = _squared_lengths(outers[0])  # [batch, blocks, 1 position]
        return jnp.sum(x_squares * g_squares, axis=(1, 2)), None
    if choice.rule == "rows" and outers is not None:
        squares = _row_norms(outers[0])
        return _rounded_up(squares, outers), None
    if choice.rule == "gram" and outers is not None:
        squares = _gram_norms(outers)
        return _rounded_up(squares, outers), None
    # The rules "instantiate" and "derivative" form the gradients.
    pieces = _instantiated_pieces(leaf, entries, forms, leaves, exact)
    squares = added([squared(gradients) for gradients in pieces.gradients])
    if choice.keep:
        return squares, pieces
    return _rounded_up(squares, known_forms), None


def _instantiated_pieces(
    leaf: int,
    entries: Sequence[Entry],
    forms: Sequence[Outer | None],
    leaves: Sequence[Array],
    exact: bool,
) -> Pieces:
    """Each example's gradient of a leaf, in arrays whose squared norms add up to the leaf's."""
    form = forms[0]
    # The pieces of one isometric site have the norm of the leaf's gradient.
    one_isometry = len(entries) == 1 and entries[0].site.isometry
    if one_isometry and form is not None and not form.indexed:
        place, gradients = placed(leaf, entries[0], form, leaves, exact)
        return Pieces(gradients, place)
    return Pieces([instantiated([leaf], entries, forms, leaves, exact)[leaf]])


def _gram_norms(forms: Sequence[Outer]) -> Squares:
    r"""The gram rule, over all positions of all sites of a leaf.

    $$ \sum_{a, b} \sum_{h, s, t} \langle x^a_{hs}, x^b_{ht} \rangle
       \langle g^a_{hs}, g^b_{ht} \rangle $$

    Here $a$ and $b$ are sites, $h$ is a block, and $s$ and $t$ are positions of the two sites.
    """
    # Positions that nearly cancel lose fewer digits without the mean of their inputs. Accelerators
    # keep the mean: one pass is exact for the rounded numbers of short forms, and not for their
    # differences from a mean. Row numbers have no mean.
    if _platforms.on_cpu() and not any(form.indexed for form in forms):
        forms = [_centred(forms)]
    first = forms[0].g
    total = jnp.zeros(first.shape[0], first.dtype)
    for i, j in itertools.combinations_with_replacement(range(len(forms)), 2):
        a = forms[i]
        b = forms[j]
        # None is a single pass, which is exact for the rounded numbers of short forms.
        precision = None if a.short and b.short else HIGHEST
        x_products = _inner_products(a, b, precision)
        g_products = product("bhsn,bhtn->bhst", a.g, b.g, precision)
        count = 1 if i == j else 2  # the pair (i, j) also stands for (j, i)
        total = total + count * jnp.sum(x_products * g_products, axis=(1, 2, 3))
    # Where terms cancel, the rounding error is relative to the terms, not to their total, which it
    # may make negative. Without the maximum the root is then NaN, which drops the example.
    error = _ROUNDINGS * jnp.finfo(total.dtype).eps * _uncancelled(forms) ** 2
    return jnp.maximum(total, 0) + error


def _centred(forms: Sequence[Outer]) -> Outer:
    r"""All positions of a leaf as one form, apart from the mean of their inputs.

    $$ \sum_s x_s g_s^\top = \bar x \Big( \sum_s g_s \Big)^\top + \sum_s (x_s - \bar x) g_s^\top $$

    Where two positions nearly cancel, as with two views or under a norm layer, nothing cancels in
    the terms on the right.
    """
    x = jnp.concatenate([jnp.concatenate(form.x, axis=2) for form in forms], axis=3)
    g = jnp.concatenate([form.g for form in forms], axis=2)
    x_mean = jnp.mean(x, axis=3, keepdims=True)
    g_total = jnp.sum(g, axis=2, keepdims=True)
    x = jnp.concatenate([x_mean, x - x_mean], axis=3)
    g = jnp.concatenate([g_total, g], axis=2)
    return forms[0]._replace(x=(x,), g=g)


def _row_norms(form: Outer) -> Squares:
    """The rows rule: the cotangents of each row of a table are summed, and each sum is squared."""
    (indices,) = form.x
    equal = indices[..., :, None] == indices[..., None, :]
    same_row = equal.astype(form.g.dtype)  # [batch, blocks, positions, positions]
    row_sums = product("bhst,bhtd->bhsd", same_row, form.g)
    row_squares = jnp.sum(row_sums**2, axis=3)
    # All positions that take a row have its sum, and each adds its part of the square.
    positions_of_row = jnp.sum(same_row, axis=3)
    return jnp.sum(row_squares / positions_of_row, axis=(1, 2))


def _rounded_up(squares: Squares, forms: Sequence[Outer]) -> Squares:
    """Squared norms, raised by a bound on the rounding of the sum, if another product sums."""
    if not forms:
        return squares
    # The bound is relative to the terms, which may cancel to the last digits.
    bound = jnp.finfo(squares.dtype).eps / 2 * _uncancelled(forms)
    short = [form for form in forms if form.short]
    if short:
        bound = bound + DROPPED * _uncancelled(short)
    return (jnp.sqrt(squares) + bound) ** 2


def _uncancelled(forms: Sequence[Outer]) -> Squares:
    """The sum over positions of the lengths of their outer products."""
    totals = []
    for x_squares, g_squares in list(map(_squared_lengths, forms)):
        lengths = jnp.sqrt(x_squares) * jnp.sqrt(g_squares)
        totals.append(jnp.sum(lengths, axis=(1, 2)))
    return added(totals)


def _squared_lengths(form: Outer) -> tuple[Array, Array]:
    """Squared lengths ``[batch, blocks, positions]`` of inputs and of outputs."""
    g_squares = jnp.sum(form.g**2, axis=3)
    if form.indexed:
        return jnp.ones_like(g_squares), g_squares
    x_squares = added([jnp.sum(piece**2, axis=2) for piece in form.x])
    return x_squares, g_squares


def _inner_products(a: Outer, b: Outer, precision: Any) -> Array:
    """Inner products of inputs ``[batch, blocks, positions of a, positions of b]``."""
    if a.indexed and not b.indexed:
        # The inner product is symmetric, so one mixed case is enough.
        return jnp.swapaxes(_inner_products(b, a, precision), 2, 3)
    x = jnp.concatenate(a.x, axis=2)
    y = jnp.concatenate(b.x, axis=2)
    if a.indexed:
        # Two one-hot columns have inner product 1 if their indices agree, and 0 otherwise.
        return (x[:, :, :, None] == y[:, :, None, :]).astype(a.g.dtype)
    if b.indexed:
        # A one-hot column takes one number of each column of `a`: [batch, blocks, of b, of a].
        return jnp.swapaxes(jnp.take_along_axis(x, y[:, :, :, None], axis=2), 2, 3)
    return product("bhks,bhkt->bhst", x, y, precision)


def squared(gradients: Array) -> Squares:
    """The squared norm of each example's array."""
    gradients = trees.widened_exactly(gradients)  # kept gradients may be bfloat16
    return jnp.sum(gradients * gradients, axis=tuple(range(1, gradients.ndim)))

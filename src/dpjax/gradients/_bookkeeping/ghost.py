# SPDX-License-Identifier: Apache-2.0
"""The book-keeping engine: clipped sums without per-example gradients.

One forward pass and one backward pass give, for every site, the data and the output's
cotangent of each example.  Norms follow from those by the rules in `rules`; the rule of
the mechanism makes factors of them; and the sum is formed once, already scaled.  Leaves
that the walk could not follow come out of the same backward pass whole.

References:
  Goodfellow, "Efficient Per-Example Gradient Computations", 2015; Bu et al.,
  "Differentially Private Optimization on Large Model at Small Cost", 2023.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dpjax import trees
from dpjax.gradients._bookkeeping.leaf_norms import Entry, Total, into_table, kept, norms
from dpjax.gradients._bookkeeping.trace import trace
from dpjax.gradients.batching import Rows
from dpjax.types import ClippedSum, Clipping, LossFn, PyTree


def ghost(loss: LossFn, rule: Clipping, params: PyTree, rows: Rows, start: PyTree) -> ClippedSum:
    """Norms and sum from the data and cotangents of every place a parameter enters."""
    groups, leaves = rule.partition.assign(params), wide_leaves(params)
    losses, aux, entries, gradients = backward(loss, params, rows.batch)

    squares = [jnp.zeros_like(losses, trees.wide(losses.dtype))] * rule.partition.size
    totals: dict[int, Total] = {}
    for i, gradient in gradients.items():
        square = trees.group_norms([gradient], (0,), 1)[:, 0] ** 2
        squares[groups[i]] = squares[groups[i]] + square
        totals[i] = kept([gradient])
    for i, found in entries.items():
        square, totals[i] = norms(i, found, leaves)
        squares[groups[i]] = squares[groups[i]] + square
    lengths = jnp.sqrt(jnp.stack(squares, axis=-1))
    real = rows.mask[:, None]
    factors = jnp.where(real, rule.factors(lengths), 0) * rows.weights

    sums = jax.tree.leaves(start)
    for i, found in entries.items():
        if put := into_table(i, found):
            sums[i] = put(sums[i], factors[:, groups[i]])
            del totals[i]

    ways = {i: total(factors[:, groups[i]]) for i, total in totals.items()}

    def value(careful: bool) -> dict[int, Array]:
        return {i: way(careful).astype(sums[i].dtype) for i, way in ways.items()}

    # Wiping out what is not finite costs a pass over all data; nearly always there is none.
    broken = ~jnp.all(jnp.isfinite(lengths))
    parts = jax.lax.cond(broken, lambda: value(careful=True), lambda: value(careful=False))
    for i, part in parts.items():
        sums[i] = sums[i] + part
    return ClippedSum(
        jax.tree.structure(params).unflatten(sums),
        jnp.where(rows.mask, losses, 0),
        jnp.where(real, lengths, 0),
        factors,
        aux,
    )


def backward(loss: LossFn, params: PyTree, batch: PyTree) -> tuple[Any, ...]:
    """One vmapped backward pass: losses, aux, and by leaf its entries or its gradients.

    Args:
      loss: ``loss(params, example) -> (scalar, aux)``.
      params: Parameters.
      batch: Examples, along the leading axis of every leaf.
    """
    leaves = jax.tree.leaves(params)
    program = trace(loss, params, trees.one_row(batch))
    taps = [jnp.zeros(site.output.shape, site.output.dtype) for site in program.sites]
    whole = {i: leaves[i] for i in program.materialised}
    differentiated = jax.value_and_grad(program.run, argnums=(0, 1), has_aux=True)
    (losses, (aux, data)), (cotangents, gradients) = jax.vmap(
        differentiated, in_axes=(None, None, None, 0)
    )(taps, whole, leaves, batch)
    entries: dict[int, list[Entry]] = {}
    for site, noted, cotangent in zip(program.sites, data, cotangents, strict=True):
        entry = Entry(site, [_widened(x) for x in noted], _widened(cotangent))
        for leaf in site.leaves:
            entries.setdefault(leaf, []).append(entry)
    return losses, aux, entries, gradients


def by_patches(loss: LossFn, params: PyTree, example: PyTree) -> int:
    """How many convolutions have a kernel of parameters, and its gradient from patches."""
    sites = [site.equation for site in trace(loss, params, example).sites if site.operand == 1]
    convolutions = [e for e in sites if e.primitive.name == "conv_general_dilated"]
    return sum(e.params["batch_group_count"] == 1 for e in convolutions)


def wide_leaves(params: PyTree) -> list[Array]:
    """The leaves of parameters in full precision."""
    return [_widened(leaf) for leaf in jax.tree.leaves(params)]


def _widened(x: Array) -> Array:
    """Floats in float32 or wider; whatever else as it is."""
    return x.astype(trees.wide(x.dtype)) if jnp.issubdtype(x.dtype, jnp.floating) else x

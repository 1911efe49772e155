# SPDX-License-Identifier: Apache-2.0
"""The book-keeping engine: clipped sums without per-example gradients.

One forward and one backward pass give the data and the cotangent of each example at every *site*,
which is an equation of the loss in which parameters, or values computed from them, meet the data.
From them follow the norms of all gradients, from the norms the factors, and from the factors the
clipped sum. A leaf with a use that cannot be a site is *materialised*: JAX differentiates by it for
each example. Leaves have numbers, in the order of `jax.tree.leaves`.

References:
  Goodfellow, "Efficient Per-Example Gradient Computations", 2015; Bu et al.,
  "Differentially Private Optimization on Large Model at Small Cost", 2023.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from dpjax import trees
from dpjax.gradients._bookkeeping.common import Common, divided, norms_with
from dpjax.gradients._bookkeeping.leaf_norms import squared
from dpjax.gradients._bookkeeping.leaf_sums import (
    Entry,
    LeafSum,
    Pieces,
    Squares,
    clipped_sums,
    instantiated,
    into_table,
    of_kept,
    recomputed,
)
from dpjax.gradients._bookkeeping.primitives import form_of
from dpjax.gradients.batching import Rows
from dpjax.gradients.traced import Traced
from dpjax.types import ClippedSum, Clipping, PyTree


class _LeafUses(NamedTuple):
    """The results of the backward pass for one leaf."""

    squares: Squares  # of the norm of each example's gradient of the leaf
    pieces: Pieces | None  # these gradients, if the clipped sum is to read them
    entries: Sequence[Entry] = ()  # the sites with a gradient for each example
    commons: Sequence[Common] = ()  # gradients that all examples share


def ghost(loss: Traced, rule: Clipping, params: PyTree, rows: Rows, start: PyTree) -> ClippedSum:
    """The clipped sum of a batch by book-keeping, added to ``start``.

    Args:
      loss: The loss, whose trace finds the sites.
      rule: Divides the leaves into groups; gives each group of an example a factor from its norm.
      params: The parameters, at which gradients are taken.
      rows: The examples, with a mask ``[batch]`` that is False for padding, and weights
        ``[batch, groups]`` for the factors.
      start: A sum of the structure of ``params``, as of earlier microbatches.
    """
    leaves = wide_leaves(params)
    groups = rule.partition.assign(params)  # the group of each leaf
    losses, aux, entries, gradients = backward(loss, params, rows.batch)
    uses_of_leaves = _with_norms(entries, gradients, leaves)
    # One array [batch] for each group, in which the squared norms of its leaves add up in float32
    # or wider.
    squares = [jnp.zeros_like(losses, trees.wide(losses.dtype))] * rule.partition.size
    for i, uses in uses_of_leaves.items():
        squares[groups[i]] = squares[groups[i]] + uses.squares
    norms = jnp.sqrt(jnp.stack(squares, axis=-1))  # [batch, groups], as the factors
    real = rows.mask[:, None]
    factors = jnp.where(real, rule.factors(norms), 0) * rows.weights
    factors_of_leaves = {i: factors[:, groups[i]] for i in uses_of_leaves}
    sound = jnp.all(jnp.isfinite(norms), axis=1)  # the rule gives other examples a factor of 0
    sums = _plus_sums(jax.tree.leaves(start), uses_of_leaves, factors_of_leaves, leaves, sound)
    value = jax.tree.structure(params).unflatten(sums)
    losses = jnp.where(rows.mask, losses, 0)
    norms = jnp.where(real, norms, 0)
    return ClippedSum(value, losses, norms, factors, aux)


def _with_norms(
    entries: Mapping[int, Sequence[Entry]], gradients: Mapping[int, Array], leaves: Sequence[Array]
) -> dict[int, _LeafUses]:
    """The squared norms of each leaf, and what its clipped sum reads.

    ``gradients`` ``[batch, ...]`` are of the materialised leaves, ``entries`` of the other leaves.
    """
    uses_of_leaves: dict[int, _LeafUses] = {}
    for i, gradient in gradients.items():
        # `group_norms`, as without book-keeping, returns [batch, groups]: the leaf is the only
        # group, number 0.
        norms = trees.group_norms([gradient], (0,), 1)[:, 0]
        uses_of_leaves[i] = _LeafUses(norms**2, Pieces([gradient]))
    # Gradients that all examples share, apart from scales, go from the entries to `commons`.
    entries, commons = divided(entries, leaves)
    # The norms of some leaves need the gradients themselves, which are formed together.
    behind_kernels = gradients_behind_kernels(entries, leaves)
    for i, leaf_entries in entries.items():
        if i in behind_kernels:
            squares = squared(behind_kernels[i])
            pieces = Pieces([behind_kernels[i]])
        else:
            squares, pieces = norms_with(i, leaf_entries, commons[i], leaves)
        uses_of_leaves[i] = _LeafUses(squares, pieces, leaf_entries, commons[i])
    return uses_of_leaves


def _plus_sums(
    start: Sequence[Array],
    uses_of_leaves: Mapping[int, _LeafUses],
    factors: Mapping[int, Squares],
    leaves: Sequence[Array],
    sound: Bool[Array, " batch"],
) -> list[Array]:
    """The arrays of ``start``, one for each leaf, plus the leaf's clipped sum.

    ``factors`` has an array ``[batch]`` for each leaf. An example is ``sound`` if its norms are
    finite. Others have factors of 0, and `clipped_sums` replaces their data: 0 times NaN is NaN.
    """
    totals = list(start)
    leaf_sums: dict[int, LeafSum] = {}  # computed together below, because leaves share data
    for i, uses in uses_of_leaves.items():
        if uses.pieces is not None:
            leaf_sums[i] = of_kept(uses.pieces, factors[i])
            continue
        if not uses.entries:
            continue  # all gradients of the leaf are common: they are added below
        add_to_table = into_table(i, uses.entries)
        if add_to_table is not None:
            # The sum is added in place, because a microbatch of a language model touches few rows
            # of a table that is larger than all other leaves.
            totals[i] = add_to_table(totals[i], factors[i])
        else:
            leaf_sums[i] = recomputed(i, uses.entries, factors[i], leaves)
    for i, leaf_sum in clipped_sums(leaf_sums, sound).items():
        totals[i] = totals[i] + leaf_sum.astype(totals[i].dtype)
    for i, uses in uses_of_leaves.items():
        for common in uses.commons:
            common_sum = common.sum(factors[i])
            totals[i] = totals[i] + common_sum.astype(totals[i].dtype)
    return totals


def gradients_behind_kernels(
    entries_of_leaves: Mapping[int, Sequence[Entry]], leaves: Sequence[Array]
) -> dict[int, Array]:
    """Per-example gradients ``[batch, ...]`` of leaves from which the loss computes its kernels.

    A kernel such as ``w / norm(w)`` is computed from leaves. The norm of a leaf's gradient does not
    follow from that of the kernel's gradient, unless the kernel is an *isometry*: the numbers of
    one leaf in another order. Gradients of all such leaves are formed together, because leaves may
    share a kernel.

    A leaf that also has common gradients is not among them: it only has them if all its other sites
    are isometric.
    """
    wanted = []
    entries_by_id: dict[int, Entry] = {}  # an entry of several leaves once
    for leaf, entries in entries_of_leaves.items():
        if not all(entry.site.isometry for entry in entries):
            wanted.append(leaf)
            entries_by_id.update({id(entry): entry for entry in entries})
    if not wanted:
        return {}
    used = list(entries_by_id.values())
    forms = [form_of(*entry) for entry in used]
    # Norm and sum both read the result, so products may round as the loss's own do.
    return instantiated(wanted, used, forms, leaves, exact=False)


class Backward(NamedTuple):
    """The results of one backward pass, for each example."""

    losses: Array
    aux: Any
    entries: dict[int, list[Entry]]  # for each leaf with sites
    gradients: dict[int, Array]  # of each materialised leaf


def backward(loss: Traced, params: PyTree, batch: PyTree) -> Backward:
    """One vmapped forward and backward pass, with a zero *tap* on the output of each site.

    The derivative by a tap is the cotangent of that output. Materialised leaves are differentiated
    in the same pass.
    """
    leaves = jax.tree.leaves(params)
    program = loss.program(params, trees.one_row(batch))
    # Taps have the shapes of one example, and examples share them: under `vmap` the derivative is
    # nevertheless each example's own.
    taps = [jnp.zeros(site.output.shape, site.output.dtype) for site in program.sites]
    materialised = {i: leaves[i] for i in program.materialised}
    # `run` maps ``(taps, materialised, leaves, example)`` to ``(loss, (aux, data of each site))``.
    differentiated = jax.value_and_grad(program.run, argnums=(0, 1), has_aux=True)
    per_example = jax.vmap(differentiated, in_axes=(None, None, None, 0))
    values, (cotangents, gradients) = per_example(taps, materialised, leaves, batch)
    losses, (aux, data) = values
    entries: dict[int, list[Entry]] = {}
    for site, site_data, cotangent in zip(program.sites, data, cotangents, strict=True):
        # Norms are float32 or wider, as the clipping rule expects, whatever the dtype of the model.
        wide_data = [trees.widened_exactly(x) for x in site_data]
        entry = Entry(site, wide_data, trees.widened_exactly(cotangent))
        for leaf in site.leaves:
            entries.setdefault(leaf, []).append(entry)
    return Backward(losses, aux, entries, gradients)


def by_patches(loss: Traced, params: PyTree, example: PyTree) -> int:
    """The number of convolutions whose kernel gradients are products, which mix no examples."""
    count = 0
    for site in loss.program(params, example).sites:
        equation = site.equation
        # Operand 1 is the kernel. Others, as in convolutions of only parameters, do not count.
        if site.operand == 1 and equation.primitive.name == "conv_general_dilated":
            count += equation.params["batch_group_count"] == 1
    return count


def wide_leaves(params: PyTree) -> list[Array]:
    """The leaves of parameters in full precision."""
    return list(map(trees.widened_exactly, jax.tree.leaves(params)))

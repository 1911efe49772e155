# SPDX-License-Identifier: Apache-2.0
"""The book-keeping engine: clipped sums without per-example gradients.

One forward and one backward pass give the data and the cotangent of each example at every site.

References:
  Goodfellow, "Efficient Per-Example Gradient Computations", 2015; Bu et al.,
  "Differentially Private Optimization on Large Model at Small Cost", 2023.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dpjax import trees
from dpjax.gradients._bookkeeping.common import divided, norms_with
from dpjax.gradients._bookkeeping.leaf_norms import squared
from dpjax.gradients._bookkeeping.leaf_sums import (
    Entry,
    LeafSum,
    Pieces,
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


def ghost(loss: Traced, rule: Clipping, params: PyTree, rows: Rows, start: PyTree) -> ClippedSum:
    """The clipped sum; an engine as in `dpjax.gradients.batching`."""
    groups = rule.partition.assign(params)
    leaves = wide_leaves(params)
    losses, aux, entries, gradients = backward(loss, params, rows.batch)

    squares = [jnp.zeros_like(losses, trees.wide(losses.dtype))] * rule.partition.size
    pieces: dict[int, Pieces | None] = {}
    for i, gradient in gradients.items():
        square = trees.group_norms([gradient], (0,), 1)[:, 0] ** 2
        squares[groups[i]] = squares[groups[i]] + square
        # A materialised leaf has its per-example gradients: they are summed as they are.
        pieces[i] = Pieces([gradient])
    entries, commons = divided(entries, leaves)
    together = computed(entries, leaves)
    for i, leaf_entries in entries.items():
        if i in together:
            square = squared(together[i])
            pieces[i] = Pieces([together[i]])
        else:
            square, pieces[i] = norms_with(i, leaf_entries, commons[i], leaves)
        squares[groups[i]] = squares[groups[i]] + square
    # Squared norms of leaves add up within a group.
    norms = jnp.sqrt(jnp.stack(squares, axis=-1))
    real = rows.mask[:, None]
    factors = jnp.where(real, rule.factors(norms), 0) * rows.weights

    sums = jax.tree.leaves(start)
    leaf_sums: dict[int, LeafSum] = {}
    for i, leaf_pieces in pieces.items():
        leaf_factors = factors[:, groups[i]]
        leaf_entries = entries.get(i, [])
        if leaf_pieces is not None:
            leaf_sums[i] = of_kept(leaf_pieces, leaf_factors)
            continue
        if not leaf_entries:
            continue
        add_to_table = into_table(i, leaf_entries)
        if add_to_table is not None:
            # The sum is added in place, because a microbatch of a language model touches few rows
            # of a table that is larger than all other leaves.
            sums[i] = add_to_table(sums[i], leaf_factors)
        else:
            leaf_sums[i] = recomputed(i, leaf_entries, leaf_factors, leaves)
    sound = jnp.all(jnp.isfinite(norms), axis=1)
    for i, leaf_sum in clipped_sums(leaf_sums, sound).items():
        sums[i] = sums[i] + leaf_sum.astype(sums[i].dtype)
    for i, leaf_commons in commons.items():
        for common in leaf_commons:
            common_sum = common.sum(factors[:, groups[i]])
            sums[i] = sums[i] + common_sum.astype(sums[i].dtype)
    value = jax.tree.structure(params).unflatten(sums)
    losses = jnp.where(rows.mask, losses, 0)
    norms = jnp.where(real, norms, 0)
    return ClippedSum(value, losses, norms, factors, aux)


def computed(
    entries_of_leaves: Mapping[int, Sequence[Entry]], leaves: Sequence[Array]
) -> dict[int, Array]:
    """Per-example gradients of leaves that make kernels.

    The norm of such a leaf's gradient does not follow from the norm of the kernel's gradient.
    """
    # A leaf with a common gradient is not among them: by `cost.common_sites` its other sites are
    # isometric.
    wanted = []
    entries_by_id: dict[int, Entry] = {}
    for leaf, entries in entries_of_leaves.items():
        if not all(entry.site.isometry for entry in entries):
            wanted.append(leaf)
            entries_by_id.update({id(entry): entry for entry in entries})
    if not wanted:
        return {}
    used = list(entries_by_id.values())
    forms = [form_of(*entry) for entry in used]
    return instantiated(wanted, used, forms, leaves, exact=False)


class Backward(NamedTuple):
    """The results of one backward pass, for each example."""

    losses: Array
    aux: Any
    entries: dict[int, list[Entry]]  # for each leaf with sites
    gradients: dict[int, Array]  # of each materialised leaf


def backward(loss: Traced, params: PyTree, batch: PyTree) -> Backward:
    """One vmapped backward pass."""
    leaves = jax.tree.leaves(params)
    program = loss.program(params, trees.one_row(batch))
    # Taps and leaves are not batched: vmap of the derivative gives each example's own cotangents.
    taps = [jnp.zeros(site.output.shape, site.output.dtype) for site in program.sites]
    materialised = {i: leaves[i] for i in program.materialised}
    differentiated = jax.value_and_grad(program.run, argnums=(0, 1), has_aux=True)
    per_example = jax.vmap(differentiated, in_axes=(None, None, None, 0))
    values, (cotangents, gradients) = per_example(taps, materialised, leaves, batch)
    losses, (aux, data) = values
    entries: dict[int, list[Entry]] = {}
    for site, site_data, cotangent in zip(program.sites, data, cotangents, strict=True):
        # The clipping rule relies on a float32 norm whatever the dtype of the model.
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

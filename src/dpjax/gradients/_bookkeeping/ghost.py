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
    kept,
    recomputed,
)
from dpjax.gradients._bookkeeping.primitives import form_of
from dpjax.gradients.batching import Rows
from dpjax.gradients.traced import Traced
from dpjax.types import ClippedSum, Clipping, PyTree


def ghost(loss: Traced, rule: Clipping, params: PyTree, rows: Rows, start: PyTree) -> ClippedSum:
    """The clipped sum; an engine as in `dpjax.gradients.batching`."""
    groups, leaves = rule.partition.assign(params), wide_leaves(params)
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
    for i, sites in entries.items():
        if i in together:
            square, pieces[i] = squared(together[i]), Pieces([together[i]])
        else:
            square, pieces[i] = norms_with(i, sites, commons[i], leaves)
        squares[groups[i]] = squares[groups[i]] + square
    # Squared norms of leaves add up within a group.
    lengths = jnp.sqrt(jnp.stack(squares, axis=-1))
    real = rows.mask[:, None]
    factors = jnp.where(real, rule.factors(lengths), 0) * rows.weights

    sums = jax.tree.leaves(start)
    parts: dict[int, LeafSum] = {}
    for i, gradient in pieces.items():
        scales, sites = factors[:, groups[i]], entries.get(i, [])
        if gradient is not None:
            parts[i] = kept(gradient, scales)
        elif sites and (put := into_table(i, sites)):
            # In place: a microbatch of a language model touches few rows of a table that is larger
            # than all its other leaves.
            sums[i] = put(sums[i], scales)
        elif sites:
            parts[i] = recomputed(i, sites, scales, leaves)
    sound = jnp.all(jnp.isfinite(lengths), axis=1)
    for i, leaf_sum in clipped_sums(parts, sound).items():
        sums[i] = sums[i] + leaf_sum.astype(sums[i].dtype)
    for i, shared in commons.items():
        for one in shared:
            sums[i] = sums[i] + one.sum(factors[:, groups[i]]).astype(sums[i].dtype)
    value = jax.tree.structure(params).unflatten(sums)
    shown, lengths = jnp.where(rows.mask, losses, 0), jnp.where(real, lengths, 0)
    return ClippedSum(value, shown, lengths, factors, aux)


def computed(entries: Mapping[int, Sequence[Entry]], leaves: Sequence[Array]) -> dict[int, Array]:
    """Gradients of leaves that make kernels: the norm of the kernel's is no norm of theirs."""
    # No leaf with a common gradient is among them: by `cost.aside` its other sites are isometric.
    by = [i for i, sites in entries.items() if not all(e.site.isometry for e in sites)]
    used = list({id(entry): entry for i in by for entry in entries[i]}.values())
    forms = [form_of(*entry) for entry in used]
    return instantiated(by, used, forms, leaves, exact=False) if by else {}


class Backward(NamedTuple):
    """What one backward pass finds of each example."""

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
    (losses, (aux, data)), (cotangents, gradients) = jax.vmap(
        differentiated, in_axes=(None, None, None, 0)
    )(taps, materialised, leaves, batch)
    entries: dict[int, list[Entry]] = {}
    for site, noted, cotangent in zip(program.sites, data, cotangents, strict=True):
        # The clipping rule trusts a float32 norm whatever the dtype of the model.
        wide = list(map(trees.widened_exactly, [*noted, cotangent]))
        entry = Entry(site, wide[:-1], wide[-1])
        for leaf in site.leaves:
            entries.setdefault(leaf, []).append(entry)
    return Backward(losses, aux, entries, gradients)


def by_patches(loss: Traced, params: PyTree, example: PyTree) -> int:
    """The number of convolutions whose kernel gradients are products, which mix no examples."""
    # Operand 1 is the kernel. Other convolutions, such as of parameters alone, are not counted.
    sites = [site.equation for site in loss.program(params, example).sites if site.operand == 1]
    convolutions = [e for e in sites if e.primitive.name == "conv_general_dilated"]
    return sum(e.params["batch_group_count"] == 1 for e in convolutions)


def wide_leaves(params: PyTree) -> list[Array]:
    """The leaves of parameters in full precision."""
    return list(map(trees.widened_exactly, jax.tree.leaves(params)))

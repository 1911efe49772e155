# SPDX-License-Identifier: Apache-2.0
"""`plain_grad`: a gradient without privacy, by the same means as the private one.

So it is a fair baseline for the time of a private step, and it speeds up non-private training.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dpjax import trees
from dpjax.clipping.shards import refuse_explicit, refuse_tracking
from dpjax.gradients._bookkeeping.ghost import backward, by_patches, wide_leaves
from dpjax.gradients._bookkeeping.leaf_sums import into_table, summed, weighted_sum
from dpjax.gradients.batching import Rows
from dpjax.gradients.layout import Request, run_laid_out
from dpjax.gradients.nan_isolation import differentiates_kernels, refuse_split
from dpjax.gradients.traced import Traced
from dpjax.types import ClippedSum, LossFn, PyTree


def plain_grad(
    loss: LossFn, has_aux: bool = False, *, devices: int | Mesh | None = None
) -> Callable[[PyTree, PyTree], PyTree]:
    r"""The gradient of the mean loss of a batch: not private, and as fast as the private one.

    $$ \frac{1}{B} \sum_i \nabla_\theta\, \ell(\theta, x_i) $$

    The arguments are as for `dpjax.clipped_grad`.

    Returns:
      A function ``(params, batch, frozen=None) -> gradients``, in float32 or wider.

    Privacy:
      None.

    Example:
      >>> gradient = plain_grad(lambda w, x: 0.5 * jnp.sum((w - x) ** 2))
      >>> gradient(jnp.zeros(2), jnp.array([[1.0, 2.0], [3.0, 4.0]]))
      Array([-2., -3.], dtype=float32)
    """

    def gradient(params: PyTree, batch: PyTree, frozen: PyTree = None) -> PyTree:
        size = trees.leading_size(batch)
        refuse_tracking("gradients.plain_grad")
        refuse_explicit("gradients.plain_grad", "data", batch)
        refuse_explicit("gradients.plain_grad", "parameters", params)
        # As the private engine with weights 1: a benchmark compares privacy and not two programs.
        rows = Rows(batch, jnp.ones(size, bool), jnp.ones((size, 1), jnp.float32))
        traced, start = Traced(loss, has_aux), trees.zeros_wide(params)
        engine, request = partial(_unclipped, traced), Request(size, devices=devices)
        arguments = (traced, params, rows, start, None, frozen)
        total = run_laid_out(request, lambda _: engine, *arguments)
        return jax.tree.map(lambda x: x / size, total.value)

    return gradient


def _unclipped(loss: Traced, held: tuple[PyTree, PyTree], rows: Rows, start: PyTree) -> ClippedSum:
    params, loss = held[0], loss.beside(held[1])
    if differentiates_kernels(loss, params, trees.one_row(rows.batch), by_patches):
        refuse_split("gradients.plain_grad", rows.batch)
    leaves, ones = wide_leaves(params), jnp.where(rows.mask, rows.weights[:, 0], 0)
    losses, _, entries, gradients = backward(loss, params, rows.batch)
    sums = jax.tree.leaves(start)
    # No norms are computed, which is all that is saved.
    for i, sites in entries.items():
        if put := into_table(i, sites):
            sums[i] = put(sums[i], ones)
        else:
            sums[i] = sums[i] + summed(i, [entry.scaled(ones) for entry in sites], leaves)
    for i, gradient in gradients.items():
        sums[i] = sums[i] + weighted_sum(gradient, ones)
    value = jax.tree.structure(params).unflatten(sums)
    # The caller reads no norms.
    return ClippedSum(value, losses, norms=rows.weights, factors=rows.weights)

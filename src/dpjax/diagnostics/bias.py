# SPDX-License-Identifier: Apache-2.0
"""The effect of clipping on a batch: it turns the mean gradient, even without noise."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dpjax import clipping, trees
from dpjax.diagnostics.vectors import cosine, length
from dpjax.types import Clipping, LossFn, PyTree


class Bias(NamedTuple):
    """The effect of clipping on the mean gradient of a batch, **before** any noise.

    Privacy:
      No field has noise: all of them are as private as the batch.
    """

    cosine: Float[Array, ""]
    """Cosine between the clipped and the unclipped mean: 1 if clipping changes only the length."""
    shrinkage: Float[Array, ""]
    """Length of the clipped mean over length of the unclipped mean."""
    norms: Float[Array, "batch groups"]
    """Norms of each example's gradient, before clipping."""
    clipped: Float[Array, " groups"]
    """The fraction of the examples above the bound."""


def clipping_bias(
    loss: LossFn, rule: Clipping, params: PyTree, batch: PyTree, *, microbatch_size: int = 32
) -> Bias:
    r"""Compares the clipped with the unclipped mean gradient of a batch.

    $$ \cos\left(\sum_i f_i g_i, \; \sum_i g_i\right), \qquad
       \text{shrinkage} = \Bigl\|\sum_i f_i g_i\Bigr\| \Big/ \Bigl\|\sum_i g_i\Bigr\| $$

    with the gradient $g_i$ of example $i$ and its clipping factor $f_i$. The sums stand for means,
    because the number of examples cancels.

    | edge case | value |
    |---|---|
    | an example with a non-finite gradient | left out of both means |
    | the gradients sum to 0 | cosine NaN; shrinkage infinite, or NaN if the clipped ones do too |
    | the clipped gradients sum to 0 (bound 0) | cosine NaN, shrinkage 0 |

    Args:
      loss: ``loss(params, example) -> scalar``.
      rule: A `dpjax.clipping` rule.
      params: The parameters at which gradients are taken.
      batch: Examples, on leading axes.
      microbatch_size: The number of per-example gradients in memory at a time.

    Example:
      >>> loss = lambda w, x: jnp.vdot(w, x)
      >>> batch = jnp.array([[3.0, 0.0], [0.0, 0.5]])
      >>> bias = clipping_bias(loss, clipping.flat(1.0), jnp.zeros(2), batch)
      >>> round(float(bias.cosine), 4), float(bias.clipped[0])
      (0.9558, 0.5)

    References:
      Chen, Wu and Hong, "Understanding Gradient Clipping in Private SGD", 2020.
    """
    size = trees.leading_size(batch)
    sums = jax.jit(partial(_sums, loss, rule))
    results = []  # clipped sum, unclipped sum and norms of each microbatch
    # Per-example gradients of a whole batch fill the memory for a large model.
    for start in range(0, size, microbatch_size):
        microbatch = jax.tree.map(lambda x, start=start: x[start : start + microbatch_size], batch)
        results.append(sums(params, microbatch))
    clipped_sums, unclipped_sums, norms_of_microbatches = zip(*results, strict=True)
    clipped_sum = _added(clipped_sums)
    unclipped_sum = _added(unclipped_sums)
    norms = jnp.concatenate(norms_of_microbatches)
    # An infinite norm is above every bound; a NaN is above none, though clipping drops the example.
    is_above = norms > jnp.asarray(rule.bounds)
    return Bias(
        cosine=cosine(clipped_sum, unclipped_sum),
        shrinkage=length(clipped_sum) / length(unclipped_sum),
        norms=norms,
        clipped=jnp.mean(is_above, axis=0),
    )


def _added(sums: Sequence[PyTree]) -> PyTree:
    """The sum of the trees."""
    return jax.tree.map(lambda first, *others: sum(others, first), *sums)


def _sums(
    loss: LossFn, rule: Clipping, params: PyTree, rows: PyTree
) -> tuple[PyTree, PyTree, Array]:
    """The clipped and the unclipped sum of gradients, and their norms ``[batch, groups]``."""
    # Gradients are materialised and no engine is used, because the unclipped sum needs each.
    gradients = jax.vmap(jax.grad(loss), (None, 0))(params, rows)
    clipped, norms, factors = clipping.clip(rule, gradients)
    is_finite = jnp.all(jnp.isfinite(norms), axis=-1, keepdims=True)
    # The unclipped sum leaves out the same examples as the clipped one.
    one_or_zero = jnp.broadcast_to(is_finite.astype(factors.dtype), factors.shape)
    unclipped = trees.scaled_sum(gradients, one_or_zero, rule.partition.assign(params))
    return clipped, unclipped, norms

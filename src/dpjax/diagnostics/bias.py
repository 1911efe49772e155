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

    $$ \cos\left(\sum_i f_i g_i, \; \sum_i g_i\right) $$

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
    parts = []  # of microbatches
    # Per-example gradients of a whole batch fill the memory for a large model.
    for start in range(0, size, microbatch_size):
        rows = jax.tree.map(lambda x, start=start: x[start : start + microbatch_size], batch)
        parts.append(sums(params, rows))
    clipped_parts, unclipped_parts, norm_parts = zip(*parts, strict=True)
    clipped = _added(clipped_parts)
    unclipped = _added(unclipped_parts)
    norms = jnp.concatenate(norm_parts)
    # An infinite norm is above every bound; a NaN is above none, though clipping drops the example.
    is_above = norms > jnp.asarray(rule.bounds)
    return Bias(
        cosine=cosine(clipped, unclipped),
        shrinkage=length(clipped) / length(unclipped),
        norms=norms,
        clipped=jnp.mean(is_above, axis=0),
    )


def _added(parts: Sequence[PyTree]) -> PyTree:
    """The sum of trees."""
    return jax.tree.map(lambda first, *others: sum(others, first), *parts)


def _sums(
    loss: LossFn, rule: Clipping, params: PyTree, rows: PyTree
) -> tuple[PyTree, PyTree, Array]:
    """The clipped and the unclipped sum, and the norms."""
    # Gradients are materialised and no engine is used, because the unclipped sum needs each.
    gradients = jax.vmap(jax.grad(loss), (None, 0))(params, rows)
    clipped, norms, factors = clipping.clip(rule, gradients)
    is_finite = jnp.all(jnp.isfinite(norms), axis=-1, keepdims=True)
    # The unclipped sum leaves out the same examples as the clipped one.
    ones = jnp.broadcast_to(is_finite.astype(factors.dtype), factors.shape)
    unclipped = trees.scaled_sum(gradients, ones, rule.partition.assign(params))
    return clipped, unclipped, norms

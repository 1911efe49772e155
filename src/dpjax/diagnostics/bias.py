# SPDX-License-Identifier: Apache-2.0
"""The effect of clipping on a batch: it turns the mean gradient, even without noise."""

from __future__ import annotations

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
    # In microbatches: per-example gradients of a large model fill the memory.
    sums = jax.jit(partial(_sums, loss, rule))
    clipped, unclipped, norms = zip(
        *(
            sums(params, jax.tree.map(lambda x, at=at: x[at : at + microbatch_size], batch))
            for at in range(0, size, microbatch_size)
        ),
        strict=True,
    )
    clipped, unclipped = (
        jax.tree.map(lambda *x: sum(x[1:], x[0]), *parts) for parts in (clipped, unclipped)
    )
    norms = jnp.concatenate(norms)
    # An infinite norm is above every bound; a NaN is above none, though clipping drops the example.
    above = jnp.mean(norms > jnp.asarray(rule.bounds), axis=0)
    return Bias(cosine(clipped, unclipped), length(clipped) / length(unclipped), norms, above)


def _sums(
    loss: LossFn, rule: Clipping, params: PyTree, rows: PyTree
) -> tuple[PyTree, PyTree, Array]:
    # By definition and not by an engine: the unclipped sum needs each gradient too.
    gradients = jax.vmap(jax.grad(loss), (None, 0))(params, rows)
    clipped, norms, factors = clipping.clip(rule, gradients)
    finite = jnp.all(jnp.isfinite(norms), axis=-1, keepdims=True)
    # The unclipped sum leaves out the same examples as the clipped one.
    once = jnp.broadcast_to(finite.astype(factors.dtype), factors.shape)
    return clipped, trees.scaled_sum(gradients, once, rule.partition.assign(params)), norms

# SPDX-License-Identifier: Apache-2.0
"""What clipping does to a batch: which norms there are, who is cut, where the mean goes.

Clipping is the part of private training that changes its direction even without noise:
long gradients count for less than they are. The cosine between the clipped and the
unclipped mean says by how much, and the norms say whether the bound is the cause.

Gradients are held for some examples at a time. This file must never know of noise.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dpjax import clipping, trees
from dpjax.diagnostics.vectors import cosine, length
from dpjax.types import Clipping, LossFn, PyTree


class Bias(NamedTuple):
    """What clipping does to the mean gradient of a batch, **before** any noise.

    Privacy: none of it is private.
    """

    cosine: Float[Array, ""]
    """Between the clipped and the unclipped mean: 1 if clipping changes its length alone."""
    shrinkage: Float[Array, ""]
    """Length of the clipped mean, as a part of the unclipped one."""
    norms: Float[Array, "batch groups"]
    """Of each example's gradient, before clipping."""
    clipped: Float[Array, " groups"]
    """The part of the examples above the bound."""


class Histogram(NamedTuple):
    """How many examples fall between each two edges; the last bin takes the largest too."""

    counts: Int[Array, "groups bins"]
    edges: Float[Array, " edges"]


def clipping_bias(
    loss: LossFn,
    rule: Clipping,
    params: PyTree,
    batch: PyTree,
    *,
    microbatch_size: int = 32,
) -> Bias:
    r"""Compares the clipped with the unclipped mean gradient of a batch.

    $$ \cos\left(\sum_i f_i g_i, \; \sum_i g_i\right) $$

    | edge case | value |
    |---|---|
    | a NaN or infinite gradient of one | left out of both means |
    | the gradients add up to 0 | cosine and shrinkage NaN |
    | the clipped ones do (bound 0) | cosine NaN, shrinkage 0 |

    Args:
      loss: ``loss(params, example) -> scalar``.
      rule: A `dpjax.clipping` rule.
      params: Where the gradients are taken.
      batch: Examples, on leading axes.
      microbatch_size: How many per-example gradients are held at once.

    Returns:
      A `Bias`.

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
    if not size or microbatch_size < 1:
        raise ValueError(
            f"diagnostics.clipping_bias(microbatch_size={microbatch_size}): got a batch of {size} "
            "examples; expected at least one, and at least one at a time."
        )
    part = jax.jit(partial(_part, loss, rule))
    parts = [
        part(params, jax.tree.map(lambda x, at=at: x[at : at + microbatch_size], batch))
        for at in range(0, size, microbatch_size)
    ]
    clipped, whole = (
        jax.tree.map(lambda *x: sum(x[1:], x[0]), *side)
        for side in ([p[0] for p in parts], [p[1] for p in parts])
    )
    norms = jnp.concatenate([p[2] for p in parts])
    shrinkage = length(clipped) / length(whole)
    return Bias(cosine(clipped, whole), shrinkage, norms, clipped_fraction(norms, rule))


def _part(
    loss: LossFn, rule: Clipping, params: PyTree, rows: PyTree
) -> tuple[PyTree, PyTree, Array]:
    """Clipped sum, unclipped sum and norms of some examples."""
    gradients = jax.vmap(jax.grad(loss), (None, 0))(params, rows)
    clipped, norms, factors = clipping.clip(rule, gradients)
    finite = jnp.all(jnp.isfinite(norms), axis=-1, keepdims=True)
    once = jnp.broadcast_to(jnp.where(finite, 1, 0), factors.shape)
    return clipped, trees.scaled_sum(gradients, once, rule.partition.assign(params)), norms


def norm_histogram(norms: Float[Array, "batch groups"], bins: int = 20) -> Histogram:
    """Counts per-example norms in bins of equal width, from 0 to the largest finite norm.

    Args:
      norms: As `ClippedSum` and `Bias` hold them.
      bins: How many.

    Returns:
      Counts per group; an infinite or NaN norm is in no bin.

    Example:
      >>> norm_histogram(jnp.array([[0.5], [1.5], [2.0]]), bins=2).counts
      Array([[1, 2]], dtype=int32)
    """
    _expect_norms("norm_histogram", norms)
    if bins < 1:
        raise ValueError(f"diagnostics.norm_histogram(bins={bins}): expected at least one bin.")
    finite = jnp.isfinite(norms)
    top = jnp.max(jnp.where(finite, norms, 0), initial=0.0)
    edges = jnp.linspace(0, jnp.where(top > 0, top, 1), bins + 1)
    place = jnp.clip(jnp.searchsorted(edges, norms, side="right") - 1, 0, bins - 1)
    counts = jnp.sum((place[..., None] == jnp.arange(bins)) & finite[..., None], axis=0)
    return Histogram(counts, edges)


def clipped_fraction(
    norms: Float[Array, "batch groups"], rule: Clipping
) -> Float[Array, " groups"]:
    """The part of the examples whose norm is above the bound, per group.

    An infinite norm is above any bound; a NaN is above none, though the example is dropped.

    Example:
      >>> clipped_fraction(jnp.array([[0.5], [1.0], [3.0], [2.0]]), clipping.flat(1.0))
      Array([0.5], dtype=float32)
    """
    _expect_norms("clipped_fraction", norms, len(rule.bounds))
    return jnp.mean(norms > jnp.asarray(rule.bounds), axis=0)


def _expect_norms(name: str, norms: Array, groups: int | None = None) -> None:
    if norms.ndim != 2 or groups not in (None, norms.shape[1]):
        raise ValueError(
            f"diagnostics.{name}: got norms of shape {norms.shape}; expected [batch, groups], as "
            f"in ClippedSum.norms{f', with the {groups} groups of the rule' if groups else ''}."
        )

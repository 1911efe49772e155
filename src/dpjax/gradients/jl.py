# SPDX-License-Identifier: Apache-2.0
r"""Clipped sums by estimated norms: forward mode for the norms, one reverse pass for the sum.

A derivative of the batch's losses along a random direction gives every example's inner product
with it, at the price of a forward pass. A few such products estimate the norms; the factors that
follow weigh the losses, and the gradient of their weighted sum *is* the clipped sum. No gradient
of a single example exists at any moment.

It is no engine, for it changes the guarantee: see `dpjax.clipping.jl`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dpjax import noise, trees
from dpjax.gradients.rows import Rows
from dpjax.types import ClippedSum, Clipping, Key, LossFn, PyTree

__all__ = ["estimated_norms", "projected"]


def projected(loss: LossFn, rule: Clipping, params: PyTree, rows: Rows, key: Key) -> ClippedSum:
    """The clipped sum of a rule whose norms are estimated.

    Args:
      loss: ``loss(params, example) -> (scalar, aux)``.
      rule: From `dpjax.clipping.jl`.
      params: float32 or wider: the directions have their dtype.
      rows: Examples.
      key: Of the directions; the same one for all microbatches of a step.
    """
    _check_width(params)

    def losses_of(params: PyTree) -> tuple[Array, Any]:
        return jax.vmap(loss, in_axes=(None, 0))(params, rows.batch)

    norms = estimated_norms(losses_of, rule.projections or 1, params, key)
    real = rows.mask[:, None]
    factors = jnp.where(real, rule.factors(norms), 0) * rows.weights
    losses, pull, aux = jax.vjp(losses_of, params, has_aux=True)
    (value,) = pull(factors[:, 0].astype(losses.dtype))
    # 0 times NaN is NaN: where an example breaks the sum, each is taken alone.
    sound = jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(value)]))
    value = jax.lax.cond(
        sound, lambda: value, lambda: _one_by_one(loss, params, rows.batch, factors[:, 0])
    )
    shown, norms = jnp.where(rows.mask, losses, 0), jnp.where(real, norms, 0)
    return ClippedSum(value, shown, norms, factors, aux)


def estimated_norms(
    losses_of: Any, projections: int, params: PyTree, key: Key
) -> Float[Array, "batch 1"]:
    r"""The root of the mean square of each example's products with random directions.

    Args:
      losses_of: Parameters to the losses of a batch and whatever else.
      projections: How many directions.
      params: Where.
      key: Consumed.
    """

    def along(j: Array) -> Float[Array, " batch"]:
        direction = trees.random_like(noise.standard_normal, jax.random.fold_in(key, j), params)
        return jax.jvp(lambda p: losses_of(p)[0], (params,), (direction,))[1]

    products = jax.lax.map(along, jnp.arange(projections))
    return jnp.sqrt(jnp.mean(jnp.square(products), axis=0))[:, None]


def _one_by_one(
    loss: LossFn, params: PyTree, batch: PyTree, factors: Float[Array, " batch"]
) -> Any:
    """The weighted sum of gradients, of which one that is not finite contributes nothing."""

    def add(total: PyTree, row: tuple[PyTree, Array]) -> tuple[PyTree, None]:
        example, factor = row
        each = jax.grad(lambda p: loss(p, example)[0])(params)
        good = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(each)]
        kept = jnp.all(jnp.stack(good)) & (factor > 0)
        return jax.tree.map(lambda t, g: t + jnp.where(kept, factor * g, 0), total, each), None

    return jax.lax.scan(add, trees.zeros_wide(params), (batch, factors))[0]


def _check_width(params: PyTree) -> None:
    for leaf in jax.tree.leaves(params):
        if trees.wide(leaf.dtype) != leaf.dtype:
            raise TypeError(
                f"clipping.jl: parameters are {leaf.dtype}; expected float32 or wider. Norms are "
                "estimated from derivatives, and a narrow type rounds them before they are "
                "squared. Keep float32 parameters and cast them inside the loss."
            )

# SPDX-License-Identifier: Apache-2.0
"""Clipped sums by estimated norms: forward mode for the norms, one reverse pass for the sum.

The derivative of the losses of a batch along a random direction is the inner product of every
example's gradient with that direction, for the price of a forward pass. No engine, because it
changes the guarantee: see `dpjax.clipping.jl`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dpjax import noise, trees
from dpjax.gradients.batching import Rows
from dpjax.gradients.jaxprs import equations
from dpjax.gradients.traced import Traced
from dpjax.types import ClippedSum, Clipping, Key, LossFn, Purpose, PyTree


def projected(
    loss: Traced, rule: Clipping, params: PyTree, rows: Rows, start: PyTree, key: Key
) -> ClippedSum:
    """The clipped sum of a rule whose norms are estimated; one key serves a whole step."""

    def losses_of(params: PyTree) -> tuple[Array, Any]:
        return jax.vmap(loss, in_axes=(None, 0))(params, rows.batch)

    # Accelerators round products by default, differently for norms and sums.
    with jax.default_matmul_precision("highest"):
        _check(loss, params, trees.one_row(rows.batch))
        # Norms in forward mode; then one reverse pass of the weighted loss gives the sum.
        norms = estimated_norms(loss, rule.projections or 1, params, rows.batch, key)
        real = rows.mask[:, None]
        factors = jnp.where(real, rule.factors(norms), 0) * rows.weights
        losses, pull, aux = jax.vjp(losses_of, params, has_aux=True)
        (value,) = pull(factors[:, 0].astype(losses.dtype))
        # 0 * NaN is NaN: if the sum is not finite, examples are differentiated one by one.
        sound = jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(value)]))
        value = jax.lax.cond(
            sound, lambda: value, lambda: _one_by_one(loss, params, rows.batch, factors[:, 0])
        )
    value = jax.tree.map(jnp.add, start, value)
    shown, norms = jnp.where(rows.mask, losses, 0), jnp.where(real, norms, 0)
    return ClippedSum(value, shown, norms, factors, aux)


def estimated_norms(
    loss: LossFn, projections: int, params: PyTree, batch: PyTree, key: Key
) -> Float[Array, "batch 1"]:
    """The root mean square of each example's inner products with random directions."""

    def along(j: Array) -> Float[Array, " batch"]:
        fresh = trees.step_key(key, Purpose.PROJECTIONS, j)
        direction = trees.random_like(noise.standard_normal, fresh, params)

        def of_one(example: PyTree) -> Array:
            return jax.jvp(lambda p: loss(p, example)[0], (params,), (direction,))[1]

        return jax.vmap(of_one)(batch)

    # One direction after the other: the memory of one forward pass.
    products = jax.lax.map(along, jnp.arange(projections))
    return jnp.sqrt(jnp.mean(jnp.square(products), axis=0))[:, None]


def _one_by_one(
    loss: LossFn, params: PyTree, batch: PyTree, factors: Float[Array, " batch"]
) -> Any:
    """The weighted sum of gradients, in which a non-finite gradient contributes 0."""

    def add(total: PyTree, row: tuple[PyTree, Array]) -> tuple[PyTree, None]:
        example, factor = row
        gradient = jax.grad(lambda p: loss(p, example)[0])(params)
        finite = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(gradient)]
        counts = jnp.all(jnp.stack(finite)) & (factor > 0)

        def onto(t: Array, g: Array) -> Array:
            return t + jnp.where(counts, factor * g, 0).astype(t.dtype)

        return jax.tree.map(onto, total, gradient), None

    return jax.lax.scan(add, trees.zeros_wide(params), (batch, factors))[0]


def _check(loss: Traced, params: PyTree, example: PyTree) -> None:
    """Raises if a loss computes in anything narrower than float32."""
    # One reverse pass sums over the examples, and a narrow dtype would round that sum.
    program = jax.make_jaxpr(loss)(params, example).jaxpr
    gradient = loss.gradient(params, example)
    variables = [v for e in (*equations(program), *equations(gradient)) for v in e.outvars]
    avals: list[Any] = [*map(jax.typeof, jax.tree.leaves(params)), *(v.aval for v in variables)]
    dtypes = {x.dtype for x in avals if hasattr(x, "dtype")}
    floats = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)]
    narrow = [str(dtype) for dtype in floats if jnp.finfo(dtype).bits < 32]
    if narrow:
        raise TypeError(
            f"clipping.jl: the loss computes in {narrow[0]}; expected float32 or wider. "
            "Clip by exact norms (clipping.flat), which are summed in float32 for every model."
        )

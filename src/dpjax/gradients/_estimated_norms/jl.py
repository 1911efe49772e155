# SPDX-License-Identifier: Apache-2.0
r"""Clipped sums by estimated norms: forward mode for the norms, one reverse pass for the sum.

The derivative of the losses of a batch along a random direction is the inner product of every
example's gradient with that direction, for the price of a forward pass. A few such products
estimate the norms. The factors weight the losses, and the gradient of the weighted sum is the
clipped sum. No gradient of one example is ever formed.

This is no engine, because it changes the guarantee: see `dpjax.clipping.jl`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import DotAlgorithmPreset, Precision
from jaxtyping import Array, Float

from dpjax import noise, trees
from dpjax.gradients._estimated_norms import jvp_magnitude
from dpjax.gradients.batching import Rows
from dpjax.gradients.jaxprs import equations, own_vjp, rounds_coarsely
from dpjax.gradients.traced import Traced
from dpjax.types import ClippedSum, Clipping, Key, LossFn, Purpose, PyTree

# How many roundings of the largest tangent an inner product may contain.
_ROUNDINGS = 32
# Precisions of products that round no input to fewer bits than its dtype has.
_EXACT = (
    (Precision.HIGHEST, Precision.HIGHEST),
    DotAlgorithmPreset.F32_F32_F32,
    DotAlgorithmPreset.F64_F64_F64,
)


def projected(loss: Traced, rule: Clipping, params: PyTree, rows: Rows, key: Key) -> ClippedSum:
    """The clipped sum of a rule whose norms are estimated.

    Args:
      loss: The loss, computed in float32 or wider, because the sum over examples happens in the
        model's own products.
      rule: From `dpjax.clipping.jl`.
      params: In float32 or wider; the directions have their dtype.
      rows: Examples.
      key: For the directions; one key for all microbatches of a step.
    """
    # Accelerators round the inputs of products by default, differently for norms and sums.
    with jax.default_matmul_precision("highest"):
        eps = _coarsest(loss, params, trees.one_row(rows.batch))
        return _projected(loss, rule, params, rows, key, eps)


def _projected(
    loss: Traced, rule: Clipping, params: PyTree, rows: Rows, key: Key, eps: float
) -> ClippedSum:
    """As `projected`, at the current matmul precision."""

    def losses_of(params: PyTree) -> tuple[Array, Any]:
        return jax.vmap(loss, in_axes=(None, 0))(params, rows.batch)

    # Norms first, in forward mode; then one reverse pass of the weighted loss gives the sum without
    # per-example gradients.
    norms = estimated_norms(loss, rule.projections or 1, params, rows.batch, key, eps)
    real = rows.mask[:, None]
    factors = jnp.where(real, rule.factors(norms), 0) * rows.weights
    losses, pull, aux = jax.vjp(losses_of, params, has_aux=True)
    (value,) = pull(factors[:, 0].astype(losses.dtype))
    # 0 * NaN is NaN: if the sum is not finite, examples are differentiated one by one.
    sound = jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(value)]))
    value = jax.lax.cond(
        sound, lambda: value, lambda: _one_by_one(loss, params, rows.batch, factors[:, 0])
    )
    shown, norms = jnp.where(rows.mask, losses, 0), jnp.where(real, norms, 0)
    return ClippedSum(value, shown, norms, factors, aux)


def estimated_norms(
    loss: LossFn, projections: int, params: PyTree, batch: PyTree, key: Key, eps: float
) -> Float[Array, "batch 1"]:
    """The root mean square of each example's inner products with random directions.

    The estimate is rounded up by a bound on the rounding errors, which are relative to the largest
    tangent. A derivative that cancels has other rounding errors in forward mode than in reverse
    mode, and the reverse pass adds numbers that will cancel to the sums of other examples.

    Args:
      loss: ``loss(params, example) -> (scalar, aux)``.
      projections: How many directions.
      params: Parameters.
      batch: Examples.
      key: Consumed.
      eps: Machine epsilon of the coarsest dtype in the loss, to which the reverse pass rounds
        cotangents; the loss itself may have a wider one.
    """

    def along(j: Array) -> tuple[Float[Array, " batch"], Float[Array, " batch"]]:
        own = trees.step_key(key, Purpose.PROJECTIONS, j)
        direction = trees.random_like(noise.standard_normal, own, params)

        def of_one(example: PyTree) -> tuple[Array, Array]:
            return jvp_magnitude.along(lambda p: loss(p, example)[0], params, direction)

        return jax.vmap(of_one)(batch)

    # One direction after the other: the memory of one forward pass.
    found = jax.lax.map(along, jnp.arange(projections))
    products, largest = (jnp.sqrt(jnp.mean(jnp.square(x), axis=0)) for x in found)
    # The reverse pass sums over the batch, so its rounding error grows with the number of examples.
    roundings = _ROUNDINGS + 2 * products.size
    return (products + roundings * eps * largest)[:, None]


def _one_by_one(
    loss: LossFn, params: PyTree, batch: PyTree, factors: Float[Array, " batch"]
) -> Any:
    """The weighted sum of gradients, in which a non-finite gradient contributes 0."""

    def add(total: PyTree, row: tuple[PyTree, Array]) -> tuple[PyTree, None]:
        example, factor = row
        each = jax.grad(lambda p: loss(p, example)[0])(params)
        good = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(each)]
        kept = jnp.all(jnp.stack(good)) & (factor > 0)

        def onto(t: Array, g: Array) -> Array:
            return t + jnp.where(kept, factor * g, 0).astype(t.dtype)

        return jax.tree.map(onto, total, each), None

    return jax.lax.scan(add, trees.zeros_wide(params), (batch, factors))[0]


def _coarsest(loss: Traced, params: PyTree, example: PyTree) -> float:
    """The machine epsilon of the coarsest dtype in which a loss and its gradient are computed.

    Raises if a loss has no forward mode, or computes in anything narrower than float32.
    """
    program = jax.make_jaxpr(loss)(params, example).jaxpr
    if own := [e.primitive.name for e in equations(program) if own_vjp(e)]:
        raise TypeError(
            f"clipping.jl: the loss uses {own[0]}, whose derivative may have no forward mode, or "
            "another one than backwards, but norms are estimated in forward mode. Define the "
            "derivative with jax.custom_jvp; or clip by exact norms (clipping.flat)."
        )
    # A solver that stops early is not linear, and forwards it stops elsewhere than backwards: the
    # estimate would be the norm of another vector than the one that is summed.
    if any(e.primitive.name == "custom_linear_solve" for e in equations(program)):
        raise TypeError(
            "clipping.jl: the loss solves a linear system (custom_linear_solve, as in "
            "jax.scipy.sparse.linalg.cg), and norms are estimated in forward mode, by another "
            "solve than the gradient's. Clip by exact norms (clipping.flat), or unroll the solver."
        )
    # The rules of `jax.custom_jvp` stand in the gradient alone.
    used = [*equations(program), *equations(loss.gradient(params, example))]
    avals: list[Any] = [jax.typeof(leaf) for leaf in jax.tree.leaves(params)]
    avals += [variable.aval for equation in used for variable in equation.outvars]
    computed = {x.dtype for x in avals if hasattr(x, "dtype")}
    dtypes = [dtype for dtype in computed if jnp.issubdtype(dtype, jnp.inexact)]
    narrow = [str(dtype) for dtype in dtypes if jnp.finfo(dtype).bits < 32]
    narrow += [f"values rounded by {e.primitive.name}" for e in used if rounds_coarsely(e)]
    # On a CPU too, where some are exact: a run may continue on an accelerator.
    given = [e.params["precision"] for e in used if "precision" in e.params]
    narrow += [f"products of precision={p}" for p in given if p not in _EXACT]
    if narrow:
        raise TypeError(
            f"clipping.jl: the loss computes in {narrow[0]}; expected float32 or wider throughout. "
            "One reverse pass sums over the examples, and a narrow dtype rounds that sum by "
            "more than one example may move it. Keep parameters and model in float32, without "
            "reduce_precision or precision= of products; or clip by exact norms (clipping.flat), "
            "which are summed in float32 for every model."
        )
    return max(float(jnp.finfo(dtype).eps) for dtype in dtypes)

# SPDX-License-Identifier: Apache-2.0
"""Clipped sums by estimated norms: forward mode for the norms, one reverse pass for the sum.

The derivative of the losses of a batch along a random direction is the inner product of every
example's gradient with that direction, for the price of a forward pass. It is not an engine,
because it changes the guarantee: see `dpjax.clipping.jl`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dpjax import noise, trees
from dpjax.gradients._jaxprs import equations
from dpjax.gradients.batching import Rows
from dpjax.gradients.traced import Traced
from dpjax.types import ClippedSum, Clipping, Key, Purpose, PyTree


def projected(
    loss: Traced, rule: Clipping, params: PyTree, rows: Rows, start: PyTree, key: Key
) -> ClippedSum:
    """``start`` plus the clipped sum of a rule whose norms are estimated.

    Forward mode gives the norms, and they give a factor f_i for each example. One reverse pass then
    gives the sum of f_i * gradient_i, as the gradient of the sum of f_i * loss_i. ``rows`` are the
    examples of a microbatch, with a mask that is False for padding, and weights of the factors.
    All microbatches of a step have the same key, because all its examples share the directions.
    """

    def losses_of(params: PyTree) -> tuple[Array, Any]:
        return jax.vmap(loss, in_axes=(None, 0))(params, rows.batch)

    # Accelerators round products by default, differently for norms and sums.
    with jax.default_matmul_precision("highest"):
        _require_float32(loss, params, trees.one_row(rows.batch))
        projections = rule.projections or 1  # never None here, which pyright cannot see
        norms = estimated_norms(loss, projections, params, rows.batch, key)
        real = rows.mask[:, None]
        factors = jnp.where(real, rule.factors(norms), 0) * rows.weights  # [batch, groups]
        factors_of_examples = factors[:, 0]  # a rule with estimated norms has one group
        losses, pull_back, aux = jax.vjp(losses_of, params, has_aux=True)
        (clipped_sum,) = pull_back(factors_of_examples.astype(losses.dtype))
        # An example with a NaN has the factor 0, but 0 * NaN is NaN in the sum. If the sum is not
        # finite, examples are differentiated one by one, and such gradients are left out.
        clipped_sum = jax.lax.cond(
            _is_finite(clipped_sum),
            lambda: clipped_sum,
            lambda: _one_by_one(loss, params, rows.batch, factors_of_examples),
        )
    value = jax.tree.map(jnp.add, start, clipped_sum)
    losses = jnp.where(rows.mask, losses, 0)
    norms = jnp.where(real, norms, 0)
    return ClippedSum(value, losses, norms, factors, aux)


def _is_finite(tree: PyTree) -> Array:
    """Whether all numbers of a tree are finite."""
    finite = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]
    return jnp.all(jnp.stack(finite))


def estimated_norms(
    loss: Traced, projections: int, params: PyTree, batch: PyTree, key: Key
) -> Float[Array, "batch 1"]:
    """The root mean square of each example's inner products with random directions.

    The square of ``<gradient, v>`` has the mean ``norm(gradient) ** 2`` over standard normal
    directions ``v``, and ``<gradient, v>`` is the derivative of the loss along ``v``.
    """

    def products_with(number: Array) -> Float[Array, " batch"]:
        """The inner products with direction number ``number``, which all examples share."""
        direction_key = trees.step_key(key, Purpose.PROJECTIONS, number)
        direction = trees.random_like(noise.standard_normal, direction_key, params)

        def product(example: PyTree) -> Array:
            def loss_of(params: PyTree) -> Array:
                value, _ = loss(params, example)
                return value

            _, derivative = jax.jvp(loss_of, (params,), (direction,))
            return derivative

        return jax.vmap(product)(batch)

    # A loop over the directions takes the memory of one forward pass; `vmap` takes that of all.
    products = jax.lax.map(products_with, jnp.arange(projections))  # [projections, batch]
    return jnp.sqrt(jnp.mean(jnp.square(products), axis=0))[:, None]  # for the one group


def _one_by_one(
    loss: Traced, params: PyTree, batch: PyTree, factors: Float[Array, " batch"]
) -> Any:
    """The weighted sum of gradients, in which a non-finite gradient contributes 0."""

    def add(total: PyTree, row: tuple[PyTree, Array]) -> tuple[PyTree, None]:
        example, factor = row
        gradient = jax.grad(lambda params: loss(params, example)[0])(params)
        counts = _is_finite(gradient) & (factor > 0)

        def add_leaf(total: Array, gradient: Array) -> Array:
            return total + jnp.where(counts, factor * gradient, 0).astype(total.dtype)

        return jax.tree.map(add_leaf, total, gradient), None

    total, _ = jax.lax.scan(add, trees.zeros_wide(params), (batch, factors))
    return total


def _require_float32(loss: Traced, params: PyTree, example: PyTree) -> None:
    """Raises if a loss computes in anything narrower than float32.

    One reverse pass sums over the examples, and a narrow dtype rounds that sum.
    """
    avals: list[Any] = list(map(jax.typeof, jax.tree.leaves(params)))
    for program in (jax.make_jaxpr(loss)(params, example).jaxpr, loss.gradient(params, example)):
        for equation in equations(program):
            avals += [variable.aval for variable in equation.outvars]
    dtypes = {aval.dtype for aval in avals if hasattr(aval, "dtype")}
    floats = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)]
    narrow = [str(dtype) for dtype in floats if jnp.finfo(dtype).bits < 32]
    if narrow:
        raise TypeError(
            f"clipping.jl: the loss computes in {narrow[0]}; expected float32 or wider. "
            "Clip by exact norms (clipping.flat), which are summed in float32 for every model."
        )

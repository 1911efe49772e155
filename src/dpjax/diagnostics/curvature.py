# SPDX-License-Identifier: Apache-2.0
"""Sharpness, which bounds by how much the noise of a step raises the loss, to second order."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dpjax import trees
from dpjax.diagnostics.vectors import length
from dpjax.types import Key, LossFn, Purpose, PyTree


class Sharpness(NamedTuple):
    """The largest singular value of a Hessian, with its singular vector."""

    value: Float[Array, ""]
    """The singular value; 0 if the Hessian is zero."""
    direction: PyTree
    """The singular vector, of the parameters' structure and of length 1."""
    iterations: Int[Array, ""]
    """The number of Hessian-vector products."""


def sharpness(
    loss: LossFn,
    params: PyTree,
    batch: PyTree,
    *,
    key: Key,
    iterations: int = 100,
    tolerance: float = 1e-4,
) -> Sharpness:
    r"""The largest singular value of the Hessian of the mean loss, by power iteration.

    $$ v \leftarrow Hv / \|Hv\|, \qquad \|Hv\| \to \max_k |\lambda_k| $$

    A product with the Hessian is the derivative of a gradient along $v$; the matrix is not
    materialised. A Hessian is symmetric, so singular values are absolute values of eigenvalues.

    Args:
      loss: ``loss(params, example) -> scalar``, twice differentiable.
      params: The parameters at which the Hessian is taken.
      batch: Examples, on leading axes.
      key: Draws the first direction; consumed.
      iterations: The largest number of products.
      tolerance: Iteration stops when the relative change of the value is smaller. If the two
        largest singular values are nearly equal, it stops early, and the value is too small.

    Example:
      >>> loss = lambda w, x: 0.5 * x * (w[0] ** 2 - 3 * w[1] ** 2)
      >>> sharpest = sharpness(loss, jnp.ones(2), jnp.ones(4), key=jax.random.key(0))
      >>> round(float(sharpest.value), 2)
      3.0

    References:
      Golub and Van Loan, "Matrix Computations", 2013, section 8.2.
    """
    step = jax.jit(partial(_step, loss))

    def going(state: tuple[Any, ...]) -> Array:
        _, value, before, count = state
        return (count < iterations) & (jnp.abs(value - before) > tolerance * value)

    def body(state: tuple[Any, ...]) -> tuple[Any, ...]:
        direction, before, _, count = state
        return *step(params, batch, direction), before, count + 1

    first = trees.random_like(jax.random.normal, jax.random.fold_in(key, Purpose.MEASURES), params)
    size = length(first)
    first = jax.tree.map(lambda v, p: (v / size).astype(p.dtype), first, params)
    state = body((first, jnp.zeros_like(size), jnp.zeros_like(size), jnp.int32(0)))
    # In a compiled loop XLA on CPU makes gradients of convolutions many times slower.
    while going(state):
        state = body(state)
    direction, value, _, steps = state
    return Sharpness(value, direction, steps)


def _step(loss: LossFn, params: PyTree, batch: PyTree, v: PyTree) -> tuple[PyTree, Array]:
    """The direction of a Hessian-vector product, and its length."""

    def mean(params: PyTree) -> Array:
        return jnp.mean(jax.vmap(loss, (None, 0))(params, batch))

    # Forward over reverse: the memory of one gradient and one tangent.
    moved = jax.jvp(jax.grad(mean), (params,), (v,))[1]
    size = length(moved)
    divisor = jnp.where(size > 0, size, 1)
    # A Hessian of zeros keeps the direction.
    unit = jax.tree.map(lambda x, y: jnp.where(size > 0, x / divisor, y).astype(x.dtype), moved, v)
    return unit, size

# SPDX-License-Identifier: Apache-2.0
"""Sharpness, which bounds the increase of the loss by the noise of a step, to second order."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

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

    A product with the Hessian $H$ is the derivative of a gradient along $v$; the matrix is not
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
    # The purpose keeps this draw apart from others of the same key.
    start = trees.random_like(jax.random.normal, jax.random.fold_in(key, Purpose.MEASURES), params)
    start_length = length(start)
    # `jax.jvp` takes a tangent only in the dtype of its parameter.
    direction = jax.tree.map(lambda v, p: (v / start_length).astype(p.dtype), start, params)
    previous = jnp.zeros_like(start_length)  # the value of the iteration before; 0 before the first
    direction, value = step(params, batch, direction)
    count = 1
    # The loop is Python's, because XLA on CPU makes gradients of convolutions many times slower in
    # a compiled one.
    while count < iterations and jnp.abs(value - previous) > tolerance * value:
        previous = value
        direction, value = step(params, batch, direction)
        count += 1
    return Sharpness(value, direction, jnp.int32(count))


def _step(loss: LossFn, params: PyTree, batch: PyTree, v: PyTree) -> tuple[PyTree, Array]:
    """The direction of a Hessian-vector product, and its length."""

    def mean(params: PyTree) -> Array:
        return jnp.mean(jax.vmap(loss, (None, 0))(params, batch))

    # Forward over reverse mode needs the memory of one gradient and one tangent.
    _, product = jax.jvp(jax.grad(mean), (params,), (v,))
    value = length(product)
    divisor = jnp.where(value > 0, value, 1)

    def unit(of_product: Array, of_v: Array) -> Array:
        # A Hessian of zeros keeps the direction.
        return jnp.where(value > 0, of_product / divisor, of_v).astype(of_product.dtype)

    return jax.tree.map(unit, product, v), value

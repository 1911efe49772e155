# SPDX-License-Identifier: Apache-2.0
"""The neural tangent kernel of private training, and two senses in which it is positive.

Clipped, it need not be symmetric or positive, by which convergence_calibration_2023 explains why
training with a small bound can fail.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Num

from dpjax import trees
from dpjax.types import Partition, PyTree


class Definiteness(NamedTuple):
    r"""The asymmetry of a square matrix $A$, and two senses in which it can be positive."""

    asymmetry: float
    r"""$\|A - A^\top\| / 2\|A\|$: 0 for a symmetric matrix, 1 for an antisymmetric one."""
    quadratic: float
    r"""The smallest $x^\top A x$ over all $x$ of length 1."""
    eigenvalue: float
    """The smallest real part of an eigenvalue."""
    symmetric: bool
    """Whether the asymmetry is at most the tolerance."""
    positive_quadratic: bool
    """Whether the quadratic form is nonnegative, up to the tolerance."""
    positive_eigenvalues: bool
    """Whether all eigenvalues are real and nonnegative, up to the tolerance."""


def ntk(
    function: Callable[[PyTree, Any], Array],
    params: PyTree,
    inputs: PyTree,
    factors: Float[ArrayLike, "batch groups"] | None = None,
    partition: Partition | None = None,
) -> Float[Array, "rows rows"]:
    r"""The neural tangent kernel of a batch, without or with clipping.

    $$ H = J J^\top, \quad HC = H \,\mathrm{diag}(C_1, \dots, C_n), \quad
       \sum_r H_r C_r \text{ for groups } r $$

    Row $i$ of $J$ is the gradient of the output for input $i$. For a network of several outputs,
    each input has one row for each output, and these rows are neighbours.

    Args:
      function: ``function(params, input)`` gives the output for one input.
      params: The parameters at which gradients are taken.
      inputs: A batch, on leading axes; a few hundred, because all gradients are in memory together.
      factors: The clipping factors of each example and group; without them the result is $H$.
      partition: The group of each leaf; one group by default.

    Example:
      >>> inputs = jnp.array([[1.0, 0.0], [1.0, 1.0]])
      >>> ntk(lambda w, x: w @ x, jnp.zeros(2), inputs)
      Array([[1., 1.],
             [1., 2.]], dtype=float32)

    References:
      Bu, Wang, Dai and Long, "On the Convergence and Calibration of Deep Learning with
      Differential Privacy", 2023, equations 3.1, 4.3 and 4.4.
    """
    size = trees.leading_size(inputs, name="ntk inputs")
    rows = jax.vmap(jax.jacrev(lambda p, x: jnp.ravel(function(p, x))), (None, 0))(params, inputs)
    leaves = [
        leaf.reshape(size * leaf.shape[1], math.prod(leaf.shape[2:])).astype(trees.wide(leaf.dtype))
        for leaf in jax.tree.leaves(rows)
    ]
    groups = partition.assign(params) if partition else (0,) * len(leaves)
    # Without factors the kernel is that of plain gradient descent, symmetric and positive.
    columns = jnp.ones((size, max(groups) + 1)) if factors is None else jnp.asarray(factors)
    wide = jnp.repeat(columns, leaves[0].shape[0] // size, axis=0)
    # The columns alone, by the factor of the example whose gradient moves the weights: so the
    # clipped kernel is not symmetric.
    products = (jnp.matmul(j, j.T, precision="highest") for j in leaves)
    return sum((h * wide[:, g] for h, g in zip(products, groups, strict=True)), jnp.zeros(()))


def definiteness(matrix: Num[ArrayLike, "n n"], tolerance: float = 1e-5) -> Definiteness:
    r"""Measures the symmetry and the two positivities of a square matrix, in float64.

    $A$ is positive in quadratic form if $x^\top A x \ge 0$ for all $x$: the symmetric part has no
    negative eigenvalue. $A$ is positive in eigenvalues if its eigenvalues are real and
    nonnegative. $HC$ of flat clipping keeps the second property and may lose the first; with a
    group for each layer it may lose both.

    Args:
      matrix: $A$.
      tolerance: Smaller numbers, relative to the norm of $A$, count as 0.

    Example:
      >>> kernel = definiteness(jnp.array([[1.0, 0.1], [1.0, 0.2]]))
      >>> kernel.symmetric, kernel.positive_quadratic, kernel.positive_eigenvalues
      (False, False, True)

    References:
      Bu, Wang, Dai and Long, 2023, definition 4.2, theorem 1 and appendix A.
    """
    a = np.asarray(matrix, np.float64)
    # A zero matrix is symmetric and positive; 1e-300 only prevents the division by 0.
    asymmetry = float(np.linalg.norm(a - a.T) / (2 * max(np.linalg.norm(a), 1e-300)))
    quadratic = float(np.linalg.eigvalsh((a + a.T) / 2)[0])
    # Of the matrix itself, which may have complex ones: the loss falls by their real parts, and the
    # quadratic form can be negative although these are positive.
    eigenvalues = np.linalg.eigvals(a)
    eigenvalue, turning = float(eigenvalues.real.min()), float(np.abs(eigenvalues.imag).max())
    floor = -tolerance * max(float(np.linalg.norm(a, 2)), 1e-300)
    return Definiteness(
        asymmetry,
        quadratic,
        eigenvalue,
        asymmetry <= tolerance,
        quadratic >= floor,
        eigenvalue >= floor and turning <= -floor,
    )

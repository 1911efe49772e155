# SPDX-License-Identifier: Apache-2.0
"""The neural tangent kernel of private training, and two senses in which it is positive.

With clipping it need not be symmetric or positive. convergence_calibration_2023 explains by this
why training with a small bound can fail.
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

    Row $i$ of $J$ is the gradient of the output for input $i$, which clipping scales by $C_i$. With
    groups of leaves, $H_r$ is the kernel of the gradients of group $r$, and $C_r$ has its factors
    on the diagonal. For a network of several outputs, each input has one row for each output, and
    these rows are neighbours.

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
    jacobian = jax.jacrev(lambda params, x: jnp.ravel(function(params, x)))
    # The blocks of J, one for each leaf of the parameters: [inputs, outputs, *leaf].
    blocks = jax.tree.leaves(jax.vmap(jacobian, (None, 0))(params, inputs))
    groups = (0,) * len(blocks)
    if partition is not None:
        groups = partition.assign(params)
    if factors is None:
        factors = jnp.ones((size, max(groups) + 1))
    outputs = blocks[0].shape[1]
    # The factor of each row of J, [rows, groups].
    row_factors = jnp.repeat(jnp.asarray(factors), outputs, axis=0)
    # J J^T is the sum of B B^T over the blocks B of J.
    kernel = jnp.zeros(())
    for block, group in zip(blocks, groups, strict=True):
        rows = block.reshape(size * outputs, math.prod(block.shape[2:]))
        rows = rows.astype(trees.wide(block.dtype))  # [rows of J, numbers of the leaf]
        products = jnp.matmul(rows, rows.T, precision="highest")
        # Only the columns of the kernel are scaled, by the factor of the example whose gradient
        # moves the weights. So the clipped kernel is not symmetric.
        kernel = kernel + products * row_factors[:, group]
    return kernel


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
    # These eigenvalues of the matrix itself may be complex. The loss falls by their real parts,
    # which can be positive although the quadratic form is negative.
    eigenvalues = np.linalg.eigvals(a)
    real = float(eigenvalues.real.min())
    imaginary = float(np.abs(eigenvalues.imag).max())
    floor = -tolerance * max(float(np.linalg.norm(a, 2)), 1e-300)
    return Definiteness(
        asymmetry=asymmetry,
        quadratic=quadratic,
        eigenvalue=real,
        symmetric=asymmetry <= tolerance,
        positive_quadratic=quadratic >= floor,
        positive_eigenvalues=real >= floor and imaginary <= -floor,
    )

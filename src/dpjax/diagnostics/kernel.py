# SPDX-License-Identifier: Apache-2.0
"""The neural tangent kernel of private training, and in which sense it is positive.

In the limit of small steps the loss falls along H, the Gram matrix of the outputs'
gradients; clipping multiplies it by a diagonal, HC, or a sum of such products, and what
was symmetric and positive need not stay so. That is how convergence_calibration_2023
explains why a small bound can make training fail.

Gradients of all inputs are held at once: a few hundred, not a data set. This file must
never know how factors were made.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dpjax import trees
from dpjax.types import Partition, PyTree


class Definiteness(NamedTuple):
    """How far a square matrix is from symmetric, and the two ways of being positive.

    The two agree for a symmetric matrix and not otherwise; either may hold alone.
    """

    asymmetry: float
    """Norm of A - A^T as a part of twice the norm of A: 0 symmetric, 1 antisymmetric."""
    quadratic: float
    """The smallest x^T A x of all x of length 1."""
    eigenvalue: float
    """The smallest real part of an eigenvalue."""
    symmetric: bool
    positive_quadratic: bool
    positive_eigenvalues: bool


def ntk(
    function: Callable[[PyTree, Any], Array],
    params: PyTree,
    inputs: PyTree,
    factors: Float[Array, "batch groups"] | None = None,
    partition: Partition | None = None,
) -> Float[Array, "rows rows"]:
    r"""The neural tangent kernel of a batch, and what clipping makes of it.

    $$ H = J J^\top, \quad HC = H \,\mathrm{diag}(C_1, \dots, C_n), \quad
       \sum_r H_r C_r \text{ for groups } r $$

    Row i of J is the gradient of the output for input i. A network of several outputs
    has as many rows for each input, next to each other.

    Args:
      function: ``function(params, input)`` gives the output for one input.
      params: Where the gradients are taken.
      inputs: A batch, on leading axes.
      factors: The clipping factors of each example and group; without them, H itself.
      partition: Which group each leaf is in; one group by default.

    Returns:
      The matrix: H (symmetric, positive semi-definite), HC or the sum over groups.

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
    columns = jnp.ones((size, max(groups) + 1)) if factors is None else factors
    if not size or columns.shape != (size, max(groups) + 1):
        raise ValueError(
            f"diagnostics.ntk: got factors of shape {columns.shape} for {size} inputs and "
            f"{max(groups) + 1} groups; expected one for each input and group, as in "
            "ClippedSum.factors of the same batch, the rule's partition, and at least one input."
        )
    wide = jnp.repeat(columns, leaves[0].shape[0] // size, axis=0)
    return sum(
        (
            jnp.matmul(j, j.T, precision="highest") * wide[:, g]
            for j, g in zip(leaves, groups, strict=True)
        ),
        jnp.zeros(()),
    )


def definiteness(matrix: Float[Array, "n n"], tolerance: float = 1e-5) -> Definiteness:
    r"""Measures the symmetry and the two positivities of a square matrix, in float64.

    Positive in quadratic form: $x^\top A x \ge 0$ for all x, that is, the symmetric
    part has no negative eigenvalue. Positive in eigenvalues: those of A itself are real and
    none is negative. HC of flat clipping keeps the second and may lose the first; a group
    for each layer may lose both.

    Args:
      matrix: A.
      tolerance: What counts as 0, as a part of the norm of A.

    Returns:
      A `Definiteness`, of plain numbers.

    Example:
      >>> found = definiteness(jnp.array([[1.0, 0.1], [1.0, 0.2]]))
      >>> found.symmetric, found.positive_quadratic, found.positive_eigenvalues
      (False, False, True)

    References:
      Bu, Wang, Dai and Long, 2023, definition 4.2, theorem 1 and appendix A.
    """
    a = np.asarray(matrix, np.float64)
    if a.ndim != 2 or a.shape[0] != a.shape[1] or not a.size or not np.isfinite(a).all():
        raise ValueError(
            f"diagnostics.definiteness: got shape {a.shape}; expected a square matrix of finite "
            "numbers. A NaN usually comes from an example whose gradient is not finite."
        )
    scale = max(float(np.linalg.norm(a, 2)), 1e-300)
    asymmetry = float(np.linalg.norm(a - a.T) / (2 * max(np.linalg.norm(a), 1e-300)))
    quadratic = float(np.linalg.eigvalsh((a + a.T) / 2)[0])
    eigenvalues = np.linalg.eigvals(a)
    eigenvalue, turning = float(eigenvalues.real.min()), float(np.abs(eigenvalues.imag).max())
    floor = -tolerance * scale
    return Definiteness(
        asymmetry,
        quadratic,
        eigenvalue,
        asymmetry <= tolerance,
        quadratic >= floor,
        eigenvalue >= floor and turning <= -floor,
    )

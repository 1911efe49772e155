# SPDX-License-Identifier: Apache-2.0
r"""Tree aggregation with Honaker's full estimator, as a lower-triangular matrix.

The best estimator of the steps' values uses all nodes of the tree, also nodes that end later. But
the estimator's noise is Gaussian with precision $H^T H$, where $H$ has a row of ones for each node,
and $C^{-1} Z$ has the same distribution for the lower-triangular $C$ with $C^T C = H^T H$. The
recursion over the tree gives its rows in logarithmic time and memory.

In a node, noise sums have the variance $V = 1 / (1 + 1 / (V_{left} + V_{right}))$; a leaf has 1.
Node ``n`` of level ``l``, counted from the leaves, holds the steps ``n << l`` to
``((n + 1) << l) - 1``; a right sibling has an odd number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from scipy.linalg import solve_triangular

from dpjax import checks
from dpjax.strategies import _streams
from dpjax.strategies._series import Matrix, Series
from dpjax.strategies._workload import Workload
from dpjax.strategies.participation import Participation
from dpjax.strategies.strategy import LARGEST_MATRIX, Strategy
from dpjax.types import PyTree


@dataclass(frozen=True, kw_only=True)
class Tree(Strategy):
    """A tree with a power of two of leaves; the leaves after the run have no data and no noise."""

    kind: ClassVar[str] = "tree"

    @property
    def remembers(self) -> int:
        """The levels below the root: the stream keeps the noise sum of a left sibling on each."""
        return (self.steps - 1).bit_length()

    def column_squares(self) -> Series:
        """The number of levels, since each step is in one node of each."""
        return np.full(self.steps, float(self.remembers + 1))

    def matrix(self) -> Matrix:
        r"""C: row t is the recursion of `_next`, solved for the normal number $z_t$.

        $$ z_t = \sqrt{p_t} \, \Bigl(x_t - \sum_l w_l S_l\Bigr) $$

        with the noise $x_t$ of step t, its precision $p_t$, the noise sum $S_l$ of the left sibling
        on level l, and its weight $w_l$ from `_weights`.
        """
        c = np.zeros((self.steps, self.steps))
        for t in range(self.steps):
            weights, precision = self._weights(t, numpy=np)
            c[t, t] = math.sqrt(precision)
            for level in range(self.remembers):
                node = t >> level
                if node & 1:  # a right sibling, whose left sibling has ended
                    # All steps of the left sibling have its weight.
                    first = (node - 1) << level
                    end = first + (1 << level)
                    c[t, first:end] = -weights[level] * c[t, t]
        return c

    def inverse(self) -> Matrix:
        """The inverse by forward substitution."""
        return solve_triangular(self.matrix(), np.eye(self.steps), lower=True)

    def squares(self, workload: Workload) -> Series:
        """The squared norm of each row, computed from the full matrix."""
        if self.steps > LARGEST_MATRIX:
            raise ValueError(f"strategy.errors of a tree: at most {LARGEST_MATRIX} steps.")
        rows = workload.applied(self.inverse())
        return np.sum(rows**2, axis=1)

    def squared_bounds(self, participation: Participation) -> Iterator[float]:
        """Adds the bound by the number of the pattern's steps in each node.

        On a level, the squares of these numbers sum to at most the number of all steps times the
        most steps in one node.
        """
        yield from super().squared_bounds(participation)
        most = participation.within(self.steps)
        sizes = [min(2**level, self.steps) for level in range(self.remembers + 1)]
        yield float(sum(most * participation.within(size) for size in sizes))

    def _next(self, z: PyTree, memory: PyTree, step: Any) -> tuple[PyTree, PyTree]:
        r"""$x_t = z_t / \sqrt{p_t} + \sum_l w_l S_l$, as in `matrix`.

        The memory of a leaf of the parameters, ``[levels, ...]``, has on each level the noise sum
        of the last left sibling that has ended.
        """
        levels = self.remembers
        step = jnp.asarray(step)
        weights, precision = self._weights(step, numpy=jnp)
        one_or_nan = _streams.one_within_run(step, self.steps)
        # A step ends a node on as many levels above it as its number has trailing ones. The largest
        # of these nodes is a left sibling, whose sum is kept in the slot of its level: this noise
        # plus the sums of the left siblings within it. The last leaf of the tree ends the root
        # instead; JAX clamps its slot, and no later step reads it.
        ended = jnp.cumprod((step >> np.arange(levels)) & 1)
        slot = jnp.sum(ended)

        def next_noise(leaf: Array, sums: Array) -> tuple[Array, Array]:
            # The precision is float64 under jax_enable_x64, and the noise keeps the memory's dtype.
            noise = leaf.astype(sums.dtype) / jnp.sqrt(precision).astype(sums.dtype)
            if not levels:  # a run of one step has no siblings
                return noise * one_or_nan, sums
            noise = (noise + _streams.weighted(weights, sums)) * one_or_nan
            node_sum = noise + _streams.weighted(ended, sums)
            return noise, _streams.replaced(sums, node_sum, slot)

        return _streams.mapped(next_noise, z, memory)

    def _variances(self) -> tuple[Series, Series]:
        """V on each level: of a full node, and of the last node that is not empty."""
        full = [1.0]
        last = [1.0]
        for level in range(self.remembers):
            children = last[-1]
            if (self.steps - 1) >> level & 1:  # the last node is a right sibling
                children = full[-1] + last[-1]
            last.append(1 / (1 + 1 / children))
            full.append(1 / (1 + 1 / (2 * full[-1])))
        return np.array(full), np.array(last)

    def _weights(self, step: Any, numpy: Any) -> tuple[Any, Any]:
        r"""The mean of a step's noise as weights of the left siblings' sums, and its precision.

        Both are conditional on the noise of all steps before, which the sums of left siblings hold.
        The loop follows the nodes that hold the step, from the root down to the leaf. If the sum of
        a node has the precision p, and the sum of a child's sibling has the variance v, then the
        sum of the child has the precision $1 / (1 / p + v)$ from its parent, and 1 from its own row
        of $H$, which pulls its mean towards 0.

        ``numpy`` is NumPy, or `jax.numpy` for a traced step.
        """
        full, last = self._variances()
        weights: list[Any] = [0.0] * self.remembers
        precision: Any = 1.0  # of the root's sum, from its row of H
        for level in reversed(range(self.remembers)):
            node = step >> level
            is_right = node & 1
            last_node = (self.steps - 1) >> level
            # The node to the right is full, or the last one, or after the run with variance 0.
            variance_of_right = numpy.where(
                node + 1 < last_node, full[level], last[level] * (node + 1 == last_node)
            )
            # The sum of a left sibling is known, and that of a right one is still random.
            sibling_variance = numpy.where(is_right, 0.0, variance_of_right)
            from_parent = precision / (1 + precision * sibling_variance)
            share = from_parent / (from_parent + 1)  # the row of H multiplies the mean by it
            # The node's sum is the parent's sum minus the sibling's. So the sum of a left sibling
            # has a negative weight.
            weights = [weight * share for weight in weights]
            weights[level] = -share * is_right
            precision = from_parent + 1
        # The matrix is computed in float64, and the stream runs in float32.
        dtype = np.float64 if numpy is np else np.float32
        return numpy.asarray(weights, dtype=dtype), precision


def tree(steps: int) -> Strategy:
    r"""Tree aggregation with the variance of Honaker's full estimator.

    Each node of a binary tree over the steps has noise of its own, and the estimate of a prefix sum
    combines all nodes with the least variance (the online estimator uses only nodes that have
    ended). This noise is $C^{-1} Z$ of a lower-triangular C. The sensitivity to an example that
    takes part once in T steps is $\sqrt{1 + \lceil \log_2 T \rceil}$.

    Example:
      >>> strategy = tree(steps=8)
      >>> (strategy.matrix().T @ strategy.matrix()).round(6)[0]
      array([4., 3., 2., 2., 1., 1., 1., 1.])

    References:
      Honaker, "Efficient use of differentially private binary trees", 2015.
      Kairouz et al., "Practical and private (deep) learning without sampling or shuffling", 2021.
      Denisov et al., "Improved differential privacy for SGD via optimal private linear operators on
      adaptive streams", 2022: lower-triangular factors lose nothing.
    """
    return Tree(name="tree", steps=checks.whole("strategies.tree", "steps", steps))

# SPDX-License-Identifier: Apache-2.0
r"""Tree aggregation with Honaker's full estimator, as a lower-triangular matrix.

The best estimator of the steps' values uses all nodes of the tree, also nodes that end later. But
the estimator's noise is Gaussian with precision $H^T H$, where $H$ has a row of ones for each node,
and $C^{-1} Z$ has the same distribution for the lower-triangular $C$ with $C^T C = H^T H$. The
recursion over the tree gives its rows in logarithmic time and memory.

In a node, noise sums have the variance $V = 1 / (1 + 1 / (V_{left} + V_{right}))$; a leaf has 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy.linalg import solve_triangular

from dpjax import checks
from dpjax.strategies import _streams
from dpjax.strategies._workload import Workload
from dpjax.strategies.participation import Participation
from dpjax.strategies.strategy import LARGEST_MATRIX, Strategy
from dpjax.types import PyTree


@dataclass(frozen=True, kw_only=True)
class Tree(Strategy):
    """A tree with the next power of two of leaves; after the run they have no data and no noise."""

    kind: ClassVar[str] = "tree"

    @property
    def remembers(self) -> int:
        """The noise sum of a left sibling on each level: the levels below the root."""
        return (self.steps - 1).bit_length()

    def column_squares(self) -> Float[np.ndarray, " steps"]:
        """Each step is in one node of each level."""
        return np.full(self.steps, float(self.remembers + 1))

    def matrix(self) -> Float[np.ndarray, "steps steps"]:
        """Row t: the weights of left siblings, spread over their steps."""
        c = np.zeros((self.steps, self.steps))
        for t in range(self.steps):
            weights, precision = self._weights(t, np)
            c[t, t] = math.sqrt(precision)
            for level in range(self.remembers):
                first = ((t >> level) - 1) << level
                if t >> level & 1:
                    c[t, first : first + (1 << level)] = -weights[level] * c[t, t]
        return c

    def inverse(self) -> Float[np.ndarray, "steps steps"]:
        """By forward substitution."""
        return solve_triangular(self.matrix(), np.eye(self.steps), lower=True)

    def squares(self, of: Workload) -> Float[np.ndarray, " steps"]:
        """By the matrix."""
        if self.steps > LARGEST_MATRIX:
            raise ValueError(f"strategy.errors of a tree: at most {LARGEST_MATRIX} steps.")
        return np.sum(of.applied(self.inverse()) ** 2, axis=1)

    def squared_bounds(self, participation: Participation) -> Iterator[float]:
        """Also by the squared counts of a pattern in all nodes: on a level, at most their count."""
        yield from super().squared_bounds(participation)
        most = participation.within(self.steps)
        sizes = [min(2**level, self.steps) for level in range(self.remembers + 1)]
        yield float(sum(most * participation.within(size) for size in sizes))

    def _next(self, z: PyTree, memory: PyTree, step: Any) -> tuple[PyTree, PyTree]:
        """The noise of a leaf, given the sums of the left siblings above it."""
        levels, step = self.remembers, jnp.asarray(step)
        weights, precision = self._weights(step, jnp)
        scale = _streams.sound(step, self.steps)
        # A step ends the nodes on as many levels as its number has trailing ones.
        full = jnp.cumprod((step >> np.arange(levels)) & 1)
        ended = jnp.sum(full)

        def one(leaf: Array, sums: Array) -> tuple[Array, Array]:
            # NumPy's float64 in the precision would widen the noise under jax_enable_x64.
            noise = leaf.astype(sums.dtype) / jnp.sqrt(precision).astype(sums.dtype)
            if not levels:
                return noise * scale, sums
            noise = (noise + _streams.weighted(weights, sums)) * scale
            return noise, _streams.replaced(sums, noise + _streams.weighted(full, sums), ended)

        return _streams.mapped(one, z, memory)

    def _variances(self) -> tuple[Float[np.ndarray, " levels"], Float[np.ndarray, " levels"]]:
        """V on each level: of a full node, and of the last node that is not empty."""
        full, last = [1.0], [1.0]
        for level in range(self.remembers):
            right = (self.steps - 1) >> level & 1
            last.append(1 / (1 + 1 / (full[-1] + last[-1] if right else last[-1])))
            full.append(1 / (1 + 1 / (2 * full[-1])))
        return np.array(full), np.array(last)

    def _weights(self, step: Any, numpy: Any) -> tuple[Any, Any]:
        """The mean of a leaf's noise as weights of the left siblings' sums, and its precision."""
        full, last = self._variances()
        weights: list[Any] = [0.0] * self.remembers
        a: Any = 1.0  # from the root down, the precision of a node's sum given the steps before
        for level in reversed(range(self.remembers)):
            node = step >> level
            is_right = node & 1
            # The steps of a right sibling are still free; a left sibling's are known.
            end = (self.steps - 1) >> level
            sibling = numpy.where(node + 1 < end, full[level], last[level] * (node + 1 == end))
            free = a / (1 + a * numpy.where(is_right, 0.0, sibling))
            shrunk = free / (free + 1)
            weights = [weight * shrunk for weight in weights]
            weights[level] = -shrunk * is_right
            a = free + 1
        return numpy.asarray(weights, dtype=np.float64 if numpy is np else np.float32), a


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

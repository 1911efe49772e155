# SPDX-License-Identifier: Apache-2.0
r"""Toeplitz strategies: a lower-triangular matrix with constant diagonals, or its inverse.

`Toeplitz` has the coefficients of $C$ and remembers its last noises (forward substitution).
`InverseToeplitz` has the coefficients of $C^{-1}$ and remembers the last normal numbers. Both
keep one array less than they have coefficients.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax.lax import optimization_barrier
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

from dpjax import checks
from dpjax.strategies import _series, _streams
from dpjax.strategies.participation import Participation
from dpjax.strategies.sensitivity import of_bands
from dpjax.strategies.strategy import LARGEST_MATRIX, Strategy, narrowed
from dpjax.types import PyTree


@dataclass(frozen=True, kw_only=True)
class Toeplitz(Strategy):
    r"""$C = T$ with $T_{ij} = c_{i-j}$; normalized, $T D^{-1}$ with $D$ the norms of columns."""

    values: tuple[float, ...]
    normalized: bool = False
    kind: ClassVar[str] = "toeplitz"

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", _checked("strategies.toeplitz", self.steps, self.values))

    @property
    def bands(self) -> int:
        """As many as there are coefficients."""
        return len(self.values)

    @property
    def remembers(self) -> int:
        """The last noises."""
        return len(self.values) - 1

    @property
    def coefficients(self) -> Float[np.ndarray, " bands"] | None:
        """None if normalized: the columns of that matrix are multiples of one another only."""
        return None if self.normalized else np.array(self.values)

    def column_squares(self) -> Float[np.ndarray, " steps"]:
        """The last columns have fewer terms, unless normalized."""
        return np.ones(self.steps) if self.normalized else super().column_squares()

    def matrix(self) -> Float[np.ndarray, "steps steps"]:
        """C."""
        plain = _series.lower_triangular(_series.padded(self.values, self.steps))
        scales = self._scales()
        return plain if scales is None else plain / scales

    def squared_bounds(self, participation: Participation) -> Iterator[float]:
        """By the products of columns in the bands."""
        if self.steps * self.bands <= LARGEST_MATRIX**2:
            yield of_bands(self._products(), participation)

    def _products(self) -> list[np.ndarray]:
        """The magnitudes of $(C^T C)_{i,i+d}$ for all distances d at which columns overlap."""
        steps, values = self.steps, np.asarray(self.values)
        # The last columns are cut off at the bottom: how many terms each has.
        terms = np.minimum(len(values), steps - np.arange(steps))
        squares = np.cumsum(values**2)[terms - 1] if self.normalized else np.ones(steps)
        diagonals = []
        for distance in range(len(values)):
            sums = np.cumsum(values[distance:] * values[: len(values) - distance])
            products = sums[terms[: steps - distance] - 1 - distance]
            norms = squares[: steps - distance] * squares[distance:]
            diagonals.append(np.abs(products) / np.sqrt(norms))
        return diagonals

    def _next(self, z: PyTree, memory: PyTree, step: Any) -> tuple[PyTree, PyTree]:
        r"""Row t of $T x = z$, solved for $x_t$: $x_t = (z_t - \sum_k c_k x_{t-k}) / c_0$."""
        size, values = self.remembers, jnp.asarray(self.values, jnp.float32)
        scale = _streams.sound(step, self.steps)
        if self.normalized:
            norms = jnp.sqrt(jnp.cumsum(values**2))
            # The column of step t ends with the run, after steps - t terms.
            scale = scale * norms[jnp.clip(self.steps - 1 - jnp.asarray(step), 0, size)]
        weights = values[_streams.ages(step, size)] if size else values[1:]

        def one(leaf: Array, noises: Array) -> tuple[Array, Array]:
            wide = leaf.astype(noises.dtype)
            noise = (wide - _streams.weighted(weights, noises)) if size else wide
            noise = noise / self.values[0]
            noises = _streams.replaced(noises, noise, step % size) if size else noises
            return noise * scale, noises

        return _streams.mapped(one, z, memory)

    def _reciprocal(self) -> Float[np.ndarray, " steps"]:
        return _series.reciprocal(np.array(self.values), self.steps)

    def _scales(self) -> Float[np.ndarray, " steps"] | None:
        """Normalized, the norm of each column of T."""
        plain = Toeplitz(name="T", steps=self.steps, values=self.values)
        return plain.column_norms() if self.normalized else None


@dataclass(frozen=True, kw_only=True)
class InverseToeplitz(Strategy):
    r"""$(C^{-1})_{ij} = d_{i-j}$: each noise is a sum over the last normal numbers."""

    values: tuple[float, ...]
    kind: ClassVar[str] = "inverse_toeplitz"

    def __post_init__(self) -> None:
        values = _checked("strategies.inverse_toeplitz", self.steps, self.values)
        object.__setattr__(self, "values", values)

    @property
    def bands(self) -> int:
        """The inverse of a banded matrix is not banded."""
        return self.steps if len(self.values) > 1 else 1

    @property
    def remembers(self) -> int:
        """The last normal numbers."""
        return len(self.values) - 1

    @property
    def coefficients(self) -> Float[np.ndarray, " steps"]:
        """The reciprocal series."""
        return _series.reciprocal(np.array(self.values), self.steps)

    def _next(self, z: PyTree, memory: PyTree, step: Any) -> tuple[PyTree, PyTree]:
        r"""$\sum_k d_k z_{t-k}$."""
        size, values = self.remembers, jnp.asarray(self.values, jnp.float32)
        scale = _streams.sound(step, self.steps)
        weights = values[_streams.ages(step, size)] if size else values[1:]

        def one(leaf: Array, normals: Array) -> tuple[Array, Array]:
            wide = leaf.astype(normals.dtype)
            noise = self.values[0] * wide
            if not size:
                return noise * scale, normals
            # Read before it is overwritten: otherwise XLA copies the whole ring at each step.
            earlier, normals = optimization_barrier((_streams.weighted(weights, normals), normals))
            noise = noise + earlier
            return noise * scale, _streams.replaced(normals, wide, step % size)

        return _streams.mapped(one, z, memory)

    def _reciprocal(self) -> Float[np.ndarray, " steps"]:
        return _series.padded(self.values, self.steps)


def _checked(call: str, steps: int, values: ArrayLike) -> tuple[float, ...]:
    """Coefficients in float32, without the zeros at their end."""
    # Those zeros would cost memory and hide the number of bands.
    narrow = np.trim_zeros(np.asarray(values, np.float32), "b")
    fits = narrow.ndim == 1 and 1 <= narrow.size <= steps and np.all(np.isfinite(narrow))
    if not fits or not narrow[0] > 0:  # C has no inverse with 0 on its diagonal
        raise ValueError(f"{call}: expected 1 to {steps} finite coefficients, the first above 0.")
    return narrowed(narrow)


def toeplitz(
    steps: int, coefficients: ArrayLike, *, normalized: bool = False, name: str = "toeplitz"
) -> Strategy:
    r"""A banded Toeplitz strategy with given coefficients: $C_{ij} = c_{i-j}$.

    Positive coefficients that fall keep the noise small. Others can let it grow over the run, until
    float32 rounds the numbers of a step away, and then nothing hides that step.

    There is at most one coefficient for each step, and the first is above 0. ``normalized`` divides
    each column by its own norm: the last columns have fewer terms, and without this their noise
    protects more than it must. ``name`` is for people; see `Strategy`.

    Example:
      >>> toeplitz(3, [0.5, 0.25]).matrix()
      array([[0.5 , 0.  , 0.  ],
             [0.25, 0.5 , 0.  ],
             [0.  , 0.25, 0.5 ]])
      >>> toeplitz(3, [0.5, 0.25], normalized=True).column_norms()
      array([1., 1., 1.])
    """
    steps = checks.whole("strategies.toeplitz", "steps", steps)
    return Toeplitz(name=name, steps=steps, values=narrowed(coefficients), normalized=normalized)


def white(steps: int) -> Strategy:
    """Independent noise at each of the run's ``steps``, as DP-SGD adds: C is the identity.

    Example:
      >>> white(3).matrix()
      array([[1., 0., 0.],
             [0., 1., 0.],
             [0., 0., 1.]])

    References:
      Abadi et al., "Deep learning with differential privacy", 2016.
    """
    return toeplitz(steps, [1.0], name="white")

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
from jaxtyping import Array
from numpy.typing import ArrayLike

from dpjax import checks
from dpjax.strategies import _series, _streams
from dpjax.strategies._series import Matrix, Series
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
        values = _checked("strategies.toeplitz", self.steps, self.values)
        object.__setattr__(self, "values", values)

    @property
    def bands(self) -> int:
        """The number of coefficients."""
        return len(self.values)

    @property
    def remembers(self) -> int:
        """The last noises."""
        return len(self.values) - 1

    @property
    def coefficients(self) -> Series | None:
        """None if normalized: that matrix is not Toeplitz, since its columns have own factors."""
        return None if self.normalized else np.array(self.values)

    def column_squares(self) -> Series:
        """The squared norm of each column: 1 if normalized, less for the last columns otherwise."""
        return np.ones(self.steps) if self.normalized else super().column_squares()

    def matrix(self) -> Matrix:
        """C."""
        plain = _series.lower_triangular(_series.padded(self.values, self.steps))
        scales = self._scales()
        return plain if scales is None else plain / scales

    def squared_bounds(self, participation: Participation) -> Iterator[float]:
        """The bound by products of the columns that overlap."""
        if self.steps * self.bands <= LARGEST_MATRIX**2:
            yield of_bands(self._products(), participation)

    def _products(self) -> list[np.ndarray]:
        r"""The magnitudes of $(C^T C)_{i,i+d}$ for all distances d at which columns overlap.

        Item d has a number for each i: $\lvert \sum_{k < n} c_{k+d} c_k \rvert$ over the n rows
        that both columns have, divided by the norms of the two if columns are normalized.
        """
        steps = self.steps
        values = np.asarray(self.values)
        # The number of terms in each column: the end of the run cuts off the last ones.
        terms = np.minimum(len(values), steps - np.arange(steps))
        # Columns are divided by their norms if they are normalized, and by 1 otherwise.
        squared_norms = np.ones(steps)
        if self.normalized:
            squared_norms = np.cumsum(values**2)[terms - 1]
        diagonals = []
        for distance in range(len(values)):
            # Columns i and i + distance have common rows from row i + distance until column i ends.
            pairs = steps - distance
            common_rows = terms[:pairs] - distance
            # The sums of the first 1, 2, ... terms.
            sums = np.cumsum(values[distance:] * values[: len(values) - distance])
            products = sums[common_rows - 1]
            squares = squared_norms[:pairs] * squared_norms[distance:]
            diagonals.append(np.abs(products) / np.sqrt(squares))
        return diagonals

    def _next(self, z: PyTree, memory: PyTree, step: Any) -> tuple[PyTree, PyTree]:
        r"""Row t of $T x = z$, solved for $x_t$: $x_t = (z_t - \sum_k c_k x_{t-k}) / c_0$.

        The memory of a leaf is a ring of its last ``size`` noises $x$: step s writes slot
        ``s % size``. With normalized columns the noise is $D x$: $x_t$ times the norm of column t.
        """
        size = self.remembers
        values = jnp.asarray(self.values, jnp.float32)  # c
        scale = _streams.one_within_run(step, self.steps)  # NaN outside the run
        if self.normalized:
            norms = jnp.sqrt(jnp.cumsum(values**2))  # of columns with 1, 2, ... terms
            # The column of step t ends with the run, after steps - t terms.
            scale = scale * norms[jnp.clip(self.steps - 1 - jnp.asarray(step), 0, size)]
        # A slot that was written k steps ago has the weight c_k. A ring of size 0 has no weights,
        # and no ages, because those are taken modulo its size.
        weights = values[_streams.ages(step, size)] if size else values[1:]

        def next_noise(leaf: Array, noises: Array) -> tuple[Array, Array]:
            noise = leaf.astype(noises.dtype)
            if size:
                noise = noise - _streams.weighted(weights, noises)
            noise = noise / self.values[0]
            if size:
                noises = _streams.replaced(noises, noise, step % size)
            return noise * scale, noises

        return _streams.mapped(next_noise, z, memory)

    def _reciprocal(self) -> Series:
        return _series.reciprocal(np.array(self.values), self.steps)

    def _scales(self) -> Series | None:
        """The norm of each column of T, if normalized."""
        if not self.normalized:
            return None
        plain = Toeplitz(name="T", steps=self.steps, values=self.values)
        return plain.column_norms()


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
        """All diagonals, since the inverse of a banded matrix is not banded; 1 for a diagonal."""
        return 1 if len(self.values) == 1 else self.steps

    @property
    def remembers(self) -> int:
        """The last normal numbers."""
        return len(self.values) - 1

    @property
    def coefficients(self) -> Series:
        """The reciprocal series."""
        return _series.reciprocal(np.array(self.values), self.steps)

    def _next(self, z: PyTree, memory: PyTree, step: Any) -> tuple[PyTree, PyTree]:
        r"""$x_t = \sum_k d_k z_{t-k}$, the noise of step t.

        The memory of a leaf is a ring of the last ``size`` normal numbers $z$: step s writes slot
        ``s % size``.
        """
        size = self.remembers
        values = jnp.asarray(self.values, jnp.float32)  # d
        scale = _streams.one_within_run(step, self.steps)  # NaN outside the run
        # A slot that was written k steps ago has the weight d_k. A ring of size 0 has no weights,
        # and no ages, because those are taken modulo its size.
        weights = values[_streams.ages(step, size)] if size else values[1:]

        def next_noise(leaf: Array, normals: Array) -> tuple[Array, Array]:
            wide = leaf.astype(normals.dtype)
            noise = self.values[0] * wide
            if not size:
                return noise * scale, normals
            earlier = _streams.weighted(weights, normals)
            # The barrier puts this sum before the update. Otherwise XLA copies the ring each step.
            earlier, normals = optimization_barrier((earlier, normals))
            noise = noise + earlier
            return noise * scale, _streams.replaced(normals, wide, step % size)

        return _streams.mapped(next_noise, z, memory)

    def _reciprocal(self) -> Series:
        return _series.padded(self.values, self.steps)


def _checked(call: str, steps: int, values: ArrayLike) -> tuple[float, ...]:
    """Coefficients in float32, without the zeros at their end."""
    # Zeros at the end cost memory and add bands.
    narrow = np.trim_zeros(np.asarray(values, np.float32), "b")
    fits = narrow.ndim == 1 and 1 <= narrow.size <= steps and np.all(np.isfinite(narrow))
    # A matrix with 0 on its diagonal has no inverse.
    if not fits or not narrow[0] > 0:
        raise ValueError(f"{call}: expected 1 to {steps} finite coefficients, the first above 0.")
    return narrowed(narrow)


def toeplitz(
    steps: int, coefficients: ArrayLike, *, normalized: bool = False, name: str = "toeplitz"
) -> Strategy:
    r"""A banded Toeplitz strategy with given coefficients: $C_{ij} = c_{i-j}$.

    Positive coefficients that fall keep the noise small. With others it can grow over the run,
    until float32 rounds the numbers of a step away, and then nothing hides that step.

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

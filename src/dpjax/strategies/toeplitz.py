# SPDX-License-Identifier: Apache-2.0
r"""Toeplitz strategies: a lower-triangular matrix with constant diagonals, or its inverse.

`Toeplitz` has the coefficients of $C$ and remembers its last noises (forward substitution).
`InverseToeplitz` has the coefficients of $C^{-1}$ and remembers the last normal numbers. Both
keep one array less than they have coefficients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax.lax import optimization_barrier
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

from dpjax import checks
from dpjax.strategies import series, streams
from dpjax.strategies.strategy import Strategy, narrowed, require_fresh
from dpjax.strategies.workload import Workload, toeplitz_squares
from dpjax.types import PyTree


@dataclass(frozen=True, kw_only=True)
class Toeplitz:
    r"""$C_{ij} = c_{i-j}$; normalized, each column is divided by its norm.

    The last columns of a banded matrix are cut off at the bottom, so their norms are smaller.
    Normalized, $C = T D^{-1}$ with $D$ the norms of the columns of $T$, and $C^{-1} = D T^{-1}$.
    """

    steps: int
    values: tuple[float, ...]
    normalized: bool = False
    kind: ClassVar[str] = "toeplitz"

    def __post_init__(self) -> None:
        steps, values = _checked("strategies.toeplitz", self.steps, self.values)
        normalized = checks.instance("strategies.toeplitz", "normalized", self.normalized, bool)
        object.__setattr__(self, "steps", steps)
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "normalized", normalized)
        require_fresh("strategies.toeplitz", self._reciprocal(steps), 1 / values[0])

    @property
    def bands(self) -> int:
        """As many as there are coefficients."""
        return len(self.values)

    @property
    def remembers(self) -> int:
        """The last noises."""
        return len(self.values) - 1

    @property
    def facts(self) -> dict[str, Any]:
        """Coefficients as they are multiplied."""
        return {"values": list(self.values), "normalized": self.normalized}

    @property
    def coefficients(self) -> Float[np.ndarray, " bands"] | None:
        """None if normalized: the columns of that matrix are multiples of one another only."""
        return None if self.normalized else np.array(self.values)

    def column_squares(self) -> Float[np.ndarray, " steps"]:
        """The last columns have fewer terms, unless normalized."""
        return np.ones(self.steps) if self.normalized else self._cut_squares()

    def matrix(self) -> Float[np.ndarray, "steps steps"]:
        """C."""
        whole = series.lower_triangular(_padded(self.values, self.steps))
        return whole / np.sqrt(self._cut_squares()) if self.normalized else whole

    def inverse(self) -> Float[np.ndarray, "steps steps"]:
        """The inverse of C."""
        whole = series.lower_triangular(self._reciprocal(self.steps))
        return whole * np.sqrt(self._cut_squares())[:, None] if self.normalized else whole

    def row(self, step: int) -> Float[np.ndarray, " columns"]:
        """The reciprocal series in reverse."""
        found = self._reciprocal(step + 1)[::-1]
        return found * np.sqrt(self._cut_squares()[step]) if self.normalized else found

    def squares(self, of: Workload) -> Float[np.ndarray, " steps"]:
        """By prefix sums, as far as rows repeat."""
        scales = np.sqrt(self._cut_squares()) if self.normalized else None
        return toeplitz_squares(self._reciprocal(self.steps), scales, of)

    def next(self, z: PyTree, memory: PyTree, step: Any) -> tuple[PyTree, PyTree]:
        r"""Row t of $T x = z$, solved for $x_t$: $x_t = (z_t - \sum_k c_k x_{t-k}) / c_0$."""
        size, values = self.remembers, jnp.asarray(self.values, jnp.float32)
        scale = streams.sound(step, self.steps)
        if self.normalized:
            norms = jnp.sqrt(jnp.cumsum(values**2))
            # The column of step t ends with the run, after steps - t terms.
            scale = scale * norms[jnp.clip(self.steps - 1 - jnp.asarray(step), 0, size)]
        weights = values[streams.ages(step, size)] if size else values[1:]

        def one(leaf: Array, noises: Array) -> tuple[Array, Array]:
            wide = leaf.astype(noises.dtype)
            found = (wide - streams.weighted(weights, noises)) if size else wide
            found = found / self.values[0]
            kept = streams.replaced(noises, found, step % size) if size else noises
            return found * scale, kept

        return streams.mapped(one, z, memory)

    def _reciprocal(self, length: int) -> Float[np.ndarray, " length"]:
        return series.reciprocal(np.array(self.values), length)

    def _cut_squares(self) -> Float[np.ndarray, " steps"]:
        """The squared norm of each column of T."""
        sums = np.cumsum(np.square(self.values))
        left = np.arange(self.steps, 0, -1)  # rows from the diagonal down
        return sums[np.minimum(left, sums.size) - 1]


@dataclass(frozen=True, kw_only=True)
class InverseToeplitz:
    r"""$(C^{-1})_{ij} = d_{i-j}$: each noise is a sum over the last normal numbers."""

    steps: int
    values: tuple[float, ...]
    kind: ClassVar[str] = "inverse_toeplitz"

    def __post_init__(self) -> None:
        steps, values = _checked("strategies.inverse_toeplitz", self.steps, self.values)
        object.__setattr__(self, "steps", steps)
        object.__setattr__(self, "values", values)
        require_fresh("strategies.inverse_toeplitz", np.array(values), values[0])

    @property
    def bands(self) -> int:
        """The inverse of a banded matrix is not banded."""
        return self.steps if len(self.values) > 1 else 1

    @property
    def remembers(self) -> int:
        """The last normal numbers."""
        return len(self.values) - 1

    @property
    def facts(self) -> dict[str, Any]:
        """Coefficients as they are multiplied."""
        return {"values": list(self.values)}

    @property
    def coefficients(self) -> Float[np.ndarray, " steps"]:
        """The reciprocal series."""
        return series.reciprocal(np.array(self.values), self.steps)

    def column_squares(self) -> Float[np.ndarray, " steps"]:
        """The first column is the longest."""
        return np.cumsum(np.square(self.coefficients))[::-1]

    def matrix(self) -> Float[np.ndarray, "steps steps"]:
        """C."""
        return series.lower_triangular(self.coefficients)

    def inverse(self) -> Float[np.ndarray, "steps steps"]:
        """The inverse of C."""
        return series.lower_triangular(_padded(self.values, self.steps))

    def row(self, step: int) -> Float[np.ndarray, " columns"]:
        """The coefficients in reverse."""
        return _padded(self.values, self.steps)[: step + 1][::-1]

    def squares(self, of: Workload) -> Float[np.ndarray, " steps"]:
        """By prefix sums, as far as rows repeat."""
        return toeplitz_squares(_padded(self.values, self.steps), None, of)

    def next(self, z: PyTree, memory: PyTree, step: Any) -> tuple[PyTree, PyTree]:
        r"""$\sum_k d_k z_{t-k}$."""
        size, values = self.remembers, jnp.asarray(self.values, jnp.float32)
        scale = streams.sound(step, self.steps)
        weights = values[streams.ages(step, size)] if size else values[1:]

        def one(leaf: Array, normals: Array) -> tuple[Array, Array]:
            wide = leaf.astype(normals.dtype)
            found = self.values[0] * wide
            if not size:
                return found * scale, normals
            # Read before it is overwritten: otherwise XLA copies the whole ring at each step.
            earlier, normals = optimization_barrier((streams.weighted(weights, normals), normals))
            found = found + earlier
            return found * scale, streams.replaced(normals, wide, step % size)

        return streams.mapped(one, z, memory)


def _padded(values: tuple[float, ...], steps: int) -> Float[np.ndarray, " steps"]:
    return np.pad(values, (0, steps - len(values)))


def _checked(call: str, steps: Any, values: Any) -> tuple[int, tuple[float, ...]]:
    steps = checks.whole(call, "steps", steps, "It is the number of steps of the run.")
    values = narrowed(call, "coefficients", values, steps)
    if not values[0] > 0:
        raise ValueError(
            f"{call}(coefficients beginning with {values[0]}): expected a first coefficient above "
            "0. It is the diagonal of the matrix, which must be invertible."
        )
    # Zeros at the end would cost memory and hide the number of bands.
    last = max(k for k, value in enumerate(values) if value)
    return steps, values[: last + 1]


def toeplitz(
    steps: int, coefficients: ArrayLike, *, normalized: bool = False, name: str = "toeplitz"
) -> Strategy:
    r"""A banded Toeplitz strategy with given coefficients: $C_{ij} = c_{i-j}$.

    Args:
      steps: The number of steps T of the run.
      coefficients: $c_0, c_1, \dots$: at most one for each step, the first above 0.
      normalized: Whether each column is divided by its own norm. The last columns have fewer
        terms, and without this their noise protects more than it must.
      name: For people; see `Strategy`.

    Example:
      >>> toeplitz(3, [0.5, 0.25]).matrix()
      array([[0.5 , 0.  , 0.  ],
             [0.25, 0.5 , 0.  ],
             [0.  , 0.25, 0.5 ]])
      >>> toeplitz(3, [0.5, 0.25], normalized=True).column_norms()
      array([1., 1., 1.])
    """
    steps = checks.whole("strategies.toeplitz", "steps", steps)
    values = narrowed("strategies.toeplitz", "coefficients", coefficients, steps)
    return Strategy(name=name, form=Toeplitz(steps=steps, values=values, normalized=normalized))


def white(steps: int) -> Strategy:
    """Independent noise at each step, as DP-SGD adds: C is the identity.

    Args:
      steps: The number of steps of the run.

    Example:
      >>> white(3).matrix()
      array([[1., 0., 0.],
             [0., 1., 0.],
             [0., 0., 1.]])

    References:
      Abadi et al., "Deep learning with differential privacy", 2016.
    """
    return toeplitz(steps, [1.0], name="white")

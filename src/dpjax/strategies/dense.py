# SPDX-License-Identifier: Apache-2.0
r"""Dense strategies: the lower-triangular matrix of least error, for short runs.

The variance depends on $X = C^T C$ alone, $\mathrm{tr}(W X^{-1} W^T)$, and is convex in it. X has
zeros wherever one example can have both steps, so that their columns are orthogonal and the squared
sensitivity is a sum of diagonal entries: each is 1, or in cycles the entries of one example have
their number as sum.
"""

from __future__ import annotations

import base64
import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float
from numpy.typing import ArrayLike

from dpjax import checks
from dpjax.strategies import descent, streams
from dpjax.strategies.banded import banded
from dpjax.strategies.participation import Participation, or_once
from dpjax.strategies.strategy import Strategy, require_fresh
from dpjax.strategies.workload import Workload, workload
from dpjax.types import PyTree

MOST_STEPS = 2_000


@dataclass(frozen=True, kw_only=True)
class Dense:
    """Any lower-triangular matrix with a positive diagonal.

    ``rows`` is base64 of the float32 numbers, little endian, from each row up to its diagonal.
    """

    steps: int
    rows: str
    kind: ClassVar[str] = "dense"

    def __post_init__(self) -> None:
        call = "strategies.dense"
        steps = checks.whole(call, "steps", self.steps, "It is the number of steps of the run.")
        object.__setattr__(self, "steps", steps)
        text = checks.instance(call, "rows", self.rows, str)
        found = np.frombuffer(base64.b64decode(text), "<f4")
        if found.size != steps * (steps + 1) // 2 or not np.all(np.isfinite(found)):
            raise ValueError(
                f"{call}(rows of {found.size} numbers): expected {steps * (steps + 1) // 2} finite "
                f"numbers for {steps} steps."
            )
        if not np.all(np.diag(self.matrix()) > 0):
            raise ValueError(
                f"{call}(rows): expected a positive diagonal, so that C has an inverse."
            )
        inverse = _inverse(steps, text)
        require_fresh(call, inverse, np.diag(inverse))

    @property
    def bands(self) -> int:
        """Counted."""
        return max(int(t - np.flatnonzero(row)[0]) + 1 for t, row in enumerate(self.matrix()))

    @property
    def remembers(self) -> int:
        """All normal numbers."""
        return self.steps

    @property
    def facts(self) -> dict[str, Any]:
        """The numbers as they are multiplied."""
        return {"rows": self.rows}

    @property
    def coefficients(self) -> Float[np.ndarray, " bands"] | None:
        """None: not Toeplitz."""
        return None

    def column_squares(self) -> Float[np.ndarray, " steps"]:
        """From the matrix."""
        return np.sum(self.matrix() ** 2, axis=0)

    def matrix(self) -> Float[np.ndarray, "steps steps"]:
        """C."""
        return _unpacked(self.steps, self.rows).copy()

    def inverse(self) -> Float[np.ndarray, "steps steps"]:
        """The inverse of C."""
        return _inverse(self.steps, self.rows).copy()

    def row(self, step: int) -> Float[np.ndarray, " columns"]:
        """A row of the inverse."""
        return _inverse(self.steps, self.rows)[step, : step + 1].copy()

    def squares(self, of: Workload) -> Float[np.ndarray, " steps"]:
        """From the matrix."""
        return np.sum(of.applied(self.inverse()) ** 2, axis=1)

    def next(self, z: PyTree, memory: PyTree, step: Any) -> tuple[PyTree, PyTree]:
        """A row of the inverse times all normal numbers so far."""
        table = jnp.asarray(_inverse(self.steps, self.rows), jnp.float32)
        weights = table[step] * streams.sound(step, self.steps)

        def one(leaf: Array, normals: Array) -> tuple[Array, Array]:
            kept = streams.replaced(normals, leaf, step)
            return streams.weighted(weights, kept), kept

        return streams.mapped(one, z, memory)


@functools.lru_cache(maxsize=8)
def _unpacked(steps: int, rows: str) -> Float[np.ndarray, "steps steps"]:
    whole = np.zeros((steps, steps))
    whole[np.tril_indices(steps)] = np.frombuffer(base64.b64decode(rows), "<f4")
    return whole


@functools.lru_cache(maxsize=8)
def _inverse(steps: int, rows: str) -> Float[np.ndarray, "steps steps"]:
    from scipy.linalg import solve_triangular

    return solve_triangular(_unpacked(steps, rows), np.eye(steps), lower=True)


def packed(matrix: Float[np.ndarray, "steps steps"]) -> Dense:
    """The form with this lower triangle, in float32."""
    numbers = matrix[np.tril_indices(len(matrix))].astype("<f4")
    return Dense(steps=len(matrix), rows=base64.b64encode(numbers.tobytes()).decode())


def dense(
    steps: int,
    participation: Participation | None = None,
    *,
    momentum: float = 0.0,
    learning_rates: ArrayLike | None = None,
) -> Strategy:
    r"""The lower-triangular strategy of least mean error, for at most 2,000 steps.

    $$ \min_X \ \mathrm{tr}(W X^{-1} W^T), \qquad X_{ii} = 1, \qquad
       X_{ij} = 0 \text{ where one example can have both steps} $$

    For one participation this is the optimum over all matrices. For cycles the zeros are at
    multiples of the separation, and the diagonal entries of an example's steps only have their
    number as sum. For separated steps the zeros are at all distances from the separation on, which
    makes C banded (BandMF). The zeros are a restriction that loses little.

    Args:
      steps: The number of steps T of the run. The stream remembers as many arrays.
      participation: Which steps one example may have; by default `once`.
      momentum: The decay of SGD with momentum, which the error weights.
      learning_rates: One for each step.

    Returns:
      A strategy; results are cached. For 2,000 steps the search takes minutes.

    Example:
      >>> round(dense(steps=64).errors().mean, 2)
      2.1

    References:
      Denisov et al., "Improved differential privacy for SGD via optimal private linear operators on
      adaptive streams", 2022.
      Choquette-Choo et al., "Multi-epoch matrix factorization mechanisms for private machine
      learning", 2023: several participations.
    """
    call = "strategies.dense"
    steps = checks.whole(call, "steps", steps, "It is the number of steps of the run.")
    if steps > MOST_STEPS:
        raise ValueError(
            f"{call}(steps={steps}): expected at most {MOST_STEPS}; its cost grows with the cube. "
            "Take strategies.banded or strategies.buffered for longer runs."
        )
    participation = or_once(call, participation)
    of = workload(call, steps, momentum, learning_rates)
    return Strategy(name="dense", form=_searched(steps, participation, of))


@functools.lru_cache(maxsize=16)
def _searched(steps: int, participation: Participation, of: Workload) -> Dense:
    gram = of.gram(steps)
    # A rate of 0 leaves a step without weight, and its column without an optimum.
    gram = gram + 1e-9 * np.trace(gram) / steps * np.eye(steps)
    if participation.within(steps) == 1:
        found = descent.fixed_point(gram)
    else:
        bands = min(participation.separation, steps)
        begin = banded(steps, bands, participation, momentum=of.momentum).matrix()
        # An example with all steps of its cycle counts by the sum of their squared norms alone.
        whole = participation.even and participation.within(steps) == -(-steps // bands)
        cycle = bands if whole else None
        found = descent.masked(gram, _free(steps, participation), begin.T @ begin, cycle)
    # X = U U^T with an upper triangle: the factor of the matrix in reverse, in reverse.
    factor = np.linalg.cholesky(found[::-1, ::-1])[::-1, ::-1].T
    if participation.within(steps) > 1 and not participation.even:
        # Rounding leaves traces where orthogonal columns must not overlap.
        factor = np.triu(factor, 1 - participation.separation)
        factor = factor / np.linalg.norm(factor, axis=0)
    return packed(factor)


def _free(steps: int, participation: Participation) -> Bool[np.ndarray, "steps steps"]:
    """Where X may differ from 0."""
    lag = np.abs(np.arange(steps)[:, None] - np.arange(steps))
    if participation.even:
        return (lag % participation.separation > 0) | (lag == 0)
    return lag < participation.separation

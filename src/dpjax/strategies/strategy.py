# SPDX-License-Identifier: Apache-2.0
r"""`Strategy`: a lower-triangular matrix $C$ of correlated noise, with its stream.

Matrices, columns and errors here hold for Toeplitz matrices; `Tree` has others. Coefficients are
rounded to float32 when a strategy is made, so the matrix that is accounted is the one that runs;
for an inverse and for normalized columns, to within a rounding of float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jax.core import Tracer
from jaxtyping import Float
from numpy.typing import ArrayLike

from dpjax import checks
from dpjax.strategies import _series, _streams
from dpjax.strategies._workload import Workload, checked_workload, toeplitz_squares
from dpjax.strategies.participation import Participation
from dpjax.strategies.sensitivity import of_products, sensitivity
from dpjax.types import PyTree

# The most steps for which a strategy may be a full matrix, of 128 MiB.
LARGEST_MATRIX = 4_096


class Errors(NamedTuple):
    """Standard deviations of the noise in the parameters, for one coordinate and multiplier 1.

    Both are multiplied by the sensitivity, so strategies of one participation compare directly.

    Attributes:
      mean: The root of the mean variance over all steps.
      maximal: The largest standard deviation of a step.
    """

    mean: float
    maximal: float


@dataclass(frozen=True, kw_only=True)
class Strategy:
    r"""How the noise of the steps of a run is correlated: row t of $C^{-1} Z$ at step t.

    Strategies are values: equal ones have equal matrices. Constructors are in `dpjax.strategies`.

    Attributes:
      name: For people. It changes no matrix; but a state or a folder of a run under another name is
        refused.
      steps: The number of steps of the run; a step after them has no noise.
      kind: The family, as `facts` write it.

    Example:
      >>> from dpjax import strategies
      >>> strategy = strategies.square_root(steps=1_000, bands=16)
      >>> strategy.bands, strategy.remembers
      (16, 15)
      >>> strategies.from_facts(strategy.facts) == strategy
      True
    """

    name: str
    steps: int
    kind: ClassVar[str]

    @property
    def bands(self) -> int:
        """The number of diagonals of C up to the last that is not zero, the main one included."""
        return self.steps

    @property
    def remembers(self) -> int:
        """How many arrays of the parameters' size the stream keeps."""
        raise NotImplementedError

    @property
    def coefficients(self) -> Float[np.ndarray, " bands"] | None:
        """The first column of C up to its last number that is not zero; None if not Toeplitz."""

    @property
    def facts(self) -> dict[str, Any]:
        """Plain JSON, from which `from_facts` makes an equal strategy.

        | kind | further keys | C |
        |---|---|---|
        | toeplitz | values, normalized | Toeplitz; normalized: columns divided by their norms |
        | inverse_toeplitz | values | inverse of a lower-triangular Toeplitz matrix |
        | buffered | scales, decays | Toeplitz: 1, then sums of scale * decay^(k-1) |
        | tree | | $C^T C$ counts the nodes of a binary tree above both steps |
        """
        facts: dict[str, Any] = {"kind": self.kind}
        for name, value in vars(self).items():
            facts[name] = list(value) if isinstance(value, tuple) else value
        return facts

    def column_squares(self) -> Float[np.ndarray, " steps"]:
        """The squared norm of each column of C."""
        assert self.coefficients is not None
        sums = np.cumsum(np.square(self.coefficients))
        # A column has as many terms as there are rows from the diagonal down.
        terms = np.minimum(np.arange(self.steps, 0, -1), sums.size)
        return sums[terms - 1]

    def column_norms(self) -> Float[np.ndarray, " steps"]:
        """The norm of each column of C: how far an example that takes part once moves $C G$."""
        return np.sqrt(self.column_squares())

    def matrix(self) -> Float[np.ndarray, "steps steps"]:
        """C in float64, for runs of a moderate number of steps."""
        assert self.coefficients is not None
        first_column = _series.padded(self.coefficients, self.steps)
        return _series.lower_triangular(first_column)

    def inverse(self) -> Float[np.ndarray, "steps steps"]:
        """The inverse of C in float64, for runs of a moderate number of steps."""
        inverse = _series.lower_triangular(self._reciprocal())
        scales = self._scales()
        return inverse if scales is None else inverse * scales[:, None]

    def squares(self, workload: Workload) -> Float[np.ndarray, " steps"]:
        """The squared norm of each row of W times the inverse, for the workload W."""
        return toeplitz_squares(self._reciprocal(), self._scales(), workload)

    def squared_bounds(self, participation: Participation) -> Iterator[float]:
        """Bounds on the squared `sensitivity` that need more than the norms of columns."""
        if self.steps <= LARGEST_MATRIX:
            matrix = self.matrix()
            yield of_products(np.abs(matrix.T @ matrix), participation)

    def overlaps(self, bins: int) -> Float[np.ndarray, " bins"] | None:
        r"""Bounds on the products of the moves of two bins, for `dpjax.accounting`.

        With $m_{tb} = \sum_{s \bmod n = b} |C_{ts}|$ for n bins, the i-th number is the largest of
        the i-th largest entries of the rows of $M^T M$. None for a run that is too long for its
        whole matrix.
        """
        if self.steps > LARGEST_MATRIX:
            return None
        magnitudes = np.abs(self.matrix())
        columns = [magnitudes[:, first::bins].sum(axis=1) for first in range(bins)]
        moves = np.stack(columns, axis=1)  # M
        # The factor exceeds the relative rounding error of these sums of non-negative numbers.
        products = moves.T @ moves * (1 + 1e-9)
        descending = np.sort(products, axis=1)[:, ::-1]
        return descending.max(axis=0)

    def start(self, zeros: PyTree) -> PyTree:
        """The memory of the stream before step 0.

        ``zeros`` is a tree of the parameters' structure, shapes and placement; values are not read.
        Each leaf of the answer has a leading axis of ``remembers`` rows.
        """
        return _streams.stacked(zeros, self.remembers)

    def next(self, z: PyTree, memory: PyTree, step: Any) -> tuple[PyTree, PyTree]:
        """The noise of one step: the stream that multiplies by the inverse of C.

        ``z`` are standard normal numbers, independent of other steps' numbers, and ``memory`` is
        that of `start` or of the step before. Returns the noise, with the structure of ``z``, and
        the next memory. Steps come in order, from 0; a traced step outside the run gives NaN.
        """
        if not isinstance(step, Tracer):
            hint = "The sensitivity depends on the number of steps; make the strategy for all."
            step = checks.whole("strategy.next", "step", step, hint, least=0, most=self.steps - 1)
        return self._next(z, memory, step)

    def errors(
        self,
        participation: Participation | None = None,
        *,
        momentum: float = 0.0,
        learning_rates: ArrayLike | None = None,
    ) -> Errors:
        r"""The error of the parameters that this noise causes, at noise multiplier 1.

        $$ \Delta \sqrt{\tfrac1T \sum_t \lVert (W C^{-1})_t \rVert^2} \qquad
           \Delta \max_t \lVert (W C^{-1})_t \rVert $$

        Args:
          participation: For which $\Delta$ is the `sensitivity`; by default `once`.
          momentum: The decay of SGD with momentum.
          learning_rates: One for each step; by default 1 at each, and W is then the prefix sums.

        Example:
          >>> from dpjax import strategies
          >>> strategies.white(steps=100).errors()
          Errors(mean=7.1063..., maximal=10.0)
          >>> strategies.square_root(steps=100).errors()
          Errors(mean=2.370..., maximal=2.531...)
        """
        call = "strategy.errors"
        squares = self.squares(checked_workload(call, self.steps, momentum, learning_rates))
        scale = sensitivity(self, Participation.or_once(call, participation))
        return Errors(
            mean=scale * math.sqrt(np.mean(squares)),
            maximal=scale * math.sqrt(np.max(squares)),
        )

    def _next(self, z: PyTree, memory: PyTree, step: Any) -> tuple[PyTree, PyTree]:
        raise NotImplementedError

    def _reciprocal(self) -> Float[np.ndarray, " steps"]:
        """The first column of the inverse of a Toeplitz matrix."""
        raise NotImplementedError

    def _scales(self) -> Float[np.ndarray, " steps"] | None:
        """The factors of the rows of this inverse, or None."""


def narrowed(values: Any) -> tuple[float, ...]:
    """Numbers rounded to float32."""
    return tuple(np.asarray(values, np.float32).tolist())


def from_facts(facts: dict[str, Any]) -> Strategy:
    """The strategy that ``strategy.facts`` describe, also after a round trip through JSON.

    Example:
      >>> from dpjax import strategies
      >>> strategies.from_facts({"kind": "tree", "name": "tree", "steps": 4}).remembers
      2
    """
    families = {family.kind: family for family in Strategy.__subclasses__()}
    fields = dict(facts)
    kind = fields.pop("kind", None)
    checks.one_of("strategies.from_facts", "kind", kind, families)
    return families[kind](**fields)

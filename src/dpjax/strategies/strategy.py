# SPDX-License-Identifier: Apache-2.0
r"""`Strategy`: a name and a form, and what both are good for.

A form is one family of matrices with its own way to multiply by $C^{-1}$ in a stream: `Toeplitz`,
`InverseToeplitz`, `Buffered`, `Tree` or `Dense`. Coefficients are rounded to float32 when a form is
made. The stream multiplies by these numbers, so the matrix that is accounted is the one that runs;
where it multiplies by an inverse or by normalized columns, to within a rounding of float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
from jax.core import Tracer
from jaxtyping import Float
from numpy.typing import ArrayLike

from dpjax import checks
from dpjax.strategies import streams
from dpjax.strategies.participation import Participation, or_once
from dpjax.strategies.workload import Workload, workload
from dpjax.types import PyTree

# Up to here a strategy is handled as a whole matrix of 128 MiB where there is no shorter way.
LARGEST_MATRIX = 4_096
# In float32 a number of size 1 keeps 12 bits beside one of this size.
LARGEST_GROWTH = 2.0**12


class Form(Protocol):
    """What a family of strategies can do; `Strategy` documents it."""

    kind: ClassVar[str]

    @property
    def steps(self) -> int:
        """Rows and columns of the matrix."""
        ...

    @property
    def bands(self) -> int:
        """Bands of C."""
        ...

    @property
    def remembers(self) -> int:
        """Rows of memory."""
        ...

    @property
    def facts(self) -> dict[str, Any]:
        """The fields as JSON."""
        ...

    @property
    def coefficients(self) -> Float[np.ndarray, " bands"] | None:
        """The first column of C without its trailing zeros, if C is Toeplitz."""
        ...

    def column_squares(self) -> Float[np.ndarray, " steps"]:
        """The squared norm of each column of C."""
        ...

    def matrix(self) -> Float[np.ndarray, "steps steps"]:
        """C."""
        ...

    def inverse(self) -> Float[np.ndarray, "steps steps"]:
        """The inverse of C."""
        ...

    def row(self, step: int) -> Float[np.ndarray, " columns"]:
        """A row of the inverse, up to the diagonal."""
        ...

    def squares(self, of: Workload) -> Float[np.ndarray, " steps"]:
        """The squared norm of each row of W times the inverse."""
        ...

    def next(self, z: PyTree, memory: PyTree, step: Any) -> tuple[PyTree, PyTree]:
        """The noise of a step, and the memory after it."""
        ...


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
      form: The matrix, in the shape that its family needs.

    Example:
      >>> from dpjax import strategies
      >>> strategy = strategies.square_root(steps=1_000, bands=16)
      >>> strategy.bands, strategy.remembers
      (16, 15)
      >>> strategies.from_facts(strategy.facts) == strategy
      True
    """

    name: str
    form: Form

    @property
    def steps(self) -> int:
        """How many steps the run has; there is no noise for a step after them."""
        return self.form.steps

    @property
    def bands(self) -> int:
        """The number of diagonals of C up to the last that is not zero, the main one included."""
        return self.form.bands

    @property
    def remembers(self) -> int:
        """How many arrays of the parameters' size the stream keeps."""
        return self.form.remembers

    @property
    def coefficients(self) -> Float[np.ndarray, " bands"] | None:
        """The first column of C up to its last number that is not zero; None if not Toeplitz."""
        return self.form.coefficients

    @property
    def facts(self) -> dict[str, Any]:
        """Plain JSON, from which `from_facts` makes an equal strategy.

        | kind | further keys | C |
        |---|---|---|
        | toeplitz | values, normalized | Toeplitz; normalized: columns divided by their norms |
        | inverse_toeplitz | values | inverse of a lower-triangular Toeplitz matrix |
        | buffered | scales, decays | Toeplitz: 1, then sums of scale * decay^(k-1) |
        | tree | | $C^T C$ counts the nodes of a binary tree above both steps |
        | dense | rows | lower triangular; base64 of float32, little endian, row by row |
        """
        form = self.form
        return {"kind": form.kind, "name": self.name, "steps": form.steps, **form.facts}

    def column_norms(self) -> Float[np.ndarray, " steps"]:
        """The norm of each column of C: how much one example counts that takes part once."""
        return np.sqrt(self.form.column_squares())

    def matrix(self) -> Float[np.ndarray, "steps steps"]:
        """C in float64, for runs of a moderate number of steps."""
        self._check_size("matrix")
        return self.form.matrix()

    def inverse(self) -> Float[np.ndarray, "steps steps"]:
        """The inverse of C in float64, for runs of a moderate number of steps."""
        self._check_size("inverse")
        return self.form.inverse()

    def row(self, step: int) -> Float[np.ndarray, " columns"]:
        """The noise of one step alone, as weights of the normal numbers of steps 0 to ``step``.

        Args:
          step: From 0 to ``steps - 1``.

        Returns:
          ``step + 1`` numbers in float64: row ``step`` of the inverse of C.

        Example:
          >>> from dpjax import strategies
          >>> strategies.square_root(steps=8).row(2)
          array([-0.125, -0.5  ,  1.   ])
        """
        return self.form.row(self._checked(step, "row"))

    def start(self, zeros: PyTree) -> PyTree:
        """The memory of the stream before step 0.

        Args:
          zeros: A tree of the parameters' structure, shapes and placement; values are not read.

        Returns:
          A tree of the same structure. Each leaf has a leading axis of ``remembers`` rows.
        """
        return streams.stacked(zeros, self.remembers)

    def next(self, z: PyTree, memory: PyTree, step: Any) -> tuple[PyTree, PyTree]:
        """The noise of one step: the stream that multiplies by the inverse of C.

        Args:
          z: Standard normal numbers of this step, independent of other steps' numbers.
          memory: From `start`, or from the step before.
          step: The number of the step, traced or not; steps come in order, from 0.

        Returns:
          The noise, with the structure of ``z``, and the memory for the next step. A traced step
          outside the run gives NaN.
        """
        if not isinstance(step, Tracer):
            step = self._checked(step, "next")
        return self.form.next(z, memory, step)

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
          learning_rates: One for each step; by default 1 at each, so that W are prefix sums.

        Example:
          >>> from dpjax import strategies
          >>> strategies.white(steps=100).errors()
          Errors(mean=7.1063..., maximal=10.0)
          >>> strategies.square_root(steps=100).errors()
          Errors(mean=2.370..., maximal=2.531...)
        """
        from dpjax.strategies.sensitivity import sensitivity

        call = "strategy.errors"
        of = workload(call, self.steps, momentum, learning_rates)
        squares = self.form.squares(of)
        scale = sensitivity(self, or_once(call, participation))
        mean, most = math.sqrt(np.mean(squares)), math.sqrt(np.max(squares))
        return Errors(mean=scale * mean, maximal=scale * most)

    def _checked(self, step: Any, method: str) -> int:
        step = checks.whole(f"strategy.{method}", "step", step, "Steps count from 0.", least=0)
        if step >= self.steps:
            raise ValueError(
                f"strategy.{method}(step={step}): expected a step below {self.steps}, the number "
                "of steps of this strategy. Usually a run was made longer: make the strategy for "
                "all its steps, because the sensitivity depends on their number."
            )
        return step

    def _check_size(self, method: str) -> None:
        if self.steps > 2 * LARGEST_MATRIX:
            raise ValueError(
                f"strategy.{method}: {self.steps} steps; expected at most {2 * LARGEST_MATRIX} for "
                "a whole matrix. Use strategy.coefficients, column_norms() or row(step)."
            )


def require_fresh(call: str, weights: np.ndarray, own: Any) -> None:
    """Refuses noise beside which the part that a step adds is rounded away.

    Args:
      call: How errors call the function.
      weights: Of the normal numbers in the noise of a step, along the last axis.
      own: The weight of the step's own number.
    """
    with np.errstate(all="ignore"):  # an inverse that grows may overflow
        growth = np.max(np.linalg.norm(weights, axis=-1) / own)
    if not growth <= LARGEST_GROWTH:
        raise ValueError(
            f"{call}: the noise of a step is {growth:.3g} times as large as what the step itself "
            f"adds to it; expected at most {LARGEST_GROWTH:.0f}. In float32 the numbers of later "
            "steps would round away, and nothing would hide these steps. Usually later "
            "coefficients are larger than the first; positive ones that fall never let it grow."
        )


def narrowed(call: str, name: str, values: Any, most: int) -> tuple[float, ...]:
    """Finite numbers rounded to float32, as many as 1 to ``most``."""
    found = np.asarray(values, np.float64)
    rounded = np.asarray(found, np.float32)
    if found.ndim != 1 or not 1 <= found.size <= most or not np.all(np.isfinite(rounded)):
        raise ValueError(
            f"{call}({name} of shape {found.shape}): expected 1 to {most} finite numbers, "
            "at most one for each step."
        )
    return tuple(rounded.tolist())

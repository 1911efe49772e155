# SPDX-License-Identifier: Apache-2.0
"""What an earlier run has spent, and what a run was calibrated for.

`dpjax.training.earlier` reads it from the folder of a run. A `dpjax.Mechanism` with
``before=`` pays for earlier runs and for its own steps.
"""

from __future__ import annotations

import contextlib
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import dp_accounting as dp
import numpy as np

from dpjax import accounting, checks
from dpjax.mechanism.correlated import check_run, correlated_event
from dpjax.strategies import Strategy
from dpjax.types import Sampler

UNITS = ("example", "client")


class Target(NamedTuple):
    """What `dpjax.Mechanism.calibrate` was asked for, and the accountant that answered."""

    epsilon: float
    delta: float
    method: str


@dataclass(frozen=True, kw_only=True)
class Spent:
    """What an earlier run on the same data has spent.

    Args:
      sampling: The sampler of its batches.
      runs: The multipliers of its steps, in order: pairs ``(multiplier, steps)``.
      preparation: The multipliers of its queries before the first step.
      unit: Whose data it protected: ``"example"`` or ``"client"``.
      projections: The number of random projections that estimated each norm, if norms were
        estimated.
      noise: The strategy of its noise, if it was correlated over the steps.
      supplied: Whether the caller supplied its key, or that of its queries. Every card then says
        that epsilon holds against those who do not know the key.
    """

    sampling: Sampler
    runs: Sequence[tuple[float, int]]
    preparation: Sequence[float] = ()
    unit: str = "example"
    projections: int | None = None
    noise: Strategy | None = None
    supplied: bool = False

    def __post_init__(self) -> None:
        """Refuses values that cannot be accounted; lists become tuples of Python numbers."""
        hint = "It is how the earlier run drew, such as sampling.poisson(examples, batch_size)."
        checks.instance("mechanism.Spent", "sampling", self.sampling, Sampler, hint)
        object.__setattr__(self, "runs", _checked_runs(self.runs))
        object.__setattr__(
            self, "preparation", checked_queries("mechanism.Spent", self.preparation)
        )
        hint = "It is the owner of the data in one sampled row."
        checks.one_of("mechanism.Spent", "unit", self.unit, UNITS, hint)
        hint = "None says that the norms were exact."
        projections = checks.whole_or_none("mechanism.Spent", "projections", self.projections, hint)
        object.__setattr__(self, "projections", projections)
        if self.noise is not None:
            hint = "Such as strategies.square_root(steps), or None for fresh noise at every step."
            checks.instance("mechanism.Spent", "noise", self.noise, Strategy, hint)
            called = f"mechanism.Spent(noise={self.noise.name})"
            check_run(called, self.noise, self.sampling, self.steps)
        object.__setattr__(self, "supplied", bool(self.supplied))  # a ledger's is an array

    @property
    def steps(self) -> int:
        """How many steps it ran."""
        return sum(steps for _, steps in self.runs)

    @property
    def event(self) -> dp.DpEvent:
        """Its privacy event."""
        queries = map(accounting.gaussian, self.preparation)
        # Step by step, since a sampler's event may depend on the place of a step, as in epochs of a
        # shuffle.
        each = np.repeat(*map(np.asarray, zip(*self.runs, strict=True))) if self.runs else []
        zs = np.asarray(each, np.float64)
        steps = steps_event(self.sampling, zs, self.projections, self.noise)
        return accounting.compose(*queries, steps)


def _checked_runs(runs: Iterable[Any]) -> tuple[tuple[float, int], ...]:
    with contextlib.suppress(TypeError, ValueError):  # no pairs, or not of numbers
        pairs = tuple(map(_numbers, runs))
        if all(multiplier >= 0 and n >= 0 and n % 1 == 0 for multiplier, n in pairs):
            # A pair of 0 steps says nothing, and `dpjax.verify` refuses it on a card.
            return tuple((multiplier, int(n)) for multiplier, n in pairs if n)
    raise ValueError(
        f"mechanism.Spent(runs={reprlib.repr(runs)}): expected pairs (noise multiplier, steps), "
        "such as ((1.1, 1000),)."
    )


def checked_queries(call: str, preparation: Iterable[Any]) -> tuple[float, ...]:
    """The multipliers of queries before the first step, checked."""
    with contextlib.suppress(TypeError, ValueError):
        multipliers = _numbers(preparation)
        if all(multiplier >= 0 for multiplier in multipliers):
            return multipliers
    raise ValueError(
        f"{call}(preparation={reprlib.repr(preparation)}): expected the noise multipliers of the "
        "queries, each at least 0, such as [8.0]."
    )


def _numbers(values: Iterable[Any]) -> tuple[Any, ...]:
    """Scalars of any library as Python's numbers."""
    return tuple(np.asarray(value).item() for value in values)


def steps_event(
    sampler: Sampler,
    multipliers: np.ndarray,
    projections: int | None,
    noise: Strategy | None = None,
) -> dp.DpEvent:
    """The event of steps with white or correlated noise, and with known or estimated norms."""
    if noise is not None and projections is not None:
        return dp.NonPrivateDpEvent()  # nothing is proved for both together
    if noise is not None:
        return correlated_event(noise, sampler, multipliers)
    # The sampler's own proof; estimated norms then weaken each Gaussian in it.
    event = sampler.event(multipliers)
    return event if projections is None else accounting.with_projections(event, projections)

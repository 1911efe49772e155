# SPDX-License-Identifier: Apache-2.0
"""The cost of an earlier run, and the targets that a calibration met."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import dp_accounting as dp
import numpy as np

from dpjax import accounting, checks, sampling, schedules, strategies
from dpjax.mechanism.correlated import check_run, correlated_event
from dpjax.strategies import Strategy
from dpjax.types import Sampler


class Target(NamedTuple):
    """The epsilon and delta that `dpjax.Mechanism.calibrate` was given, and its accountant."""

    epsilon: float
    delta: float
    method: str


class Risk(NamedTuple):
    """The most true positives of a membership attack that `dpjax.Mechanism.calibrate` was given."""

    true_positive_rate: float
    false_positive_rate: float

    # Only loss distributions have the whole trade-off curve, and no delta belongs to it.
    method = "pld"
    delta = None


@dataclass(frozen=True, kw_only=True)
class Spent:
    """The cost of an earlier run on the same data; `dpjax.training.earlier` reads it.

    Args:
      sampling: The sampler of its batches.
      runs: The multipliers of its steps, in order: pairs ``(multiplier, steps)``.
      preparation: The multipliers of its queries before the first step.
      unit: Whose data it protected, as of `dpjax.Mechanism`.
      projections: The number of random projections, if these estimated its norms.
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
        call = "mechanism.Spent"
        hint = "Runs are pairs (noise multiplier, steps)."
        multipliers = [checks.not_negative(call, "runs", z, hint) for z, _ in self.runs]
        counts = [checks.whole(call, "runs", n, hint, least=0) for _, n in self.runs]
        pairs = zip(multipliers, counts, strict=True)
        # Pairs of 0 steps are left out, because `dpjax.verify` refuses them on a card.
        runs = tuple((multiplier, count) for multiplier, count in pairs if count)
        # The class is frozen, so checked values replace those given by `object.__setattr__`.
        object.__setattr__(self, "runs", runs)
        object.__setattr__(self, "preparation", checked_queries(call, self.preparation))
        checked_unit(call, self.unit)
        if self.noise is not None:
            check_run(f"{call}(noise={self.noise.name})", self.noise, self.sampling, self.steps)
        object.__setattr__(self, "supplied", bool(self.supplied))  # a ledger has an array

    @classmethod
    def of_run(
        cls, facts: Mapping[str, Any], steps: int, *, supplied: bool = False
    ) -> tuple[Spent, ...]:
        """What the first steps of a described run have spent, after what earlier runs spent."""
        spent = [cls._read(run, run["randomness"] == "supplied") for run in facts["before"]]
        runs = schedules.first_steps(facts["multiplier_and_steps"], steps)
        spent.append(cls._read({**facts, "multiplier_and_steps": runs}, supplied))
        return tuple(spent)

    @classmethod
    def _read(cls, facts: Mapping[str, Any], supplied: bool) -> Spent:
        noise = dict(facts["noise"] or {})
        noise.pop("sensitivity", None)  # computed again, from the strategy and the sampler
        return cls(
            sampling=sampling.from_facts(facts["sampling"]),
            runs=tuple((float(z), steps) for z, steps in facts["multiplier_and_steps"]),
            preparation=tuple(map(float, facts["preparation"])),
            unit=facts["unit"],
            projections=facts["projections"],
            noise=strategies.from_facts(noise) if noise else None,
            supplied=supplied,
        )

    @property
    def steps(self) -> int:
        """How many steps it ran."""
        return sum(steps for _, steps in self.runs)

    @property
    def event(self) -> dp.DpEvent:
        """Its privacy event."""
        queries = map(accounting.gaussian, self.preparation)
        # One multiplier per step, because an event may depend on the place of a step in an epoch.
        values, counts = np.reshape(self.runs, (-1, 2)).T  # (0, 2) where no step ran
        multipliers = np.repeat(values, counts.astype(int))
        steps = steps_event(self.sampling, multipliers, self.projections, self.noise)
        return accounting.compose(*queries, steps)


def checked_unit(call: str, unit: str) -> str:
    """The word for whose data are protected; statements have it as ``one {unit}``."""
    if not str(unit).isidentifier():
        raise ValueError(f"{call}(unit={unit!r}): expected one word, such as 'patient'.")
    return unit


def checked_queries(call: str, preparation: Iterable[Any]) -> tuple[float, ...]:
    """The multipliers of queries before the first step, as Python's numbers."""
    hint = "It is the noise multiplier of a query."
    return tuple(checks.not_negative(call, "preparation", z, hint) for z in preparation)


def steps_event(
    sampler: Sampler,
    multipliers: np.ndarray,
    projections: int | None,
    noise: Strategy | None = None,
) -> dp.DpEvent:
    """The event of steps with white or correlated noise, and with known or estimated norms."""
    if noise is not None and projections is not None:
        return dp.NonPrivateDpEvent()  # no proof covers both together
    if noise is not None:
        return correlated_event(noise, sampler, multipliers)
    event = sampler.event(multipliers)
    if projections is None:
        return event
    # Estimated norms weaken each Gaussian of the sampler's event.
    return accounting.with_projections(event, projections)

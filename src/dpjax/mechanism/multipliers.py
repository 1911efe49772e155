# SPDX-License-Identifier: Apache-2.0
"""Noise multipliers in all their forms: a number, a schedule, one number per group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

from dpjax import accounting, schedules
from dpjax.types import NoiseMultiplier


@dataclass(frozen=True)
class Planned:
    """A schedule as the table of its values at every planned step.

    A second evaluation could differ: compiled, in another dtype, or by what it closes over.
    """

    # Not compared, because the table is accounted and run. A callable object may have no hash.
    schedule: optax.Schedule = field(compare=False)
    table: bytes
    """Float32."""

    @classmethod
    def of(cls, schedule: optax.Schedule, steps: int) -> Planned:
        """A schedule at this many steps; a longer plan evaluates the function again everywhere."""
        if isinstance(schedule, Planned):
            if steps <= schedule.values.size:
                return cls(schedule.schedule, schedule.values[:steps].tobytes())
            schedule = schedule.schedule
        return cls(schedule, schedules.values(schedule, steps).tobytes())

    def __repr__(self) -> str:
        ends = [f"{value:.4g}" for value in (*self.values[:1], *self.values[-1:])]
        return f"<schedule from {' to '.join(ends)}>"

    @property
    def values(self) -> Float[np.ndarray, " steps"]:
        """The value at each planned step."""
        return np.frombuffer(self.table, np.float32)

    def __call__(self, step: ArrayLike) -> Float[Array, "..."]:
        """The value at a step or at several steps; NaN beyond the plan."""
        step = jnp.asarray(step)
        # Steps outside the plan read the appended last entry.
        answers = jnp.asarray(np.append(self.values, np.float32(np.nan)))
        return answers[jnp.where((step >= 0) & (step < self.values.size), step, -1)]


def scaled(multiplier: NoiseMultiplier, factor: float) -> NoiseMultiplier:
    """A multiplier with all its noise ``factor`` times as large."""
    if isinstance(multiplier, Planned):
        # Float32 is the dtype of the table: a longer plan begins with the same numbers.
        inner = multiplier.schedule
        schedule = schedules.times(lambda step: jnp.asarray(inner(step), jnp.float32), factor)
        return Planned(schedule, (multiplier.values * np.float32(factor)).tobytes())
    if isinstance(multiplier, Sequence):
        return tuple(m * factor for m in multiplier)
    return schedules.times(multiplier, factor)


def growth(total: Any, count: float) -> Any:
    """The gradients' multiplier divided by the total: $(1 - z^2 / z_c^2)^{-1/2}$."""
    return 1.0 if count == 0 else (1 - (total / count) ** 2) ** -0.5


def left_for_gradients(total: NoiseMultiplier, count: float) -> NoiseMultiplier:
    """The multiplier of the sums; together with the count's it gives ``total``."""
    if callable(total):
        return lambda step: total(step) * growth(total(step), count)
    joint = accounting.effective_multiplier(np.ravel(total))
    return scaled(total, growth(joint, count))

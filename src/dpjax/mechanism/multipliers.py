# SPDX-License-Identifier: Apache-2.0
"""Noise multipliers in all their forms: a number, a schedule, one number per group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    """A schedule that was asked once, for every planned step; what it said then is what it is.

    A function may answer otherwise when it is compiled, in another precision, or because what
    it closes over has changed.  Here what is accounted, written down and run is one table.

    Args:
      schedule: What was asked, and is asked again if more steps are planned.
      table: Its answers, float32.
    """

    schedule: optax.Schedule
    table: bytes

    @property
    def values(self) -> Float[np.ndarray, " steps"]:
        """The multiplier of each planned step."""
        return np.frombuffer(self.table, np.float32)

    def __call__(self, step: ArrayLike) -> Float[Array, "..."]:
        """The multiplier of a step, or of several; of those beyond the plan, NaN."""
        step = jnp.asarray(step)
        # The last entry is for whatever lies outside.
        answers = jnp.asarray(np.append(self.values, np.float32(np.nan)))
        return answers[jnp.where((step >= 0) & (step < self.values.size), step, -1)]


def planned(multiplier: NoiseMultiplier, steps: int) -> NoiseMultiplier:
    """The same, where a schedule has answered for so many steps."""
    if not callable(multiplier):
        return multiplier
    if not isinstance(multiplier, Planned):
        return Planned(multiplier, schedules.values(multiplier, steps).tobytes())
    if steps > multiplier.values.size:
        return planned(multiplier.schedule, steps)
    return Planned(multiplier.schedule, multiplier.values[:steps].tobytes())


def scaled(multiplier: NoiseMultiplier, factor: float) -> NoiseMultiplier:
    """The same noise, ``factor`` times as large."""
    if isinstance(multiplier, Planned):
        asked = _times(multiplier.schedule, factor)
        return Planned(asked, (multiplier.values * np.float32(factor)).tobytes())
    if callable(multiplier):
        return _times(multiplier, factor)
    if isinstance(multiplier, Sequence):
        return tuple(m * factor for m in multiplier)
    return multiplier * factor


def _times(schedule: optax.Schedule, factor: float) -> optax.Schedule:
    return lambda step: schedule(step) * factor


def growth(total: Any, count: float) -> Any:
    """By how much the gradients' multiplier is above the total: $(1 - z^2 / z_c^2)^{-1/2}$."""
    return 1.0 if count == 0 else (1 - (total / count) ** 2) ** -0.5


def left_for_gradients(total: NoiseMultiplier, count: float) -> NoiseMultiplier:
    """The multiplier of the sums alone: with what the count takes, the total."""
    if callable(total):
        return lambda step: total(step) * growth(total(step), count)
    joint = accounting.effective_multiplier(np.ravel(total))
    return scaled(total, growth(joint, count))

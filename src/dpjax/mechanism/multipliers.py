# SPDX-License-Identifier: Apache-2.0
"""Noise multipliers in all their forms: a number, a schedule, one number per group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from dpjax import accounting, schedules
from dpjax.schedules import Planned
from dpjax.types import NoiseMultiplier


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

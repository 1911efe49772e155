# SPDX-License-Identifier: Apache-2.0
"""Noise multipliers in all their forms: a number, a schedule, one number per group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dpjax import accounting
from dpjax.types import NoiseMultiplier

__all__ = ["growth", "left_for_gradients", "scaled"]


def scaled(multiplier: NoiseMultiplier, factor: float) -> NoiseMultiplier:
    """The same noise, ``factor`` times as large."""
    if callable(multiplier):
        schedule = multiplier
        return lambda step: schedule(step) * factor
    if isinstance(multiplier, Sequence):
        return tuple(m * factor for m in multiplier)
    return multiplier * factor


def growth(total: Any, count: float) -> Any:
    """By how much the gradients' multiplier is above the total: $(1 - z^2 / z_c^2)^{-1/2}$."""
    return 1.0 if count == 0 else (1 - (total / count) ** 2) ** -0.5


def left_for_gradients(total: NoiseMultiplier, count: float) -> NoiseMultiplier:
    """The multiplier of the sums alone: with what the count takes, the total."""
    if callable(total):
        return lambda step: total(step) * growth(total(step), count)
    joint = accounting.effective_multiplier(np.ravel(total))
    return scaled(total, growth(joint, count))

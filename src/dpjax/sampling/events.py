# SPDX-License-Identifier: Apache-2.0
"""The privacy events of samplers.

A function imports accounting when it is called: drawing batches does not need that library, which
imports most of SciPy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from dp_accounting import DpEvent


def least(multipliers: np.ndarray, cycle: int) -> np.ndarray:
    """The smallest multiplier of each cycle."""
    starts = np.arange(0, len(multipliers), cycle)
    return np.minimum.reduceat(multipliers, starts) if len(multipliers) else multipliers


def gaussians(multipliers: np.ndarray, rate: float | np.ndarray) -> DpEvent:
    """Gaussian steps, Poisson-subsampled at one rate or at one for each step."""
    from dpjax import accounting

    return accounting.scheduled_gaussian(multipliers, rate)


def subsets(multipliers: np.ndarray, examples: int, batch_size: int) -> DpEvent:
    """Gaussian steps on uniform subsets of a fixed size."""
    from dpjax.accounting.events import without_replacement

    return without_replacement(multipliers, examples, batch_size)


def bare(multipliers: np.ndarray) -> DpEvent:
    """Steps whose batches are a release without noise."""
    from dp_accounting import NonPrivateDpEvent

    del multipliers
    return NonPrivateDpEvent()

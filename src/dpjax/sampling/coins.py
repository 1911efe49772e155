# SPDX-License-Identifier: Apache-2.0
"""A coin for each example, and the Gaussian events of such draws.

A coin is one 32-bit word of the example's own, so no example moves another in or out of a draw.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dpjax import _draws, trees
from dpjax.types import Draw, Key, Purpose

if TYPE_CHECKING:
    from dp_accounting import DpEvent

WORDS = 2**32


def largest_word(rate: float) -> int:
    """An example is drawn if a uniform 32-bit word is at most this; below 0 at too low rates."""
    # Rounding down keeps the rate that runs at or below the accounted one; a float32 uniform has
    # only 23 bits, and at rates of 1e-5 its rounding is one per cent.
    return math.floor(rate * WORDS) - 1


def coins(key: Key, below: Array, some: Any) -> Draw:
    """Draws each eligible example whose uniform 32-bit word is at most its threshold."""
    chosen = (jax.random.bits(key, below.shape, jnp.uint32) <= below) & some
    return _draws.listed(chosen)


def parts_of(key: Key, examples: int, parts: int) -> Array:
    """The part of each example, the same at every step of a run."""
    # By a word of its own, so that no example moves another one to a different part. A part is at
    # most 2^-32 likelier than one over their number, which `accounting.allocation` counts.
    return jax.random.bits(trees.step_key(key, Purpose.PARTS, 0), (examples,), jnp.uint32) % parts


def least(multipliers: np.ndarray, cycle: int) -> np.ndarray:
    """The smallest multiplier of each cycle."""
    starts = np.arange(0, len(multipliers), cycle)
    return np.minimum.reduceat(multipliers, starts) if len(multipliers) else multipliers


def gaussians(multipliers: np.ndarray, rate: float | np.ndarray) -> DpEvent:
    """Gaussian steps, Poisson-subsampled at one rate or at one for each step."""
    # Imported for events alone: drawing batches does not need the accounting library, which imports
    # most of SciPy.
    from dpjax import accounting

    return accounting.scheduled_gaussian(multipliers, rate)

# SPDX-License-Identifier: Apache-2.0
"""A coin for each example.

A coin is one 32-bit word of the example's own, so no example moves another in or out of a draw.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dpjax import trees
from dpjax.sampling.sparse import listed
from dpjax.types import Draw, Key, Purpose

WORDS = 2**32


def largest_word(rate: float) -> int:
    """An example is drawn if a uniform 32-bit word is at most this; below 0 at too low rates."""
    # Rounding down keeps the rate that runs at or below the accounted one; a float32 uniform has
    # only 23 bits, and at rates of 1e-5 its rounding is one per cent.
    return math.floor(rate * WORDS) - 1


def coins(key: Key, below: Array, some: Any) -> Draw:
    """Draws each eligible example whose uniform 32-bit word is at most its threshold."""
    chosen = (jax.random.bits(key, below.shape, jnp.uint32) <= below) & some
    return listed(chosen)


def parts_of(key: Key, examples: int, parts: int) -> Array:
    """The part of each example, the same at every step of a run."""
    # By a word of its own, so that no example moves another one to a different part. A part is at
    # most 2^-32 likelier than one over their number, which `accounting.allocation` counts.
    return jax.random.bits(trees.step_key(key, Purpose.PARTS, 0), (examples,), jnp.uint32) % parts

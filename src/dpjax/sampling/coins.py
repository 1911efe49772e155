# SPDX-License-Identifier: Apache-2.0
"""A coin for each example.

A coin is one 32-bit word of the example's own, so no example moves another in or out of a draw.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dpjax.sampling.sparse import listed
from dpjax.types import Draw, Key

WORDS = 2**32


def largest_word(rate: float) -> np.uint32:
    """An example is drawn if a uniform 32-bit word is at most this; raises at too low rates."""
    # Rounding down keeps the rate that runs at or below the accounted one; a float32 uniform has
    # only 23 bits, and at rates of 1e-5 its rounding is one per cent.
    return np.uint32(math.floor(rate * WORDS) - 1)


def coins(key: Key, below: Array, some: Any) -> Draw:
    """Draws each eligible example whose uniform 32-bit word is at most its threshold."""
    return listed((jax.random.bits(key, below.shape, jnp.uint32) <= below) & some)

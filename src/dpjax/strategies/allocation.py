# SPDX-License-Identifier: Apache-2.0
"""Random allocation: how much the moves of two possible bins of an example have in common.

An example that is in every step of one random bin hides among the bins, as far as their columns of
C are apart. `dpjax.accounting.allocation` proves what this is worth.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from dpjax.strategies.strategy import Strategy


def overlaps(strategy: Strategy, bins: int) -> Float[np.ndarray, " bins"]:
    r"""Bounds on the products of the moves of two bins, sorted within a row.

    With $m_{tb} = \sum_{s \bmod n = b} |C_{ts}|$ for n bins, the i-th number is the largest of the
    i-th largest entries of the rows of $M^T M$.

    Args:
      strategy: Its C, of at most 8,192 steps.
      bins: The number of steps of an epoch; an example is in every ``bins``-th step.

    Example:
      >>> from dpjax import strategies
      >>> overlaps(strategies.white(6), bins=3).round(6)
      array([2., 0., 0.])
      >>> overlaps(strategies.toeplitz(6, [1.0, 1.0]), bins=3).round(6)
      array([4., 2., 2.])
    """
    magnitudes = np.abs(strategy.matrix())
    moves = np.stack([magnitudes[:, first::bins].sum(axis=1) for first in range(bins)], axis=1)
    # Sums of float64 numbers, none negative, have no relative error of this size.
    products = moves.T @ moves * (1 + 1e-9)
    return np.sort(products, axis=1)[:, ::-1].max(axis=0)

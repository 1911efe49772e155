# SPDX-License-Identifier: Apache-2.0
"""`scored`: Poisson sampling at a rate for each bin of public scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from dpjax import trees
from dpjax.sampling.coins import WORDS, coins
from dpjax.sampling.events import stated
from dpjax.sampling.sizes import checked_count, checked_sizes
from dpjax.sampling.sparse import LARGEST
from dpjax.types import Draw, Key, Purpose, Sampler


def scored(
    bins: Sequence[int] | np.ndarray,
    rates: Sequence[Sequence[float]] | np.ndarray,
    *,
    steps_per_row: int,
    batch_size: float,
) -> Sampler:
    r"""A private curriculum: Poisson sampling at a rate for each bin of public scores.

    Args:
      bins: The bin of each example, from 0: the score that a *public* scorer gives to that
        example alone, cut at public thresholds. A scorer trained with `dpjax.dpsgd` counts as
        public if ``Mechanism(before=...)`` accounts for its training.
      rates: The sampling rate of each bin, ``[rows, bins]``, from 0 to 1.
      steps_per_row: How many steps use a row; the last row is used to the end.
      batch_size: The divisor of sums; public. The number of examples in a bin is private, so
        this is about the rates times the *planned* sizes of the bins.

    Privacy:
      With add-or-remove neighbours: the bin of an example does not depend on the other
      examples, so each step is the Poisson-subsampled Gaussian at the rate of its bin. The
      event takes the largest rate of any bin at each step, an upper bound. It does not cover
      bins cut at quantiles of private scores, or rates computed from counts of private data.

    Example:
      >>> bins = np.arange(60_000) // 12_000  # by a public scorer: the easiest first
      >>> opened = np.tri(5)  # one bin more every four epochs
      >>> sampler = scored(bins, 0.01 * opened, steps_per_row=400, batch_size=600)
      >>> sampler.facts["rates"]
      [[0.01, 400], [0.01, 400], [0.01, 400], [0.01, 400], [0.01, 400]]
    """
    places, table = np.asarray(bins), np.asarray(rates, np.float64)
    _, batch_size = checked_sizes("scored", places.size, batch_size, LARGEST)
    steps_per_row = checked_count("scored", "steps_per_row", steps_per_row)
    _check_rates(places, table)
    # An upper bound for every example: who is in which bin must not be revealed by the accounting.
    largest, of = table.max(axis=1), jnp.asarray(places, jnp.int32)
    below = jnp.asarray(np.maximum(np.floor(table * WORDS) - 1, 0).astype(np.uint32))
    some = jnp.asarray(table > 0)  # at rate 0 `below` is 0, and a word of 0 would be drawn

    def draw(key: Key, step: Any) -> Draw:
        row = jnp.minimum(step // steps_per_row, len(table) - 1)
        return coins(trees.step_key(key, Purpose.SAMPLING, step), below[row][of], some[row][of])

    return Sampler(
        name="scored",
        capacity=places.size,
        draw=draw,
        claim="Poisson sampling at a rate for each bin of public scores; the largest is counted",
        fingerprint=trees.fingerprint([np.asarray(places, np.int64), table]),
        independent=True,
        **stated(places.size, batch_size, rates=[[float(rate), steps_per_row] for rate in largest]),
    )


def _check_rates(bins: np.ndarray, rates: np.ndarray) -> None:
    possible = (rates == 0) | ((rates >= 1 / WORDS) & (rates <= 1))
    if rates.ndim != 2 or not np.all(possible):
        raise ValueError(
            "sampling.scored(rates): expected rates [rows, bins] from 0 to 1, each 0 or at least "
            "2^-32."
        )
    integers = bins.ndim == 1 and np.issubdtype(bins.dtype, np.integer)
    if not integers or np.any(bins < 0) or np.any(bins >= rates.shape[1]):
        raise ValueError(
            f"sampling.scored(bins): expected one whole number from 0 to {rates.shape[1] - 1} for "
            "each example, as np.digitize(scores, thresholds) gives."
        )

# SPDX-License-Identifier: Apache-2.0
"""Samplers whose steps draw independently: `poisson`, `scored`, `full` and `fixed`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jaxtyping import Array

from dpjax import trees
from dpjax.sampling.events import stated
from dpjax.sampling.sizes import checked_count, checked_sizes, checked_whole_sizes, is_sparse
from dpjax.sampling.sparse import LARGEST, block_of, distinct, listed, scattered
from dpjax.types import Draw, Key, Neighbours, Purpose, Sampler

WORDS = 2**32


def largest_word(rate: float) -> np.uint32:
    """An example is drawn if a uniform 32-bit word is at most this; raises at too low rates."""
    # Rounding down keeps the rate that runs at or below the accounted one; a float32 uniform has
    # only 23 bits, and at rates of 1e-5 its rounding is one per cent.
    return np.uint32(math.floor(rate * WORDS) - 1)


def coins(key: Key, largest: Array, eligible: Any) -> Draw:
    """Draws each eligible example whose uniform 32-bit word is at most its ``largest``."""
    words = jax.random.bits(key, largest.shape, jnp.uint32)
    return listed((words <= largest) & eligible)


def poisson(examples: int, batch_size: float) -> Sampler:
    r"""Each example joins each batch independently with equal probability: Poisson sampling.

    For up to 65,536 examples, and for batches above a sixteenth of the data, each example has a
    coin of its own: exact Poisson sampling. Smaller batches of larger data sets are drawn by balls
    that fall on blocks of examples, in time and memory of the batch. Whichever other examples are
    drawn, an example then joins with probability at most $q$. The amplification below needs no
    more, and holds without an error term. The law of a draw differs from Poisson sampling by less
    than $2^{-70}$ a block.

    Args:
      examples: Size of the data set.
      batch_size: The *expected* number of examples a step; sums are divided by it.

    Privacy:
      With add-or-remove neighbours: the Poisson-subsampled Gaussian mechanism at rate
      $q = \mathrm{batch\_size}/\mathrm{examples}$.

    Example:
      >>> sampler = poisson(examples=60_000, batch_size=256)
      >>> round(sampler.sampling_rate, 5)
      0.00427

    References:
      Abadi et al., "Deep Learning with Differential Privacy", 2016; Zhu and Wang,
      "Poisson Subsampled Renyi Differential Privacy", 2019.
    """
    examples, batch_size = checked_sizes("poisson", examples, batch_size)
    rate = batch_size / examples
    if batch_size < 1:
        text = "sampling.poisson(batch_size=%g): for a rate, give the examples that it draws: %g."
        logging.warning(text, batch_size, batch_size * examples)

    if is_sparse(examples, batch_size):
        kind = "Poisson sampling by blocks, never above its rate"
        block = block_of(rate)
        capacity = block.capacity(examples)

        def batch(key: Key) -> Draw:
            return scattered(key, examples, block)
    else:
        kind = "exact Poisson sampling"
        largest = largest_word(rate)
        capacity = examples

        def batch(key: Key) -> Draw:
            return coins(key, jnp.full(examples, largest, jnp.uint32), eligible=True)

    def draw(key: Key, step: Any) -> Draw:
        return batch(trees.step_key(key, Purpose.SAMPLING, step))

    return Sampler(
        name="poisson",
        paper_name="Poisson",
        capacity=capacity,
        draw=draw,
        claim=f"{kind}; amplification by sampling is proved and counted",
        independent=True,
        **stated(examples, batch_size, rates=[[rate, 1]]),  # one rate in all steps
    )


def full(examples: int) -> Sampler:
    """Every step sees the whole data set; there is no amplification by sampling.

    Example:
      >>> full(1279).sampling_rate
      1.0
    """
    examples, _ = checked_sizes("full", examples, examples, LARGEST)
    # This array is made once: it is a constant of the program, and no step makes another.
    everything = jnp.arange(examples)
    return Sampler(
        name="full",
        capacity=examples,
        draw=lambda key, step: Draw(everything, jnp.ones(examples, bool)),
        claim="every step uses every example; plain composition of Gaussians",
        independent=True,
        padded=False,
        **stated(examples, examples, place="any"),
    )


def fixed(examples: int, batch_size: int) -> Sampler:
    """Every step sees a fresh uniform subset of exactly ``batch_size`` examples.

    Small batches of large data sets are drawn with replacement, and repeated examples again until
    all are distinct, which is exactly uniform too and takes time and memory of the batch.

    Privacy:
      Proved for replace-one neighbours, under which the sum moves by twice the
      sensitivity; `dpjax.accounting` converts the multiplier itself.

    Example:
      >>> sampler = fixed(examples=1000, batch_size=4)
      >>> draw = sampler.draw(jax.random.key(0), 0)
      >>> int(draw.size), len(set(draw.indices.tolist())), str(sampler.neighbours)
      (4, 4, 'replace-one')
    """
    examples, batch_size = checked_whole_sizes("fixed", examples, batch_size)

    def draw(key: Key, step: Any) -> Draw:
        # Batches of different steps are independent, as the event assumes.
        key = trees.step_key(key, Purpose.SAMPLING, step)
        mask = jnp.ones(batch_size, bool)
        if is_sparse(examples, batch_size):
            return Draw(distinct(key, examples, batch_size), mask)
        # A prefix of a uniform permutation is a uniform subset.
        return Draw(jax.random.permutation(key, examples)[:batch_size], mask)

    return Sampler(
        name="fixed",
        capacity=batch_size,
        draw=draw,
        neighbours=Neighbours.REPLACE_ONE,
        # The size is public and constant, so an example cannot leave without another taking its
        # place.
        claim="uniform batches of a fixed size; proved for replace-one neighbours (RDP)",
        independent=True,
        padded=False,
        **stated(examples, batch_size, event="subset"),
    )


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
        example only, cut at public thresholds. A scorer trained with `dpjax.dpsgd` counts as
        public if ``Mechanism(before=...)`` accounts for its training.
      rates: The sampling rate of each bin, ``[rows, bins]``, from 0 to 1.
      steps_per_row: How many steps use a row; the last row is used to the end.
      batch_size: The divisor of sums; public. The number of examples in a bin is private, so
        this is about the rates times the *planned* sizes of the bins.

    Privacy:
      With add-or-remove neighbours: the bin of an example does not depend on the other
      examples, so each step is the Poisson-subsampled Gaussian at the rate of its bin. The
      event takes the largest rate of any bin at each step. It does not cover bins cut at quantiles
      of private scores, or rates computed from counts of private data.

    Example:
      >>> bins = np.arange(60_000) // 12_000  # by a public scorer: the easiest first
      >>> opened = np.tri(5)  # one bin more every four epochs
      >>> sampler = scored(bins, 0.01 * opened, steps_per_row=400, batch_size=600)
      >>> sampler.facts["rates"]
      [[0.01, 400], [0.01, 400], [0.01, 400], [0.01, 400], [0.01, 400]]
    """
    bin_numbers = np.asarray(bins)  # [examples]
    table = np.asarray(rates, np.float64)  # [rows, bins]
    _, batch_size = checked_sizes("scored", bin_numbers.size, batch_size, LARGEST)
    steps_per_row = checked_count("scored", "steps_per_row", steps_per_row)
    # A smaller rate than 2^-32 is below that of a single 32-bit word.
    possible = (table == 0) | ((table >= 1 / WORDS) & (table <= 1))
    if table.ndim != 2 or not np.all(possible):
        raise ValueError(
            "sampling.scored(rates): expected rates [rows, bins] from 0 to 1, each 0 or at least "
            "2^-32."
        )
    integers = bin_numbers.ndim == 1 and np.issubdtype(bin_numbers.dtype, np.integer)
    if not integers or np.any(bin_numbers < 0) or np.any(bin_numbers >= table.shape[1]):
        raise ValueError(
            f"sampling.scored(bins): expected one whole number from 0 to {table.shape[1] - 1} for "
            "each example, as np.digitize(scores, thresholds) gives."
        )
    # The largest rate of a row holds for every example: the accounting must not reveal who is in
    # which bin.
    counted_rates = [[float(rate), steps_per_row] for rate in table.max(axis=1)]
    bin_of = jnp.asarray(bin_numbers, jnp.int32)
    # An example is drawn if a uniform 32-bit word is at most this, as in `largest_word`.
    largest_words = np.maximum(np.floor(table * WORDS) - 1, 0)
    largest = jnp.asarray(largest_words.astype(np.uint32))  # [rows, bins]
    # At rate 0 the word 0 still draws an example, so these bins are not eligible.
    eligible = jnp.asarray(table > 0)

    def draw(key: Key, step: Any) -> Draw:
        row = jnp.minimum(step // steps_per_row, len(table) - 1)
        key = trees.step_key(key, Purpose.SAMPLING, step)
        return coins(key, largest[row][bin_of], eligible[row][bin_of])

    return Sampler(
        name="scored",
        rates_by_bin=True,
        capacity=bin_numbers.size,
        draw=draw,
        claim="Poisson sampling at a rate for each bin of public scores; the largest is counted",
        fingerprint=trees.fingerprint([np.asarray(bin_numbers, np.int64), table]),
        independent=True,
        **stated(bin_numbers.size, batch_size, rates=counted_rates),
    )

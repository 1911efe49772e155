# SPDX-License-Identifier: Apache-2.0
"""Samplers in which all examples are alike: `poisson`, `full` and `fixed`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from absl import logging

from dpjax import trees
from dpjax.sampling.coins import coins, largest_word
from dpjax.sampling.events import stated
from dpjax.sampling.sizes import checked_sizes, checked_whole_sizes, is_sparse
from dpjax.sampling.sparse import LARGEST, block_of, distinct, scattered
from dpjax.types import Draw, Key, Neighbours, Purpose, Sampler


def poisson(examples: int, batch_size: float) -> Sampler:
    r"""Each example joins each batch independently with equal probability: Poisson sampling.

    For up to 65,536 examples, and for batches above a sixteenth of the data, each example has a
    coin of its own: exact Poisson sampling, with draws of any size. Smaller batches of larger data
    sets are drawn by balls that fall on blocks of examples, in time and memory of the batch.
    Whichever other examples are drawn, an example then joins with probability at most $q$. The
    amplification below needs no more, and holds without an error term. The law of a draw differs
    from Poisson sampling by less than $2^{-70}$ a block; a batch has about a quarter as many blocks
    as examples, or fewer.

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
    rate, sparse = batch_size / examples, is_sparse(examples, batch_size)
    if batch_size < 1:
        text = "sampling.poisson(batch_size=%g): for a rate, give the examples that it draws: %g."
        logging.warning(text, batch_size, batch_size * examples)

    block = block_of(rate) if sparse else None
    largest = 0 if sparse else largest_word(rate)

    def draw(key: Key, step: Any) -> Draw:
        key = trees.step_key(key, Purpose.SAMPLING, step)
        if block is not None:
            return scattered(key, examples, block)
        return coins(key, jnp.full(examples, largest, jnp.uint32), True)

    exact = "exact Poisson sampling"
    kind = "Poisson sampling by blocks, never above its rate" if sparse else exact
    return Sampler(
        name="poisson",
        capacity=examples if block is None else block.capacity(examples),
        draw=draw,
        claim=f"{kind}; amplification by sampling is proved and counted",
        independent=True,
        **stated(examples, batch_size, rates=[[rate, 1]]),
    )


def full(examples: int) -> Sampler:
    """Every step sees the whole data set; there is no amplification by sampling.

    Example:
      >>> full(1279).sampling_rate
      1.0
    """
    examples, _ = checked_sizes("full", examples, examples, LARGEST)
    # Made once: a constant of the program, not a new array in every step.
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

    Args:
      examples: The number of examples in the data set; public.
      batch_size: Examples a step; public.

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

    sparse = is_sparse(examples, batch_size)

    def draw(key: Key, step: Any) -> Draw:
        # Batches of different steps are independent, as the event assumes.
        key, mask = trees.step_key(key, Purpose.SAMPLING, step), jnp.ones(batch_size, bool)
        if sparse:
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

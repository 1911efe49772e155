# SPDX-License-Identifier: Apache-2.0
"""Samplers in which an example returns after a fixed number of steps, for correlated noise."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dpjax import trees
from dpjax.sampling.events import stated
from dpjax.sampling.independent import coins, largest_word
from dpjax.sampling.sizes import checked_count, checked_sizes
from dpjax.sampling.sparse import LARGEST, listed
from dpjax.types import Draw, Key, Purpose, Sampler


def cyclic_poisson(examples: int, batch_size: float, *, cycle: int) -> Sampler:
    r"""Poisson sampling from one part of the data after the other, for correlated noise.

    Each example belongs to one of $b$ parts, drawn once for the run, independently of all other
    examples; $b$ is ``cycle``. Step $t$ draws from part $t \bmod b$, each example with probability
    $q = b \cdot \mathrm{batch\_size} / \mathrm{examples}$. So an example can be in every $b$-th
    step only, and banded noise with at most $b$ bands is amplified.

    Args:
      examples: As for `poisson`.
      batch_size: As for `poisson`.
      cycle: $b$, the number of parts; at most examples / batch_size.

    Privacy:
      With add-or-remove neighbours: $T$ steps are $\lceil T/b \rceil$ Poisson-subsampled Gaussians
      at rate $q$. The same holds with banded noise of at most $b$ bands, whose multiplier is then
      relative to one participation. With more bands nothing is amplified.

    Example:
      >>> import numpy as np
      >>> sampler = cyclic_poisson(examples=60_000, batch_size=500, cycle=16)
      >>> event = sampler.event(np.ones(160))
      >>> event.count, round(event.event.sampling_probability, 4)
      (10, 0.1333)

    References:
      Choquette-Choo, Ganesh, McKenna, McMahan, Rush, Thakurta and Xu, "(Amplified) Banded Matrix
      Factorization: A unified approach to private training", 2023, theorem 4.
    """
    examples, batch_size = checked_sizes("cyclic_poisson", examples, batch_size, LARGEST)
    cycle = checked_count("cyclic_poisson", "cycle", cycle)
    rate = cycle * batch_size / examples
    if rate > 1:
        raise ValueError(
            f"sampling.cyclic_poisson(examples={examples}, batch_size={batch_size}, "
            f"cycle={cycle}): expected a cycle of at most {int(examples // batch_size)}."
        )
    largest = largest_word(rate)  # a word up to this one draws an example

    def draw(key: Key, step: Any, coin_key: Key | None = None) -> Draw:
        # Parts last for the run and follow from `key`. A run gives a `coin_key` of its own, so two
        # runs from one state have the same parts and independent coins.
        parts = parts_of(trees.step_key(key, Purpose.PARTS, 0), examples, cycle)  # [examples]
        here = parts == step % cycle
        if coin_key is None:
            coin_key = key
        step_key = trees.step_key(coin_key, Purpose.SAMPLING, step)
        return coins(step_key, jnp.full(examples, largest, jnp.uint32), eligible=here)

    return Sampler(
        name="cyclic_poisson",
        paper_name="cyclic Poisson",
        capacity=examples,
        draw=draw,
        claim=f"Poisson sampling from {cycle} parts in turn; one amplified step a cycle is proved",
        # A rate for 1 cycle and, because it is the last one, for all later cycles. An example has
        # the same step in each cycle, and a coin decides each time whether it takes part.
        **stated(examples, batch_size, rates=[[rate, 1]], cycle=cycle, place="coin"),
        coins=True,  # `draw` takes a second key, for the coins
    )


def balls_in_bins(examples: int, batch_size: float) -> Sampler:
    """Each example falls into one of the batches of an epoch, the same in every epoch.

    An example returns after exactly ``examples // batch_size`` steps, and so correlated noise has a
    small sensitivity.

    Args:
      examples: Size of the data set.
      batch_size: What sums are divided by: the *expected* number of examples a step, if it divides
        ``examples``. Otherwise batches are larger, by less than a factor of 2.

    Privacy:
      With add-or-remove neighbours, proved without amplification: one Gaussian an epoch, with the
      epoch's smallest multiplier. With a strategy, `strategies.white` included, the event also
      counts that the batch is unknown, where batches overlap little.

    Example:
      >>> import numpy as np
      >>> balls_in_bins(examples=60_000, batch_size=500).event(np.ones(240))
      SelfComposedDpEvent(event=GaussianDpEvent(noise_multiplier=1.0), count=2)

    References:
      Chua, Ghazi, Harrison, Kamath, Kumar, Leeman, Manurangsi, Sinha and Zhang, "Balls-and-Bins
      Sampling for DP-SGD", 2024.
    """
    examples, batch_size = checked_sizes("balls_in_bins", examples, batch_size, LARGEST)
    bins = int(examples // batch_size)
    description = stated(examples, batch_size, cycle=bins, place="random")

    def draw(key: Key, step: Any, run_key: Key = None) -> Draw:
        if run_key is None:  # a training state holds one
            run_key = description["bins"].key(key, step)
        return listed(parts_of(run_key, examples, bins) == step % bins)

    return Sampler(
        name="balls_in_bins",
        capacity=examples,
        draw=draw,
        claim="one random batch of the epoch for each example, the same in every epoch",
        **description,
    )


def parts_of(key: Key, examples: int, parts: int) -> Array:
    """The part of each example, the same at every step of a run; consumes the key."""
    # Each example has a word of its own, so no example moves another one. A part is at most 2^-32
    # likelier than one over their number, which `dpjax.accounting` counts.
    return jax.random.bits(key, (examples,), jnp.uint32) % parts

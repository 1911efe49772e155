# SPDX-License-Identifier: Apache-2.0
r"""Random allocation: in each epoch, every example falls into one of the batches, afresh.

An epoch of $N$ examples has $t$ batches, one for each step; the bin of an example is the number of
its batch. The guarantee needs this:

    **Whichever bins the other examples of an epoch have, an example is in each bin with
    probability at most $1/t$, and in one bin at most.**

An example whose bins are less likely than $1/t$ is one that has a uniform bin, and then takes part
by a coin. So an epoch is a mixture, over these coins, of epochs in which the example adds nothing
to some steps, and divergences are jointly convex.

**Few examples** have words of their own: a uniform 64-bit word modulo $t$. The words beyond the
last multiple of $t$ are not a bin, so no bin is likelier than $1/t$. An example has such a word
with probability below $2^{-64}\, t$, and then misses the epoch.

**Many examples** are put in a pseudo-random order, and bins are consecutive pieces of it, so a
draw takes time of its batch. In a uniform order, examples have independent uniform bins if and only
if the sizes of bins are multinomial. These have a short exact form. Draw a Poisson number $k_s$ for
each bin, all with one mean $\lambda$. Given their sum, they are the sizes of as many independent
uniform choices. The rest of the examples choose one by one, by words as above. With
$\lambda t = N - 11 \sqrt{N}$ the rest is positive, and at most $22 \sqrt{N}$, but for a probability
below $2^{-80}$.

Poisson numbers come from a table of integer probabilities, which moves the law of a bin by less
than $2^{-70}$, and a draw of more examples than it has room for is as rare. The order is a Feistel
network over threefry (`sparse.permuted`): the guarantee assumes that it passes for a uniform order,
as the noise assumes that threefry passes for random bits. The table and the words take time of the
number of bins and of $\sqrt{N}$ at each step, because a draw keeps nothing from the last one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt

from dpjax.sampling.events import stated
from dpjax.sampling.sizes import checked_count, is_sparse
from dpjax.sampling.sparse import LARGEST, digits, less, listed, permuted
from dpjax.types import Draw, Key, Sampler

# How many words of 32 bits a coin has, and how many a number from a table.
_COIN = 2
_WORDS = 3


def random_allocation(examples: int, batches: int) -> Sampler:
    r"""Every example once an epoch: in one of its ``batches``, uniform, independent and afresh.

    Step $s$ is batch $s \bmod \mathrm{batches}$ of its epoch, so ``steps=15 * batches`` is 15
    epochs. Sizes of batches vary, as Poisson's do, and no batch is truncated. Up to 65,536
    examples, or with fewer than 16 batches, bins are exact. Beyond, they are pieces of a
    pseudo-random order, and a draw takes time and memory of its batch, of the number of batches and
    of the square root of ``examples``.

    Args:
      examples: Size of the data set, at most $2^{31} - 1$.
      batches: The number of steps of an epoch. Sums are divided by ``examples / batches``, the
        expected size of a batch.

    Privacy:
      With add-or-remove neighbours: an epoch is a Gaussian mechanism whose example is in one
      unknown step. Its epsilon is about that of Poisson sampling, and an epoch that ends early
      counts the steps that ran. Correlated noise is refused: nothing is proved for noise that
      epochs with independent bins share. To see each example $k$ times in $t$ steps, take $k$
      epochs of $t / k$ batches.

    Example:
      >>> sampler, key = random_allocation(examples=6, batches=2), jax.random.key(0)
      >>> epoch = [sampler.draw(key, step) for step in (0, 1)]
      >>> sorted(int(i) for draw in epoch for i in draw.indices[: draw.size])
      [0, 1, 2, 3, 4, 5]

    References:
      Feldman and Shenfeld, "Privacy Amplification by Random Allocation", 2025; Chua, Ghazi,
      Harrison, Kamath, Kumar, Leeman, Manurangsi, Sinha and Zhang, "Balls-and-Bins Sampling for
      DP-SGD", 2024.
    """
    examples = checked_count("random_allocation", "examples", examples)
    batches = checked_count("random_allocation", "batches", batches, examples)
    batch_size = examples / batches
    capacity = examples
    batch = partial(_batch_of_bins, examples, batches)
    kind = "random"
    if is_sparse(examples, batch_size):
        kind = "pseudo-random"
        # Bernstein's inequality: a binomial size of mean b exceeds b + x with probability at most
        # exp(-x^2 / (2b + 2x/3)). That is exp(-60), below 2^-86, for x = 20 + sqrt(400 + 120 b).
        room = batch_size + 20 + math.sqrt(400 + 120 * batch_size)
        capacity = min(examples, math.ceil(room))
        batch = _batch_of_order(examples, batches, capacity)
    description = stated(examples, batch_size, event="allocation", cycle=batches)

    def draw(key: Key, step: Any, epoch_key: Key = None) -> Draw:
        # A training run gives the key of the current epoch. Without one it follows from `key`.
        if epoch_key is None:
            epoch_key = description["bins"].key(key, step)
        return batch(epoch_key, step % batches)

    return Sampler(
        name="random_allocation",
        capacity=capacity,
        draw=draw,
        claim=f"one {kind} batch of each epoch for each example; amplification is proved",
        **description,
    )


def _batch_of_bins(examples: int, batches: int, epoch_key: Key, number: Any) -> Draw:
    """The examples whose bin in an epoch has this number."""
    return listed(bins_of(epoch_key, examples, batches) == number)


def _batch_of_order(examples: int, batches: int, capacity: int) -> Callable[[Key, Any], Draw]:
    """``(key of an epoch, number of a batch) -> Draw``: one piece of the pseudo-random order."""
    piece = _pieces(examples, batches)

    def batch(epoch_key: Key, number: Any) -> Draw:
        for_order, for_sizes = jax.random.split(epoch_key)
        start, size = piece(for_sizes, number)
        # A window of `capacity` places of the order is read. Near the end of the order the window
        # begins before the piece, because `permuted` may walk forever from a place beyond the end.
        first = jnp.minimum(start, examples - capacity)
        indices = permuted(for_order, examples, np.arange(capacity), first)  # of the window
        places = jnp.arange(capacity, dtype=jnp.int32)
        start_in_window = start - first
        in_piece = (places >= start_in_window) & (places < start_in_window + size)
        # The indices of the piece come first, because `LARGEST` is above them. They are sorted, so
        # a stream reads forwards.
        ordered = jnp.sort(jnp.where(in_piece, indices, LARGEST))
        mask = places < size
        # Padding needs valid indices. `LARGEST` is not one, and any index of the window is.
        return Draw(jnp.where(mask, ordered, indices), mask)

    return batch


def bins_of(key: Key, size: int, bins: int) -> Int[Array, " size"]:
    """Independent uniform bins; -1, which is none, with probability below bins * 2^-64.

    A bin is a number of 64 random bits modulo ``bins``, by long division in 32 bits.
    """
    words = jax.random.bits(key, (size, _COIN), jnp.uint32)
    count_of_numbers = 2 ** (32 * _COIN)
    # Up to the last multiple of ``bins``, all bins are equally likely. Larger numbers have no bin,
    # because they make the first bins likelier.
    last = count_of_numbers - count_of_numbers % bins - 1
    # The bits of the second word join the remainder a few at a time, so it stays below 2^32.
    remainder = words[:, 0] % bins
    width = 32 - bins.bit_length()
    bits_left = 32
    while bits_left:
        count = min(width, bits_left)
        bits_left -= count
        next_bits = (words[:, 1] >> bits_left) & (2**count - 1)
        remainder = ((remainder << count) | next_bits) % bins
    beyond = less(jnp.asarray(digits(last, _COIN), jnp.uint32), words)
    return jnp.where(beyond, -1, remainder.astype(jnp.int32))


def _pieces(
    examples: int, bins: int
) -> Callable[[Key, Any], tuple[Int[Array, ""], Int[Array, ""]]]:
    """``(key, number of a bin) -> (start, size)`` of the bin's piece of the order.

    Each bin first has a Poisson number of places. The examples that these numbers leave choose a
    bin one by one, and each adds a place to it; see the top of this file.
    """
    slack = 11 * math.isqrt(examples)
    # On average the Poisson numbers together leave `slack` examples, or slightly more: the fraction
    # is rounded down to a multiple of 2^-32.
    mean = Fraction((examples - slack) * 2**32 // bins, 2**32)
    least, tails = poisson_table(mean)

    def piece(key: Key, number: Any) -> tuple[Int[Array, ""], Int[Array, ""]]:
        for_table, for_rest = jax.random.split(key)
        words = jax.random.bits(for_table, (bins, _WORDS), jnp.uint32)
        # A Poisson number for each bin, [bins], by inversion: `least`, and one more for each tail
        # that is above the random number of the bin.
        sizes = least + _count_above(words, jnp.asarray(tails))
        # The examples that are left choose a bin one by one. Their mean number is from `slack` to
        # `slack + 1`, and their number from 0 to twice that, except with a probability below 2^-80.
        rest = examples - jnp.sum(sizes, dtype=jnp.int32)
        most = 2 * slack + 2
        chosen = bins_of(for_rest, most, bins)
        is_rest = jnp.arange(most, dtype=jnp.int32) < rest
        chosen = jnp.where(is_rest, chosen, -1)

        # A piece starts after the pieces of all bins before it.
        is_before = jnp.arange(bins, dtype=jnp.int32) < number
        start = jnp.sum(jnp.where(is_before, sizes, 0), dtype=jnp.int32)
        start += jnp.sum((chosen >= 0) & (chosen < number), dtype=jnp.int32)
        size = sizes[number] + jnp.sum(chosen == number, dtype=jnp.int32)
        return start, size

    return piece


def poisson_table(mean: Fraction) -> tuple[int, np.ndarray]:
    """A table of a Poisson number X: the least value ``m`` that it takes here, and its tails.

    Row i of the tails is the probability of X >= m + 1 + i, in units of 2^-96, as words of 32 bits
    ``[values, words]``, the most significant first.
    """
    # The weight of a value is an integer, proportional to its probability; weight(v) is
    # weight(v - 1) * mean / v. Weights are computed from the mode, which has 2^128, in both
    # directions, until one is at most 2^24, which is 2^-104 of that.
    numerator, denominator = mean.as_integer_ratio()
    mode = int(mean)
    above = [2**128]  # of mode, mode + 1, ...
    while above[-1] > 2**24:
        above.append(above[-1] * numerator // (denominator * (mode + len(above))))
    below = [2**128]  # of mode, mode - 1, ...
    while below[-1] > 2**24 and len(below) <= mode:
        below.append(below[-1] * denominator * (mode + 1 - len(below)) // numerator)
    least = mode + 1 - len(below)
    # From the least value to the largest; the mode is in both lists.
    weights = np.array([*below[:0:-1], *above], object)
    sums_of_larger = np.cumsum(weights[:0:-1])[::-1]  # for each value but the largest
    tails = sums_of_larger * 2 ** (32 * _WORDS) // weights.sum()
    words = [digits(tail, _WORDS) for tail in tails]
    return least, np.array(words, np.uint32)


def _count_above(words: UInt[Array, "n words"], tails: UInt[Array, "m words"]) -> Int[Array, " n"]:
    """How many of the decreasing ``tails`` are above each number: a bisection.

    The bits of the count are found from the highest to the lowest.
    """
    highest_bit = len(tails).bit_length() - 1

    def body(i: Int[Array, ""], count: Array) -> Array:
        larger = count + (1 << (highest_bit - i))
        above = less(words, tails[jnp.minimum(larger, len(tails)) - 1])
        return jnp.where((larger <= len(tails)) & above, larger, count)

    start = jnp.zeros(len(words), jnp.int32)
    return jax.lax.fori_loop(jnp.int32(0), jnp.int32(highest_bit + 1), body, start)

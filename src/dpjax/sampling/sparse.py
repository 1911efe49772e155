# SPDX-License-Identifier: Apache-2.0
r"""Draws whose time and memory follow the batch, however large the data set is.

A coin for every example takes time for every example. `scattered` cuts the indices into blocks of
$B = 2^s$ cells, gives each block a random number of balls and each ball a uniform cell, and draws
the examples whose cells are hit. For Poisson numbers of balls with mean $\lambda B$, cells are hit
independently with probability $1 - e^{-\lambda}$.

No program of bounded memory draws exactly independently, because then a draw of all examples is
possible. The guarantee needs less, and holds without an error term:

    **Whichever other examples are drawn, an example is drawn with probability at most q.**

Let $m_j$ be the probability of $j$ balls, with $(j + 1)\, m_{j+1} \le \lambda B\, m_j$ for all $j$.
Given $j$ balls in the other cells of a block, and these cells, $k$ balls in the example's own cell
are more likely than none by the factor

$$\frac{m_{j+k}}{m_j} \binom{j+k}{k} B^{-k} \le \frac{\lambda^k}{k!},$$

so the odds of a hit are at most $e^\lambda - 1$, and its probability at most
$1 - e^{-\lambda} \le q$. The other examples are drawn by the same law with and without this one,
so a step is a mixture of steps that are subsampled at rates up to $q$. Divergences are jointly
convex: that of two mixtures is at most the largest of their parts, which is the one at rate $q$.

`block_of` makes integer probabilities that satisfy the inequality exactly. Their rounding and the
largest number of balls change the law of a block by less than $2^{-70}$.

Nothing here knows of steps, purposes or events. All arithmetic is on integers, so a draw has the
same bits on every platform.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry_2x32
from jaxtyping import Array, Bool, Int, UInt

from dpjax.types import Draw, Key

LARGEST = 2**31 - 1
"""The most examples that an int32 counts; the indices of more are pairs of words."""

# A block has 4 to 8 balls on average, or fewer, and more than 48 with a probability below 2^-72.
_MEAN = 8
_BALLS = 48
# The probability of a number of balls is a multiple of 2^-96.
_WORDS = 3
# Two words of 32 bits make an index: the low one holds the cell, so a block has 2^31 cells at most.
_DIGIT_BITS = 31
# FF1 of NIST SP 800-38G, which also permutes domains of any size, has ten rounds.
_ROUNDS = 12


class Block(NamedTuple):
    """Blocks of cells, and the probabilities of numbers of balls in each."""

    shift: int
    """A block has ``2**shift`` cells."""
    tails: np.ndarray
    """``[balls, words]``: the probabilities of at least 1, 2, ... balls, in units of 2^-96, with
    the most significant word first."""

    def count(self, examples: int) -> int:
        """How many blocks hold this many examples."""
        return ((examples - 1) >> self.shift) + 1

    def capacity(self, examples: int) -> int:
        """The size that no draw exceeds."""
        return self.count(examples) * len(self.tails)


def block_of(rate: float) -> Block:
    """The blocks that draw each example with a probability of at most ``rate``, below 1."""
    # Partial sums of the series of -log(1 - q) are below it, so 1 - exp(-mean) is below the rate.
    q = Fraction(rate)
    series = sum((q**k / k for k in range(1, 24)), Fraction(0))
    # A short fraction, rounded down as well.
    mean = Fraction(int(series * 2**128), 2**128)
    shift = min(_DIGIT_BITS, int(_MEAN / mean).bit_length() - 1)
    tails = _tails(mean * 2**shift)
    return Block(shift, np.array([digits(tail) for tail in tails], np.uint32))


def _tails(mean: Fraction) -> list[int]:
    """The probabilities of at least 1, 2, ... balls: a Poisson law that is rounded down."""
    # Each floor can only lower a probability relative to the one before it, as the inequality
    # demands. The rest of 1 goes to the probability of no ball, which no inequality bounds.
    none = sum(mean**j / math.factorial(j) for j in range(_BALLS + 1))
    chances = [int(2 ** (32 * _WORDS) / none)]
    for j in range(1, _BALLS + 1):
        chances.append(int(chances[-1] * mean / j))
    return [sum(chances[j:]) for j in range(1, _BALLS + 1)]


def digits(number: int, words: int = _WORDS) -> list[int]:
    """A number as words of 32 bits, the most significant one first."""
    return [(number >> (32 * i)) % 2**32 for i in reversed(range(words))]


def scattered(key: Key, examples: int, block: Block) -> Draw:
    """Draws each example with a probability of at most the block's rate, whatever else is drawn.

    An index is ``block * 2**shift + cell``.
    """
    blocks = block.count(examples)
    balls, words = block.tails.shape
    for_numbers, for_cells = jax.random.split(key)
    random_words = jax.random.bits(for_numbers, (1, blocks, words), jnp.uint32)
    # Each block has one random number. Ball j of the block falls if that number is below the
    # probability of at least j balls.
    falls = less(random_words, jnp.asarray(block.tails)[:, None])  # [balls, blocks]
    cells = jax.random.bits(for_cells, (balls, blocks), jnp.uint32) >> (32 - block.shift)

    # The last block may be cut: its cells beyond the data set hold no example.
    is_complete = jnp.arange(blocks, dtype=jnp.uint32) < (examples >> block.shift)
    cells_of_last = examples & (2**block.shift - 1)
    holds_example = is_complete[None] | (cells < cells_of_last)
    # A ball hits an example unless an earlier ball of its block has hit the same cell.
    repeated = _repeated(cells, jnp.sum(falls, axis=0, dtype=jnp.int32))
    hits = falls & holds_example & ~repeated

    # The balls that hit, as indices into ``[blocks * balls]``, block after block: a stream reads
    # forwards.
    hit = listed(hits.T.reshape(-1))
    # Padding repeats the drawn examples in turn, because the cells of other balls may be beyond the
    # data set.
    turns = jnp.arange(hit.mask.size, dtype=jnp.int32) % jnp.maximum(hit.size, 1)
    balls_that_hit = hit.indices[turns]
    block_of_ball = (balls_that_hit // balls).astype(jnp.uint32)
    cell_of_ball = cells.T.reshape(-1)[balls_that_hit]
    indices = _joined(block_of_ball, cell_of_ball, block.shift, examples)
    # An empty draw has nothing to repeat, so its padding is the indices 0, 1, 2, ..., whose high
    # digit is 0.
    counted = jnp.arange(len(indices), dtype=jnp.uint32)
    padding = _joined(jnp.zeros_like(counted), counted, _DIGIT_BITS, examples)
    return Draw(jnp.where(hit.size > 0, indices, padding), hit.mask)


def less(words: UInt[Array, "*a words"], than: UInt[Array, "*b words"]) -> Bool[Array, "..."]:
    """Whether one number is below another; the most significant word first."""
    below = jnp.zeros((), bool)  # by the words so far, from the least significant one
    for i in reversed(range(words.shape[-1])):
        a = words[..., i]
        b = than[..., i]
        below = (a < b) | ((a == b) & below)
    return below


def _repeated(
    cells: UInt[Array, "balls blocks"], falls: Int[Array, " blocks"]
) -> Bool[Array, "balls blocks"]:
    """Which balls fall on the cell of an earlier ball of their block."""
    balls = len(cells)
    # No cell has this number, so the rows above the first repeat nothing.
    no_cells = jnp.full_like(cells, 2**32 - 1)
    padded = jnp.concatenate([no_cells, cells])

    def body(apart: Int[Array, ""], repeated: Array) -> Array:
        earlier = jax.lax.dynamic_slice_in_dim(padded, balls - apart, balls)
        return repeated | (earlier == cells)

    # Two balls of one block are fewer rows apart than the fullest block has balls.
    return jax.lax.fori_loop(1, jnp.max(falls), body, jnp.zeros_like(cells, bool))


def distinct(key: Key, examples: int, size: int) -> Array:
    """A uniform list of ``size`` distinct indices: places that repeat one are drawn again."""

    # Renaming the examples renames the lists and changes no probability: all are equally likely.
    def uniform(key: Key) -> Array:
        return _uniform(key, examples, size)

    indices = _redrawn(key, size, uniform, _found_before)
    return _joined(indices[:, 0], indices[:, 1], _DIGIT_BITS, examples)


def _uniform(key: Key, examples: int, size: int) -> UInt[Array, "size 2"]:
    """Independent uniform indices, in two digits of base 2^31, the high one first.

    Numbers that are ``examples`` or larger are drawn again.
    """
    # Each digit has as many random bits as the last index needs there.
    last = examples - 1
    high_bits = (last >> _DIGIT_BITS).bit_length()
    low_bits = min(last.bit_length(), _DIGIT_BITS)
    limit = jnp.array([[examples >> _DIGIT_BITS, examples % 2**_DIGIT_BITS]], jnp.uint32)

    def draw(key: Key) -> Array:
        words = jax.random.bits(key, (size, 2), jnp.uint32)
        high = _leading_bits(words[:, 0], high_bits)
        low = _leading_bits(words[:, 1], low_bits)
        return jnp.stack([high, low], axis=1)

    def is_beyond(indices: Array) -> Array:
        return ~less(indices, limit)

    return _redrawn(key, size, draw, is_beyond)


def _leading_bits(words: UInt[Array, " size"], count: int) -> UInt[Array, " size"]:
    """The first ``count`` of the 32 bits of each word, as a number."""
    if count == 0:  # a shift by 32 bits is not defined
        return jnp.zeros_like(words)
    return words >> (32 - count)


def _redrawn(
    key: Key, size: int, draw: Callable[[Key], Array], wrong: Callable[[Array], Array]
) -> UInt[Array, "size 2"]:
    """Draws all places, then the wrong places again until none is wrong."""

    def body(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        turn, drawn, again = state
        drawn = jnp.where(again[:, None], draw(jax.random.fold_in(key, turn)), drawn)
        return turn + 1, drawn, wrong(drawn)

    def any_wrong(state: tuple[Array, Array, Array]) -> Array:
        return jnp.any(state[2])

    start = jnp.uint32(0), jnp.zeros((size, 2), jnp.uint32), jnp.ones(size, bool)
    _, drawn, _ = jax.lax.while_loop(any_wrong, body, start)
    return drawn


def _found_before(indices: UInt[Array, "size 2"]) -> Bool[Array, " size"]:
    """Which places hold the index of an earlier place."""
    places = jnp.arange(len(indices), dtype=jnp.int32)
    high, low, order = jax.lax.sort((indices[:, 0], indices[:, 1], places), num_keys=3)
    same_high = high[1:] == high[:-1]
    same_low = low[1:] == low[:-1]
    same = same_high & same_low
    return jnp.zeros(len(indices), bool).at[order[1:]].set(same)


def permuted(key: Key, examples: int, starts: np.ndarray, offset: int | Int[Array, ""]) -> Array:
    """Where the pseudo-random permutation of a key sends the indices ``starts + offset``.

    ``starts`` are int64 on the host, and ``offset`` is an int32, because JAX has no int64.

    An index is two digits: ``high * 2**shift + low``. In a Feistel network each round adds a
    pseudo-random function of one digit to the other, so every round can be undone and no two
    indices meet. With the last high digit, some low digits give numbers beyond the data set. These
    are permuted again until none is beyond it (cycle walking): this permutes the indices.
    """
    shift = (examples - 1).bit_length() // 2
    low_mask = 2**shift - 1
    last_high, last_low = divmod(examples - 1, 2**shift)
    secret = jax.random.bits(key, (2,), jnp.uint32)
    # The digits of starts + offset.
    offset = jnp.asarray(offset, jnp.uint32)
    low = jnp.asarray(starts & low_mask, jnp.uint32) + (offset & low_mask)
    carry = low >> shift
    high = jnp.asarray(starts >> shift, jnp.uint32) + (offset >> shift) + carry
    low = low & low_mask

    def random_words(round_: Array, digit: Array) -> tuple[Array, Array]:
        words = threefry_2x32(secret, jnp.stack([digit, jnp.full_like(digit, round_)]))
        return words[0], words[1]

    def two_rounds(i: Array, digits: tuple[Array, Array]) -> tuple[Array, Array]:
        high, low = digits
        word, more = random_words(2 * i, low)
        # The addend is 42 random bits modulo the number of high digits. That is at most 2^22,
        # because samplers take at most 2^44 examples (`sizes.MOST`), so the remainder of the first
        # 32 bits leaves room for 10 more.
        high_count = last_high + 1
        addend = (((word % high_count) << 10) | (more >> 22)) % high_count
        high = (high + addend) % high_count
        word, _ = random_words(2 * i + 1, high)
        return high, (low + word) & low_mask

    def walk(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        high, low, is_outside = state
        pairs = jnp.uint32(_ROUNDS // 2)
        new_high, new_low = jax.lax.fori_loop(jnp.uint32(0), pairs, two_rounds, (high, low))
        high = jnp.where(is_outside, new_high, high)
        low = jnp.where(is_outside, new_low, low)
        return high, low, (high == last_high) & (low > last_low)

    def any_outside(state: tuple[Array, Array, Array]) -> Array:
        return jnp.any(state[2])

    # The state's last entry is True for each index that is permuted next: at first for all.
    state = high, low, jnp.ones_like(high, bool)
    high, low, _ = jax.lax.while_loop(any_outside, walk, state)
    return _joined(high, low, shift, examples)


def _joined(high: Array, low: Array, shift: int, examples: int) -> Array:
    """``high * 2**shift + low``: int32, or two words of 32 bits for data sets beyond int32."""
    lower = (high << shift) | low
    if examples <= LARGEST:
        return lower.astype(jnp.int32)
    return jnp.stack([high >> (32 - shift), lower], axis=-1)


def listed(chosen: Bool[Array, " examples"]) -> Draw:
    """The indices of the chosen examples in order, and all others behind them, as padding."""
    # On a CPU one sequential loop runs, and compiles, faster than a scatter.
    return jax.lax.platform_dependent(chosen, cpu=_listed_in_turn, default=_listed)


def _listed(chosen: Bool[Array, " examples"]) -> Draw:
    """`listed` in parallel."""
    examples = jnp.arange(chosen.size, dtype=jnp.int32)
    counts = jnp.cumsum(chosen, dtype=jnp.int32)
    # The others fill the places from the last one backwards, as `_listed_in_turn` writes them.
    places = jnp.where(chosen, counts - 1, chosen.size - 1 - (examples - counts))
    return Draw(jnp.zeros_like(examples).at[places].set(examples), examples < counts[-1])


def _listed_in_turn(chosen: Bool[Array, " examples"]) -> Draw:
    examples = jnp.arange(chosen.size, dtype=jnp.int32)

    # The chosen indices grow from the front, the others from the back.
    def body(i: Int[Array, ""], so_far: tuple[Array, Array]) -> tuple[Array, Array]:
        indices, size = so_far
        place = jnp.where(chosen[i], size, chosen.size - 1 - (i - size))
        return indices.at[place].set(i), size + chosen[i].astype(jnp.int32)

    start = jnp.zeros_like(examples), jnp.int32(0)
    indices, size = jax.lax.fori_loop(0, chosen.size, body, start)
    return Draw(indices, examples < size)

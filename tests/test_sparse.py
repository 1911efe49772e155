# SPDX-License-Identifier: Apache-2.0
"""Draws in time of the batch: exact laws of a block, and the program that follows them."""

import itertools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from mutation import kills

from dpjax import sampling
from dpjax.sampling import allocation, sparse
from dpjax.types import Draw

RATES = [1 / 16, 0.01, 1e-3, 2.0**-17, 4096 / 10**12, 3e-10, 2.0**-32, 2.0**-63]


def masses(tails):
    """The probabilities of 0, 1, 2, ... balls in a block."""
    found = [sum(int(word) << (64 - 32 * i) for i, word in enumerate(tail)) for tail in tails]
    edges = [2**96, *found, 0]
    assert edges == sorted(edges, reverse=True)
    return [Fraction(a - b, 2**96) for a, b in itertools.pairwise(edges)]


def exponential(x):
    """Fractions below and above exp(x)."""
    below = sum(x**k / math.factorial(k) for k in range(80))
    return below, below + 2 * x**80 / math.factorial(80)


@kills("sampling/sparse.py", "for k in range(1, 24)", "for k in range(1, 2)", slow=True)
@pytest.mark.parametrize("rate", RATES)
def test_the_rate_that_runs_is_below_the_accounted_one_whatever_else_is_drawn(rate):
    """The inequality of the module, in fractions; and on average the rate is not less either."""
    block, q = sparse.block_of(rate), Fraction(rate)
    found, cells = masses(block.tails), 2**block.shift
    each = max((j + 1) * b / (cells * a) for j, (a, b) in enumerate(itertools.pairwise(found)) if a)
    above = exponential(each)[1]
    assert (above - 1) * (1 - q) <= q
    hit = sum(m * (1 - (1 - Fraction(1, cells)) ** j) for j, m in enumerate(found))
    assert q * (1 - Fraction(1, 2**60)) < hit <= q


@pytest.mark.parametrize("each", [Fraction(1, 3), Fraction(2)])
def test_four_cells_of_a_block_are_independent(each):
    """All sixteen sets of cells: balls on exactly these cells, counted in fractions."""
    found = masses([sparse.digits(tail) for tail in sparse._tails(4 * each)])

    def hits(balls, cells):  # onto: by inclusion and exclusion
        terms = ((-1) ** k * math.comb(cells, k) * (cells - k) ** balls for k in range(cells + 1))
        return Fraction(sum(terms), 4**balls)

    law = [sum(m * hits(j, cells) for j, m in enumerate(found)) for cells in range(5)]
    assert sum(math.comb(4, cells) * p for cells, p in enumerate(law)) == 1
    below, above = (1 - 1 / e for e in exponential(each))
    for without, with_one in itertools.pairwise(law):
        assert below * (1 - Fraction(1, 2**60)) < with_one / (without + with_one) <= above


def test_the_law_of_a_block_is_poisson_to_seventy_bits():
    mean = Fraction(8)  # the largest, with the most in its tail
    found = masses([sparse.digits(tail) for tail in sparse._tails(mean)])
    poisson = [mean**j / math.factorial(j) / exponential(mean)[0] for j in range(80)]
    apart = sum(abs(a - b) for a, b in itertools.zip_longest(found, poisson, fillvalue=0))
    assert apart / 2 < Fraction(1, 2**70)


def block_for(tails, shift):
    return sparse.Block(shift, np.array(tails, np.uint32))


@pytest.mark.thorough
@kills("sampling/sparse.py", "below = (a < b) | ((a == b) & below)", "below = (a <= b)", slow=True)
def test_words_become_balls_and_balls_become_examples(monkeypatch):
    """Eleven examples in blocks of four: the last block has a cell without an example."""
    block = block_for([[9, 5, 7], [3, 8, 8], [0, 0, 2]], 2)
    words = [[9, 5, 7], [9, 5, 6], [0, 0, 1]]  # no ball, by one; one ball, by one; three
    cells = [[0, 2, 1], [0, 3, 3], [0, 1, 1]]  # ball after ball of the three blocks
    given = iter([np.array([words]), np.array(cells) << 30])
    monkeypatch.setattr(jax.random, "bits", lambda *_: jnp.asarray(next(given), jnp.uint32))
    draw = sparse.scattered(jax.random.key(0), 11, block)
    assert sampling.on_host(draw).tolist() == [6, 9]
    # Padding repeats what was drawn, and an empty draw names other examples, each once.
    assert draw.indices.tolist() == [6, 9] * 4 + [6]
    assert draw.mask.tolist() == [True] * 2 + [False] * 7
    given = iter([np.full((1, 3, 3), 9), np.array(cells) << 30])
    empty = sparse.scattered(jax.random.key(0), 11, block)
    assert (int(empty.size), empty.indices.tolist()) == (0, [*range(9)])


@pytest.mark.thorough
def test_balls_on_one_cell_count_once_however_far_apart(monkeypatch):
    words, cells = [[0, 0, 0]], [[3], [1], [2], [3]]
    given = iter([np.array([words]), np.array(cells) << 30])
    monkeypatch.setattr(jax.random, "bits", lambda *_: jnp.asarray(next(given), jnp.uint32))
    draw = sparse.scattered(jax.random.key(0), 4, block_for([[1, 0, 0]] * 4, 2))
    assert sampling.on_host(draw).tolist() == [3, 1, 2]


@pytest.mark.thorough
@kills("sampling/sparse.py", "for_cells = jax.random.split(key)", "for_cells = key, key", slow=True)
def test_numbers_of_balls_say_nothing_about_cells():
    """With one key, the first ball of a full block would have a small word, and a low cell."""
    sampler = sampling.poisson(10**6, 4096)
    draw, first, many = jax.jit(sampler.draw), [], []
    for step in range(300):
        indices = sampling.on_host(draw(jax.random.key(0), step))
        within = indices[indices < 1024]
        first.append(within[0] if len(within) else 512)
        many.append(len(within))
    assert abs(np.corrcoef(first, many)[0, 1]) < 0.25


@pytest.mark.parametrize("examples", [10**6, 5 * 10**9])
@pytest.mark.parametrize("name", ["poisson", "fixed", "shuffled"])
@pytest.mark.sample(3)
def test_large_draws_are_uniform_and_have_their_size(name, examples):
    sampler = sampling.by_name(name, examples, 4096)
    draw = jax.jit(sampler.draw)
    found = [sampling.on_host(draw(jax.random.key(2), step)) for step in range(40)]
    assert all(len(np.unique(each)) == len(each) for each in found)
    together = np.concatenate(found)
    assert together.min() >= 0
    assert together.max() < examples
    # Poisson: 163,840 examples with a deviation of 404.
    assert len(together) == pytest.approx(40 * 4096, abs=2000 if name == "poisson" else 0)
    for bins in (together * 256 // examples, together % 256, together // 32 % 256):
        counts = np.bincount(bins, minlength=256)
        # Chi-square with 255 degrees of freedom: a deviation of 23.
        assert np.sum((counts - counts.mean()) ** 2) / counts.mean() < 255 + 6 * 23


@pytest.mark.slow
@pytest.mark.parametrize("name", ["poisson", "fixed", "shuffled"])
def test_wide_integers_change_no_draw(name):
    for examples in (10**6, 10**12):
        draw = sampling.by_name(name, examples, 4).draw
        with jax.enable_x64(True):
            wide = jax.jit(draw)(jax.random.key(0), 3)
        plain = draw(jax.random.key(0), 3)
        assert [x.dtype for x in wide] == [x.dtype for x in plain]
        assert sampling.on_host(wide).tolist() == sampling.on_host(plain).tolist()


@kills("sampling/sparse.py", "~less(indices, limit)", "~less(indices, limit + 1)", slow=True)
@kills("sampling/sparse.py", "[order[1:]].set(same)", "[order[1:]].set(False)", slow=True)
@pytest.mark.slow
def test_lists_of_distinct_indices_are_equally_likely():
    lists = jax.jit(jax.vmap(lambda key: sparse.distinct(key, 6, 3)))
    found = np.asarray(lists(jax.random.split(jax.random.key(0), 24_000)))
    assert np.all((found >= 0) & (found < 6))
    counts = np.bincount(found @ [36, 6, 1], minlength=216)
    assert np.count_nonzero(counts) == 120
    seen = counts[counts > 0]
    # Chi-square with 119 degrees of freedom: a deviation of 15.
    assert np.sum((seen - 200) ** 2) / 200 < 119 + 6 * 15


@pytest.mark.thorough
@kills(
    "sampling/sparse.py",
    "(high == last_high) & (low > last_low)",
    "low > last_low + 2**shift",
    slow=True,
)
@pytest.mark.parametrize("examples", [3, 97, 1024])
@pytest.mark.sample(3)
def test_a_permutation_sends_no_two_indices_to_one(examples):
    found = [
        sparse.permuted(jax.random.key(seed), examples, np.arange(examples), 0) for seed in (0, 1)
    ]
    assert all(np.array_equal(np.sort(each), np.arange(examples)) for each in found)
    assert examples < 97 or np.mean(found[0] == found[1]) < 0.1


@pytest.mark.thorough
def test_a_permutation_sends_an_index_everywhere():
    send = jax.jit(jax.vmap(lambda key: sparse.permuted(key, 60, np.arange(2), 0)))
    found = np.asarray(send(jax.random.split(jax.random.key(3), 12_000)))
    for places in found.T:
        counts = np.bincount(places, minlength=60)
        assert np.sum((counts - 200) ** 2) / 200 < 59 + 6 * 11
    assert np.mean(found[:, 0] < found[:, 1]) == pytest.approx(0.5, abs=0.025)


@pytest.mark.thorough
def test_the_sum_of_a_place_and_a_step_carries():
    examples, key = 10**12, jax.random.key(0)
    starts = np.arange(5) * 123_456_789_123 + 2**20 - 1
    for offset in (1, 2**31 - 1):
        found = sparse.permuted(key, examples, starts, jnp.int32(offset))
        np.testing.assert_array_equal(found, sparse.permuted(key, examples, starts + offset, 0))


@pytest.mark.thorough
@kills(
    "sampling/epochs.py",
    "chosen = batch(key, step // turn,",
    "chosen = batch(key, 0 * step,",
    slow=True,
)
def test_an_epoch_of_a_large_data_set_sees_no_example_twice():
    sampler = sampling.shuffled(2**16 + 5, 4096)
    draw = jax.jit(sampler.draw)
    steps = [sampling.on_host(draw(jax.random.key(0), step)) for step in range(32)]
    epochs = steps[:16], steps[16:]
    for epoch in epochs:
        assert len(np.unique(np.concatenate(epoch))) == 2**16
    assert np.mean(np.isin(epochs[0][0], epochs[1][0])) < 0.1


@pytest.mark.parametrize("shift", [6, 20, 31])
def test_two_digits_become_two_words(shift):
    high, low = 2**31 + 3 if shift == 6 else 2**10 + 5, 2**shift - 3
    words = sparse._joined(jnp.uint32([high]), jnp.uint32([low]), shift, 2**44)
    assert sampling.on_host(Draw(words, jnp.ones(1, bool))).tolist() == [(high << shift) + low]


@pytest.mark.parametrize("listed", [sparse._listed, sparse._listed_in_turn])
@pytest.mark.parametrize("rate", [0.0, 0.1, 1.0])
def test_who_is_chosen_is_listed_on_every_platform(listed, rate):
    """And behind them all others, once each: no example stands for padding."""
    chosen = np.random.default_rng(0).uniform(size=101) < rate
    draw = listed(jnp.asarray(chosen))
    wanted = np.flatnonzero(chosen)
    assert int(draw.size) == wanted.size
    np.testing.assert_array_equal(draw.mask, np.arange(101) < wanted.size)
    np.testing.assert_array_equal(draw.indices[: wanted.size], wanted)
    np.testing.assert_array_equal(draw.indices[wanted.size :], np.flatnonzero(~chosen)[::-1])


# Random allocation ------------------------------------------------------------------------

DRAWN = [sampling.random_allocation(2**16 + 5, 40), sampling.random_allocation(500, 7)]


@kills("sampling/allocation.py", "(chosen >= 0) & (chosen < number)", "chosen < number")
@pytest.mark.parametrize(
    "sampler",
    [pytest.param(DRAWN[0], marks=pytest.mark.thorough), DRAWN[1]],
    ids=["pieces", "words"],
)
def test_every_example_is_once_in_an_epoch_and_draws_are_in_order(sampler):
    draw, steps = jax.jit(sampler.draw), sampler.facts["cycle"]
    found = [sampling.on_host(draw(jax.random.key(0), step)) for step in range(steps + 1)]
    together = np.concatenate(found[:steps])
    np.testing.assert_array_equal(np.sort(together), np.arange(sampler.examples))
    assert all(np.all(np.diff(each) > 0) for each in found)
    assert np.mean(np.isin(found[steps], found[0])) < 0.3  # the next epoch is another one
    plain = sampler.draw(jax.random.key(0), 3)  # without jit
    np.testing.assert_array_equal(sampling.on_host(plain), found[3])


def chi_square(counts, expected):
    """In standard deviations above its mean."""
    degrees = np.size(counts) - 1
    return (np.sum((counts - expected) ** 2 / expected) - degrees) / math.sqrt(2 * degrees)


@kills(
    "sampling/events.py",
    "(key, Purpose.SAMPLING, step // cycle)",
    "(key, Purpose.SAMPLING, 0)",
)
@kills("sampling/allocation.py", "+ jnp.sum(chosen == number", "+ 0 * jnp.sum(chosen == number")
@pytest.mark.parametrize(
    "many", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["words", "pieces"]
)
def test_bins_are_uniform_and_independent_and_their_sizes_are_multinomial(monkeypatch, many):
    """Over examples and epochs; pieces as of large data sets, where laws can be counted."""
    monkeypatch.setattr(allocation, "is_sparse", lambda *_: many)
    examples, bins, keys = 200, 4, 1200
    sampler = sampling.random_allocation(examples, bins)

    @jax.jit
    @jax.vmap
    def bins_of_two_epochs(key):
        draws = jax.vmap(lambda step: sampler.draw(key, step))(jnp.arange(2 * bins))
        places = jnp.where(draws.mask, draws.indices, examples).reshape(2, bins, -1)
        numbers = jnp.arange(bins)[None, :, None]
        empty = jnp.full((2, examples + 1), -1)
        return empty.at[jnp.arange(2)[:, None, None], places].set(numbers)[:, :examples]

    found = np.asarray(bins_of_two_epochs(jax.random.split(jax.random.key(1), keys)))
    pairs = [(found[:, 0, 3], found[:, 0, 150]), (found[:, 0, 3], found[:, 1, 3])]
    for one, other in pairs:
        counts = np.bincount(bins * one + other, minlength=bins**2)
        assert chi_square(counts, keys / bins**2) < 5
    for number in range(bins):
        sizes = np.sum(found[:, 0] == number, axis=1)
        law = scipy.stats.binom(examples, 1 / bins)
        edges = np.unique(law.ppf(np.arange(1, 10) / 10))
        expected = keys * np.diff([0, *law.cdf(edges), 1])
        counts = np.bincount(np.searchsorted(edges, sizes), minlength=len(expected))
        assert chi_square(counts, expected) < 5
    first, last = (np.sum(found[:, 0] == number, axis=1) for number in (0, bins - 1))
    assert np.corrcoef(first, last)[0, 1] == pytest.approx(-1 / (bins - 1), abs=0.09)


@pytest.mark.parametrize("bins", [1, 3, 58, 2**16, 65_537, 2**31 - 1])
@kills(
    "sampling/allocation.py",
    "less(jnp.asarray(digits(last",
    "less(jnp.asarray(digits(last + 1",
    slow=True,
)
def test_no_bin_has_more_words_than_another(monkeypatch, bins):
    """A word modulo the number of bins; words beyond the last multiple of it are no bin."""
    last = 2**64 // bins * bins - 1
    numbers = [0, bins, 2**40 + 12_345, 2**63 + 2**31 + 7, last, min(last + 1, 2**64 - 1)]
    words = jnp.array([sparse.digits(number, 2) for number in numbers], jnp.uint32)
    monkeypatch.setattr(jax.random, "bits", lambda *_: words)
    wanted = [number % bins if number <= last else -1 for number in numbers]
    assert allocation.bins_of(jax.random.key(0), len(numbers), bins).tolist() == wanted


@pytest.mark.parametrize("mean", [Fraction(1, 3), Fraction(7), Fraction(2**40 + 1, 2**31)])
def test_the_law_of_a_size_is_poisson_to_seventy_bits(mean):
    least, tails = allocation.poisson_table(mean)
    found = masses(tails)
    weights = [2 ** (3 * int(mean) + 400)]  # exp(mean) is below 2^(1.5 mean)
    for j in range(1, 2 * int(mean) + 80):
        weights.append(weights[-1] * mean.numerator // (mean.denominator * j))
    found = [0] * least + [int(mass * 2**96) for mass in found]
    whole = sum(weights)
    wanted = [weight * 2**96 // whole for weight in weights]
    apart = sum(abs(a - b) for a, b in itertools.zip_longest(found, wanted, fillvalue=0))
    assert apart / 2 < 2 ** (96 - 70) - len(weights)
    # As many more than the least as there are tails above the word.
    tails = jnp.asarray(tails)
    words = jnp.concatenate([tails, tails + jnp.uint32([0, 0, 1]), tails // 2])
    want = np.sum(sparse.less(words[:, None], tails[None]), axis=1)
    assert np.array_equal(allocation._count_above(words, tails), want)


@pytest.mark.thorough
def test_a_thousand_million_examples_are_drawn_in_memory_of_the_batch():
    sampler = sampling.random_allocation(10**9, 10**9 // 4096)
    draw = jax.jit(sampler.draw)
    found = [sampling.on_host(draw(jax.random.key(2), step)) for step in (*range(30), 244_139)]
    sizes = np.array([len(each) for each in found])
    assert np.all(sizes < sampler.capacity)
    assert sizes.mean() == pytest.approx(4096, abs=5 * 64 / math.sqrt(31))
    together = np.concatenate(found)
    assert len(np.unique(together)) == len(together)
    assert (together.min() >= 0, together.max() < 10**9) == (True, True)
    for parts in (together * 256 // 10**9, together % 256):
        assert chi_square(np.bincount(parts, minlength=256), len(together) / 256) < 6

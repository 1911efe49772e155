# SPDX-License-Identifier: Apache-2.0
"""Samplers: which examples each step sees, and the privacy event proved for that sampling.

Each function builds a `Sampler` that holds both the draw and its event, so the sampler that
is trained is the sampler that is accounted. A draw is a pure function of ``(key, step)``: a
resumed run replays nothing, and any step can be drawn again. The list of drawn examples is
secret; data set size, expected batch size and rates are public.

`poisson`, `fixed` and `shuffled` draw small batches of large data sets in time and memory of the
batch, by `dpjax._draws`. Indices are int32. Beyond 2^31 - 1 examples they are pairs of 32-bit
words, which `on_host` joins for a `dpjax.data.Stream`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jaxtyping import Array, Int

from dpjax import _draws, checks, strategies, trees
from dpjax.strategies import Participation
from dpjax.types import Draw, Key, Neighbours, Purpose, Sampler

if TYPE_CHECKING:
    from dp_accounting import DpEvent

__all__ = [
    "balls_in_bins",
    "curriculum",
    "cyclic_poisson",
    "fixed",
    "full",
    "poisson",
    "scored",
    "shuffled",
]

T = TypeVar("T")

_WORDS = 2**32
# Up to this size a draw takes half a millisecond by either way, and runs keep their batches.
_FEW = 2**16
# Beyond a sixteenth of the data, a list of a batch is no shorter than a mask of the data.
_SPARSE = 1 / 16
_MOST, _LARGEST_BATCH = 2**44, 2**24  # of samplers that are not held to int32


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
    examples, batch_size = _checked("poisson", examples, batch_size)
    rate, sparse = batch_size / examples, _sparse(examples, batch_size)
    largest = _largest_word(rate)
    if rate < 2**-64 if sparse else largest < 0:
        raise ValueError(
            f"sampling.poisson(examples={examples}, batch_size={batch_size}): the rate {rate:.2e} "
            f"is below 2^-{64 if sparse else 32}, the resolution of the sampler. Usually "
            "batch_size was given as a rate; it is an expected number of examples."
        )
    if batch_size < 1:
        logging.warning(
            "sampling.poisson(examples=%d, batch_size=%g): less than one example a step is "
            "expected, and sums are divided by it. If this number is a rate, give the number of "
            "examples that it draws: %g.",
            examples,
            batch_size,
            batch_size * examples,
        )

    block = _draws.block_of(rate) if sparse else None

    def draw(key: Key, step: Any) -> Draw:
        key = trees.step_key(key, Purpose.SAMPLING, step)
        if block is not None:
            return _draws.scattered(key, examples, block)
        return _coins(key, jnp.full(examples, largest, jnp.uint32), True)

    exact = "exact Poisson sampling"
    kind = "Poisson sampling by blocks, never above its rate" if sparse else exact
    return Sampler(
        name="poisson",
        examples=examples,
        batch_size=batch_size,
        capacity=examples if block is None else block.capacity(examples),
        draw=draw,
        event=lambda multipliers: _gaussians(multipliers, rate),
        claim=f"{kind}; amplification by sampling is proved and counted",
    )


def by_name(name: str, examples: int, batch_size: float, cycle: int | None = None) -> Sampler:
    """Builds a sampler by its name; all but `curriculum` and `scored` follow from their sizes.

    Example:
      >>> by_name("fixed", 100, 10).claim
      'uniform batches of a fixed size; proved for replace-one neighbours (RDP)'
    """
    if name == "full":
        return full(examples)
    if name == "cyclic_poisson" and cycle is not None:
        return cyclic_poisson(examples, batch_size, cycle=cycle)
    by_size = {
        "poisson": poisson,
        "fixed": fixed,
        "shuffled": shuffled,
        "balls_in_bins": balls_in_bins,
    }
    if name not in by_size:
        raise ValueError(
            f"sampling.by_name({name!r}): expected one of full, {', '.join(by_size)}, or "
            "cyclic_poisson with its cycle. A curriculum or scores cannot be restored from their "
            "name: build the sampler with sampling.curriculum or sampling.scored. To count an "
            "earlier run (training.earlier, a card), describe what it spent: "
            "Mechanism(before=(dpjax.mechanism.Spent(sampling=that sampler, "
            "runs=((multiplier, steps), ...)),))."
        )
    return by_size[name](examples, batch_size)


def full(examples: int) -> Sampler:
    """Every step sees the whole data set; there is no amplification by sampling.

    Example:
      >>> full(1279).sampling_rate
      1.0
    """
    examples, _ = _checked("full", examples, examples, _draws.LARGEST)
    # Made once: a constant of the program, not a new array in every step.
    everything = jnp.arange(examples)
    return Sampler(
        name="full",
        examples=examples,
        batch_size=examples,
        capacity=examples,
        draw=lambda key, step: Draw(everything, jnp.asarray(examples, jnp.int32)),
        event=lambda multipliers: _gaussians(multipliers, 1.0),
        claim="every step uses every example; plain composition of Gaussians",
        participation=lambda steps: strategies.apart(1),
    )


def fixed(examples: int, batch_size: int) -> Sampler:
    """Every step sees a fresh uniform subset of exactly ``batch_size`` examples.

    Small batches of large data sets are drawn with replacement, and repeated examples again until
    all are distinct, which is exactly uniform too and takes time and memory of the batch.

    Privacy:
      Proved for replace-one neighbours, under which the sum moves by twice the
      sensitivity; `dpjax.accounting` converts the multiplier itself.
    """
    examples, batch_size = _checked_whole("fixed", examples, batch_size)

    sparse = _sparse(examples, batch_size)

    def draw(key: Key, step: Any) -> Draw:
        # Batches of different steps are independent, as the event assumes.
        key, size = trees.step_key(key, Purpose.SAMPLING, step), jnp.asarray(batch_size, jnp.int32)
        if sparse:
            return Draw(_draws.distinct(key, examples, batch_size), size)
        # A prefix of a uniform permutation is a uniform subset.
        return Draw(jax.random.permutation(key, examples)[:batch_size], size)

    def event(multipliers: np.ndarray) -> DpEvent:
        from dpjax.accounting.events import without_replacement

        return without_replacement(multipliers, examples, batch_size)

    return Sampler(
        name="fixed",
        examples=examples,
        batch_size=batch_size,
        capacity=batch_size,
        draw=draw,
        event=event,
        neighbours=Neighbours.REPLACE_ONE,
        # The size is public and constant, so an example cannot leave without another taking its
        # place.
        claim="uniform batches of a fixed size; proved for replace-one neighbours (RDP)",
    )


def shuffled(examples: int, batch_size: int) -> Sampler:
    """A fresh shuffle every epoch, cut into batches; the remainder of an epoch is skipped.

    For small batches of large data sets the shuffle is a pseudo-random permutation (a Feistel
    network) that is computed for the indices of one batch. No proof needs it to be uniform.

    Privacy:
      Shuffling is *not* Poisson sampling; the Poisson epsilon claims too much for it. The
      proved event, for zero-out neighbours: an example is in at most one batch an epoch, so
      each epoch is one Gaussian with the epoch's smallest multiplier, without amplification.
    """
    examples, batch_size = _checked_whole("shuffled", examples, batch_size)

    if _sparse(examples, batch_size):
        # Batch t has every steps-th place of the permutation from t: sums of int64 constants and
        # an int32 step, because JAX has no int64 by default.
        places = np.arange(batch_size) * (examples // batch_size)

        def batch(key: Key, epoch: Any, number: Any) -> Array:
            key = trees.step_key(key, Purpose.SAMPLING, epoch)
            return _draws.permuted(key, examples, places, number)
    else:
        # Permutes the whole data set again at every step: a cached order would be state, and a
        # draw is a function of (key, step) alone.
        def batch(key: Key, epoch: Any, number: Any) -> Array:
            order = jax.random.permutation(trees.step_key(key, Purpose.SAMPLING, epoch), examples)
            return jax.lax.dynamic_slice_in_dim(order, number * batch_size, batch_size)

    kind = "pseudo-randomly shuffled" if _sparse(examples, batch_size) else "shuffled"
    return _epochs(
        "shuffled",
        examples,
        batch_size,
        batch,
        f"{kind} batches; no amplification is proved: one Gaussian an epoch",
        # The last batch of an epoch can share an example with the first one of the next.
        lambda epoch, steps: strategies.apart(1, -(-steps // epoch)),
    )


def curriculum(
    order: Sequence[int] | np.ndarray, batch_size: int, *, public: bool = False
) -> Sampler:
    """Identical batches in identical order every epoch, for example easy examples first.

    Args:
      order: A permutation of the examples.
      batch_size: Examples a step; the remainder of an epoch is skipped.
      public: Whether the order was computed *without the private data*, by a public scorer
        with one fixed place per example.

    Privacy:
      An order computed from the private data is itself a release without noise, and moving
      one example moves many others between batches: epsilon is infinite. A public order has
      the event of `shuffled`.
    """
    indices = np.asarray(order)
    if not np.array_equal(np.sort(indices), np.arange(indices.size)):
        raise ValueError(
            "sampling.curriculum(order): expected every index of the data set once (0 to "
            f"{indices.size - 1}). Usually scores were passed: use np.argsort(scores)."
        )
    _, batch_size = _checked_whole("curriculum", indices.size, batch_size, _draws.LARGEST)
    if not isinstance(public, bool):
        raise ValueError(
            f"sampling.curriculum(public={public!r}): expected True or False: whether the order "
            "was computed without the private data. Other values are refused because True "
            "promises a finite epsilon."
        )
    fixed_order = jnp.asarray(indices, jnp.int32)
    sampler = _epochs(
        "curriculum",
        indices.size,
        batch_size,
        lambda key, epoch, number: jax.lax.dynamic_slice_in_dim(
            fixed_order, number * batch_size, batch_size
        ),
        "a public fixed order; no amplification is proved: one Gaussian an epoch",
        lambda epoch, steps: strategies.cycles(epoch),
        trees.fingerprint(indices),
    )
    # `facts` are part of a run's identity: a run recorded with public=False can be neither
    # resumed nor reported as public=True.
    sampler = dataclasses.replace(sampler, facts={"public": public})
    if public:
        return sampler

    def bare(multipliers: np.ndarray) -> DpEvent:
        from dp_accounting import NonPrivateDpEvent

        del multipliers
        return NonPrivateDpEvent()

    claim = "the order comes from the private data without noise: not private"
    return dataclasses.replace(sampler, event=bare, claim=claim, participation=None)


def cyclic_poisson(examples: int, batch_size: float, *, cycle: int) -> Sampler:
    r"""Poisson sampling from one part of the data after the other, for correlated noise.

    Each example belongs to one of ``cycle`` parts, drawn once for the run, independently of all
    other examples. Step $t$ draws from part $t \bmod b$, each example with probability
    $q = b \cdot \mathrm{batch\_size} / \mathrm{examples}$. So an example can be in every $b$-th
    step alone, and banded noise with at most $b$ bands is amplified.

    Args:
      examples: Size of the data set.
      batch_size: The *expected* number of examples a step; sums are divided by it.
      cycle: $b$, the number of parts; at most examples / batch_size.

    Privacy:
      With add-or-remove neighbours: $T$ steps are $\lceil T/b \rceil$ Poisson-subsampled Gaussians
      at rate $q$. The same holds with banded noise of at most $b$ bands, whose multiplier is then
      relative to one participation. With more bands nothing is amplified.

    Example:
      >>> sampler = cyclic_poisson(examples=60_000, batch_size=500, cycle=16)
      >>> event = sampler.event(np.ones(160))
      >>> event.count, round(event.event.sampling_probability, 4)
      (10, 0.1333)

    References:
      Choquette-Choo, Ganesh, McKenna, McMahan, Rush, Thakurta and Xu, "(Amplified) Banded Matrix
      Factorization: A unified approach to private training", 2023, theorem 4.
    """
    examples, batch_size = _checked("cyclic_poisson", examples, batch_size, _draws.LARGEST)
    cycle = _whole("cyclic_poisson", "cycle", cycle)
    rate = cycle * batch_size / examples
    if not cycle >= 1 or rate > 1:
        raise ValueError(
            f"sampling.cyclic_poisson(examples={examples}, batch_size={batch_size}, "
            f"cycle={cycle}): expected a cycle from 1 to {int(examples // batch_size)}, examples / "
            "batch_size: a step draws from one part, and a part must hold a batch."
        )
    largest = _largest_word(rate)
    if largest < 0:
        raise ValueError(
            f"sampling.cyclic_poisson(examples={examples}, batch_size={batch_size}): the rate "
            f"{rate:.2e} of a part is below 2^-32, the resolution of the sampler. Usually "
            "batch_size was given as a rate; it is an expected number of examples."
        )

    def draw(key: Key, step: Any) -> Draw:
        here = _parts(key, examples, cycle) == step % cycle
        key = trees.step_key(key, Purpose.SAMPLING, step)
        return _coins(key, jnp.full(examples, largest, jnp.uint32), here)

    return Sampler(
        name="cyclic_poisson",
        examples=examples,
        batch_size=batch_size,
        capacity=examples,
        draw=draw,
        # An example can be in one step of a cycle, at an unknown place: count the least noise.
        event=lambda multipliers: _gaussians(_least(multipliers, cycle), rate),
        claim=f"Poisson sampling from {cycle} parts in turn; one amplified step a cycle is proved",
        facts={"cycle": cycle},
        participation=lambda steps: strategies.cycles(cycle),
    )


def balls_in_bins(examples: int, batch_size: float) -> Sampler:
    """Each example falls into one of the batches of an epoch, the same in every epoch.

    Batches have random sizes, about ``batch_size``. An example returns after exactly ``examples //
    batch_size`` steps, and so correlated noise has a small sensitivity.

    Args:
      examples: Size of the data set.
      batch_size: The *expected* number of examples a step; sums are divided by it.

    Privacy:
      With add-or-remove neighbours, proved without amplification: one Gaussian an epoch, with the
      epoch's smallest multiplier. An example's batch is drawn independently of all others, and
      the event holds for each batch that it can be in. With a strategy, `strategies.white`
      included, the event also counts that the batch is unknown, where batches overlap little.

    Example:
      >>> balls_in_bins(examples=60_000, batch_size=500).event(np.ones(240))
      SelfComposedDpEvent(event=GaussianDpEvent(noise_multiplier=1.0), count=2)

    References:
      Chua, Ghazi, Harrison, Kamath, Kumar, Leeman, Manurangsi, Sinha and Zhang, "Balls-and-Bins
      Sampling for DP-SGD", 2024.
    """
    examples, batch_size = _checked("balls_in_bins", examples, batch_size, _draws.LARGEST)
    bins = int(examples // batch_size)

    def draw(key: Key, step: Any) -> Draw:
        return _draws.listed(_parts(key, examples, bins) == step % bins)

    return Sampler(
        name="balls_in_bins",
        examples=examples,
        batch_size=batch_size,
        capacity=examples,
        draw=draw,
        event=lambda multipliers: _gaussians(_least(multipliers, bins), 1.0),
        claim="one random batch of the epoch for each example, the same in every epoch",
        participation=lambda steps: strategies.cycles(bins),
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
    _, batch_size = _checked("scored", places.size, batch_size, _draws.LARGEST)
    steps_per_row = _whole("scored", "steps_per_row", steps_per_row)
    _check_rates(places, table)
    # An upper bound for every example: who is in which bin must not be revealed by the accounting.
    largest, of = table.max(axis=1), jnp.asarray(places, jnp.int32)
    below = jnp.asarray(np.maximum(np.floor(table * _WORDS) - 1, 0).astype(np.uint32))
    some = jnp.asarray(table > 0)  # at rate 0 `below` is 0, and a word of 0 would be drawn

    def draw(key: Key, step: Any) -> Draw:
        row = jnp.minimum(step // steps_per_row, len(table) - 1)
        return _coins(trees.step_key(key, Purpose.SAMPLING, step), below[row][of], some[row][of])

    def event(multipliers: np.ndarray) -> DpEvent:
        rows = np.minimum(np.arange(len(multipliers)) // steps_per_row, len(table) - 1)
        return _gaussians(multipliers, largest[rows])

    return Sampler(
        name="scored",
        examples=places.size,
        batch_size=batch_size,
        capacity=places.size,
        draw=draw,
        event=event,
        claim="Poisson sampling at a rate for each bin of public scores; the largest is counted",
        facts={"rates": [[float(rate), steps_per_row] for rate in largest]},
        fingerprint=trees.fingerprint([places, table]),
    )


def fold(
    draw: Draw,
    size: int,
    add: Callable[..., T],
    first: T,
    share: tuple[Any, int] = (0, 1),
    block: tuple[int, Callable[[T], T]] | None = None,
) -> T:
    """Folds ``add`` over a draw, ``size`` examples at a time; each example is visited once.

    Args:
      draw: Of any size, including an empty one.
      size: Rows in a microbatch; speed and memory only.
      add: ``(rows, mask, total) -> total``, with ``rows`` the indices of a microbatch and
        ``mask`` saying which of them belong to the draw: the last one is filled up.
      first: The total of an empty draw.
      share: ``(which, of)``: every ``of``-th microbatch, starting at number ``which``. All shares
        together are the draw.
      block: ``(count, settle)``: after every ``count`` microbatches of the share, and after the
        last, ``settle`` maps the total to the one that is continued.

    Example:
      >>> draw = Draw(jnp.array([3, 0, 4, 0, 0]), jnp.array(3))
      >>> add = lambda rows, mask, total: total + jnp.sum(jnp.where(mask, rows, 0))
      >>> int(fold(draw, size=2, add=add, first=jnp.array(0)))
      7
    """
    size = _whole("fold", "size", size)
    if draw.indices.ndim != 1:
        raise ValueError(
            f"sampling.fold(draw with indices {draw.indices.shape}): expected int32 indices, one "
            "for each place. The draw is of more than 2^31 - 1 examples, whose indices are pairs "
            "of words, and arrays in memory have no such rows: keep the examples on disk as a "
            "data.Stream, and read stream.rows(sampling.on_host(draw))."
        )
    which, of = share
    # The list of indices is padded so that the last microbatches are never shifted back.
    indices = jnp.pad(draw.indices, (0, of * size))

    # A while loop on the size of the draw: an exact Poisson draw of any size runs in one program.
    def body(carry: tuple[Int[Array, ""], T]) -> tuple[Int[Array, ""], T]:
        start, total = carry
        rows = jax.lax.dynamic_slice_in_dim(indices, start, size)
        mask = start + jnp.arange(size) < draw.size
        # Devices take turns, so that their shares differ by one microbatch at most.
        return start + of * size, add(rows, mask, total)

    # By the first share's place: all shares take equally many trips, because a device that
    # ends its loop early would leave the others waiting in a collective.
    def more(carry: tuple[Int[Array, ""], T]) -> Any:
        return carry[0] - which * size < draw.size

    start = (jnp.asarray(which * size, jnp.int32), first)
    if block is None:
        return jax.lax.while_loop(more, body, start)[1]
    count, settle = block

    def whole(carry: tuple[Int[Array, ""], T]) -> tuple[Int[Array, ""], T]:
        end = carry[0] + count * of * size
        place, total = jax.lax.while_loop(lambda c: more(c) & (c[0] < end), body, carry)
        return place, settle(total)

    return jax.lax.while_loop(more, whole, start)[1]


def on_host(draw: Draw) -> np.ndarray:
    """The indices of a draw of any sampler, ``[size]``, as `dpjax.data.Stream` reads them.

    Example:
      >>> on_host(Draw(jnp.array([3, 0, 4, 0, 0]), jnp.array(2))).tolist()
      [3, 0]
    """
    indices = np.asarray(draw.indices)[: int(draw.size)].astype(np.int64)
    # Beyond 2^31 - 1 examples, an index is a high and a low word of 32 bits.
    return indices if indices.ndim == 1 else (indices[:, 0] << 32) | indices[:, 1]


def _sparse(examples: int, batch_size: float) -> bool:
    """Whether batches are drawn in time of the batch."""
    return examples > _FEW and batch_size <= _SPARSE * examples


def _epochs(
    name: str,
    examples: int,
    batch_size: int,
    batch: Callable[[Key, Any, Any], Array],
    claim: str,
    participation: Callable[[int, int], Participation],
    fingerprint: str | None = None,
) -> Sampler:
    """A sampler whose batches are disjoint in an epoch: ``batch(key, epoch, number)``.

    ``participation(epoch, steps)`` says in which steps of a run one example can be.
    """
    # A last, smaller batch would be divided by the same constant, and has no place in a compiled
    # step.
    steps = examples // batch_size
    turn = min(steps, _draws.LARGEST)  # the step is an int32, and does not end a longer epoch

    def draw(key: Key, step: Any) -> Draw:
        chosen = batch(key, step // turn, step % turn)
        return Draw(chosen, jnp.asarray(batch_size, jnp.int32))

    def event(multipliers: np.ndarray) -> DpEvent:
        # An example is in one batch an epoch, at an unknown place: count the least noise.
        return _gaussians(_least(multipliers, steps), 1.0)

    return Sampler(
        name=name,
        examples=examples,
        batch_size=batch_size,
        capacity=batch_size,
        draw=draw,
        event=event,
        neighbours=Neighbours.ZERO_OUT,
        claim=claim,
        fingerprint=fingerprint,
        participation=lambda planned: participation(steps, planned),
    )


def _parts(key: Key, examples: int, parts: int) -> Array:
    """The part of each example, the same at every step of a run."""
    # By a word of its own, so that no example moves another one to a different part. A part is at
    # most 2^-32 likelier than one over their number, which `accounting.allocation` counts.
    return jax.random.bits(trees.step_key(key, Purpose.PARTS, 0), (examples,), jnp.uint32) % parts


def _least(multipliers: np.ndarray, cycle: int) -> np.ndarray:
    """The smallest multiplier of each cycle."""
    starts = np.arange(0, len(multipliers), cycle)
    return np.minimum.reduceat(multipliers, starts) if len(multipliers) else multipliers


def _largest_word(rate: float) -> int:
    """An example is drawn if a uniform 32-bit word is at most this; below 0 at too low rates."""
    # Rounding down keeps the rate that runs at or below the accounted one; a float32 uniform has
    # only 23 bits, and at rates of 1e-5 its rounding is one per cent.
    return math.floor(rate * _WORDS) - 1


def _coins(key: Key, below: Array, some: Any) -> Draw:
    """Draws each eligible example whose uniform 32-bit word is at most its threshold."""
    chosen = (jax.random.bits(key, below.shape, jnp.uint32) <= below) & some
    return _draws.listed(chosen)


def _gaussians(multipliers: np.ndarray, rate: float | np.ndarray) -> DpEvent:
    """Gaussian steps, Poisson-subsampled at one rate or at one for each step."""
    # Imported for events alone: drawing batches does not need the accounting library, which imports
    # most of SciPy.
    from dpjax import accounting

    return accounting.scheduled_gaussian(multipliers, rate)


def _check_rates(bins: np.ndarray, rates: np.ndarray) -> None:
    if rates.ndim != 2 or not rates.size:
        raise ValueError(
            f"sampling.scored(rates of shape {rates.shape}): expected rates [rows, bins], with at "
            "least one row and one bin."
        )
    if not np.all((rates == 0) | ((rates >= 1 / _WORDS) & (rates <= 1))):
        raise ValueError(
            "sampling.scored(rates): expected rates from 0 to 1, each 0 or at least 2^-32, the "
            "resolution of the sampler. Usually a batch size was given: divide it by the number "
            "of examples that the bins are planned to hold."
        )
    whole = bins.ndim == 1 and np.issubdtype(bins.dtype, np.integer)
    if not whole or np.any(bins < 0) or np.any(bins >= rates.shape[1]):
        raise ValueError(
            f"sampling.scored(bins): expected one whole number from 0 to {rates.shape[1] - 1} for "
            "each example, its bin. Usually scores were passed: cut them at public thresholds, "
            "np.digitize(scores, thresholds)."
        )


def _whole(who: str, what: str, value: Any) -> int:
    hint = (
        "Only the batch_size of sampling.poisson and sampling.scored may be a fraction. Usually "
        "the value is a quotient: round it, as with //."
    )
    return checks.whole(f"sampling.{who}", what, value, hint)


def _checked_whole(name: str, examples: int, batch_size: int, most: int = _MOST) -> tuple[int, int]:
    """Both sizes, for a sampler whose batches all have that size."""
    return _checked(name, examples, batch_size, most)[0], _whole(name, "batch_size", batch_size)


def _checked(name: str, examples: int, batch_size: float, most: int = _MOST) -> tuple[int, float]:
    """Both sizes as Python numbers: arithmetic on narrow NumPy types rounds or overflows."""
    examples = _whole(name, "examples", examples)
    checks.number(f"sampling.{name}", "batch_size", batch_size)
    batch_size = np.asarray(batch_size).item()  # 256 stays an int, also on the privacy card
    if examples > most:
        raise ValueError(
            f"sampling.{name}(examples={examples}): expected at most {most:,}, the number of "
            "examples that its indices can name. Usually parts of examples were counted, such as "
            "tokens or pixels; the unit of privacy is a whole example, such as a document. "
            f"sampling.poisson, fixed and shuffled draw from up to {_MOST:,} examples (2^44). For "
            "a larger data set, train on a part of it."
        )
    if not 0 < batch_size <= examples:
        raise ValueError(
            f"sampling.{name}(examples={examples}, batch_size={batch_size}): expected a batch_size "
            "above 0 and at most the number of examples; it is the expected number of examples a "
            "step. Usually the two arguments were swapped, or the batch size was tuned for a "
            "larger data set."
        )
    if examples > _draws.LARGEST and batch_size > _LARGEST_BATCH:
        raise ValueError(
            f"sampling.{name}(examples={examples}, batch_size={batch_size}): expected at most "
            f"{_LARGEST_BATCH:,} examples a step (2^24) of more than {_draws.LARGEST:,}, because "
            "the list of a batch is in memory. Usually batch_size was given in tokens: give the "
            "number of examples."
        )
    return examples, batch_size

# SPDX-License-Identifier: Apache-2.0
"""Samplers: which examples a step sees, and what not being seen is worth.

Each function builds a `Sampler` that holds both the draw and the privacy event proved
for that very draw, so one cannot be trained and another accounted.  A draw is a pure
function of ``(key, step)``: nothing has to be replayed to resume, and any step can be
drawn again.  The list of chosen examples is secret; sizes and rates are public.

This file must never know what is done with the examples, nor turn an event into an
epsilon.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import dp_accounting as dp
import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jaxtyping import Array, Bool, Int

from dpjax import trees
from dpjax.types import Draw, Key, Neighbours, Purpose, Sampler

__all__ = ["by_name", "curriculum", "fixed", "fold", "full", "poisson", "scored", "shuffled"]

T = TypeVar("T")

_WORDS = 2**32
_MOST = 2**31 - 1  # examples: they are counted, and named, by int32


def poisson(examples: int, batch_size: float) -> Sampler:
    r"""Every example joins every batch by a coin of its own: exact Poisson sampling.

    Nothing is truncated, resampled or padded away: a draw may hold any number of
    examples, none and all included.  Coins have 32 bits, and the rate is rounded down to
    them, so the rate that runs is never above $q = \mathrm{batch\_size}/\mathrm{examples}$.

    Args:
      examples: Size of the data set.
      batch_size: The *expected* number of examples a step; sums are divided by it.

    Privacy:
      With add-or-remove neighbours: the Poisson-subsampled Gaussian mechanism.

    Example:
      >>> sampler = poisson(examples=60_000, batch_size=256)
      >>> round(sampler.sampling_rate, 5)
      0.00427

    References:
      Abadi et al., "Deep Learning with Differential Privacy", 2016; Zhu and Wang,
      "Poisson Subsampled Renyi Differential Privacy", 2019.
    """
    examples, batch_size = _checked("poisson", examples, batch_size)
    rate = batch_size / examples
    largest = math.floor(rate * _WORDS) - 1
    if largest < 0:
        raise ValueError(
            f"sampling.poisson(examples={examples}, batch_size={batch_size}): the rate "
            f"{rate:.2e} is below the 2^-32 that a coin can show. Usually batch_size was "
            "given as a rate; it is an expected number of examples."
        )
    if batch_size < 1:
        logging.warning(
            "sampling.poisson(examples=%d, batch_size=%g): less than one example a step is "
            "expected, and sums are divided by it. If that is a rate, give the number of examples "
            "that it draws: %g.",
            examples,
            batch_size,
            batch_size * examples,
        )

    def draw(key: Key, step: Any) -> Draw:
        below = jnp.full(examples, largest, jnp.uint32)
        return _coins(trees.step_key(key, Purpose.SAMPLING, step), below, True)

    def event(multipliers: np.ndarray) -> dp.DpEvent:
        return _runs(functools.partial(_poisson, rate), multipliers)

    return Sampler(
        name="poisson",
        examples=examples,
        batch_size=batch_size,
        capacity=examples,
        draw=draw,
        event=event,
        claim="exact Poisson sampling; amplification by sampling is proved and counted",
    )


def by_name(name: str, examples: int, batch_size: float) -> Sampler:
    """The sampler of that name: ``poisson``, ``fixed``, ``shuffled`` or ``full``.

    Example:
      >>> by_name("fixed", 100, 10).claim
      'uniform batches of a fixed size; proved for replace-one neighbours (RDP)'
    """
    if name == "full":
        return full(examples)
    by_size = {"poisson": poisson, "fixed": fixed, "shuffled": shuffled}
    if name not in by_size:
        raise ValueError(
            f"sampling.by_name({name!r}): expected one of full, {', '.join(by_size)}. Orders and "
            "scores are no words; build such a sampler anew, with sampling.curriculum or "
            "sampling.scored. If an earlier run is to be counted (training.earlier, a card), write "
            "what it spent by hand: Mechanism(before=(dpjax.mechanism.Spent(sampling=that sampler, "
            "runs=((multiplier, steps), ...)),))."
        )
    return by_size[name](examples, batch_size)


def full(examples: int) -> Sampler:
    """Every step sees the whole data set; nothing is amplified and nothing is hidden.

    Example:
      >>> full(1279).sampling_rate
      1.0
    """
    examples, _ = _checked("full", examples, examples)
    everything = jnp.arange(examples)
    return Sampler(
        name="full",
        examples=examples,
        batch_size=examples,
        capacity=examples,
        draw=lambda key, step: Draw(everything, jnp.asarray(examples, jnp.int32)),
        event=_gaussians,
        claim="every step uses every example; plain composition of Gaussians",
    )


def fixed(examples: int, batch_size: int) -> Sampler:
    """Every step sees a fresh uniform subset of exactly ``batch_size`` examples.

    Privacy:
      Proved for replace-one neighbours, under which the sum moves by twice the
      sensitivity; `dpjax.accounting` converts the multiplier itself.
    """
    examples, batch_size = _checked_whole("fixed", examples, batch_size)

    def draw(key: Key, step: Any) -> Draw:
        order = jax.random.permutation(trees.step_key(key, Purpose.SAMPLING, step), examples)
        return Draw(order[:batch_size], jnp.asarray(batch_size, jnp.int32))

    def event(multipliers: np.ndarray) -> dp.DpEvent:
        def one(z: float) -> dp.DpEvent:
            return dp.SampledWithoutReplacementDpEvent(examples, batch_size, dp.GaussianDpEvent(z))

        return _runs(one, multipliers)

    return Sampler(
        name="fixed",
        examples=examples,
        batch_size=batch_size,
        capacity=batch_size,
        draw=draw,
        event=event,
        neighbours=Neighbours.REPLACE_ONE,
        claim="uniform batches of a fixed size; proved for replace-one neighbours (RDP)",
    )


def shuffled(examples: int, batch_size: int) -> Sampler:
    """A fresh shuffle every epoch, cut into batches; what is left over is skipped.

    Privacy:
      Shuffling is *not* Poisson sampling, and reporting the Poisson epsilon for it
      claims too much.  What is proved, for zero-out neighbours: an example is in at most
      one batch an epoch, so each epoch is one Gaussian, of the epoch's smallest
      multiplier, without amplification.
    """
    examples, batch_size = _checked_whole("shuffled", examples, batch_size)

    def order(key: Key, epoch: Any) -> Int[Array, " examples"]:
        return jax.random.permutation(trees.step_key(key, Purpose.SAMPLING, epoch), examples)

    return _epochs(
        "shuffled",
        examples,
        batch_size,
        order,
        "shuffled batches; no amplification is proved: one Gaussian an epoch",
    )


def curriculum(
    order: Sequence[int] | np.ndarray, batch_size: int, *, public: bool = False
) -> Sampler:
    """The same batches in the same order every epoch: easy examples first, say.

    Args:
      order: A permutation of the examples.
      batch_size: Examples a step; what is left over is skipped.
      public: Whether the order was made *without looking at the private data*, by a
        public scorer with one fixed place per example.

    Privacy:
      An order computed from the private data is itself a release without noise, and
      moving one example moves many others between batches: its epsilon is infinite.  A
      public order is worth what `shuffled` is worth.
    """
    indices = np.asarray(order)
    if not np.array_equal(np.sort(indices), np.arange(indices.size)):
        raise ValueError(
            "sampling.curriculum: order must hold every index of the data set once "
            f"(0 to {indices.size - 1}). Usually scores were passed: use np.argsort(scores)."
        )
    _, batch_size = _checked_whole("curriculum", indices.size, batch_size)
    if not isinstance(public, bool):
        raise ValueError(
            f"sampling.curriculum(public={public!r}): expected True or False, whether the order "
            "was made without looking at the private data. A text or a number would count as True, "
            "and with it an epsilon would be promised."
        )
    fixed_order = jnp.asarray(indices, jnp.int32)
    sampler = _epochs(
        "curriculum",
        indices.size,
        batch_size,
        lambda key, epoch: fixed_order,
        "a public fixed order; no amplification is proved: one Gaussian an epoch",
        trees.fingerprint(indices),
    )
    # Not of the sampler alone: a run under the one may not be stated, or go on, under the other.
    sampler = dataclasses.replace(sampler, facts={"public": public})
    if public:
        return sampler
    return dataclasses.replace(
        sampler,
        event=lambda multipliers: dp.NonPrivateDpEvent(),
        claim="the order comes from the private data without noise: not private",
    )


def scored(
    bins: Sequence[int] | np.ndarray,
    rates: Sequence[Sequence[float]] | np.ndarray,
    *,
    steps_per_row: int,
    batch_size: float,
) -> Sampler:
    r"""Easy examples first, soundly: a coin for every example, at the rate of its bin.

    Args:
      bins: The bin of each example, from 0: what a *public* scorer says of that example
        alone, cut at public thresholds.  A scorer trained with `dpjax.dpsgd` is public once
        it is paid for, with ``Mechanism(before=...)``.
      rates: The rate of each bin, a row at a time: ``[rows, bins]``, from 0 to 1.
      steps_per_row: How long a row lasts; the last one stays.
      batch_size: What sums are divided by; public.  Not a count of what is in the bins,
        which is private: about the rates times their *planned* sizes.

    Privacy:
      With add-or-remove neighbours: an example's bin is its own, whoever else is there, so
      each step is the Poisson-subsampled Gaussian at the rate of that bin; what is counted at
      each step is the largest rate of any bin.  Bins cut at quantiles of the private scores,
      or rates made from counts of them, are covered by nothing.

    Example:
      >>> bins = np.arange(60_000) // 12_000  # by a public scorer: the easiest first
      >>> opened = np.tri(5)  # one bin more every four epochs
      >>> sampler = scored(bins, 0.01 * opened, steps_per_row=400, batch_size=600)
      >>> sampler.facts["rates"]
      [[0.01, 400], [0.01, 400], [0.01, 400], [0.01, 400], [0.01, 400]]
    """
    places, table = np.asarray(bins), np.asarray(rates, np.float64)
    _, batch_size = _checked("scored", places.size, batch_size)
    steps_per_row = _whole("scored", "steps_per_row", steps_per_row)
    _check_rates(places, table, steps_per_row)
    largest, of = table.max(axis=1), jnp.asarray(places, jnp.int32)
    below = jnp.asarray(np.maximum(np.floor(table * _WORDS) - 1, 0).astype(np.uint32))
    some = jnp.asarray(table > 0)

    def draw(key: Key, step: Any) -> Draw:
        row = jnp.minimum(step // steps_per_row, len(table) - 1)
        return _coins(trees.step_key(key, Purpose.SAMPLING, step), below[row][of], some[row][of])

    def event(multipliers: np.ndarray) -> dp.DpEvent:
        rows = np.minimum(np.arange(len(multipliers)) // steps_per_row, len(table) - 1)
        return _runs(_poisson, largest[rows], multipliers)

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
    draw: Draw, size: int, add: Callable[..., T], first: T, share: tuple[Any, int] = (0, 1)
) -> T:
    """Goes through a draw, ``size`` examples at a time: each of them once, and nothing else.

    Args:
      draw: Of any size, also empty.
      size: Of a microbatch; speed and memory only.
      add: ``(rows, mask, total) -> total``, with ``rows`` the indices of a microbatch and
        ``mask`` saying which of them belong to the draw: the last one is filled up.
      first: The total of an empty draw.
      share: ``(which, of)``: of every so many microbatches that one alone.  All shares together
        are the draw.

    Example:
      >>> draw = Draw(jnp.array([3, 0, 4, 0, 0]), jnp.array(3))
      >>> add = lambda rows, mask, total: total + jnp.sum(jnp.where(mask, rows, 0))
      >>> int(fold(draw, size=2, add=add, first=jnp.array(0)))
      7
    """
    if (size := _whole("fold", "size", size)) < 1:
        raise ValueError(
            f"sampling.fold(size={size}): expected the size of a microbatch, 1 or more; no number "
            "of empty ones comes to the end of a draw."
        )
    # The list of indices is padded so that the last microbatch is never shifted back.
    indices = jnp.pad(draw.indices, (0, size))
    which, of = share

    def body(carry: tuple[Int[Array, ""], T]) -> tuple[Int[Array, ""], T]:
        start, total = carry
        rows = jax.lax.dynamic_slice_in_dim(indices, start, size)
        mask = start + jnp.arange(size) < draw.size
        return start + of * size, add(rows, mask, total)

    start = (jnp.asarray(which * size, jnp.int32), first)
    return jax.lax.while_loop(lambda carry: carry[0] < draw.size, body, start)[1]


def _epochs(
    name: str,
    examples: int,
    batch_size: int,
    order: Callable[[Key, Any], Int[Array, " examples"]],
    claim: str,
    fingerprint: str | None = None,
) -> Sampler:
    """A sampler that walks through one order of the examples per epoch."""
    steps = examples // batch_size

    def draw(key: Key, step: Any) -> Draw:
        start = (step % steps) * batch_size
        chosen = jax.lax.dynamic_slice_in_dim(order(key, step // steps), start, batch_size)
        return Draw(chosen, jnp.asarray(batch_size, jnp.int32))

    def event(multipliers: np.ndarray) -> dp.DpEvent:
        # An example is in one batch an epoch, nobody knows which: count the worst one.
        starts = np.arange(0, len(multipliers), steps)
        worst = np.minimum.reduceat(multipliers, starts) if len(multipliers) else multipliers
        return _gaussians(worst)

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
    )


def _coins(key: Key, below: Array, some: Any) -> Draw:
    """Everyone whose coin of 32 bits is at most its own number, among some."""
    chosen = (jax.random.bits(key, below.shape, jnp.uint32) <= below) & some
    # A CPU is done with the loop, and with compiling it, in a fifth of the time.
    return jax.lax.platform_dependent(chosen, cpu=_listed_in_turn, default=_listed)


def _listed(chosen: Bool[Array, " examples"]) -> Draw:
    """Who is chosen, in order, and zeros behind them."""
    count = jnp.sum(chosen, dtype=jnp.int32)
    return Draw(jnp.nonzero(chosen, size=chosen.size, fill_value=0)[0].astype(jnp.int32), count)


def _listed_in_turn(chosen: Bool[Array, " examples"]) -> Draw:
    """The same: everyone is written behind those before, and stays there if chosen."""

    def body(i: Int[Array, ""], so_far: Draw) -> Draw:
        return Draw(so_far.indices.at[so_far.size].set(i), so_far.size + chosen[i])

    places = jnp.arange(chosen.size, dtype=jnp.int32)
    nobody = Draw(jnp.zeros_like(places), jnp.int32(0))
    found, size = jax.lax.fori_loop(0, chosen.size, body, nobody)
    return Draw(jnp.where(places < size, found, 0), size)


def _poisson(rate: float, multiplier: float) -> dp.DpEvent:
    """One step at a rate: everyone at 1, nobody at 0."""
    noise = dp.GaussianDpEvent(multiplier)
    if rate == 0:
        return dp.NoOpDpEvent()
    return dp.PoissonSampledDpEvent(rate, noise) if rate < 1 else noise


def _gaussians(multipliers: np.ndarray) -> dp.DpEvent:
    """One unamplified Gaussian per multiplier."""
    return _runs(dp.GaussianDpEvent, multipliers)


def _runs(event: Callable[..., dp.DpEvent], *columns: np.ndarray) -> dp.DpEvent:
    """Composes the events of all steps, equal ones grouped into one entry."""
    each = np.stack([np.asarray(column, np.float64) for column in columns], axis=-1)
    values, counts = np.unique(each, axis=0, return_counts=True)
    runs: list[dp.DpEvent] = [
        dp.SelfComposedDpEvent(event(*map(float, value)), int(count))
        for value, count in zip(values, counts, strict=True)
    ]
    return dp.ComposedDpEvent(runs) if runs else dp.NoOpDpEvent()


def _check_rates(bins: np.ndarray, rates: np.ndarray, steps_per_row: int) -> None:
    if rates.ndim != 2 or not rates.size or steps_per_row < 1:
        raise ValueError(
            f"sampling.scored(rates of shape {rates.shape}, steps_per_row={steps_per_row}): "
            "expected rates [rows, bins], at least one row, which lasts for at least one step."
        )
    if not np.all((rates == 0) | ((rates >= 1 / _WORDS) & (rates <= 1))):
        raise ValueError(
            "sampling.scored: expected rates from 0 to 1 (and from 2^-32, if not 0, which is all "
            "that a coin can show). Usually a batch size was given: divide it by the number of "
            "examples that the bins are planned to hold."
        )
    whole = bins.ndim == 1 and np.issubdtype(bins.dtype, np.integer)
    if not whole or np.any(bins < 0) or np.any(bins >= rates.shape[1]):
        raise ValueError(
            f"sampling.scored: expected one whole number from 0 to {rates.shape[1] - 1} for each "
            "example, its bin. Usually scores were passed: cut them at public thresholds, "
            "np.digitize(scores, thresholds)."
        )


def _number(who: str, what: str, value: Any) -> int | float:
    """Python's own number: others round, or overflow, where a rate is made of them."""
    found = trees.number(value, f"sampling.{who}({what}")
    if not math.isfinite(found):
        raise ValueError(f"sampling.{who}({what}={value!r}): expected a finite number.")
    return found


def _whole(who: str, what: str, value: Any) -> int:
    number = _number(who, what, value)
    if number != int(number):
        raise ValueError(
            f"sampling.{who}({what}={value}): expected a whole number; only sampling.poisson and "
            "sampling.scored have an expected size. Usually it is a quotient: round it, as with //."
        )
    return int(number)


def _checked_whole(name: str, examples: int, batch_size: int) -> tuple[int, int]:
    """Both sizes, if a batch can have that one."""
    return _checked(name, examples, batch_size)[0], _whole(name, "batch_size", batch_size)


def _checked(name: str, examples: int, batch_size: float) -> tuple[int, float]:
    """Both sizes as numbers of Python's, if they fit together."""
    examples = _whole(name, "examples", examples)
    batch_size = _number(name, "batch_size", batch_size)
    if examples < 1:
        raise ValueError(
            f"sampling.{name}(examples={examples}): expected the size of the data set, at least 1."
        )
    if examples > _MOST:
        raise ValueError(
            f"sampling.{name}(examples={examples}): expected at most {_MOST:,} (2^31 - 1). Indices "
            "are 32-bit integers, and beyond that they would name other examples. Usually parts "
            "of examples were counted, such as tokens or pixels; an example is what privacy "
            "is of, such as a document. If there are really so many, train on a part of them."
        )
    if not 0 < batch_size <= examples:
        raise ValueError(
            f"sampling.{name}(examples={examples}, batch_size={batch_size}): batch_size "
            "is the expected number of examples a step, more than 0 and at most all of "
            "them. Usually the two arguments were swapped, or the batch size was tuned "
            "for a larger data set."
        )
    return examples, batch_size

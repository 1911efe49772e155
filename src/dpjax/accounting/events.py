# SPDX-License-Identifier: Apache-2.0
"""Builds events in the grammar of dp_accounting; `dpjax.accounting` defines the multipliers.

Grouped clipping is several Gaussians on *one* sample: `effective_multiplier` joins their
multipliers before the sampling is applied. The other order claims too much.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting import DpEvent
from numpy.typing import ArrayLike

from dpjax import checks, schedules
from dpjax.types import Event

_DISTINCT = 16  # multipliers of an epoch of random allocation
BARE = 1e-100  # a multiplier so small that its square underflows hides nothing


@dataclasses.dataclass(frozen=True)
class AllocatedGaussianDpEvent(DpEvent):
    """One Gaussian on all steps of a run, in which each example has the steps of one random bin.

    Attributes:
      noise_multiplier: Relative to the most that an example moves the run, whichever its bin.
      overlaps: One number for each bin, ``u`` of `dpjax.accounting._allocation`.
    """

    noise_multiplier: float
    overlaps: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class RandomAllocationDpEvent(DpEvent):
    """One epoch of Gaussian steps, in which each example is in one step at random.

    Attributes:
      batches: The bins of a whole epoch; each example falls into one.
      noise_multipliers: Pairs, sorted: a multiplier, and how many bins ran with it; fewer than
        ``batches`` in all where the run ended within the epoch.
    """

    batches: int
    noise_multipliers: tuple[tuple[float, int], ...]


class CorrelatedSampledDpEvent(dp_accounting.PoissonSampledDpEvent):
    """A Poisson-sampled Gaussian below correlated noise, where moves of two records overlap."""


def rewritten(event: DpEvent, leaf: Callable[[DpEvent], DpEvent]) -> DpEvent:
    """The event, with ``leaf`` applied to every event in it that is not a composition."""
    match event:
        case dp_accounting.ComposedDpEvent(events=parts):
            return dp_accounting.ComposedDpEvent([rewritten(part, leaf) for part in parts])
        case dp_accounting.SelfComposedDpEvent(event=inner, count=count):
            return dp_accounting.SelfComposedDpEvent(rewritten(inner, leaf), count)
    return leaf(event)


def correlated_samples(event: DpEvent) -> DpEvent:
    """The event, with every sample marked as below correlated noise."""

    def marked(part: DpEvent) -> DpEvent:
        if isinstance(part, dp_accounting.PoissonSampledDpEvent):
            return CorrelatedSampledDpEvent(part.sampling_probability, part.event)
        return part

    return rewritten(event, marked)


def with_noise(event: DpEvent, factor: float) -> DpEvent:
    """The event with this many times its Gaussian noise."""

    def scaled(part: DpEvent) -> DpEvent:
        match part:
            case dp_accounting.GaussianDpEvent(noise_multiplier=z):
                return dp_accounting.GaussianDpEvent(factor * z)
            case dp_accounting.PoissonSampledDpEvent(sampling_probability=rate, event=inner):
                return type(part)(rate, with_noise(inner, factor))
            case AllocatedGaussianDpEvent(noise_multiplier=z):
                return dataclasses.replace(part, noise_multiplier=factor * z)
            case RandomAllocationDpEvent(noise_multipliers=pairs):
                louder = tuple((factor * z, bins) for z, bins in pairs)
                return dataclasses.replace(part, noise_multipliers=louder)
        return part

    return rewritten(event, scaled)


def check_rate(call: str, value: float) -> float:
    """The sampling rate as a float; raises unless it is a probability, 0 and 1 included."""
    rate = checks.number(call, "sampling_rate", value)
    if not 0 <= rate <= 1:
        raise ValueError(
            f"{call}(sampling_rate={rate}): expected a probability, batch size over examples."
        )
    return rate


def gaussian(noise_multiplier: float, steps: int = 1) -> DpEvent:
    """The Gaussian mechanism on the whole data set, ``steps`` times: nothing is amplified.

    They cost as much as one with ``noise_multiplier / sqrt(steps)``.

    Example:
      >>> gaussian(2.0, steps=4)
      SelfComposedDpEvent(event=GaussianDpEvent(noise_multiplier=2.0), count=4)
    """
    return subsampled_gaussian(noise_multiplier, 1.0, steps)


def subsampled_gaussian(noise_multiplier: float, sampling_rate: float, steps: int) -> DpEvent:
    """DP-SGD: ``steps`` times, a Poisson sample of the data, then a Gaussian on its clipped sum.

    The multiplier is the noise's standard deviation over the add-or-remove sensitivity, and the
    rate the probability with which each example joins a step, on its own coin. At rate 1 the steps
    are plain Gaussians, with no sampling around them; at rate 0 nothing runs and nothing is paid.

    Example:
      >>> subsampled_gaussian(1.1, 0.01, 1)
      PoissonSampledDpEvent(sampling_probability=0.01, event=GaussianDpEvent(noise_multiplier=1.1))
      >>> subsampled_gaussian(1.1, 0.01, 0)
      NoOpDpEvent()

    References:
      Abadi et al., *Deep learning with differential privacy*, 2016, algorithm 1.
    """
    call = "accounting.subsampled_gaussian"
    noise_multiplier = checks.not_negative(call, "noise_multiplier", noise_multiplier)
    rate = check_rate(call, sampling_rate)
    steps = checks.whole(call, "steps", steps, least=0)
    if steps == 0 or rate == 0:
        return dp_accounting.NoOpDpEvent()
    event: DpEvent = dp_accounting.GaussianDpEvent(noise_multiplier)
    # Steps at rate 1 stay unsampled, because unsampled Gaussians have a closed form.
    if rate < 1:
        event = dp_accounting.PoissonSampledDpEvent(rate, event)
    if steps > 1:
        event = dp_accounting.SelfComposedDpEvent(event, steps)
    return event


def scheduled_gaussian(multipliers: ArrayLike, sampling_rate: ArrayLike) -> DpEvent:
    """DP-SGD whose noise multiplier, and if need be sampling rate, changes with the step.

    ``multipliers`` has one for every step, chosen before training and not from the data;
    ``sampling_rate`` has one, or one for every step. Equal steps are gathered: a schedule and its
    reverse cost the same.

    Example:
      >>> event = scheduled_gaussian([2.0] * 50 + [1.0] * 50, sampling_rate=0.02)
      >>> [part.count for part in event.events]
      [50, 50]
    """
    rates, zs = np.broadcast_arrays(
        np.asarray(sampling_rate, np.float64), np.asarray(multipliers, np.float64)
    )
    pair_of_step = np.stack([rates.ravel(), zs.ravel()], axis=-1)
    # Runs of equal steps are joined first, because sorting ten million steps takes 15 seconds.
    pairs, lengths = schedules.runs_of(pair_of_step)
    # Equal pairs are joined, because an accountant's time grows with the number of distinct steps.
    distinct, place = np.unique(pairs, axis=0, return_inverse=True)
    counts = np.bincount(place.ravel(), lengths)
    steps = []
    for (rate, multiplier), count in zip(distinct, counts, strict=True):
        steps.append(subsampled_gaussian(multiplier, rate, int(count)))
    return compose(*steps)


def sampled_gaussian(
    event: Event,
    multipliers: np.ndarray,
    *,
    examples: int,
    batch_size: float,
    rates: Sequence[Sequence[Any]],
    cycle: int,
) -> DpEvent:
    """Gaussian steps with these multipliers, ``[steps]``, on the batches of a sampler.

    Args:
      event: How the sampler draws batches.
      multipliers: The noise multiplier of each step that ran, in order.
      examples: The number of examples in the data.
      batch_size: The expected number of examples in a batch.
      rates: For Poisson samples, pairs: a sampling rate, and how many cycles in turn have it. The
        last rate holds for all later cycles.
      cycle: The number of steps, in turn, in which an example is in one batch at most.
    """
    if event is Event.NONE:
        return dp_accounting.NonPrivateDpEvent()
    if event is Event.SUBSET:
        return without_replacement(multipliers, examples, int(batch_size))
    if event is Event.ALLOCATION:
        return random_allocation(multipliers, cycle)
    # Poisson samples remain. An example can be in only one step of a cycle, and it is unknown in
    # which, so a cycle counts as one step with its least noise.
    least_of_cycle = multipliers
    if len(multipliers):  # `reduceat` raises without steps
        starts = np.arange(0, len(multipliers), cycle)
        least_of_cycle = np.minimum.reduceat(multipliers, starts)
    rate_of_pair, cycles_of_pair = map(np.asarray, zip(*rates, strict=True))
    cycles = np.arange(len(least_of_cycle))
    pair_of_cycle = np.searchsorted(np.cumsum(cycles_of_pair), cycles, side="right")
    pair_of_cycle = np.minimum(pair_of_cycle, len(rate_of_pair) - 1)  # the last rate stays
    return scheduled_gaussian(least_of_cycle, rate_of_pair[pair_of_cycle])


def without_replacement(multipliers: ArrayLike, examples: int, batch_size: int) -> DpEvent:
    """Gaussian steps, each on a uniform batch of a fixed size; equal steps are grouped."""
    values, counts = np.unique(np.asarray(multipliers, np.float64), return_counts=True)
    steps = []
    for z, count in zip(values.tolist(), counts.tolist(), strict=True):
        noise = dp_accounting.GaussianDpEvent(z)
        step = dp_accounting.SampledWithoutReplacementDpEvent(examples, batch_size, noise)
        steps.append(dp_accounting.SelfComposedDpEvent(step, count))
    return compose(*steps)


def random_allocation(multipliers: ArrayLike, batches: int) -> DpEvent:
    """Epochs of ``batches`` Gaussian steps; every example is in one step of each, drawn afresh.

    ``multipliers`` has one for every step, in order, chosen before training. The last epoch may
    have fewer steps. Equal epochs are counted together. The multipliers of an epoch with more than
    16 different ones are sorted and cut into sixteenths, and each sixteenth counts with its least
    multiplier, because an accountant's time grows with their number.

    Example:
      >>> random_allocation([1.5] * 20, batches=10)
      SelfComposedDpEvent(event=RandomAllocationDpEvent(batches=10, ...), count=2)
    """
    values = np.asarray(multipliers, np.float64)
    # Every example is in every step if there is one batch, so nothing is amplified.
    if batches == 1:
        return scheduled_gaussian(values, sampling_rate=1.0)
    in_whole_epochs = len(values) - len(values) % batches
    whole_epochs = values[:in_whole_epochs].reshape(-1, batches)
    last_epoch = values[in_whole_epochs:]
    # Epochs with the same multipliers in another order cost the same, so each is sorted. Runs of
    # equal epochs are joined first, because there can be a million of them.
    sorted_epochs, lengths = schedules.runs_of(np.sort(whole_epochs, axis=1))
    counts: Counter[tuple[tuple[float, int], ...]] = Counter()  # of epochs, each as its pairs
    for multipliers_of_epoch, count in zip(sorted_epochs, lengths, strict=True):
        counts[_grouped(multipliers_of_epoch)] += int(count)
    counts[_grouped(np.sort(last_epoch))] += 1
    epochs = []
    for pairs, count in counts.items():
        if pairs:  # empty if all noise was infinite, or no step is left for a last epoch
            epoch = RandomAllocationDpEvent(batches, pairs)
            epochs.append(dp_accounting.SelfComposedDpEvent(epoch, count))
    return compose(*epochs)


def _grouped(multipliers: np.ndarray) -> tuple[tuple[float, int], ...]:
    """Sorted multipliers of an epoch as pairs (multiplier, steps), of at most `_DISTINCT`."""
    # A step with infinite noise releases nothing, like a step that did not run.
    finite = multipliers[multipliers != np.inf]
    values, counts = schedules.runs_of(finite)
    if len(values) > _DISTINCT:
        # Cut into equal shares; the first multiplier of a share is its least.
        share = -(-finite.size // _DISTINCT)
        values, counts = schedules.runs_of(finite[np.arange(finite.size) // share * share])
    return tuple(zip(values.tolist(), counts.tolist(), strict=True))


def compose(*events: DpEvent) -> DpEvent:
    """All of ``events``, one after the other; each may depend on what the ones before it released.

    No operation for none, the event itself for one. Events without cost are left out.

    Example:
      >>> compose(gaussian(8.0), subsampled_gaussian(1.0, 0.0, 10))
      GaussianDpEvent(noise_multiplier=8.0)
    """
    parts = [event for event in events if not isinstance(event, dp_accounting.NoOpDpEvent)]
    if not parts:
        return dp_accounting.NoOpDpEvent()
    # A single part is not wrapped, which keeps the event short in errors and on cards.
    if len(parts) == 1:
        return parts[0]
    return dp_accounting.ComposedDpEvent(parts)


def effective_multiplier(noise_multipliers: ArrayLike) -> float:
    """The one multiplier that costs as much as several on one sample: ``(sum_g m_g^-2)^-1/2``.

    There is one for each group, relative to that group's own bound. The answer is 0.0 if one is 0
    or below 1e-100: that group is released bare.

    Example:
      >>> round(effective_multiplier([2.0, 1.5]), 12)
      1.2

    References:
      McMahan et al., *A general approach to adding differential privacy to iterative training
      procedures*, 2018, §3.
    """
    call = "accounting.effective_multiplier"
    zs = [checks.not_negative(call, "noise_multiplier", z) for z in np.ravel(noise_multipliers)]
    # One group without noise reveals the example, whatever noise the others have. Below `BARE` the
    # precision z^-2 overflows.
    if any(z <= BARE for z in zs):
        return 0.0
    precision = sum(z**-2 for z in zs)
    if precision == 0:
        return math.inf
    return precision**-0.5

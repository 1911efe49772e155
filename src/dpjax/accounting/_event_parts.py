# SPDX-License-Identifier: Apache-2.0
"""Flattens an event: a tree of events becomes a short list of parts that cost privacy.

Sampled Gaussians of equal (rate, multiplier) are counted. Unsampled Gaussians are joined into one,
since ``1/z^2`` adds up; several under one sample are joined *before* the sampling is applied. Other
kinds of event (Laplace, sampling without replacement, mixtures) go to dp_accounting unchanged.
"""

import math
import reprlib
from typing import NamedTuple

import dp_accounting
from dp_accounting import DpEvent, NeighboringRelation
from dp_accounting.dp_event import RepeatAndSelectDpEvent

from dpjax import checks
from dpjax.accounting.events import (
    BARE,
    AllocatedGaussianDpEvent,
    CorrelatedSampledDpEvent,
    RandomAllocationDpEvent,
    check_rate,
)

NEIGHBOURS: dict[str, NeighboringRelation] = {
    "add-or-remove": NeighboringRelation.ADD_OR_REMOVE_ONE,
    # This is dp_accounting's name for an example that is replaced by a special, empty record.
    "zero-out": NeighboringRelation.REPLACE_SPECIAL,
    "replace-one": NeighboringRelation.REPLACE_ONE,
}


class Parts(NamedTuple):
    """The parts of an event that cost privacy."""

    sampled: dict[tuple[float, float], int]  # {(rate, multiplier): count}, rates inside (0, 1)
    precision: float  # the sum of 1/z^2 over all unsampled Gaussians
    foreign: tuple[tuple[DpEvent, int], ...]  # (event, count) of all other kinds
    private: bool  # False if something is released bare: no finite epsilon exists

    @property
    def empty(self) -> bool:
        """Whether the event costs nothing."""
        return not self.sampled and not self.foreign and self.precision == 0

    @property
    def unsampled_multiplier(self) -> float:
        """The multiplier of the one Gaussian that stands for all unsampled ones."""
        if self.precision == 0:
            return math.inf
        return self.precision**-0.5

    @property
    def named(self) -> str:
        """The class names of the foreign events, for errors."""
        return ", ".join(dict.fromkeys(type(event).__name__ for event, _ in self.foreign))


def as_sampled(parts: Parts) -> Parts:
    """Replaces random allocations by Poisson samples whose losses have about the same variance.

    The loss of a Poisson sample at rate q has a variance of about ``q^2 (exp(1 / z^2) - 1)``. In an
    epoch of random allocation an example is in one of t steps (bins) at random. The n bins with
    multiplier z add ``n / t^2 (exp(1 / z^2) - 1)``, so they become one sample at the rate
    ``sqrt(n) / t``.
    """
    sampled = dict(parts.sampled)
    others = []
    for event, count in parts.foreign:
        if not isinstance(event, RandomAllocationDpEvent):
            others.append((event, count))
            continue
        for z, bins in event.noise_multipliers:
            pair = (math.sqrt(bins) / event.batches, z)
            sampled[pair] = sampled.get(pair, 0) + count
    return parts._replace(sampled=dict(sorted(sampled.items())), foreign=tuple(others))


def relation(neighbours: str) -> NeighboringRelation:
    """The neighbouring relation in dp_accounting's enum."""
    return NEIGHBOURS[checks.one_of("accounting", "neighbours", neighbours, NEIGHBOURS)]


def squared(multiplier: float) -> float:
    """The square of a multiplier; a finite one counts as at most 1e100."""
    if math.isinf(multiplier):
        return math.inf
    # The square of 1e154 overflows. Lowering a multiplier is sound: less noise costs no less.
    return min(multiplier, 1 / BARE) ** 2


def split(event: DpEvent, records: int = 1) -> Parts:
    """Flattens an event into its `Parts`.

    ``records`` is the number of examples that one user has. With several, samples whose noise is
    correlated (`CorrelatedSampledDpEvent`) count as unsampled.
    """
    sampled: dict[tuple[float, float], int] = {}
    precisions: list[float] = []
    foreign: list[tuple[DpEvent, int]] = []
    bare = 0  # how often something is released without noise, or with less than `BARE`
    # The events that are left, each with its count. This stack replaces recursion, because a
    # schedule composes thousands of events.
    stack = [(event, 1)]
    while stack:
        node, count = stack.pop()
        if not isinstance(node, DpEvent):
            raise TypeError(
                f"accounting: got {reprlib.repr(node)}; expected an event, such as mechanism.event."
            )
        match node:
            case dp_accounting.NoOpDpEvent():
                pass
            case dp_accounting.NonPrivateDpEvent():
                bare += count
            case dp_accounting.ComposedDpEvent():
                stack.extend((part, count) for part in node.events)
            case dp_accounting.SelfComposedDpEvent():
                stack.append((node.event, count * node.count))
            # Noise below `BARE` hides nothing. `not >` is also true of NaN, which counts as none.
            case (
                dp_accounting.GaussianDpEvent(noise_multiplier=z)
                | dp_accounting.LaplaceDpEvent(noise_multiplier=z)
                | AllocatedGaussianDpEvent(noise_multiplier=z)
            ) if not z > BARE:
                bare += count
            case RandomAllocationDpEvent(noise_multipliers=pairs) if not all(
                z > BARE for z, _ in pairs
            ):
                bare += count
            case dp_accounting.GaussianDpEvent(noise_multiplier=z):
                # Gaussians compose exactly: precisions add up to the precision of one Gaussian.
                precisions.append(count / squared(z))
            case dp_accounting.PoissonSampledDpEvent(sampling_probability=rate, event=inner):
                rate = check_rate("accounting: PoissonSampledDpEvent", rate)
                # Several records of a user move common rows of correlated noise, also in different
                # steps. Their steps are not separate releases, so sampling is not counted.
                shares_noise = records > 1 and isinstance(node, CorrelatedSampledDpEvent)
                on_sample = split(inner)  # the parts of one step, as if it were not sampled
                if rate == 0:
                    pass  # nothing is drawn
                elif rate == 1 or shares_noise:
                    stack.append((inner, count))  # counts as unsampled
                elif on_sample.sampled or on_sample.foreign:
                    # Amplification has a closed form only for a Gaussian. Any other event stays
                    # foreign, and the accountant of dp_accounting handles or refuses it.
                    foreign.append((node, count))
                elif not on_sample.private:
                    bare += count
                elif on_sample.precision and count:  # a composition may have a count of 0
                    # Several Gaussians on one sample act as one, which is amplified as a whole.
                    step = (rate, on_sample.unsampled_multiplier)
                    sampled[step] = sampled.get(step, 0) + count
            case (
                dp_accounting.SampledWithoutReplacementDpEvent(event=inner)
                | RepeatAndSelectDpEvent(event=inner)
            ):
                inside = split(inner)
                if not inside.private:
                    bare += count
                elif not inside.empty:
                    foreign.append((node, count))  # whole, for dp_accounting
            case _:
                foreign.append((node, count))
    return Parts(
        # The order of events must not change the last digit of a claim, so samples are sorted and
        # precisions are summed without rounding.
        sampled=dict(sorted(sampled.items())),
        precision=math.fsum(precisions),
        foreign=tuple((part, count) for part, count in foreign if count),
        private=bare == 0,
    )

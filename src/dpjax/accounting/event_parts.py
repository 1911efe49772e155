# SPDX-License-Identifier: Apache-2.0
"""Flattens an event: a tree of events becomes a short list of parts that cost privacy.

Every accountant needs sampled Gaussians with equal (rate, multiplier) counted together, and all
unsampled Gaussians joined into one, because ``1/z^2`` adds up. Several Gaussians under one sample
are joined *before* the sampling is applied. Other kinds of event (Laplace, sampling without
replacement, mixtures) are passed to dp_accounting unchanged.
"""

import dataclasses
import math
import reprlib
from typing import NamedTuple

import dp_accounting
import numpy as np
from dp_accounting import DpEvent, NeighboringRelation
from dp_accounting.dp_event import MixtureOfGaussiansDpEvent, RepeatAndSelectDpEvent

from dpjax import checks
from dpjax.accounting.events import (
    BARE,
    AllocatedGaussianDpEvent,
    CorrelatedSampledDpEvent,
    check_rate,
)

NEIGHBOURS: dict[str, NeighboringRelation] = {
    "add-or-remove": NeighboringRelation.ADD_OR_REMOVE_ONE,
    # dp_accounting's name for an example that is replaced by a special, empty record.
    "zero-out": NeighboringRelation.REPLACE_SPECIAL,
    "replace-one": NeighboringRelation.REPLACE_ONE,
}

_COUNT = (
    "It is the whole number of times that the event runs. Usually two numbers of steps were "
    "subtracted in the wrong order."
)


class Parts(NamedTuple):
    """The parts of an event that cost privacy.

    Attributes:
      sampled: ``{(sampling_rate, noise_multiplier): count}``, rates strictly between 0 and 1.
      precision: The sum of ``1/z^2`` over all unsampled Gaussians; 0 where there are none.
      foreign: ``{text: (event, count)}``, kinds of event that are not Gaussian steps.
      private: False if something is released bare, so that no finite epsilon exists.
    """

    sampled: dict[tuple[float, float], int]
    precision: float
    foreign: dict[str, tuple[DpEvent, int]]
    private: bool

    @property
    def empty(self) -> bool:
        """Whether the event costs nothing."""
        return not self.sampled and not self.foreign and self.precision == 0

    @property
    def unsampled_multiplier(self) -> float:
        """The multiplier of the one Gaussian that stands for all unsampled ones."""
        return self.precision**-0.5 if self.precision else math.inf


def relation(neighbours: str) -> NeighboringRelation:
    """The library's name of a neighbouring relation, or an error that lists ours."""
    hint = (
        "It says which two data sets must look alike: one example more or fewer, one blanked, or "
        "one exchanged for another."
    )
    return NEIGHBOURS[checks.one_of("accounting", "neighbours", neighbours, NEIGHBOURS, hint)]


def squared(multiplier: float) -> float:
    """The square of a multiplier; a finite one counts as at most 1e100."""
    # Beyond 1e154 the square overflows, and less noise costs no less.
    return multiplier**2 if math.isinf(multiplier) else min(multiplier, 1 / BARE) ** 2


@dataclasses.dataclass
class _Sorted:
    """What `split` has found so far."""

    sampled: dict[tuple[float, float], int] = dataclasses.field(default_factory=dict)
    inverse_squares: list[float] = dataclasses.field(default_factory=list)
    foreign: dict[str, tuple[DpEvent, int]] = dataclasses.field(default_factory=dict)
    bare: int = 0  # how often something is released without noise

    def gaussian(self, multiplier: float, count: int) -> None:
        """Adds unsampled Gaussians."""
        # They compose exactly: their precisions 1 / z^2 add up to the precision of one Gaussian.
        self.inverse_squares.append(count / squared(multiplier))

    def sample(self, event: dp_accounting.PoissonSampledDpEvent, count: int) -> None:
        """Adds Poisson samples of what is below them."""
        # At rate 0 too: `split` refuses events that no accountant knows how to count.
        below, rate = split(event.event), float(event.sampling_probability)
        if rate == 0:
            return
        if below.sampled or below.foreign:
            # Amplification has a closed form for a bare Gaussian alone. Anything else stays one
            # foreign event, which the accountant of dp_accounting handles or refuses.
            self.keep(event, count)
        elif not below.private:
            self.bare += count
        elif below.precision and count:
            # Several Gaussians on one sample are one Gaussian, so they share the amplification.
            key = (rate, below.unsampled_multiplier)
            self.sampled[key] = self.sampled.get(key, 0) + count

    def keep(self, event: DpEvent, count: int) -> None:
        """Adds an event as it is; equal ones are found by their text."""
        if count:
            text = repr(event)
            self.foreign[text] = event, self.foreign.get(text, (event, 0))[1] + count

    def parts(self) -> Parts:
        """What was found, the same for all orders of composition."""
        # Sorted, and summed without rounding: the order in which events were composed must not
        # change a claim in its last digit.
        sampled, precision = dict(sorted(self.sampled.items())), math.fsum(self.inverse_squares)
        return Parts(sampled, precision, self.foreign, self.bare == 0)


def split(event: DpEvent, records: int = 1) -> Parts:
    """Sorts the leaves of a tree of events; multipliers stay relative to add-or-remove.

    Args:
      event: What was run.
      records: How many records one user has. Below correlated noise several count as drawn at
        every sample.

    Example:
      >>> from dpjax.accounting.events import compose, gaussian, subsampled_gaussian
      >>> parts = split(compose(*[subsampled_gaussian(1.0, 0.1, 1)] * 3, gaussian(2.0, steps=4)))
      >>> parts.sampled, parts.unsampled_multiplier
      ({(0.1, 1.0): 3}, 1.0)
    """
    found = _Sorted()
    # A stack instead of recursion: a schedule composes thousands of events, and Python's own stack
    # ends at about 1,000.
    stack = [(event, 1)]
    while stack:
        leaf, count = stack.pop()
        if not isinstance(leaf, DpEvent):
            raise TypeError(
                f"accounting: {reprlib.repr(leaf)} was given; expected a privacy event. Of a "
                "dpjax.Mechanism it is mechanism.event; accounting.compose joins several."
            )
        match leaf:
            case dp_accounting.NoOpDpEvent():
                pass
            case dp_accounting.NonPrivateDpEvent():
                found.bare += count
            case dp_accounting.ComposedDpEvent():
                stack.extend((part, count) for part in leaf.events)
            case dp_accounting.SelfComposedDpEvent():
                # A negative count would subtract the cost of other parts.
                runs = checks.whole(
                    "accounting: SelfComposedDpEvent", "count", leaf.count, _COUNT, least=0
                )
                stack.append((leaf.event, count * runs))
            # `not >` is also true for NaN, which must count as no noise.
            case (
                dp_accounting.GaussianDpEvent(noise_multiplier=z)
                | dp_accounting.LaplaceDpEvent(noise_multiplier=z)
                | AllocatedGaussianDpEvent(noise_multiplier=z)
            ) if not z > BARE:
                found.bare += count
            case dp_accounting.GaussianDpEvent(noise_multiplier=z):
                found.gaussian(z, count)
            case dp_accounting.PoissonSampledDpEvent(sampling_probability=rate, event=inner):
                check_rate("accounting: PoissonSampledDpEvent", rate)
                together = records > 1 and isinstance(leaf, CorrelatedSampledDpEvent)
                if rate == 1 or (rate > 0 and together):
                    # Rate 1 draws every example, so nothing is amplified and the inner events
                    # compose exactly.
                    stack.append((inner, count))
                else:
                    found.sample(leaf, count)
            case (
                dp_accounting.SampledWithoutReplacementDpEvent(event=inner)
                | RepeatAndSelectDpEvent(event=inner)
            ):
                below = split(inner)
                if not below.private:
                    found.bare += count
                elif not below.empty:
                    found.keep(leaf, count)
            case _:
                found.keep(_as_lists(leaf), count)
    return found.parts()


def _as_lists(event: DpEvent) -> DpEvent:
    """A mixture with lists in place of arrays; any other event as it is.

    Equal foreign events are found by their text, and the text of a long array leaves out digits,
    and in the middle numbers.
    """
    if not isinstance(event, MixtureOfGaussiansDpEvent):
        return event
    both = (event.sensitivities, event.sampling_probs)
    both = (np.asarray(each, np.float64).tolist() for each in both)
    return MixtureOfGaussiansDpEvent(event.standard_deviation, *both)

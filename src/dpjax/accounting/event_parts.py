# SPDX-License-Identifier: Apache-2.0
"""Flattens an event: a tree of events becomes a short list of what is paid for.

Every accountant needs sampled Gaussians with equal (rate, multiplier) counted together, and all
unsampled Gaussians joined into one, because `1/z^2` adds up. Several Gaussians under one sample
are joined *before* the sampling is applied. Other kinds of event (Laplace, sampling without
replacement, mixtures) are passed to dp_accounting unchanged.
"""

import math
import reprlib
from typing import NamedTuple

import dp_accounting
import numpy as np
from dp_accounting import DpEvent, NeighboringRelation
from dp_accounting.dp_event import MixtureOfGaussiansDpEvent, RepeatAndSelectDpEvent

from dpjax.accounting.events import BARE

NEIGHBOURS: dict[str, NeighboringRelation] = {
    "add-or-remove": NeighboringRelation.ADD_OR_REMOVE_ONE,
    # dp_accounting's name for an example that is replaced by a special, empty record.
    "zero-out": NeighboringRelation.REPLACE_SPECIAL,
    "replace-one": NeighboringRelation.REPLACE_ONE,
}


class Parts(NamedTuple):
    """What an event consists of.

    Attributes:
      sampled: `{(sampling_rate, noise_multiplier): count}`, rates strictly between 0 and 1.
      precision: the sum of `1/z^2` over all unsampled Gaussians; 0 where there are none.
      foreign: `{text: (event, count)}`, kinds of event that are not Gaussian steps.
      private: False if something is released bare, so that no finite epsilon exists.
    """

    sampled: dict[tuple[float, float], int]
    precision: float
    foreign: dict[str, tuple[DpEvent, int]]
    private: bool

    @property
    def empty(self) -> bool:
        """Whether nothing is paid for at all."""
        return not self.sampled and not self.foreign and self.precision == 0

    @property
    def unsampled_multiplier(self) -> float:
        """The multiplier of the one Gaussian that stands for all unsampled ones."""
        return self.precision**-0.5 if self.precision else math.inf


def relation(neighbours: str) -> NeighboringRelation:
    """The library's name of a neighbouring relation, or an error that lists ours."""
    if neighbours not in NEIGHBOURS:
        raise ValueError(
            f"accounting: neighbours={neighbours!r} is not known; choose one of "
            f"{', '.join(NEIGHBOURS)}. It says which two data sets must look alike: one example "
            "more or fewer, one blanked, or one exchanged for another."
        )
    return NEIGHBOURS[neighbours]


def split(event: DpEvent) -> Parts:
    """Walks a tree of events and sorts its leaves.

    Args:
      event: any `DpEvent`.

    Returns:
      Its `Parts`. Multipliers stay relative to the add-or-remove sensitivity.

    Example:
      >>> from dpjax.accounting.events import compose, gaussian, subsampled_gaussian
      >>> parts = split(compose(*[subsampled_gaussian(1.0, 0.1, 1)] * 3, gaussian(2.0, steps=4)))
      >>> parts.sampled, parts.unsampled_multiplier
      ({(0.1, 1.0): 3}, 1.0)
    """
    sampled: dict[tuple[float, float], int] = {}
    foreign: dict[str, tuple[DpEvent, int]] = {}
    inverse_squares: list[float] = []
    private = True
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
                private = private and count == 0
            case dp_accounting.ComposedDpEvent():
                stack.extend((part, count) for part in leaf.events)
            case dp_accounting.SelfComposedDpEvent():
                stack.append((leaf.event, count * _checked_count(leaf.count)))
            case dp_accounting.GaussianDpEvent():
                # `not >` is also true for NaN, which must count as no noise.
                bare = not leaf.noise_multiplier > BARE
                private = private and (count == 0 or not bare)
                # Unsampled Gaussians compose exactly: their precisions 1 / m^2 add up to the
                # precision of one Gaussian.
                inverse_squares += [] if bare else [count / leaf.noise_multiplier**2]
            case dp_accounting.PoissonSampledDpEvent(sampling_probability=rate, event=inner):
                _check_rate(rate)
                # Amplification has a closed form for a bare Gaussian alone. Anything else stays one
                # foreign event, which the accountant of dp_accounting handles or refuses.
                below = split(inner)
                if rate == 0:
                    continue
                if rate == 1:
                    # Rate 1 draws every example, so nothing is amplified and the inner events
                    # compose exactly.
                    stack.append((inner, count))
                elif below.sampled or below.foreign:
                    foreign[repr(leaf)] = (leaf, foreign.get(repr(leaf), (leaf, 0))[1] + count)
                elif not below.private:
                    private = private and count == 0
                elif below.precision and count:
                    # Several Gaussians on one sample are one Gaussian, so they share the
                    # amplification.
                    key = (float(rate), below.unsampled_multiplier)
                    sampled[key] = sampled.get(key, 0) + count
            case dp_accounting.LaplaceDpEvent(noise_multiplier=b) if not b > BARE:
                private = private and count == 0
            case (
                dp_accounting.SampledWithoutReplacementDpEvent(event=inner)
                | RepeatAndSelectDpEvent(event=inner)
            ) if split(inner).empty or not split(inner).private:
                private = private and (count == 0 or split(inner).private)
            case _ if count:
                # Equal foreign events are found by their text, so the text must hold every digit.
                leaf = _listed(leaf)
                foreign[repr(leaf)] = (leaf, foreign.get(repr(leaf), (leaf, 0))[1] + count)
    # Sorted, and summed without rounding: the order in which events were composed must not change a
    # claim in its last digit.
    return Parts(dict(sorted(sampled.items())), math.fsum(inverse_squares), foreign, private)


def _listed(event: DpEvent) -> DpEvent:
    """A mixture with lists for arrays, whose text leaves out digits, and in the middle numbers."""
    if not isinstance(event, MixtureOfGaussiansDpEvent):
        return event
    both = (np.asarray(each, np.float64) for each in (event.sensitivities, event.sampling_probs))
    return MixtureOfGaussiansDpEvent(event.standard_deviation, *(each.tolist() for each in both))


def _checked_count(count: int) -> int:
    """How often a part runs; less than never would pay back what others spent."""
    if count < 0 or count % 1 != 0:
        raise ValueError(
            f"accounting: SelfComposedDpEvent(count={count}): expected a whole number, zero or "
            "more: how often the event runs. Usually two numbers of steps were subtracted the "
            "wrong way round."
        )
    return int(count)


def _check_rate(rate: float) -> None:
    if not 0 <= rate <= 1:
        raise ValueError(
            f"accounting: PoissonSampledDpEvent(sampling_probability={rate}): expected a "
            "probability in [0, 1]. A number above 1 is usually the batch size itself: divide it "
            "by the number of examples."
        )

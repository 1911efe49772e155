# SPDX-License-Identifier: Apache-2.0
"""What composed privacy loss distributions share, whatever their steps are.

The loss of one step is a random variable. Losses of steps add, so their distributions convolve;
dp_accounting does that on a grid with pessimistic rounding. What floating point can take from the
answer of a distribution is added to it (`error`). Many distinct steps are rounded to few:
multipliers *down* and rates *up*, which is again an upper bound.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from dpjax.accounting.event_parts import Parts, relation
from dpjax.accounting.profiles import Profile

MIXED = 1e-3  # a grid for losses that are found one by one: a tenth of the time, 0.1 %
LEVELS = 64  # distinct steps that are composed as they are; more are rounded to these
_UNIT = 2.0**-52  # the distance of floats above 1


def one_step(
    rate: float, multiplier: float, grid: float, neighbours: str
) -> PrivacyLossDistribution:
    """The loss of one Poisson-subsampled Gaussian."""
    return privacy_loss_distribution.from_gaussian_mechanism(
        multiplier,
        value_discretization_interval=grid,
        sampling_prob=rate,
        neighboring_relation=relation(neighbours),
    )


def proven(epsilon: Callable[[float], Any], delta: Callable[[float], Any], parts: Parts) -> Profile:
    """What a distribution proves; its own answers suppose exact arithmetic."""
    off = error(parts)
    return Profile(
        lambda given: float(epsilon(given - off)) if given > off else math.inf,
        lambda given: float(delta(given)) + off,
    )


def error(parts: Parts) -> float:
    r"""By how much floating point can move the delta of a composed distribution, either way.

    Let $u = 2^{-52}$. A distribution of one step stands for its deltas, differences of
    probabilities, each off by up to $u$. In a composition of $n$ steps, exchange the computed
    steps for exact ones, one after the other: each exchange moves delta by the mean of such an
    error over the loss of the other steps, so all of them by at most $n u$.

    The Fourier transform of a step is off as if its probabilities were: by independent errors of
    about $u$ times their root sum of squares, at most $u$. Its n-th power multiplies these by $n$.
    The inverse transform, and each product of two transforms, adds errors of about $u$ times the
    root of the number of losses within ten standard deviations, over the root of their spread,
    and cut tails add $10^{-15}$: $16 u$ together, for each distinct step.

    Example:
      >>> from dpjax.accounting.events import subsampled_gaussian
      >>> from dpjax.accounting.event_parts import split
      >>> f"{error(split(subsampled_gaussian(1.0, 0.01, 100_000))):.1e}"
      '4.4e-11'
    """
    counts = [count for _, count in parts.foreign.values()] + [1] * (parts.precision > 0)
    distinct = len(counts) + min(len(parts.sampled), LEVELS)
    return _UNIT * (2 * sum([*counts, *parts.sampled.values()]) + 16 * distinct)


def rounded(
    sampled: dict[tuple[float, float], int], most: int = LEVELS
) -> dict[tuple[float, float], int]:
    """At most `most` distinct steps that cost no less: multipliers down, rates up.

    All steps of a group count with its largest rate and its least multiplier. Groups are halved
    until there are `most`, each time the one in which that costs the most.

    Example:
      >>> steps = {(0.01, 1 + t / 1000): 1 for t in range(1000)}
      >>> len(rounded(steps)), min(z for _, z in rounded(steps))
      (64, 1.0)
    """
    # dp_accounting convolves once per distinct step. A schedule with a multiplier per step would
    # take minutes.
    if len(sampled) <= most:
        return sampled
    rows = np.array([(*step, count) for step, count in sorted(sampled.items())])
    groups = [(*_halves(rows), rows)]
    while len(groups) < most:
        groups.sort(key=lambda group: group[0])
        _, halves, rows = groups[-1]
        if not halves:
            break
        groups[-1:] = [(*_halves(half), half) for half in halves]
    out: dict[tuple[float, float], int] = {}
    for _, _, rows in groups:
        key = float(rows[:, 0].max()), float(rows[:, 1].min())
        out[key] = out.get(key, 0) + int(rows[:, 2].sum())
    return out


def _halves(rows: np.ndarray) -> tuple[float, tuple[np.ndarray, ...]]:
    """What two groups cost less than one, and the two that cost the least, or none.

    Rows are ``(rate, multiplier, count)``. A group is cut between rates or between multipliers.
    """

    def cost(rows: np.ndarray) -> np.ndarray:
        """Of the first rows as one group, ``[rows]``, as in the central limit."""
        q, z = np.maximum.accumulate(rows[:, 0]), np.minimum.accumulate(rows[:, 1])
        return np.cumsum(rows[:, 2]) * q**2 * np.expm1(np.minimum(z**-2, 700))

    best: tuple[float, tuple[np.ndarray, ...]] = 0.0, ()
    for column in (0, 1) if len(rows) > 1 else ():
        ordered = rows[np.argsort(rows[:, column], kind="stable")]
        first, last = cost(ordered), cost(ordered[::-1])[::-1]
        both = first[:-1] + last[1:]
        cut = int(np.argmin(both)) + 1
        saved = float(first[-1] - both[cut - 1])
        if saved > best[0]:
            best = saved, (ordered[:cut], ordered[cut:])
    return best

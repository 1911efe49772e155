# SPDX-License-Identifier: Apache-2.0
"""Composition of privacy loss distributions, for steps of every kind.

Losses of steps add, so their distributions convolve; dp_accounting does that on a grid with
pessimistic rounding. `error` bounds the rounding of floating point, and is added to delta. Many
distinct steps are rounded to few (`levels`), which is again an upper bound.
"""

import functools
import math
from typing import TypeAlias

import numpy as np
from dp_accounting.pld import PLDAccountant, privacy_loss_distribution
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from numpy.typing import ArrayLike

from dpjax.accounting._event_parts import Parts, relation
from dpjax.accounting.profiles import Profile

MIXED = 1e-3  # grid for losses that are found one by one: a tenth of the time, 0.1 % of epsilon
LEVELS = 256  # distinct steps that are composed unchanged; more are rounded to this number
Steps: TypeAlias = dict[tuple[float, float], int]  # {(rate, multiplier): count}
_UNIT = 2.0**-52  # the distance of floats above 1


# The loss of one step takes nearly all the time, and a search asks for the same steps again.
@functools.lru_cache(maxsize=300)
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


def composed(parts: Parts, grid: float, neighbours: str) -> PrivacyLossDistribution:
    """The loss of all parts that are not foreign."""
    total = privacy_loss_distribution.identity(value_discretization_interval=grid)
    # All unsampled Gaussians together act as one, whose loss has a closed form.
    if parts.precision:
        total = total.compose(one_step(1.0, parts.unsampled_multiplier, grid, neighbours))
    for (q, z), count in parts.sampled.items():
        step = one_step(q, z, grid, neighbours)
        total = total.compose(step.self_compose(count))
    return total


def proven(loss: PrivacyLossDistribution | PLDAccountant, parts: Parts) -> Profile:
    """The profile of a distribution or an accountant, with delta larger by its rounding `error`.

    So the epsilon at a delta is the computed one at ``delta - error``.
    """
    rounding = error(parts)
    if isinstance(loss, PLDAccountant):
        computed_epsilon = loss.get_epsilon
        computed_delta = loss.get_delta
    else:
        computed_epsilon = loss.get_epsilon_for_delta
        computed_delta = loss.get_delta_for_epsilon

    def epsilon_at(delta: float) -> float:
        if delta <= rounding:
            return math.inf
        return float(computed_epsilon(delta - rounding))

    def delta_at(epsilon: float) -> float:
        return float(computed_delta(epsilon)) + rounding

    return Profile(epsilon_at, delta_at)


def error(parts: Parts) -> float:
    r"""By how much floating point can move the delta of a composed distribution, either way.

    Let $u = 2^{-52}$. The deltas of one step are differences of probabilities, and each has an
    error of up to $u$. Exchange the computed steps of a composition of $n$ for exact ones, one
    after the other: each moves delta by the mean of such an error over the loss of the others, all
    of them by at most $n u$.

    The Fourier transform of a step has the error of its probabilities: independent errors of about
    $u$ times their root sum of squares, at most $u$. Its n-th power multiplies these by $n$. The
    inverse transform, and each product of two transforms, adds errors of about $u$ times the root
    of the number of losses within ten standard deviations, over the root of their spread, and cut
    tails add $10^{-15}$: $16 u$ together, for each distinct step.
    """
    counts = [count for _, count in parts.foreign]
    counts += parts.sampled.values()
    if parts.precision > 0:
        counts.append(1)
    return _UNIT * (2 * sum(counts) + 16 * len(counts))


def levels(
    multipliers: ArrayLike, count: int = LEVELS, plan: ArrayLike | None = None
) -> np.ndarray:
    r"""Multipliers rounded down to at most ``count`` geometric levels, which costs no less.

    With $a$ and $b$ the least and the largest positive finite multiplier of the plan,

    $$ \ell_k = a\, (b / a)^{k / (count - 1)}, \qquad k = 0, \dots, count - 1. $$

    A multiplier becomes the largest level that is not above it; infinity, 0, and what is below the
    plan's stay.

    A plan with at most ``count`` different multipliers keeps them. ``plan`` has all planned steps,
    so a longer run keeps its levels; by default it is ``multipliers``.

    Example:
      >>> levels([1.0, 1.1, 2.0, 3.9, 4.0, np.inf], count=3)
      array([ 1.,  1.,  2.,  2.,  4., inf])
    """
    values = np.asarray(multipliers, np.float64)
    planned = values if plan is None else np.asarray(plan, np.float64)
    grid = _grid(planned, count)
    place = np.searchsorted(grid, values, side="right") - 1
    is_planned = np.isfinite(values) & (place >= 0)
    return np.where(is_planned, grid[place], values)


def rounded(sampled: Steps, most: int = LEVELS, plan: Steps | None = None) -> Steps:
    """Rounds to at most ``most`` distinct steps, multipliers down to `levels` and rates up."""
    plan = plan or sampled
    count = level_count(plan, most)
    if count == 0:
        return sampled
    out: Steps = {}
    pairs = _at(sampled, plan, count)
    for pair, runs in zip(pairs, sampled.values(), strict=True):
        out[pair] = out.get(pair, 0) + runs
    return out


def level_count(plan: Steps, most: int = LEVELS) -> int:
    """The number of `levels` to which `rounded` rounds a plan; 0 if it keeps all steps."""
    if len(plan) <= most:
        return 0
    count = most
    while len(set(_at(plan, plan, count))) > most:
        count -= max(1, count // 16)
    return count


def _at(steps: Steps, plan: Steps, count: int) -> list[tuple[float, float]]:
    """The steps, with rates and multipliers rounded to the levels of the plan."""
    q, z = np.array(list(steps)).T
    rates, multipliers = np.array(list(plan)).T
    grid = _grid(rates, count)
    place = np.minimum(np.searchsorted(grid, q), grid.size - 1)
    up = np.maximum(q, grid[place])
    down = levels(z, count, multipliers)
    return list(zip(up.tolist(), down.tolist(), strict=True))


def _grid(planned: np.ndarray, count: int) -> np.ndarray:
    """The positive finite numbers; geometric levels between them if there are more than count."""
    usable = (planned > 0) & np.isfinite(planned)
    values = np.unique(planned[usable])
    if values.size == 0:
        return np.ones(1)
    if values.size > count:
        return np.geomspace(values[0], values[-1], count)
    return values

# SPDX-License-Identifier: Apache-2.0
"""Privacy loss distributions: the tightest proven epsilon here, and the slowest.

dp_accounting finds the loss of a step and composes; for "replace-one" it doubles the sensitivity.
This file chooses the grid of losses, and returns the minimum with RDP: both are upper bounds.
"""

import functools
import math
from collections.abc import Iterator

import dp_accounting
import numpy as np
from dp_accounting.dp_event import MixtureOfGaussiansDpEvent, RandomizedResponseDpEvent
from dp_accounting.pld import PLDAccountant
from scipy.special import logsumexp

from dpjax.accounting import (
    allocation,
    profiles,
    random_allocation,
    random_projections,
    rdp_accountant,
)
from dpjax.accounting.event_parts import Parts, as_sampled, relation
from dpjax.accounting.events import RandomAllocationDpEvent
from dpjax.accounting.loss_distributions import MIXED, composed, error, proven
from dpjax.accounting.profiles import Profile

GRID = 1e-4  # distance between the losses that the distribution is rounded to
_FINE = 8  # as many grids make a step's standard deviation, which costs 0.1 % of epsilon
_MANY = 8  # distinct steps: with more of them the grid is as coarse as `_FINE` allows
_POINTS = 4_000_000  # of one distribution, 32 MB: composition by FFT holds several copies
_FEWER = 500_000  # of a finer grid than the usual one, which takes seconds too
_FAR = 5_000.0  # above this epsilon digits do not matter, and RDP answers faster


def profile(parts: Parts, neighbours: str) -> Profile:
    """The smallest epsilon and delta that composed loss distributions prove.

    Koskela, Jälkö, Honkela, *Computing tight differential privacy guarantees using FFT*, 2020;
    Doroshenko et al., *Connect the dots: tighter discrete approximations of privacy loss
    distributions*, 2022.
    """
    chance = _chance(parts)
    bounds = functools.cache(lambda: list(_bounds(parts, neighbours)))

    def epsilon_at(delta: float) -> float:
        # Composing takes minutes at the small multipliers of a search for the least noise.
        if delta >= chance:
            return 0.0
        return min((math.inf, *(bound.epsilon(delta) for bound in bounds())))

    def delta_at(epsilon: float) -> float:
        return min((chance, *(bound.delta(epsilon) for bound in bounds())))

    return Profile(epsilon_at, delta_at)


def _chance(parts: Parts) -> float:
    """The probability that the example is in any sample, which bounds delta at every epsilon.

    The coins of Poisson sampling do not depend on outputs, so they can be tossed before the first
    step. If none selects the example, both runs have the same outputs.
    """
    if parts.precision or parts.foreign:
        return 1.0
    never = math.prod((1 - rate) ** count for (rate, _), count in parts.sampled.items())
    return min(1.0, 1 - never + error(parts))


def _bounds(parts: Parts, neighbours: str) -> Iterator[Profile]:
    """Upper bounds of the same profile, so that the least of all is proven too."""
    if steps := random_projections.steps_of(parts):
        yield random_projections.profile(steps, parts, neighbours)
        return
    if not parts.sampled and not parts.foreign:
        yield _unsampled(parts, neighbours)
        return
    # Where rounding makes a distribution coarse, these bound the answer.
    yield from _by_rdp(parts, neighbours)
    extra = math.fsum(count / z**2 for (_, z), count in parts.sampled.items())
    plain = parts._replace(sampled={}, precision=parts.precision + extra)
    yield from _by_rdp(plain, neighbours) if parts.foreign else [_unsampled(plain, neighbours)]
    if (known := allocation.known_bins(parts)) != parts:
        yield from _bounds(known, neighbours)
        yield from _by_epochs(parts, neighbours)
    elif _size(parts, neighbours) <= _FAR:
        grid = _grid(parts, neighbours)
        if parts.foreign:
            yield proven(_accountant(parts, grid, neighbours), parts)
        else:
            yield proven(composed(parts, grid, neighbours), parts)


def _by_epochs(parts: Parts, neighbours: str) -> Iterator[Profile]:
    """By losses of whole epochs of random allocation, where all else is a Gaussian."""
    epochs = [(e, n) for e, n in parts.foreign if isinstance(e, RandomAllocationDpEvent)]
    like = as_sampled(parts)
    rest = allocation.known_bins(parts._replace(foreign=like.foreign))
    # An example that is replaced stays in its bin: `known_bins` bounds it.
    if not epochs or rest.foreign or neighbours == "replace-one":
        return
    if _size(like, neighbours) <= _FAR:
        grid = _grid(like._replace(foreign=()), neighbours)
        yield random_allocation.profile(epochs, rest, grid, neighbours)


def _unsampled(parts: Parts, neighbours: str) -> Profile:
    """The exact profile of unsampled Gaussians alone: that of one, which replace-one doubles."""
    return profiles.gaussian(math.sqrt(parts.precision) * (2 if neighbours == "replace-one" else 1))


def _by_rdp(parts: Parts, neighbours: str) -> list[Profile]:
    try:
        return [rdp_accountant.improved(parts, neighbours)]
    except ValueError:
        return []


def _accountant(parts: Parts, grid: float, neighbours: str) -> PLDAccountant:
    """`composed` by dp_accounting's accountant, which knows more events."""
    accountant = PLDAccountant(relation(neighbours), grid)
    if parts.precision:
        accountant.compose(dp_accounting.GaussianDpEvent(parts.unsampled_multiplier))
    for (q, z), count in parts.sampled.items():
        step = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z))
        accountant.compose(step, count)
    for event, count in parts.foreign:
        # The library composes a randomised response once, whatever its count.
        once = isinstance(event, RandomizedResponseDpEvent)
        try:
            for runs in [1] * count if once else [count]:
                accountant.compose(event, runs)
        except dp_accounting.UnsupportedEventError as error:
            raise ValueError(
                f"accounting: method 'pld' with neighbours={neighbours!r} has no proof for "
                f"{event}. Try 'rdp'; dp_accounting says: {error}"
            ) from error
    return accountant


def _grid(parts: Parts, neighbours: str) -> float:
    """The grid of losses: fine beside one step's losses, and with all losses in memory."""
    multipliers = [z for _, z in parts.sampled] + [parts.unsampled_multiplier]
    smallest = min(multipliers) / (2 if neighbours == "replace-one" else 1)
    mixed = [
        _spread(event, count)
        for event, count in parts.foreign
        if isinstance(event, MixtureOfGaussiansDpEvent) and event.standard_deviation > 0
    ]
    usual = MIXED if parts.foreign else GRID
    # The grid must span the losses of one step and of all steps: with a fixed grid, a huge epsilon
    # would need more points than memory has.
    span = 2 * max(_size(parts, neighbours), smallest**-2 / 2 + 10 / smallest, *mixed)
    if span > usual * _POINTS:
        return usual * 2.0 ** math.ceil(math.log2(span / usual / _POINTS))
    if parts.foreign:
        return usual
    # Rounding adds up to the square of the grid to the variance of each step, which would be most
    # of the variance of a million steps with losses of 1e-4.
    squares = [n * q**2 * math.expm1(min(z**-2, 700)) for (q, z), n in parts.sampled.items()]
    deviation = math.sqrt(math.fsum(squares) / sum(parts.sampled.values()))
    wanted = max(deviation / _FINE, span / _FEWER, usual / 1024)
    # In quarter powers of two, so that the steps of a slightly longer run are in the cache.
    finest = math.floor(4 * math.log2(wanted / usual)) / 4
    return usual * 2.0 ** (finest if len(parts.sampled) > _MANY else min(0, math.floor(finest)))


def _spread(event: MixtureOfGaussiansDpEvent, count: int) -> float:
    """A rough upper bound on the losses of mixtures, in one step and in all steps."""
    odds = np.array(event.sampling_probs)
    signals = np.array(event.sensitivities) / event.standard_deviation
    largest = signals[odds > 1e-25].max()  # others fall to the library's truncation
    # A Chernoff bound over a few orders. By Jensen the moment of a mixture is at most the mixture
    # of the moments; moments of steps add.
    orders = 1 + np.geomspace(1e-3, 10, 50)
    exponents = np.outer(orders * (orders - 1) / 2, signals**2)
    with np.errstate(all="ignore"):  # the sum of exponentials overflows on its way to a logarithm
        moments = count * np.asarray(logsumexp(exponents, b=odds, axis=1)) - math.log(1e-9)
    return float(max(np.min(moments / (orders - 1)), largest**2 / 2 + 10 * largest))


def _size(parts: Parts, neighbours: str) -> float:
    """The approximate size of the composed loss; a factor of two is accurate enough."""
    swap = 2 if neighbours == "replace-one" else 1
    squares = [
        count * min(q**2 * math.expm1(min((swap / z) ** 2, 700)), (swap / z) ** 2)
        for (q, z), count in parts.sampled.items()
    ]
    total = math.fsum([parts.precision * swap**2, *squares])
    return total / 2 + 6 * math.sqrt(total)

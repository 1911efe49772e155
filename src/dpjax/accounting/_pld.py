# SPDX-License-Identifier: Apache-2.0
"""Privacy loss distributions: the tightest proven epsilon here, and the slowest.

dp_accounting computes the loss of a step and composes losses; for "replace-one" it doubles the
sensitivity. This file chooses the grid of losses, and returns the least of several upper bounds,
RDP among them.
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
    _allocation,
    _random_projections,
    _rdp_accountant,
    profiles,
    random_allocation,
)
from dpjax.accounting._event_parts import Parts, as_sampled, relation
from dpjax.accounting._loss_distributions import MIXED, composed, error, proven
from dpjax.accounting.events import RandomAllocationDpEvent
from dpjax.accounting.profiles import Profile

GRID = 1e-4  # usual distance between the losses to which a distribution is rounded
_FINE = 8  # grids in the standard deviation of a step's loss; they cost 0.1 % of epsilon
_MANY = 8  # distinct steps; with more of them the grid is as coarse as `_FINE` allows
_POINTS = 4_000_000  # of one distribution, 32 MB; composition by FFT holds several copies
_FEWER = 500_000  # points of a grid that is finer than the usual one, which take seconds
_FAR = 5_000.0  # an epsilon above which digits do not matter, and RDP answers faster


def profile(parts: Parts, neighbours: str) -> Profile:
    """The smallest epsilon and delta that composed loss distributions prove.

    Koskela, Jälkö, Honkela, *Computing tight differential privacy guarantees using FFT*, 2020;
    Doroshenko et al., *Connect the dots: tighter discrete approximations of privacy loss
    distributions*, 2022.
    """
    # The probability that the example is ever drawn bounds delta, also at epsilon 0.
    chance = _chance(parts)
    # Loss distributions may take a minute, so they are computed at the first question that needs
    # them.
    bounds = functools.cache(lambda: list(_bounds(parts, neighbours)))

    def epsilon_at(delta: float) -> float:
        if delta >= chance:
            return 0.0
        epsilons = [bound.epsilon(delta) for bound in bounds()]
        return min(epsilons, default=math.inf)

    def delta_at(epsilon: float) -> float:
        deltas = [bound.delta(epsilon) for bound in bounds()]
        return min([chance, *deltas])

    return Profile(epsilon_at, delta_at)


def _chance(parts: Parts) -> float:
    """The probability that the example is in any sample, which bounds delta at every epsilon.

    The coins of Poisson sampling do not depend on outputs, so they can be tossed before the first
    step. If none selects the example, both runs have the same outputs.
    """
    if parts.precision or parts.foreign:
        return 1.0
    never = 1.0
    for (rate, _), count in parts.sampled.items():
        never *= (1 - rate) ** count
    return min(1.0, 1 - never + error(parts))


def _bounds(parts: Parts, neighbours: str) -> Iterator[Profile]:
    """Upper bounds of one profile; their least is therefore an upper bound too."""
    projected = _random_projections.steps_of(parts)
    if projected:
        # No other bound holds where norms are estimated.
        yield _random_projections.profile(projected, parts, neighbours)
        return
    if not parts.sampled and not parts.foreign:
        yield _unsampled(parts, neighbours)
        return
    # RDP, and the same steps without sampling, limit the answer where a coarse grid makes it large.
    yield from _by_rdp(parts, neighbours)
    sampled_precision = math.fsum(count / z**2 for (_, z), count in parts.sampled.items())
    without_sampling = parts._replace(sampled={}, precision=parts.precision + sampled_precision)
    if parts.foreign:
        yield from _by_rdp(without_sampling, neighbours)
    else:
        yield _unsampled(without_sampling, neighbours)
    # Loss distributions do not take events of random bins as they are: a known bin costs no less,
    # and whole epochs have losses of their own.
    known = _allocation.known_bins(parts)
    if known != parts:
        yield from _bounds(known, neighbours)
        yield from _by_epochs(parts, neighbours)
        return
    if _size(parts, neighbours) > _FAR:
        return  # RDP is near enough
    grid = _grid(parts, neighbours)
    if parts.foreign:
        yield proven(_accountant(parts, grid, neighbours), parts)
    else:
        yield proven(composed(parts, grid, neighbours), parts)


def _by_epochs(parts: Parts, neighbours: str) -> Iterator[Profile]:
    """A bound by losses of whole epochs of random allocation, if all other parts are Gaussians."""
    epochs = [
        (event, count)
        for event, count in parts.foreign
        if isinstance(event, RandomAllocationDpEvent)
    ]
    alike = as_sampled(parts)  # for the size of losses
    rest = _allocation.known_bins(parts._replace(foreign=alike.foreign))
    # An example that is replaced stays in its bin: `known_bins` bounds it.
    if not epochs or rest.foreign or neighbours == "replace-one":
        return
    if _size(alike, neighbours) <= _FAR:
        grid = _grid(alike._replace(foreign=()), neighbours)
        yield random_allocation.profile(epochs, rest, grid, neighbours)


def _unsampled(parts: Parts, neighbours: str) -> Profile:
    """The exact profile of unsampled Gaussians, which act as one."""
    sensitivity = 2 if neighbours == "replace-one" else 1
    return profiles.gaussian(math.sqrt(parts.precision) * sensitivity)


def _by_rdp(parts: Parts, neighbours: str) -> list[Profile]:
    """The bound by RDP, if RDP has a proof for these parts."""
    try:
        return [_rdp_accountant.improved(parts, neighbours)]
    except ValueError:
        return []


def _accountant(parts: Parts, grid: float, neighbours: str) -> PLDAccountant:
    """As `composed`, by dp_accounting's accountant, which knows more kinds of event."""
    accountant = PLDAccountant(relation(neighbours), grid)
    if parts.precision:
        accountant.compose(dp_accounting.GaussianDpEvent(parts.unsampled_multiplier))
    for (q, z), count in parts.sampled.items():
        step = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z))
        accountant.compose(step, count)
    for event, count in parts.foreign:
        try:
            # The library ignores the count of a randomised response and composes it once.
            if isinstance(event, RandomizedResponseDpEvent):
                for _ in range(count):
                    accountant.compose(event, 1)
            else:
                accountant.compose(event, count)
        except dp_accounting.UnsupportedEventError as error:
            raise ValueError(
                f"accounting: method 'pld' with neighbours={neighbours!r} has no proof for "
                f"{event}. Try 'rdp'; dp_accounting says: {error}"
            ) from error
    return accountant


def _grid(parts: Parts, neighbours: str) -> float:
    """The distance between losses: an eighth of the deviation of a step, if memory allows it."""
    usual = MIXED if parts.foreign else GRID
    span = _span(parts, neighbours)
    # A huge epsilon on the usual grid needs more points than memory has.
    if span > usual * _POINTS:
        doublings = math.ceil(math.log2(span / usual / _POINTS))
        return usual * 2.0**doublings
    if parts.foreign:
        return usual
    # Rounding adds up to the square of the grid to the variance of each step. On the usual grid
    # this is most of the variance of a million steps with losses of 1e-4.
    variances = [n * q**2 * math.expm1(min(z**-2, 700)) for (q, z), n in parts.sampled.items()]
    steps = sum(parts.sampled.values())
    deviation = math.sqrt(math.fsum(variances) / steps)
    wanted = max(deviation / _FINE, span / _FEWER, usual / 1024)
    # The grid is rounded to a power of two. So a slightly longer run has the same grid, and its
    # steps are in the cache. Few distinct steps have a grid no coarser than the usual one.
    power = math.floor(4 * math.log2(wanted / usual)) / 4
    if len(parts.sampled) <= _MANY:
        power = min(0, math.floor(power))
    return usual * 2.0**power


def _span(parts: Parts, neighbours: str) -> float:
    """The range of losses that a grid must cover, of one step and of all steps.

    The loss of one Gaussian has mean ``1 / 2z^2`` and deviation ``1 / z``; ten of these count.
    """
    multipliers = [z for _, z in parts.sampled]
    multipliers.append(parts.unsampled_multiplier)
    sensitivity = 2 if neighbours == "replace-one" else 1
    smallest = min(multipliers) / sensitivity
    spans = [_size(parts, neighbours), smallest**-2 / 2 + 10 / smallest]
    for event, count in parts.foreign:
        if isinstance(event, MixtureOfGaussiansDpEvent) and event.standard_deviation > 0:
            spans.append(_span_of_mixtures(event, count))
    return 2 * max(spans)


def _span_of_mixtures(event: MixtureOfGaussiansDpEvent, count: int) -> float:
    """A rough upper bound on the loss of one such step, and of all ``count``.

    All steps together have a larger loss than the Chernoff bound, the least over orders a of
    ``(log E exp((a - 1) loss) - log 1e-9) / (a - 1)``, with a chance of 1e-9.
    """
    odds = np.array(event.sampling_probs)
    signals = np.array(event.sensitivities) / event.standard_deviation
    orders = 1 + np.geomspace(1e-3, 10, 50)
    # By Jensen's inequality the moment of a mixture is at most the mixture of the moments of its
    # Gaussians. The logarithms of moments of steps add.
    log_moments = np.outer(orders * (orders - 1) / 2, signals**2)
    with np.errstate(all="ignore"):  # the sum of exponentials overflows before its logarithm
        log_moment = np.asarray(logsumexp(log_moments, b=odds, axis=1))
    all_steps = np.min((count * log_moment - math.log(1e-9)) / (orders - 1))
    largest = signals[odds > 1e-25].max()  # the library truncates others
    one_step = largest**2 / 2 + 10 * largest
    return float(max(all_steps, one_step))


def _size(parts: Parts, neighbours: str) -> float:
    """The approximate size of the composed loss, within a factor of two."""
    sensitivity = 2 if neighbours == "replace-one" else 1
    squares = [parts.precision * sensitivity**2]
    for (q, z), count in parts.sampled.items():
        unsampled = (sensitivity / z) ** 2
        sampled = q**2 * math.expm1(min(unsampled, 700))
        squares.append(count * min(sampled, unsampled))
    total = math.fsum(squares)
    return total / 2 + 6 * math.sqrt(total)

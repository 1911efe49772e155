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
    """The smallest epsilon and delta that any of `_bounds` proves.

    References for the composition of losses on a grid:
    Koskela, Jälkö, Honkela, *Computing tight differential privacy guarantees using FFT*, 2020;
    Doroshenko et al., *Connect the dots: tighter discrete approximations of privacy loss
    distributions*, 2022.
    """
    # The probability that the example is ever drawn bounds delta, also at epsilon 0.
    chance = _chance(parts)
    # Loss distributions may take a minute, so they are computed at the first call that needs them.
    bounds = functools.cache(lambda: list(_bounds(parts, neighbours)))

    def epsilon_at(delta: float) -> float:
        if delta >= chance:
            return 0.0
        epsilons = [bound.epsilon(delta) for bound in bounds()]
        return min(epsilons, default=math.inf)  # no bound: no proof of a finite epsilon

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
    """Upper bounds on the profile of these parts; the least of them is an upper bound too."""
    steps_with_estimated_norms = _random_projections.steps_of(parts)
    if steps_with_estimated_norms:
        # No other bound holds where norms are estimated.
        yield _random_projections.profile(steps_with_estimated_norms, parts, neighbours)
        return
    if not parts.sampled and not parts.foreign:
        yield _unsampled(parts, neighbours)
        return
    # Two bounds need no grid: RDP, and the same steps without sampling, which cost no less. They
    # limit the answer where the grid of losses is too coarse.
    yield from _by_rdp(parts, neighbours)
    sampled_precision = math.fsum(count / z**2 for (_, z), count in parts.sampled.items())
    without_sampling = parts._replace(sampled={}, precision=parts.precision + sampled_precision)
    if parts.foreign:
        yield from _by_rdp(without_sampling, neighbours)
    else:
        yield _unsampled(without_sampling, neighbours)  # exact for Gaussians
    # Random allocation (an example is in one random bin of steps) has no loss distribution for each
    # step. It has two other bounds: as if the bin were known, which costs no less, and by whole
    # epochs.
    with_known_bins = _allocation.known_bins(parts)
    if with_known_bins != parts:
        yield from _bounds(with_known_bins, neighbours)
        yield from _by_epochs(parts, neighbours)
        return
    if _rough_loss(parts, neighbours) > _FAR:
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
    if _rough_loss(alike, neighbours) <= _FAR:
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
    """The composed loss of all parts, by dp_accounting's accountant, which knows foreign events.

    For parts without foreign events `composed` is the same, and caches the loss of each step.
    """
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
    # The losses of a foreign event may be found one by one, so its grid is coarser.
    usual = MIXED if parts.foreign else GRID
    span = _span(parts, neighbours)
    # The range of a huge epsilon has too many points of the usual grid for memory.
    if span > usual * _POINTS:
        doublings = math.ceil(math.log2(span / usual / _POINTS))
        return usual * 2.0**doublings
    if parts.foreign:
        return usual  # the deviation of a foreign step is not known
    # Rounding adds up to the square of the grid to the variance of each step. On the usual grid
    # this is most of the variance of a million steps with losses of 1e-4. The loss of a step has a
    # variance of about q^2 (exp(1 / z^2) - 1); `expm1` overflows above 709.
    variances = [n * q**2 * math.expm1(min(z**-2, 700)) for (q, z), n in parts.sampled.items()]
    steps = sum(parts.sampled.values())
    deviation = math.sqrt(math.fsum(variances) / steps)
    # The second term limits the points of a fine grid. The last one is a floor for steps that cost
    # nearly nothing.
    wanted = max(deviation / _FINE, span / _FEWER, usual / 1024)
    # The grid is rounded down to the usual one times a power of 2^(1/4). So a slightly longer run
    # has the same grid, and its steps are in the cache.
    exponent = math.floor(4 * math.log2(wanted / usual)) / 4
    # Few distinct steps are fast, so their grid is never coarser than the usual one. It is finer by
    # a whole power of two.
    if len(parts.sampled) <= _MANY:
        exponent = min(0, math.floor(exponent))
    return usual * 2.0**exponent


def _span(parts: Parts, neighbours: str) -> float:
    """The range of losses that a grid must cover, of one step and of all steps.

    The loss of one Gaussian has mean ``1 / 2z^2`` and deviation ``1 / z``; ten of these count.
    """
    multipliers = [z for _, z in parts.sampled]
    multipliers.append(parts.unsampled_multiplier)
    sensitivity = 2 if neighbours == "replace-one" else 1
    smallest = min(multipliers) / sensitivity
    spans = [_rough_loss(parts, neighbours), smallest**-2 / 2 + 10 / smallest]
    for event, count in parts.foreign:
        if isinstance(event, MixtureOfGaussiansDpEvent) and event.standard_deviation > 0:
            spans.append(_span_of_mixtures(event, count))
    return 2 * max(spans)


def _span_of_mixtures(event: MixtureOfGaussiansDpEvent, count: int) -> float:
    """A rough upper bound on the loss of one step of this mixture, and of all ``count`` together.

    The bound for all steps is Chernoff's, which the loss exceeds with probability 1e-9 at most: the
    least over orders a of ``(count log E exp((a - 1) loss of a step) - log 1e-9) / (a - 1)``.
    """
    odds = np.array(event.sampling_probs)  # of each Gaussian of the mixture
    signals = np.array(event.sensitivities) / event.standard_deviation  # mean over deviation
    orders = 1 + np.geomspace(1e-3, 10, 50)
    # By Jensen's inequality the moment of a mixture is at most the mixture of the moments of its
    # Gaussians, whose logarithms are a (a - 1) signal^2 / 2: [orders, signals].
    log_moments = np.outer(orders * (orders - 1) / 2, signals**2)
    with np.errstate(all="ignore"):  # tiny noise has infinite moments
        log_moment = np.asarray(logsumexp(log_moments, b=odds, axis=1))  # of a step, [orders]
    all_steps = np.min((count * log_moment - math.log(1e-9)) / (orders - 1))
    largest = signals[odds > 1e-25].max()  # the library truncates others
    one_step = largest**2 / 2 + 10 * largest  # the mean of its loss and ten deviations
    return float(max(all_steps, one_step))


def _rough_loss(parts: Parts, neighbours: str) -> float:
    """The largest likely loss of all steps, within a factor of two: ``mu^2 / 2 + 6 mu``.

    By the central limit it is a Gaussian with mean ``mu^2 / 2`` and deviation ``mu``.
    """
    sensitivity = 2 if neighbours == "replace-one" else 1
    squares = [parts.precision * sensitivity**2]
    for (q, z), count in parts.sampled.items():
        unsampled = (sensitivity / z) ** 2
        sampled = q**2 * math.expm1(min(unsampled, 700))
        squares.append(count * min(sampled, unsampled))
    squared_mu = math.fsum(squares)
    return squared_mu / 2 + 6 * math.sqrt(squared_mu)

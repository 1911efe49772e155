# SPDX-License-Identifier: Apache-2.0
"""Privacy loss distributions: the tightest proven epsilon here, and the slowest.

The loss of one step is a random variable. Losses of steps add, so their distributions convolve;
dp_accounting does that on a grid with pessimistic rounding. This file prepares the event so that
the convolution is fast (equal steps together, unsampled Gaussians as one), keeps the grid small
enough for memory, and returns the minimum with RDP: both are upper bounds. What floating point can
take from the answer of a distribution is added to it (`error`).

Many distinct steps are rounded to few: multipliers *down* and rates *up*, which is again an upper
bound.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting import DpEvent
from dp_accounting.dp_event import (
    MixtureOfGaussiansDpEvent,
    RandomizedResponseDpEvent,
    RepeatAndSelectDpEvent,
)
from dp_accounting.pld import PLDAccountant, privacy_loss_distribution
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from scipy.special import logsumexp

from dpjax.accounting import allocation, gdp, rdp_accountant
from dpjax.accounting.event_parts import Parts, relation

GRID = 1e-4  # distance between the losses that the distribution is rounded to, at most
_FINE = 8  # as many grids make a step's standard deviation, which costs 0.1 % of epsilon
MIXED = 1e-3  # with events whose losses are found one by one: a tenth of the time, 0.1 %
LEVELS = 64  # distinct steps that are composed as they are; more are rounded to these
# Points of one distribution, 32 MB: composition by FFT holds several copies.
_POINTS = 4_000_000
_FEWER = 500_000  # of a finer grid than the usual one, which takes seconds too
_FAR = 5_000.0  # above this epsilon digits do not matter, and RDP answers faster
_UNIT = 2.0**-52  # the distance of floats above 1


def pld_epsilon(parts: Parts, delta: float, neighbours: str) -> float:
    """Smallest epsilon that the composed loss distribution proves at this delta.

    For "replace-one" the library itself doubles the sensitivity.

    Returns:
      An upper bound.

      | situation | what happens |
      |---|---|
      | unsampled Gaussians alone | the closed form, which a distribution only approaches |
      | more than 64 distinct steps | rounded to 64: multipliers down, rates up |
      | steps with losses of about 8e-4 or less | a finer grid than 1e-4 |
      | losses that span more than 4 million grids | a coarser grid, still pessimistic |
      | mixtures of Gaussians, Laplace noise, other events | a grid of 1e-3, or coarser |
      | random allocation | RDP's answer, or that of a known bin |
      | RDP epsilon beyond about 5000 | RDP's answer, or that without sampling |
      | delta at most `error`, such as 1e-10 for 100,000 steps | likewise |

    Example:
      >>> from dpjax.accounting.events import gaussian
      >>> from dpjax.accounting.event_parts import split
      >>> round(pld_epsilon(split(gaussian(1.0)), 1e-5, "add-or-remove"), 3)
      4.377

    References:
      Koskela, Jälkö, Honkela, *Computing tight differential privacy guarantees using FFT*, 2020;
      Doroshenko et al., *Connect the dots: tighter discrete approximations of privacy loss
      distributions*, 2022.
    """
    if not parts.sampled and not parts.foreign:
        return float(gdp.clt_epsilon(parts, delta, neighbours))
    # These bound the same quantity, so the minimum of all is proven. Where rounding makes a
    # distribution coarse, it cannot return more.
    bounds = rdp_accountant.rdp_epsilon, gdp.clt_epsilon
    proven = _without_losses(*bounds, parts, delta, neighbours)
    if (plain := allocation.known_bins(parts)) != parts:
        return min(proven, pld_epsilon(plain, delta, neighbours))
    if _hint(parts, neighbours) > _FAR:
        return proven
    if parts.foreign:
        return min(proven, epsilon_at(_accountant(parts, neighbours).get_epsilon, parts, delta))
    return min(proven, epsilon_at(_loss(parts, neighbours).get_epsilon_for_delta, parts, delta))


def pld_delta(parts: Parts, epsilon: float, neighbours: str) -> float:
    """Smallest delta that the composed loss distribution proves at this epsilon."""
    if not parts.sampled and not parts.foreign:
        return float(gdp.clt_delta(parts, epsilon, neighbours))
    bounds = rdp_accountant.rdp_delta, gdp.clt_delta
    proven = min(1.0, _without_losses(*bounds, parts, epsilon, neighbours))
    if (plain := allocation.known_bins(parts)) != parts:
        return min(proven, pld_delta(plain, epsilon, neighbours))
    if _hint(parts, neighbours) > _FAR:
        return proven
    if parts.foreign:
        return min(proven, delta_at(_accountant(parts, neighbours).get_delta, parts, epsilon))
    return min(proven, delta_at(_loss(parts, neighbours).get_delta_for_epsilon, parts, epsilon))


def epsilon_at(answer: Callable[[float], float], parts: Parts, delta: float) -> float:
    """The epsilon that a distribution proves; `answer` is its own, for exact arithmetic."""
    spare = delta - error(parts)
    return float(answer(spare)) if spare > 0 else math.inf


def delta_at(answer: Callable[[float], Any], parts: Parts, epsilon: float) -> float:
    """The delta that a distribution proves; `answer` is its own, for exact arithmetic."""
    return float(answer(epsilon)) + error(parts)


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


def _loss(parts: Parts, neighbours: str) -> PrivacyLossDistribution:
    """The loss of all parts together, none of them foreign."""
    grid = _grid(parts, neighbours)
    composed = privacy_loss_distribution.identity(value_discretization_interval=grid)
    # All unsampled Gaussians are one Gaussian, whose privacy loss has a closed form.
    if parts.precision:
        composed = composed.compose(_one_step(1.0, parts.unsampled_multiplier, grid, neighbours))
    for (q, z), count in rounded(parts.sampled).items():
        # Multipliers were rounded down and rates up, so the sum of these steps costs no less than
        # the real ones.
        composed = composed.compose(_one_step(q, z, grid, neighbours).self_compose(count))
    return composed


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


# Finding the loss of one step takes nearly all the time of an answer. Other questions about a run
# (another delta, more steps, the epsilon of a row) are about the same steps.
_one_step = functools.lru_cache(maxsize=16)(one_step)


def _accountant(parts: Parts, neighbours: str) -> PLDAccountant:
    """dp_accounting's accountant, with all parts composed: it knows more events than `_loss`."""
    accountant = PLDAccountant(relation(neighbours), _grid(parts, neighbours))
    if parts.precision:
        accountant.compose(dp_accounting.GaussianDpEvent(parts.unsampled_multiplier))
    for (q, z), count in rounded(parts.sampled).items():
        step = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z))
        accountant.compose(step, count)
    for event, count in parts.foreign.values():
        # The library composes a randomised response once, whatever its count.
        once = isinstance(event, RandomizedResponseDpEvent)
        try:
            for runs in [1] * count if once else [count]:
                accountant.compose(event, runs)
        except dp_accounting.UnsupportedEventError as error:
            raise ValueError(
                f"accounting: method 'pld' with neighbours={neighbours!r} has no proof for "
                f"{event}. {_advice(event)}; the accounting library says: {error}"
            ) from error
    return accountant


def _advice(event: DpEvent) -> str:
    """The method that has a proof for an event without a known loss distribution."""
    match event:
        case dp_accounting.SampledWithoutReplacementDpEvent():
            return "Sampling without replacement needs method='rdp' and neighbours='replace-one'"
        case RepeatAndSelectDpEvent():
            return "The best of several runs needs method='rdp', as in accounting.select_best"
    return "Often method='rdp' has one, or other neighbours have"


def _grid(parts: Parts, neighbours: str) -> float:
    """The grid of losses: fine beside one step's losses, and with all losses in memory."""
    multipliers = [z for _, z in parts.sampled] + [parts.unsampled_multiplier]
    smallest = min(multipliers) / (2 if neighbours == "replace-one" else 1)
    mixed = [
        _spread(event, count)
        for event, count in parts.foreign.values()
        if isinstance(event, MixtureOfGaussiansDpEvent) and event.standard_deviation > 0
    ]
    usual = MIXED if parts.foreign else GRID
    # The grid must span the losses of one step and of all steps: with a fixed grid, a huge epsilon
    # would need more points than memory has.
    span = 2 * max(_hint(parts, neighbours), smallest**-2 / 2 + 10 / smallest, *mixed)
    if span > usual * _POINTS:
        return usual * 2.0 ** math.ceil(math.log2(span / usual / _POINTS))
    if parts.foreign:
        return usual
    # Rounding adds up to the square of the grid to the variance of each step, which would be most
    # of the variance of a million steps with losses of 1e-4.
    squares = [n * q**2 * math.expm1(min(z**-2, 700)) for (q, z), n in parts.sampled.items()]
    deviation = math.sqrt(math.fsum(squares) / sum(parts.sampled.values()))
    wanted = max(deviation / _FINE, span / _FEWER, usual / 1024)
    return usual * 2.0 ** min(0, math.floor(math.log2(wanted / usual)))


def _spread(event: MixtureOfGaussiansDpEvent, count: int) -> float:
    """A rough upper bound on the losses of mixtures, in one step and in all steps.

    By Jensen the moment of a mixture is at most the mixture of the moments.
    """
    odds = np.array(event.sampling_probs)
    signals = np.array(event.sensitivities) / event.standard_deviation
    largest = signals[odds > 1e-25].max()  # others fall to the library's truncation
    # A Chernoff bound over a few orders: the moment of the composed loss is at most the sum of
    # moments.
    orders = 1 + np.geomspace(1e-3, 10, 50)
    exponents = np.outer(orders * (orders - 1) / 2, signals**2)
    with np.errstate(all="ignore"):  # the sum of exponentials overflows on its way to a logarithm
        moments = count * np.asarray(logsumexp(exponents, b=odds, axis=1)) - math.log(1e-9)
    return float(max(np.min(moments / (orders - 1)), largest**2 / 2 + 10 * largest))


def _hint(parts: Parts, neighbours: str) -> float:
    """The approximate size of the composed loss; a factor of two is accurate enough."""
    scale = 2 if neighbours == "replace-one" else 1
    # Half the multiplier is twice the signal of replace-one, for which RDP itself has no proof with
    # sampling. Only the size of the loss is needed here.
    halved = parts._replace(
        sampled={(q, z / scale): count for (q, z), count in parts.sampled.items()},
        precision=parts.precision * scale**2,
        foreign={
            name: found
            for name, found in parts.foreign.items()
            if not isinstance(found[0], MixtureOfGaussiansDpEvent)  # `_spread` knows these
        },
    )
    size = _or_infinity(rdp_accountant.rdp_epsilon, halved, 1e-9, "add-or-remove")
    plain = halved._replace(foreign={})
    return size if size < math.inf else rdp_accountant.rdp_epsilon(plain, 1e-9, "add-or-remove")


def _unamplified(parts: Parts) -> Parts:
    """The same steps on the whole data set, which costs no less under any neighbours."""
    extra = math.fsum(count / z**2 for (_, z), count in parts.sampled.items())
    return parts._replace(sampled={}, precision=parts.precision + extra)


def _without_losses(
    rdp: Callable[[Parts, float, str], float],
    closed_form: Callable[[Parts, float, str], float],
    parts: Parts,
    given: float,
    neighbours: str,
) -> float:
    """The least of RDP's bound and of the bound for the same steps without sampling."""
    # Unsampled Gaussians have a closed form; beside other events RDP counts them.
    plain = rdp if parts.foreign else closed_form
    return min(
        _or_infinity(rdp, parts, given, neighbours),
        _or_infinity(plain, _unamplified(parts), given, neighbours),
    )


def _or_infinity(
    bound: Callable[[Parts, float, str], float], parts: Parts, given: float, neighbours: str
) -> float:
    """RDP's bound, where RDP has one."""
    try:
        return bound(parts, given, neighbours)
    except ValueError:
        return math.inf

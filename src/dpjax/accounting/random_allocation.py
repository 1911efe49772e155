# SPDX-License-Identifier: Apache-2.0
r"""Random allocation with fresh bins: in every epoch an example is in one of t steps, at random.

**One epoch.** Let $z_1, \dots, z_r$ be the multipliers of the $r \le t$ steps that ran. The epoch
costs no more than P against Q, in both orders:

$$ P = \tfrac1t \Big( \sum_{j \le r} N(e_j / z_j, I) + (t - r) N(0, I) \Big), \quad Q = N(0, I) . $$

Given all earlier outputs, a step with the example and without it has two output laws that are a
post-processing of $N(1 / z_j, 1)$ and $N(0, 1)$: step by step, the epoch is one of P and Q. Bins of
other examples are independent of this example's. Multipliers that differ were fixed beforehand.
The bins of the next epoch are fresh, so epochs compose.

**The ratio.** Under Q, $S = P / Q = \frac1t (\sum_j L_j + t - r)$ with independent
$L_j = \exp(g_j / z_j - 1 / 2 z_j^2)$, $g_j \sim N(0, 1)$. Under P, the density of $S$ is $S$ times
that under Q: one factor, of a uniform bin, has the law $x\, \Pr(L_j \in dx)$.

**Rounding** moves the mass of a factor between two points of a lattice to both of them, and keeps
its mean. A ratio $S'$ with $\mathbb{E}[S' | S] = S$ then takes the place of $S$, and (P, Q) is a
post-processing of (P', Q') (Blackwell), in both orders and in every composition. No first-order
error remains, unlike with factors that are rounded up or down. Above the last point a factor keeps
its mass under Q; the rest of its mass under P is an infinite loss. The laws of a sum of lattice
factors are products of powers of Fourier transforms, and its masses on losses again keep their
means. The mass that the transform can wrap round (a Chernoff bound), and its rounding errors, are
infinite losses too.

**Little noise** needs two lattices: at $z = 0.35$ the largest factors are $e^{20}$ times the usual
ones. The loss $\log S$ under P needs the largest factors and is large itself, so its lattice can be
coarse. The loss $-\log S$ under Q needs small ratios. Its lattice stays fine, and higher factors
are lowered to its last point, which only raises the loss.

References:
  Feldman and Shenfeld, "Privacy amplification by random allocation", 2025: the reduction to P, Q.
  Chua et al., "Balls-and-bins sampling for DP-SGD", 2024: the same pair, by Monte Carlo.
  Doroshenko et al., "Connect the dots", 2022: rounding of losses that keeps means.
"""

import functools
import math
from typing import NamedTuple, TypeAlias

import numpy as np
from dp_accounting.pld.pld_pmf import DensePLDPmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from scipy.special import ndtr, ndtri

from dpjax.accounting._event_parts import Parts
from dpjax.accounting._loss_distributions import composed, proven
from dpjax.accounting.events import RandomAllocationDpEvent
from dpjax.accounting.profiles import Profile

_FINE = 64  # points of the lattice in one deviation of a factor
_POINTS = 2**22  # of the lattice, which take a second
_UNIT = 2.0**-52  # the distance of floats above 1
_QUIET = 1e4  # a larger multiplier counts as this one, whose factors are 1 up to rounding
_SHARE = 1e-3  # the part of delta that all infinite losses together may have
_ROUGH = 1e-6  # the delta for which losses are computed before the delta of an epsilon is known
_BELOW = 2.0  # with steps above e^-2 times the factors at delta, known bins cost no more

Epochs: TypeAlias = list[tuple[RandomAllocationDpEvent, int]]
Groups: TypeAlias = list[tuple[float, int]]  # multipliers, and how many bins ran with them


def profile(epochs: Epochs, rest: Parts, grid: float, neighbours: str) -> Profile:
    """The profile of the composed losses of epochs and of the Gaussians of ``rest``.

    Masses that no lattice can hold become infinite losses, which add to delta. They are kept to
    `_SHARE` of it, so the losses depend on the delta in question.
    """
    # Sorted, because the order of composition must not change the last digit of a claim.
    epochs = sorted(epochs, key=lambda row: (row[0].batches, row[0].noise_multipliers))
    all_parts = rest._replace(foreign=tuple(epochs))  # for the rounding errors that `proven` adds
    epoch_count = sum(times for _, times in epochs)

    @functools.cache
    def with_tail(tail: float) -> Profile:
        """The profile if about this mass of each epoch becomes an infinite loss."""
        if not all(_fits(event, tail) for event, _ in epochs):
            return Profile(lambda delta: math.inf, lambda epsilon: 1.0)  # nothing is proved
        total = composed(rest, grid, neighbours)
        for event, times in epochs:
            total = total.compose(loss(event, grid, tail).self_compose(times))
        return proven(total, all_parts)

    def for_delta(delta: float) -> Profile:
        # The tail is a power of two, because similar deltas then have the same cached losses. It
        # must not be 0, which has no logarithm.
        tail = max(delta, 1e-300) * _SHARE / epoch_count
        return with_tail(2.0 ** math.floor(math.log2(tail)))

    def epsilon_at(delta: float) -> float:
        return for_delta(delta).epsilon(delta)

    def delta_at(epsilon: float) -> float:
        # The tail depends on the delta in question, which is not known yet. So a first bound has
        # the tail for `_ROUGH`, and a second one the tail for the first bound.
        rough = for_delta(_ROUGH).delta(epsilon)
        # The tail is a small share of a first bound above `_ROUGH`, which needs no second one. If
        # the first bound is 1, no lattice fitted, and one with a larger tail may fit.
        if _ROUGH < rough < 1:
            return rough
        return min(rough, for_delta(rough).delta(epsilon))

    return Profile(epsilon_at, delta_at)


class _Laws(NamedTuple):
    """The laws of the ratio S on a lattice; all arrays are ``[points]``."""

    ratios: np.ndarray  # the values of S
    p_masses: np.ndarray  # their masses under P, with the example
    q_masses: np.ndarray  # their masses under Q, without it
    lost: float  # the mass of P above the largest factor
    step: float  # between neighbouring sums of factors


@functools.lru_cache(maxsize=64)
def loss(event: RandomAllocationDpEvent, grid: float, tail: float) -> PrivacyLossDistribution:
    """The loss of one epoch; a few times ``tail`` of the mass becomes an infinite loss.

    It has two distributions: of ``log(P / Q)`` under P, if the example leaves the data, and of
    ``log(Q / P)`` under Q, if it joins them. Each follows from the `_Laws` of the ratio S.
    """
    bins = event.batches
    groups = [(min(z, _QUIET), n) for z, n in event.noise_multipliers]
    # A usual factor, with g about 0, moves by this if g moves by one.
    deviation = min(math.exp(-1 / (2 * z**2)) / z for z, _ in groups)
    fine_step = deviation / _FINE
    laws_if_it_leaves = _laws(groups, bins, tail=tail, above=tail, step=fine_step)
    laws_if_it_joins = laws_if_it_leaves
    # `_POINTS` fine steps do not reach the largest factors if noise is small, so `_laws` took a
    # coarser step, too coarse for the small ratios that the loss under Q needs. This loss gets a
    # second, fine lattice, which ends at lower factors.
    if laws_if_it_leaves.step > fine_step:
        fine_step = max(fine_step, _UNIT * bins / tail)  # otherwise `_error` is above the tail
        least, _ = groups[0]  # groups are sorted by multiplier
        largest_factor = fine_step * _POINTS / 2  # half of the points, as the sum goes beyond it
        above = _mass_above(least, largest_factor)
        laws_if_it_joins = _laws(groups, bins, tail=tail, above=above, step=fine_step)
    return PrivacyLossDistribution(
        _loss_if_it_leaves(laws_if_it_leaves, bins, grid, tail),
        _loss_if_it_joins(laws_if_it_joins, bins, grid, tail),
    )


def _loss_if_it_leaves(laws: _Laws, bins: int, grid: float, tail: float) -> DensePLDPmf:
    """The loss ``log(P / Q)`` under P."""
    positive = laws.ratios > 0
    losses = np.log(laws.ratios[positive])
    infinite = laws.lost + tail + _error(laws.p_masses, bins, laws.step)
    return _on_grid(laws.p_masses[positive], losses, grid, infinite)


def _loss_if_it_joins(laws: _Laws, bins: int, grid: float, tail: float) -> DensePLDPmf:
    """The loss ``log(Q / P)`` under Q; it is infinite where the ratio is 0."""
    positive = laws.ratios > 0
    losses = -np.log(laws.ratios[positive])
    zero = float(laws.q_masses[~positive].sum())
    infinite = zero + tail + _error(laws.q_masses, bins, laws.step)
    return _on_grid(laws.q_masses[positive], losses, grid, infinite)


def _laws(groups: Groups, bins: int, tail: float, above: float, step: float) -> _Laws:
    """The laws of the ratio S, from the laws of the sum of factors on a lattice.

    ``above`` is the mass under P of factors above the lattice, and ``tail`` that of sums outside
    the window. The step is larger than given if the lattice needs more than `_POINTS` points.
    """
    idle = bins - sum(n for _, n in groups)  # bins whose step did not run add 1 to the sum
    step, first, size = _lattice(groups, bins, tail, above, step)
    # Fourier transforms of laws of the sum of all factors so far. ``sum_q`` is under Q. ``sums_p``
    # adds up one law for each of their bins: as if the example were in that bin, whose factor then
    # has its law under P, and the other factors theirs under Q. The sum of no factors is 0, whose
    # transform is 1.
    sum_q = np.ones(1)
    sums_p = np.zeros(1)
    lost = 0.0
    for z, n in groups:
        indices = np.arange(math.ceil(_largest(z, above) / step) + 1)
        points = step * indices
        masses, beyond = _factor(z, points)
        # A factor can exceed the window. The transform repeats outside it.
        wrapped = indices % size
        factor_q = np.fft.rfft(np.bincount(wrapped, masses, size))
        # The density of a factor under P is that of L under Q, times L.
        factor_p = np.fft.rfft(np.bincount(wrapped, points * masses, size))
        # The product rule: the bin under P is one of those so far, or one of these n.
        others = factor_q ** (n - 1)  # of this group
        sums_p = sums_p * others * factor_q + sum_q * n * others * factor_p
        sum_q = sum_q * others * factor_q
        lost += n * beyond / bins
    sum_p = (sums_p + idle * sum_q) / bins
    # The transform holds lattice point k at index k modulo ``size``. The rolled arrays start at
    # point ``first``.
    p_masses = np.roll(np.fft.irfft(sum_p, size), -first)
    q_masses = np.roll(np.fft.irfft(sum_q, size), -first)
    sums = step * (first + np.arange(size))
    return _Laws(
        ratios=(sums + idle) / bins,
        p_masses=p_masses.clip(0),  # rounding makes masses near 0 negative
        q_masses=q_masses.clip(0),
        lost=lost,
        step=step,
    )


def _lattice(
    groups: Groups, bins: int, tail: float, above: float, step: float
) -> tuple[float, int, int]:
    """The lattice of the sum of factors: its step, the index of its first point, and its size.

    Point k is at ``k step``. The step is at least the given one.
    """
    least, _ = groups[0]  # groups are sorted by multiplier
    largest = _largest(least, above)
    step = max(step, largest * 2.0**-40)  # a smaller one is soon lost in rounding
    low, top = _window(groups, bins, tail, above, step)
    # Both the window of the sum and the points of a single factor must fit into `_POINTS`.
    coarser = max(top - low, largest) / _POINTS
    if coarser > step:
        step = coarser
        low, top = _window(groups, bins, tail, above, step)  # it depends on the step
    points = (top - low) / step + 4  # both ends are rounded outwards
    size = 2 ** math.ceil(math.log2(points))  # a power of two, for the transform
    return step, math.floor(low / step), size


def _fits(event: RandomAllocationDpEvent, tail: float) -> bool:
    """Whether a lattice up to the largest factor is fine enough for the factors at about delta."""
    least, _ = event.noise_multipliers[0]
    likely = min(0.5, tail / _SHARE)
    range_of_logs = float(ndtri(likely) - ndtri(tail)) / least
    finite = _largest_log(least, tail) < 300  # the square of e^355 overflows
    return finite and range_of_logs < math.log(_POINTS) - _BELOW


def _largest(z: float, tail: float) -> float:
    """The factor above which there is this mass under P."""
    return math.exp(_largest_log(z, tail))


def _largest_log(z: float, tail: float) -> float:
    """The logarithm of `_largest`."""
    return 1 / (2 * z**2) - float(ndtri(tail)) / z


def _mass_above(z: float, factor: float) -> float:
    """The mass under P of larger factors: the inverse of `_largest`."""
    return float(ndtr(1 / (2 * z) - z * math.log(factor)))


def _factor(z: float, points: np.ndarray) -> tuple[np.ndarray, float]:
    """A factor L, rounded to sorted points from 0: its masses under Q, and the lost mass of P.

    The mass q of an interval between two points, whose mass under P is ``p = E[L; interval]``, goes
    to both of them. The upper one gets ``(p - lower q) / (upper - lower)``, which keeps p. Above
    the last point no upper one exists, so the excess of p is lost.
    """
    with np.errstate(divide="ignore"):
        g = z * np.log(points) + 1 / (2 * z)  # L = exp(g / z - 1 / 2z^2) is a point at this g
    ends = np.append(g, np.inf)  # of the intervals; the last one is above the last point
    q = _between(ends)
    p = _between(ends - 1 / z)  # under P the mean of g is 1 / z
    excess = p - points * q  # p minus lower times q, of each interval
    up = excess[:-1] / np.diff(points)  # the mass that goes to the upper point
    up = np.clip(up, 0, q[:-1])
    masses = q - np.append(up, 0) + np.append(0, up)
    return masses, max(0.0, float(excess[-1]))


def _between(ends: np.ndarray) -> np.ndarray:
    """The masses of a standard Gaussian between sorted numbers, with all digits in both tails."""
    below = np.diff(ndtr(ends))
    above = -np.diff(ndtr(-ends))
    return np.where(ends[:-1] > 0, above, below)


def _window(
    groups: Groups, bins: int, tail: float, above: float, step: float
) -> tuple[float, float]:
    r"""A range (a, b) of the sum X of factors: mass ``tail`` is below it under Q, above it under P.

    Both ends are Chernoff bounds, each with the best of 400 exponents $t > 0$:

    $$ \Pr_Q(X < a) \le e^{t a}\, \mathbb{E}_Q e^{-t X}, \quad
       \Pr_P(X > b) \le e^{-t b}\, \mathbb{E}_P e^{t X} . $$
    """
    largest = max(_largest(z, above) for z, _ in groups)
    variance = 0.0  # of X under Q
    # Moments of factors on a lattice of millions of points take too long. Rounding to 1,000 points
    # keeps the mean and so, by Jensen's inequality, only raises ``E exp(t L)``: the bounds hold.
    coarse_factors = []
    for z, n in groups:
        g = np.linspace(-12, 1 / z - float(ndtri(above)), 1000)  # up to the factor `_largest`
        points = np.exp(g / z - 1 / (2 * z**2))
        # The last point of the lattice itself is up to one step above `_largest`.
        points = np.concatenate([[0], points, [points[-1] + step]])
        masses, _ = _factor(z, points)
        coarse_factors.append((n, points, masses))
        variance += n * float(masses @ (points - 1) ** 2)  # the mean of a factor is 1
    deviation = math.sqrt(variance)
    # The best exponent is a few over the deviation if X is nearly Gaussian, and less if the largest
    # factors dominate it.
    t = np.geomspace(1e-2 / (deviation + largest), 1e4 / deviation, 400)
    log_q, _ = _log_moments(coarse_factors, bins, -t, step)
    _, log_p = _log_moments(coarse_factors, bins, t, step)
    # The bounds equal the tail at a and b. Bounds whose moments overflow are NaN or infinite, and
    # are not chosen.
    low = float(np.nanmax((log_q - math.log(tail)) / -t))
    top = float(np.nanmin((log_p - math.log(tail)) / t))
    return max(0.0, low), top


def _log_moments(
    factors: list[tuple[int, np.ndarray, np.ndarray]], bins: int, t: np.ndarray, step: float
) -> tuple[np.ndarray, np.ndarray]:
    """Upper bounds on ``log E exp(t X)`` of the sum X of factors under Q, and for t > 0 under P.

    Both are ``[t]``. ``factors`` has for each group of equal factors their number, their points and
    the masses of these under Q. Rounding a factor to a lattice of this ``step`` adds at most
    ``(t step)^2 / 8`` to the logarithm of its moment (Hoeffding), and ``t step`` if it is under P.
    """
    log_q = np.zeros(t.size)
    # One factor, of a uniform bin, is weighted by itself under P. So the moment under P is that
    # under Q times a mean over the bins, in which a bin whose step did not run counts as 1.
    idle = bins - sum(n for n, _, _ in factors)
    p_over_q = np.full(t.size, idle / bins)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for n, points, masses in factors:
            exponentials = np.exp(np.outer(t, points))  # [t, points]
            moment = exponentials @ masses
            weighted_moment = exponentials @ (points * masses)
            log_q += n * (np.log(moment) + (t * step) ** 2 / 8)
            p_over_q += n / bins * weighted_moment / moment
        log_p = log_q + (t * step + np.log(p_over_q))
    return log_q, log_p


def _on_grid(mass: np.ndarray, losses: np.ndarray, grid: float, infinite: float) -> DensePLDPmf:
    """Spreads the mass m of each loss to two points of a grid, and keeps it under both laws.

    Its mass under the other law is ``m exp(-loss)``. So the upper point gets
    ``m (1 - exp(lower - loss)) / (1 - exp(-grid))``.
    """
    below = np.floor(losses / grid)
    excess = mass * np.expm1(below * grid - losses)
    up = np.clip(excess / math.expm1(-grid), 0, mass)
    first = int(below.min())
    places = (below - first).astype(int)
    size = places.max() + 2
    probabilities = np.bincount(places, mass - up, size)
    probabilities += np.bincount(places + 1, up, size)
    return DensePLDPmf(grid, first, probabilities, infinite, True)


def _error(mass: np.ndarray, bins: int, step: float) -> float:
    """A bound on the mass that rounding of floating point moves.

    Rounded points move ``u / step`` of the mass of a factor. The transform moves each coefficient
    by about u, and its power moves it ``bins`` times as far. By Parseval's and Cauchy's
    inequalities the masses move by that times the root of their number times their root sum of
    squares.
    """
    by_points = 1 / step
    root_sum = float(np.linalg.norm(mass))
    by_transforms = 4 * math.sqrt(mass.size) * root_sum
    return _UNIT * bins * (by_points + by_transforms)

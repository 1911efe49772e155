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
_BELOW = 2.0  # with steps above e^-2 times the factors at delta, known bins cost no more

Epochs: TypeAlias = list[tuple[RandomAllocationDpEvent, int]]
Groups: TypeAlias = list[tuple[float, int]]  # multipliers, and how many bins ran with them


def profile(epochs: Epochs, rest: Parts, grid: float, neighbours: str) -> Profile:
    """The profile of the composed losses of epochs and of the Gaussians of ``rest``."""
    epochs = sorted(epochs, key=lambda row: (row[0].batches, row[0].noise_multipliers))
    parts = rest._replace(foreign=tuple(epochs))
    count = sum(n for _, n in epochs)

    @functools.cache
    def with_tail(tail: float) -> Profile:
        if not all(_fits(event, tail) for event, _ in epochs):
            return Profile(lambda delta: math.inf, lambda epsilon: 1.0)
        total = composed(rest, grid, neighbours)
        for event, times in epochs:
            total = total.compose(loss(event, grid, tail).self_compose(times))
        return proven(total, parts)

    def for_delta(delta: float) -> Profile:
        # The tail is a power of two, because similar deltas then have the same cached losses.
        tail = max(delta, 1e-300) * _SHARE / count
        return with_tail(2.0 ** math.floor(math.log2(tail)))

    def delta_at(epsilon: float) -> float:
        rough = for_delta(1e-6).delta(epsilon)
        # The tail for 1e-6 is a small part of a larger delta. At 1 the lattice did not fit.
        if 1e-6 < rough < 1:
            return rough
        return min(rough, for_delta(rough).delta(epsilon))

    return Profile(lambda delta: for_delta(delta).epsilon(delta), delta_at)


class _Laws(NamedTuple):
    """Masses of the ratio on a lattice."""

    ratios: np.ndarray
    with_it: np.ndarray  # under P
    without: np.ndarray  # under Q
    lost: float  # the mass of P above the largest factor
    step: float  # between neighbouring sums of factors


@functools.lru_cache(maxsize=64)
def loss(event: RandomAllocationDpEvent, grid: float, tail: float) -> PrivacyLossDistribution:
    """The loss of one epoch; a few times ``tail`` of the mass becomes an infinite loss."""
    bins = event.batches
    groups = [(min(z, _QUIET), n) for z, n in event.noise_multipliers]
    least = groups[0][0]
    deviation = min(math.exp(-1 / (2 * z**2)) / z for z, _ in groups)
    fine = deviation / _FINE
    leaves = _laws(groups, bins, tail, tail, fine)
    joins = leaves
    if leaves.step > fine:
        fine = max(fine, _UNIT * bins / tail)  # finer lattices have a larger `_error`
        above = _mass_above(least, fine * _POINTS / 2)
        joins = _laws(groups, bins, tail, above, fine)
    return PrivacyLossDistribution(
        _with_example(leaves, bins, grid, tail), _without_example(joins, bins, grid, tail)
    )


def _with_example(laws: _Laws, bins: int, grid: float, tail: float) -> DensePLDPmf:
    """The loss under P, ``log(P / Q)``."""
    inside = laws.ratios > 0
    mass = laws.with_it
    losses = np.log(laws.ratios[inside])
    infinite = laws.lost + tail + _error(mass, bins, laws.step)
    return _on_grid(mass[inside], losses, grid, infinite)


def _without_example(laws: _Laws, bins: int, grid: float, tail: float) -> DensePLDPmf:
    """The loss under Q, ``log(Q / P)``."""
    inside = laws.ratios > 0
    mass = laws.without
    # A ratio of 0 under Q is an infinite loss.
    zero = float(mass[~inside].sum())
    losses = -np.log(laws.ratios[inside])
    infinite = zero + tail + _error(mass, bins, laws.step)
    return _on_grid(mass[inside], losses, grid, infinite)


def _laws(groups: Groups, bins: int, tail: float, above: float, step: float) -> _Laws:
    """The laws of the ratio, with factors up to where P has the mass ``above``.

    The step is larger than given if the lattice needs more than `_POINTS` points.
    """
    idle = bins - sum(n for _, n in groups)
    largest = _largest(groups[0][0], above)
    step = max(step, largest * 2.0**-40)  # floats next to the largest factor are further apart
    low, top = _window(groups, bins, tail, above, step)
    coarser = max(top - low, largest) / _POINTS
    if coarser > step:
        step = coarser
        low, top = _window(groups, bins, tail, above, step)
    first = math.floor(low / step)
    points = (top - low) / step + 4
    size = 2 ** math.ceil(math.log2(points))
    # `plain` is the transform of the law of all factors so far. `chosen` is that of the sum of laws
    # in which one factor has its law under P, by the product rule.
    plain = np.ones(1)
    chosen = np.zeros(1)
    lost = 0.0
    for z, n in groups:
        last = math.ceil(_largest(z, above) / step)
        places = np.arange(last + 1)
        law, beyond = _spread(z, step * places)
        # A factor can exceed the window. The transform repeats outside it.
        wrapped = places % size
        under_p = step * places * law
        factor = np.fft.rfft(np.bincount(wrapped, law, size))
        weighted = np.fft.rfft(np.bincount(wrapped, under_p, size))
        power = factor ** (n - 1)
        chosen = chosen * power * factor + plain * n * power * weighted
        plain = plain * power * factor
        lost += n * beyond / bins
    mixture = (chosen + idle * plain) / bins
    with_it = np.roll(np.fft.irfft(mixture, size), -first)
    without = np.roll(np.fft.irfft(plain, size), -first)
    sums = step * (first + np.arange(size))
    ratios = (sums + idle) / bins
    return _Laws(ratios, with_it.clip(0), without.clip(0), lost, step)


def _fits(event: RandomAllocationDpEvent, tail: float) -> bool:
    """Whether a lattice up to the largest factor is fine enough for the factors at about delta."""
    least = event.noise_multipliers[0][0]
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


def _spread(z: float, points: np.ndarray) -> tuple[np.ndarray, float]:
    """The masses of a factor under Q on sorted points from 0, and the mass of P above the last."""
    with np.errstate(divide="ignore"):
        normals = z * np.log(points) + 1 / (2 * z)
    at = np.append(normals, np.inf)
    outside = _between(at)
    inside = _between(at - 1 / z)
    # An interval has mass q under Q and m under P, which is E[L; interval]. Its upper end gets u
    # and its lower end q - u, which keeps the mean m.
    missing = inside - points * outside
    up = missing[:-1] / np.diff(points)
    up = np.clip(up, 0, outside[:-1])
    law = outside - np.append(up, 0) + np.append(0, up)
    return law, max(0.0, float(missing[-1]))


def _between(at: np.ndarray) -> np.ndarray:
    """The masses of a standard Gaussian between sorted numbers, with all digits in both tails."""
    below = np.diff(ndtr(at))
    above = -np.diff(ndtr(-at))
    return np.where(at[:-1] > 0, above, below)


def _window(
    groups: Groups, bins: int, tail: float, above: float, step: float
) -> tuple[float, float]:
    """A range of the sum of factors: mass ``tail`` is below under Q, and above under P.

    Both ends are Chernoff bounds. Spreading a factor over a ``step`` adds at most
    ``(angle * step)^2 / 8`` to the logarithm of its moment (Hoeffding), and under P at most
    ``angle * step``.
    """
    count = sum(n for _, n in groups)
    largest = max(_largest(z, above) for z, _ in groups)
    variance = 0.0
    laws = []
    for z, n in groups:
        normals = np.linspace(-12, 1 / z - float(ndtri(above)), 1000)
        points = np.exp(normals / z - 1 / (2 * z**2))
        points = np.concatenate([[0], points, [points[-1] + step]])
        law, _ = _spread(z, points)
        laws.append((n, points, law))
        variance += n * float(law @ (points - 1) ** 2)
    deviation = math.sqrt(variance)

    def bound(angles: np.ndarray, under_p: bool) -> float:
        """The tightest of the bounds ``(log E exp(angle * sum) - log tail) / angle``.

        Positive angles bound the sum from above, negative ones from below.
        """
        log_moments = np.zeros(angles.size)  # under Q
        # Under P a uniform bin has its factor weighted by itself, unless its step did not run. So
        # the moment under P is the moment under Q, times a mean over the bins.
        p_over_q = np.full(angles.size, (bins - count) / bins)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            for n, points, law in laws:
                powers = np.exp(np.outer(angles, points))
                moment = powers @ law
                weighted_moment = powers @ (points * law)
                spreading = (angles * step) ** 2 / 8
                log_moments += n * (np.log(moment) + spreading)
                p_over_q += n / bins * weighted_moment / moment
            if under_p:
                # Spreading multiplies the weighted moment by at most e^(angle * step).
                log_moments += angles * step + np.log(p_over_q)
            bounds = (log_moments - math.log(tail)) / angles
        if angles[0] > 0:
            return float(np.nanmin(bounds))
        return float(np.nanmax(bounds))

    angles = np.geomspace(1e-2 / (deviation + largest), 1e4 / deviation, 400)
    low = max(0.0, bound(-angles, under_p=False))
    return low, bound(angles, under_p=True)


def _on_grid(mass: np.ndarray, losses: np.ndarray, grid: float, infinite: float) -> DensePLDPmf:
    """Spreads masses to a grid of losses, which keeps their mass under both laws."""
    below = np.floor(losses / grid)
    moved = mass * np.expm1(below * grid - losses)
    up = np.clip(moved / math.expm1(-grid), 0, mass)
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

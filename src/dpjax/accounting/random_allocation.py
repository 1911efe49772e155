# SPDX-License-Identifier: Apache-2.0
r"""Random allocation with fresh bins: in every epoch an example is in one of t steps, at random.

**One epoch.** With multipliers $z_1, \dots, z_r$ of the $r \le t$ steps that ran, it costs no more
than P against Q, in both orders:

$$ P = \tfrac1t \Big( \sum_{j \le r} N(e_j / z_j, I) + (t - r) N(0, I) \Big), \quad Q = N(0, I) . $$

Given all earlier outputs, a step with the example and without it has two output laws that are a
post-processing of $N(1 / z_j, 1)$ and $N(0, 1)$: step by step, the epoch is one of P and Q. Bins of
other examples are independent of this example's. Multipliers that differ were fixed beforehand.
The bins of the next epoch are fresh, so epochs compose.

**The ratio.** Under Q, $S = P / Q = \frac1t (\sum_j L_j + t - r)$ with independent
$L_j = \exp(g_j / z_j - 1 / 2 z_j^2)$, $g_j \sim N(0, 1)$. Under P, the density of $S$ is $S$ times
that under Q: one factor, of a uniform bin, has the law $x\, \Pr(L_j \in dx)$.

**Rounding** moves the mass of a factor between two points of a lattice to both of them, and keeps
its mean. So a ratio $S'$ with $\mathbb{E}[S' | S] = S$ takes the place of $S$: then (P, Q) is a
post-processing of (P', Q') (Blackwell), in both orders and in every composition. No first-order
error remains, unlike with factors that are rounded up or down. Above the last point a factor keeps
its mass under Q; the rest of its mass under P is an infinite loss. The laws of a sum of lattice
factors are products of powers of Fourier transforms, its masses on losses again keep their means,
and what the transform can wrap round (a Chernoff bound) or get wrong is an infinite loss too.

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

from dpjax.accounting.event_parts import Parts
from dpjax.accounting.events import RandomAllocationDpEvent
from dpjax.accounting.loss_distributions import composed, proven
from dpjax.accounting.profiles import Profile

_FINE = 64  # points of the lattice in one deviation of a factor
_POINTS = 2**22  # of the lattice: a second
_UNIT = 2.0**-52  # the distance of floats above 1
_QUIET = 1e4  # more noise counts as this much: its factors would be 1 but for rounding
_SHARE = 1e-3  # of delta, that all infinite losses together may have
_BELOW = 2.0  # with steps above e^-2 times the factors at delta, known bins cost no more

Epochs: TypeAlias = list[tuple[RandomAllocationDpEvent, int]]


def profile(epochs: Epochs, rest: Parts, grid: float, neighbours: str) -> Profile:
    """What composed losses of epochs, and of the Gaussians of ``rest``, prove."""
    epochs = sorted(epochs, key=lambda row: (row[0].batches, row[0].noise_multipliers))
    parts, count = rest._replace(foreign=tuple(epochs)), sum(n for _, n in epochs)

    @functools.cache
    def of(tail: float) -> Profile:
        if not all(_fits(event, tail) for event, _ in epochs):
            return Profile(lambda delta: math.inf, lambda epsilon: 1.0)
        total = composed(rest, grid, neighbours)
        for event, times in epochs:
            total = total.compose(loss(event, grid, tail).self_compose(times))
        return proven(total, parts)

    def at(delta: float) -> Profile:
        # A power of two, so that neighbouring questions are about the same losses.
        return of(2.0 ** math.floor(math.log2(max(delta, 1e-300) * _SHARE / count)))

    def delta_at(epsilon: float) -> float:
        rough = at(1e-6).delta(epsilon)
        # Of a larger delta, the tail for 1e-6 is a small part; at 1 it did not fit.
        return rough if 1e-6 < rough < 1 else min(rough, at(rough).delta(epsilon))

    return Profile(lambda delta: at(delta).epsilon(delta), delta_at)


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
    fine = min(math.exp(-1 / (2 * z**2)) / z for z, _ in groups) / _FINE
    leaves = _laws(groups, bins, tail, tail, fine)
    joins = leaves
    if leaves.step > fine:
        fine = max(fine, _UNIT * bins / tail)  # finer ones cost more by `_error`
        joins = _laws(groups, bins, tail, _mass_above(groups[0][0], fine * _POINTS / 2), fine)
    return PrivacyLossDistribution(
        _with_example(leaves, bins, grid, tail), _without_example(joins, bins, grid, tail)
    )


def _with_example(laws: _Laws, bins: int, grid: float, tail: float) -> DensePLDPmf:
    """The loss under P, ``log(P / Q)``."""
    inside = laws.ratios > 0
    mass = laws.with_it
    infinite = laws.lost + tail + _error(mass, bins, laws.step)
    return _on_grid(mass[inside], np.log(laws.ratios[inside]), grid, infinite)


def _without_example(laws: _Laws, bins: int, grid: float, tail: float) -> DensePLDPmf:
    """The loss under Q, ``log(Q / P)``."""
    inside = laws.ratios > 0
    mass = laws.without
    # Where the example is absent, a ratio of 0 is an infinite loss.
    zero = float(mass[~inside].sum())
    infinite = zero + tail + _error(mass, bins, laws.step)
    return _on_grid(mass[inside], -np.log(laws.ratios[inside]), grid, infinite)


def _laws(
    groups: list[tuple[float, int]], bins: int, tail: float, above: float, step: float
) -> _Laws:
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
    size = 2 ** math.ceil(math.log2((top - low) / step + 4))
    # Transforms, of the law of all factors so far, and of the sum of laws in which one of them has
    # its law under P; by the product rule.
    plain = np.ones(1)
    chosen = np.zeros(1)
    lost = 0.0
    for z, n in groups:
        places = np.arange(math.ceil(_largest(z, above) / step) + 1)
        law, beyond = _spread(z, step * places)
        # The window can be narrower than one factor; the transform repeats outside it.
        factor = np.fft.rfft(np.bincount(places % size, law, size))
        weighted = np.fft.rfft(np.bincount(places % size, step * places * law, size))
        power = factor ** (n - 1)
        chosen = chosen * power * factor + plain * n * power * weighted
        plain = plain * power * factor
        lost += n * beyond / bins
    with_it = np.roll(np.fft.irfft((chosen + idle * plain) / bins, size), -first).clip(0)
    without = np.roll(np.fft.irfft(plain, size), -first).clip(0)
    ratios = (step * (first + np.arange(size)) + idle) / bins
    return _Laws(ratios, with_it, without, lost, step)


def _fits(event: RandomAllocationDpEvent, tail: float) -> bool:
    """Whether a lattice up to the largest factor is fine enough for the factors at about delta."""
    least = event.noise_multipliers[0][0]
    likely = min(0.5, tail / _SHARE)
    range_of_logs = float(ndtri(likely) - ndtri(tail)) / least
    largest = 1 / (2 * least**2) - float(ndtri(tail)) / least
    # Squares of factors overflow from e^354 on.
    return range_of_logs < math.log(_POINTS) - _BELOW and largest < 300


def _largest(z: float, tail: float) -> float:
    """The factor above which there is this mass under P."""
    return math.exp(1 / (2 * z**2) - float(ndtri(tail)) / z)


def _mass_above(z: float, factor: float) -> float:
    """The mass under P of larger factors: the inverse of `_largest`."""
    return float(ndtr(1 / (2 * z) - z * math.log(factor)))


def _spread(z: float, points: np.ndarray) -> tuple[np.ndarray, float]:
    """Masses of a factor under Q on sorted points from 0 on, and what P loses above the last."""
    with np.errstate(divide="ignore"):
        at = np.append(z * np.log(points) + 1 / (2 * z), np.inf)
    outside, inside = _between(at), _between(at - 1 / z)
    # Of an interval with mass q under Q and m under P = E[L; interval], the upper end gets u and
    # the lower end q - u, so that the mean is m.
    up = (inside - points * outside)[:-1] / np.diff(points)
    up = np.clip(up, 0, outside[:-1])
    law = outside - np.append(up, 0) + np.append(0, up)
    return law, max(0.0, float(inside[-1] - points[-1] * outside[-1]))


def _between(at: np.ndarray) -> np.ndarray:
    """The masses of a standard Gaussian between sorted numbers, with all digits in both tails."""
    below, above = np.diff(ndtr(at)), -np.diff(ndtr(-at))
    return np.where(at[:-1] > 0, above, below)


def _window(
    groups: list[tuple[float, int]], bins: int, tail: float, above: float, step: float
) -> tuple[float, float]:
    """Where the sum of factors is: below with mass ``tail`` under Q, above with it under P.

    Both are bounds by Chernoff. Spreading a factor over a ``step`` adds at most ``(angle * step)^2
    / 8`` to the logarithm of its moment (Hoeffding), and ``angle * step`` under P.
    """
    count, deviation = sum(n for _, n in groups), 0.0
    laws, largest = [], max(_largest(z, above) for z, _ in groups)
    for z, n in groups:
        points = np.exp(np.linspace(-12, 1 / z - float(ndtri(above)), 1000) / z - 1 / (2 * z**2))
        points = np.concatenate([[0], points, [points[-1] + step]])
        laws.append((n, points, _spread(z, points)[0]))
        deviation += n * float(laws[-1][2] @ (points - 1) ** 2)
    deviation = math.sqrt(deviation)

    def bound(angles: np.ndarray, under_p: bool) -> float:
        """The least of ``(log E exp(angle * sum) - log tail) / angle``."""
        plain, own = np.zeros(angles.size), np.full(angles.size, (bins - count) / bins)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            for n, points, law in laws:
                powers = np.exp(np.outer(angles, points))
                moment = powers @ law
                plain += n * (np.log(moment) + (angles * step) ** 2 / 8)
                own += n / bins * (powers @ (points * law)) / moment
            more = angles * step + np.log(own) if under_p else 0.0
            bounds = (plain + more - math.log(tail)) / angles
        return float(np.nanmin(bounds)) if angles[0] > 0 else float(np.nanmax(bounds))

    slow, fast = 1e-2 / (deviation + largest), 1e4 / deviation
    top = bound(np.geomspace(slow, fast, 400), True)
    return max(0.0, bound(-np.geomspace(slow, fast, 400), False)), top


def _on_grid(mass: np.ndarray, losses: np.ndarray, grid: float, infinite: float) -> DensePLDPmf:
    """Masses spread to a grid of losses, so that they keep their mass under both laws."""
    below = np.floor(losses / grid)
    up = np.clip(mass * np.expm1(below * grid - losses) / math.expm1(-grid), 0, mass)
    first = int(below.min())
    places = (below - first).astype(int)
    probs = np.bincount(places, mass - up, places.max() + 2)
    return DensePLDPmf(
        grid, first, probs + np.bincount(places + 1, up, places.max() + 2), infinite, True
    )


def _error(mass: np.ndarray, bins: int, step: float) -> float:
    """By how much floating point moves masses, in all.

    Of a factor, rounded points move ``u / step``, and the transform each coefficient by about u,
    whose power moves ``bins`` times as far. By Parseval's and Cauchy's inequalities the masses then
    move by that times the root of their number times their root sum of squares.
    """
    return _UNIT * bins * (1 / step + 4 * math.sqrt(mass.size) * float(np.linalg.norm(mass)))

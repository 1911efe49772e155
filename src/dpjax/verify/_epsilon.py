# SPDX-License-Identifier: Apache-2.0
r"""The epsilon of noisy sums, and the rates of attacks on them: a formula for each kind of step.

| step | Rényi divergence | privacy loss |
|---|---|---|
| Gaussian on all the data | closed form | closed form |
| Gaussian on a Poisson sample | whole orders in closed form | dp-accounting |
| Gaussian on a uniform subset | dp-accounting | |
| epoch of random allocation | | `dpjax.verify.epochs` |
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from typing import Any

import dp_accounting as dp
import numpy as np
from scipy.special import erfcx, gammaln, ndtr

from dpjax.verify._matrices import change_by_bins
from dpjax.verify.epochs import delta_of, epsilon_of, law_of
from dpjax.verify.facts import Card, Run
from dpjax.verify.steps import Step

RELATION = {
    "add-or-remove": dp.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "zero-out": dp.NeighboringRelation.ADD_OR_REMOVE_ONE,  # a sum does not tell them apart
    "replace-one": dp.NeighboringRelation.REPLACE_ONE,
}
WHOLE = np.array([*range(2, 64), 72, 80, 96, 128, 192, 256, 384, 512, 768, 1024])
ORDERS = np.concatenate([1 + np.arange(2, 10) / 100, 1 + np.arange(1, 100) / 10, WHOLE[9:]])
K = np.arange(max(WHOLE) + 1)
_INSIDE = gammaln(WHOLE[:, None] + 1) - gammaln(K + 1) - gammaln(np.abs(WHOLE[:, None] - K) + 1)
# The logarithms of all binomial coefficients of the whole orders, ``[orders, k]``.
LOG_BINOMIALS = np.where(WHOLE[:, None] >= K, _INSIDE, -np.inf)
# The epsilons at which deltas are computed: a geometric grid, as dense at small ones as at large.
EPSILONS = np.append(0, np.geomspace(1e-4, 16, 1200))
# The most losses of a step: dp-accounting keeps them in a dictionary.
POINTS = 10_000_000
# The distance of losses where epsilon needs no finer one.
_FINE = 1e-4


def by_rdp(card: Card, steps: Counter[Step]) -> tuple[dict[str, float], np.ndarray]:
    r"""Epsilon by Rényi divergences, and deltas at `EPSILONS`.

    It returns an epsilon for each conversion: ``"rdp"`` is that of dp-accounting, and
    ``"rdp-classic"`` is the least $D_\alpha - \ln \delta / (\alpha - 1)$ over the orders from 1.1
    to 63. Without a proof there is no epsilon, and all deltas are 1.
    """
    is_exchange = card.mechanism.neighbours == "replace-one"
    divergences = np.zeros_like(ORDERS)
    for step, count in steps.items():
        of_steps = divergences_of(step, count, is_exchange)
        if of_steps is None:  # no bound is proved for the sum
            return {}, np.ones_like(EPSILONS)
        divergences = divergences + of_steps
    if not is_exchange:
        # A run with correlated noise counts as one Gaussian among the steps. Its divergences are
        # smaller if the bin of each example, its step in every epoch, is random. This is proved
        # only for an example that is added or removed.
        runs: list[Run] = [*card.mechanism.before]  # the earlier runs
        if card.steps:  # otherwise the last run released nothing
            runs.append(card.mechanism)
        for run in runs:
            if run.noise is not None and run.multiplier_and_steps:  # it has steps
                divergences = divergences + change_by_bins(run, ORDERS)
    epsilon, _ = dp.rdp.compute_epsilon(ORDERS.tolist(), divergences.tolist(), card.delta)
    classic = divergences - math.log(card.delta) / (ORDERS - 1)
    # Papers with this conversion print the best of these orders.
    classic = classic[(ORDERS >= 1.1) & (ORDERS <= 63)]
    epsilons = {"rdp": float(epsilon), "rdp-classic": float(np.min(classic))}
    return epsilons, deltas_of_divergences(divergences)


def divergences_of(step: Step, count: int, is_exchange: bool) -> np.ndarray | None:
    """The Rényi divergences of ``count`` equal steps, at `ORDERS`; None if no formula is proved.

    ``is_exchange`` is whether neighbouring data sets differ by a replaced example.
    """
    multiplier = step.multiplier
    if is_exchange:
        multiplier = multiplier / 2  # a replacement moves a sum twice as far
    if step.epoch:  # only `by_losses` has a formula for epochs
        return None
    if not step.is_sampled:
        return count * ORDERS / (2 * multiplier**2)
    if step.subset is None and not is_exchange:
        return count * poisson_divergences(step.rate, multiplier)
    if step.subset is not None and is_exchange:
        # This accountant takes the multiplier relative to a replacement, as it was halved above.
        accountant = dp.rdp.RdpAccountant(ORDERS.tolist(), RELATION["replace-one"])
        noise = dp.GaussianDpEvent(multiplier)
        examples, batch_size = step.subset
        accountant.compose(dp.SampledWithoutReplacementDpEvent(examples, batch_size, noise), count)
        return accountant.rdp
    return None  # a Poisson sample if one is replaced, or a subset if one is added or removed


def deltas_of_divergences(divergences: np.ndarray) -> np.ndarray:
    """The deltas at `EPSILONS` that these divergences at `ORDERS` allow.

    (Canonne, Kamath and Steinke, *The discrete Gaussian for differential privacy*, 2020,
    proposition 12. The second bound is of Bretagnolle and Huber, 1979.)
    """
    gaps = divergences - EPSILONS[:, None] + np.log1p(-1 / ORDERS)
    log_deltas = (ORDERS - 1) * gaps - np.log(ORDERS)
    deltas = np.exp(np.minimum(log_deltas, 0).min(axis=1))
    total_variation = np.sqrt(-np.expm1(-divergences.min()))
    return np.minimum(deltas, total_variation)


def most_true_positives(deltas: np.ndarray, false_positives: float) -> float:
    """The largest rate of true positives of a membership attack.

    ``deltas`` at `EPSILONS` bound the trade-off curve from both sides. (Dong, Roth and Su,
    *Gaussian differential privacy*, 2022, proposition 2.5.)
    """
    growth = np.exp(EPSILONS)
    steep = growth * false_positives + deltas
    flat = 1 - (1 - deltas - false_positives) / growth
    return float(min(1.0, steep.min(), flat.min()))


def poisson_divergences(rate: float, multiplier: float) -> np.ndarray:
    r"""The divergences of a Gaussian on a Poisson sample, at `ORDERS`.

    $$ (\alpha - 1) D_\alpha = \ln \sum_{k=0}^{\alpha} \binom{\alpha}{k} (1 - q)^{\alpha - k} q^k
       e^{k (k - 1) / 2 z^2} $$

    for whole orders (Mironov, Talwar and Zhang, *Rényi differential privacy of the sampled Gaussian
    mechanism*, 2019, section 3.3), and between them at most a line, since it is convex.
    """
    terms = LOG_BINOMIALS + K * math.log(rate) + (WHOLE[:, None] - K) * math.log1p(-rate)
    terms += K * (K - 1) / (2 * multiplier**2)
    largest = terms.max(axis=1)
    moments = largest + np.log(np.exp(terms - largest[:, None]).sum(axis=1))
    return np.interp(ORDERS, [1, *WHOLE], [0, *moments]) / (ORDERS - 1)


def by_losses(card: Card, steps: Counter[Step]) -> tuple[float, np.ndarray]:
    """Epsilon, and deltas at `EPSILONS`, by the distribution of the privacy loss.

    Each is at most that of the same steps without sampling, which has a closed form.
    """
    # One example more or fewer moves a sum by its clipping bound, and a replacement by two.
    bounds_moved = 2 if card.mechanism.neighbours == "replace-one" else 1
    signal = bounds_moved * math.sqrt(signal_squared(steps))
    epsilon = of_gaussian(signal, card.delta)
    deltas = deltas_of_gaussian(signal)
    sampled = [step for step in steps if step.is_sampled]
    if any(step.epoch for step in sampled):
        # The law of the likelihood ratio is proved for one example more or fewer, and not for
        # subsets. Otherwise the bounds without sampling stay.
        if bounds_moved == 1 and not any(step.subset for step in sampled):
            law = law_of(steps)
            epsilon = min(epsilon, epsilon_of(law, card.delta))
            deltas_of_law = [delta_of(law, value) for value in EPSILONS]
            deltas = np.minimum(deltas, deltas_of_law)
    elif sampled:
        # dp-accounting refuses subsets here: the bounds without sampling stay.
        with contextlib.suppress(dp.UnsupportedEventError):
            grid_epsilon, grid_deltas = on_grid(card, steps, bounds_moved)
            epsilon = min(epsilon, grid_epsilon)
            deltas = np.minimum(deltas, grid_deltas)
    return epsilon, deltas


def on_grid(card: Card, steps: Counter[Step], bounds_moved: int) -> tuple[float, np.ndarray]:
    """Epsilon, and deltas at `EPSILONS`, by dp-accounting, which rounds losses to a grid.

    Epsilon is infinite if no grid fits into memory, or if delta is below the error of floating
    point. ``bounds_moved`` is the number of clipping bounds by which one example moves a sum.
    """
    interval = grid_interval(steps, bounds_moved)
    if interval is None:
        return math.inf, np.ones_like(EPSILONS)
    # This accountant takes multipliers relative to one bound, and itself doubles the moves of a
    # replacement.
    accountant = dp.pld.PLDAccountant(RELATION[card.mechanism.neighbours], interval)
    unsampled = Counter({step: n for step, n in steps.items() if not step.is_sampled})
    squared = signal_squared(unsampled)
    if squared:
        # Together they act as one Gaussian, with this multiplier.
        accountant.compose(dp.GaussianDpEvent(squared**-0.5))
    for step, count in steps.items():
        if step.is_sampled:
            accountant.compose(event_of(step), count)
    # Floating point can make each delta too small by this error. (The type is Any, because
    # dp-accounting annotates one epsilon and one delta, and takes arrays.)
    error: Any = rounding_error(steps)
    epsilons: Any = EPSILONS
    deltas = accountant.get_delta(epsilons) + error
    if card.delta <= error:
        return math.inf, deltas
    return float(accountant.get_epsilon(card.delta - error)), deltas


def signal_squared(steps: Counter[Step]) -> float:
    """The sum of count / multiplier^2.

    Without sampling, the steps together cost as much as one Gaussian that an example moves by the
    root of this sum, in standard deviations.
    """
    return math.fsum(count / step.multiplier**2 for step, count in steps.items())


def event_of(step: Step) -> dp.DpEvent:
    """A sampled step as an event of dp-accounting."""
    noise = dp.GaussianDpEvent(step.multiplier)
    if step.subset is not None:
        return dp.SampledWithoutReplacementDpEvent(*step.subset, noise)
    return dp.PoissonSampledDpEvent(step.rate, noise)


def of_gaussian(signal: float, delta: float) -> float:
    r"""The epsilon of a Gaussian that an example moves by ``signal`` standard deviations.

    With $x = \varepsilon / \mu - \mu / 2$,
    $\delta = \Phi(-x) - e^\varepsilon \Phi(-x - \mu)
    = e^{-x^2 / 2} [R(x) - R(x + \mu)] / 2$, where $R(x) = \mathrm{erfcx}(x / \sqrt 2)$.
    $R$ does not underflow, however small delta is. (Balle and Wang, *Improving the Gaussian
    mechanism for differential privacy*, 2018, theorem 8.)
    """
    low = max(-signal / 2, -40.0)
    high = math.sqrt(-2 * math.log(delta))
    for _ in range(100):
        x = (low + high) / 2
        between = float(erfcx(x / 2**0.5) - erfcx((x + signal) / 2**0.5)) / 2
        if between > 0 and math.log(between) - x**2 / 2 > math.log(delta):
            low = x
        else:
            high = x
    return signal * (high + signal / 2)


def deltas_of_gaussian(signal: float) -> np.ndarray:
    """Delta at each of `EPSILONS`, of a Gaussian as in `of_gaussian`."""
    if not signal:
        return np.zeros_like(EPSILONS)
    x = EPSILONS / signal - signal / 2
    deltas = ndtr(-x) - np.exp(EPSILONS) * ndtr(-x - signal)
    return deltas.clip(0)


def rounding_error(steps: Counter[Step]) -> float:
    """The most that floating point moves a delta, by the formula of `dpjax.accounting`."""
    operations = 0
    for step, count in steps.items():
        convolutions = count if step.is_sampled else 1
        operations += 2 * convolutions + 16
    return 2.0**-52 * operations


def grid_interval(steps: Counter[Step], bounds_moved: int) -> float | None:
    """The distance between the points of a grid of losses; None if they take too much memory.

    ``bounds_moved`` is the number of clipping bounds by which the data of one example move a sum:
    2 for a replacement, and otherwise 1.
    """
    # The rate q and the multiplier z of each kind of sampled step, and the number n of such steps.
    sampled = [(step.rate, step.multiplier, n) for step, n in steps.items() if step.is_sampled]

    def variance(moved: int) -> float:
        """About the variance of the loss of all steps, if an example moves sums by ``moved``.

        It is the sum of n q^2 (exp((moved / z)^2) - 1).
        """
        # The exponential overflows above 700.
        return math.fsum(n * q**2 * math.expm1(min((moved / z) ** 2, 700)) for q, z, n in sampled)

    # Losses of one step: without sampling they are Gaussian, with mean mu^2 / 2 and deviation mu,
    # where mu is moved / z. They are counted up to ten deviations above the mean, and down to the
    # negative of that.
    largest_mu = max(bounds_moved / z for _, z, _ in sampled)
    largest_step_loss = largest_mu**2 / 2 + 10 * largest_mu
    if 2 * largest_step_loss > _FINE * POINTS:  # more points than fit, at a fine distance
        return None
    # Losses of all steps: they are close to a Gaussian, of mean half its variance, and are counted
    # up to six deviations above the mean.
    total = variance(bounds_moved)
    largest_loss = max(total / 2 + 6 * math.sqrt(total), largest_step_loss)
    # Rounding costs little if the deviation of one step's loss has five points. The deviation is
    # least if an example moves a sum by one bound, so this case decides. A grid of an eighth of the
    # distance, as dpjax has, makes epsilon 0.2 % smaller and takes 1.6 times as long.
    step_count = sum(n for _, _, n in sampled)
    deviation = math.sqrt(variance(1) / step_count)
    distance = max(
        deviation / 5,
        2 * largest_loss / 500_000,  # at most 500,000 points, because the time grows with them
        _FINE / 1024,  # a finer grid has larger errors of floating point
    )
    if len(sampled) <= 8:
        # A fine grid takes no time for few distinct steps.
        distance = min(distance, _FINE)
    return distance

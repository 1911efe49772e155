# SPDX-License-Identifier: Apache-2.0
r"""The epsilon of noisy sums, and what attacks on them reach: a formula for each kind of step.

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

from dpjax.verify.epochs import delta_of, epsilon_of, law_of
from dpjax.verify.facts import Card
from dpjax.verify.matrices import saved
from dpjax.verify.steps import Step

RELATION = {
    "add-or-remove": dp.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "zero-out": dp.NeighboringRelation.ADD_OR_REMOVE_ONE,  # the same for a sum
    "replace-one": dp.NeighboringRelation.REPLACE_ONE,
}
WHOLE = np.array([*range(2, 64), 72, 80, 96, 128, 192, 256, 384, 512, 768, 1024])
ORDERS = np.concatenate([1 + np.arange(2, 10) / 100, 1 + np.arange(1, 100) / 10, WHOLE[9:]])
K = np.arange(max(WHOLE) + 1)
_INSIDE = gammaln(WHOLE[:, None] + 1) - gammaln(K + 1) - gammaln(np.abs(WHOLE[:, None] - K) + 1)
# The logarithms of all binomial coefficients of the whole orders, ``[orders, k]``.
LOG_BINOMIALS = np.where(WHOLE[:, None] >= K, _INSIDE, -np.inf)
# Where deltas are computed: close beside small epsilons as beside large ones.
EPSILONS = np.append(0, np.geomspace(1e-4, 16, 1200))
POINTS = 10_000_000  # losses of a step, which dp-accounting keeps in a dictionary, in memory


def by_rdp(card: Card, steps: Counter[Step]) -> tuple[dict[str, float], np.ndarray]:
    """Epsilon by Rényi divergences, with both conversions, and deltas at `EPSILONS`."""
    divergences, exchange = 0 * ORDERS, card.mechanism.neighbours == "replace-one"
    for step, count in steps.items():
        # A replacement moves a sum twice as far.
        multiplier = step.multiplier / (2 if exchange else 1)
        if step.epoch:  # its losses alone are recomputed
            return {}, np.ones_like(EPSILONS)
        if not step.is_sampled:
            divergences = divergences + count * ORDERS / (2 * multiplier**2)
        elif step.subset is None and not exchange:
            divergences = divergences + count * poisson_divergences(step.rate, multiplier)
        elif step.subset is not None and exchange:
            accountant = dp.rdp.RdpAccountant(ORDERS.tolist(), RELATION["replace-one"])
            noise = dp.GaussianDpEvent(multiplier)
            accountant.compose(dp.SampledWithoutReplacementDpEvent(*step.subset, noise), count)
            divergences = divergences + accountant.rdp
        else:  # nothing is proved
            return {}, np.ones_like(EPSILONS)
    if not exchange:
        for run in (*card.mechanism.before, *[card.mechanism] * bool(card.steps)):
            if run.noise is not None and run.multiplier_and_steps:
                divergences = divergences + saved(run, ORDERS)
    epsilon, _ = dp.rdp.compute_epsilon(ORDERS.tolist(), divergences.tolist(), card.delta)
    classic = (divergences - math.log(card.delta) / (ORDERS - 1))[(ORDERS >= 1.1) & (ORDERS <= 63)]
    # Canonne, Kamath and Steinke, "The discrete Gaussian for differential privacy", 2020,
    # proposition 12; the second bound is of Bretagnolle and Huber (1979).
    gaps = divergences - EPSILONS[:, None] + np.log1p(-1 / ORDERS)
    deltas = np.exp(np.minimum((ORDERS - 1) * gaps - np.log(ORDERS), 0).min(axis=1))
    deltas = np.minimum(deltas, np.sqrt(-np.expm1(-divergences.min())))
    return {"rdp": float(epsilon), "rdp-classic": float(np.min(classic))}, deltas


def most_true_positives(deltas: np.ndarray, false_positives: float) -> float:
    """What a membership attack can reach: `deltas` at `EPSILONS` bound the curve from both sides.

    (Dong, Roth and Su, *Gaussian differential privacy*, 2022, proposition 2.5.)
    """
    growth = np.exp(EPSILONS)
    steep, flat = growth * false_positives + deltas, 1 - (1 - deltas - false_positives) / growth
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
    """Epsilon, and deltas at `EPSILONS`, by privacy losses, or without sampling if that is less."""
    exchange = 2 if card.mechanism.neighbours == "replace-one" else 1
    # Without their sampling, the same steps cost no less.
    signal = exchange * math.sqrt(math.fsum(n / step.multiplier**2 for step, n in steps.items()))
    epsilon, deltas = of_gaussian(signal, card.delta), deltas_of_gaussian(signal)
    sampled = [step for step in steps if step.is_sampled]
    if any(step.epoch for step in sampled):
        if exchange == 2 or any(step.subset for step in sampled):
            return epsilon, deltas
        law = law_of(steps)
        by_law = np.array([delta_of(law, value) for value in EPSILONS])
        return min(epsilon, epsilon_of(law, card.delta)), np.minimum(deltas, by_law)
    if not sampled or (width := grid(steps, exchange)) is None:
        return epsilon, deltas
    accountant = dp.pld.PLDAccountant(RELATION[card.mechanism.neighbours], width)
    plain = math.fsum(n / s.multiplier**2 for s, n in steps.items() if not s.is_sampled)
    if plain:
        accountant.compose(dp.GaussianDpEvent(plain**-0.5))
    with contextlib.suppress(dp.UnsupportedEventError):  # subsets
        for step in sampled:
            noise = dp.GaussianDpEvent(step.multiplier)
            event = dp.PoissonSampledDpEvent(step.rate, noise)
            if step.subset is not None:
                event = dp.SampledWithoutReplacementDpEvent(*step.subset, noise)
            accountant.compose(event, steps[step])
        off: Any = rounding_error(steps)
        known: Any = EPSILONS  # of one epsilon, says its annotation
        deltas = np.minimum(deltas, accountant.get_delta(known) + off)
        if card.delta > off:
            epsilon = min(epsilon, float(accountant.get_epsilon(card.delta - off)))
    return epsilon, deltas


def of_gaussian(signal: float, delta: float) -> float:
    r"""The epsilon of a Gaussian that an example moves by ``signal`` standard deviations.

    With $x = \varepsilon / \mu - \mu / 2$,
    $\delta = \Phi(-x) - e^\varepsilon \Phi(-x - \mu)
    = e^{-x^2 / 2} [R(x) - R(x + \mu)] / 2$, where $R(x) = \mathrm{erfcx}(x / \sqrt 2)$.
    $R$ does not underflow, however small delta is. (Balle and Wang, *Improving the Gaussian
    mechanism for differential privacy*, 2018, theorem 8.)
    """
    low, high = max(-signal / 2, -40.0), math.sqrt(-2 * math.log(delta))
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
    x = EPSILONS / signal - signal / 2 if signal else np.full_like(EPSILONS, np.inf)
    return (ndtr(-x) - np.exp(EPSILONS) * ndtr(-x - signal)).clip(0)


def rounding_error(steps: Counter[Step]) -> float:
    """A bound on the rounding of a delta, by the formula of `dpjax.accounting`."""
    return 2.0**-52 * sum(2 * (n if step.is_sampled else 1) + 16 for step, n in steps.items())


def grid(steps: Counter[Step], exchange: int) -> float | None:
    """The distance between losses; None if a step loses so much that they overflow the memory."""
    sampled = [(s.rate, s.multiplier, n) for s, n in steps.items() if s.is_sampled]

    def variance(times: int) -> float:
        return math.fsum(n * q**2 * math.expm1(min((times / z) ** 2, 700)) for q, z, n in sampled)

    total, largest = variance(exchange), max(exchange / z for _, z, _ in sampled)
    one = largest**2 / 2 + 10 * largest
    if 2 * one > 1e-4 * POINTS:
        return None
    losses = 2 * max(total / 2 + 6 * math.sqrt(total), one)
    step = math.sqrt(variance(1) / sum(n for *_, n in sampled))
    # Claims are made with an eighth: 0.2 % less, in 1.6 times the time.
    finest = max(step / 5, losses / 500_000, 1e-4 / 1024)
    # With few distinct steps a fine grid takes no time.
    return finest if len(sampled) > 8 else min(finest, 1e-4)

# SPDX-License-Identifier: Apache-2.0
"""The epsilon of a privacy card, by dp-accounting and by the closed form of Gaussians."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import dp_accounting as dp
import numpy as np

from dpjax.verify import gaussian as closed_form
from dpjax.verify.correlated import Unreadable, saved
from dpjax.verify.events import each_multiplier, event_of

RELATION = {
    "add-or-remove": dp.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "zero-out": dp.NeighboringRelation.ADD_OR_REMOVE_ONE,  # the same for a sum
    "replace-one": dp.NeighboringRelation.REPLACE_ONE,
}
# Rényi orders; with fewer than dpjax has, its claims would seem too small.
ORDERS = np.concatenate(
    [
        1 + np.arange(2, 10) / 100,
        1 + np.arange(1, 100) / 10,
        np.arange(11, 64),
        [72, 80, 96, 128, 192, 256, 384, 512, 768, 1024],
    ]
)
POINTS = 10_000_000  # losses of a step, which dp-accounting keeps in a dictionary, in memory
ROUGH = 20  # a delta below 20 errors of a distribution leaves few digits of epsilon


def recompute(card: dict[str, Any], method: str) -> tuple[float, float]:
    """The epsilon of a card by one of dp-accounting's accountants, and by a classic conversion.

    Gaussians without sampling have a closed form, which replaces their distribution. The second
    number is above the smallest epsilon of the classic conversion.
    """
    mechanism = card["mechanism"]
    relation = RELATION[mechanism["neighbours"]]
    halve = method == "rdp" and mechanism["neighbours"] == "replace-one"
    event = event_of(card, halve=halve, rounded=method == "pld")
    if isinstance(event, dp.NonPrivateDpEvent):
        return math.inf, math.inf
    if method == "pld":
        if not math.isnan(moved := signal(card)):
            epsilon = closed_form.epsilon(moved, card["delta"])
        else:
            exchange = 2 if mechanism["neighbours"] == "replace-one" else 1
            accountant = dp.pld.PLDAccountant(relation, grid(event, exchange))
            accountant.compose(event)
            error = rounding_error(card)
            spare = card["delta"] - error
            epsilon = float(accountant.get_epsilon(spare)) if spare > 0 else math.inf
            # Without their sampling, the same steps cost no less, and have a closed form.
            noises = ((getattr(part, "event", part), n) for part, n in leaves(event))
            total = math.fsum(n * closed_form.precision(noise) for noise, n in noises)
            whole = closed_form.epsilon(exchange * math.sqrt(total), card["delta"])
            epsilon = min(epsilon, whole)
            if card["delta"] < ROUGH * error and exchange == 1:
                epsilon = min(epsilon, recompute(card, "rdp")[0])
        if np.any(less_by_bins(card, np.array([2.0]))):  # dp-accounting has no such distribution
            epsilon = min(epsilon, recompute(card, "rdp")[0])
        return epsilon, epsilon
    accountant = dp.rdp.RdpAccountant(ORDERS.tolist(), relation)
    accountant.compose(event)
    divergences = accountant.rdp + less_by_bins(card, ORDERS)
    found = ORDERS.tolist(), divergences.tolist()
    epsilon, order = dp.rdp.compute_epsilon(*found, card["delta"])
    if not order > 1:
        return float(epsilon), float(epsilon)
    # At one order, the classic conversion lacks these two terms of the improved one. The published
    # one has no orders below 1.1 or above 63, so it is larger where those are the best.
    classic = epsilon + math.log(order) / (order - 1) + math.log(order / (order - 1))
    low = (ORDERS >= 1.1) & (ORDERS <= 63)
    published = divergences[low] - math.log(card["delta"]) / (ORDERS[low] - 1)
    return float(epsilon), max(float(classic), float(np.min(published)))


def signal(card: dict[str, Any]) -> float:
    """By how many standard deviations one example moves Gaussians; NaN if batches are sampled."""
    exchange = 2 if card["mechanism"]["neighbours"] == "replace-one" else 1
    return exchange * math.sqrt(closed_form.precision(event_of(card, halve=False)))


def less_by_bins(card: dict[str, Any], orders: np.ndarray) -> np.ndarray:
    """What random bins take from the divergences of the events, which leave the bins out."""
    mechanism, total = card["mechanism"], 0 * orders
    if mechanism["neighbours"] == "replace-one":
        return total
    ran = [*mechanism["before"], *[mechanism] * bool(card["steps"])]
    for spent in ran:
        multipliers = each_multiplier(spent)
        if spent["noise"] is not None and multipliers:
            total = total + saved(spent["noise"], spent["sampling"], multipliers[0], orders)
    return total


def rounding_error(card: dict[str, Any]) -> float:
    """By how much floating point can move a delta of dp-accounting's distribution, either way.

    `dpjax.accounting.loss_distributions.error` says why: each step by 2 units in the last place of
    1, and each distinct step by 16. Equal Gaussians without sampling are one.
    """
    found = leaves(event_of(card, halve=False, rounded=True))
    counts = [1 if isinstance(part, dp.GaussianDpEvent) else count for part, count in found]
    return 2.0**-52 * sum(2 * count + 16 for count in counts)


def grid(event: dp.DpEvent, exchange: int) -> float:
    """The distance between losses: 1e-4, or less where that is much for a sampled step.

    As in dpjax, an eighth of a step's deviation, if half a million span all losses.
    """
    steps: list[tuple[float, float, int]] = []
    for part, n in leaves(event):
        match part:
            case dp.PoissonSampledDpEvent(
                sampling_probability=q, event=dp.GaussianDpEvent(noise_multiplier=z)
            ):
                steps.append((q, z, n))
    if not steps:
        return 1e-4

    def variance(times: int) -> float:
        return math.fsum(n * q**2 * math.expm1(min((times / z) ** 2, 700)) for q, z, n in steps)

    total, largest = variance(exchange), max(exchange / z for _, z, _ in steps)
    one = largest**2 / 2 + 10 * largest
    if 2 * one > 1e-4 * POINTS:
        raise Unreadable(
            f"noise multiplier {exchange / largest:g} hides nearly nothing: a step can lose "
            f"{one:,.0f}, and this file computes distributions of {POINTS:,} losses."
        )
    losses = 2 * max(total / 2 + 6 * math.sqrt(total), one)
    step = math.sqrt(variance(1) / sum(n for *_, n in steps))
    finest = max(step / 8, losses / 500_000, 1e-4 / 1024)
    return 1e-4 * 2.0 ** min(0, math.floor(math.log2(finest / 1e-4)))


def leaves(event: dp.DpEvent, count: int = 1) -> Iterator[tuple[dp.DpEvent, int]]:
    """The events that hold no composition, and how often each runs."""
    match event:
        case dp.SelfComposedDpEvent(event=part, count=runs):
            yield from leaves(part, count * runs)
        case dp.ComposedDpEvent(events=parts):
            for part in parts:
                yield from leaves(part, count)
        case _:
            yield event, count

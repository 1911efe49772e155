# SPDX-License-Identifier: Apache-2.0
"""The events of dp-accounting that a privacy card describes.

A run is its queries before the first step and the steps that ran, each with its own multiplier
and, where batches are sampled, its rate.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import dp_accounting as dp
import numpy as np

from dpjax.verify.correlated import Unreadable, epoch, is_amplified

# PLD convolves once for each different step. So more than 64 are rounded to 64 that cost no less,
# here as in dpjax, which rounds the steps of all runs together.
LEVELS = 64
BARE = 1e-100  # a smaller multiplier hides nothing: its square underflows


def event_of(card: dict[str, Any], *, halve: bool, rounded: bool = False) -> dp.DpEvent:
    """The privacy event that a card describes: earlier runs, and the planned steps that ran.

    ``halve``: dp-accounting's RDP does not double the sensitivity for replace-one neighbours,
    so the noise multiplier is halved instead. ``rounded``: `at_levels`.
    """
    mechanism = card["mechanism"]
    if card["steps"] and math.inf in map(float, mechanism["clipping"]["bounds"]):
        return dp.NonPrivateDpEvent()
    runs = [(spent, each_multiplier(spent)) for spent in mechanism["before"]]
    runs.append((mechanism, each_multiplier(mechanism)[: card["steps"]]))
    events = [spent_event(*run, halve, rounded) for run in runs]
    # dp-accounting divides by the square of a multiplier where batches have a fixed size.
    noise = [z for spent, each in runs for z in (*each, *map(float, spent["preparation"]))]
    if min(noise, default=math.inf) <= BARE:
        return dp.NonPrivateDpEvent()
    return dp.ComposedDpEvent(events)


def each_multiplier(spent: dict[str, Any]) -> list[float]:
    """The noise multiplier of each step; "inf" is infinity."""
    return [float(z) for z, steps in spent["multiplier_and_steps"] for _ in range(steps)]


def spent_event(
    spent: dict[str, Any], multipliers: list[float], halve: bool, rounded: bool
) -> dp.DpEvent:
    """The event of one run: its queries before the first step, and its steps."""
    if spent["projections"] is not None:
        raise Unreadable(
            "norms were estimated from random projections. dp-accounting has no such event, so "
            "nothing is recomputed: dpjax.accounting alone accounts for this card."
        )
    sampling, half = spent["sampling"], 2 if halve else 1
    queries = [gaussian(float(z) / half) for z in spent["preparation"]]
    each = [z / half for z in multipliers]
    rates = [sampling["batch_size"] / sampling["examples"]] * len(each)
    if sampling["name"] == "curriculum" and not sampling["public"]:
        return dp.NonPrivateDpEvent()
    if spent["noise"] is not None and not is_amplified(spent["noise"], sampling):
        # The noise hides all steps of an example together.
        return dp.ComposedDpEvent([*queries, *map(gaussian, each[:1])])
    if (steps := epoch(sampling)) > 1:  # one batch an epoch, at an unknown place
        each = [min(each[i : i + steps]) for i in range(0, len(each), steps)]
        rates = [steps * rate for rate in rates[: len(each)]]  # of the part whose turn it is
    elif sampling["name"] == "scored":  # the largest rate of any bin; the last row stays
        rows = [rate for rate, steps in sampling["rates"] for _ in range(steps)]
        rates = (rows + rows[-1:] * len(each))[: len(each)]
    pairs = Counter(zip(rates, each, strict=False))
    if rounded and sampling["name"] in ("poisson", "scored", "cyclic_poisson"):
        pairs = at_levels(pairs)
    steps = [
        dp.SelfComposedDpEvent(step_event(sampling, rate, z), n)
        for (rate, z), n in pairs.items()
        if rate > 0
    ]
    return dp.ComposedDpEvent([*queries, *steps])


def at_levels(pairs: Counter[tuple[float, float]]) -> Counter[tuple[float, float]]:
    """At most 64 sampled steps that cost no less: rates rounded up, multipliers down.

    The group of steps whose rounding costs the most is cut in two, between rates or multipliers,
    until there are 64.
    """
    sampled = sorted((q, z) for q, z in pairs if 0 < q < 1 and 0 < z < math.inf)
    if len(sampled) <= LEVELS:
        return pairs
    groups = [np.array([(q, z, pairs[q, z]) for q, z in sampled])]
    cuts = [best_cut(groups[0])]
    while len(groups) < LEVELS:
        place = max(range(len(cuts)), key=lambda number: cuts[number][0])
        if not (halves := cuts[place][1]):
            break
        groups[place : place + 1] = halves
        cuts[place : place + 1] = map(best_cut, halves)
    found = Counter({pair: pairs[pair] for pair in pairs.keys() - set(sampled)})
    for steps in groups:
        q, z, count = steps.T
        found[float(q.max()), float(z.min())] += int(count.sum())
    return found


def best_cut(steps: np.ndarray) -> tuple[float, list[np.ndarray]]:
    """The two groups that rounded steps cost the least in, after what that saves."""

    def costs(steps: np.ndarray) -> np.ndarray:
        q, z = np.maximum.accumulate(steps[:, 0]), np.minimum.accumulate(steps[:, 1])
        return np.cumsum(steps[:, 2]) * q**2 * np.expm1(np.minimum(z**-2, 700))

    found: tuple[float, list[np.ndarray]] = 0.0, []
    for column in (0, 1):
        order = steps[np.argsort(steps[:, column], kind="stable")]
        left, right = costs(order), costs(order[::-1])[::-1]
        saved = left[-1] - left[:-1] - right[1:]
        if len(saved) and saved.max() > found[0]:
            cut = int(saved.argmax()) + 1
            found = float(saved.max()), [order[:cut], order[cut:]]
    return found


def gaussian(multiplier: float) -> dp.DpEvent:
    """A sum with noise; with infinite noise it releases nothing."""
    # dp-accounting takes the logarithm of 0 from 1e8 on, and less noise costs no less.
    return dp.NoOpDpEvent() if math.isinf(multiplier) else dp.GaussianDpEvent(min(multiplier, 1e7))


def step_event(sampling: dict[str, Any], rate: float, multiplier: float) -> dp.DpEvent:
    """One step, as this sampler's claim allows it to be counted."""
    noise = gaussian(multiplier)
    if math.isinf(multiplier):
        return noise
    if sampling["name"] in ("poisson", "scored", "cyclic_poisson") and rate < 1:
        return dp.PoissonSampledDpEvent(rate, noise)
    if sampling["name"] == "fixed":
        return dp.SampledWithoutReplacementDpEvent(
            sampling["examples"], sampling["batch_size"], noise
        )
    return noise

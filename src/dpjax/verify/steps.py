# SPDX-License-Identifier: Apache-2.0
"""The noisy sums that a card describes: queries before the first step, and the steps that ran."""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

import numpy as np

from dpjax.verify._matrices import is_amplified
from dpjax.verify.facts import MOST_LEVELS, Card, Number, Run, Unreadable, read

DISTINCT = 16  # multipliers of an epoch of random allocation; more are rounded


class Step(NamedTuple):
    """A sum over a sample of the data, with Gaussian noise."""

    multiplier: float
    rate: float = 1.0
    subset: tuple[int, int] | None = None
    """The sizes of the data and of a batch, if all batches have one size."""
    bins: int = 0
    epoch: tuple[tuple[float, int], ...] = ()
    """Of an epoch of random allocation: how many of its bins ran with which multipliers."""

    @property
    def is_sampled(self) -> bool:
        """Whether it is more than a Gaussian on all the data."""
        return self.rate < 1 or self.subset is not None or bool(self.epoch)


def steps_of(card: Card) -> Counter[Step] | None:
    """What the runs of a card released, at its levels; None if any of it had no noise."""
    before, plan, ran = card.mechanism.before, planned(card.mechanism), first_steps(card)
    runs = (*before, card.mechanism)
    bounds = read(list[Number], card.mechanism.clipping.get("bounds"), "clipping.bounds")
    if card.steps and math.inf in bounds:
        return None
    used = np.concatenate([ran, *map(planned, before)])[:, 0]
    bare = any(z == 0 for z in (*used, *(z for run in runs for z in run.preparation)))
    if bare or any(run.sampling.event == "none" for run in runs):
        return None
    earlier = sum((steps_of_run(run, planned(run)) for run in before), Counter[Step]())
    queries = Counter(Step(z) for run in runs for z in run.preparation)
    steps, all_planned = (earlier + steps_of_run(card.mechanism, pairs) for pairs in (ran, plan))
    noisy = queries + at_levels(card, steps, all_planned)
    # Infinite noise, and a rate of 0, release nothing.
    return Counter({s: n for s, n in noisy.items() if s.rate > 0 and s.multiplier < math.inf})


def planned(run: Run) -> np.ndarray:
    """Pairs of a multiplier and how many steps in turn have it, ``[pairs, 2]``."""
    return np.array(run.multiplier_and_steps, np.float64).reshape(-1, 2)


def first_steps(card: Card) -> np.ndarray:
    """The pairs of the steps that ran, which are the first ones of the plan."""
    pairs = planned(card.mechanism)
    pairs[:, 1] = np.diff(np.minimum(np.cumsum(pairs[:, 1]), card.steps), prepend=0)
    return pairs[pairs[:, 1] > 0]


def steps_of_run(run: Run, pairs: np.ndarray) -> Counter[Step]:
    """The steps of one run with these multipliers."""
    sampling, (multipliers, counts) = run.sampling, pairs.T
    if run.projections is not None:
        raise Unreadable("norms were estimated by random projections: nothing is recomputed.")
    if run.noise is not None and not is_amplified(run.noise, sampling):
        # The noise hides all steps of an example together.
        return Counter(map(Step, multipliers[:1].tolist()))
    if sampling.event == "allocation":
        return epochs(np.repeat(multipliers, counts.astype(int)), sampling.cycle)
    if sampling.cycle > 1 or len(sampling.rates) > 1:  # places of steps count
        multipliers = np.repeat(multipliers, counts.astype(int))
        # One batch a cycle, at an unknown place: the least noise is counted.
        starts = np.arange(0, len(multipliers), sampling.cycle)
        multipliers = np.minimum.reduceat(multipliers, starts) if len(starts) else multipliers
        counts = np.ones(len(multipliers))
    rates, lasts = np.array(sampling.rates).T
    rows = np.searchsorted(np.cumsum(lasts), np.arange(len(multipliers)), side="right")
    rates = rates[np.minimum(rows, len(rates) - 1)]  # the last rate stays
    subset = (sampling.examples, int(sampling.batch_size)) if sampling.event == "subset" else None
    steps: Counter[Step] = Counter()
    for multiplier, rate, count in zip(multipliers.tolist(), rates.tolist(), counts, strict=True):
        steps[Step(multiplier, rate, subset)] += int(count)
    return steps


def epochs(multipliers: np.ndarray, bins: int) -> Counter[Step]:
    """Epochs in which an example is in one of their steps, drawn at random."""
    steps: Counter[Step] = Counter()
    for start in range(0, len(multipliers), bins):
        rows = sorted(z for z in multipliers[start : start + bins].tolist() if z < math.inf)
        if len(set(rows)) > DISTINCT:  # each sixteenth counts with its least noise
            share = math.ceil(len(rows) / DISTINCT)
            rows = [rows[place - place % share] for place in range(len(rows))]
        if rows:
            steps[Step(rows[0], bins=bins, epoch=tuple(sorted(Counter(rows).items())))] += 1
    return steps


def at_levels(card: Card, steps: Counter[Step], plan: Counter[Step]) -> Counter[Step]:
    """The steps at the levels of the card: multipliers down and rates up, so they cost no less."""
    sampled = [step for step in plan if is_rounded(step)]
    if card.levels is None and len(sampled) > MOST_LEVELS:
        raise Unreadable(f"the card plans over {MOST_LEVELS} different steps and names no levels.")
    if card.levels is None:
        return steps
    count, planned_rates = card.levels.levels, {step.rate for step in sampled}
    multipliers = grid({step.multiplier for step in sampled}, card.levels.smallest, count)
    rates = grid(planned_rates, min(planned_rates, default=1.0), count)
    rounded: Counter[Step] = Counter()
    for step, n in steps.items():
        if is_rounded(step):
            above = np.searchsorted(rates, step.rate)
            below = np.searchsorted(multipliers, step.multiplier, side="right") - 1
            multiplier = multipliers[below] if below >= 0 else step.multiplier
            step = step._replace(multiplier=float(multiplier), rate=float(rates[above]))
        rounded[step] += n
    return rounded


def is_rounded(step: Step) -> bool:
    """Whether it is a Poisson sample that releases anything."""
    return step.subset is None and 0 < step.rate < 1 and step.multiplier < math.inf


def grid(values: set[float], smallest: float, count: int) -> np.ndarray:
    """Geometric levels from the smallest to the largest value; the values, if few."""
    if len(values) <= count:
        return np.array(sorted(values))
    return np.geomspace(smallest, max(values), count)

# SPDX-License-Identifier: Apache-2.0
"""The noisy sums that a card describes: queries before the first step, and the steps that ran."""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

import numpy as np

from dpjax.verify._matrices import is_amplified
from dpjax.verify.facts import MOST_LEVELS, Card, Number, Run, Unreadable, read

# The most different multipliers in an epoch of random allocation; more are rounded.
DISTINCT = 16


class Step(NamedTuple):
    """A sum over a sample of the data, with Gaussian noise."""

    multiplier: float
    rate: float = 1.0
    subset: tuple[int, int] | None = None
    """The sizes of the data and of a batch, if all batches have one size."""
    bins: int = 0
    epoch: tuple[tuple[float, int], ...] = ()
    """The multipliers of an epoch of random allocation, each with the number of its bins."""

    @property
    def is_sampled(self) -> bool:
        """Whether it is more than a Gaussian on all the data."""
        return self.rate < 1 or self.subset is not None or bool(self.epoch)

    @property
    def releases(self) -> bool:
        """Whether anything about an example can be in it."""
        return self.rate > 0 and self.multiplier < math.inf


def steps_of(card: Card) -> Counter[Step] | None:
    """The noisy sums that the runs of a card released, rounded as in `at_levels`.

    None if no noise hides an example in a release: in a sum, or in the choice of batches.
    """
    before = card.mechanism.before
    runs = (*before, card.mechanism)
    # The card's clipping was read as a dictionary of any values, so its bounds are checked here.
    bounds = read(list[Number], card.mechanism.clipping.get("bounds"), "clipping.bounds")
    # One example can move a sum by any amount. An earlier run with such a bound was recorded
    # without noise, which is found below.
    if card.steps and math.inf in bounds:
        return None
    # The choice of batches is a release, and has no noise.
    if any(run.sampling.event == "none" for run in runs):
        return None
    # A step or a query without noise releases the sum itself. An earlier run is recorded with only
    # the steps that ran, and this run with its whole plan.
    ran = first_steps(card)
    used = np.concatenate([ran, *map(planned, before)])[:, 0]  # multipliers
    queries = [multiplier for run in runs for multiplier in run.preparation]
    if 0 in used or 0 in queries:
        return None
    earlier: Counter[Step] = Counter()
    for run in before:
        earlier += steps_of_run(run, planned(run))
    steps = earlier + steps_of_run(card.mechanism, ran)
    # The levels of a card follow from its plan, also if fewer steps ran.
    all_planned = earlier + steps_of_run(card.mechanism, planned(card.mechanism))
    # A query is on all the data, so it has the rate 1.
    noisy = Counter(map(Step, queries)) + at_levels(card, steps, all_planned)
    # A sum with infinite noise or at rate 0 releases nothing.
    return Counter({step: count for step, count in noisy.items() if step.releases})


def planned(run: Run) -> np.ndarray:
    """Pairs of a multiplier and the number of steps in turn that have it, ``[pairs, 2]``."""
    return np.array(run.multiplier_and_steps, np.float64).reshape(-1, 2)


def first_steps(card: Card) -> np.ndarray:
    """The pairs of the steps that ran, which are the first ones of the plan."""
    pairs = planned(card.mechanism)
    ends = np.minimum(np.cumsum(pairs[:, 1]), card.steps)
    pairs[:, 1] = np.diff(ends, prepend=0)
    return pairs[pairs[:, 1] > 0]


def steps_of_run(run: Run, pairs: np.ndarray) -> Counter[Step]:
    """The steps of one run, with these pairs of a multiplier and a count, ``[pairs, 2]``."""
    sampling = run.sampling
    multipliers, counts = pairs.T
    if run.projections is not None:
        raise Unreadable("norms were estimated by random projections: nothing is recomputed.")
    if run.noise is not None and not is_amplified(run.noise, sampling):
        # Correlated noise hides all steps of an example together, as one sum. All steps have one
        # multiplier, because `require_hidden` refuses several. A run without steps has no sum.
        return Counter(map(Step, multipliers[:1].tolist()))
    if sampling.event == "allocation":
        return epochs(np.repeat(multipliers, counts.astype(int)), sampling.cycle)
    if sampling.cycle > 1 or len(sampling.rates) > 1:
        # An example is in one step of a cycle, and it is unknown in which. So a cycle counts as one
        # step with its least multiplier. Each cycle is listed by itself, because its rate depends
        # on its number.
        multipliers = np.repeat(multipliers, counts.astype(int))
        starts = np.arange(0, len(multipliers), sampling.cycle)
        if len(starts):  # a run without steps has no cycles
            multipliers = np.minimum.reduceat(multipliers, starts)  # [cycles]
        counts = np.ones(len(multipliers))
    # The card's rates are pairs, of a rate and the number of cycles in turn that have it. With only
    # one rate, all entries of `multipliers` have it.
    rates, lengths = np.array(sampling.rates).T
    rate_indices = np.searchsorted(np.cumsum(lengths), np.arange(len(multipliers)), side="right")
    rates = rates[np.minimum(rate_indices, len(rates) - 1)]  # later cycles have the last rate
    subset = None
    if sampling.event == "subset":
        subset = sampling.examples, int(sampling.batch_size)
    steps: Counter[Step] = Counter()
    for multiplier, rate, count in zip(multipliers.tolist(), rates.tolist(), counts, strict=True):
        steps[Step(multiplier, rate, subset)] += int(count)
    return steps


def epochs(multipliers: np.ndarray, bins: int) -> Counter[Step]:
    """Epochs of random allocation: ``bins`` steps, and an example is in one of them at random.

    ``multipliers`` has one for every step, in order.
    """
    steps: Counter[Step] = Counter()
    for start in range(0, len(multipliers), bins):
        of_epoch = multipliers[start : start + bins]
        # A step with infinite noise releases nothing.
        finite = np.sort(of_epoch[of_epoch < math.inf]).tolist()
        if len(set(finite)) > DISTINCT:
            # Each sixteenth of the sorted multipliers counts with its least one.
            share = math.ceil(len(finite) / DISTINCT)
            finite = [finite[place - place % share] for place in range(len(finite))]
        if finite:
            counts = tuple(sorted(Counter(finite).items()))
            # An epoch costs no more than one step with its least noise and without sampling.
            steps[Step(finite[0], bins=bins, epoch=counts)] += 1
    return steps


def at_levels(card: Card, steps: Counter[Step], plan: Counter[Step]) -> Counter[Step]:
    """Rounds the multipliers of sampled steps down, and their rates up, to the card's levels.

    Rounded steps cost no less. dpjax rounds where the plan has more different steps than an
    accountant can take. ``plan`` are all planned steps, from which the levels follow, and ``steps``
    are the steps that ran.
    """
    sampled = [step for step in plan if is_rounded(step)]
    if card.levels is None and len(sampled) > MOST_LEVELS:
        raise Unreadable(f"the card plans over {MOST_LEVELS} different steps and names no levels.")
    if card.levels is None:
        return steps
    count = card.levels.levels
    planned_rates = {step.rate for step in sampled}
    planned_multipliers = {step.multiplier for step in sampled}
    # The grids begin at the plan's least rate, and at the least multiplier, which the card states.
    # Without sampled steps both are empty, and no step reads them.
    rates = grid(planned_rates, min(planned_rates, default=1.0), count)
    multipliers = grid(planned_multipliers, card.levels.smallest, count)
    rounded: Counter[Step] = Counter()
    for step, times in steps.items():
        if is_rounded(step):
            above = np.searchsorted(rates, step.rate)
            step = step._replace(rate=float(rates[above]))
            below = np.searchsorted(multipliers, step.multiplier, side="right") - 1
            if below >= 0:  # a multiplier below all levels stays
                step = step._replace(multiplier=float(multipliers[below]))
        rounded[step] += times
    return rounded


def is_rounded(step: Step) -> bool:
    """Whether it is a Poisson sample that releases anything."""
    return step.subset is None and step.rate < 1 and step.releases


def grid(values: set[float], smallest: float, count: int) -> np.ndarray:
    """Geometric levels from the smallest to the largest value; the values, if few."""
    if len(values) <= count:
        return np.array(sorted(values))
    return np.geomspace(smallest, max(values), count)

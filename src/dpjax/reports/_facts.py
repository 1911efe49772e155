# SPDX-License-Identifier: Apache-2.0
"""The facts of a statement: unit, neighbours, sampler, clipping, noise, earlier runs and steps.

Each function returns a row of the table. Unit and neighbours come first, because an epsilon means
nothing without them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from dpjax._rounding import upwards
from dpjax.ledger import Ledger
from dpjax.mechanism import Mechanism, Spent
from dpjax.reports._claim import Claim
from dpjax.reports._document import Row, row
from dpjax.types import Neighbours

_NEIGHBOURS = {
    Neighbours.ADD_OR_REMOVE: "data sets that differ by one {unit} added or removed",
    Neighbours.ZERO_OUT: "data sets in which one {unit} is replaced by an empty one",
    Neighbours.REPLACE_ONE: "data sets in which one {unit} is replaced by any other",
}
_FEW = 8  # groups that are listed one by one


def facts_of(claim: Claim, ledger: Ledger | None, scaled_by: str | None) -> list[Row]:
    """The facts of a claim; ``scaled_by`` as for `dpjax.statement`."""
    mechanism = claim.mechanism
    relation = mechanism.relation.value
    rows = [
        row("unit", _unit(mechanism)),
        row("neighbours", f"{relation}: {neighbours_of(mechanism)}"),
        _sampler(mechanism, len(claim.ran)),
        _clipping(mechanism),
        _noise(mechanism, claim.ran, scaled_by),
    ]
    if mechanism.preparation:
        rows.append(
            row(
                "preparation",
                "Gaussian queries on all the data before the first step, with",
                f"multiplier {_each(mechanism.preparation)}",
            )
        )
    rows += [_before(spent) for spent in mechanism.before]
    rows.append(_steps(mechanism, len(claim.ran), ledger))
    rows.append(row("delta", upwards(claim.delta, ".3g")))
    return rows


def _unit(mechanism: Mechanism) -> str:
    """Whose data are protected, and how the rows of one unit are known."""
    unit = f"one {mechanism.unit}"
    if mechanism.of_clients and mechanism.unit != "client":
        return f"{unit}: a client with all of its examples"
    if mechanism.sampling.unit != "example":
        return f"{unit}: all rows of one owner"
    return unit


def neighbours_of(mechanism: Mechanism) -> str:
    """The two data sets that the guarantee compares, in words."""
    return _NEIGHBOURS[mechanism.relation].format(unit=mechanism.unit)


def range_of(values: np.ndarray) -> str:
    """The values of a schedule in words: the first and last, and the range if it is wider."""
    if not len(values):
        return "none"
    first, last = values[[0, -1]]
    low = values.min()
    high = values.max()
    if low == high:
        return f"{first:.4g}"
    words = f"{first:.4g} to {last:.4g}"
    if not {low, high} <= {first, last}:
        words += f", between {low:.4g} and {high:.4g}"
    return f"{words} ({len(np.unique(values))} values, by a schedule)"


def _sampler(mechanism: Mechanism, steps: int) -> Row:
    """How batches are drawn, and at which rate; ``steps`` is the number of steps that count."""
    sampling = mechanism.sampling
    # A cycle is this number of steps in turn, and an example is in at most one batch of it.
    cycle = sampling.facts.get("cycle", 1)
    size = mechanism.batch_size
    if sampling.random_bins:
        # Each example is in one of `cycle` batches, at random. They can be larger than batch_size,
        # by which sums are divided.
        size = sampling.examples / cycle
    rate = size / sampling.examples
    lines = [mechanism.claim]  # the sampler's own words
    if sampling.rates_by_bin:  # examples are binned by a public score, and each bin has a rate
        rate_in_words = "rates go by bins"
        lines.append(f"counted: rate {range_of(_largest_rates(mechanism, steps))}")
    elif sampling.in_parts:  # a step samples one of `cycle` parts of the data, in turn
        rate_in_words = f"rate {cycle * rate:.3g} of a part, each {cycle} steps"
    else:
        rate_in_words = f"rate {rate:.3g}"
    drawn = f"{size:g} of {sampling.examples:,} {mechanism.unit}s a step ({rate_in_words})"
    return row("sampler", f"{sampling.name}: {drawn}", *lines)


def _largest_rates(mechanism: Mechanism, steps: int) -> np.ndarray:
    """The largest rate of the bins, which is accounted, at each step that counts, ``[steps]``."""
    rates, counts = zip(*mechanism.sampling.facts["rates"], strict=True)
    planned = np.repeat(np.asarray(rates), np.asarray(counts))
    last = len(planned) - 1  # later steps have the last rate
    return planned[np.minimum(np.arange(steps), last)]


def _clipping(mechanism: Mechanism) -> Row:
    """The rule, and how far one unit moves the sum."""
    rule = mechanism.clipping
    groups = f"{rule.partition.size} group"
    if rule.partition.size > 1:
        groups += "s"
    # Round to 12 digits first: the root of a sum of squares can be a last bit above its value.
    moved = upwards(float(f"{rule.sensitivity:.12g}"))
    how_far = "at most" if rule.projections is None else "about"
    if mechanism.adaptive is not None:
        moved += " at first"
    if mechanism.relation is Neighbours.REPLACE_ONE:
        moved += ", a replacement by twice that"
    lines = [f"{rule.name}, {groups}: one {mechanism.unit} moves the sum by {how_far} {moved}"]
    if rule.projections is not None:
        lines += [
            f"norms are estimated from {rule.projections} random projections: it",
            "may be more, and epsilon, by pld alone, is over that chance, for",
            "exact arithmetic: roundings within an example are bounded in part",
        ]
    if mechanism.adaptive is not None:
        lines += [
            f"adapted: it follows the length that {mechanism.adaptive.target:g} of the norms are "
            "below,",
            f"by a noised count of {mechanism.unit}s at every step",
        ]
    return row("clipping", *lines)


def _noise(mechanism: Mechanism, ran: np.ndarray, scaled_by: str | None) -> Row:
    """The noise of steps with these multipliers: on the sum, then on the mean."""
    # With an adapted bound a step releases a count too, the number of norms below the bound. Its
    # multiplier in `ran` covers sum and count together, so the sum has more noise.
    on_sum = mechanism.multipliers_on_sum(ran)
    lines = [_multiplier(mechanism, ran, on_sum)]
    if mechanism.noise is not None:
        lines.append(_correlation(mechanism))
    by_group = mechanism.gradient_multiplier
    if isinstance(by_group, Sequence):  # a multiplier for each group
        lines += [
            f"by group: multiplier {_listed(by_group)} x the group's own bound;",
            f"{range_of(on_sum)} is what these are worth together",
        ]
    # No standard deviation can be stated without steps or with an infinite bound.
    if len(ran) and not math.isinf(mechanism.clipping.sensitivity):
        lines.append(_on_mean(mechanism, on_sum))
        if scaled_by is not None:
            lines.append(f"before {scaled_by}, which scales sum and noise alike")
    return row("noise", *lines)


def _multiplier(mechanism: Mechanism, ran: np.ndarray, on_sum: np.ndarray) -> str:
    """The multipliers of the steps that ran, and to what they are relative."""
    if mechanism.adaptive is not None:
        return (
            f"multiplier {range_of(ran)} in all: {range_of(on_sum)} on the sum, "
            f"{mechanism.count_multiplier:.4g} on the count"
        )
    if isinstance(mechanism.gradient_multiplier, Sequence):
        # Each multiplier is relative to its group's bound: they share no sensitivity.
        return f"multiplier {range_of(ran)} in all, on the sum"
    return f"multiplier {range_of(ran)} x sensitivity, on the sum"


def _correlation(mechanism: Mechanism) -> str:
    """The strategy of correlated noise, and the factor that it puts on the noise."""
    strategy = mechanism.noise
    assert strategy is not None
    covered = "each participation" if mechanism.is_amplified else "the whole run"
    return (
        f"correlated over the steps: {strategy.name}, "
        f"x {mechanism.strategy_sensitivity:.4g} for {covered} of one {mechanism.unit}"
    )


def _on_mean(mechanism: Mechanism, on_sum: np.ndarray) -> str:
    """The standard deviation of the noise on the mean, from the multipliers on the sum."""
    if isinstance(mechanism.gradient_multiplier, Sequence):
        # Multipliers by group are the same at all steps.
        deviation = f"{_listed(mechanism.deviations_on_mean(step=0))} by group,"
    else:
        # How far one unit moves the sum, or the run where noise is correlated.
        moved = mechanism.clipping.sensitivity * mechanism.strategy_sensitivity
        deviation = range_of(on_sum * moved / mechanism.batch_size)
    words = f"= standard deviation {deviation} on the mean"
    if mechanism.adaptive is not None:
        words += ", at first"
    if mechanism.noise is not None:
        words += ", before it is correlated"
    return words


def _before(spent: Spent) -> Row:
    """The steps, sampler and noise of an earlier run."""
    multipliers = np.array([multiplier for multiplier, _ in spent.runs])
    noise = range_of(multipliers)
    if spent.noise is not None:
        noise += ", correlated over the steps"
    if spent.projections is not None:
        noise += f", norms from {spent.projections} projections"
    if spent.preparation:
        noise += f"; queries before it with multiplier {_each(spent.preparation)}"
    drawn = f"{spent.sampling.name}, {spent.sampling.batch_size:g} {spent.unit}s a step"
    lines = [
        f"{spent.steps:,} steps of an earlier run on these data count too:",
        f"{drawn}, multiplier {noise}",
    ]
    if spent.supplied:
        lines.append("its key was supplied")
    return row("before", *lines)


def _steps(mechanism: Mechanism, counted: int, ledger: Ledger | None) -> Row:
    """How many steps ran, were planned and count; without a ledger all planned ones."""
    taken = f"{mechanism.steps:,}"
    if ledger is not None:
        taken = f"{ledger.steps:,} (of {mechanism.steps:,} planned)"
    lines = [taken]
    if ledger is not None and ledger.chosen:
        lines.append(f"results chose where to stop, so {counted:,} that could run count")
    elif counted < mechanism.steps:
        lines.append("if results chose where to stop, all planned steps count")
    return row("steps", *lines)


def _each(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)


def _listed(values: Sequence[float]) -> str:
    """One number for each group, or the smallest and largest of many."""
    if len(values) <= _FEW:
        return _each(values)
    return f"{min(values):.4g} to {max(values):.4g} (of {len(values)} groups)"

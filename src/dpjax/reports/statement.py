# SPDX-License-Identifier: Apache-2.0
"""The privacy statement: who is protected, how, how much, and from what not.

Every number comes from the mechanism and the ledger, except delta.
"""

from __future__ import annotations

import contextlib
import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dpjax import accounting
from dpjax._versions import version
from dpjax.accounting.rounding import three_digits, upwards
from dpjax.ledger import Ledger
from dpjax.mechanism import Mechanism, Spent
from dpjax.mechanism.correlated import is_amplified
from dpjax.mechanism.multipliers import growth
from dpjax.reports.card import Claim, claim_of, not_covered
from dpjax.reports.page import statement_html
from dpjax.reports.references import references
from dpjax.types import HeldOut, Neighbours

_NEIGHBOURS = {
    Neighbours.ADD_OR_REMOVE: "data sets that differ by one {unit} added or removed",
    Neighbours.ZERO_OUT: "data sets in which one {unit} is replaced by an empty one",
    Neighbours.REPLACE_ONE: "data sets in which one {unit} is replaced by any other",
}

_FEW = 8  # groups that are listed one by one
_NOT_COVERED = """\
  - the choice of this run among several, also by public data: see accounting.select_best
  - choosing hyper-parameters or a checkpoint by looking at the private data
  - statistics of the data outside this run (means, class weights, vocabularies), unless named above
  - per-step info (losses, norms, clipped fractions): computed before the noise
  - {together}
  - models or data in which {unit}s see each other (batch statistics)
  - attacks on float32 arithmetic or on the pseudo-random generator"""

SUPPLIED = (
    "The key was supplied: epsilon holds against those who do not know the key, for one run per "
    "key."
)

_TOGETHER = {
    "example": "examples that belong together: the unit is one example, not one person",
    "person": "{unit}s that belong together, as in a family, and a {unit} who is there twice",
    "client": "anyone who sees one client's update: noise is added to the sum of updates\n"
    "  - clients that belong together: the unit is one client, with all of its examples",
}


class Statement(str):
    """The text of a statement; a notebook shows it as HTML."""

    # A terminal shows its lines, not one line with escapes.
    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f"<p><strong>Privacy statement</strong></p>\n{statement_html(self)}"


def statement(
    mechanism: Mechanism,
    delta: float | None = None,
    *,
    ledger: Ledger | None = None,
    supplied: bool = False,
    methods: Sequence[str] | None = None,
    scaled_by: str | None = None,
    held_out: HeldOut | None = None,
) -> Statement:
    """The privacy statement of a computation, in words.

    Args:
      mechanism: The computation.
      delta: The delta at which epsilon is stated; by default the one of ``mechanism.target``.
      ledger: The steps that ran; by default all planned steps.
      supplied: Whether the caller supplies the key of the run; a ledger knows of its own.
      methods: The `dpjax.accounting` methods that state epsilon; by default all.
      scaled_by: What multiplies sum and noise alike beside the mechanism, for example
        ``"a bound schedule"`` of `dpjax.dpsgd`. `dpjax.fit` gives it for the run in a folder.
      held_out: The units that were held out for a test, as `dpjax.data.Dataset.held_out` has them.
        They come first among what is not covered.

    Returns:
      A text to print, and to publish with the model; a notebook shows it as a table.

    Example:
      >>> import dpjax
      >>> mechanism = dpjax.Mechanism(
      ...     sampling=dpjax.sampling.poisson(examples=1000, batch_size=10),
      ...     clipping=dpjax.clipping.flat(bound=1.0),
      ...     noise_multiplier=1.0,
      ...     steps=100,
      ... )
      >>> print(statement(mechanism, delta=1e-5))  # doctest: +ELLIPSIS
      Privacy statement
      ...
        unit          one example
      ...
    """
    claim, unit = claim_of("statement", mechanism, delta, ledger, supplied, methods), mechanism.unit
    together = _TOGETHER.get(unit, _TOGETHER["person"]).format(unit=unit)
    lines = [
        "Privacy statement",
        "",
        *_verdict(claim),
        "",
        *_facts(claim, ledger, scaled_by),
        "",
        *_figures(claim),
        "",
        *_methods_section(claim),
        "Not covered",
        *(f"  - {words}" for words in not_covered(held_out, unit)),
        _NOT_COVERED.format(unit=unit, together=together),
        "",
        "References",
        *references(mechanism, claim.epsilons),
    ]
    return Statement("\n".join(lines))


def _verdict(claim: Claim) -> Iterator[str]:
    unit, (private, method) = claim.mechanism.unit, _guarantee(claim)
    if private:
        yield f"  {private}, as proved by {method}."
    elif claim.not_private:
        yield "  This computation is NOT differentially private (epsilon is infinite)."
        yield f"  {claim.not_private}"
    else:
        yield "  This computation is NOT PROVED to be differentially private."
        yield f"  {_why_unproved(claim.mechanism, method)}"
    if claim.supplied:
        yield f"  {SUPPLIED}"
    examples = claim.mechanism.sampling.examples
    # Publishing one record at random satisfies delta = 1/n, so such a delta promises nothing.
    if claim.delta * examples >= 1:
        yield (
            f"  delta={claim.delta:g} is not below 1/{unit}s={1 / examples:.2g}: publishing one "
            f"{unit} outright would satisfy it. Choose a smaller delta."
        )


def _guarantee(claim: Claim) -> tuple[str, str]:
    """What is proved, in words or empty, and by which accountant."""
    epsilon, method = claim.proven
    pair = f"({three_digits(epsilon)}, {upwards(claim.delta, '.3g')})"
    return f"{pair}-differentially private" * math.isfinite(epsilon), method.upper()


def _why_unproved(mechanism: Mechanism, method: str) -> str:
    if not method:
        return "No method proves a number for the whole: each method refuses a part of it."
    if any(run.projections is not None for run in (mechanism.clipping, *mechanism.before)):
        return (
            "Norms are estimated, and the chance that one is far too small is above delta.\n"
            "  Take more random projections, or more noise."
        )
    return "No method has a finite number for it. Usually the noise is far too small."


def _facts(claim: Claim, ledger: Ledger | None, scaled_by: str | None) -> Iterator[str]:
    mechanism, ran = claim.mechanism, claim.ran
    neighbours, unit = mechanism.relation, mechanism.unit
    # First who is protected: without unit and neighbours an epsilon says nothing.
    yield f"  unit          one {unit}"
    yield f"  neighbours    {neighbours.value}: {_NEIGHBOURS[neighbours].format(unit=unit)}"
    yield from _sampler(mechanism, len(ran))
    yield from _clipping(mechanism)
    yield from _noise(mechanism, ran, scaled_by)
    if mechanism.preparation:
        yield "  preparation   Gaussian queries on all the data before the first step, with"
        yield f"                multiplier {_each(mechanism.preparation)}"
    for spent in mechanism.before:
        yield from _before(spent)
    planned = "" if ledger is None else f" (of {mechanism.steps:,} planned)"
    yield f"  steps         {mechanism.steps if ledger is None else ledger.steps:,}{planned}"
    if ledger is not None and ledger.chosen:
        yield f"                results chose where to stop, so {len(ran):,} that could run count"
    elif len(ran) < mechanism.steps:
        yield "                if results chose where to stop, all planned steps count"
    yield f"  delta         {upwards(claim.delta, '.3g')}"


def _clipping(mechanism: Mechanism) -> Iterator[str]:
    rule, unit, groups = mechanism.clipping, mechanism.unit, mechanism.clipping.partition.size
    # To 12 digits first: the root of a sum of squares can be a last bit above its value.
    moved = upwards(float(f"{rule.sensitivity:.12g}"))
    replaced = mechanism.relation is Neighbours.REPLACE_ONE
    yield (
        f"  clipping      {rule.name}, {groups} group{'s' * (groups > 1)}: one {unit} "
        f"moves the sum by {'at most' if rule.projections is None else 'about'} "
        f"{moved}{' at first' * bool(mechanism.adaptive)}"
        f"{', a replacement by twice that' * replaced}"
    )
    if rule.projections is not None:
        yield f"                norms are estimated from {rule.projections} random projections: it"
        yield "                may be more, and epsilon, by pld alone, is over that chance, for"
        yield "                exact arithmetic: roundings within an example are bounded in part"
    if mechanism.adaptive is not None:
        share = f"{mechanism.adaptive.target:g} of the norms are below"
        yield f"                adapted: it follows the length that {share},"
        yield f"                by a noised count of {unit}s at every step"


def _before(spent: Spent) -> Iterator[str]:
    noise = _range(np.array([multiplier for multiplier, _ in spent.runs]))
    noise += ", correlated over the steps" * (spent.noise is not None)
    if spent.projections is not None:
        noise += f", norms from {spent.projections} projections"
    if spent.preparation:
        noise += f"; queries before it with multiplier {_each(spent.preparation)}"
    yield f"  before        {spent.steps:,} steps of an earlier run on these data count too:"
    yield (
        f"                {spent.sampling.name}, {spent.sampling.batch_size:g} {spent.unit}s a "
        f"step, multiplier {noise}"
    )
    if spent.supplied:
        yield "                its key was supplied"


def _sampler(mechanism: Mechanism, steps: int) -> Iterator[str]:
    sampling, unit, size = mechanism.sampling, mechanism.unit, mechanism.batch_size
    rows, cycle = sampling.facts.get("rates", ()), sampling.facts.get("cycle", 1)
    if sampling.random_bins:  # sums are divided by batch_size, and bins can be larger
        size = sampling.examples / cycle
    # A cycle whose examples have coins is one of parts of the data.
    in_parts = sampling.facts.get("place") == "coin"
    turn = f" of a part, each {cycle} steps" if in_parts else ""
    rate = f"rate {(cycle if in_parts else 1) * size / sampling.examples:.3g}{turn}"
    by_bins = sampling.name == "scored"
    yield (
        f"  sampler       {sampling.name}: {size:g} of "
        f"{sampling.examples:,} {unit}s a step ({'rates go by bins' if by_bins else rate})"
    )
    yield f"                {mechanism.claim}"
    if by_bins:
        largest = np.repeat(*map(np.asarray, zip(*rows, strict=True)))
        counted = largest[np.minimum(np.arange(steps), len(largest) - 1)]  # the last row stays
        yield f"                counted: rate {_range(counted)}"


def _noise(mechanism: Mechanism, ran: np.ndarray, scaled_by: str | None) -> Iterator[str]:
    """The noise of steps with these multipliers: on the sum, then on the mean."""
    groups = mechanism.gradient_multiplier
    # Each relative to its group's bound, so the sensitivity of the whole has no single multiplier.
    by_group = isinstance(groups, Sequence)
    # An adapted bound's multiplier covers sum and count; the sum alone has more noise than it says.
    on_sum = ran if mechanism.adaptive is None else ran * growth(ran, mechanism.count_multiplier)
    if mechanism.adaptive is None:
        of = "in all" if by_group else "x sensitivity"
        yield f"  noise         multiplier {_range(ran)} {of}, on the sum"
    else:
        yield (
            f"  noise         multiplier {_range(ran)} in all: {_range(on_sum)} on the sum, "
            f"{mechanism.count_multiplier:.4g} on the count"
        )
    if (strategy := mechanism.noise) is not None:
        amplified = is_amplified(strategy, mechanism.sampling)
        covers = "each participation" if amplified else "the whole run"
        yield (
            f"                correlated over the steps: {strategy.name}, "
            f"x {mechanism.strategy_sensitivity:.4g} for {covers} of one {mechanism.unit}"
        )
    if by_group:
        yield f"                by group: multiplier {_listed(groups)} x the group's own bound;"
        yield f"                {_range(on_sum)} is what these are worth together"
    sensitivity = mechanism.clipping.sensitivity
    if len(ran) and not math.isinf(sensitivity):
        moved = sensitivity * mechanism.strategy_sensitivity
        on_mean = _range(on_sum * moved / mechanism.batch_size)
        size = f"{_listed(mechanism.deviations_on_mean(0))} by group," if by_group else on_mean
        start = ", at first" * bool(mechanism.adaptive)
        fresh = ", before it is correlated" * bool(mechanism.noise)
        yield f"                = standard deviation {size} on the mean{start}{fresh}"
        if scaled_by is not None:
            yield f"                before {scaled_by}, which scales sum and noise alike"


def _figures(claim: Claim) -> Iterator[str]:
    # The claim first: the smallest proven one.
    rows = [(accounting.METHODS[method], value) for method, value in claim.epsilons.items()]
    for row, value in sorted(rows, key=lambda pair: (not pair[0].proven, pair[1])):
        yield f"  epsilon       {three_digits(value):>8}   {row.name}: {row.words}"
    if not claim.epsilons:
        yield f"  epsilon       {'none':>8}   no method has a number for this"
    # The papers print the Poisson figure for shuffled batches: a reader can compare with print.
    mechanism = claim.mechanism
    if mechanism.sampling.name in ("shuffled", "curriculum") and mechanism.noise is None:
        steps = accounting.scheduled_gaussian(claim.ran, mechanism.sampling.sampling_rate)
        event = accounting.compose(mechanism.prepared, steps)
        with contextlib.suppress(ValueError):  # earlier runs may leave no figure to compare with
            value = accounting.epsilon(event, claim.delta, "rdp-classic")
            yield (
                f"  as if Poisson {three_digits(value):>8}   rdp-classic: the papers' figure for "
                "such batches. It does not hold for them: nothing proves amplification here."
            )


def _methods_section(claim: Claim) -> Iterator[str]:
    """A paragraph for the methods section of a paper, if there is a guarantee."""
    private, method = _guarantee(claim)
    if not private:
        return
    mechanism, rule, unit = claim.mechanism, claim.mechanism.clipping, claim.mechanism.unit
    drawn = re.sub("poisson|persons", "Poisson", mechanism.sampling.name).replace("_", " ")
    moved = f"sensitivity {rule.sensitivity:.4g}" + " at first" * bool(mechanism.adaptive)
    also = [f"{spent.steps:,} steps of an earlier run" for spent in mechanism.before]
    if mechanism.preparation:
        also.append(f"{len(mechanism.preparation)} Gaussian queries on all the data")
    together = f"Together with {' and '.join(also)} this" if also else "This"
    versions = (f"{name} {version(name)}" for name in ("dpjax", "dp-accounting", "jax"))
    neighbours = _NEIGHBOURS[mechanism.relation].format(unit=unit)
    words = (
        f"We ran {len(claim.ran):,} steps with {drawn} sampling of {mechanism.batch_size:g} of "
        f"{mechanism.sampling.examples:,} {unit}s, per-{unit} clipping ({rule.name}, {moved}) and "
        f"{'correlated ' * bool(mechanism.noise)}Gaussian noise with multiplier "
        f"{_range(claim.ran)}. {together} is {private} for {neighbours} "
        f"({mechanism.relation.value}), by the {method} accountant ({', '.join(versions)})."
        f"{f' {SUPPLIED}' * claim.supplied}"
    )
    indents: Any = {"initial_indent": "  in a paper    ", "subsequent_indent": " " * 16}
    yield from (*textwrap.wrap(words, 100, break_on_hyphens=False, **indents), "")


def _each(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)


def _listed(values: Sequence[float]) -> str:
    """One number for each group, or the smallest and largest of many."""
    if len(values) <= _FEW:
        return _each(values)
    return f"{min(values):.4g} to {max(values):.4g} (of {len(values)} groups)"


def _range(values: np.ndarray) -> str:
    """One number, or the first and last of several, and between which the others are."""
    if not len(values):
        return "none"
    if np.all(values == values[0]):
        return f"{values[0]:.4g}"
    distinct = len(np.unique(values))
    first, last, low, high = values[0], values[-1], values.min(), values.max()
    turns = not {low, high} <= {first, last}
    between = f", between {low:.4g} and {high:.4g}" if turns else ""
    return f"{first:.4g} to {last:.4g}{between} ({distinct} values, by a schedule)"

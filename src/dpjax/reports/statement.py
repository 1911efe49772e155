# SPDX-License-Identifier: Apache-2.0
"""The privacy statement: who is protected, how, how much, and from what not.

It is read by people who did not run the computation, so it begins with the verdict, calls
a bound a bound and an estimate an estimate, and ends with what no epsilon covers.

Every line is made from the mechanism and the ledger.  This page must never take a number
from anywhere else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from dpjax import accounting
from dpjax.ledger import Ledger
from dpjax.mechanism import Mechanism
from dpjax.reports.references import references
from dpjax.reports.spending import epsilons, multipliers
from dpjax.types import Neighbours

__all__ = ["statement"]

_NEIGHBOURS = {
    Neighbours.ADD_OR_REMOVE: "data sets that differ by one {unit} added or removed",
    Neighbours.ZERO_OUT: "data sets in which one {unit} is replaced by an empty one",
    Neighbours.REPLACE_ONE: "data sets in which one {unit} is replaced by any other",
}

_NOT_COVERED = """\
  - choosing hyper-parameters or a checkpoint by looking at the private data
  - per-step info (losses, norms, clipped fractions): computed before the noise
  - {together}
  - models or data in which {unit}s see each other (batch statistics)
  - attacks on float32 arithmetic or on the pseudo-random generator"""

_TOGETHER = {
    "example": "examples that belong together: the unit is one example, not one person",
    "client": "whoever sees one client's update: the noise is added to the sum of them\n"
    "  - clients that belong together: the unit is one client, with all of its examples",
}


def statement(
    mechanism: Mechanism,
    delta: float,
    *,
    ledger: Ledger | None = None,
    seed: int | None = None,
) -> str:
    """The privacy statement of a computation, in words.

    Args:
      mechanism: What is (or was) run.
      delta: The delta at which epsilon is stated.
      ledger: What really ran; by default all planned steps.
      seed: The fixed seed of the run, if it had one instead of a secret key.

    Returns:
      A text to print, and to publish beside the model.

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
    ran = multipliers(mechanism, ledger)
    found = dict(epsilons(mechanism, ran, delta))
    lines = [
        "Privacy statement",
        "",
        *_verdict(mechanism, found, delta, seed),
        "",
        *_facts(mechanism, ran, ledger, delta),
        "",
        *_figures(mechanism, ran, found, delta),
        "",
        "Not covered",
        _NOT_COVERED.format(unit=mechanism.unit, together=_TOGETHER[mechanism.unit]),
        "",
        "References",
        *references(mechanism, found),
    ]
    return "\n".join(lines)


def _verdict(
    mechanism: Mechanism, found: dict[str, float], delta: float, seed: int | None
) -> Iterator[str]:
    best = min((e for m, e in found.items() if accounting.METHODS[m].proven), default=math.inf)
    if math.isinf(best):
        yield "  This computation is NOT differentially private (epsilon is infinite)."
        yield f"  {_why_infinite(mechanism)}"
    else:
        yield f"  ({best:.4g}, {delta:g})-differentially private, as proved by the best accountant."
    if seed is not None:
        yield (
            f"  Seed published ({seed}): not for release. Whoever knows the seed can "
            "subtract the noise."
        )
    examples, unit = mechanism.sampling.examples, mechanism.unit
    if delta * examples >= 1:
        yield (
            f"  delta={delta:g} is not below 1/{unit}s={1 / examples:.2g}: publishing one "
            f"{unit} outright would satisfy it. Choose a smaller delta."
        )


def _why_infinite(mechanism: Mechanism) -> str:
    if math.isinf(mechanism.clipping.sensitivity):
        return f"The rule's bound is infinite: one {mechanism.unit} can move the sum by any amount."
    if not np.all(mechanism.multipliers > 0):
        return "The noise multiplier is 0 at some step."
    if not all(mechanism.preparation):
        return "A query before the first step had no noise."
    return mechanism.sampling.claim


def _facts(
    mechanism: Mechanism, ran: np.ndarray, ledger: Ledger | None, delta: float
) -> Iterator[str]:
    sampling, rule = mechanism.sampling, mechanism.clipping
    neighbours, unit = mechanism.relation, mechanism.unit
    groups = rule.partition.size
    yield f"  unit          one {unit}"
    yield f"  neighbours    {neighbours.value}: {_NEIGHBOURS[neighbours].format(unit=unit)}"
    yield (
        f"  sampler       {sampling.name}: {sampling.batch_size:g} of "
        f"{sampling.examples:,} {unit}s a step (rate {sampling.sampling_rate:.3g})"
    )
    yield f"                {sampling.claim}"
    yield (
        f"  clipping      {rule.name}, {groups} group{'s' * (groups > 1)}: one {unit} "
        f"moves the sum by {'at most' if rule.projections is None else 'about'} "
        f"{rule.sensitivity:.4g}{' at first' * bool(mechanism.adaptive)}"
    )
    if rule.projections is not None:
        yield f"                norms are estimated from {rule.projections} random projections: it"
        yield "                may be more, and epsilon, by pld alone, is over that chance"
    on_sum = ran
    if mechanism.adaptive is None:
        yield f"  noise         multiplier {_range(ran)} x sensitivity, on the sum"
    else:
        on_sum = mechanism.gradient_multipliers(ran)
        share = f"{mechanism.adaptive.target:g} of the norms are below"
        yield f"                adapted: it follows the length that {share},"
        yield f"                by a noised count of {unit}s at every step"
        yield (
            f"  noise         multiplier {_range(ran)} in all: {_range(on_sum)} on the sum, "
            f"{mechanism.count_multiplier:.4g} on the count"
        )
    if len(ran) and not math.isinf(rule.sensitivity):
        on_mean = on_sum * rule.sensitivity / sampling.batch_size
        start = ", at first" * bool(mechanism.adaptive)
        yield f"                = standard deviation {_range(on_mean)} on the mean{start}"
    if mechanism.preparation:
        each = ", ".join(f"{multiplier:.4g}" for multiplier in mechanism.preparation)
        yield "  preparation   Gaussian queries on all the data before the first step, with"
        yield f"                multiplier {each}"
    for spent in mechanism.before:
        noise = _range(np.array([multiplier for multiplier, _ in spent.runs]))
        queries = f"; queries before it: {len(spent.preparation)}" if spent.preparation else ""
        yield f"  before        {spent.steps:,} steps of an earlier run on these data count too:"
        yield (
            f"                {spent.sampling.name}, {spent.sampling.batch_size:g} {unit}s a "
            f"step, multiplier {noise}{queries}"
        )
    planned = "" if ledger is None else f" (of {mechanism.steps:,} planned)"
    yield f"  steps         {len(ran):,}{planned}"
    yield f"  delta         {delta:g}"


def _figures(
    mechanism: Mechanism,
    ran: np.ndarray,
    found: dict[str, float],
    delta: float,
) -> Iterator[str]:
    for method, value in found.items():
        yield f"  epsilon       {value:8.4g}   {method}: {accounting.METHODS[method].words}"
    if mechanism.sampling.name in ("shuffled", "curriculum"):
        rate = mechanism.sampling.sampling_rate
        steps = accounting.scheduled_gaussian(ran, rate)
        event = accounting.compose(mechanism.prepared, steps)
        value = accounting.epsilon(event, delta, "rdp-classic")
        yield (
            f"  as if Poisson {value:8.4g}   rdp-classic: the papers' figure for such "
            "batches. It does not hold for them: nothing proves amplification here."
        )


def _range(values: np.ndarray) -> str:
    """One number, or the first and last of several."""
    if not len(values):
        return "none"
    if np.all(values == values[0]):
        return f"{values[0]:.4g}"
    distinct = len(np.unique(values))
    return f"{values[0]:.4g} to {values[-1]:.4g} ({distinct} values, by a schedule)"

# SPDX-License-Identifier: Apache-2.0
"""The privacy statement: who is protected, how, how much, and from what not.

Every number comes from the mechanism and the ledger, except delta.
"""

from __future__ import annotations

import contextlib
import math
import textwrap
from collections.abc import Sequence

from dpjax import accounting
from dpjax._rounding import downwards, three_digits, upwards
from dpjax._versions import version
from dpjax.ledger import Ledger
from dpjax.mechanism import Mechanism
from dpjax.reports._claim import Claim, claim_of, not_covered, percent, risk_reached
from dpjax.reports._document import COLUMN, PAPER, Document, Row, html_of, read, row, text_of
from dpjax.reports._facts import facts_of, neighbours_of, range_of
from dpjax.reports._references import references
from dpjax.types import HeldOut

SUPPLIED = (
    "The key was supplied: epsilon holds against those who do not know the key, for one run per "
    "key."
)
_WIDTH = 100  # of the paragraph for a paper
_ANYWAY = (
    "the choice of this run among several, also by public data: see accounting.select_best",
    "choosing hyper-parameters or a checkpoint by looking at the private data",
    "statistics of the data outside this run (means, class weights, vocabularies), unless named "
    "above",
    "per-step info (losses, norms, clipped fractions): computed before the noise",
)


class Statement(str):
    """The text of a statement; a notebook shows it as HTML."""

    # The default shows one line with escapes.
    def __repr__(self) -> str:
        return str(self)

    @property
    def html(self) -> str:
        """The HTML of the statement, without its title."""
        return html_of(read(self))

    def _repr_html_(self) -> str:
        return f"<p><strong>Privacy statement</strong></p>\n{self.html}"


def statement(
    mechanism: Mechanism,
    delta: float | None = None,
    *,
    ledger: Ledger | None = None,
    supplied: bool = False,
    methods: Sequence[str] | None = None,
    scaled_by: str | None = None,
    held_out: HeldOut | None = None,
    settings: str | None = None,
) -> Statement:
    """The privacy statement of a computation, in words.

    Args:
      mechanism: The computation.
      delta: The delta at which epsilon is stated; by default the one of ``mechanism.target``.
      ledger: The steps that ran; by default all planned steps.
      supplied: Whether the caller supplies the key of the run; a ledger knows of its own.
      methods: The `dpjax.accounting` methods that state epsilon; by default all.
      scaled_by: A factor on sum and noise alike that the mechanism does not hold, for example
        ``"a bound schedule"`` of `dpjax.dpsgd`. `dpjax.fit` gives it for the run in a folder.
      held_out: The units that were held out for a test, as `dpjax.data.Dataset.held_out` has them.
        They come first among what is not covered.
      settings: How settings were chosen, in a sentence such as `dpjax.planning.NO_SETTING`.

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
    claim = claim_of("statement", mechanism, delta, ledger, supplied, methods)
    tables = [facts_of(claim, ledger, scaled_by), _epsilons(claim)]
    if _is_private(claim):
        tables.append([_for_a_paper(claim)])
    verdict = _verdict(claim)
    if settings is not None:
        verdict.append(settings)
    uncovered = [*not_covered(held_out, mechanism.unit), *_never_covered(mechanism)]
    works = references(mechanism, claim.epsilons)
    document = Document(verdict, tables, uncovered, "\n".join(works))
    return Statement(text_of(document))


def _verdict(claim: Claim) -> list[str]:
    """Whether the computation is private, by which proof, and what a reader must know of it."""
    _, method = claim.proven
    if _is_private(claim):
        sentences = [f"{_guarantee(claim)}, as proved by {method.upper()}.", *_risk(claim)]
    elif claim.not_private:
        sentences = [
            "This computation is NOT differentially private (epsilon is infinite).",
            claim.not_private,
        ]
    else:
        sentences = [
            "This computation is NOT PROVED to be differentially private.",
            *_why_unproved(claim.mechanism, method),
        ]
    if claim.supplied:
        sentences.append(SUPPLIED)
    unit = claim.mechanism.unit
    examples = claim.mechanism.sampling.examples
    # Publishing one record at random satisfies delta = 1/n, so such a delta promises nothing.
    if claim.delta * examples >= 1:
        sentences.append(
            f"delta={claim.delta:g} is not below 1/{unit}s={1 / examples:.2g}: publishing one "
            f"{unit} outright would satisfy it. Choose a smaller delta."
        )
    return sentences


def _risk(claim: Claim) -> list[str]:
    """The rates of an attack that the noise was chosen for, and the one that is proved."""
    risk = claim.mechanism.risk
    if risk is None:
        return []
    false_alarms = percent(risk.false_positive_rate, downwards)
    return [
        f"At {false_alarms} false alarms a membership attack has at most "
        f"{percent(risk_reached(claim))} true ones; noise was chosen for "
        f"{percent(risk.true_positive_rate)}."
    ]


def _is_private(claim: Claim) -> bool:
    """Whether an epsilon is proved."""
    epsilon, _ = claim.proven
    return math.isfinite(epsilon)


def _guarantee(claim: Claim) -> str:
    epsilon, _ = claim.proven
    pair = f"({three_digits(epsilon)}, {upwards(claim.delta, '.3g')})"
    return f"{pair}-differentially private"


def _why_unproved(mechanism: Mechanism, method: str) -> list[str]:
    if not method:
        return ["No method proves a number for the whole: each method refuses a part of it."]
    if any(run.projections is not None for run in (mechanism.clipping, *mechanism.before)):
        return [
            "Norms are estimated, and the chance that one is far too small is above delta.",
            "Take more random projections, or more noise.",
        ]
    return ["No method has a finite number for it. Usually the noise is far too small."]


def _epsilons(claim: Claim) -> list[Row]:
    """A row for each accountant; the first one is the claim, the smallest proven epsilon."""

    def proven_and_small_first(method: str) -> tuple[bool, float]:
        return not accounting.METHODS[method].proven, claim.epsilons[method]

    rows = []
    for name in sorted(claim.epsilons, key=proven_and_small_first):
        value = three_digits(claim.epsilons[name])
        rows.append(row("epsilon", f"{value:>8}   {name}: {accounting.METHODS[name].words}"))
    if not rows:
        rows.append(row("epsilon", f"{'none':>8}   no method has a number for this"))
    return rows + _as_if_poisson(claim)


def _as_if_poisson(claim: Claim) -> list[Row]:
    """The epsilon that papers publish for batches of an epoch, for comparison: one row, or none."""
    mechanism = claim.mechanism
    sampling = mechanism.sampling
    # The papers' figure is of independent noise.
    if not sampling.published_as_poisson or mechanism.noise is not None:
        return []
    steps = accounting.scheduled_gaussian(claim.ran, sampling.sampling_rate)
    # `prepared` is the event of earlier runs and of queries. If an earlier run has no Rényi bound,
    # there is no figure to compare with.
    event = accounting.compose(mechanism.prepared, steps)
    with contextlib.suppress(ValueError):
        value = three_digits(accounting.epsilon(event, claim.delta, "rdp-classic"))
        words = (
            f"{value:>8}   rdp-classic: the papers' figure for such batches. It does not hold for "
            "them: nothing proves amplification here."
        )
        return [row("as if Poisson", words)]
    return []


def _for_a_paper(claim: Claim) -> Row:
    """A paragraph for the methods section of a paper."""
    mechanism = claim.mechanism
    sampling = mechanism.sampling
    rule = mechanism.clipping
    unit = mechanism.unit
    drawn = sampling.paper_name or sampling.name.replace("_", " ")
    moved = f"sensitivity {rule.sensitivity:.4g}"
    if mechanism.adaptive is not None:
        moved += " at first"
    noise = "Gaussian noise" if mechanism.noise is None else "correlated Gaussian noise"
    earlier = [f"{spent.steps:,} steps of an earlier run" for spent in mechanism.before]
    if mechanism.preparation:
        earlier.append(f"{len(mechanism.preparation)} Gaussian queries on all the data")
    subject = "This"
    if earlier:
        subject = f"Together with {' and '.join(earlier)} this"
    packages = ("dpjax", "dp-accounting", "jax")
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    _, method = claim.proven
    words = (
        f"We ran {len(claim.ran):,} steps with {drawn} sampling of {mechanism.batch_size:g} of "
        f"{sampling.examples:,} {unit}s, per-{unit} clipping ({rule.name}, {moved}) and "
        f"{noise} with multiplier {range_of(claim.ran)}. {subject} is {_guarantee(claim)} for "
        f"{neighbours_of(mechanism)} ({mechanism.relation.value}), by the {method.upper()} "
        f"accountant ({versions})."
    )
    if claim.supplied:
        words += f" {SUPPLIED}"
    return row(PAPER, *textwrap.wrap(words, _WIDTH - COLUMN, break_on_hyphens=False))


def _never_covered(mechanism: Mechanism) -> list[str]:
    unit = mechanism.unit
    if mechanism.of_clients:
        belong_together = [
            f"anyone who sees one {unit}'s update: noise is added to the sum of updates",
            f"{unit}s that belong together: the unit is one {unit}, with all of its examples",
        ]
    elif unit == "example":
        belong_together = ["examples that belong together: the unit is one example, not one person"]
    else:
        belong_together = [
            f"{unit}s that belong together, as in a family, and one {unit} who is there twice"
        ]
    return [
        *_ANYWAY,
        *belong_together,
        f"models or data in which {unit}s see each other (batch statistics)",
        "attacks on float32 arithmetic or on the pseudo-random generator",
    ]

# SPDX-License-Identifier: Apache-2.0
"""Whether a claim of a paper holds for the rows that ran here: one rule for all claims, `RULE`.

This file reads dictionaries alone and must stay fast: tables are made in tests.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import scipy.stats

RULE = """\
Whether a claim holds is computed by one rule. A published number holds if the mean here is within
half a point of it (of an mse: 5 %). A mean that is better by more reads "better", which of a
baseline weakens what the paper claims over it. "Above" and "below" hold if the difference of the
means is beyond chance, by a one-sided Welch test at 5 %; otherwise they do not hold, though the
difference may be in the claimed direction ("within chance"). "Level" holds if the first mean is at
most half a point (of an mse: 5 %) worse than the second. A comparison with one seed on a side is
open. So is a negative verdict while a row is missing that the claim needs, at the printed rate or
at rates around the best that ran. Of rows at several rates the best mean counts, on test data.
Average settings of the best tenth of a sweep hold if each is within half a step of the grid that
runs here, a factor of sqrt(2)."""

TOLERANCE, RELATIVE, CHANCE = 0.5, 0.05, 0.05  # points; the part of an mse; the level of the test
HALF_A_STEP = math.sqrt(2)  # of a grid whose neighbours differ by a factor of two
HOLDS, BETTER, FAILS, OPEN, NOT_RUN = "holds", "better", "does not hold", "open", "not run"
_ERRORS = ("ece", "mce", "mse")
_SCALE = {"ece": 100, "mce": 100}  # kept as parts, published in per cent


class Claim(NamedTuple):
    """What a paper says of a system.

    Attributes:
      system: Its name in the tables.
      rows: Patterns of the rows that speak for it; the first that has rows counts, and among its
        rows the best mean: published figures are of searched rates too.
      published: The published number; "above", "below" or "level" for a comparison; "" for none;
        of a sweep, its average settings.
      than: Patterns of the rows that it is compared with.
      measure: The number of a run.
      at: The epoch whose accuracy is meant; 0 for the last.
      why: Why nothing ran, if the reason is not time.
      pooled: Whether the best row of all patterns counts, not of the first that has rows.
      needs: Rates, each with a pattern of its rows; without them a negative verdict stays open.
      own: Whether the comparison is of this repository, and not of the paper.
      sweep: All rows of a sweep, whose names tell its settings, in place of ``rows``.
    """

    system: str
    rows: Sequence[str]
    published: float | str
    than: Sequence[str] = ()
    measure: str = "accuracy"
    at: int = 0
    why: str = ""
    pooled: bool = False
    needs: Sequence[tuple[str, str]] = ()
    own: bool = False
    sweep: Sequence[str] = ()

    @property
    def lower(self) -> bool:
        """Whether smaller is better, as of all errors."""
        return self.measure in _ERRORS

    def tolerance(self, number: float) -> float:
        """How far from a number still counts as that number."""
        return RELATIVE * number if self.measure == "mse" else TOLERANCE

    def spent(self, row: str | None) -> str:
        """By which name `systems.json` has the epsilons of a row, or of its first epochs."""
        return (row or "") + f", {self.at} epochs" * bool(self.at)


class Judged(NamedTuple):
    """A claim beside what ran."""

    claim: Claim
    row: str | None
    ours: list[float]
    other: str | None  # the row that it is compared with
    theirs: list[float]
    verdict: str


def judged(claim: Claim, rows: Mapping[str, Mapping[str, Any]]) -> Judged:
    """The verdict of a claim, by `RULE`."""
    if claim.sweep:
        return _swept(claim, rows)
    row, ours = _speaking(claim, claim.rows, rows)
    other, theirs = _speaking(claim, claim.than, rows)
    comparison = claim.published in ("above", "below", "level")
    if not ours or (comparison and not theirs):
        verdict = f"{NOT_RUN}: {claim.why}" if claim.why else NOT_RUN
    elif claim.published == "":
        verdict = ""
    elif comparison and min(len(ours), len(theirs)) < 2:
        verdict = f"{OPEN}: 1 seed"
    else:
        verdict = _compared(claim, ours, theirs) if comparison else _measured(claim, ours)
    absent = [rate for rate, of in claim.needs if not any(re.fullmatch(of, name) for name in rows)]
    if verdict.startswith(FAILS) and absent:
        verdict = f"{OPEN}: rate {', '.join(absent)} did not run"
    return Judged(claim, row, ours, other, theirs, verdict)


def best_tenth(scores: Mapping[tuple[float, ...], float]) -> list[float]:
    """The average settings of the best tenth of a sweep."""
    order = sorted(scores, key=lambda settings: -scores[settings])
    best = order[: max(1, round(len(order) / 10))]
    return [statistics.mean(values) for values in zip(*best, strict=True)]


def _swept(claim: Claim, rows: Mapping[str, Mapping[str, Any]]) -> Judged:
    """The verdict on the average settings of a sweep."""
    if any(row not in rows for row in claim.sweep):
        return Judged(claim, None, [], None, [], f"{NOT_RUN}: {claim.why}")
    means = {row: statistics.mean(_numbers(claim, rows[row])) for row in claim.sweep}
    settings = {row: tuple(map(float, re.findall(r"=([\d.]+)", row))) for row in means}
    ours = best_tenth({settings[row]: mean for row, mean in means.items()})
    printed = map(float, str(claim.published).split(", "))
    near = all(max(a / b, b / a) <= HALF_A_STEP for a, b in zip(ours, printed, strict=True))
    verdict = HOLDS if near else FAILS
    return Judged(claim, max(means, key=means.__getitem__), ours, None, [], verdict)


def _measured(claim: Claim, ours: list[float]) -> str:
    """The verdict on a published number."""
    number = float(claim.published)
    lead = (statistics.mean(ours) - number) * (-1 if claim.lower else 1)
    if abs(lead) <= claim.tolerance(number):
        return HOLDS
    return BETTER if lead > 0 else FAILS


def _compared(claim: Claim, ours: list[float], theirs: list[float]) -> str:
    """The verdict on a comparison of two rows, each of two seeds or more."""
    better, worse = (theirs, ours) if claim.lower else (ours, theirs)
    lead = statistics.mean(better) - statistics.mean(worse)
    if claim.published == "level":
        return HOLDS if lead >= -claim.tolerance(statistics.mean(theirs)) else FAILS
    if statistics.pvariance(better) == statistics.pvariance(worse) == 0:  # no test of constants
        return HOLDS if lead > 0 else FAILS
    test: Any = scipy.stats.ttest_ind(better, worse, equal_var=False, alternative="greater")
    if test.pvalue < CHANCE:
        return HOLDS
    return f"{FAILS}, within chance" if lead > 0 else FAILS


def _speaking(
    claim: Claim, patterns: Sequence[str], rows: Mapping[str, Mapping[str, Any]]
) -> tuple[str | None, list[float]]:
    """The row that counts, and its numbers by seed."""
    found: dict[str, list[float]] = {}
    for pattern in patterns:
        if found and not claim.pooled:
            break
        for name, seeds in rows.items():
            if re.fullmatch(pattern, name) and (numbers := _numbers(claim, seeds)):
                found[name] = numbers
    sign = -1 if claim.lower else 1
    means = {row: sign * statistics.mean(numbers) for row, numbers in found.items()}
    order = sorted(means, key=lambda row: -math.inf if math.isnan(means[row]) else means[row])
    return (order[-1], found[order[-1]]) if order else (None, [])


def _numbers(claim: Claim, seeds: Mapping[str, Any]) -> list[float]:
    """The claimed measure of each seed that has it."""
    if claim.at:
        ways = [run["way"] for run in seeds.values() if len(run.get("way", ())) >= claim.at]
        return [100 * way[claim.at - 1][claim.measure] for way in ways]
    scale = _SCALE.get(claim.measure, 1)
    found = [run[claim.measure] for run in seeds.values() if claim.measure in run]
    return [scale * number(each) for each in found]


def number(found: float | None) -> float:
    """A number of a result; JSON has null for the NaN of a run that diverged."""
    # Left out, the luckier seeds would decide.
    return math.nan if found is None else found

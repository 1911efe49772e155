# SPDX-License-Identifier: Apache-2.0
"""Whether a claim of a paper holds for the rows that ran here: one rule for all claims, `RULE`."""

from __future__ import annotations

import math
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
      rows: The keys of the rows that speak for it; the best mean counts.
      published: The published number; "above", "below" or "level" for a comparison; "" for none;
        of a sweep, its average settings.
      than: The keys of the rows that it is compared with.
      measure: The number of a run.
      at: The epoch whose accuracy is meant; 0 for the last.
      why: Why nothing ran, if the reason is not time.
      needs: By rate, the keys of its rows; without one of them a negative verdict stays open.
      own: Whether the comparison is of this repository, and not of the paper.
      sweep: By key the settings of a sweep, in place of ``rows``.
    """

    system: str
    rows: Sequence[str]
    published: float | str
    than: Sequence[str] = ()
    measure: str = "accuracy"
    at: int = 0
    why: str = ""
    needs: Mapping[str, Sequence[str]] = {}
    own: bool = False
    sweep: Mapping[str, tuple[float, ...]] = {}

    @property
    def lower(self) -> bool:
        """Whether smaller is better, as of all errors."""
        return self.measure in _ERRORS

    def tolerance(self, number: float) -> float:
        """How far from a number still counts as that number."""
        return RELATIVE * number if self.measure == "mse" else TOLERANCE

    def spent(self, row: str | None) -> str:
        """By which name `epsilons.json` has the epsilons of a row, or of its first epochs."""
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
    absent = [rate for rate, keys in claim.needs.items() if not any(key in rows for key in keys)]
    if verdict.startswith(FAILS) and absent:
        verdict = f"{OPEN}: rate {', '.join(absent)} did not run"
    return Judged(claim, row, ours, other, theirs, verdict)


def best_tenth(scores: Mapping[tuple[float, ...], float]) -> list[float]:
    """The average settings of the best tenth of a sweep."""
    order = sorted(scores, key=lambda settings: -scores[settings])
    best = order[: max(1, round(len(order) / 10))]
    return [statistics.mean(values) for values in zip(*best, strict=True)]


def _swept(claim: Claim, rows: Mapping[str, Mapping[str, Any]]) -> Judged:
    if any(row not in rows for row in claim.sweep):
        return Judged(claim, None, [], None, [], f"{NOT_RUN}: {claim.why}")
    means = {row: statistics.mean(_numbers(claim, rows[row])) for row in claim.sweep}
    ours = best_tenth({claim.sweep[row]: mean for row, mean in means.items()})
    printed = map(float, str(claim.published).split(", "))
    near = all(max(a / b, b / a) <= HALF_A_STEP for a, b in zip(ours, printed, strict=True))
    verdict = HOLDS if near else FAILS
    return Judged(claim, max(means, key=means.__getitem__), ours, None, [], verdict)


def _measured(claim: Claim, ours: list[float]) -> str:
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
    claim: Claim, keys: Sequence[str], rows: Mapping[str, Mapping[str, Any]]
) -> tuple[str | None, list[float]]:
    """The row that counts, and its numbers by seed."""
    numbers = {key: _numbers(claim, rows[key]) for key in keys if key in rows}
    sign = -1 if claim.lower else 1
    means = {key: sign * statistics.mean(values) for key, values in numbers.items() if values}
    order = sorted(means, key=lambda key: -math.inf if math.isnan(means[key]) else means[key])
    return (order[-1], numbers[order[-1]]) if order else (None, [])


def _numbers(claim: Claim, seeds: Mapping[str, Any]) -> list[float]:
    if claim.at:
        ways = [run["way"] for run in seeds.values() if len(run.get("way", ())) >= claim.at]
        return [100 * way[claim.at - 1][claim.measure] for way in ways]
    scale = _SCALE.get(claim.measure, 1)
    return [scale * number(run[claim.measure]) for run in seeds.values() if claim.measure in run]


def number(value: float | None) -> float:
    """A number of a result; JSON has null for the NaN of a run that diverged."""
    # Left out, the luckier seeds would decide.
    return math.nan if value is None else value

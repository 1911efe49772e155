# SPDX-License-Identifier: Apache-2.0
"""Whether a claim of a paper holds for the rows that ran here: one rule for all claims.

  a number         holds if the mean over seeds is within half a point of it, or better
  above, below     holds if the ranges over seeds do not overlap, in the claimed direction
  level            holds if the ranges overlap, or if the first is the better one

Comparisons of single seeds stay open.  Calibration errors are in per cent, so half a point is
theirs too.  This file reads dictionaries alone and must stay fast: tables are made in tests.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

TOLERANCE = 0.5
HOLDS, FAILS, OPEN, NOT_RUN = "holds", "does not hold", "open: 1 seed", "not run"
_ERRORS = ("ece", "mce", "mse")
_SCALE = {"ece": 100, "mce": 100}  # kept as parts, published in per cent


class Claim(NamedTuple):
    """What a paper says of a system.

    Attributes:
      system: Its name in the tables.
      rows: Patterns of the rows that speak for it; the first that has rows counts.  Among its rows
        the one with the most seeds counts, and of those the best: published figures are of
        searched rates too.
      published: The published number; "above", "below" or "level" for a comparison; "" for none.
      than: Patterns of the rows that it is compared with.
      measure: The number of a run.
      at: The epoch whose accuracy is meant; 0 for the last.
      why: Why nothing ran, if the reason is not time.
      pooled: Whether the best row of all patterns counts, not of the first that has rows.
    """

    system: str
    rows: Sequence[str]
    published: float | str
    than: Sequence[str] = ()
    measure: str = "accuracy"
    at: int = 0
    why: str = ""
    pooled: bool = False

    @property
    def lower(self) -> bool:
        """Whether smaller is better, as of all errors."""
        return self.measure in _ERRORS


class Judged(NamedTuple):
    """A claim beside what ran."""

    claim: Claim
    row: str | None
    ours: list[float]
    theirs: list[float]  # of the row that it is compared with
    verdict: str

    @property
    def spent(self) -> str:
        """By which name `systems.json` has the epsilons of the row, or of its first epochs."""
        return (self.row or "") + f", {self.claim.at} epochs" * bool(self.claim.at)


def judged(claim: Claim, rows: Mapping[str, Mapping[str, Any]]) -> Judged:
    """The verdict of a claim, by the rule of this file."""
    row, ours = _speaking(claim, claim.rows, rows)
    _, theirs = _speaking(claim, claim.than, rows)
    comparison = claim.published in ("above", "below", "level")
    if not ours or (comparison and not theirs):
        verdict = f"{NOT_RUN}: {claim.why}" if claim.why else NOT_RUN
    elif claim.published == "":
        verdict = ""
    elif not comparison:
        lead = (statistics.mean(ours) - float(claim.published)) * (-1 if claim.lower else 1)
        verdict = HOLDS if lead >= -TOLERANCE else FAILS
    elif min(len(ours), len(theirs)) < 2:
        verdict = OPEN
    else:
        better, worse = (theirs, ours) if claim.lower else (ours, theirs)
        above = min(better) > max(worse)
        below = min(worse) > max(better)
        verdict = HOLDS if above or (claim.published == "level" and not below) else FAILS
    return Judged(claim, row, ours, theirs, verdict)


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
    order = sorted(found, key=lambda row: (len(found[row]), sign * statistics.mean(found[row])))
    return (order[-1], found[order[-1]]) if order else (None, [])


def _numbers(claim: Claim, seeds: Mapping[str, Any]) -> list[float]:
    """The claimed measure of each seed that has it."""
    if claim.at:
        ways = [run["way"] for run in seeds.values() if len(run.get("way", ())) >= claim.at]
        return [100 * way[claim.at - 1][claim.measure] for way in ways]
    scale = _SCALE.get(claim.measure, 1)
    return [scale * run[claim.measure] for run in seeds.values() if run.get(claim.measure)]

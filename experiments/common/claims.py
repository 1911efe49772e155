# SPDX-License-Identifier: Apache-2.0
"""What a paper claims, and the verdict on it by the rows that ran here: one `RULE` for all."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.stats

RULE = """\
One rule gives all verdicts. It was fixed before the rows were judged by it.

* **A printed number** is *reproduced* if the mean here is within two standard errors of it or its
  error within 5 %, whichever is wider. The error is what an accuracy lacks to 100 %; ECE, MCE and
  mse are errors. The standard error counts both sides: a paper without a spread counts as one run
  with the spread found here. If two standard errors are more than half of the error, the verdict is
  *within noise*. Beyond both limits a worse mean is *not reached*, and a better one *reproduced:
  better*; a better baseline weakens what the paper claims over it. A best of five runs is compared
  with the best of five here.
* **"Above" and "below"** are *reproduced* if the first side leads beyond chance, *refuted* if it
  trails beyond chance, and *within noise* otherwise, by a one-sided t-test at 5 %. Runs of one seed
  are pairs where they share start, batches and noise; elsewhere the test is Welch's. No correction
  is made for the number of tests: one comparison of equals in twenty is reproduced by chance.
* **"Level"** is *reproduced* if the first error is at most 5 % above the second, *refuted* if it is
  worse by more and beyond chance, and *within noise* otherwise.
* **A curve** is judged by its points, each a pair: *reproduced* if the first side leads at nine of
  ten, *refuted* if it leads at one of ten or fewer, and *not reached* otherwise. Points of one run
  depend on one another, so a verdict on fewer than three seeds says how many there are.
* **An epsilon** is *reproduced* if the noise, batch size and steps that the paper prints cost at
  most as much by PLD, with Poisson batches and the true sensitivity, and *refuted* otherwise.
* **Open** is a claim with fewer than three pairs, or three runs for a number, or five for a best of
  five. A worse result that a named limit of the runs here may explain is *not reached*.

Of rows at several rates the best mean counts, on test data."""

RELATIVE, ERRORS, CHANCE = 0.05, 2, 0.05  # part of an error; standard errors; level of the tests
MOST = 0.9  # of the points of a curve
FEWEST = 3  # pairs, or runs of a number
REPRODUCED, REFUTED, MISSED = "reproduced", "refuted", "not reached"
NOISE, OPEN, NOT_RUN = "within noise", "open", "not run"
VERDICTS = (REPRODUCED, REFUTED, MISSED, NOISE, OPEN, NOT_RUN)
_SCALE = {"ece": 100, "mce": 100, "mse": 1}  # of errors; the first two are published in per cent

Rows = Mapping[str, Mapping[str, Any]]  # runs by key and seed
Curve = Callable[[Mapping[str, Any]], Sequence[float]]  # the points of a run


class Claim(NamedTuple):
    """What a paper says of a system.

    Attributes:
      system: Its name in the tables.
      rows: The keys of the rows that speak for it; the best mean counts.
      published: The published number; "above", "below" or "level" for a comparison.
      than: The keys of the rows that it is compared with.
      measure: The number of a run, "epsilon", or what reads the points of a curve from a run.
      at: The epoch whose accuracy is meant; 0 for the last.
      why: Why nothing ran, if the reason is not time.
      own: Whether the comparison is of this repository, and not of the paper.
      best: Of how many runs the paper prints the best; 0 for a mean or a single run.
      paired: Whether runs of one seed share start, batches and noise.
      limit: What may explain a worse result here; of an epsilon, why it cannot be recomputed.
      factor: What the numbers of ``than`` are multiplied by.
      figures: The figures whose captions give the verdict; none for all that draw the row.
    """

    system: str
    rows: Sequence[str]
    published: float | str
    than: Sequence[str] = ()
    measure: str | Curve = "accuracy"
    at: int = 0
    why: str = ""
    own: bool = False
    best: int = 0
    paired: bool = True
    limit: str = ""
    factor: float = 1.0
    figures: Sequence[str] = ()

    @property
    def compares(self) -> bool:
        """Whether two sides are compared, and not one with a number."""
        return isinstance(self.published, str)

    @property
    def sign(self) -> int:
        """1 if larger is what is claimed, or better; -1 if smaller is."""
        return -1 if self.published == "below" or self.measure in _SCALE else 1

    def error(self, number: float) -> float:
        return number if self.measure in _SCALE else 100 - number

    def spent(self, row: str | None) -> str:
        """By which name `epsilons.json` has the epsilons of a row, or of its first epochs."""
        return (row or "") + f", {self.at} epochs" * bool(self.at)


class Judged(NamedTuple):
    """A claim beside what ran."""

    claim: Claim
    row: str | None
    ours: list[float]  # a number a seed; of a curve the mean of its points
    other: str | None  # the row that it is compared with
    theirs: list[float]
    verdict: str


def judged(claim: Claim, rows: Rows, costs: Mapping[str, Sequence[str]]) -> Judged:
    """The verdict of a claim by `RULE`; ``costs`` are the epsilons of rows, by PLD the last."""
    if claim.measure == "epsilon":
        return _spent(claim, costs)
    row, ours = _speaking(claim, claim.rows, rows)
    other, theirs = _speaking(claim, claim.than, rows)
    verdict = _verdict(claim, ours, theirs)
    if claim.limit and verdict.startswith((REFUTED, MISSED)):
        verdict = f"{MISSED}: {claim.limit}"
    means = [[statistics.mean(points) for points in side.values()] for side in (ours, theirs)]
    return Judged(claim, row, means[0], other, means[1], verdict)


def curve(name: str, read: Callable[[Any], Any] = lambda value: value) -> Curve:
    """A number of the logs, at each look that has it."""
    return lambda run: [read(look[name]) for look in run.get("way", ()) if name in look]


def _spent(claim: Claim, costs: Mapping[str, Sequence[str]]) -> Judged:
    """The verdict on an epsilon, by the row that costs most."""
    known = {row: cost for row in claim.rows if (cost := costs.get(claim.spent(row)))}
    row = max(known, key=lambda row: float(known[row][-1]), default=None)
    pld = known[row][-1] if row else "nan"
    verdict = REPRODUCED if float(pld) <= float(claim.published) else f"{REFUTED}: it costs {pld}"
    verdict = f"{OPEN}: {claim.limit}" if claim.limit else verdict if row else NOT_RUN
    return Judged(claim, row, [float(pld)], None, [], verdict)


def _verdict(claim: Claim, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    if not ours or (claim.compares and not theirs):
        return f"{NOT_RUN}: {claim.why}" if claim.why else NOT_RUN
    if not claim.compares:
        numbers = [point for points in ours.values() for point in points]
        if len(numbers) < (fewest := claim.best or FEWEST):
            return f"{OPEN}: {len(numbers)} of {fewest} runs"
        return _measured(claim, numbers)
    if claim.paired:
        seeds = [seed for seed in ours if seed in theirs]
        pairs = [pair for s in seeds for pair in zip(ours[s], theirs[s], strict=False)]
        sides: Any = list(zip(*pairs, strict=True)) or [(), ()]
    else:
        seeds, pairs, sides = (
            (),
            (),
            [[points[0] for points in side.values()] for side in (ours, theirs)],
        )
    if (count := min(map(len, sides))) < FEWEST:
        return f"{OPEN}: {count} of {FEWEST} pairs"
    if callable(claim.measure):
        ahead = sum(claim.sign * (a - claim.factor * b) > 0 for a, b in pairs)
        share = ahead / len(pairs)
        verdict = REPRODUCED if share >= MOST else REFUTED if 1 - share >= MOST else MISSED
        few = f", {len(seeds)} seed{'s' * (len(seeds) > 1)}" * (len(seeds) < FEWEST)
        return f"{verdict}: leads at {ahead} of {count} points{few}"
    return _compared(claim, *sides)


def _measured(claim: Claim, numbers: list[float]) -> str:
    published = float(claim.published)
    best = max if claim.sign > 0 else min
    ours = best(numbers[: claim.best]) if claim.best else statistics.mean(numbers)
    noise = ERRORS * float(np.std(numbers, ddof=1)) * math.sqrt(1 + 1 / len(numbers))
    error, lead = claim.error(published), claim.sign * (ours - published)
    if abs(lead) <= RELATIVE * error:
        return REPRODUCED
    if abs(lead) <= noise:
        return REPRODUCED if noise <= error / 2 else NOISE
    return f"{REPRODUCED}: better" if lead > 0 else MISSED


def _compared(claim: Claim, ours: Sequence[float], theirs: Sequence[float]) -> str:
    """The verdict on two sides, each a number a seed."""
    ours, theirs = ([claim.sign * number for number in side] for side in (ours, theirs))
    lead = statistics.mean(ours) - statistics.mean(theirs)
    if claim.published == "level":
        errors = [claim.error(claim.sign * statistics.mean(side)) for side in (ours, theirs)]
        if errors[0] <= (1 + RELATIVE) * errors[1]:
            return REPRODUCED
    elif _chance(claim, ours, theirs) < CHANCE:
        return REPRODUCED
    trails = _chance(claim, theirs, ours) < CHANCE
    return f"{REFUTED}: {-lead:.2g} behind" if trails else NOISE


def _chance(claim: Claim, better: Sequence[float], worse: Sequence[float]) -> float:
    """How likely a lead of this size is if there is none."""
    if claim.paired:
        leads = np.subtract(better, worse)
        if np.ptp(leads) == 0:  # the t-test of constants is NaN
            return float(leads[0] <= 0)
        test: Any = scipy.stats.ttest_1samp(leads, 0, alternative="greater")
    else:
        test = scipy.stats.ttest_ind(better, worse, equal_var=False, alternative="greater")
    return test.pvalue


def _speaking(claim: Claim, keys: Sequence[str], rows: Rows) -> tuple[str | None, dict[str, Any]]:
    """The row with the best mean, and the points of each of its seeds."""
    of = {key: {s: p for s, run in rows[key].items() if (p := _points(claim, run))}
          for key in keys if key in rows}  # fmt: skip

    def mean(key: str) -> float:
        numbers = [claim.sign * points[0] for points in of[key].values()]
        if callable(claim.measure):  # as in figures the row with the best accuracy counts
            numbers = [number(run.get("accuracy")) for run in rows[key].values()]
        return statistics.mean(numbers) if math.isfinite(sum(numbers)) else -math.inf

    row = max((key for key in of if of[key]), key=mean, default=None)
    return row, of.get(row or "", {})


def _points(claim: Claim, run: Mapping[str, Any]) -> Sequence[float]:
    """The number of a run, or the points of its curve."""
    if callable(claim.measure):
        return claim.measure(run)
    scale = 100 if claim.at else _SCALE.get(claim.measure, 1)
    if claim.at:
        run = dict(*run.get("way", ())[claim.at - 1 : claim.at])
    return [scale * number(run[claim.measure])] if claim.measure in run else []


def number(value: float | None) -> float:
    """A number of a result; JSON has null for the NaN of a run that diverged."""
    # Left out, the luckier seeds would decide.
    return math.nan if value is None else value

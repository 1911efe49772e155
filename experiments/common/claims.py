# SPDX-License-Identifier: Apache-2.0
"""The claims of papers, and the verdicts by the rows that ran here: one `RULE` for all."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.stats

RULE = """\
One rule gives all verdicts. It was fixed before the rows were judged by it, but for these parts,
which came later and mostly make it stricter: one test and its line, the quarter, half a unit, and
the words for baselines, for curves of one seed and for infinite epsilons.

* **A printed number** is *reproduced* if the mean here is within two standard errors of it, its
  error within 5 %, or half a unit of its last printed digit, whichever is widest. The error is what
  an accuracy lacks to 100 %; ECE, MCE, NLL and mse are errors. The standard error counts both
  sides: a paper without a spread counts as one run with the spread found here. If two standard
  errors are more than a quarter of the error, the verdict is *within noise*. Beyond all limits a
  worse mean is *not reached*, and a better one *reproduced: better*, or for a baseline *baseline
  stronger here*, which is not counted as reproduced because it weakens what the paper claims over
  it. A best of five runs is compared with the best of five here. A number of a run whose epsilon is
  infinite says so: the accuracy was found, and the privacy was not.
* **"Above" and "below"** are *reproduced* if the first side leads beyond chance, *refuted* if it
  trails beyond chance, and *within noise* otherwise. Each comparison is one two-sided t-test, whose
  p stands at the verdict. Beyond chance is a p on or below the line of Benjamini and Hochberg, by
  which one in twenty of the differences that all tests of this page find is expected to be chance.
  Runs of one seed are pairs where they share start, batches and noise; elsewhere the test is
  Welch's.
* **"Level"** is *reproduced* if the first error is at most 5 % above the second, *refuted* if it is
  worse by more and beyond chance, and *within noise* otherwise.
* **A curve** is judged by its points, each a pair: *reproduced* if the first side leads at nine of
  ten, *refuted* if it leads at one of ten or fewer, and *not reached* otherwise. Points of one run
  depend on one another, so a curve of one seed is *seen once*, and one of two seeds says so.
* **An epsilon** is *reproduced* if the noise, batch size and steps that the paper prints cost at
  most as much by PLD, with Poisson batches and the true sensitivity, and *refuted* otherwise. Where
  the paper does not print what its number depends on, the number *cannot be recomputed*.
* **A theorem** is *refuted* by a counterexample.
* **Open** is a claim with fewer than three pairs, or three runs for a number, or five for a best of
  five. A worse result that a named limit of the runs here may explain is *not reached*.

Of rows at several rates the best mean counts, on test data."""

RELATIVE = 0.05  # part of an error
ERRORS = 2  # standard errors
PRECISE = 0.25  # the largest part of an error that these may be
CHANCE = 0.05  # level of the tests
MOST = 0.9  # of the points of a curve
FEWEST = 3  # pairs, or runs of a number
REPRODUCED = "reproduced"
STRONGER = "baseline stronger here"
REFUTED = "refuted"
MISSED = "not reached"
NOISE = "within noise"
ONCE = "seen once"
OPEN = "open"
UNKNOWN = "cannot be recomputed"
NOT_RUN = "not run"
VERDICTS = (REPRODUCED, STRONGER, REFUTED, MISSED, NOISE, ONCE, OPEN, UNKNOWN, NOT_RUN)
INFINITE = "at an infinite epsilon"
_SCALE = {"ece": 100, "mce": 100, "mse": 1, "nll": 1}  # of errors; two are published in per cent

Rows = Mapping[str, Mapping[str, Any]]  # runs by key and seed
Curve = Callable[[Mapping[str, Any]], Sequence[float]]  # the points of a run


class Claim(NamedTuple):
    """A claim of a paper about a system.

    Attributes:
      system: Its name in the tables.
      rows: The keys of its rows; the row with the best mean counts.
      published: The published number; "above", "below" or "level" for a comparison.
      than: The keys of the rows that it is compared with.
      measure: The number of a run, "epsilon", or a function that reads a curve from a run.
      at: The epoch whose accuracy is meant; 0 for the last.
      why: The reason why nothing ran, if it is not time; for an epsilon, why it costs more.
      own: Whether the comparison is of this repository, and not of the paper.
      best: How many runs the paper takes the best from; 0 for a mean or a single run.
      paired: Whether runs of one seed share start, batches and noise.
      limit: A reason for a worse result here; for an epsilon and for a number without rows, why it
        cannot be recomputed.
      factor: The numbers of ``than`` are multiplied by it.
      figures: The figures whose captions give the verdict; none for all that draw the row.
      baseline: Whether the paper claims a lead over the number.
      worst: Whether the row with the worst mean counts, and not the best one.
      counterexample: To a theorem.
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
    baseline: bool = False
    worst: bool = False
    counterexample: str = ""

    @property
    def compares(self) -> bool:
        """Whether two sides are compared, and not one with a number."""
        return isinstance(self.published, str)

    @property
    def sign(self) -> int:
        """1 if the claim is a larger number, -1 if it is a smaller one."""
        if self.published == "below" or self.measure in _SCALE:
            return -1
        return 1

    def error(self, number: float) -> float:
        """The error of a number; an accuracy lacks it to 100 %."""
        if self.measure in _SCALE:
            return number
        return 100 - number

    @property
    def half_unit(self) -> float:
        """Half a unit of the last printed digit."""
        _, _, decimals = str(self.published).partition(".")
        return 0.5 * 10 ** -len(decimals)

    def spent(self, row: str | None) -> str:
        """The key in `epsilons.json` of a row, or of its first epochs."""
        key = row or ""
        if self.at:
            key += f", {self.at} epochs"
        return key


class Verdict(NamedTuple):
    """A word of `VERDICTS`, what it rests on, and the p-value if a test decided."""

    word: str
    fact: str = ""
    chance: float | None = None

    def __str__(self) -> str:
        facts = [self.fact] if self.fact else []
        if self.chance is not None:
            facts.append("p < 0.001" if self.chance < 0.001 else f"p {self.chance:.2g}")
        if not facts:
            return self.word
        return f"{self.word}: {', '.join(facts)}"


class Judged(NamedTuple):
    """A claim, the runs that it was judged by, and the verdict."""

    claim: Claim
    row: str | None
    ours: list[float]  # a number a seed; for a curve the mean of its points
    other: str | None  # the row that it is compared with
    theirs: list[float]
    verdict: Verdict


def judged(
    claim: Claim, rows: Rows, costs: Mapping[str, Sequence[str]], line: float = CHANCE
) -> Judged:
    """The verdict of a claim by `RULE`.

    ``costs`` are the epsilons of rows, the last by PLD; ``line`` is the largest p beyond chance.
    """
    if claim.measure == "epsilon":
        return _spent(claim, costs)
    row, ours = _best_row(claim, claim.rows, rows, worst=claim.worst)
    other, theirs = _best_row(claim, claim.than, rows)
    verdict = _verdict(claim, ours, theirs, line)
    if claim.limit and verdict.word in (REFUTED, MISSED):
        verdict = verdict._replace(word=MISSED, fact=claim.limit)
    epsilons = costs.get(claim.spent(row), ())
    if "inf" in epsilons and not claim.compares:
        words = f"{verdict.fact}, {INFINITE}" if verdict.fact else INFINITE
        verdict = verdict._replace(fact=words)
    return Judged(claim, row, _means(ours), other, _means(theirs), verdict)


def line_of(chances: Sequence[float]) -> float:
    """The line of Benjamini and Hochberg: the largest p-value that is beyond chance."""
    line = 0.0
    for rank, chance in enumerate(sorted(chances), 1):
        limit = CHANCE * rank / len(chances)
        if chance <= limit:
            line = limit
    return line


def _means(side: Mapping[str, Sequence[float]]) -> list[float]:
    """The mean of the points of each seed."""
    return [statistics.mean(points) for points in side.values()]


def curve(name: str, read: Callable[[Any], Any] = lambda value: value) -> Curve:
    """A number of the logs, at each look that has it."""
    return lambda run: [read(look[name]) for look in run.get("way", ()) if name in look]


def _spent(claim: Claim, costs: Mapping[str, Sequence[str]]) -> Judged:
    """The verdict on an epsilon, by the row that costs most."""
    known = {}
    for row in claim.rows:
        epsilons = costs.get(claim.spent(row))
        if epsilons:
            known[row] = epsilons[-1]
    row = max(known, key=lambda row: float(known[row]), default=None)
    pld = known.get(row, "nan")
    if claim.limit:
        verdict = Verdict(UNKNOWN, claim.limit)
    elif row is None:
        verdict = Verdict(NOT_RUN)
    elif float(pld) <= float(claim.published):
        verdict = Verdict(REPRODUCED)
    else:
        reason = f", since {claim.why}" if claim.why else ""
        verdict = Verdict(REFUTED, f"it costs {pld}{reason}")
    return Judged(claim, row, [float(pld)], None, [], verdict)


def _verdict(
    claim: Claim, ours: Mapping[str, Any], theirs: Mapping[str, Any], line: float
) -> Verdict:
    """The verdict by the points of each seed, of both sides."""
    if claim.counterexample:
        return Verdict(REFUTED, claim.counterexample)
    if not claim.rows and claim.limit:
        return Verdict(UNKNOWN, claim.limit)
    if not ours or (claim.compares and not theirs):
        return Verdict(NOT_RUN, claim.why)
    if not claim.compares:
        return _measured(claim, [point for points in ours.values() for point in points])
    if callable(claim.measure):
        return _curves(claim, ours, theirs)
    if claim.paired:
        seeds = [seed for seed in ours if seed in theirs]
        our_numbers = [ours[seed][0] for seed in seeds]
        their_numbers = [theirs[seed][0] for seed in seeds]
    else:
        our_numbers = [points[0] for points in ours.values()]
        their_numbers = [points[0] for points in theirs.values()]
    count = min(len(our_numbers), len(their_numbers))
    if count < FEWEST:
        return Verdict(OPEN, f"{count} of {FEWEST} pairs")
    return _compared(claim, our_numbers, their_numbers, line)


def _measured(claim: Claim, numbers: list[float]) -> Verdict:
    """The verdict on a printed number."""
    fewest = claim.best or FEWEST
    if len(numbers) < fewest:
        return Verdict(OPEN, f"{len(numbers)} of {fewest} runs")
    ours = statistics.mean(numbers)
    if claim.best:
        better = max if claim.sign > 0 else min
        ours = better(numbers[: claim.best])
    published = float(claim.published)
    lead = claim.sign * (ours - published)
    noise = ERRORS * float(np.std(numbers, ddof=1)) * math.sqrt(1 + 1 / len(numbers))
    error = claim.error(published)
    if abs(lead) <= max(RELATIVE * error, claim.half_unit):
        return Verdict(REPRODUCED)
    if abs(lead) <= noise:
        return Verdict(REPRODUCED if noise <= PRECISE * error else NOISE)
    if not lead > 0:
        return Verdict(MISSED)
    if claim.baseline:
        return Verdict(STRONGER)
    return Verdict(REPRODUCED, "better")


def _curves(claim: Claim, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Verdict:
    """The verdict on curves, by the points that both sides have."""
    seeds = [seed for seed in ours if seed in theirs]
    leads = []
    for seed in seeds:
        for our_point, their_point in zip(ours[seed], theirs[seed], strict=False):
            leads.append(claim.sign * (our_point - claim.factor * their_point))
    if len(leads) < FEWEST:
        return Verdict(OPEN, f"{len(leads)} of {FEWEST} pairs")
    ahead = sum(lead > 0 for lead in leads)
    share = ahead / len(leads)
    fact = f"leads at {ahead} of {len(leads)} points"
    if len(seeds) == 1:
        return Verdict(ONCE, fact)
    if len(seeds) < FEWEST:
        fact += f", {len(seeds)} seeds"
    if share >= MOST:
        return Verdict(REPRODUCED, fact)
    if 1 - share >= MOST:
        return Verdict(REFUTED, fact)
    return Verdict(MISSED, fact)


def _compared(claim: Claim, ours: Sequence[float], theirs: Sequence[float], line: float) -> Verdict:
    """The verdict on two sides, each a number a seed."""
    our_scores = [claim.sign * number for number in ours]
    their_scores = [claim.sign * number for number in theirs]
    lead = statistics.mean(our_scores) - statistics.mean(their_scores)
    if claim.published == "level":
        our_error = claim.error(statistics.mean(ours))
        their_error = claim.error(statistics.mean(theirs))
        if our_error <= (1 + RELATIVE) * their_error:
            return Verdict(REPRODUCED)
    chance = _chance(claim, our_scores, their_scores)
    if not chance <= line:  # NaN, if a run diverged
        return Verdict(NOISE, chance=chance)
    if lead > 0:
        return Verdict(REPRODUCED, chance=chance)
    return Verdict(REFUTED, f"{-lead:.2g} behind", chance)


def _chance(claim: Claim, ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The p-value of a difference of this size, in either direction."""
    if claim.paired:
        leads = np.subtract(ours, theirs)
        if np.ptp(leads) == 0:  # the t-test of constants is NaN
            return float(leads[0] == 0)
        test: Any = scipy.stats.ttest_1samp(leads, 0)
    else:
        test = scipy.stats.ttest_ind(ours, theirs, equal_var=False)
    return test.pvalue


def _best_row(
    claim: Claim, keys: Sequence[str], rows: Rows, *, worst: bool = False
) -> tuple[str | None, dict[str, Any]]:
    """The row with the best or the worst mean, and the points of each of its seeds."""
    by_row: dict[str, dict[str, Any]] = {}
    for key in keys:
        for seed, run in rows.get(key, {}).items():
            points = _points(claim, run)
            if points:
                by_row.setdefault(key, {})[seed] = points

    def mean(key: str) -> float:
        if callable(claim.measure):  # as in figures, the row with the best accuracy counts
            numbers = [number(run.get("accuracy")) for run in rows[key].values()]
        else:
            numbers = [claim.sign * points[0] for points in by_row[key].values()]
        if not math.isfinite(sum(numbers)):
            return -math.inf
        return statistics.mean(numbers)

    if not by_row:
        return None, {}
    extreme = min if worst else max
    row = extreme(by_row, key=mean)
    return row, by_row[row]


def _points(claim: Claim, run: Mapping[str, Any]) -> Sequence[float]:
    """The number of a run, or the points of its curve."""
    if callable(claim.measure):
        return claim.measure(run)
    scale = _SCALE.get(claim.measure, 1)
    if claim.at:
        way = run.get("way", ())
        if len(way) < claim.at:
            return []
        run = way[claim.at - 1]
        scale = 100  # logs have accuracies as parts of 1
    if claim.measure not in run:
        return []
    return [scale * number(run[claim.measure])]


def number(value: float | None) -> float:
    """A number of a result; JSON has null for the NaN of a run that diverged.

    Such a run counts: without it the luckier seeds decide.
    """
    return math.nan if value is None else value

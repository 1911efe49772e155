# SPDX-License-Identifier: Apache-2.0
"""Time and tightness of an epsilon: dpjax and dp-accounting, by RDP and by PLD.

claim     dpjax answers in less time, and as tightly
verdict   2,000 different multipliers take 1.0 s by RDP, where dp-accounting takes 37
hardware  2 cores of an AMD EPYC; medians of 5
command   make bench BENCH=accounting ARGS="--out FILE"

Answers are upper bounds with each library's default orders, grids and tolerances. A question is
repeated with a slightly different rate, so caches do not answer. dp-accounting is not asked
for the PLD of the schedule, which takes minutes.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import dp_accounting
from absl import flags
from dp_accounting import pld, rdp

from dpjax import accounting
from experiments.benchmarks import reporting

DELTA = 1e-5
RATE = 256 / 60_000
STEPS = 14_063
MULTIPLIER = 1.1
# The schedule has this many different multipliers, which fall on a line.
DISTINCT = 2_000
FIRST = 1.5
LAST = 0.8
THEIRS = {"rdp": rdp.RdpAccountant, "pld": pld.PLDAccountant}
Runs = list[tuple[float, int]]  # noise multipliers, each with a number of steps


def ours(method: str, runs: Runs, rate: float) -> float:
    events = [accounting.subsampled_gaussian(z, rate, steps) for z, steps in runs]
    return accounting.epsilon(accounting.compose(*events), DELTA, method)


def event_of(noise_multiplier: float, steps: int, rate: float) -> Any:
    """A run, as dp-accounting describes it."""
    step = dp_accounting.GaussianDpEvent(noise_multiplier)
    return dp_accounting.SelfComposedDpEvent(dp_accounting.PoissonSampledDpEvent(rate, step), steps)


def theirs(method: str, runs: Runs, rate: float) -> float:
    events = [event_of(z, steps, rate) for z, steps in runs]
    accountant = THEIRS[method]()
    accountant.compose(dp_accounting.ComposedDpEvent(events))
    return accountant.get_epsilon(DELTA)


def falling(steps: int) -> Runs:
    """A schedule of noise multipliers, each for one step."""
    slope = (LAST - FIRST) / (steps - 1)
    return [(FIRST + slope * step, 1) for step in range(steps)]


def questions(smoke: bool) -> dict[str, dict[str, Callable[[float], float]]]:
    """The functions of the sampling rate that are timed, by question and contestant."""
    plans = {
        "steps": [(MULTIPLIER, 10 if smoke else STEPS)],
        "schedule": falling(3 if smoke else DISTINCT),
    }
    asked: dict[str, dict[str, Callable[[float], float]]] = {}
    for method in THEIRS:
        for name, runs in plans.items():
            row = asked.setdefault(name, {})
            row[f"dpjax {method}"] = functools.partial(ours, method, runs)
            if smoke or (name, method) != ("schedule", "pld"):
                row[f"dp-accounting {method}"] = functools.partial(theirs, method, runs)
    return asked


def measure(answer: Callable[[float], float], repeats: int) -> dict[str, Any]:
    """The answer, and the seconds of each repeat."""
    seconds = []
    answers = []
    for repeat in range(repeats):
        rate = RATE * (1 + 1e-9 * repeat)  # a new rate, which no cache knows
        started = time.perf_counter()
        answers.append(float(answer(rate)))
        seconds.append(time.perf_counter() - started)
    return {"answer": answers[0], "seconds": seconds, "median_s": statistics.median(seconds)}


def main(asked: Any) -> None:
    repeats = 1 if asked.smoke else asked.repeats
    packages = ("numpy", "scipy", "jax", "dp-accounting")
    report = reporting.begin(packages, smoke=asked.smoke, repeats=repeats)
    report["questions"] = {}
    for name, contestants in questions(asked.smoke).items():
        rows = report["questions"][name] = {}
        for who, answer in contestants.items():
            row = rows[who] = measure(answer, repeats)
            print(f"{name:12} {who:18} {row['median_s']:10.4f} s {row['answer']:12.6f}", flush=True)
            reporting.keep(report, asked.out)


if __name__ == "__main__":
    flags.DEFINE_integer("repeats", 5, "How often each contestant answers.", lower_bound=1)
    reporting.run(main, smoke="Few steps, one repeat")

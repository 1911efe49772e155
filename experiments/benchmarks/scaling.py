# SPDX-License-Identifier: Apache-2.0
"""Strong scaling: one private step on one core, and on all of them.

  result    speedups on two cores, as two devices: 1.56, 1.87, 1.81, 1.34 and 1.59 for W1 to W5; as
            one device: 1.06, 1.13, 1.07, 1.57 and 1.32
  hardware  2 cores of an AMD EPYC, idle but for this; JAX 0.10.2; medians of 7 alternated rounds
  command   make bench BENCH=scaling ARGS="--rounds 7 --out FILE"
  figures   experiments/results/scaling.json; the table in docs/pages/scale.md (``--page``)

The step is that of `dpjax.dpsgd` (draw, clip, sum, noise, SGD) with batches of one size. ``one
core`` is a process that the operating system keeps on one core; ``one device`` has all cores, and
XLA splits single operations over them; ``devices`` has as many host devices as cores, and a mesh
splits the batch. They take turns in random order. `speedup` is the median of one core over theirs,
and `efficiency` the speedup per core. ``others`` is the share of the processors that other programs
used just before the rounds.
"""

from __future__ import annotations

import math
import os
import pathlib
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import reporting
import workers
from absl import flags
from common import markdown
from workloads import SEED, WORKLOADS

TURN = 1.0  # seconds of steps in a turn


def ways(cores: int) -> dict[str, dict[str, int]]:
    """How many cores and devices each contestant has."""
    return {
        "one core": {"cores": 1, "devices": 1},
        "one device": {"cores": cores, "devices": 1},
        "devices": {"cores": cores, "devices": cores},
    }


@contextmanager
def kept_to(cores: int) -> Iterator[None]:
    """Processes that begin inside have this many of the cores of this process."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:cores])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def busy(seconds: float = 2.0) -> float:
    """The share of the processors that programs use while this one waits."""

    def used() -> tuple[int, int]:
        fields = pathlib.Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
        ticks = list(map(int, fields))
        return sum(ticks), ticks[3] + ticks[4]  # idle, and idle for a disk

    all_before, idle_before = used()
    time.sleep(seconds)
    all_after, idle_after = used()
    return 1 - (idle_after - idle_before) / max(1, all_after - all_before)


def measure(name: str, batch_size: int, rounds: int) -> dict[str, Any]:
    """One workload: milliseconds of a step by each way, in turns."""
    contestants = ways(len(os.sched_getaffinity(0)))
    started: dict[str, workers.Worker] = {}
    try:
        for way, facts in contestants.items():
            with kept_to(facts["cores"]):
                started[way] = workers.Worker(sys.executable, "scaling_steps.py")
            task = {"workload": name, "devices": facts["devices"], "batch_size": batch_size}
            ask(started[way], task)
        others, order = busy(), random.Random(SEED)
        times: dict[str, list[float]] = {way: [] for way in contestants}
        for _ in range(rounds):
            for way in order.sample(list(contestants), len(contestants)):
                steps = math.ceil(TURN / ask(started[way], {"steps": 1}))
                times[way].append(1e3 * ask(started[way], {"steps": steps}))
    finally:
        for worker in started.values():
            worker.close()
    first = statistics.median(times["one core"])
    figures = {
        way: {
            **facts,
            "median_ms": (median := statistics.median(times[way])),
            "speedup": first / median,
            "efficiency": first / median / facts["cores"],
            "rounds_ms": times[way],
        }
        for way, facts in contestants.items()
    }
    return {"batch_size": batch_size, "others": others, "ways": figures}


def ask(worker: workers.Worker, question: dict[str, Any]) -> float:
    """The seconds per step that a worker answers, 0 for a task."""
    answer = worker.ask(question)
    if "refused" in answer:
        raise RuntimeError(f"scaling: {question}: {answer['refused']}")
    return answer.get("seconds", 0.0)


def table(report: dict[str, Any]) -> str:
    """The table of docs/pages/scale.md."""
    workloads = report["workloads"].items()
    cores = max(f["cores"] for _, found in workloads for f in found["ways"].values())
    head = (
        f"| | one core, ms | {cores} cores, one device | speedup | {cores} cores, {cores} devices "
        "| speedup | others |"
    )
    rows = []
    for name, found in workloads:
        one, whole, split = found["ways"].values()
        cells = [f"{one['median_ms']:,.0f}"]
        cells += [
            x for f in (whole, split) for x in (f"{f['median_ms']:,.0f}", f"{f['speedup']:.2f}")
        ]
        rows.append(markdown.line(name, *cells, f"{found['others']:.0%}"))
    return markdown.table(head, rows)


def main(asked: Any) -> None:
    names = reporting.chosen(
        "workloads", list(WORKLOADS), ["W4"] if asked.smoke else asked.workloads
    )
    rounds = 1 if asked.smoke else asked.rounds
    report = reporting.begin(("jax", "jaxlib", "optax"), smoke=asked.smoke, rounds=rounds)
    report["workloads"] = {}
    for name in names:
        size = 16 if asked.smoke else WORKLOADS[name].batch_size
        found = measure(name, size, rounds)
        report["workloads"][name] = found
        for way, f in found["ways"].items():
            print(
                f"{name} {way:10} {f['median_ms']:9.2f} ms  speedup {f['speedup']:.2f}"
                f"  efficiency {f['efficiency']:.2f}  others {found['others']:.0%}",
                flush=True,
            )
        reporting.keep(report, asked.out)
    markdown.rewrite(asked.page, {"scaling": table(report)})


if __name__ == "__main__":
    flags.DEFINE_list("workloads", None, "Which; by default all.")
    flags.DEFINE_string("page", None, "Markdown file whose table is written again.")
    reporting.run(main, smoke="A batch of 16, one round", rounds=9)

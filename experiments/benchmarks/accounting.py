# SPDX-License-Identifier: Apache-2.0
"""Time and tightness of an epsilon: dpjax, dp-accounting and Opacus.

claim     dpjax answers in less time, and as tightly
verdict   2,000 different multipliers take 1.0 s by RDP (dp-accounting 37, Opacus 18), 17 s by PLD
hardware  2 cores of an AMD EPYC; medians of 5, or of 3 or 1 above 15 s
command   make bench-peers BENCH=accounting ARGS="--out experiments/results/accounting.json"

All answers are upper bounds with each library's default orders, grids and tolerances; Opacus has
PRV for PLD. Each contestant runs in its own process (``... accounting LIBRARY METHOD``), which can
be stopped, imports excluded, and repeats with a slightly different rate so that caches do not
answer.
"""

from __future__ import annotations

import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from absl import flags

from experiments.benchmarks import reporting, workers

Task = dict[str, Any]

CONTESTANTS = (
    ("dpjax", "rdp"),
    ("dp-accounting", "rdp"),
    ("opacus", "rdp"),
    ("dpjax", "pld"),
    ("dp-accounting", "pld"),
    ("opacus", "prv"),
)
STEPS, MULTIPLIER, DELTA, TARGET = 14_063, 1.1, 1e-5, 3.0
DISTINCT, FIRST, LAST = 2_000, 1.5, 0.8  # a schedule: as many multipliers, falling on a line


def questions(smoke: bool) -> dict[str, dict[str, Any]]:
    """Name -> task, in its own words first; a smoke run asks about a few steps."""
    steps, distinct = (10, 3) if smoke else (STEPS, DISTINCT)
    falling = [FIRST + (LAST - FIRST) * i / (distinct - 1) for i in range(distinct)]
    common = {"sampling_rate": 256 / 60_000, "delta": DELTA}
    return {
        "steps": {
            "words": f"epsilon of {steps:,} steps with multiplier {MULTIPLIER}",
            "runs": [(MULTIPLIER, steps)],
            **common,
        },
        "schedule": {
            "words": f"epsilon of {distinct:,} steps with multipliers from {FIRST} to {LAST}",
            "runs": [(z, 1) for z in falling],
            **common,
        },
        "calibration": {
            "words": f"multiplier that spends epsilon {TARGET:g} in {steps:,} steps",
            "target": TARGET,
            "steps": steps,
            **common,
        },
    }


def with_dpjax(method: str) -> Callable[[Task], float]:
    from dpjax import accounting

    def answer(task: Task) -> float:
        rate, delta = task["sampling_rate"], task["delta"]
        if "target" in task:

            def event(noise_multiplier: float) -> Any:
                return accounting.subsampled_gaussian(noise_multiplier, rate, task["steps"])

            return accounting.calibrate(event, task["target"], delta, method)
        runs = [accounting.subsampled_gaussian(z, rate, steps) for z, steps in task["runs"]]
        return accounting.epsilon(accounting.compose(*runs), delta, method)

    return answer


def with_dp_accounting(method: str) -> Callable[[Task], float]:
    import dp_accounting
    from dp_accounting import pld, rdp

    accountant = {"rdp": rdp.RdpAccountant, "pld": pld.PLDAccountant}[method]

    def run(noise_multiplier: float, rate: float, steps: int) -> Any:
        step = dp_accounting.GaussianDpEvent(noise_multiplier)
        return dp_accounting.SelfComposedDpEvent(
            dp_accounting.PoissonSampledDpEvent(rate, step), steps
        )

    def answer(task: Task) -> float:
        rate, delta = task["sampling_rate"], task["delta"]
        if "target" in task:
            return dp_accounting.calibrate_dp_mechanism(
                accountant, lambda z: run(z, rate, task["steps"]), task["target"], delta
            )
        runs = [run(z, rate, steps) for z, steps in task["runs"]]
        return accountant().compose(dp_accounting.ComposedDpEvent(runs)).get_epsilon(delta)

    return answer


def with_opacus(method: str) -> Callable[[Task], float]:
    from opacus import accountants
    from opacus.accountants.utils import get_noise_multiplier

    def answer(task: Task) -> float:
        rate, delta = task["sampling_rate"], task["delta"]
        if "target" in task:
            return get_noise_multiplier(
                target_epsilon=task["target"],
                target_delta=delta,
                sample_rate=rate,
                steps=task["steps"],
                accountant=method,
            )
        accountant = accountants.create_accountant(method)
        accountant.history = [(z, rate, steps) for z, steps in task["runs"]]
        return accountant.get_epsilon(delta)

    return answer


LIBRARIES = {"dpjax": with_dpjax, "dp-accounting": with_dp_accounting, "opacus": with_opacus}


def serve(library: str, method: str) -> None:
    """Answers tasks, and before them ``{"prepare": true}``, so that imports are not timed."""
    ready: list[Callable[[Task], float]] = []

    def handle(question: dict[str, Any]) -> dict[str, Any]:
        if "prepare" in question:
            ready.append(LIBRARIES[library](method))
            return {}
        started = time.perf_counter()
        answer = ready[0](question)
        return {"seconds": time.perf_counter() - started, "answer": float(answer)}

    workers.serve(handle)


def ready(peers: str | None, library: str, method: str) -> workers.Worker:
    """A contestant that has imported what it needs; if it cannot, it says so when asked."""
    python = str(peers) if library == "opacus" else sys.executable
    worker = workers.Worker(python, "accounting", library, method)
    worker.ask({"prepare": True})
    return worker


def measure(
    task: dict[str, Any], asked: dict[str, workers.Worker], repeats: int, seconds: float
) -> dict[str, dict[str, Any]]:
    """Times and answers of all contestants for one question, in turns, or why there are none."""
    rows: dict[str, dict[str, Any]] = {who: {"seconds": []} for who in asked}
    for repeat in range(repeats):
        again = {**task, "sampling_rate": task["sampling_rate"] * (1 + 1e-9 * repeat)}
        for who, worker in asked.items():
            row = rows[who]
            left = seconds - sum(row["seconds"])
            # A repeat that would exceed the cap does not start; the first has all the time.
            if "refused" in row or (repeat and row["seconds"][-1] > 0.9 * left):
                continue
            answer = worker.ask(again, left)
            if "refused" in answer:
                row["refused"] = answer["refused"]
                continue
            row["seconds"].append(answer["seconds"])
            row["median_s"] = statistics.median(row["seconds"])
            row.setdefault("answer", answer["answer"])
    return rows


def table(name: str, rows: dict[str, dict[str, Any]]) -> str:
    """One question's answers, a contestant a row."""
    lines = [name, f"  {'':18}    median s     fastest - slowest  repeats      answer"]
    for who, row in rows.items():
        if "answer" not in row:
            lines.append(f"  {who:18}  {row['refused']}")
            continue
        times = row["seconds"]
        lines.append(
            f"  {who:18}  {row['median_s']:10.4f}  {min(times):10.4f} - {max(times):<10.4f}"
            f"{len(times):6}  {row['answer']:12.6f}"
        )
    return "\n".join(lines)


def main(asked: Any) -> None:
    peers = asked.peers_python if pathlib.Path(asked.peers_python).exists() else None
    repeats, seconds = 1 if asked.smoke else asked.repeats, asked.seconds
    packages = ("numpy", "scipy", "jax", "dp-accounting")
    report = reporting.begin(packages, smoke=asked.smoke, repeats=repeats, seconds=seconds)
    if peers is None:
        print(workers.NOT_RUN, flush=True)
    names = {f"{library} {method}": (library, method) for library, method in CONTESTANTS}
    names = {who: words for who, words in names.items() if peers or "opacus" not in who}
    alive: dict[str, workers.Worker] = {}
    report["questions"] = {}
    for name, task in questions(asked.smoke).items():
        alive |= {who: ready(peers, *words) for who, words in names.items() if who not in alive}
        rows = report["questions"][name] = measure(task, alive, repeats, seconds)
        print(table(task["words"], rows), flush=True)
        for who in [who for who, row in rows.items() if "refused" in row]:
            alive.pop(who).close()
        reporting.keep(report, asked.out)
    for worker in alive.values():
        worker.close()


if __name__ == "__main__" and sys.argv[1:2] and sys.argv[1] in LIBRARIES:
    serve(*sys.argv[1:])
elif __name__ == "__main__":
    flags.DEFINE_integer("repeats", 5, "How often each contestant answers.", lower_bound=1)
    flags.DEFINE_float("seconds", 60.0, "A contestant that needs longer is stopped.", 0.1)
    flags.DEFINE_string("peers_python", str(workers.PEERS), "Interpreter that has the peers.")
    reporting.run(main, smoke="Few steps, one repeat")

# SPDX-License-Identifier: Apache-2.0
"""One private step of a Transformer of 100 million parameters, and of adapters for it.

  result    a private step takes 1.3 times the time and 1.2 times the memory of a plain one (3.0 s,
            1,080 MiB); with 295,000 adapter parameters 1.4 and 1.1 times
  hardware  2 cores of an AMD EPYC; JAX 0.10.2; medians of 3
  command   make bench BENCH=large ARGS="--rounds 3 --out experiments/results/large.json"
  figures   experiments/results/large.json

The network has 12 blocks of width 768 and 20,000 tokens; a batch is 8 texts of 64 tokens, in
bfloat16.  Adapters are matrices of rank 8 beside queries and values; the loss closes over all
other leaves, which get no gradient, norm or noise.  Each case is a process (`large_cases`).
`peak` is the rise of its memory above parameters and batch, `process` its largest memory.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

import reporting
import workers
from large_cases import CASES

SHAPE = {"vocabulary": 20_000, "length": 64, "width": 768, "depth": 12, "heads": 12}
SMALL = {"vocabulary": 50, "length": 8, "width": 32, "depth": 1, "heads": 4}


def measure(task: dict[str, Any], rounds: int) -> dict[str, dict[str, Any]]:
    """Every case's times and memory, in turns."""
    asked = {case: workers.Worker(sys.executable, "large_cases.py", case) for case in CASES}
    figures = {case: worker.ask({"prepare": task}) for case, worker in asked.items()}
    try:
        for _ in range(rounds):
            for case, worker in asked.items():
                answer = {**figures[case], **worker.ask({"steps": 1})}
                if "refused" in answer or not answer["sound"]:
                    raise RuntimeError(f"large: {case}: {answer.get('refused', 'not finite')}.")
                figures[case] = answer
                answer.setdefault("rounds_s", []).append(answer.pop("seconds"))
    finally:
        for worker in asked.values():
            worker.close()
    for figure in figures.values():
        figure["median_s"] = statistics.median(figure["rounds_s"])
    return figures


def table(figures: dict[str, dict[str, Any]]) -> str:
    rows = [f"  {'':17}    trained  median s  first s  plan MiB  peak MiB  process MiB"]
    for case, f in figures.items():
        plan, peak, process = (
            "-" if f[kind] is None else f"{f[kind] / 2**20:,.0f}"
            for kind in ("planned_bytes", "peak_bytes", "process_bytes")
        )
        rows.append(
            f"  {case:17}{f['trained']:11,}  {f['median_s']:8.3f}  {f['first_s']:7.1f}"
            f"  {plan:>8}  {peak:>8}  {process:>11}"
        )
    return "\n".join(rows)


def main(asked: Any) -> None:
    rounds, size, shape = (2, 2, SMALL) if asked.smoke else (asked.rounds, 8, SHAPE)
    task = {"batch_size": size, "shape": shape}
    report = reporting.begin(("jax", "jaxlib", "flax"), smoke=asked.smoke, rounds=rounds)
    report |= {**task, "cases": measure(task, rounds)}
    print(table(report["cases"]), flush=True)
    reporting.keep(report, asked.out)


if __name__ == "__main__":
    reporting.run(main, smoke="A tiny network, two rounds", rounds=5)

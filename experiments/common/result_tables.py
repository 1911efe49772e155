# SPDX-License-Identifier: Apache-2.0
"""Tables of results, made from the JSON files in `experiments/results`.

result    experiments/results/README.md, and the rows between the markers in README.md
command   python experiments/common/result_tables.py
"""

from __future__ import annotations

import json
import math
import pathlib
import statistics
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent.parent
RESULTS = ROOT / "experiments" / "results"
PAPERS = {
    "tramer2021": "Tramèr and Boneh, 2021: features",
    "papernot2021": "Papernot et al., 2021: tempered sigmoids",
    "an2021": "An et al., 2021: noise curricula",
    "losing_less2022": "Losing Less, 2022: the composite loss",
    "liu2021": "Liu et al., 2021: grouped clipping",
    "bu2023": "Bu et al., 2023: calibration",
}
WORKLOADS = {
    "W1": "MNIST CNN, batch 256",
    "W2": "CIFAR CNN of 550,570 parameters, batch 256",
    "W3": "CNN on wavelet features, batch 1,024",
    "W4": "MLP 784-256-256-10, batch 1,024",
    "W5": "Transformer, 64 tokens, batch 64",
}
HEADLINES = (
    ("tramer2021", "mnist pixels cnn", "MNIST, CNN from pixels, at the paper's epsilon 2.99"),
    ("tramer2021", "mnist wavelets linear", "MNIST, linear model on wavelets, at 3.00"),
    ("tramer2021", "fashion pixels cnn", "FashionMNIST, CNN from pixels, at 3.00"),
    ("tramer2021", "fashion wavelets linear", "FashionMNIST, linear model on wavelets, at 3.00"),
    (
        "tramer2021",
        "cifar wavelets linear (JPEG copy)",
        "CIFAR-10 (JPEG copy), linear model on wavelets, at 3.00",
    ),
)
BEGIN, END = "<!-- results: begin -->\n", "<!-- results: end -->\n"


def load(name: str) -> dict[str, Any]:
    """One file of results."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def summary(seeds: dict[str, dict[str, Any]], figure: str) -> str:
    """Mean, range and number of seeds of one row."""
    values = [run[figure] for run in seeds.values() if figure in run]
    spread = f" ({min(values):.4g} to {max(values):.4g})" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4g}{spread} | {len(values)}"


def rows_of(paper: str) -> Iterator[str]:
    """The rows of one paper's table."""
    for name, seeds in sorted(load(paper)["rows"].items()):
        figure = "accuracy" if all("accuracy" in run for run in seeds.values()) else "mse"
        if all(figure in run for run in seeds.values()):
            yield f"| {name} | {summary(seeds, figure)} |"


def step_rows() -> Iterator[str]:
    """Milliseconds of one step beside plain JAX and the peers, one row per workload."""
    for name, workload in load("steps")["workloads"].items():
        contestants = workload["contestants"].items()
        taken = {who: c["median_ms"] for who, c in contestants if "median_ms" in c}
        opacus = min(ms for who, ms in taken.items() if who.startswith("opacus"))
        each = taken["plain"], taken["dpjax auto"], opacus, taken["torch plain"]
        yield f"| {WORKLOADS[name]} | " + " | ".join(f"{ms:.3g}" for ms in each) + " |"


def audit_rows() -> Iterator[str]:
    """Lower bounds beside claims, one row per algorithm."""
    for name, found in load("audits")["rows"].items():
        step, run = found["step"], found["run"]
        # Bounds are rounded down and claims up, so that rounding refutes nothing and claims less.
        each = [
            f"{math.floor(1000 * audit['bound']) / 1000:.3f} | "
            f"{math.ceil(1000 * audit['claimed']) / 1000:.3f}"
            for audit in (step, run)
        ]
        yield f"| {name} | {step['measured']} | {' | '.join(each)} |"


def optimizer_rows() -> Iterator[str]:
    """How many of Optax's optimizers run on private means, and each of the others."""
    rows = load("optimizers")["rows"]
    ways = zip(*map(dict.values, rows.values()), strict=True)
    ran = [sum(found == "runs" for found in each) for each in ways]
    yield f"| run, of {len(rows)} | " + " | ".join(map(str, ran)) + " | |"
    for name, row in rows.items():
        stopped = [found for found in row.values() if found != "runs"]
        if stopped:
            # As code: an error may hold the signs of a table or of HTML.
            why = stopped[0].translate(str.maketrans("|`", "/'"))
            cells = ["runs" if found == "runs" else "refused" for found in row.values()]
            yield f"| {name} | {' | '.join(cells)} | `{why:.150}` |"


def page() -> str:
    """The whole page of results."""
    lines = [
        "# Results",
        "",
        "Made by `python experiments/common/result_tables.py` from the JSON files in",
        "`experiments/results`, which also hold date, versions and hardware. Accuracies are test",
        "accuracies in per cent (mse: mean squared error), as mean and range over seeds. Rows that",
        "are missing were not run; no figure of an accelerator was measured.",
    ]
    for name, title in PAPERS.items():
        lines += ["", f"## {title}", "", "| row | mean (range) | seeds |", "|---|---|---|"]
        lines += rows_of(name)
    lines += ["", "## One step, forward to update, in milliseconds on two CPU cores", ""]
    lines += [
        "| | plain JAX | dpjax | Opacus, best mode | PyTorch, plain |",
        "|---|---|---|---|---|",
    ]
    lines += step_rows()
    lines += [
        "",
        "Medians of alternated rounds in one run, by",
        '`make bench-peers ARGS="--rounds 15 --seconds 8 --host_devices 2 --peaks"`.',
    ]
    audits = load("audits")
    above = sum(audit["refutes"] for row in audits["rows"].values() for audit in row.values())
    lines += ["", f"## Audits: lower bounds on epsilon at delta {audits['delta']:g}", ""]
    lines += ["| | one step | epsilon above | claimed | a run: epsilon above | claimed |"]
    lines += ["|---|---|---|---|---|---|", *audit_rows()]
    lines += [
        "",
        f"{above} of {2 * len(audits['rows'])} bounds exceed their claims. The bound of a step has",
        "a confidence of 99.9 % (with jl, mu is the median over projections), that of a run 95 %.",
        f"By `{audits['command']}`.",
    ]
    lines += [
        "",
        "## Optax's optimizers on private means",
        "",
        "Two steps each, by `make bench BENCH=optimizers`: in Optax itself, through `dpjax.dpsgd`,",
        "and behind `mechanism.private` under `testing.assert_private`. Rows that are missing run",
        "in all three.",
        "",
        "| optimizer | Optax itself | `dpsgd` | chain | the first error |",
        "|---|---|---|---|---|",
    ]
    lines += optimizer_rows()
    return "\n".join(lines) + "\n"


def readme_rows() -> str:
    """Five rows for the README."""
    lines = ["| what | test accuracy, per cent | seeds |", "|---|---|---|"]
    rows = {paper: load(paper)["rows"] for paper, _, _ in HEADLINES}
    lines += [
        f"| {words} | {summary(rows[paper][row], 'accuracy')} |" for paper, row, words in HEADLINES
    ]
    return "\n".join(lines) + "\n"


def with_rows(readme: str) -> str:
    """The README with fresh rows between its markers."""
    before, rest = readme.split(BEGIN)
    return before + BEGIN + readme_rows() + END + rest.split(END)[1]


def main() -> None:
    """Writes both files."""
    (RESULTS / "README.md").write_text(page())
    readme = ROOT / "README.md"
    readme.write_text(with_rows(readme.read_text()))


if __name__ == "__main__":
    main()

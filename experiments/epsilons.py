# SPDX-License-Identifier: Apache-2.0
"""The epsilons of the papers' rows: the paper's own, and bounds by RDP and by PLD.

``python -m experiments.epsilons`` writes ``experiments/results/epsilons.json`` in three minutes.
Run it with the data at hand when settings of rows change.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from experiments.common import runs, tables
from experiments.common.paper import Paper


def costs(paper: Paper) -> dict[str, list[str]]:
    """The epsilons of rows that ran or have a printed epsilon, and of first epochs with a claim."""
    spent = {}
    ran = set()
    for key, seeds in tables.load(paper.name)["rows"].items():
        if key in paper.rows:
            first_run = next(iter(seeds.values()))
            spent[key] = epsilons(paper, key, run=first_run)
            ran.add(key)
    for claim in paper.claims:
        if claim.at:
            known = {*claim.rows, *claim.than} & ran
            if claim.measure == "epsilon" and not known:
                known = set(claim.rows)
            for key in sorted(known):
                spent[claim.spent(key)] = epsilons(paper, key, claim.at)
        elif claim.measure == "epsilon" and ran.isdisjoint(claim.rows):
            key = claim.rows[0]
            spent[key] = epsilons(paper, key)
    return {key: words for key, words in spent.items() if words}


def epsilons(
    paper: Paper, key: str, epochs: int = 0, run: Mapping[str, Any] | None = None
) -> list[str]:
    """The three epsilons of a row; none without privacy."""
    if "not private" in key or "without privacy" in key:
        return []
    if run is not None and runs.has_no_training(run):
        return []
    if run is not None and "pld" in run:
        return runs.cost(paper, paper.rows[key], run)
    row = paper.rows[key]
    if epochs:
        mechanism, *paper_accounting = paper.epsilons(row, epochs)
    else:
        mechanism, *paper_accounting = paper.epsilons(row)
    if not mechanism.multipliers.all():
        return []
    return runs.epsilons(mechanism, *paper_accounting)


def written(content: dict[str, Any]) -> str:
    """JSON with a line for each row, so a difference is read by line."""

    def on_one_line(row: re.Match[str]) -> str:
        return f"[{' '.join(row[1].split())}]"

    flat = json.dumps(content, indent=0)
    return re.sub(r"\[\s+([^]]*?)\s+\]", on_one_line, flat) + "\n"


def main(argv: list[str]) -> None:
    """Writes the file."""
    runs.only_flags(argv)
    content = {paper.name: costs(paper) for paper in tables.papers()}
    (tables.RESULTS / "epsilons.json").write_text(written(content))


if __name__ == "__main__":
    runs.start(main, "data_dir")

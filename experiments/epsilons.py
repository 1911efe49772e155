# SPDX-License-Identifier: Apache-2.0
"""What the rows of the papers cost: the paper's epsilon, and bounds by RDP and by PLD.

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
    ran = {key: of for key, of in tables.load(paper.name)["rows"].items() if key in paper.rows}
    spent = {key: epsilons(paper, key, run=next(iter(of.values()))) for key, of in ran.items()}
    for claim in paper.claims:
        if claim.at:
            for key in sorted({*claim.rows, *claim.than} & set(ran)):
                spent[claim.spent(key)] = epsilons(paper, key, claim.at)
        elif claim.measure == "epsilon" and not set(claim.rows) & set(ran):
            spent[claim.rows[0]] = epsilons(paper, claim.rows[0])
    return {key: words for key, words in spent.items() if words}


def epsilons(
    paper: Paper, key: str, epochs: int = 0, run: Mapping[str, Any] | None = None
) -> list[str]:
    """The three epsilons of a row; none without privacy."""
    if "not private" in key or "without privacy" in key:
        return []
    if run is not None and "networks" in run:
        return []  # counts, and no training
    if run is not None and "pld" in run:
        return runs.cost(paper, paper.rows[key], run)
    mechanism, *how = paper.epsilons(paper.rows[key], *([epochs] if epochs else []))
    if not mechanism.multipliers.all():
        return []
    return runs.epsilons(mechanism, *how)


def written(content: dict[str, Any]) -> str:
    """JSON with a line for each row, so that a difference is read by line."""
    flat = json.dumps(content, indent=0)
    return re.sub(r"\[\s+([^]]*?)\s+\]", lambda row: f"[{' '.join(row[1].split())}]", flat) + "\n"


def main(argv: list[str]) -> None:
    runs.only_flags(argv)
    content = {paper.name: costs(paper) for paper in tables.papers()}
    (tables.RESULTS / "epsilons.json").write_text(written(content))


if __name__ == "__main__":
    runs.start(main, "data_dir")

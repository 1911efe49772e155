# SPDX-License-Identifier: Apache-2.0
"""The page with every figure of the five papers, drawn from the committed results.

`docs/generated_pages.py` builds it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from experiments import accuracy
from experiments.common import pictures, tables
from experiments.common.claims import Judged
from experiments.common.figures import Figure
from experiments.common.paper import Paper

CURVES = """\
## Where targets were missed

Accuracy on training examples that were held out, of the settings chosen at epsilon 3, with
their noise and without it, by `python -m experiments.accuracy --curves`. Where the two lines meet,
the model is the limit; where they part, the noise is."""
SHOWN = 6  # a caption names the first of the rows that were not run
PAGE = """\
# Gallery

The figures of the five papers, drawn from the JSON files in `experiments/results` when this page
is built. A line is the median of its seeds, a band runs from the smallest to the largest, and
epsilon is that of what ran here. Verdicts come from [the results](results.md)."""


class Drawn(NamedTuple):
    """A figure, drawn as far as its rows were run."""

    paper: Paper
    name: str
    figure: Figure
    picture: bytes | None
    missing: list[str]

    @property
    def file(self) -> str:
        return f"{self.paper.name}_{self.name}.png"

    def caption(self, judged: Sequence[Judged]) -> str:
        """What the paper says, what ran here, and the verdicts on the rows that it shows."""
        parts = [f"**Published.** {self.figure.shows}"]
        by_verdict: dict[str, list[str]] = {}
        keys = set(self.figure.row_keys()) if self.figure.judged else ()
        for result in judged:
            claim, words = result.claim, result.verdict.partition(":")[0]
            if self.name in claim.figures or (not claim.figures and result.row in keys):
                system = "epsilon of " * (claim.measure == "epsilon") + claim.system
                by_verdict.setdefault(words, []).append(system)
        if self.picture is None:
            parts.append("**Here.** Not run.")
        elif not self.figure.lines:
            parts.append("**Here.** Drawn from the formula.")
        elif by_verdict:
            words = [f"{verdict}: {'; '.join(of)}" for verdict, of in sorted(by_verdict.items())]
            parts.append(f"**Here.** By the rule of the results, {'. '.join(words)}.")
        else:
            parts.append("**Here.** No claim of it is judged; compare the lines.")
        if self.missing:
            absent = ", ".join(self.missing[:SHOWN])
            absent += f" and {len(self.missing) - SHOWN} more" * (len(self.missing) > SHOWN)
            run = f"`{self.paper.command} --figure={self.name}` runs these rows."
            parts.append(f"**Not run:** {absent}. {run}")
        return "\n\n".join(parts)


def rows_of(paper: Paper) -> Mapping[str, Any]:
    """The rows of a results file, each run with the sound epsilon of its row, where it is known."""
    rows = tables.load(paper.name)["rows"]
    known = tables.load("epsilons")[paper.name]
    # Estimated norms have no bound by RDP.
    rdp = {row: {"rdp": float(known[row][1] or "inf")} for row in set(rows) & set(known)}
    return {
        row: {seed: {**run, **rdp.get(row, {})} for seed, run in seeds.items()}
        for row, seeds in rows.items()
    }


def drawn(papers: Sequence[Paper]) -> Iterator[Drawn]:
    for paper in papers:
        rows = rows_of(paper)
        for name, figure in paper.figures.items():
            panels = figure.panels(rows)
            picture = pictures.image(panels) if panels else None
            yield Drawn(paper, name, figure, picture, figure.missing(rows))


def gallery() -> tuple[str, dict[str, bytes]]:
    """A page with every figure beside its claims, and the pictures by file name."""
    parts, files = [PAGE], {}
    for paper in tables.papers():
        if not paper.figures:
            continue
        judged = [result for result, _ in tables.judged_claims(paper)]
        parts.append(f"## {paper.title}")
        for figure in drawn([paper]):
            parts.append(f"### Figure {figure.name} of {paper.name}")
            if figure.picture is not None:
                files[figure.file] = figure.picture
                parts.append(f"![{figure.figure.shows}](gallery/{figure.file})")
            parts.append(figure.caption(judged))
    files["curves.png"] = curves()
    parts += [CURVES, "![Accuracy on examples that were held out](gallery/curves.png)"]
    return "\n\n".join(parts) + "\n", files


def curves() -> bytes:
    """Of each data set the accuracy on the way, at epsilon 3 and without noise."""
    rows, panels = tables.load("accuracy")["rows"], []
    for dataset, model in itertools.product(accuracy.TARGETS, accuracy.MODELS):
        lines = {}
        for words, epsilon in (("at epsilon 3", 3.0), ("without noise", math.inf)):
            if row := rows.get(f"curve: {accuracy.named(dataset, model, epsilon)}"):
                way = row["0"]["way"]
                places, values = zip(*(look.values() for look in way), strict=True)
                lines[words] = (places, [[value] for value in values])
        if lines:
            panels.append(pictures.Panel(f"{dataset} {model}", "steps", "held out, %", lines))
    return pictures.image(panels)


def speed_picture() -> bytes:
    """How many times a plain step three libraries take, for each model."""
    models = tables.load("steps")["workloads"]
    bars = {
        side: [found[side] and found[side]["ratio"] for found in map(tables.sides, models.values())]
        for side in tables.SIDES[1:-1]
    }
    return pictures.bars(bars, list(models), "time of a private step / plain JAX's")

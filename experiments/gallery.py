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
        """The caption of the paper, the verdicts on the rows that it shows, and missing rows."""
        parts = [f"**Published.** {self.figure.shows}"]
        by_verdict = self._by_verdict(judged)
        if self.picture is None:
            parts.append("**Here.** Not run.")
        elif not self.figure.lines:
            parts.append("**Here.** Drawn from the formula.")
        elif by_verdict:
            words = [
                f"{word}: {'; '.join(systems)}" for word, systems in sorted(by_verdict.items())
            ]
            parts.append(f"**Here.** By the rule of the results, {'. '.join(words)}.")
        else:
            parts.append("**Here.** No claim of it is judged; compare the lines.")
        if self.missing:
            absent = ", ".join(self.missing[:SHOWN])
            if len(self.missing) > SHOWN:
                absent += f" and {len(self.missing) - SHOWN} more"
            run = f"`{self.paper.command} --figure={self.name}` runs these rows."
            parts.append(f"**Not run:** {absent}. {run}")
        return "\n\n".join(parts)

    def _by_verdict(self, judged: Sequence[Judged]) -> dict[str, list[str]]:
        """The systems of the claims about this figure, by the word of their verdict."""
        keys = set(self.figure.row_keys()) if self.figure.judged else set()
        by_verdict: dict[str, list[str]] = {}
        for result in judged:
            claim = result.claim
            if self.name in claim.figures or (not claim.figures and result.row in keys):
                system = claim.system
                if claim.measure == "epsilon":
                    system = f"epsilon of {claim.system}"
                by_verdict.setdefault(result.verdict.word, []).append(system)
        return by_verdict


def rows_of(paper: Paper) -> Mapping[str, Any]:
    """The rows of a results file, each run with the sound epsilon of its row, where it is known."""
    epsilons = tables.load("epsilons")[paper.name]
    rows = {}
    for row, seeds in tables.load(paper.name)["rows"].items():
        facts = {}
        if row in epsilons:
            _, rdp, _ = epsilons[row]
            facts = {"rdp": float(rdp or "inf")}  # estimated norms have no bound by RDP
        rows[row] = {seed: {**run, **facts} for seed, run in seeds.items()}
    return rows


def drawn(papers: Sequence[Paper]) -> Iterator[Drawn]:
    """Every figure of the papers."""
    for paper in papers:
        rows = rows_of(paper)
        for name, figure in paper.figures.items():
            panels = figure.panels(rows)
            picture = pictures.image(panels) if panels else None
            yield Drawn(paper, name, figure, picture, figure.missing(rows))


def gallery() -> tuple[str, dict[str, bytes]]:
    """A page with every figure and its claims, and the pictures by file name."""
    parts = [PAGE]
    files = {}
    for paper in tables.papers():
        if not paper.figures:
            continue
        judged = [result for result, _ in tables.judged_claims(paper)]
        parts.append(f"## {paper.title}")
        for figure in drawn([paper]):
            name = figure.name.replace("-", ", ")
            parts.append(f"### {figure.figure.title} (figure {name})")
            if figure.picture is not None:
                files[figure.file] = figure.picture
                parts.append(f"![{figure.figure.shows}](gallery/{figure.file})")
            parts.append(figure.caption(judged))
    files["curves.png"] = curves()
    parts += [CURVES, "![Accuracy on examples that were held out](gallery/curves.png)"]
    return "\n\n".join(parts) + "\n", files


def curves() -> bytes:
    """The accuracy of each data set and model by step, at epsilon 3 and without noise."""
    rows = tables.load("accuracy")["rows"]
    panels = []
    for dataset, model in itertools.product(accuracy.TARGETS, accuracy.MODELS):
        lines = {}
        for words, epsilon in (("at epsilon 3", 3.0), ("without noise", math.inf)):
            name = f"curve: {accuracy.named(dataset, model, epsilon)}"
            if name in rows:
                way = rows[name]["0"]["way"]
                steps = [look["step"] for look in way]
                lines[words] = (steps, [[look["accuracy"]] for look in way])
        if lines:
            panels.append(
                pictures.Panel(
                    title=f"{dataset} {model}",
                    x="steps",
                    y="held out, %",
                    lines=lines,
                )
            )
    return pictures.image(panels)


def speed_picture() -> bytes:
    """The steps of three libraries relative to a plain step, for each model."""
    workloads = tables.load("steps")["workloads"]
    found = [tables.sides(workload) for workload in workloads.values()]
    bars = {}
    for side in tables.SIDES[1:-1]:
        figures = [of_model[side] for of_model in found]
        bars[side] = [figure["ratio"] if figure else None for figure in figures]
    return pictures.bars(bars, list(workloads), "time of a private step / plain JAX's")

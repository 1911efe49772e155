# SPDX-License-Identifier: Apache-2.0
"""Draws every figure of the five papers from the results that are committed, without training.

result    a PNG file for each figure that has rows; the others are listed as not run, with the
          command that runs them
time      20 seconds on a CPU core
command   python experiments/papers/figures.py --folder=runs/figures
"""

from __future__ import annotations

import importlib
import json
import pathlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from common import multi_panel_figure, result_tables
from common.claims import Judged
from common.paper_figures import Figure

from dpjax.cli.flag_checks import only_flags

RESULTS = pathlib.Path(__file__).resolve().parents[1] / "results"
PAPERS = ("papernot2021", "losing_less2022", "liu2021", "bu2023", "an2021")
SHOWN = 6  # a caption names the first of the rows that were not run
PAGE = """\
# Gallery

The figures of the five papers, drawn by `python experiments/papers/figures.py` from the JSON files
in `experiments/results` when this page is built. A line is the median of its seeds, a band runs
from the smallest to the largest, and epsilon is that of what ran here. Verdicts come
from [the results](results.md)."""


class Drawn(NamedTuple):
    """A figure, drawn as far as its rows were run."""

    paper: str
    name: str
    figure: Figure
    picture: bytes | None
    missing: list[str]
    command: str  # which runs what is missing

    @property
    def file(self) -> str:
        return f"{self.paper}_{self.name}.png"

    def caption(self, judged: Sequence[Judged]) -> str:
        """What the paper says, what ran here, and the verdicts of the claims that it shows."""
        parts = [f"**Published.** {self.figure.shows}"]
        claims = [each for each in judged if each.verdict and self._shows(each)]
        by_verdict: dict[str, list[str]] = {}
        for each in claims:
            by_verdict.setdefault(each.verdict.partition(":")[0], []).append(each.claim.system)
        if self.picture is None:
            parts.append("**Here.** Not run.")
        elif not self.figure.titles:
            parts.append("**Here.** Drawn from the formula.")
        elif claims:
            words = [f"{verdict}: {'; '.join(of)}" for verdict, of in sorted(by_verdict.items())]
            parts.append(f"**Here.** By the rule of the results, {'. '.join(words)}.")
        else:
            parts.append("**Here.** No claim of it is judged; compare the lines.")
        if self.missing:
            how = self.figure.why or f"`{self.command}` runs these rows."
            absent = ", ".join(self.missing[:SHOWN])
            absent += f" and {len(self.missing) - SHOWN} more" * (len(self.missing) > SHOWN)
            parts.append(f"**Not run:** {absent}. {how}")
        return "\n\n".join(parts)

    def _shows(self, judged: Judged) -> bool:
        pattern = self.figure.claims
        return bool(pattern and re.search(pattern, judged.claim.system))


def rows_of(paper: str, folder: pathlib.Path = RESULTS) -> Mapping[str, Any]:
    """The rows of a results file, each run with the sound epsilon of its row, where it is known."""
    rows = json.loads((folder / f"{paper}.json").read_text())["rows"]
    known = json.loads((folder / "systems.json").read_text())[paper]["epsilons"]
    for row in set(rows) & set(known):
        for run in rows[row].values():
            run["rdp"] = float(known[row][1] or "inf")  # estimated norms have no bound by RDP
    return rows


def drawn(folder: pathlib.Path = RESULTS, papers: tuple[str, ...] = PAPERS) -> Iterator[Drawn]:
    """Every figure of some papers, one after the other."""
    for paper in papers:
        pictures, rows = importlib.import_module(f"{paper}_pictures"), rows_of(paper, folder)
        for name, figure in pictures.FIGURES.items():
            if not name:  # the binary's own, which has all panels of two others
                continue
            found = figure.found(rows) if figure.titles else {"": {}}
            panels = [p for title, lines in found.items() for p in figure.panels(title, lines)]
            missing = figure.missing(rows)
            command = f"python experiments/papers/{pictures.BINARY} {figure.command}"
            picture = multi_panel_figure.image(panels) if panels else None
            yield Drawn(paper, name, figure, picture, missing, command)


_FOLDER = flags.DEFINE_string("folder", "runs/figures", "Folder of the PNG files.")


def main(argv: list[str]) -> None:
    only_flags(argv)
    folder = pathlib.Path(_FOLDER.value)
    folder.mkdir(parents=True, exist_ok=True)
    for each in drawn():
        if each.picture is not None:
            (folder / each.file).write_bytes(each.picture)
        state = each.file if each.picture else "not run"
        missing = f"; not run: {', '.join(each.missing)}" if each.picture and each.missing else ""
        print(f"{each.paper}, figure {each.name}: {state}{missing}")
        if each.missing:
            print(f"    {each.figure.why or each.command}")


def gallery() -> tuple[str, dict[str, bytes]]:
    """A page with every figure beside its claims, and the pictures by file name."""
    parts, pictures = [PAGE], {}
    for paper in PAPERS:
        judged = [result for result, _ in result_tables.judged_claims(paper)]
        parts.append(f"## {result_tables.PAPERS[paper]}")
        for each in drawn(papers=(paper,)):
            parts.append(f"### Figure {each.name} of {each.paper}")
            if each.picture is not None:
                pictures[each.file] = each.picture
                parts.append(f"![{each.figure.shows}](gallery/{each.file})")
            parts.append(each.caption(judged))
    return "\n\n".join(parts) + "\n", pictures


if __name__ == "__main__":
    app.run(main)

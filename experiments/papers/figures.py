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
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from common import multi_panel_figure
from common.paper_figures import Figure

from dpjax.cli.flag_checks import only_flags

RESULTS = pathlib.Path(__file__).resolve().parents[1] / "results"
PAPERS = ("papernot2021", "losing_less2022", "liu2021", "bu2023", "an2021")


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


def rows_of(paper: str, folder: pathlib.Path = RESULTS) -> Mapping[str, Any]:
    """The rows of a results file, each run with the sound epsilon of its row, where it is known."""
    rows = json.loads((folder / f"{paper}.json").read_text())["rows"]
    known = json.loads((folder / "systems.json").read_text())["epsilons"].get(paper, {})
    return {
        row: {seed: {**known.get(row, {}), **run} for seed, run in seeds.items()}
        for row, seeds in rows.items()
    }


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


if __name__ == "__main__":
    app.run(main)

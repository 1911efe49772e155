# SPDX-License-Identifier: Apache-2.0
"""Draws the paper's figures from the committed results, and sets it as one HTML file.

`make paper` runs it, with pandoc from a package index. The journal's own builder, which makes the
PDF, was not run. Two commands of LaTeX that only this builder reads become words here.
"""

import pathlib
import re
import statistics
import sys

import pypandoc

ROOT = pathlib.Path(__file__).parent.parent
PAPER = ROOT / "paper"


def figures():
    """The figures of the paper, by file name."""
    from experiments import accuracy, gallery
    from experiments.common import pictures, tables

    rows = tables.load("accuracy")["rows"]
    panels = []
    for dataset, title in tables.TITLES.items():
        here = []
        budgets = []
        published = []
        for place, epsilon in enumerate(accuracy.EPSILONS):
            seeds = rows[tables.chosen_row(dataset, epsilon)].values()
            here.append([statistics.mean(run["accuracy"] for run in seeds)])
            known, carried = tables.published_at(dataset, place)
            if not carried:
                budgets.append(epsilon)
                published.append([known])
        lines = {"dpjax": (accuracy.EPSILONS, here), "best published": (budgets, published)}
        axes = ("epsilon", "test accuracy, %")
        panels.append(pictures.Panel(title, *axes, lines, joined=False, measured=False))
    return {"speed.png": gallery.speed_picture(), "accuracy.png": pictures.image(panels)}


def as_words(text):
    """The paper with numbers in place of the references to its figures."""
    labels = re.findall(r"\\label\{(.*?)\}", text)
    for number, label in enumerate(labels, 1):
        text = text.replace(rf"\autoref{{{label}}}", f"Figure {number}")
        text = text.replace(rf"\label{{{label}}}", "")
    return text


def main():
    """Writes the figures next to the paper, and the page into build/paper."""
    for name, picture in figures().items():
        (PAPER / name).write_bytes(picture)
    folder = ROOT / "build" / "paper"
    folder.mkdir(parents=True, exist_ok=True)
    options = [
        "--standalone",
        "--citeproc",
        "--mathml",
        "--embed-resources",
        "--fail-if-warnings",
        f"--resource-path={PAPER}",
        f"--bibliography={PAPER / 'paper.bib'}",
        f"--include-in-header={PAPER / 'style.html'}",
        "--metadata=author:The dpjax authors",
        "--metadata=lang:en",
    ]
    text = as_words((PAPER / "paper.md").read_text())
    page = str(folder / "paper.html")
    pypandoc.convert_text(text, "html5", "markdown", outputfile=page, extra_args=options)


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "src")]
    main()

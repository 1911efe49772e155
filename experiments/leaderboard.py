# SPDX-License-Identifier: Apache-2.0
"""The rows of accuracies in the form of a public list of private image classifiers.

claim     none: the file repeats committed rows
verdict   experiments/results/leaderboard.yml, for the table "No Public Data" of CIFAR-10
time      seconds
hardware  CPU
command   python -m experiments.leaderboard

The list is https://private-machinelearning.github.io, of "Rethinking Benchmarks for Differentially
Private Image Classification" (arXiv 2601.17189). Its tables are read from files of this form, one
entry a method, with a claim for each epsilon. The authors of an entry fill in venue, address and
code before they submit it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from experiments import accuracy
from experiments.common import runs, tables

HEAD = """\
# dpjax, in the form of _data/_CIFAR-10/CIFAR10_no.yml. Fill in url, code and venue.
-
  name: "dpjax: linear models on features of a random process"
  url:
  authors: The dpjax authors
  code:
  venue:
  venue_date:
  claims:"""
MODELS = {
    "linear": "ScatterNet+linear",
    "cnn": "ScatterNet+CNN",
    "patches": "ScatterNet and patches of random leaves+linear",
    "whitened": "ScatterNet and patches of random leaves, half-whitened by leaves+linear",
}
ACCOUNTANT = "dpjax PLD"


def claims() -> Iterator[str]:
    """A claim for each epsilon, by the model that a split of the training set chose."""
    rows = tables.load("accuracy")["rows"]
    for epsilon in accuracy.EPSILONS:
        name = tables.chosen_row("cifar10", epsilon)
        _, model, *_ = name.split()
        seeds = [run["accuracy"] for run in rows[name].values()]
        yield f"    - model: {MODELS[model]}"
        yield f"      epsilon: {epsilon:g}"
        yield "      delta: 1e-5"
        yield f"      private_accuracy: {statistics.mean(seeds):.1f}%"
        yield f"      dp_accountant: {ACCOUNTANT}"
        yield f"      # {runs.spread(seeds)}"


def text() -> str:
    """The file."""
    return "\n".join([HEAD, *claims()]) + "\n"


def main(argv: list[str]) -> None:
    """Writes the file next to the results."""
    runs.only_flags(argv)
    (tables.RESULTS / "leaderboard.yml").write_text(text())


if __name__ == "__main__":
    runs.start(main)

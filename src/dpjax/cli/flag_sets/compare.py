# SPDX-License-Identifier: Apache-2.0
"""Compares runs: the accuracy that each reached for its epsilon.

usage: dpjax compare RUN RUN ... [--out=comparison.html]

Writes one HTML page without external files, and its figure as a PNG of the same name: a table, and
accuracy against epsilon and against steps.  A RUN is a folder that `dpjax train` or `dpjax.fit`
wrote.  Runs whose flags differ only in `seed` and `out` form a group, drawn as mean and range; a
run without `config.json` is its own group.  Each epsilon is the cost of one run alone.  A choice
among runs by private data costs more, which the page says and does not compute; `dpjax sweep`
computes it.
"""

from absl import flags

from dpjax.cli.flag_sets import Group

__all__ = ["FLAGS", "WORDS"]

WORDS = "RUN RUN ..."
FLAGS = flags.FlagValues()
Group(FLAGS, "Output").path(
    "out", "comparison.html", "The page; its figure has the same name and the ending .png."
)

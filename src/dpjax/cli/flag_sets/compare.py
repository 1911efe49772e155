# SPDX-License-Identifier: Apache-2.0
"""Compares runs: the accuracy that each reached for its epsilon.

usage: dpjax compare RUN RUN ... [--out=comparison.png]

Prints a table, and draws accuracy against epsilon and against steps.  A RUN is a folder that
`dpjax train` or `dpjax.fit` wrote.  Runs whose flags differ only in `seed` and `out` form a group,
shown as mean and range; a run without `config.json` is its own group.  A group is named by the
flags in which groups differ, or by its first folder if these are long.  Each epsilon is the cost of
one run.  A choice among runs by private data costs more, which `dpjax sweep` computes.
"""

from absl import flags

from dpjax.cli.flag_sets import Group

WORDS = "RUN RUN ..."
FLAGS = flags.FlagValues()
Group(FLAGS, "Output").path(
    "out", "comparison.png", "The plots: a file, or a folder that receives comparison.png."
)

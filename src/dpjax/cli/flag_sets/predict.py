# SPDX-License-Identifier: Apache-2.0
"""Predicts new rows with the released model of a run.

usage: dpjax predict RUN new.csv [--out=predictions.csv]
       dpjax predict RUN --dataset=mnist

A RUN is a folder that `dpjax train` wrote.  The new rows need no label, and keep their order.  A
table has the columns that the run learnt from: its declarations and their scaling come from the
folder, so gaps and unlisted words count as in training.  An .npz has its inputs in x, or x_test; of
a data set by name the test examples are predicted.  Each line of the CSV has the class and the
probability of each class, or the number of a regression.  Predictions cost no privacy: they follow
from what the run released.  They describe the new rows, and are as secret as these.
"""

from absl import flags

from dpjax.cli.flag_sets import Group

WORDS = "RUN TABLE"
FLAGS = flags.FlagValues()
_rows = Group(FLAGS, "New rows")
_rows.path("dataset", None, "File or name of the new rows, in place of the second word.")
_rows.path("columns", None, "Declared columns of a run of a version that did not keep them.")
_rows.path("data_dir", None, "Folder of named data, as in dpjax train; else DPJAX_DATA_DIR.")
Group(FLAGS, "Output").path("out", None, "The CSV; by default the standard output.")

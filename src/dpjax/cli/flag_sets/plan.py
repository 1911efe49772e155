# SPDX-License-Identifier: Apache-2.0
"""Plans a run without a search, and prints what more time gains.

`dpjax train` with the same flags is this run; with --minutes, with the flags that are printed.  The
plan reads sizes, and measures the speed of this machine on rows of zeros: no private number.

Example:
  dpjax plan --dataset=mnist --target_epsilon=3 --minutes=5
"""

from __future__ import annotations

import copy

from dpjax.cli.flag_sets import Group, train

WORDS = ""  # only flags
FLAGS = copy.deepcopy(train.FLAGS)

Group(FLAGS, "Time").number("minutes", None, "How long the run may take.", 0)

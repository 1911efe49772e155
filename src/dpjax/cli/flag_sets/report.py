# SPDX-License-Identifier: Apache-2.0
"""Draws the figures of a run, and writes its page.

usage: dpjax report RUN [RUN ...]

A RUN is a folder that `dpjax train` or `dpjax.fit` wrote; one that is still running has the rows so
far.  The folder receives `report.html`, one page without external files, and `figures`.  A figure
that needs a file which is not there is left out, and the page says which.
"""

from absl import flags

WORDS = "RUN ..."
FLAGS = flags.FlagValues()

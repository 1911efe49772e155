# SPDX-License-Identifier: Apache-2.0
"""Audits a run: lower bounds on what an attacker can tell, beside the epsilon that it claims.

usage: dpjax audit RUN [--attacks=canaries,loss,lira] [--out=FOLDER]

A RUN is a folder that `dpjax train` wrote: a classifier or a regression, whose unit is a row or a
person.  The data are looked for here, then in the folder where the run was trained, or at
--dataset; nothing is written before they are found.  Runs of `dpjax.fit` are audited by
`dpjax.auditing`.

It is always measured how far one row, or one person, moves the first step (white box).  Attacks:
`canaries` guesses which canaries took part in a second training with the run's settings; `loss`
guesses the rows that the released model was trained on by their losses; `lira` guesses them by
likelihood ratios, from --shadows models that the run's own algorithm trains on halves of the rows,
which takes as many trainings.  The last two are not made of persons.  Step and canaries may refute
the claim, and then the exit status is 1: the program itself decides who takes part.  The bounds of
the others hold only if train and test rows are of one distribution, so they give no verdict.
Audits can refute a claim, by a lower bound above it, and never prove it.  A measured mu is an
estimate, and may lie a little above the claimed one.  `audit.json` and `audit.html` are computed
from private data without noise and must not be published.
"""

from absl import flags

from dpjax.cli.flag_sets import Group

WORDS = "RUN"
FLAGS = flags.FlagValues()
_audit = Group(FLAGS, "Audit")
_audit.several("attacks", ["canaries", "loss"], "Attacks: canaries, loss, lira.")
_audit.whole("shadows", 32, "Shadow models of lira; an even number, 4 or more.", 4)
_audit.whole("canaries", None, "Number of canaries; by default up to 1,000.")
_audit.whole("steps", 200, "Most steps of the second training.", 1)
_audit.whole("pairs", 200, "Pairs of steps that measure the noise.", 1)
_audit.path("dataset", None, "The run's data file, if it is elsewhere now.")
_audit.path("data_dir", None, "Folder of named data, as in dpjax train; else DPJAX_DATA_DIR.")
Group(FLAGS, "Output").path("out", None, "Folder of the results; by default that of the run.")

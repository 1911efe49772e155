# SPDX-License-Identifier: Apache-2.0
r"""Trains with many settings, and computes the privacy cost of the search itself.

Examples:
  dpjax sweep --grid="learning_rate=0.2,0.4;bound=0.5,1" --seeds=3 --jobs=2 \
    --fixed="dataset=digits;epochs=5" --out=runs/sweep
  dpjax sweep --ranges="learning_rate=log:0.05:1;bound=0.25,0.5,1" --random=10

`--random_runs=geometric:10` draws a secret number of runs; then the best run, published alone,
costs much less than all runs together.  It tries flags that change no cost of a run, such as
--learning_rate and --bound.  The folder receives a folder per run, `results.jsonl` (best setting
first, or of a drawn number best run first), `costs.json` and `comparison.png`.  The same command
resumes a search and repeats no finished run.  Runs have secret keys unless `--seed` is given.  They
share compiled programs, and draw no report of their own unless `--fixed="report=true"` is given.
"""

from absl import flags

from dpjax.cli.flag_sets import LARGEST_SEED, Group

WORDS = ""  # only flags
FLAGS = flags.FlagValues()

_tried = Group(FLAGS, "What is tried")
_tried.text("grid", None, "Flags and their values; every combination runs.")
_tried.text("ranges", None, "Flags, and values or ranges to draw from.")
_tried.whole("random", None, "Number of settings drawn from --ranges.", 1)
_tried.text(
    "random_runs", None, "Draw how many run: geometric, logarithmic or poisson, as poisson:9."
)
_tried.whole("seeds", 1, "Number of runs of each setting.", 1)
_tried.text("fixed", "", "Flags of every run: dataset=digits;epochs=5.")
_tried.whole("seed", None, "Seed of draws and runs, which is no secret.", 0, LARGEST_SEED)

_runs = Group(FLAGS, "Runs")
_runs.whole("jobs", 1, "Number of parallel runs.", 1)

_output = Group(FLAGS, "Output")
_output.path("out", "runs/sweep", "Folder of the search.")
_output.yes_no("plot", True, "Write comparison.png, as `dpjax compare` does.")

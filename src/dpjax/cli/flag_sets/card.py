# SPDX-License-Identifier: Apache-2.0
"""Writes a run's privacy card for other readers.

usage: dpjax card RUN [--format=huggingface] [--out=README.md]

A RUN is a folder that `dpjax train` or `dpjax.fit` wrote.  `huggingface` is a model card: a YAML
block, the promise in plain words, the statement, and how to verify the parameters.  `registry` is
an entry for the Differential Privacy Deployments Registry (arXiv 2509.13509), as YAML with the
fields of the template in opendp/deployments-registry-data.  All numbers come from the files of the
run.  An empty text is yours to fill in: purpose, curators, licence, results.
"""

from absl import flags

from dpjax.cli.flag_sets import Group

WORDS = "RUN"
FLAGS = flags.FlagValues()
_card = Group(FLAGS, "Card")
_card.choice("format", "huggingface", ["huggingface", "registry"], "Whom it is written for.")
_card.path("out", None, "The file; by default the standard output.")

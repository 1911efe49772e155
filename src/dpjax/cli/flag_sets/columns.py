# SPDX-License-Identifier: Apache-2.0
"""Drafts the declarations of a table's columns.

usage: dpjax columns patients.csv > columns.toml

Prints a TOML table for each column, with its name and a guess of its kind.  Ranges and lists of
words are left to you, from public knowledge: what is read off the rows is a release that no epsilon
covers.  Then `dpjax train --dataset=patients.csv --columns=columns.toml`.
"""

from absl import flags

WORDS = "TABLE"
FLAGS = flags.FlagValues()

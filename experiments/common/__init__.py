# SPDX-License-Identifier: Apache-2.0
"""Code that several binaries of this folder share.

`paper_runs` runs and keeps rows, `paper_commands` lists the commands that fill them, `claims`
judges and `result_tables` prints them.  `paper_figures`, `multi_panel_figure` and `epoch_probes`
draw figures.  `pretrained_*` read published weights, `audited_algorithms` serves `audit.py`, and
`markdown` writes the tables of pages.
"""

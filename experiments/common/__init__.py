# SPDX-License-Identifier: Apache-2.0
"""Code that several binaries of this folder share.

`paper_runs`, `epoch_probes` and `multi_panel_figure` serve the papers, `audited_algorithms` serves
`audit.py`, and `markdown` writes the tables of pages.
"""

# SPDX-License-Identifier: Apache-2.0
"""Code that several binaries of this folder share.

`paper_runs`, `epoch_probes` and `multi_panel_figure` serve the papers; `search_space`,
`search_results`, `search_cost` and `child_processes` serve `sweep.py`; `audited_run` and
`audited_algorithms` serve `audit.py`.
"""

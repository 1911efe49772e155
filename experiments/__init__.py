# SPDX-License-Identifier: Apache-2.0
"""The papers that dpjax implements, its benchmarks and its notebooks.

Each paper is a package with `settings` (its rows as data, and what was printed), `run` (how a row
is trained), `figures`, and a command: ``python -m experiments.tempered_sigmoids --table=3``.
"""

# SPDX-License-Identifier: Apache-2.0
"""The promise of a private computation: as a statement, as JSON, and as a page for a board.

`statement` and `card` take every number from the mechanism and the ledger, except delta. The page
of a run with its figures is that of `dpjax.cli.report`.
"""

from dpjax.reports.board import board
from dpjax.reports.card import card
from dpjax.reports.statement import statement

__all__ = ["board", "card", "statement"]

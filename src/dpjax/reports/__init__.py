# SPDX-License-Identifier: Apache-2.0
"""What a private computation promises: in words, as JSON, and as a page with figures.

`statement` and `card` take every number from the mechanism and the ledger, except delta. Each
figure of `report` has a badge that says whether it may be published.
"""

from dpjax.reports.board import board
from dpjax.reports.card import card
from dpjax.reports.html_report import report
from dpjax.reports.live import live_plot
from dpjax.reports.statement import statement

__all__ = ["board", "card", "live_plot", "report", "statement"]

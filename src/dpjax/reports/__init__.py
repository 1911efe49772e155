# SPDX-License-Identifier: Apache-2.0
"""What a private computation promises: in words, as JSON, and as a page with figures.

`statement` says who is protected, against which neighbours, by which sampler, rule and
noise, for how many steps, at which epsilon by each accountant, and what is *not* covered.
`card` holds these facts as a JSON object, from which epsilon can be recomputed without dpjax.
Both take every number from the mechanism and the ledger, except delta.

`report` turns the folder of a run into one HTML page. Each figure has a badge that says
whether it may be published. `norm_counts` makes the histograms of gradient norms that the
page draws over time. `live_plot` is a figure in a notebook that grows during a run.
"""

from dpjax.reports.card import card
from dpjax.reports.figures import norm_counts
from dpjax.reports.html_report import report
from dpjax.reports.live import live_plot
from dpjax.reports.statement import statement

__all__ = ["card", "live_plot", "norm_counts", "report", "statement"]

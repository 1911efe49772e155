# SPDX-License-Identifier: Apache-2.0
"""What a private computation promises, in words and in a file that machines can check.

`statement` says who is protected, against which neighbours, by which sampler, rule and
noise, for how many steps, at which epsilon by each accountant, and what is *not* covered.
`card` holds the same facts as a JSON object, complete enough that somebody else can
recompute the epsilon without dpjax.

Both read the mechanism that ran and the ledger of what was spent; neither takes a number
from its caller except the delta.

`report` sets what a run left in its folder as a page to look at, with a figure for whatever
was written down, and a badge on each that says who may see it; `norm_counts` makes of
gradient norms what it draws over time.
"""

from dpjax.reports.card import card
from dpjax.reports.curves import norm_counts
from dpjax.reports.html_report import report
from dpjax.reports.statement import statement

__all__ = ["card", "norm_counts", "report", "statement"]

# SPDX-License-Identifier: Apache-2.0
"""`dpjax report`: reads the folder of a run, draws its figures and writes its page.

`report` writes the page from a script, and `live_plot` draws in a notebook while `dpjax.fit` runs.
The badge of a figure tells whether it may be published.
"""

from dpjax.cli.report.html_report import report, run
from dpjax.cli.report.live import live_plot

__all__ = ["live_plot", "report", "run"]

# SPDX-License-Identifier: Apache-2.0
"""`dpjax audit`: lower bounds on the epsilon of a run, next to what its card claims.

`step` and `canaries` may refute a claim. `losses` and `shadows` attack the released model, without
a verdict. `lines` prints all of them, and `audit_page` draws them.
"""

from dpjax.cli.audit.audit_command import run
from dpjax.cli.audit.canaries import curve_of
from dpjax.cli.audit.lines import HEAD, OF_A_RUN, Line, conclude
from dpjax.cli.audit.step import line_of_step

__all__ = ["HEAD", "OF_A_RUN", "Line", "conclude", "curve_of", "line_of_step", "run"]

# SPDX-License-Identifier: Apache-2.0
"""`dpjax train`: flags become a run (`build`, `inputs`), which `classifier` trains.

`command` checks, rehearses on shapes, trains and reports; `dpjax audit` and `dpjax sweep` build
runs with the same functions.
"""

from dpjax.cli.train.command import run

__all__ = ["run"]

# SPDX-License-Identifier: Apache-2.0
"""`dpjax train`: flags become a run (`build`, `inputs`), which `command` checks and trains."""

from dpjax.cli.train.command import run

__all__ = ["run"]

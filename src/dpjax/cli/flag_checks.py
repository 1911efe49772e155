# SPDX-License-Identifier: Apache-2.0
"""A check before data are read or privacy is spent: are all packages there?"""

from __future__ import annotations

from absl import app

from dpjax import checks


def require(call: str, *modules: str, otherwise: str = "") -> None:
    """Refuses a command that lacks packages, before its work rather than after it."""
    try:
        checks.importable(call, *modules, otherwise=otherwise)
    except ImportError as error:
        raise app.UsageError(str(error)) from error

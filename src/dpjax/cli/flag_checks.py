# SPDX-License-Identifier: Apache-2.0
"""Checks of a command line that run before data are read or privacy is spent.

absl passes words that are not flags on to the program.  A program that ignores them would run
`train --steps 2 target_epsilon=0.5` at the default epsilon, so every program here calls
`only_flags`.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from absl import app


def only_flags(argv: Sequence[str]) -> None:
    """Refuses words on the command line that are not flags."""
    if words := " ".join(argv[1:]):
        raise app.UsageError(f"{words}: expected flags alone, which begin with two dashes.")


def require_matplotlib(otherwise: str = "") -> None:
    """Refuses a command whose figures could not be drawn, before its work rather than after it."""
    try:
        # Imported, not only found: an installed one may not fit this version of NumPy.
        importlib.import_module("matplotlib.figure")
    except Exception as error:  # ImportError, or AttributeError of another NumPy
        raise app.UsageError(
            f"figures are drawn with Matplotlib, which cannot be imported ({error}). Install it "
            f"(pip install --upgrade matplotlib){otherwise}."
        ) from error

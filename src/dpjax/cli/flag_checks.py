# SPDX-License-Identifier: Apache-2.0
"""A check before data are read or privacy is spent: can figures be drawn?"""

from __future__ import annotations

import importlib

from absl import app


def require_matplotlib(otherwise: str = "") -> None:
    """Refuses a command whose figures could not be drawn, before its work rather than after it."""
    try:
        # Imported, not only found: an installed one may not fit this version of NumPy.
        importlib.import_module("matplotlib.figure")
    except Exception as error:  # ImportError, or AttributeError of another NumPy
        raise app.UsageError(
            f"Matplotlib cannot be imported ({error}). Run pip install -U matplotlib{otherwise}."
        ) from error

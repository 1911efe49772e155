# SPDX-License-Identifier: Apache-2.0
"""One warning for each name that the next minor version removes.

The page on stability promises that a name works for one minor version after its replacement is
there. In this time the old name calls the new one, after `warn_once`. Imports only the standard
library.
"""

from __future__ import annotations

import functools
import warnings


@functools.cache
def warn_once(old: str, new: str, removed_in: str) -> None:
    """Warns at the line that used ``old``, the first time in a process.

    Call it in the function that users call. A `FutureWarning` is printed also where the line is in
    an imported file.
    """
    message = f"dpjax.{old} will be removed in version {removed_in}. Use dpjax.{new}."
    warnings.warn(message, FutureWarning, stacklevel=3)

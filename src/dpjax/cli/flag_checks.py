# SPDX-License-Identifier: Apache-2.0
"""Checks of a command line that run before data are read or privacy is spent.

absl passes words that are not flags on to the program.  A program that ignores them would run
`train --steps 2 target_epsilon=0.5` at the default epsilon, so every program here calls
`only_flags`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from absl import app, flags


def only_flags(argv: Sequence[str]) -> None:
    """Refuses words on the command line that are not flags."""
    # absl ignores words without dashes: `steps=2` would train with the default number of steps.
    if words := list(argv[1:]):
        raise app.UsageError(
            f"{' '.join(words)}: expected flags alone, which begin with two dashes. Usually dashes "
            "were forgotten, as in steps=2 for --steps=2, or a list was given with spaces."
        )


def in_range(
    given: flags.FlagValues,
    name: str,
    low: float,
    high: float = math.inf,
    *,
    strictly: bool = False,
) -> None:
    """Refuses values of a flag that are not finite, below ``low`` or not below ``high``.

    ``strictly`` refuses ``low`` itself too.  A flag without a value passes.
    """
    words = f"Expected a finite number {'above' if strictly else 'of at least'} {low:g}"
    words += "." if math.isinf(high) else f" and below {high:g}."

    def fits(value: float | None) -> bool:
        if value is None:
            return True
        return math.isfinite(value) and low <= value < high and not (strictly and value == low)

    flags.register_validator(name, fits, words, flag_values=given)

# SPDX-License-Identifier: Apache-2.0
"""What a command line may hold, and what flags may not be: said before anything is read or spent.

absl hands over the words that are no flags and lets a binary pass over them, so that `train.py
--steps 2 target_epsilon=0.5` would train at the default epsilon.  No binary here may.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from absl import app, flags


def only_flags(argv: Sequence[str]) -> None:
    """Refuses words on the command line that are no flags."""
    if words := list(argv[1:]):
        raise app.UsageError(
            f"{' '.join(words)}: expected flags alone, which begin with two dashes. Usually dashes "
            "were forgotten, as in steps=2 for --steps=2, or a list was given with spaces."
        )


def in_range(name: str, low: float, high: float = math.inf, *, strictly: bool = False) -> None:
    """Refuses values of a flag that are NaN, infinite, below the one or not below the other.

    ``strictly``: the low one is refused too.  A flag that is not given is left alone.
    """
    words = f"Expected a finite number {'above' if strictly else 'of at least'} {low:g}"
    words += f" and below {high:g}." * math.isfinite(high) + "." * math.isinf(high)

    def fits(value: float | None) -> bool:
        if value is None:
            return True
        return math.isfinite(value) and low <= value < high and not (strictly and value == low)

    flags.register_validator(name, fits, words)


def whole_and_positive(name: str) -> None:
    """Refuses a list flag whose words are not whole numbers above 0; it may be empty."""
    flags.register_validator(
        name,
        lambda words: all(word.isdecimal() and int(word) > 0 for word in words),
        "Expected whole numbers above 0, separated by commas.",
    )

# SPDX-License-Identifier: Apache-2.0
"""Rounds printed epsilons up, so no page claims less than was proved.

If 2.6544 is proved, printing 2.65 claims a guarantee that is not proved. `three_digits` prints
every epsilon, `upwards` every delta, and `downwards` rounds lower bounds of audits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal, localcontext


def upwards(value: float, form: str = ".4g") -> str:
    """A number in few digits, never below its value; ``form`` is ``.4g`` or ``.3f``, any digits."""
    return _rounded(value, form, ROUND_CEILING)


def downwards(value: float, form: str = ".4g") -> str:
    """As `upwards`, for a lower bound: never above its value."""
    return _rounded(value, form, ROUND_FLOOR)


def three_digits(epsilon: float, rounded: Callable[[float, str], str] = upwards) -> str:
    """An epsilon as all lines, tables and pages print it: ``3.00``, ``0.0412``, ``187``."""
    return f"{float(rounded(epsilon, '.3g')):#.3g}".rstrip(".")


def _rounded(value: float, form: str, rounding: str) -> str:
    """A number in the format ``form``, rounded in the direction ``rounding`` of `decimal`."""
    if not math.isfinite(value):
        return f"{value:{form}}"
    exact = Decimal(repr(float(value)))  # the shortest decimal of this float, so 1e-5 stays 1e-5
    digits = int(form[1:-1])  # 4 of ".4g"
    # The power of ten of the last printed digit: "f" counts digits from the decimal point, and "g"
    # from the first digit of the number, whose power is `adjusted()`.
    power = -digits
    if form.endswith("g"):
        power += exact.adjusted() + 1
    # `quantize` fails if its result has more digits than the precision. The largest float has 309
    # before its decimal point, and `form` may ask for many behind it.
    with localcontext(prec=700):
        rounded = exact.quantize(Decimal(1).scaleb(power), rounding=rounding)
    return f"{float(rounded):{form}}"

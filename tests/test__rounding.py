# SPDX-License-Identifier: Apache-2.0
"""Printed numbers: an epsilon is never printed below what was proved."""

import math

import pytest
from mutation import kills

from dpjax._rounding import downwards, three_digits, upwards


@kills("_rounding.py", "form, ROUND_CEILING)", 'form, "ROUND_HALF_EVEN")')
@pytest.mark.parametrize(
    ("value", "form", "printed"),
    [
        (2.6541, ".4g", "2.655"),
        (2.655, ".4g", "2.655"),  # what can be said exactly is not raised
        (math.nextafter(2.655, 3), ".4g", "2.656"),
        (1.23454321e-5, ".6g", "1.23455e-05"),
        (2.0001, ".3f", "2.001"),
        (math.inf, ".4g", "inf"),
    ],
)
def test_a_claim_is_rounded_up(value, form, printed):
    assert upwards(value, form) == printed
    assert float(upwards(value, form)) >= value
    assert downwards(-value, form) == f"-{printed}"


def test_epsilons_have_three_digits():
    printed = {3.0: "3.00", 2.3801: "2.39", 0.04121: "0.0413", 187.0: "187", math.inf: "inf"}
    assert {value: three_digits(value) for value in printed} == printed
    assert three_digits(2.3899, downwards) == "2.38"

# SPDX-License-Identifier: Apache-2.0
"""Argument checks: what each returns, and how each refuses."""

import functools
import math

import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import checks


@pytest.mark.parametrize("three", [3, 3.0, np.int64(3), np.float32(3), jnp.asarray(3)])
def test_scalars_of_every_type_mean_the_same(three):
    assert checks.whole("f", "n", three) == 3
    assert type(checks.whole("f", "n", three)) is int
    assert checks.positive("f", "n", three) == 3.0


@pytest.mark.parametrize("wrong", ["3", True, [3], None, math.nan, np.array([3]), object()])
@pytest.mark.parametrize("check", [checks.number, checks.whole, checks.positive, checks.fraction])
def test_what_is_no_number_is_of_a_wrong_type_and_a_wrong_value(check, wrong):
    for error in (TypeError, ValueError):
        with pytest.raises(error, match=r"f\(n=.*expected a number\. Usual cause\."):
            check("f", "n", wrong, "Usual cause.")


@pytest.mark.parametrize(
    ("check", "wrong"),
    [
        (checks.whole, 2.5),
        (checks.whole, 0),
        (checks.whole, math.inf),
        (checks.positive, 0),
        (checks.positive, math.inf),
        (checks.not_negative, -1.0),
        (functools.partial(checks.not_negative, infinite=False), math.inf),
        (functools.partial(checks.positive, infinite=True), 0),
        (checks.fraction, 0),
        (checks.fraction, 1),
        (lambda *call: checks.one_of(*call[:3], ["a", "b"], *call[3:]), "c"),
    ],
)
def test_a_wrong_value_is_named_with_what_was_expected(check, wrong):
    with pytest.raises(ValueError, match=r"^f\(n=.*\): expected .*\. Usual cause\.$"):
        check("f", "n", wrong, "Usual cause.")


def test_the_least_and_the_choices_are_kept():
    assert checks.whole("f", "n", 0, least=0) == 0
    assert checks.whole("f", "n", 7, most=7) == 7
    with pytest.raises(ValueError, match="at least 1 and at most 7"):
        checks.whole("f", "n", 8, most=7)
    assert checks.whole_or_none("f", "n", 2.0) == 2
    assert checks.whole_or_none("f", "n", None) is None
    assert checks.not_negative("f", "n", math.inf) == math.inf
    assert checks.positive("f", "n", math.inf, infinite=True) == math.inf
    assert checks.one_of("f", "n", "a", ["a", "b"]) == "a"
    assert checks.instance("f", "n", 3, int) == 3
    with pytest.raises(TypeError, match="f: n is a str; expected a int"):
        checks.instance("f", "n", "3", int)

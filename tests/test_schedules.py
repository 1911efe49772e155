# SPDX-License-Identifier: Apache-2.0
"""Nine curricula: their ends, their shapes, and that one epoch is one number."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import schedules

ENDS = {  # t = 0, 1, 2, 19, from the closed forms
    "exponential-down": (5, 2.4715178, 1.5413411, 1),
    "exponential-up": (1, 1.0000000385, 1.0000001, 5),
    "piecewise-down": (5, 5, 5, 1),
    "piecewise-up": (1, 1, 1, 5),
    "linear-down": (5, 5 - 4 / 19, 5 - 8 / 19, 1),
    "linear-up": (1, 1 + 4 / 19, 1 + 8 / 19, 5),
    "quadratic-down": (5, 5 - 4 / 361, 5 - 16 / 361, 1),
    "quadratic-up": (1, 1 + 4 / 361, 1 + 16 / 361, 5),
    "logarithmic-up": (1, 1 + 4 * np.log(2) / np.log(21), 1 + 4 * np.log(3) / np.log(21), 4.9359),
}


@pytest.mark.parametrize("name", schedules.CURRICULA)
def test_values(name):
    schedule = schedules.CURRICULA[name]()
    got = [float(schedule(100 * t)) for t in (0, 1, 2, 19)]
    np.testing.assert_allclose(got, ENDS[name], rtol=1e-5)
    if name != "logarithmic-up":
        assert {got[0], got[-1]} == {1.0, 5.0}


def test_every_curriculum_has_a_row():
    assert set(ENDS) == set(schedules.CURRICULA)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", schedules.CURRICULA)
@pytest.mark.parametrize("how", [lambda f: f, jax.jit])
def test_an_epoch_is_one_float32(name, how):
    schedule = schedules.CURRICULA[name](epochs=7, steps_per_epoch=10)
    step = how(schedule)
    got = np.array([step(jnp.int32(t)) for t in range(70)])
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, np.repeat(got[::10], 10))
    np.testing.assert_array_equal(got, schedules.values(schedule, 70))
    assert float(schedule(10_000)) == got[-1]


@pytest.mark.parametrize("name", ["exponential-up", "piecewise-down", "logarithmic-up"])
@pytest.mark.parametrize("epochs", [1, 3, 2_000])
def test_any_number_of_epochs_and_any_ends(name, epochs):
    schedule = schedules.CURRICULA[name](epochs=epochs, steps_per_epoch=1, high=3.0, low=2.0)
    got = schedules.values(schedule, epochs)
    assert np.all((got >= 2) & (got <= 3))
    assert np.all(np.diff(got) * (1 if name.endswith("up") else -1) >= 0)
    assert got[0] == (2 if name.endswith("up") else 3)


def test_piecewise_has_five_treads():
    got = schedules.values(schedules.CURRICULA["piecewise-down"](steps_per_epoch=1), 20)
    np.testing.assert_array_equal(got, np.repeat([5, 4, 3, 2, 1], 4).astype(np.float32))
    got = schedules.values(schedules.CURRICULA["piecewise-up"](epochs=7, steps_per_epoch=1), 7)
    np.testing.assert_array_equal(got, np.float32([1, 1, 2, 3, 3, 4, 5]))


def test_the_ends_of_short_curricula_are_those_of_the_docstring():
    last = {T: schedules.SHAPES["piecewise"](np.arange(T), T)[-1] for T in range(1, 7)}
    assert last == {1: 0, 2: 1 / 2, 3: 3 / 4, 4: 3 / 4, 5: 1, 6: 1}
    for name in set(schedules.SHAPES) - {"piecewise", "logarithmic"}:
        for epochs in range(2, 7):
            assert schedules.SHAPES[name](np.arange(epochs), epochs)[-1] == 1


UNTRACEABLE = {
    "an if": lambda step: 2.0 if step < 5 else 1.0,
    "math": lambda step: math.sqrt(step + 1),
}


@pytest.mark.parametrize("case", UNTRACEABLE)
def test_a_schedule_that_needs_a_python_number_is_refused_with_the_cure(case):
    with pytest.raises(TypeError, match=r"jnp\.where.*Optax schedule.*schedules\.table"):
        schedules.values(UNTRACEABLE[case], 10)


def test_a_schedule_returns_one_number():
    with pytest.raises(TypeError, match=r"returned shape \(2,\); expected one number"):
        schedules.values(lambda _: np.ones(2), 3)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: schedules.table([]), "non-empty"),
        (lambda: schedules.table([1.0, -1.0]), "none negative"),
        (lambda: schedules.table([1.0], steps_per_epoch=0), "steps_per_epoch"),
        (lambda: schedules.CURRICULA["linear-down"](epochs=0), "at least 1"),
        (lambda: schedules.curriculum("cubic", 5, 1, epochs=3, steps_per_epoch=1), "quadratic"),
    ],
)
def test_errors_teach(call, words):
    with pytest.raises(ValueError, match=words):
        call()

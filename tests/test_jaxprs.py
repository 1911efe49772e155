# SPDX-License-Identifier: Apache-2.0
"""The interpreter of jaxprs computes what JAX computes; `depends` follows values through loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.gradients._jaxprs import equations, evaluate


def branches(x, y):
    return jax.lax.cond(x > 0, lambda: y, lambda: 2 * y), x


def rounds(x, y):
    return jax.lax.fori_loop(0, 3, lambda i, carry: (carry[1], carry[0] + x), (y, 0.0))


def until(x, y):
    return jax.lax.while_loop(lambda carry: carry < x, lambda carry: carry + 1.0, 0.0), y


def running(x, y):
    return jax.lax.scan(lambda carry, row: (carry + row, 2 * row), x, jnp.array([1.0, 2.0]))


def inside(x, y):
    return jax.jit(lambda a, b: (a, 2 * b, 1.0))(x, y)


TWICE = jnp.array([2.0, 2.0])


def beside_an_array(x, y):
    return jax.jit(lambda a, b: (a, TWICE * b, TWICE))(x, y)


@pytest.mark.parametrize("function", [branches, rounds, until, running, inside, beside_an_array])
def test_a_program_is_evaluated_as_jax_does(function):
    closed = jax.make_jaxpr(function)(1.5, 2.0)
    found = evaluate(closed.jaxpr, closed.consts, [1.5, 2.0])
    for ours, theirs in zip(found, jax.tree.leaves(function(1.5, 2.0)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_equations_of_inner_programs_are_listed():
    program = jax.make_jaxpr(running)(1.5, 2.0).jaxpr
    assert {"scan", "mul", "add"} <= {e.primitive.name for e in equations(program)}

# SPDX-License-Identifier: Apache-2.0
"""Activations: closed forms, far tails, names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpjax.models import activations

POINTS = np.concatenate([np.linspace(-20, 20, 401), [0.0, 1e-8, -1e-8, 1e4, -1e4]])


def test_the_default_is_tanh_to_the_last_bit():
    x = jnp.asarray(POINTS, jnp.float32)
    assert jnp.array_equal(activations.tempered_sigmoid()(x), jnp.tanh(x))
    slope = jax.vmap(jax.grad(activations.tempered_sigmoid()))(x)
    assert jnp.array_equal(slope, jax.vmap(jax.grad(jnp.tanh))(x))


@given(
    scale=st.floats(0.1, 5.0), inverse_temperature=st.floats(0.1, 5.0), offset=st.floats(-3.0, 3.0)
)
def test_equals_the_formula(scale, inverse_temperature, offset):
    expected = scale / (1 + np.exp(-np.clip(inverse_temperature * POINTS, -500, 500))) - offset
    phi = activations.tempered_sigmoid(scale, inverse_temperature, offset)
    np.testing.assert_allclose(phi(jnp.asarray(POINTS, jnp.float32)), expected, atol=5e-6)


@pytest.mark.parametrize("x", [-1e4, 1e4, -np.inf, np.inf])
def test_far_tails_are_flat_and_finite(x):
    phi = activations.tempered_sigmoid(3.0, 2.5, 0.5)
    value, slope = jax.value_and_grad(phi)(jnp.float32(x))
    assert value == pytest.approx(2.5 if x > 0 else -0.5)
    assert slope == 0.0


def test_the_dtype_is_kept():
    for scale in (2.0, np.float64(1.6), jnp.float32(1.6)):
        made = activations.tempered_sigmoid(scale, np.float64(2.0), np.float32(1.0))
        assert made(jnp.zeros(3, jnp.bfloat16)).dtype == jnp.bfloat16


def test_names():
    half = {
        "tanh": np.tanh(0.5),
        "tempered_sigmoid": np.tanh(0.5),
        "sigmoid": 1 / (1 + np.exp(-0.5)),
        "identity": 0.5,
        "hard_tanh": 0.5,
        "softplus": np.log1p(np.exp(0.5)),
        "softsign": 1 / 3,
        "silu": 0.5 / (1 + np.exp(-0.5)),
        "gelu": 0.25 * (1 + np.tanh(np.sqrt(2 / np.pi) * (0.5 + 0.044715 * 0.5**3))),
        "mish": 0.5 * np.tanh(np.log1p(np.exp(0.5))),
        "selu": 0.5 * 1.0507009873554805,
    }
    below = {"relu": 0, "leaky_relu": -0.02, "elu": np.expm1(-2), "hard_tanh": -1}
    for x, values in ((0.5, half), (-2, below)):
        for name, value in values.items():
            assert activations.by_name(name)(jnp.float32(x)) == pytest.approx(value, rel=1e-6)


@pytest.mark.slow
def test_every_name_is_differentiable_everywhere_and_keeps_the_dtype():
    for name in activations._NAMED:
        slopes = jax.vmap(jax.grad(activations.by_name(name)))(jnp.asarray(POINTS, jnp.float32))
        assert jnp.isfinite(slopes).all(), name
        assert activations.by_name(name)(jnp.ones(2, jnp.bfloat16)).dtype == jnp.bfloat16

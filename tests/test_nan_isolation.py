# SPDX-License-Identifier: Apache-2.0
"""An example without a finite gradient changes nothing of the others, on every engine."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ghost_cases import (
    FLAT,
    NWC,
    array,
    assert_close,
    assert_ghost_agrees,
    case,
    decayed,
    half_squares,
    squared,
)
from jax import lax
from mutation import kills

from dpjax import clipped_grad, clipping, gradients
from dpjax.gradients.nan_isolation import map_rows

OTHERS = np.arange(5) != 1  # than the broken example


@pytest.mark.slow
def test_a_common_gradient_times_nan_is_dropped():
    loss, params, batch = decayed(lambda: case("a normalised matrix"), half_squares)()
    batch = batch.at[1].set(jnp.nan)
    assert_ghost_agrees(loss, params, batch)
    clipped = clipped_grad(loss, FLAT, "ghost")(params, batch)
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(clipped.value))


@pytest.mark.slow
@kills(
    "gradients/_bookkeeping/ghost.py",
    "clipped_sums(leaf_sums, sound)",
    "clipped_sums(leaf_sums, sound | True)",
    case="norms and pools-inf",
    slow=True,
)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["norms and pools", "matrix on the left"])
def test_a_broken_example_contributes_nothing(name, bad):
    loss, params, batch = case(name)
    broken = batch.at[(1, *(0,) * (batch.ndim - 1))].set(bad)
    clipped = clipped_grad(loss, clipping.flat(0.2), "ghost")
    without = clipped(params, batch, OTHERS).value
    assert_close(clipped(params, broken).value, without, rtol=1e-5, atol=1e-7)


def convolve(x, w):
    return lax.conv_general_dilated(x[None], w, (1,), "SAME", dimension_numbers=NWC)


def shifts(back):
    """The convolution `convolve` as products of shifted rows, with a derivative of its own."""

    @jax.custom_vjp
    def shifted(x, w):
        padded = jnp.pad(x, ((1, 1), (0, 0)))
        return sum(padded[i : i + len(x)] @ w[i] for i in range(3))[None]

    shifted.defvjp(lambda x, w: (shifted(x, w), (x, w)), back)
    return shifted


SHIFTED = shifts(lambda xw, g: jax.vjp(convolve, *xw)[1](g))


@pytest.mark.sample(1)
@pytest.mark.parametrize("engine", gradients.ENGINES)
@pytest.mark.parametrize("kernel", ["kernel", "kernel of a cond", "kernel of a derivative"])
def test_a_broken_image_stays_alone_in_float64(engine, kernel):
    """XLA on CPU writes grouped float64 convolutions with zeros, and 0 times NaN is NaN."""

    def loss(w, x):
        if kernel == "kernel":
            return jnp.sum(jnp.sin(convolve(x, w)))
        if kernel == "kernel of a derivative":
            return jnp.sum(jnp.sin(SHIFTED(x, w)))
        return jnp.sum(lax.cond(x[1, 1] > 9, convolve, lambda x, w: jnp.sin(convolve(x, w)), x, w))

    with jax.enable_x64(True):
        w = np.ones((3, 2, 2))
        x = np.random.default_rng(0).normal(size=(5, 6, 2))
        broken = x.copy()
        broken[1, 0, 0] = math.nan
        clipped = jax.jit(clipped_grad(loss, clipping.flat(0.5), engine))
        without = clipped(w, x, OTHERS).value
        np.testing.assert_allclose(clipped(w, broken).value, without, rtol=1e-12)


def test_a_weight_maps_broken_rows_apart():
    """A weight may differentiate a convolution too, and drop the NaN of its own example."""

    def weight(x):
        kernel = jax.grad(lambda w: jnp.sum(jnp.sin(convolve(x, w))))(jnp.ones((3, 2, 2)))
        return jnp.nan_to_num(jnp.sum(kernel))

    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 6, 2)))
        weights = jax.jit(lambda rows: map_rows(weight, rows, "weights")[OTHERS])
        np.testing.assert_allclose(weights(x.at[1].set(math.nan)), weights(x), rtol=1e-9)


@pytest.mark.sample(1)
@kills(
    "gradients/nan_isolation.py",
    "if _grouped_by_rows(lambda rows: run(params, rows, start), rows):",
    "if False:",
    case="vmap",
    slow=True,
)
@pytest.mark.parametrize("engine", gradients.ENGINES)
def test_a_broken_image_stays_alone_where_the_loss_wipes_it_out(engine):
    """No norm shows it: the NaN is in a gradient inside the loss, and is gone after that."""

    def inner(w, x):
        return jnp.sum(jnp.sin(lax.conv_general_dilated(x[None], w, (1,), "SAME")))

    def loss(w, x):
        step = jnp.nan_to_num(lax.stop_gradient(jax.grad(inner)(w, x)))
        return inner(w - 0.5 * step, jnp.nan_to_num(x))

    with jax.enable_x64(True):
        w = np.ones((2, 2, 3))
        x = np.random.default_rng(0).normal(size=(5, 2, 6))
        broken = x.copy()
        broken[1] = math.nan
        clipped = jax.jit(clipped_grad(loss, clipping.normalized(0.5), engine))
        norms = clipped(w, x).norms
        np.testing.assert_allclose(clipped(w, broken).norms[OTHERS], norms[OTHERS], rtol=1e-12)


@pytest.mark.slow
def test_a_broken_image_stays_alone_among_groups_of_channels():
    """In float32 as well: groups of a batch become places with zeros between them."""

    def loss(w, x):
        y = lax.conv_general_dilated(x[None], w, (1, 1), "SAME", feature_group_count=2)
        return jnp.sum(jnp.sin(y))

    w = array(8, 1, 3, 3, seed=1)
    x = array(5, 2, 6, 6)
    clipped = jax.jit(clipped_grad(loss, clipping.flat(0.5), "vmap"))
    broken = clipped(w, x.at[1].set(math.nan))
    np.testing.assert_allclose(broken.value, clipped(w, x, OTHERS).value, rtol=1e-4, atol=1e-6)
    assert broken.factors[OTHERS].all()


def test_a_parameter_that_breaks_all_examples_moves_nothing():
    loss = squared(lambda p, x: x + jnp.sqrt(p["b"]))
    params = {"b": jnp.array([0.0, 1.0, 4.0])}
    clipped = jax.jit(clipped_grad(loss, clipping.flat(0.2), "ghost"))
    assert clipped(params, array(5, 3)).value["b"].tolist() == [0, 0, 0]

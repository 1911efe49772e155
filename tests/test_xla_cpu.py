# SPDX-License-Identifier: Apache-2.0
"""Convolutions and pools as CPUs compute them, next to the definitions of JAX."""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ghost_cases import NHWC, Pooled, array, assert_close, linen
from jax import lax

from dpjax import clipped_grad, clipping
from dpjax.gradients._bookkeeping.ghost import backward
from dpjax.gradients._xla_cpu.convolution import convolution
from dpjax.gradients.traced import Traced


def by_jax(stride, padding, **options):
    """The convolution of JAX in these options, a function of images and kernel."""
    options |= {"window_strides": (stride, stride), "padding": padding, "dimension_numbers": NHWC}
    return functools.partial(lax.conv_general_dilated, **options)


def by_cpu(convolved, x, kernel):
    """The same convolution as CPUs compute it."""
    parameters = jax.make_jaxpr(convolved)(x, kernel).eqns[-1].params
    return functools.partial(convolution, parameters)


@pytest.mark.sample(2)
@pytest.mark.parametrize("padding", ["SAME", ((1, 2), (0, 3))])
@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("outputs", [1, 20])
def test_a_convolution_of_few_channels_is_itself(outputs, stride, padding):
    """Neighbouring outputs are computed together; those after the last are cut off."""
    x, kernel = array(2, 6, 8, 3), array(2, 3, 3, outputs, seed=1)
    convolved = by_jax(stride, padding)
    on_cpu = jax.jit(by_cpu(convolved, x, kernel))
    np.testing.assert_allclose(on_cpu(x, kernel), convolved(x, kernel), rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize("padding", [((1, 2), (0, 3)), ((0, 0), (-1, -1))])
@pytest.mark.parametrize(
    "options", [{}, {"rhs_dilation": (2, 1)}, {"lhs_dilation": (1, 2)}, {"feature_group_count": 2}]
)
@pytest.mark.parametrize("stride", [1, 2])
def test_both_cotangents_of_a_convolution_are_those_of_jax(stride, options, padding):
    groups = options.get("feature_group_count", 1)
    x, kernel = array(2, 7, 9, 4), array(3, 2, 4 // groups, 6, seed=1)
    convolved = by_jax(stride, padding, **options)
    y, cotangents = jax.vjp(convolved, x, kernel)
    _, on_cpu = jax.vjp(by_cpu(convolved, x, kernel), x, kernel)
    of_y = array(*y.shape, seed=2)
    assert_close(on_cpu(of_y), cotangents(of_y), rtol=1e-5, atol=1e-5)


POOLS = {
    "small": ((6, 5), (2, 2), (1, 1), "VALID"),
    "with gaps": ((9, 7), (2, 2), (3, 3), "VALID"),
    "large, padded": ((8, 7), (3, 4), (1, 2), ((2, 1), (0, 3))),
    "in space": ((4, 5, 4), (2, 2, 2), (1, 2, 1), "VALID"),
}


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", POOLS)
def test_a_max_pool_gives_each_cotangent_to_the_first_of_its_winners(name):
    shape, *window = POOLS[name]

    def loss(first, x):
        pooled = nn.max_pool((first * x)[..., None], *window)
        return jnp.vdot(array(*pooled.shape, seed=5), pooled)

    first, batch = jnp.ones(shape), jnp.round(array(3, *shape, seed=6, scale=1.0))
    want = jax.grad(lambda p: jnp.sum(jax.vmap(loss, (None, 0))(p, batch)))(first)
    unclipped = jax.jit(clipped_grad(loss, clipping.flat(math.inf)))(first, batch).value
    np.testing.assert_allclose(unclipped / 3, want / 3, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_max_pool_in_a_loop_reads_what_nothing_has_written_over():
    """XLA on CPU let tanh's derivative write over the pool's input, between two windows."""
    loss, params, _ = linen(Pooled(40), (12, 12, 1))
    # Flat regions, as in drawings: many windows have several winners.
    key = jax.random.fold_in(jax.random.key(0), 3)
    batch = jnp.round(jax.random.normal(key, (4, 12, 12, 1)) / 2)

    def cotangents(examples):
        entries = backward(Traced(loss), params, examples).entries
        return [entry.cotangent for of_site in entries.values() for entry in of_site]

    pairs = batch.reshape(2, 2, *batch.shape[1:])
    looped = jax.jit(lambda pairs: lax.map(cotangents, pairs))(pairs)
    want = [x.reshape(2, -1, *x.shape[1:]) for x in jax.jit(cotangents)(batch)]
    assert_close(looped, want, rtol=1e-5, atol=1e-6)

# SPDX-License-Identifier: Apache-2.0
"""What the book-keeping engine does for each leaf, and the size of its program."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ghost_cases import FLAT, array, assert_ghost_agrees, case, rotated, squared
from jax import lax

from dpjax import clipped_grad, gradients
from dpjax.gradients._jaxprs import equations


def in_float8(w):
    return w.astype(jnp.float8_e4m3fn).astype(jnp.float32)


@pytest.mark.parametrize("cast", [in_float8, lambda w: lax.reduce_precision(w, 5, 2)])
def test_what_rounds_cotangents_too_is_materialised(cast):
    words = gradients.explain(lambda w, x: jnp.sum(x @ cast(w)), array(4, 3), array(4))
    assert "materialised" in words


@pytest.mark.parametrize(
    ("name", "leaf", "words"),
    [
        ("weight decay", "w", "product + common"),
        ("weight decay of a table", "table", "rows + common"),
        ("a normalised matrix", "v", "product + common"),
        ("normalised columns", "v", "product + common"),
        ("metadata for the compiler", "w", "product"),
        ("rows by a number", "u", "rows"),
        ("scaled by a constant", "w", "gram"),
        ("one plus a parameter", "w", "gram"),
        ("a generated kernel", "w", "gram"),
        ("a generated kernel", "c", "materialised: meets a large leaf in dot_general"),
        ("cond on a parameter", "w", "materialised: enters cond"),
    ],
)
def test_what_each_leaf_gets(name, leaf, words):
    loss, params, batch = case(name)
    lines = gradients.explain(loss, params, batch[0]).splitlines()
    assert words in next(line for line in lines if line.startswith(leaf + " "))


def test_a_long_computation_of_parameters_alone_is_materialised():
    def loss(w, x):
        for _ in range(300):
            w = jnp.sin(w) + 0.01
        return jnp.vdot(w, x)

    assert "more than 100 equations" in gradients.explain(loss, array(3), array(3))


def test_a_kernel_is_differentiated_once_for_all_its_uses():
    """Each use on its own took 25 times the memory of `jax.vmap` for 40 steps of a network."""

    def cosines(steps):
        clipped = clipped_grad(squared(lambda w, x: rotated(x, w, steps)), FLAT, "ghost")
        program = jax.make_jaxpr(clipped)(array(3, 3), array(5, 3))
        return sum(e.primitive.name == "cos" for e in equations(program.jaxpr))

    assert cosines(6) == cosines(2)


def over_all(kernels):
    norm = jnp.sqrt(sum(jnp.sum(kernel**2) for kernel in kernels))
    return [kernel / norm for kernel in kernels]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("start", "kernels"),
    [(list, over_all), (jnp.concatenate, lambda w: jnp.split(w, len(w) // 8))],
    ids=["over the norm of all", "split"],
)
def test_what_many_kernels_share_is_differentiated_once(start, kernels):
    """A derivative for each pair of a leaf and a kernel took minutes to trace, or to run."""

    def loss(params, x):
        for kernel in kernels(params):
            x = jnp.tanh(x @ kernel)
        return jnp.sum(x)

    def numbers(engine):
        program = jax.make_jaxpr(clipped_grad(loss, FLAT, engine))(params, array(5, 3, 8))
        shapes = [v.aval.shape for e in equations(program.jaxpr) for v in e.outvars]
        return np.array([len(shapes), sum(map(math.prod, shapes))])

    params = start([array(8, 8, seed=i) for i in range(10)])
    assert all(numbers("ghost") < 2 * numbers("vmap"))


def test_many_uses_of_a_leaf_are_no_quadratic_program():
    """A program for each pair of them took minutes to compile."""

    def loss(w, x):
        for _ in range(9):
            x = x + jnp.tanh(x @ w)
        return jnp.sum(x)

    assert "gram" not in gradients.explain(loss, array(512, 512), array(512))


def attention(x, w):
    """Self-attention, whose weights are much larger than the data of its two products."""
    q, k, v = jnp.split(x @ w["in"], 3, axis=1)
    return x + jax.nn.softmax(4 * q @ k.T) @ v @ w["out"]


@pytest.mark.slow
def test_a_region_that_is_rematerialised_stays_one():
    """Temporaries shrink, and the sum is the definition's."""
    params, x = {"in": array(6, 8, 24), "out": array(6, 8, 8)}, array(3, 64, 8, seed=1)
    needed = []
    for layer in (attention, jax.checkpoint(attention)):

        def loss(w, x, layer=layer):
            return jnp.sum(lax.scan(lambda x, w: (layer(x, w), None), x, w)[0] ** 2)

        assert_ghost_agrees(loss, params, x)
        program = jax.jit(clipped_grad(loss, FLAT, "ghost")).lower(params, x).compile()
        needed.append(program.memory_analysis().temp_size_in_bytes)
    assert needed[1] < needed[0] / 2, needed

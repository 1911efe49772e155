# SPDX-License-Identifier: Apache-2.0
"""Norms and sums of one example under rounding: parts that cancel, and narrow dtypes."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ghost_cases import FLAT, array, assert_close, linen
from mutation import kills

from dpjax import clipped_grad, clipping, gradients, trees


@pytest.mark.slow
def test_what_follows_a_cast_sees_rounded_numbers():
    """Outside of jit, where XLA does not leave the two casts out."""

    def loss(p, x):
        return jnp.sum(x * (p * jnp.floor(999 * p.astype(jnp.bfloat16).astype(jnp.float32))))

    ghost, definition = (
        clipped_grad(loss, FLAT, engine)(array(9), array(5, 9, seed=5)).norms
        for engine in ("ghost", "vmap")
    )
    np.testing.assert_allclose(ghost, definition, rtol=1e-6)


@pytest.mark.slow
def test_a_sum_in_bfloat16_is_rounded():
    """Outside of jit, as above: in float32 the sum is 153.5, and in bfloat16 154."""

    def loss(w, x):
        return x * jnp.sin(jnp.sum(w, dtype=jnp.bfloat16).astype(jnp.float32))

    ghost, definition = (
        clipped_grad(loss, FLAT, engine)(jnp.full(300, 0.51, jnp.bfloat16), array(5)).norms
        for engine in ("ghost", "vmap")
    )
    np.testing.assert_allclose(ghost, definition, rtol=1e-3)


def two_views(change):
    def model(p, x):
        return jnp.tanh(jnp.tanh(x @ p["w"]) @ p["v"])

    return lambda p, x: jnp.sum((model(p, x[0]) - model(p, x[0] + change * x[1])) ** 2)


def differences(change, rate):
    def value(p, x):
        return jnp.sum(jnp.tanh(jnp.tanh(x @ p["w"]) @ p["v"]))

    return lambda p, x: (
        ((rate + 0.99 * value(p, x[0] + change * x[1]) - value(p, x[0])) / change) ** 2
    )


CANCELLING = {
    "two views": two_views(0.003),
    "views as positions": lambda p, x: (
        two_views(0)(p, x)
        + jnp.sum(jnp.diff(jnp.tanh(jnp.stack([x[0], x[0] + 0.003 * x[1]]) @ p["w"]), axis=0) ** 2)
    ),
    "temporal difference": differences(0.01, 1.0),
    "finite difference": differences(0.01, 0.0),
}


@kills(
    "gradients/_bookkeeping/leaf_norms.py",
    "forms = [_centred(forms)]",
    "pass",
    case="two views",
    slow=True,
)
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CANCELLING)
def test_uses_that_nearly_cancel_have_the_norm_of_the_definition(name):
    """Engines differ in speed alone: bounds on roundings clipped such losses 1 to 500 % harder."""
    params = {"w": array(8, 40, scale=0.3), "v": array(40, 8, scale=0.2)}
    batch = array(5, 2, 8, seed=1, scale=1.0)
    norms = [
        jax.jit(clipped_grad(CANCELLING[name], FLAT, engine))(params, batch).norms
        for engine in ("ghost", "vmap")
    ]
    np.testing.assert_allclose(*norms, rtol=1e-4)


def pulled(model):
    """The loss by which the second part of an example is the cotangent of ``model(w, x)``."""
    return lambda w, example: jnp.sum(example[1] * model(w, example[0]))


def opposite(positions, inputs, outputs, left_over):
    """Positions with equal inputs, whose cotangents are huge and sum to what is left over."""
    rng = np.random.default_rng(0)
    x = np.repeat(rng.normal(size=(1, 1, inputs)), positions, axis=1) * 1e2
    c = rng.normal(size=(1, positions, outputs))
    c[:, -1] = left_over * rng.normal(size=outputs) - c[:, :-1].sum(axis=1)
    return jnp.asarray(x, jnp.float32), jnp.asarray(c * 1e2, jnp.float32)


def repeated(left_over):
    """One row of a table taken often, by cotangents that cancel."""
    c = np.random.default_rng(0).normal(size=(1, 10, 4)) * 1e4
    c[:, -1] = left_over * c[:, 0] - c[:, :-1].sum(axis=1)
    return jnp.full((1, 10), 3), jnp.asarray(c, jnp.float32)


def parallel(left_over):
    """The gradient of the data is the negative of a weight decay, up to rounding errors."""
    x = array(1, 300, scale=1.0) * (1 + left_over * array(1, 300, seed=2, scale=1.0))
    return x, array(1, 200, seed=1, scale=1.0)


def decayed_product(w, example):
    a, b = array(300, scale=1.0), array(200, seed=1, scale=1.0)
    return example[0] @ w @ example[1] - jnp.sum(jnp.outer(a, b) * w)


HOSTILE = {
    "gram": (pulled(lambda w, x: x @ w), (30, 40), lambda e: opposite(2, 30, 40, e)),
    "instantiate": (pulled(lambda w, x: x @ w), (160, 170), lambda e: opposite(16, 160, 170, e)),
    "instantiate, kept": (
        pulled(lambda w, x: x @ (w - jnp.mean(w, axis=0))),
        (40, 50),
        lambda e: opposite(3, 40, 50, e),
    ),
    "rows": (pulled(lambda w, ids: w[ids]), (5000, 4), repeated),
    "derivative, kept": (pulled(lambda w, ids: w[ids]), (6, 4), repeated),
    "product + common": (decayed_product, (300, 200), parallel),
}


@kills(
    "gradients/_bookkeeping/leaf_norms.py",
    "(jnp.sqrt(squares) + bound) ** 2",
    "squares",
    case="instantiate",
    slow=True,
)
@kills(
    "gradients/_bookkeeping/common.py",
    "(jnp.sqrt(squares) + eps * lengths) ** 2",
    "jnp.maximum(total, 0)",
    case="product + common",
    slow=True,
)
@pytest.mark.sample(1)
@pytest.mark.parametrize("rule", HOSTILE)
def test_no_contribution_passes_its_bound_by_more_than_the_margin(rule):
    """What is left after parts cancel is mostly rounding; norm and sum round it differently."""
    loss, shape, make = HOSTILE[rule]
    w = jnp.zeros(shape)
    row = jax.tree.map(lambda a: a[0], make(0.0))
    assert f" {rule} " in gradients.explain(loss, w, row)
    for bound in (1e-6, 1e-2):
        clipped = jax.jit(clipped_grad(loss, clipping.flat(bound), "ghost"))
        for left_over in (0.0, 1e-7, 1e-4, 1.0):
            norm = np.linalg.norm(np.float64(clipped(w, make(left_over)).value))
            assert norm <= bound * (1 + 2**-11)


@pytest.mark.slow
def test_bfloat16_models_keep_float32_norms_and_sums():
    module = nn.Sequential([nn.Dense(16, dtype=jnp.bfloat16), jnp.tanh, nn.Dense(3)])
    loss, params, batch = linen(module, (6,))
    ghost = clipped_grad(loss, clipping.flat(0.2), "ghost")(params, batch)
    definition = clipped_grad(loss, clipping.flat(0.2), "vmap")(params, batch)
    assert {leaf.dtype for leaf in jax.tree.leaves(ghost.value)} == {jnp.dtype("float32")}
    np.testing.assert_allclose(ghost.norms, definition.norms, rtol=0.02)
    assert_close(ghost.value, definition.value, atol=0.02)


NARROW = {
    "a materialised leaf": (
        lambda w, x: jnp.sum(jnp.exp(w) * x[0] * jnp.exp(w[::-1]) * jnp.sin(w)),
        lambda draw: (np.full(2, draw.uniform(0, 2)), draw.normal(size=(1, 2)) * 99),
    ),
    "a normalised kernel": (
        lambda w, x: jnp.sum(jnp.tanh(x @ (w / jnp.linalg.norm(w, axis=1, keepdims=True))) ** 2),
        lambda draw: (draw.normal(size=(8, 8)), draw.normal(size=(1, 4, 8)) * 30),
    ),
}


@pytest.mark.sample(2)
@kills(
    "trees.py",
    "list(map(widened_exactly, jax.tree.leaves(gradients)))",
    "[x.astype(wide(x.dtype)) for x in jax.tree.leaves(gradients)]",
    case="auto-a materialised leaf",
    slow=True,
)
@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("engine", ["auto", "vmap"])
def test_norm_and_sum_are_of_the_same_bfloat16_numbers(engine, name):
    """XLA may leave out a rounding to bfloat16 for the norm: sums passed the bound by 0.4 %."""
    loss, make = NARROW[name]
    draw = np.random.default_rng(0)
    arguments = [[jnp.asarray(x, jnp.bfloat16) for x in make(draw)] for _ in range(60)]
    clipped = jax.jit(clipped_grad(loss, clipping.flat(1.0), engine))
    norms = [np.linalg.norm(clipped(params, batch).value) for params, batch in arguments]
    assert max(norms) == pytest.approx(1, abs=1e-6)


@kills("trees.py", "jax.lax.reduce_precision(wider, exponent_bits, narrow_info.nmant)", "wider")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_numbers_are_widened_exactly(dtype):
    narrow = jax.lax.bitcast_convert_type(jnp.arange(2**16, dtype=jnp.uint16), dtype)
    want = np.asarray(narrow).astype(np.float32)
    np.testing.assert_array_equal(jax.jit(trees.widened_exactly)(narrow), want)
    # Numbers that the same program has rounded: without the second rounding XLA leaves that out.
    wide = jnp.asarray(np.geomspace(1e-9, 6e4, 10_000), jnp.float32)
    a, b = wide.astype(dtype), wide[::-1].astype(dtype)
    widened = jax.jit(lambda a, b: trees.widened_exactly(a + b))(a, b)
    np.testing.assert_array_equal(widened, np.asarray(a + b).astype(np.float32))
    for same in (wide, jnp.arange(3)):
        assert trees.widened_exactly(same) is same

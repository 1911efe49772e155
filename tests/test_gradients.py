# SPDX-License-Identifier: Apache-2.0
"""`clipped_grad`: what it returns, what it refuses, whose models it takes."""

import functools

import equinox
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import dpjax
from dpjax import clipping, gradients, losses, testing
from dpjax.gradients.microbatch import bytes_per_example

RULE = clipping.flat(1.0)


def loss(w, x):
    return 0.5 * jnp.sum((w - x) ** 2)


def test_aux_comes_out_a_row_an_example():
    def with_aux(w, x):
        return loss(w, x), {"residual": w - x, "first": x[0]}

    for engine in gradients.ENGINES:
        result = dpjax.clipped_grad(with_aux, RULE, engine, 2, has_aux=True)(
            jnp.zeros(3), jnp.arange(15.0).reshape(5, 3)
        )
        assert result.aux["residual"].shape == (5, 3)
        np.testing.assert_allclose(result.aux["first"], [0, 3, 6, 9, 12])
        np.testing.assert_allclose(result.losses[1], 0.5 * (9 + 16 + 25))


def test_norms_are_those_before_clipping():
    result = dpjax.clipped_grad(loss, RULE)(jnp.zeros(2), jnp.array([[3.0, 4.0], [0.3, 0.4]]))
    np.testing.assert_allclose(result.norms, [[5.0], [0.5]], rtol=1e-6)
    np.testing.assert_allclose(result.factors, [[0.2], [1.0]], rtol=1e-6)
    np.testing.assert_allclose(result.value, [-0.9, -1.2], rtol=1e-6)


def test_microbatches_are_chosen_from_the_shapes():
    example = jax.ShapeDtypeStruct((784,), jnp.float32)
    params = {"w": jax.ShapeDtypeStruct((784, 65_536), jnp.float32)}

    def matrix(p, x):
        return jnp.sum((x @ p["w"]) ** 2), None

    small = gradients.microbatch_size(
        lambda w, x: (loss(w, x), None), jnp.zeros(784), example, 4096, "vmap"
    )
    large = gradients.microbatch_size(matrix, params, example, 4096, "vmap")
    assert small == 4096
    assert 1 <= large < small
    # Book-keeping holds activations; the matrix never has a gradient per example.
    held = functools.partial(bytes_per_example, matrix, params, example)
    assert held("ghost") < held("vmap") / 50
    assert gradients.microbatch_size(matrix, params, example, 3, "ghost") == 3


def test_jit_vmap_and_grad_compose_with_it():
    clipped = dpjax.clipped_grad(loss, RULE)
    batch = jnp.arange(12.0).reshape(4, 3)
    plain = clipped(jnp.zeros(3), batch)
    np.testing.assert_allclose(jax.jit(clipped)(jnp.zeros(3), batch).value, plain.value, rtol=1e-6)
    stacked = jax.vmap(clipped, (0, None))(jnp.zeros((2, 3)), batch)
    np.testing.assert_allclose(stacked.value[1], plain.value, rtol=1e-6)


TEACHES = [
    (TypeError, lambda: dpjax.clipped_grad(jnp.zeros(()), RULE), "function itself"),
    (ValueError, lambda: dpjax.clipped_grad(loss, RULE, "fast"), "'auto' or one of"),
    (ValueError, lambda: dpjax.clipped_grad(loss, RULE, "scan", 0), "at least 1"),
    (
        ValueError,
        lambda: dpjax.clipped_grad(lambda w, x: w - x, RULE)(jnp.zeros(3), jnp.zeros((2, 3))),
        "expected a real scalar",
    ),
    (
        ValueError,
        lambda: dpjax.clipped_grad(lambda w, x: (loss(w, x), 1), RULE)(
            jnp.zeros(3), jnp.zeros((2, 3))
        ),
        "expected a real scalar",
    ),
    (
        ValueError,
        lambda: dpjax.clipped_grad(loss, RULE)(jnp.zeros(3), (jnp.zeros((2, 3)), jnp.zeros(3))),
        "leading axis of one length",
    ),
    (
        ValueError,
        lambda: dpjax.clipped_grad(loss, RULE)(jnp.zeros(3), jnp.zeros(())),
        "batch axis",
    ),
    (
        ValueError,
        lambda: dpjax.clipped_grad(loss, RULE)(jnp.zeros(3), jnp.zeros((2, 3)), jnp.ones(3)),
        "one entry per example",
    ),
    (
        ValueError,
        lambda: dpjax.clipped_grad(lambda p, x: loss(p["params"], x), RULE)(
            {"params": jnp.zeros(3), "batch_stats": {"mean": jnp.zeros(3)}}, jnp.zeros((2, 3))
        ),
        "Batch normalisation mixes",
    ),
]


@pytest.mark.parametrize(("error", "call", "message"), TEACHES)
def test_errors_teach(error, call, message):
    with pytest.raises(error, match=message):
        call()


# The loss is any pure function: each library's models come as they are. ----------------

X = np.linspace(-1, 1, 5 * 6).reshape(5, 6).astype(np.float32)
Y = np.arange(5, dtype=np.int32) % 3


def linen_case():
    model = linen.Sequential([linen.Dense(8), linen.LayerNorm(), jnp.tanh, linen.Dense(3)])
    params = model.init(jax.random.key(0), jnp.zeros(6))["params"]
    return losses.of(model, losses.cross_entropy), params


def nnx_case():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(6, 8, rngs=rngs)
            self.second = nnx.Linear(8, 3, rngs=rngs)

        def __call__(self, x):
            return self.second(jnp.tanh(self.first(x)))

    graph, params = nnx.split(Net(nnx.Rngs(0)))

    def per_example(params, example):
        x, y = example
        return losses.cross_entropy(nnx.merge(graph, params)(x), y)

    return per_example, params


def equinox_case():
    model = equinox.nn.MLP(6, 3, 8, depth=1, activation=jnp.tanh, key=jax.random.key(0))
    params, static = equinox.partition(model, equinox.is_inexact_array)

    def per_example(params, example):
        x, y = example
        return losses.cross_entropy(equinox.combine(params, static)(x), y)

    return per_example, params


@pytest.mark.parametrize("case", [linen_case, nnx_case, equinox_case])
def test_models_of_any_library_train_privately(case):
    per_example, params = case()
    testing.assert_engines_agree(per_example, clipping.grouped(0.5, 2), params, (X, Y))
    mechanism = dpjax.Mechanism(
        sampling=dpjax.sampling.poisson(5, 3), clipping=RULE, noise_multiplier=1.0, steps=2
    )
    algorithm = dpjax.dpsgd(per_example, optax.adam(1e-2), mechanism, (X, Y))
    state = algorithm.init(jax.random.key(1), params)
    state, info = algorithm.step(state)
    assert jax.tree.structure(state.params) == jax.tree.structure(params)
    assert info.norm.shape == (1,)

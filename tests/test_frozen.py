# SPDX-License-Identifier: Apache-2.0
"""Frozen weights are an argument: no constants of the program, no part of a checkpoint."""

import os
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from mutation import kills

import dpjax
from dpjax import clipping, data, losses, sampling

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(40, 8)).astype(np.float32), np.arange(40) % 3
BASE = jnp.asarray(RNG.normal(size=(8, 16)), jnp.bfloat16)
FROZEN = {"base": BASE, "scale": jnp.int8(2)}
PARAMS = jnp.asarray(RNG.normal(size=(16, 3)), jnp.float32)
RULE = clipping.flat(0.3)


def loss(params, example, frozen):
    x, y = example
    hidden = jnp.tanh(x @ frozen["base"].astype(jnp.float32) * frozen["scale"])
    return losses.cross_entropy(hidden @ params, y)


def closed(params, example):
    return loss(params, example, FROZEN)


def trained(loss, rows=(X, Y), frozen=None):
    mechanism = dpjax.Mechanism(
        sampling=sampling.poisson(40, 8), clipping=RULE, noise_multiplier=0.5, steps=4
    )
    algorithm = dpjax.dpsgd(loss, optax.sgd(0.1), mechanism, rows, frozen=frozen)
    state = algorithm.init(PARAMS, jax.random.key(0))
    return algorithm, algorithm.run(state, 4)[0]


@pytest.mark.parametrize("engine", ["ghost", pytest.param("scan", marks=pytest.mark.thorough)])
def test_an_argument_gives_the_sum_of_a_closure_and_is_no_constant(engine):
    want = dpjax.clipped_grad(closed, RULE, engine)(PARAMS, (X, Y)).value
    clipped = dpjax.clipped_grad(loss, RULE, engine, microbatch_size=7)

    @jax.jit
    def total(params, frozen):
        return clipped(params, (X, Y), frozen=frozen).value

    np.testing.assert_allclose(total(PARAMS, FROZEN), want, atol=1e-6)
    held = jax.make_jaxpr(total)(PARAMS, FROZEN).consts
    assert not any(np.shape(x) == BASE.shape for x in held)


@kills(
    "training/_streaming.py", "shared = bound_to(recipe, shared)", "shared = bound_to(recipe, None)"
)
@pytest.mark.thorough
def test_runs_in_memory_and_from_a_stream_are_those_of_a_closure():
    _, want = trained(closed)
    algorithm, state = trained(loss, frozen=FROZEN)
    _, streamed = trained(loss, data.Stream(list(zip(X, Y, strict=True))), FROZEN)
    np.testing.assert_allclose(state.params, want.params, atol=1e-6)
    np.testing.assert_allclose(streamed.params, want.params, atol=1e-6)
    assert algorithm.identity(state)["frozen"] == {"base": "bfloat16[8, 16]", "scale": "int8[]"}
    assert not any(np.shape(x) == BASE.shape for x in jax.tree.leaves(state))


@pytest.mark.thorough
def test_a_folder_belongs_to_frozen_weights_of_its_shapes(tmp_path):
    def fit(frozen):
        algorithm, _ = trained(
            lambda p, e, f: loss(p, e, {**f, "base": f["base"][:, :16]}), frozen=frozen
        )
        return dpjax.fit(algorithm, algorithm.init(PARAMS), directory=tmp_path, progress=False)

    fit(FROZEN)
    with pytest.raises(ValueError, match="frozen"):
        fit({**FROZEN, "base": jnp.tile(BASE, (1, 2))})


def test_a_part_of_a_module_is_trained_beside_the_rest():
    model = nn.Sequential([nn.Dense(16), nn.tanh, nn.Dense(3)])
    whole = losses.of(model, losses.cross_entropy)
    params = dict(model.init(jax.random.key(0), X[0])["params"])
    example = X[0], Y[0]
    part = {"layers_2": params["layers_2"]}
    rest = {"layers_0": params["layers_0"]}
    assert whole(part, example, rest) == whole(params, example)


def test_large_constants_are_told_how_to_become_an_argument(caplog, monkeypatch):
    monkeypatch.setattr("dpjax.training.checks.LARGE", 100)
    trained(closed)
    assert "Give weights that are not trained as frozen=" in caplog.text
    caplog.clear()
    trained(loss, frozen=FROZEN)
    assert not caplog.text


SPLIT = """
import jax
jax.config.update("jax_num_cpu_devices", 4)
from jax.sharding import NamedSharding, PartitionSpec
import jax.numpy as jnp, optax, dpjax
from dpjax.training.recipe import held_on
import test_frozen as t
mesh = dpjax.meshes.parse("data:2,model:2")
split = NamedSharding(mesh, PartitionSpec(None, "model"))
frozen = {**t.FROZEN, "base": jax.device_put(t.BASE, split)}
_, want = t.trained(t.closed)
with jax.set_mesh(mesh):
    algorithm, state = t.trained(t.loss, frozen=frozen)
    held = algorithm.run.__self__.steps._held_on(mesh)[1]
assert held["base"].sharding.spec == split.spec
assert jnp.allclose(state.params, want.params, atol=1e-5)
"""


@pytest.mark.thorough
def test_frozen_weights_stay_split_over_the_devices_of_a_mesh():
    run = [sys.executable, "-c", SPLIT]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(run, capture_output=True, text=True, env=environment)
    assert not done.returncode, done.stderr

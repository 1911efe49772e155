# SPDX-License-Identifier: Apache-2.0
"""Arithmetic on trees: widths, norms, sums, keys."""

import dataclasses
import functools
import hashlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from mutation import kills

from dpjax import Mechanism, accounting, clipping, diagnostics, losses, sampling, trees, types
from dpjax.federated.fedavg import recipe_of
from dpjax.gradients._estimated_norms.jl import estimated_norms
from dpjax.mechanism.link import private_mean
from dpjax.noise.link import add_noise


def test_wide():
    assert trees.wide(jnp.float16) == trees.wide(jnp.bfloat16) == jnp.float32
    assert trees.wide(jnp.float64) == jnp.float64
    for dtype in (jnp.int32, jnp.complex64, jnp.bool_):
        with pytest.raises(TypeError, match="real floating-point leaves"):
            trees.wide(dtype)


def test_norms_are_taken_within_groups():
    gradients = [jnp.full((2, 4), 3.0), jnp.full((2, 1), 8.0), jnp.full((2, 2, 2), 1.0)]
    norms = trees.group_norms(gradients, (0, 0, 1), 2)
    np.testing.assert_allclose(norms, [[10.0, 2.0]] * 2)
    assert trees.group_norms(gradients, (0, 0, 0), 1).shape == (2, 1)
    assert trees.group_norms([jnp.array([[3 + 4j, 12j]])], (0,), 1).tolist() == [[13.0]]


@pytest.mark.parametrize("value", [1e-4, 300.0])
def test_norms_of_half_precision_are_those_of_single(value):
    narrow = {"w": jnp.full((1, 4096), value, jnp.float16)}
    want = float(jnp.float16(value)) * 64
    assert float(trees.group_norms(narrow, (0,), 1)[0, 0]) == pytest.approx(want, rel=1e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_factor_of_zero_silences_anything(bad):
    gradients = {"w": jnp.array([[1.0, 2.0], [bad, bad]])}
    total = trees.scaled_sum(gradients, jnp.array([[2.0], [0.0]]), (0,))
    np.testing.assert_array_equal(total["w"], [2.0, 4.0])


@kills(
    "trees.py", "scale, counted, precision=jax.lax.Precision.HIGHEST", "scale, counted", slow=True
)
def test_no_matrix_unit_rounds_a_clipped_sum():
    """It reads 8 bits of a factor and of a gradient, and norms are of all their bits."""
    total = jax.make_jaxpr(lambda g, f: trees.scaled_sum(g, f, (0,)))
    program = str(total(jnp.ones((3, 5)), jnp.ones((3, 1))))
    highest = program.count("precision=(Precision.HIGHEST, Precision.HIGHEST)")
    assert 0 < program.count("dot_general[") == highest


@kills("types.py", "NOISE = 0xB537112C", "NOISE = 1", slow=True)
def test_keys_of_purposes_meet_no_key_of_the_same_root():
    """A model that is made from the run's root key would otherwise reveal the key of its noise."""
    for purpose in types.Purpose:
        digest = hashlib.sha256(f"dpjax {purpose.name}".encode()).hexdigest()
        assert purpose == int(digest[:8], 16) | 2**31  # above every int32
    root = jax.random.key(0)
    first = jax.random.split(root, 64)
    second = jax.vmap(lambda key: jax.random.split(key, 64))(first)
    own = [jax.random.fold_in(root, purpose) for purpose in types.Purpose]
    own += [trees.step_key(root, purpose, step) for purpose in types.Purpose for step in range(9)]
    theirs = np.concatenate([jax.random.key_data(x).reshape(-1, 2) for x in (first, second)])
    assert not {*map(tuple, theirs.tolist())} & {
        tuple(jax.random.key_data(x).tolist()) for x in own
    }


def given_a_key(key):
    """Functions that draw from a key of the caller: first the traceable ones, then the others."""
    like, rows, rule = jnp.zeros(3), jnp.ones((2, 3)), clipping.flat(1.0)
    usual = {"clipping": rule, "noise_multiplier": 1.0, "steps": 1}
    rounds = Mechanism(sampling=sampling.poisson(20, 5), **usual)
    first = lambda w, example: jnp.vdot(w, example[0])  # noqa: E731
    adapts, one = (
        dataclasses.replace(rounds, adaptive=clipping.Quantile(count_multiplier=2.0)),
        jnp.ones(()),
    )
    samplers = [
        sampling.poisson(20, 5),
        sampling.poisson(10**6, 5),
        sampling.fixed(20, 5),
        sampling.shuffled(20, 5),
        sampling.balls_in_bins(20, 5),
        sampling.random_allocation(20, 4),
        sampling.random_allocation(10**6, 20_000),
        sampling.cyclic_poisson(20, 5, cycle=2),
        sampling.persons(np.arange(20) % 7, 2, most_rows=2),
    ]
    traced = [
        *(functools.partial(sampler.draw, key, 0) for sampler in samplers),
        lambda: add_noise(like, rule.partition, [1.0], key, 0),
        lambda: private_mean(adapts, like, key, jnp.int32(0), bound_scale=one, below=one),
        lambda: estimated_norms(lambda w, x: (w @ x, ()), 1, like, rows, key),
        lambda: recipe_of("", None, optax.identity(), rounds, None, scale=1.0).entry(key, 0),
        lambda: losses.augmented(first, lambda _, x: x, 2, key=key)(like, (like, like)),
    ]
    others = [
        lambda: accounting.draw_runs(key, 2.0),
        lambda: diagnostics.sharpness(jnp.vdot, like, rows, key=key),
    ]
    return traced, others


def test_what_is_drawn_from_a_key_begins_with_a_purpose(monkeypatch):
    """Also where the key of a run is given to a function that takes another."""
    root, firsts = jax.random.key(0), []

    def noted(plain, key, *rest, **options):
        if key is root:
            firsts.append(rest[0] if plain.__name__ == "fold_in" else plain.__name__)
        return plain(key, *rest, **options)

    for name in ("fold_in", "split", "bits", "uniform", "normal", "permutation"):
        plain = getattr(jax.random, name)
        monkeypatch.setattr(jax.random, name, functools.partial(noted, plain))
    traced, others = given_a_key(root)
    for draw in traced:
        jax.eval_shape(draw)
    for draw in others:
        draw()
    # tests/test_features.py has the streams of preparation, whose programs take long to compile.
    assert {*firsts, types.Purpose.PREPARATION} == set(types.Purpose)


def test_keys_of_purposes_steps_and_leaves_differ():
    root = jax.random.key(0)
    keys = [trees.step_key(root, purpose, step) for purpose in types.Purpose for step in range(5)]
    data = {tuple(np.asarray(jax.random.key_data(key))) for key in keys}
    assert len(data) == 5 * len(types.Purpose)
    tree = trees.random_like(
        lambda key, shape, dtype: jax.random.normal(key, shape, dtype),
        root,
        {"a": jnp.zeros(3), "b": jnp.zeros(3, jnp.bfloat16)},
    )
    assert not np.any(np.asarray(tree["a"]) == np.asarray(tree["b"]))
    assert tree["b"].dtype == jnp.float32


def test_a_bare_seed_is_no_key():
    with pytest.raises(TypeError, match=r"^trees\.step_key\(key: int\): expected a key"):
        trees.step_key(0, types.Purpose.SAMPLING, 0)


def test_leading_size_teaches():
    assert trees.leading_size((jnp.zeros((3, 2)), jnp.zeros(3))) == 3
    for bad in ((jnp.zeros((3, 2)), jnp.zeros(4)), jnp.zeros(()), ()):
        with pytest.raises(ValueError, match="leading axis of one length"):
            trees.leading_size(bad)


def test_a_variable_of_nnx_is_a_leaf_of_its_name():
    params = nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Param)[1]
    assert trees.leaf_names({"first": params}) == ("first/bias", "first/kernel")

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Attention:
        key: jax.Array
        value: jax.Array

    attention = {"attention": Attention(jnp.zeros(2), jnp.zeros(2))}
    assert trees.leaf_names(attention) == ("attention/key", "attention/value")

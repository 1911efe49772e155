# SPDX-License-Identifier: Apache-2.0
"""Arithmetic on trees: widths, norms, sums, keys."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from mutation import kills

from dpjax import clipping, trees, types


def test_wide():
    assert trees.wide(jnp.float16) == trees.wide(jnp.bfloat16) == jnp.float32
    assert trees.wide(jnp.float64) == jnp.float64
    for dtype in (jnp.int32, jnp.complex64, jnp.bool_):
        with pytest.raises(TypeError, match="real floating-point leaves"):
            trees.wide(dtype)


@kills("trees.py", "x * jnp.conj(x)", "x * x", slow=True)
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


@kills("trees.py", "found[i] = piece", "found[places[0]] = piece")
def test_what_was_packed_is_unpacked():
    """Small leaves of a dtype are one array, wherever they stand; large ones stay as they are."""
    large = jnp.ones((2**7, 2**7 + 1))
    tree = {
        "a": jnp.arange(6.0).reshape(2, 3),
        "b": large,
        "c": jnp.zeros((0, 4)),
        "d": jnp.float32(7),
        "e": jnp.arange(4, dtype=jnp.bfloat16),
    }
    arrays = trees.packed(tree)
    assert [x.shape for x in arrays] == [(7,), large.shape, (4,)]
    back = trees.unpacked(arrays, tree)
    jax.tree.map(np.testing.assert_array_equal, back, tree)
    assert jax.tree.map(jnp.shape, back) == jax.tree.map(jnp.shape, tree)


@kills("trees.py", "if last and within[path[:-1]] == 1 else", "if last else", slow=True)
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


@kills("trees.py", "if len(set(names)) == len(names):", "if names:", slow=True)
def test_a_slash_in_a_key_makes_no_two_leaves_one():
    tree = {"a": {"b": jnp.zeros(2)}, "a/b": jnp.zeros(3), "a%2Fb": jnp.zeros(4)}
    assert trees.leaf_names(tree) == ("a/b", "a%252Fb", "a%2Fb")
    assert clipping.by_leaf(tree).size == 3
    assert clipping.by_layer(tree).names == ("a", "(top)")
    haiku = {"mlp/~/linear_0": {"w": jnp.zeros(2)}, "mlp/~/linear_1": {"w": jnp.zeros(2)}}
    assert trees.leaf_names(haiku) == ("mlp/~/linear_0/w", "mlp/~/linear_1/w")

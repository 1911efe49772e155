# SPDX-License-Identifier: Apache-2.0
"""Checkpoints alone: restored values and refusals. `test_faults` has runs with faults."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from mutation import kills

from dpjax.training.checkpoints import Checkpoints, Damaged

STATE = {
    "b": jnp.asarray([1.5, jnp.nan], jnp.bfloat16),
    "key": jax.random.key(5),
    "empty": np.zeros(0),
    "scalar": jnp.int32(3),
    "grown": np.arange(3),
    "optimizer": optax.adam(0.1).init(jnp.ones((2, 3))),
}


@pytest.fixture
def kept(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    yield checkpoints
    checkpoints.close()


def test_every_kind_of_leaf_comes_back(kept):
    like = {**STATE, "key": jax.random.key(0), "grown": np.arange(2), "scalar": jnp.int32(0)}
    kept.save(0, STATE, {"note": [1.5, None, 0.1]})
    found = kept.latest(like)
    assert found.facts == {"note": [1.5, None, 0.1]}
    assert jax.tree.structure(found.state) == jax.tree.structure(STATE)
    for one, other in zip(*map(jax.tree.leaves, (found.state, STATE)), strict=True):
        assert one.dtype == other.dtype
        assert isinstance(one, jax.Array) == isinstance(other, jax.Array)
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = map(jax.random.key_data, (one, other))
        np.testing.assert_array_equal(np.asarray(one, float), np.asarray(other, float))


def test_nothing_saved_is_nothing_found_and_other_users_cannot_read(kept):
    assert kept.latest(STATE) is None
    assert kept.directory.stat().st_mode & 0o077 == 0


def test_the_last_three_are_kept_and_the_last_is_taken(kept):
    for step in range(5):
        kept.save(step, {"x": jnp.float32(step)}, {"step": step})
    assert kept.latest({"x": jnp.float32(0)}).facts == {"step": 4}
    assert sorted(int(p.name) for p in kept.directory.glob("[0-9]*")) == [2, 3, 4]


@kills("training/checkpoints.py", "and last >= step:", "and last > step:")
def test_a_step_that_is_there_is_an_error(kept):
    """Orbax would skip it without a word, and then the step would be released unsaved."""
    kept.save(3, {"x": jnp.float32(1)}, {})
    for step in (2, 3):
        with pytest.raises(ValueError, match=rf"step={step}\): .* holds step 3; expected a later"):
            kept.save(step, {"x": jnp.float32(2)}, {})


@pytest.mark.promotes
def test_numbers_of_python_still_take_the_dtype_of_what_they_meet(kept):
    """The next step would otherwise round as no step did before."""
    state = {"a": 0.5, "b": jnp.asarray(0.5), "c": True, "d": jnp.float32(0.5), "e": np.ones(())}
    kept.save(1, state, {})
    found = kept.latest(state).state
    narrow = jnp.ones(2, jnp.bfloat16)
    for name, value in state.items():
        assert (found[name] * narrow).dtype == (value * narrow).dtype, name
    assert type(found["a"]) is float
    assert type(found["c"]) is bool


def test_another_shape_type_or_number_of_arrays_is_refused_by_name(kept):
    kept.save(0, {"a": jnp.ones(2), "w": jnp.ones((2, 3))}, {})
    with pytest.raises(ValueError, match=r"has w as float32\[2, 3\]; expected int32\[3, 3\]"):
        kept.latest({"a": jnp.ones(2), "w": jnp.ones((3, 3), jnp.int32)})
    with pytest.raises(ValueError, match="other leaves, such as w"):
        kept.latest({"a": jnp.ones(2), "z": jnp.ones((2, 3))})


def test_a_damaged_one_is_said_and_no_earlier_one_is_read(kept):
    for step in (1, 2):
        kept.save(step, {"x": jnp.float32(step)}, {})
    for path in (kept.directory / "2").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    with pytest.raises(Damaged, match="2 is damaged"):
        kept.latest({"x": jnp.float32(0)})


def test_an_array_that_jax_may_move_comes_back_as_one(kept):
    kept.save(1, {"x": jnp.ones(2)}, {})
    found = kept.latest({"x": jnp.zeros(2)}).state
    assert not found["x"].committed

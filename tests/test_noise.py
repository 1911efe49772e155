# SPDX-License-Identifier: Apache-2.0
"""Noise: tails, dtypes, keys, schedules, and what it refuses."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from jax.extend.random import threefry_2x32
from mutation import kills

from dpjax import clipping, noise, sampling, schedules, trees, types
from dpjax.noise import normal

RULE = clipping.flat(1.0)


def run(link, tree, steps=1, rule=RULE):
    state, outs = link.init(tree), []
    for _ in range(steps):
        out, state = link.update(clipping.trusted_sum(tree, rule), state)
        outs.append(out)
    return outs


@pytest.mark.slow
def test_the_support_reaches_beyond_seven_on_both_sides():
    """The transform itself, at the extreme words that a generator can give."""
    word = lambda *values: jnp.array(values, jnp.uint32)  # noqa: E731
    smallest = word(0, 0, 0, 0)
    axes = word(*((1 << 21) + quarter * (1 << 22) for quarter in range(4)))
    pairs = normal._box_muller(smallest, axes)
    for values in (pairs.real, pairs.imag):
        assert float(jnp.max(values)) > 7.0
        assert float(jnp.min(values)) < -7.0
    for words in (word(0, 2**32 - 1, 2**31, 2**31 - 1), word(0, 2**32 - 1, 12345, 2**31)):
        assert np.all(np.isfinite(normal._box_muller(words[:, None], words[None])))


def test_the_distribution_is_normal():
    z = np.asarray(noise.standard_normal(jax.random.key(0), (2_000_001,)), np.float64)
    assert z.shape == (2_000_001,)
    assert scipy.stats.kstest(z, "norm").pvalue > 1e-3
    assert z.mean() == pytest.approx(0, abs=0.004)
    assert z.var() == pytest.approx(1, abs=0.005)
    assert scipy.stats.skew(z) == pytest.approx(0, abs=0.01)
    assert scipy.stats.kurtosis(z) == pytest.approx(0, abs=0.02)
    for edge in (2.0, 3.0, 4.0):
        expected = 2 * scipy.stats.norm.sf(edge) * z.size
        found = np.sum(np.abs(z) > edge)
        assert abs(found - expected) < 5 * math.sqrt(expected)


@kills("noise/normal.py", "jnp.concatenate([z.real, z.imag])", "jnp.concatenate([z.real, z.real])")
def test_the_halves_of_a_draw_know_nothing_of_each_other():
    """The two numbers of each Box-Muller pair lie half a draw apart."""
    z = noise.standard_normal(jax.random.key(0), (2, 1000, normal._ROW))
    along, across = np.asarray(z, np.float64).reshape(2, -1)
    for f in (lambda x: x, np.abs, lambda x: x**2):
        assert abs(np.corrcoef(f(along), f(across))[0, 1]) < 0.005


@pytest.mark.thorough
def test_what_a_draw_waits_for_changes_no_number():
    """Neither NaN, nor an empty array, nor one of another type."""
    key, shape = jax.random.key(0), (5, 3)
    alone = noise.standard_normal(key, shape)
    for before in (jnp.full((2, 2), jnp.nan), jnp.zeros((0, 4)), jnp.arange(3), -jnp.ones(1)):
        waited = jax.jit(lambda x: noise.standard_normal(key, shape, after=x))(before)
        np.testing.assert_array_equal(waited, alone)


@kills("trees.py", "jax.random.fold_in(key, len(values))", "jax.random.fold_in(key, 0)", slow=True)
def test_leaves_are_cut_from_few_draws_and_share_no_number(monkeypatch):
    sizes = [3, 2, 0, 4, 700, 5]
    tree = {str(i): jnp.zeros((n, 2), jnp.float32) for i, n in enumerate(sizes)}
    tree["3"] = tree["3"].astype(jnp.bfloat16)
    together = trees.random_like(noise.standard_normal, jax.random.key(0), tree)
    monkeypatch.setattr(trees, "_TOGETHER", 20)
    apart = trees.random_like(noise.standard_normal, jax.random.key(0), tree)
    for draws in (together, apart):
        assert [z.shape for z in draws.values()] == [(n, 2) for n in sizes]
        assert {z.dtype for z in draws.values()} == {jnp.dtype("float32")}
        numbers = np.concatenate([z.reshape(-1) for z in draws.values()])
        assert np.unique(numbers).size >= numbers.size - 1
    assert np.any(together["5"] != apart["5"])


def test_the_words_are_those_of_threefry():
    key, counter = jnp.array([5, 7], jnp.uint32), jnp.arange(20, dtype=jnp.uint32)
    words = normal._threefry(key, [counter[:10], counter[10:]])
    np.testing.assert_array_equal(jnp.concatenate(words), threefry_2x32(key, counter))


@kills("noise/normal.py", "for axis in (0, 1)", "for axis in (1, 1)")
def test_no_number_is_drawn_twice():
    """Blocks, rows and columns all count; in float64 numbers hardly ever meet by chance."""
    with jax.enable_x64(True):
        z = np.asarray(noise.standard_normal(jax.random.key(0), (100_000,), jnp.float64))
    assert z.dtype == np.float64
    assert np.any(z != z.astype(np.float32))
    assert np.unique(z).size == z.size


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.sample(1)
def test_a_pair_is_what_box_and_muller_say(dtype):
    """From the same 64 bits, by the formula in float64."""
    with jax.enable_x64(True):
        first, second = jax.random.bits(jax.random.key(0), (2, 10_000), jnp.uint32)
        first = first.at[:4].set(jnp.array([0, 2**32 - 1, 2**31, 2**31 - 1], jnp.uint32))
        pairs = normal._box_muller(first, second, dtype)
    a, b = (np.asarray(x, np.float64) for x in (first, second))
    above = (2.0**32 - 1 - a) + (255.5 - b // 2**24) / 256
    below = a + (b // 2**24 + 0.5) / 256
    log = np.where(a < 2**31, np.log(below * 2.0**-32), np.log1p(-above * 2.0**-32))
    angle = ((b % 2**22) - 2**21 + 0.5) / 2**23 * math.pi
    angle += math.pi * (b // 2**22 % 2) + math.pi / 2 * (b // 2**23 % 2)
    wanted = np.sqrt(-2 * log) * np.array([np.cos(angle), np.sin(angle)])
    size = np.sqrt(-2 * log)
    tolerance = 20 * float(jnp.finfo(dtype).eps)
    assert np.max(np.abs(np.array([pairs.real, pairs.imag]) - wanted) / size) < tolerance


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0), (2, 3)])
def test_any_shape(shape):
    assert noise.standard_normal(jax.random.key(0), shape).shape == shape


@kills(
    "trees.py", "draw(run_key, shapes, wide(run[0].dtype),", "draw(run_key, shapes, run[0].dtype,"
)
def test_narrow_noise_is_refused_and_narrow_leaves_get_wide_noise():
    with pytest.raises(ValueError, match="expected float32 or float64"):
        noise.standard_normal(jax.random.key(0), (3,), jnp.bfloat16)
    (out,) = run(noise.gaussian(1.0, RULE), {"w": jnp.zeros(1_000_000, jnp.bfloat16)})
    assert out["w"].dtype == jnp.float32
    assert float(jnp.max(jnp.abs(out["w"]))) >= 4.3
    assert np.unique(out["w"]).size >= 500_000
    assert np.unique(out["w"].astype(jnp.bfloat16)).size >= 2000


def test_the_noise_follows_its_schedule_step_by_step():
    schedule = schedules.CURRICULA["linear-down"](epochs=5, steps_per_epoch=2)
    rule = clipping.flat(2.0)
    outs = run(noise.gaussian(schedule, rule), jnp.zeros(400_000), steps=12, rule=rule)
    deviations = [np.std(out) / 2 for out in outs]
    np.testing.assert_allclose(deviations, [5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 1, 1], rtol=0.01)


@kills("trees.py", "fold_in(jax.random.fold_in(root, purpose), step)", "fold_in(root, step)")
def test_the_stream_is_a_function_of_root_purpose_and_step():
    root, like = jax.random.key(9), {"w": jnp.zeros(5)}
    outs = run(noise.gaussian(1.0, RULE, root), like, steps=3)
    for step, out in enumerate(outs):
        key = jax.random.fold_in(jax.random.fold_in(root, types.Purpose.NOISE), step)
        want = trees.random_like(noise.standard_normal, key, like)
        np.testing.assert_allclose(out["w"], want["w"] * (1 + 2**-10), rtol=1e-6)


def test_a_schedule_that_returns_all_its_values_is_refused():
    """Each column would have one noise in ten sizes: two of them give the sum."""
    link = noise.gaussian(lambda _: jnp.linspace(2.0, 1.0, 10), RULE)
    with pytest.raises(TypeError, match=r"\(10,\), not one number.*schedules\.table"):
        run(link, jnp.zeros((20, 1)))


def test_old_style_keys_work():
    (out,) = run(noise.gaussian(1.0, RULE, jax.random.PRNGKey(0)), jnp.zeros(3))
    (new,) = run(noise.gaussian(1.0, RULE, jax.random.key(0)), jnp.zeros(3))
    np.testing.assert_array_equal(out, new)


KEYS = {
    "a seed": (lambda: 42, "expected a key, such as"),
    "several": (lambda: jax.random.split(jax.random.key(0), 3), "expected one key"),
    # fold_in(fold_in(k, a), b) is fold_in(fold_in(k, b), a): steps and leaves share their noise
    "unsafe_rbg": (lambda: jax.random.key(0, impl="unsafe_rbg"), "expected one of threefry2x32"),
}


@pytest.mark.parametrize("name", KEYS)
def test_what_is_no_key_of_a_run_is_refused(name):
    key, message = KEYS[name]
    with pytest.raises((TypeError, ValueError), match=message):
        noise.gaussian(1.0, RULE, key())
    with pytest.raises((TypeError, ValueError), match=message):
        sampling.poisson(10, 2).draw(key(), 0)
    noise.gaussian(1.0, RULE, jax.random.key(0, impl="rbg")).init(jnp.zeros(3))


@pytest.mark.parametrize(
    ("multiplier", "rule", "message"),
    [
        (-1.0, RULE, "expected a number, 0 or more"),
        ((1.0, 2.0), RULE, "2 multipliers for 1 groups"),
        ((1.0, -2.0), clipping.grouped(1.0, 2), "expected a number, 0 or more"),
        (1.0, clipping.flat(math.inf), "no finite noise hides one example"),
        (schedules.CURRICULA["linear-down"](), clipping.flat(math.inf), "no finite noise"),
    ],
)
def test_errors_teach(multiplier, rule, message):
    with pytest.raises(ValueError, match=message):
        noise.gaussian(multiplier, rule)

# SPDX-License-Identifier: Apache-2.0
"""Features: the cache returns exact results; normalisation costs its stated multipliers."""

import dataclasses
import json
import math
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mutation import kills
from run_binary import run
from small_mechanisms import mechanism_with

import dpjax
from dpjax import accounting, clipping, data, features, noise, sampling, scattering
from dpjax.features import normalization as room
from dpjax.mechanism import Spent
from dpjax.types import Purpose

RNG = np.random.default_rng(0)
KEY = jax.random.key(0)
DELTA = 1e-5


# --- the cache --------------------------------------------------------------------------------


class Counted:
    """A transform that counts its calls."""

    def __init__(self):
        self.runs = 0

    def __call__(self, x):
        self.runs += 1
        return np.sqrt(np.asarray(x, np.float64) + self.runs * 0)


def ask(folder, compute, inputs, **settings):
    return features.cached(compute, inputs, settings=settings, directory=folder)


@kills("features/cache.py", "* (inputs.dtype.fields is not None)", "* 0", slow=True)
def test_two_readings_of_the_same_bytes_are_two_inputs(tmp_path):
    one = np.ones(3, [("x", "<f4"), ("y", "<i4")])
    other = one.view([("x", "<i4"), ("y", "<f4")])
    for each in (one, other):
        got = features.cached(lambda z: np.float64(z["x"]), each, settings={}, directory=tmp_path)
        np.testing.assert_array_equal(got, each["x"])


def test_the_second_time_it_is_read(tmp_path):
    compute, inputs = Counted(), RNG.random((5, 3))
    folder = tmp_path / "not" / "there"
    first, second = ask(folder, compute, inputs), ask(folder, compute, inputs)
    assert compute.runs == 1
    assert np.array_equal(first, second)
    assert (first.dtype, first.shape) == (second.dtype, second.shape)
    second[:] = 0  # what is read belongs to the reader
    assert np.array_equal(ask(folder, compute, inputs), first)
    assert len(list(folder.iterdir())) == 1


def test_other_data_are_other_features(tmp_path):
    compute, x = Counted(), RNG.random((5, 3))
    others = np.nextafter(x, 2), x.astype(np.float32), x.reshape(3, 5), x[::-1], x[:4]
    for number, inputs in enumerate((x, *others), start=1):
        ask(tmp_path, compute, inputs)
        assert compute.runs == number
    ask(tmp_path, compute, np.asfortranarray(x))  # the same, however it lies in memory
    assert compute.runs == 6


def test_equal_bytes_of_another_type_are_other_data(tmp_path):
    """Settings may share names with other facts, and two types may share their bytes."""
    compute = Counted()
    for kind in (np.float16, jnp.bfloat16, ">f2", np.int16):
        ask(tmp_path, compute, np.arange(6, dtype=np.int16).view(kind), dtype="float32", shape=6)
    assert compute.runs == 4
    ask(tmp_path, compute, np.arange(6, dtype=np.int16), dtype="float64", shape=6)
    assert compute.runs == 5


def test_other_settings_are_other_features(tmp_path):
    compute, inputs = Counted(), RNG.random((5, 3))
    for settings in ({}, {"J": 2}, {"J": 3}, {"L": 2}, {"J": 2, "L": 2}, {"L": 2, "J": 2}):
        ask(tmp_path, compute, inputs, **settings)
    assert compute.runs == 5


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-8],
        lambda content: content[:40],
        lambda content: b"",
        lambda content: content + b"more",
        lambda content: content[:200] + bytes([content[200] ^ 1]) + content[201:],
        lambda content: bytes([content[0] ^ 1]) + content[1:],
    ],
)
def test_a_damaged_file_is_noticed_and_recomputed(tmp_path, damage, caplog):
    compute, inputs = Counted(), RNG.random((50, 3))
    first = ask(tmp_path, compute, inputs)
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert np.array_equal(ask(tmp_path, compute, inputs), first)
    assert compute.runs == 2
    assert "damaged" in caplog.text
    assert np.array_equal(ask(tmp_path, compute, inputs), first)
    assert compute.runs == 2


def test_a_write_that_fails_leaves_nothing_and_loses_nothing(tmp_path, monkeypatch, caplog):
    compute, inputs = Counted(), RNG.random((5, 3))

    def fail(*_):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        found = ask(tmp_path, compute, inputs)
    assert "could not be written (no space left)" in caplog.text
    assert not list(tmp_path.iterdir())
    assert np.array_equal(ask(tmp_path, compute, inputs), found)
    assert compute.runs == 2


def test_what_is_computed_from_is_what_is_hashed(tmp_path):
    found = features.cached(lambda x: 2 * x, [1, 2], settings={}, directory=tmp_path)
    assert found.tolist() == [2, 4]


@pytest.mark.parametrize(
    "settings", [{1: 2}, {"a": [{1: 2}]}, {"a": np.float32(1)}, {1: 2, "b": 3}]
)
def test_settings_that_json_changes_or_cannot_write_are_refused(tmp_path, settings):
    with pytest.raises(TypeError, match=r"^features\.cached\(settings=.*text as names"):
        features.cached(lambda x: x, np.ones(2), settings=settings, directory=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_used_is_refused_before_anything_is_computed(tmp_path):
    compute, inputs = Counted(), RNG.random((5, 3))
    (tmp_path / "file").write_text("in the place of a folder")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", pathlib.Path("/proc/none")):
        with pytest.raises(OSError, match=r"cached\(directory=.*nothing was computed"):
            ask(folder, compute, inputs)
    assert compute.runs == 0


def test_images_of_another_byte_order_have_the_same_features(tmp_path):
    images = RNG.random((3, 8, 8, 1)).astype(np.float32)
    want = features.scattered(images, 1, 2, directory=tmp_path)
    (path,) = tmp_path.iterdir()
    for order in (">f4", "<f4"):
        made = features.scattered(images.astype(order), 1, 2, directory=tmp_path)
        assert np.array_equal(made, want)
        assert np.array_equal(features.scattered(images.astype(order), 1, 2), want)
    assert [*tmp_path.iterdir()] == [path], "they are the same images"


@pytest.mark.parametrize("made", [np.array([{}]), np.array(["x"]), jnp.ones(3, jnp.bfloat16)])
def test_what_a_file_would_not_bring_back_is_not_written(tmp_path, made):
    with pytest.raises(TypeError, match="bfloat16 as float32, and no objects"):
        ask(tmp_path, lambda x: made, np.zeros(3))
    assert not list(tmp_path.iterdir())


def test_a_whole_data_set_is_what_its_images_are(tmp_path):
    images = RNG.random((7, 8, 8, 1), np.float32)
    want = scattering.scatter(images, 1, 2)
    for size in (1, 3, 7, 100):
        made = features.scattered(images, 1, 2, batch_size=size)
        np.testing.assert_allclose(made, want, atol=1e-6)
    first = features.scattered(images, 1, 2, directory=tmp_path)
    assert np.array_equal(features.scattered(images, 1, 2, directory=tmp_path), first)
    assert len(list(tmp_path.iterdir())) == 1
    features.scattered(images, 1, 3, directory=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    assert features.scattered(images[:0], 1, 2).shape == (0, 4, 4, 3)
    for size in (0, -3):
        with pytest.raises(ValueError, match="expected a whole number, at least 1"):
            features.scattered(images, 1, 2, batch_size=size)


# --- one example at a time --------------------------------------------------------------------


def test_group_norm_is_the_definition():
    x = RNG.normal(size=(3, 2, 2, 6)).astype(np.float32)
    got = np.asarray(features.group_norm(x, groups=2))
    for i in range(3):
        for channels in (slice(0, 3), slice(3, 6)):
            part = x[i, ..., channels].astype(np.float64)
            want = (part - part.mean()) / math.sqrt(part.var() + 1e-5)
            np.testing.assert_allclose(got[i, ..., channels], want, atol=1e-5)
    np.testing.assert_allclose(features.group_norm(x[1], groups=2), got[1], atol=1e-6)
    with pytest.raises(ValueError, match="6 channels are not divided"):
        features.group_norm(x, groups=4)
    assert np.array_equal(features.group_norm(x, groups=2.0), got)
    with pytest.raises(ValueError, match=r"groups=1\.5\): expected a whole number"):
        features.group_norm(x, groups=1.5)


def test_normalize():
    moments = features.Moments(jnp.array([1.0, 2.0]), jnp.array([4.0, 0.0]))
    x = RNG.normal(size=(3, 2, 2, 2)).astype(np.float32)
    got = features.normalize(x, moments)
    np.testing.assert_allclose(got[..., 0], (x[..., 0] - 1) / math.sqrt(4 + 1e-5), atol=1e-6)
    assert np.all(np.asarray(got[..., 1]) == 0)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_features_are_scaled_in_float32(dtype):
    x = jnp.asarray(RNG.normal(100, 1, (4, 5, 5, 6)), dtype)  # squares of 100 are far from 1 apart
    got = features.group_norm(x, groups=3)
    assert got.dtype == dtype
    want = features.group_norm(x.astype(jnp.float32), groups=3)
    np.testing.assert_allclose(got.astype(jnp.float32), want, atol=0.02)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (np.ones((3, 6), np.float32), r"shape \(3, 6\).*vectors\[:, None, None\]"),
        (np.ones((3, 2, 2, 6), int), "floating-point"),
    ],
)
def test_what_are_no_features_is_refused(wrong, word):
    moments = features.Moments(jnp.zeros(6), jnp.ones(6))
    release = describe(examples=3).release
    for ask in (
        lambda x: features.group_norm(x, groups=2),
        lambda x: features.normalize(x, moments),
        lambda x: release(KEY, x),
        features.channel_norms,
    ):
        with pytest.raises(ValueError, match=word):
            ask(wrong)


@pytest.mark.parametrize("channels", [1, 5])
def test_moments_of_other_features_are_refused(channels):
    moments = features.Moments(jnp.zeros(channels), jnp.ones(channels))
    with pytest.raises(ValueError, match=rf"6 channels and moments of shapes \({channels},\)"):
        features.normalize(jnp.ones((3, 2, 2, 6)), moments)


# --- all examples together, with noise ---------------------------------------------------------


def describe(**changes):
    facts = {"examples": 40, "noise_multiplier": 8.0, "thresholds": (1.0, 1.0)}
    return features.Normalization(**(facts | changes))


def some(examples=40, channels=5):
    return jnp.asarray(
        np.random.default_rng(0).gamma(2.0, 1.0, (examples, 3, 3, channels)), jnp.float32
    )


@pytest.mark.slow
def test_without_noise_or_thresholds_it_is_the_moments():
    x = some()
    exact = describe(noise_multiplier=0.0, thresholds=(math.inf, math.inf))
    moments = exact.release(KEY, x)
    np.testing.assert_allclose(moments.mean, x.mean((0, 1, 2)), rtol=1e-5)
    np.testing.assert_allclose(moments.variance, x.var((0, 1, 2)), rtol=1e-4)
    normal = features.normalize(x, moments)
    np.testing.assert_allclose(normal.mean((0, 1, 2)), 0, atol=1e-4)
    np.testing.assert_allclose(normal.std((0, 1, 2)), 1, atol=1e-4)


def queries(x, normalization, monkeypatch):
    """For each query: its exact answer, its bound and its noise multiplier."""
    asked, real = {}, room._release

    def release(key, query, rows, bound, multiplier):
        asked[query] = real(key, query, rows, bound, 0.0), bound, multiplier
        return asked[query][0]

    with monkeypatch.context() as patch:
        patch.setattr(room, "_release", release)
        normalization.release(KEY, x)
    return asked


@pytest.mark.sample(3)
@kills(
    "features/normalization.py",
    "factors = rule.factors(trees.group_norms(rows, (0,), 1))",
    "factors = jnp.ones((len(rows), 1))",
    case="10000.0",
    slow=True,
)
@kills(
    "features/normalization.py",
    "return _release(key, query, rows, bound, self.noise_multiplier)",
    "return _release(key, query, rows, bound, self.noise_multiplier / 2)",
    case="1.0",
    slow=True,
)
@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 1e4, math.inf, math.nan])
def test_one_example_moves_a_query_by_no_more_than_its_threshold(monkeypatch, scale):
    x = some().at[7].multiply(scale)
    for removed in (7, 0, 39):
        with_ = queries(x, describe(thresholds=(0.5, 0.25)), monkeypatch)
        rest = describe(thresholds=(0.5, 0.25), examples=39)
        without = queries(jnp.delete(x, removed, axis=0), rest, monkeypatch)
        for query, threshold in enumerate((0.5, 0.25)):
            total, *noise = with_[query]
            assert noise == [threshold, 8.0]
            moved = float(jnp.linalg.norm(total - without[query][0]))
            assert moved <= threshold * (1 + 1e-4)
            if removed == 7 and not math.isfinite(scale):
                assert moved < 1e-5  # nothing, but for the order in which the others add up
            elif removed == 7 and scale >= 1:
                assert moved == pytest.approx(threshold, rel=1e-4)


@kills(
    "features/normalization.py",
    "counts = _release(key, 2 + query, votes, 1.0, search.noise_multiplier)",
    "counts = votes.sum(axis=0)",
    case="1.0",
    slow=True,
)
@kills(
    "features/normalization.py",
    "counts = _release(key, 2 + query, votes, 1.0, search.noise_multiplier)",
    "counts = _release(key, 2 + query, votes, 1.0, search.noise_multiplier / 2)",
    case="1.0",
    slow=True,
)
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e9, math.inf, math.nan])
def test_one_example_moves_a_histogram_by_no_more_than_one(monkeypatch, scale):
    x = some().at[7].multiply(scale)
    search = features.Search(noise_multiplier=3.0)
    with_ = queries(x, describe(thresholds=search), monkeypatch)
    rest = describe(thresholds=search, examples=39)
    without = queries(jnp.delete(x, 7, axis=0), rest, monkeypatch)
    assert sorted(with_) == [0, 1, 2, 3]
    for query in (2, 3):
        counts, *noise = with_[query]
        assert noise == [1.0, 3.0]
        moved = float(jnp.linalg.norm(counts - without[query][0]))
        assert moved == (1.0 if math.isfinite(scale) else 0.0)
    for query in (0, 1):  # whatever was found, the query after it is clipped to that
        assert with_[query][1] in search.edges
        assert with_[query][2] == 8.0


@kills("features/normalization.py", "multiplier, rule,", "min(multiplier, 1.0), rule,", slow=True)
def test_the_noise_of_each_query_has_its_scale():
    """With zero features the release is noise alone: threshold x multiplier / examples."""
    nothing = jnp.zeros((2, 1, 1, 300_000))
    for bounds in ((0.5, 0.0), (0.0, 0.2)):
        facts = {"examples": 2, "noise_multiplier": 3.0, "thresholds": bounds}
        mean, variance = features.Normalization(**facts).release(KEY, nothing)
        if bounds[0]:
            assert float(mean.std()) == pytest.approx(3.0 * 0.5 / 2, rel=0.005)
            assert float(variance.max()) == 0
        else:  # negative halves are cut off; what is left has the same second moment
            positive = np.asarray(variance)[np.asarray(variance) > 0]
            assert len(positive) == pytest.approx(150_000, rel=0.01)
            assert np.sqrt(np.mean(positive**2)) == pytest.approx(3.0 * 0.2 / 2, rel=0.005)
            assert float(abs(mean).max()) == 0


@kills(
    "features/normalization.py",
    "return jnp.asarray(released)",
    "return jnp.asarray(total)",
    slow=True,
)
@kills("features/normalization.py", "PREPARATION, query", "PREPARATION, 0", slow=True)
def test_every_query_has_a_stream_of_its_own():
    rows = jnp.zeros((1, 1000))
    streams = [room._release(KEY, query, rows, 1.0, 1.0) for query in range(4)]
    streams.append(dpjax.noise.standard_normal(jax.random.fold_in(KEY, Purpose.NOISE), (1000,)))
    link = dpjax.noise.gaussian(1.0, clipping.flat(1.0), key=KEY)
    streams.append(link.update(jnp.zeros(1000), link.init(jnp.zeros(1000)))[0])
    together = np.corrcoef(np.stack(streams)) - np.eye(6)
    assert abs(together).max() < 0.2


@kills("features/normalization.py", "if not trees.seeded(key):", "if False:", slow=True)
def test_one_key_answers_its_queries_once():
    """Equal noise on other features would cancel in the difference of two answers."""
    key, x = noise.secret_key(), some()
    first = describe().release(key, x)
    np.testing.assert_array_equal(describe().release(key, x).mean, first.mean)  # a replay is free
    with pytest.raises(dpjax.ledger.Refused, match=r"^features\.Normalization: step 0 of this key"):
        describe().release(key, x.at[7].set(0.0))


@kills(
    "features/normalization.py", "axis=0, dtype=np.float64)", "axis=0, dtype=np.float32)", slow=True
)
def test_a_row_moves_the_sum_of_a_million_by_its_bound():
    """Without noise: what one float32 sum rounds away would count for all other rows."""
    rows = np.random.default_rng(0).normal(0.7, 0.05, (2**20, 2)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    ones = jnp.ones((len(rows), 1))
    total, lost = (np.asarray(x, np.float64) for x in room._summed(jnp.asarray(rows), ones))
    np.testing.assert_allclose(total + lost, rows.astype(np.float64).sum(axis=0), rtol=1e-12)


@kills("features/normalization.py", "lost=lost", "lost=None", slow=True)
def test_what_a_long_sum_lacks_meets_the_noise_first(monkeypatch):
    """A sum of 2^24 has steps of 2: what it lacks is 1, and would round away without noise."""
    parts = jnp.full(4000, 2.0**24), jnp.ones(4000)
    monkeypatch.setattr(room, "_summed", lambda rows, factors: parts)
    noisy = np.asarray(room._release(KEY, 0, jnp.zeros((1, 4000)), 1.0, 0.5), np.float64)
    assert abs(np.mean(noisy - 2.0**24) - 1) < 0.1


@pytest.mark.slow
def test_thresholds_are_found():
    x = some(examples=2000)
    means, squares = features.channel_norms(x)
    search = features.Search(noise_multiplier=2.0, lowest=1e-2, highest=1e3, bins=200)
    normalization = describe(examples=2000, thresholds=search)
    for query, norms in enumerate((means, squares)):
        rows = room._statistics(x)[query]
        found = normalization._threshold(KEY, query, rows)
        assert found in search.edges
        # A bin is 6 % wide; noise of 2 on counts of 2,000 hardly moves the median.
        assert found == pytest.approx(np.median(norms), rel=0.1)
    far = describe(examples=2000, thresholds=features.Search(noise_multiplier=2.0, highest=1e-3))
    assert far._threshold(KEY, 0, room._statistics(x)[0]) == pytest.approx(1e-3)


# --- privacy cost -----------------------------------------------------------------------------


@kills(
    "features/normalization.py",
    "queries = (float(self.noise_multiplier),) * 2",
    "queries = (float(self.noise_multiplier),)",
    case="8.0-0.8639-0.6948-0.634",
)
@pytest.mark.parametrize(
    ("multiplier", "classic", "rdp", "pld"),
    [(8.0, 0.8639, 0.6948, 0.6340), (6.0, 1.159, 0.9497, 0.8684)],
)
def test_alone_it_costs_what_the_reference_says(multiplier, classic, rdp, pld):
    normalization = describe(noise_multiplier=multiplier)
    assert normalization.multipliers == (multiplier, multiplier)
    event = mechanism(normalization, steps=0).event
    for method, want in (("rdp-classic", classic), ("rdp", rdp), ("pld", pld)):
        assert accounting.epsilon(event, DELTA, method) == pytest.approx(want, abs=2e-3)


def mechanism(normalization, **changes):
    facts = {"clipping": clipping.flat(0.1), "noise_multiplier": 5.67, "steps": 360}
    queries = normalization.multipliers if normalization else ()
    return mechanism_with(50_000, 8192, preparation=queries, **(facts | changes))


def test_it_is_composed_into_the_training():
    """The published scattering runs on CIFAR-10, with and without normalisation."""
    bare, prepared = mechanism(None), mechanism(describe())
    assert bare.epsilon(DELTA, "pld") == pytest.approx(2.2599, abs=2e-3)
    assert prepared.epsilon(DELTA, "pld") == pytest.approx(2.3824, abs=2e-3)
    assert bare.epsilon(DELTA, "rdp-classic") == pytest.approx(2.8531, abs=2e-3)
    assert prepared.epsilon(DELTA, "rdp-classic") == pytest.approx(2.9966, abs=2e-3)
    assert prepared.epsilon(DELTA) == pytest.approx(2.5910, abs=2e-3)


def test_with_replace_one_neighbours_its_sums_move_twice_as_far():
    """A query behaves like a full batch with its multiplier: one relation for the mechanism."""
    sampler, asked = sampling.full(50_000), {"neighbours": "replace-one"}
    queries = mechanism(describe(), steps=0, sampling=sampler, **asked)
    facts = {"sampling": sampler, "noise_multiplier": 8.0}
    steps = mechanism(None, steps=2, **facts, **asked)
    halved = mechanism(None, steps=2, **facts | {"noise_multiplier": 4.0})
    assert queries.epsilon(DELTA, "pld") == pytest.approx(steps.epsilon(DELTA, "pld"), rel=1e-6)
    assert queries.epsilon(DELTA, "pld") == pytest.approx(halved.epsilon(DELTA, "pld"), rel=1e-6)


@kills(
    "features/normalization.py",
    "(float(self.thresholds.noise_multiplier),) * 2 + queries",
    "queries",
)
def test_a_search_is_paid_for():
    searched = describe(thresholds=features.Search(noise_multiplier=20.0))
    assert searched.multipliers == (20.0, 20.0, 8.0, 8.0)
    joint = accounting.effective_multiplier(searched.multipliers)
    want = accounting.epsilon(accounting.gaussian(joint), DELTA, "pld")
    alone = mechanism(searched, steps=0).epsilon(DELTA, "pld")
    assert alone == pytest.approx(want, abs=1e-3)
    assert alone > mechanism(describe(), steps=0).epsilon(DELTA, "pld")


def test_without_noise_it_is_not_private():
    exact = describe(noise_multiplier=0.0, thresholds=(math.inf, math.inf))
    assert mechanism(exact).epsilon(DELTA) == math.inf
    assert "A query before the first step had no noise" in dpjax.statement(mechanism(exact), DELTA)


@pytest.mark.slow
@kills(
    "features/normalization.py",
    '        trees.warn_of_seed(key, "Normalization.release")\n',
    "",
    slow=True,
)
@pytest.mark.parametrize("seeded", [True, False])
def test_queries_with_a_small_seed_are_warned_of_and_can_be_declared(seeded, caplog):
    normalization = features.Normalization(examples=20, noise_multiplier=8.0, thresholds=(1.0, 1.0))
    with caplog.at_level("WARNING"):
        normalization.release(KEY if seeded else noise.secret_key(), jnp.ones((20, 2, 2, 3)))
    assert ("Normalization.release: the key is that of a seed below 2^32" in caplog.text) == seeded
    sampler, queries = sampling.poisson(20, 5), normalization.multipliers
    spent = Spent(sampling=sampler, runs=(), preparation=queries, supplied=seeded)
    plain = mechanism_with(20, 5, preparation=queries)
    declared = dataclasses.replace(plain, preparation=(), before=[spent])
    assert declared.epsilon(1e-5) == pytest.approx(plain.epsilon(1e-5))
    assert ("The key was supplied" in dpjax.statement(declared, 1e-5)) == seeded


@kills("mechanism/card.py", "[float(multiplier) for multiplier in spent.preparation]", "[]")
def test_the_card_and_the_statement_carry_it(tmp_path):
    prepared = mechanism(describe(), steps=36)
    assert "8, 8" in dpjax.statement(prepared, DELTA)
    card = dpjax.reports.card(prepared, DELTA)
    assert card["mechanism"]["preparation"] == [8.0, 8.0]
    path = tmp_path / "privacy.json"
    path.write_text(json.dumps(card))
    assert run("dpjax", "verify", path).stdout.count("holds") == 3
    bare = dpjax.reports.card(mechanism(None, steps=36), DELTA)
    path.write_text(json.dumps(card | {"epsilon": bare["epsilon"]}))  # claims without it
    assert "DOES NOT HOLD" in run("dpjax", "verify", path, status=1).stdout


@kills(
    "features/normalization.py",
    "check_multiplier(call, multiplier, clipping.flat(bound))",
    "pass",
    case="changes3-infinite",
    slow=True,
)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"examples": 0}, "number of examples"),
        ({"thresholds": (1.0,)}, "expected two"),
        ({"thresholds": (-1.0, 1.0)}, r"^features\.Normalization\(thresholds=-1.0\): .*0 or more"),
        ({"thresholds": (math.inf, 1.0)}, "infinite"),
        ({"noise_multiplier": -1.0}, r"^features\.Normalization\(noise_mul.*0 or more"),
        ({"noise_multiplier": math.nan}, r"^features\.Normalization\(noise_mul.*a number"),
        ({"examples": 40.5}, "number of examples"),
        ({"thresholds": 0.3}, "expected two"),
        ({"thresholds": (0.3, math.nan)}, "expected a number"),
    ],
)
def test_what_means_nothing_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        describe(**changes)


@pytest.mark.parametrize("multiplier", [lambda step: 8.0, (8.0,), [8.0, 8.0]])
def test_a_query_has_one_multiplier(multiplier):
    with pytest.raises(TypeError, match=r"^features\.Normalization.*one number"):
        describe(noise_multiplier=multiplier)
    with pytest.raises(TypeError, match=r"^features\.Search.*one number"):
        features.Search(noise_multiplier=multiplier)


def test_searches_that_find_nothing_are_refused():
    for wrong in ({"quantile": 1.0}, {"lowest": 0.0}, {"bins": 1}, {"highest": 1e-5}):
        with pytest.raises(ValueError, match=r"^features\.Search\(.*public guess"):
            features.Search(noise_multiplier=1.0, **wrong)
    with pytest.raises(
        ValueError, match=r"^features\.Search\(noise_multiplier=-1.0\): .*0 or more"
    ):
        describe(thresholds=features.Search(noise_multiplier=-1.0))


def test_another_data_set_is_refused():
    with pytest.raises(ValueError, match="got 41 examples"):
        describe().release(KEY, some(examples=41))
    for shape in [(40, 3), (40, 8, 3)]:
        with pytest.raises(ValueError, match=r"shape \(40, .*3\); expected"):
            describe().release(KEY, jnp.zeros(shape))


@pytest.mark.skipif("DPJAX_DATA_DIR" not in os.environ, reason="DPJAX_DATA_DIR is not set")
def test_real_digits_have_the_published_norms():
    made = features.scattered(data.load("mnist").test[0][:512])
    medians = [np.median(norms) for norms in features.channel_norms(made)]
    np.testing.assert_allclose(medians, [0.165701, 0.046149], atol=1e-5)
    for groups, want in ((9, 51.23), (27, 49.44), (81, 48.15)):
        scaled = np.asarray(features.group_norm(made, groups)).reshape(512, -1)
        assert np.linalg.norm(scaled, axis=1).mean() == pytest.approx(want, abs=0.01)

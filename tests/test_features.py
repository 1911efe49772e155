# SPDX-License-Identifier: Apache-2.0
"""Features: the cache returns exact results; normalisation costs its stated multipliers."""

import math
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mutation import kills
from small_mechanisms import mechanism_with

import dpjax
from dpjax import accounting, clipping, data, features, scattering
from dpjax.features import normalization as room
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
    others = np.nextafter(x, 2), x.view(np.int64), x.reshape(3, 5), x[::-1], x[:4]
    for number, inputs in enumerate((x, *others), start=1):
        ask(tmp_path, compute, inputs)
        assert compute.runs == number
    ask(tmp_path, compute, np.asfortranarray(x))  # the same, however it lies in memory
    assert compute.runs == 6
    for settings in ({"J": 2}, {"L": 2}, {"J": 2, "L": 2}, {"L": 2, "J": 2}):
        ask(tmp_path, compute, x, **settings)
    assert compute.runs == 9


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    compute, inputs = Counted(), RNG.random((5, 3))

    def fail(*_):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="no space left"):
            ask(tmp_path, compute, inputs)
    assert not list(tmp_path.iterdir())


def test_images_of_another_byte_order_have_the_same_features(tmp_path):
    images = RNG.random((3, 8, 8, 1)).astype(np.float32)
    want = features.scattered(images, 1, 2, directory=tmp_path)
    (path,) = tmp_path.iterdir()
    for order in (">f4", "<f4"):
        made = features.scattered(images.astype(order), 1, 2, directory=tmp_path)
        assert np.array_equal(made, want)
        assert np.array_equal(features.scattered(images.astype(order), 1, 2), want)
    assert [*tmp_path.iterdir()] == [path], "they are the same images"


def test_a_whole_data_set_is_what_its_images_are(tmp_path):
    images = RNG.random((7, 8, 8, 1), np.float32)
    want = scattering.scatter(images, 1, 2)
    for size in (3, 7):
        made = features.scattered(images, 1, 2, batch_size=size)
        np.testing.assert_allclose(made, want, atol=1e-6)
    first = features.scattered(images, 1, 2, directory=tmp_path)
    assert np.array_equal(features.scattered(images, 1, 2, directory=tmp_path), first)
    assert len(list(tmp_path.iterdir())) == 1
    features.scattered(images, 1, 3, directory=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    assert features.scattered(images[:0], 1, 2).shape == (0, 4, 4, 3)


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
    with pytest.raises(ValueError, match="4 groups must divide 6 channels"):
        features.group_norm(x, groups=4)


def test_normalize():
    moments = features.Moments(jnp.array([1.0, 2.0]), jnp.array([4.0, 0.0]))
    x = RNG.normal(size=(3, 2, 2, 2)).astype(np.float32)
    got = features.normalize(x, moments)
    np.testing.assert_allclose(got[..., 0], (x[..., 0] - 1) / math.sqrt(4 + 1e-5), atol=1e-6)
    assert np.all(np.asarray(got[..., 1]) == 0)


def test_narrow_features_are_scaled_in_float32():
    dtype = jnp.bfloat16
    x = jnp.asarray(RNG.normal(100, 1, (4, 5, 5, 6)), dtype)  # squares of 100 are far from 1 apart
    got = features.group_norm(x, groups=3)
    assert got.dtype == dtype
    want = features.group_norm(x.astype(jnp.float32), groups=3)
    np.testing.assert_allclose(got.astype(jnp.float32), want, atol=0.02)


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
@pytest.mark.parametrize("scale", [0.01, 1.0, 1e4, math.nan])
def test_one_example_moves_a_query_by_no_more_than_its_threshold(monkeypatch, scale):
    x = some().at[7].multiply(scale)
    for removed in (7, 39):
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
    "counts = _release(key, 2 + query, votes, 1.0, search.noise_multiplier / 2)",
    case="1.0",
    slow=True,
)
@pytest.mark.parametrize("scale", [1.0, math.inf])
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
    zeros = clipping.trusted_sum(jnp.zeros(1000), clipping.flat(1.0))
    streams.append(link.update(zeros, link.init(jnp.zeros(1000)))[0])
    together = np.corrcoef(np.stack(streams)) - np.eye(6)
    assert abs(together).max() < 0.2


def test_what_a_long_sum_lacks_meets_the_noise_first(monkeypatch):
    """A sum of 2^24 has steps of 2: what it lacks is 1, and would round away without noise."""
    parts = jnp.full(4000, 2.0**24), jnp.ones(4000)
    monkeypatch.setattr(room, "_summed", lambda rows, factors: parts)
    noisy = np.asarray(room._release(KEY, 0, jnp.zeros((1, 4000)), 1.0, 0.5), np.float64)
    assert abs(np.mean(noisy - 2.0**24) - 1) < 0.1


def norms_of(x):
    """What thresholds clip: the norms of each example's channel means, and of its mean squares."""
    return [np.linalg.norm(rows, axis=1) for rows in room._statistics(x)]


@pytest.mark.slow
def test_thresholds_are_found():
    x = some(examples=2000)
    means, squares = norms_of(x)
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


@pytest.mark.parametrize(("multiplier", "classic", "rdp", "pld"), [(8.0, 0.8639, 0.6948, 0.6340)])
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


@kills("mechanism/card.py", "[float(multiplier) for multiplier in spent.preparation]", "[]")
def test_the_card_and_the_statement_carry_it():
    prepared = mechanism(describe(), steps=36)
    assert "8, 8" in dpjax.statement(prepared, DELTA)
    card = dpjax.reports.card(prepared, DELTA)
    assert card["mechanism"]["preparation"] == [8.0, 8.0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"examples": 0}, r"Normalization\(examples=0"),
        ({"thresholds": (-1.0, 1.0)}, r"Normalization\(thresholds=-1.0\): .*0 or more"),
        ({"thresholds": (math.inf, 1.0)}, "infinite"),
        ({"noise_multiplier": -1.0}, r"Normalization\(noise_mul.*0 or more"),
    ],
)
def test_what_means_nothing_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        describe(**changes)


def test_another_number_of_examples_is_refused():
    with pytest.raises(ValueError, match="got 41 examples"):
        describe().release(KEY, some(examples=41))


@pytest.mark.skipif("DPJAX_DATA_DIR" not in os.environ, reason="DPJAX_DATA_DIR is not set")
def test_real_digits_have_the_published_norms():
    made = features.scattered(data.load("mnist").test[0][:512])
    medians = [np.median(norms) for norms in norms_of(made)]
    np.testing.assert_allclose(medians, [0.165701, 0.046149], atol=1e-5)
    for groups, want in ((9, 51.23), (27, 49.44), (81, 48.15)):
        scaled = np.asarray(features.group_norm(made, groups)).reshape(512, -1)
        assert np.linalg.norm(scaled, axis=1).mean() == pytest.approx(want, abs=0.01)

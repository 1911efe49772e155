# SPDX-License-Identifier: Apache-2.0
"""Features from patches of a random process: of one image and of a seed, and of no data."""

import numpy as np
import pytest
from experiments.common import patches

pytestmark = pytest.mark.thorough


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(patches, "_IMAGES", 40)
    monkeypatch.setattr(patches, "_PATCHES", 1_000)
    monkeypatch.setattr(patches, "_LEAVES", 40)
    patches.dictionary.cache_clear()
    yield
    patches.dictionary.cache_clear()


def test_leaves_are_images_that_a_seed_repeats():
    drawn, again = (patches.leaves(3, 1, np.random.default_rng(5)) for _ in range(2))
    assert drawn.shape == (3, 32, 32, 1)
    assert (drawn.min() >= 0, drawn.max() <= 1, drawn.std() > 0.1) == (True, True, True)
    np.testing.assert_array_equal(drawn, again)


def test_features_are_of_one_image_and_ignore_its_brightness():
    images = patches.leaves(4, 3, np.random.default_rng(0))
    together, alone = patches.encoded(images, 8), patches.encoded(images[:1], 8)
    assert together.shape == (4, 3, 3, 16)
    np.testing.assert_allclose(together[:1], alone, atol=1e-5)
    np.testing.assert_allclose(patches.encoded(images[:1] - 0.3, 8), alone, atol=1e-3)
    assert not patches.encoded(np.full((1, 32, 32, 3), 0.4, np.float32), 8).any()


def test_a_negative_image_swaps_the_answers_of_a_pair():
    images = patches.leaves(2, 1, np.random.default_rng(1))
    plain, negative = patches.encoded(images, 8), patches.encoded(-images, 8)
    np.testing.assert_allclose(plain[..., ::2], negative[..., 1::2], atol=1e-4)


def test_cells_share_the_places_of_a_map():
    maps = np.arange(7.0 * 7).reshape(1, 7, 7, 1)
    cells = patches.cell_means(maps, 3)[0, ..., 0]
    assert cells[0, 0] == maps[0, :2, :2].mean()
    assert cells[2, 1] == maps[0, 4:, 2:4].mean()


def test_leaves_do_not_depend_on_how_many_are_painted_together(monkeypatch):
    drawn = patches.leaves(5, 3, np.random.default_rng(2))
    monkeypatch.setattr(patches, "_TOGETHER", 2)
    np.testing.assert_array_equal(drawn, patches.leaves(5, 3, np.random.default_rng(2)))


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_whitening_flattens_the_spectrum_of_leaves_and_keeps_their_length(power):
    rng = np.random.default_rng(3)
    rows = (rng.normal(size=(500, 6)) * 3.0 ** np.arange(6) + 5).astype(np.float32)
    whitened = patches.whitening(rows, power, 4)(rows)
    before = np.linalg.eigvalsh(np.cov(rows.T, bias=True))
    after = np.cov(whitened.T, bias=True)
    assert whitened.shape == (500, 4)
    np.testing.assert_allclose(after, np.diag(np.diag(after)), atol=1e-3 * np.trace(after))
    assert np.trace(after) == pytest.approx(np.sum(before), rel=1e-3)
    ratios = np.diag(after)[1:] / np.diag(after)[:-1]
    expected = (before[3:] / before[2:-1]) ** (1 - power)
    np.testing.assert_allclose(ratios, expected, rtol=1e-3)


def test_other_seeds_have_other_filters_and_leave_no_file(tmp_path):
    images = patches.leaves(2, 1, np.random.default_rng(1))
    first = patches.encoded(images, 8, tmp_path, cells=2)
    other = patches.encoded(images, 8, tmp_path, cells=2, seed=1)
    assert first.shape == other.shape == (2, 2, 2, 16)
    assert not np.allclose(first, other)
    assert len(list(tmp_path.iterdir())) == 1

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

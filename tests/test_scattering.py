# SPDX-License-Identifier: Apache-2.0
"""Scattering: published values, a slow definition, independence of images, refusals."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import data, scattering
from dpjax.scattering import transform
from dpjax.scattering.filters import coarsen, filter_bank, mirrored, padded_size

RNG = np.random.default_rng(0)


def golden(size):
    m, n = np.mgrid[0:size, 0:size]
    return 0.5 + 0.5 * np.sin(0.37 * m + 0.11 * n) * np.cos(0.23 * n - 0.05 * m)


# channel: mean, first pixel, pixel (3, 3) of the golden image at 28 x 28, by kymatio 0.3.0
VALUES = {
    0: (0.5192193979, 0.7401624954, 0.6020751545),
    1: (0.0176128763, 0.0094099672, 0.0161713796),
    8: (0.0131099171, 0.0109701837, 0.0110745725),
    9: (0.0355629802, 0.0120184437, 0.0365608128),
    16: (0.0221039937, 0.0141914979, 0.0180797824),
    17: (0.0022509061, 0.0022384562, 0.0021885966),
    25: (0.0020677763, 0.0009760519, 0.0026047406),
    80: (0.0011933097, 0.0034032271, 0.0006007920),
}


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-6), (np.float32, 1e-5)])
def test_the_published_values(dtype, tolerance):
    with jax.enable_x64(dtype == np.float64):
        features = scattering.scatter(golden(28)[None, ..., None].astype(dtype))
        assert features.dtype == dtype
        features = np.asarray(features, np.float64)
    assert features.shape == (1, 7, 7, 81)
    for channel, (mean, first, inner) in VALUES.items():
        found = features[0, ..., channel]
        np.testing.assert_allclose(found.mean(), mean, atol=tolerance)
        np.testing.assert_allclose(found[[0, 3], [0, 3]], (first, inner), atol=tolerance)
    assert np.linalg.norm(features) == pytest.approx(3.9875439142, abs=10 * tolerance)
    assert features.sum() == pytest.approx(50.9802803271, abs=81 * tolerance)
    assert features.min() == pytest.approx(3.94197956e-05, abs=tolerance)


def test_the_published_values_in_colour():
    images = golden(32)[None, ..., None] * (1 + 0.25 * np.arange(3))
    features = np.asarray(scattering.scatter(images.astype(np.float32)), np.float64)
    assert features.shape == (1, 8, 8, 243)
    assert features.sum() == pytest.approx(246.1043480490, abs=1e-3)
    assert np.linalg.norm(features) == pytest.approx(9.6178069111, abs=1e-4)
    means = features.mean(axis=(0, 1, 2))[[0, 1, 9, 17, 80]]
    want = [0.4942326746, 0.0177891296, 0.0360069067, 0.0023300779, 0.0013665468]
    np.testing.assert_allclose(means, want, atol=1e-5)
    # The channels of each colour, in the order of the colours.
    alone = scattering.scatter(images[..., 1:2].astype(np.float32))
    np.testing.assert_allclose(features[..., 81:162], alone, atol=1e-6)


def paths(J, L):
    """The scales and the angles of the wavelets that each channel has passed, in their order."""
    first = [(j, angle) for j in range(J) for angle in range(L)]
    channels = [((), ()), *(((j,), (angle,)) for j, angle in first)]
    return channels + [((j, k), (a, b)) for j, a in first for k, b in first if k > j]


def definition(image, J, L):
    """The cascade by NumPy's FFT, a path at a time, from the same filters."""
    rows, columns = (padded_size(side, J) for side in image.shape)
    wide = np.subtract((rows, columns), image.shape)
    margins = np.stack([wide // 2, wide - wide // 2], axis=1)
    bank = filter_bank(rows, columns, J, L)
    low = np.outer(*bank.lowpass)

    def convolve(spectrum, response, step):
        height, width = (n // step for n in spectrum.shape)
        folds = (spectrum * response).reshape(step, height, step, width)
        return np.fft.ifft2(folds.mean(axis=(0, 2)))

    def average(field, resolution):
        response = coarsen(low[None], resolution)[0]
        return convolve(np.fft.fft2(field), response, 2 ** (J - resolution)).real[1:-1, 1:-1]

    field = np.pad(image, margins, mode="reflect")
    found = []
    for scales, angles in paths(J, L):
        moved, resolution = field, 0
        for j, angle in zip(scales, angles, strict=True):
            response = coarsen(bank.wavelets[j], resolution)[angle]
            moved = abs(convolve(np.fft.fft2(moved), response, 2 ** (j - resolution)))
            resolution = j
        found.append(average(moved, resolution))
    return np.stack(found, axis=-1)


@pytest.mark.parametrize(("shape", "J", "L"), [((13, 9), 2, 4), ((24, 17), 3, 5), ((8, 8), 3, 1)])
@pytest.mark.slow
def test_any_scales_angles_and_sides_follow_the_definition(shape, J, L):
    image = RNG.random(shape)
    features = scattering.scatter(image[None, ..., None].astype(np.float32), J, L)
    want = definition(image, J, L)
    assert features.shape[1:] == (shape[0] // 2**J, shape[1] // 2**J, len(paths(J, L)))
    np.testing.assert_allclose(features[0], want, atol=1e-6)


def test_the_filters():
    bank = filter_bank(36, 40, 2, 8)
    for scale in bank.wavelets:
        np.testing.assert_allclose(scale[:, 0, 0], 0, atol=1e-12)  # waves have no mean
        assert scale.max() > 0.9
    assert filter_bank(36, 40, 2, 8) is bank
    with pytest.raises(ValueError, match="read-only"):  # the next caller has the same ones
        bank.lowpass[0][0] = 2
    assert sorted(mirrored(7)) == list(range(7))


@pytest.mark.slow
def test_images_are_each_on_their_own(monkeypatch):
    images = RNG.random((7, 8, 8, 1), np.float32)
    together = scattering.scatter(images, 1, 2)
    one_by_one = jnp.concatenate([scattering.scatter(image[None], 1, 2) for image in images])
    np.testing.assert_allclose(together, one_by_one, atol=1e-6)
    # Chunks of 2, 2, 2 and 1 images, on every machine.
    monkeypatch.setattr(transform, "_chunk_size", lambda *_: 2)
    in_chunks = transform._scatter.__wrapped__(jnp.asarray(images), 1, 2)
    np.testing.assert_allclose(together, in_chunks, atol=1e-6)
    broken = images.copy()
    broken[3, 2, 2] = np.nan
    features = np.asarray(scattering.scatter(broken, 1, 2))
    assert np.isnan(features[3]).any()
    np.testing.assert_allclose(np.delete(features, 3, 0), np.delete(together, 3, 0), atol=1e-6)


@pytest.mark.slow
def test_an_image_of_one_shade_has_a_gradient():
    gradient = jax.grad(lambda x: jnp.sum(scattering.scatter(x, 1, 2)))(jnp.zeros((1, 8, 8, 1)))
    assert np.all(np.isfinite(gradient))
    features = scattering.scatter(jnp.full((1, 8, 8, 1), 0.5), 1, 2)
    np.testing.assert_allclose(features[..., 0], 0.5, atol=1e-4)
    np.testing.assert_allclose(features[..., 1:], 0, atol=1e-6)


@pytest.mark.parametrize(
    ("images", "arguments", "error", "words"),
    [
        (np.zeros((1, 8, 8, 1), np.uint8), {}, TypeError, "expected real floating-point"),
        (np.zeros((8, 8, 1)), {}, ValueError, r"write x\[..., None\]"),
        (np.zeros((1, 8, 8, 1)), {"J": 4}, ValueError, "sides from 16"),
        (np.zeros((1, 8, 8, 1)), {"J": 0}, ValueError, r"J=0\): expected a whole number"),
    ],
)
def test_what_is_refused(images, arguments, error, words):
    with pytest.raises(error, match=words):
        scattering.scatter(images, **arguments)


@pytest.mark.skipif("DPJAX_DATA_DIR" not in os.environ, reason="DPJAX_DATA_DIR is not set")
def test_real_digits_have_the_published_statistics():
    images = data.load("mnist").test[0][:512]
    features = np.asarray(scattering.scatter(images), np.float64)
    assert features.sum() == pytest.approx(19487.21445, rel=1e-5)
    assert features.std() == pytest.approx(0.03014718, rel=1e-4)
    lengths = np.linalg.norm(features.reshape(512, -1), axis=1)
    assert lengths.mean() == pytest.approx(1.94786, abs=1e-4)
    channels = [0, 1, 4, 8, 9, 16, 17, 48, 80]
    want = [12045455, 2222621, 1908025, 2076682, 3579922, 3467106, 673247, 281817, 658036]
    np.testing.assert_allclose(features.mean((0, 1, 2))[channels], np.array(want) / 1e8, atol=1e-6)

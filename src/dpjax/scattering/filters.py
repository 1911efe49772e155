# SPDX-License-Identifier: Apache-2.0
"""The filters of the scattering transform, as NumPy arrays of float64.

They are sampled on the padded image with periodic boundaries and represented by their Fourier
transforms, which are real. Every constant is kymatio's, so that published features and thresholds
agree to the sixth digit.
"""

import functools
import math
from typing import NamedTuple

import numpy as np

_PI = 3.1415  # kymatio's digits, which are part of the published features
_REACH = 2  # periods on either side of the image at which filters are sampled


class Bank(NamedTuple):
    """The Fourier transforms of all filters for images of one padded shape."""

    wavelets: tuple[np.ndarray, ...]
    """For each scale $j$, real: ``[angles, rows, columns]``."""
    lowpass: tuple[np.ndarray, np.ndarray]
    """The Gaussian's two factors, real: ``[rows]`` and ``[columns]``."""


def padded_size(size: int, J: int) -> int:
    """The length of a padded side: a multiple of ``2**J``, with a margin."""
    return (size // 2**J + 2) * 2**J


# Filters are built while a program is traced, and several programs share a shape.
@functools.lru_cache(maxsize=32)
def filter_bank(rows: int, columns: int, J: int, L: int) -> Bank:
    r"""All filters for padded images of this shape.

    With $\sigma_j = 0.8 \cdot 2^j$, frequency $\xi_j = \frac{3\pi}{4} 2^{-j}$ and angle
    $\theta_l = (\lfloor L/2 \rfloor - 1 - l)\,\pi / L$,

    $$ \psi_{jl} = g - \kappa |g|, \qquad
       g(u) = \frac{s}{2\pi\sigma_j^2} e^{-(a^2 + s^2 b^2) / 2\sigma_j^2 + i \xi_j a}, $$

    where $(a, b)$ is $u$ rotated by $\theta_l$, $s = 4/L$, and $\kappa$ makes the mean 0; the
    low-pass filter is the isotropic Gaussian of width $\sigma_{J-1}$.

    ``J`` is the number of scales and ``L`` the number of angles. Calls share one `Bank`, so its
    arrays are read-only.

    Example:
      >>> bank = filter_bank(36, 36, J=2, L=8)
      >>> [scale.shape for scale in bank.wavelets], round(float(bank.lowpass[0][0] ** 2), 7)
      ([(8, 36, 36), (8, 36, 36)], 1.0000295)
    """
    # kymatio's order of angles, so that published weights and feature orders carry over.
    angles = (max(L // 2 - 1, 0) - np.arange(L)) * math.pi / L
    wavelets = tuple(
        np.stack([_morlet((rows, columns), j, angle, 4 / L) for angle in angles]) for j in range(J)
    )
    lowpass = _gaussian(rows, J - 1), _gaussian(columns, J - 1)
    for shared in (*wavelets, *lowpass):  # by all callers, through the cache
        shared.setflags(write=False)
    return Bank(wavelets, lowpass)


def _width(j: int) -> float:
    return 0.8 * 2**j


def _morlet(shape: tuple[int, int], j: int, angle: float, slant: float) -> np.ndarray:
    """The Fourier transform of one wavelet, ``[rows, columns]``."""
    u, v = np.ogrid[tuple(slice(-_REACH * n, (_REACH + 1) * n) for n in shape)]
    along = u * math.cos(angle) + v * math.sin(angle)
    across = v * math.cos(angle) - u * math.sin(angle)
    square = along**2 + (slant * across) ** 2
    envelope = slant / (2 * _PI * _width(j) ** 2) * np.exp(-square / (2 * _width(j) ** 2))
    wave = envelope * np.exp(0.75j * math.pi / 2**j * along)
    # A wavelet has mean 0; the envelope is subtracted in the proportion that makes it so.
    wavelet = _wrap(wave - wave.sum() / envelope.sum() * envelope, shape)
    return np.fft.fft2(wavelet).real  # the imaginary part is 0 up to rounding


def _gaussian(size: int, j: int) -> np.ndarray:
    """The Fourier transform of one factor of the low-pass filter, ``[size]``."""
    u = np.arange(-_REACH * size, (_REACH + 1) * size)
    envelope = np.exp(-(u**2) / (2 * _width(j) ** 2)) / math.sqrt(2 * _PI * _width(j) ** 2)
    return np.fft.fft(_wrap(envelope, (size,))).real


def _wrap(values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    periods = 2 * _REACH + 1
    split = values.reshape([n for size in shape for n in (periods, size)])
    return split.sum(axis=tuple(range(0, 2 * len(shape), 2)))


def coarsen(response: np.ndarray, resolution: int) -> np.ndarray:
    """The filter for fields that were halved ``resolution`` times; its first axis is kept."""
    for axis in range(1, response.ndim):
        size = response.shape[axis]
        coarse = size >> resolution
        response = np.moveaxis(response, axis, -1).copy()
        # Frequencies that the smaller field cannot hold are removed before the rest is folded.
        response[..., coarse // 2 : coarse // 2 + size - coarse] = 0
        response = response.reshape(*response.shape[:-1], 2**resolution, coarse).sum(axis=-2)
        response = np.moveaxis(response, -1, axis)
    return response


def averaging(lowpass: np.ndarray, resolution: int, J: int) -> np.ndarray:
    """The matrix ``[out, size]`` that averages an axis, subsamples it, and removes the margins."""
    kernel = np.fft.ifft(coarsen(lowpass[None], resolution)[0]).real
    size = len(kernel)
    # The first and the last sample lie in the margin.
    centres = np.arange(0, size, 2 ** (J - resolution))[1:-1]
    return kernel[(centres[:, None] - np.arange(size)) % size]


def mirrored(size: int) -> np.ndarray:
    """The indices of an axis as 0, 1, ..., and then -1, -2, ...: 0, 1, 2, 3, 5, 4 for six.

    Opposite indices share sines and cosines up to a sign, so a transform uses half a matrix twice.
    """
    return np.concatenate([np.arange(size // 2 + 1), -np.arange(1, (size + 1) // 2) % size])

# SPDX-License-Identifier: Apache-2.0
"""The filters of the scattering transform, as NumPy arrays of float64.

They are sampled on the padded image with periodic boundaries and represented by their Fourier
transforms, which are real. Every constant is kymatio's, so published features and thresholds agree
to the sixth digit.
"""

import functools
import math
from typing import NamedTuple

import numpy as np

# The digits of kymatio in the integral of a Gaussian, on which the published features depend. Its
# frequencies and angles have all digits of pi.
_PI = 3.1415
# The number of periods on either side of the image at which filters are sampled.
_REACH = 2


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
    # Angles have kymatio's order, on which published weights and feature orders depend. A single
    # angle is 0.
    angles = (max(L // 2 - 1, 0) - np.arange(L)) * math.pi / L
    wavelets = []
    for j in range(J):
        of_scale = [_morlet((rows, columns), j, angle, 4 / L) for angle in angles]
        wavelets.append(np.stack(of_scale))
    lowpass = _gaussian(rows, J - 1), _gaussian(columns, J - 1)
    for array in (*wavelets, *lowpass):
        array.setflags(write=False)  # all callers share the cached arrays
    return Bank(tuple(wavelets), lowpass)


def _width(j: int) -> float:
    """The deviation of the Gaussian of a scale, in pixels."""
    return 0.8 * 2**j


def _morlet(shape: tuple[int, int], j: int, angle: float, slant: float) -> np.ndarray:
    r"""The Fourier transform of one wavelet of `filter_bank`, ``[rows, columns]``.

    $$ \psi = g - \kappa |g|, \qquad
       g(u) = \frac{s}{2\pi\sigma^2} e^{-(a^2 + s^2 b^2) / 2\sigma^2 + i \xi a}, $$

    where $(a, b)$ is the pixel $u$ rotated by ``angle``, $s$ is ``slant``, and $\kappa$ makes the
    mean 0; the scale ``j`` has the width $\sigma$ and the frequency $\xi$. The wavelet is sampled
    over several periods of the image, ``[periods * rows, periods * columns]``.
    """
    rows, columns = shape
    row = _positions(rows)[:, None]
    column = _positions(columns)
    a = row * math.cos(angle) + column * math.sin(angle)
    b = column * math.cos(angle) - row * math.sin(angle)
    variance = _width(j) ** 2
    frequency = 0.75 * math.pi / 2**j  # xi
    square = a**2 + (slant * b) ** 2
    # The factor before the exponential has kymatio's digits of pi, and the angles have all.
    envelope = slant / (2 * _PI * variance) * np.exp(-square / (2 * variance))  # |g|
    wave = envelope * np.exp(1j * frequency * a)  # g
    kappa = wave.sum() / envelope.sum()
    wavelet = wave - kappa * envelope
    # All periods are added to one, because the convolution has periodic boundaries.
    spectrum = np.fft.fft2(_wrapped(wavelet, shape))
    # The wavelet at -u is the conjugate of that at u, so the imaginary part is 0 up to rounding.
    return spectrum.real


def _gaussian(size: int, j: int) -> np.ndarray:
    """The Fourier transform of one factor of the low-pass filter, ``[size]``."""
    u = _positions(size)
    variance = _width(j) ** 2
    envelope = np.exp(-(u**2) / (2 * variance)) / math.sqrt(2 * _PI * variance)
    return np.fft.fft(_wrapped(envelope, (size,))).real


def _positions(size: int) -> np.ndarray:
    """The pixels of one axis at which filters are sampled, over all periods."""
    return np.arange(-_REACH * size, (_REACH + 1) * size)


def _wrapped(values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The sum of all periods, an array of this shape."""
    periods = 2 * _REACH + 1
    split_shape = []
    for size in shape:
        split_shape += [periods, size]
    period_axes = tuple(range(0, 2 * len(shape), 2))
    return values.reshape(split_shape).sum(axis=period_axes)


def coarsen(response: np.ndarray, resolution: int) -> np.ndarray:
    """The filter for fields that were halved ``resolution`` times; its first axis is kept."""
    for axis in range(1, response.ndim):
        size = response.shape[axis]
        coarse_size = size >> resolution
        response = np.moveaxis(response, axis, -1).copy()
        # Frequencies that the smaller field cannot hold are removed before the rest is folded. They
        # are in the middle: an axis has the frequencies 0, 1, ..., and then ..., -2, -1.
        first = coarse_size // 2
        response[..., first : first + size - coarse_size] = 0
        folds = response.reshape(*response.shape[:-1], 2**resolution, coarse_size)
        response = np.moveaxis(folds.sum(axis=-2), -1, axis)
    return response


def averaging(lowpass: np.ndarray, resolution: int, J: int) -> np.ndarray:
    """The matrix ``[out, size]`` that averages an axis, subsamples it, and removes the margins."""
    kernel = np.fft.ifft(coarsen(lowpass[None], resolution)[0]).real
    size = len(kernel)
    # The first and the last sample lie in the margin.
    centres = np.arange(0, size, 2 ** (J - resolution))[1:-1]
    distances = centres[:, None] - np.arange(size)
    return kernel[distances % size]


def mirrored(size: int) -> np.ndarray:
    """The indices of an axis as 0, 1, ..., and then -1, -2, ...: 0, 1, 2, 3, 5, 4 for six.

    Opposite indices share sines and cosines up to a sign, so a transform uses half a matrix twice.
    """
    first_half = np.arange(size // 2 + 1)
    opposite = -np.arange(1, (size + 1) // 2) % size
    return np.concatenate([first_half, opposite])

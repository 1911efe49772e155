# SPDX-License-Identifier: Apache-2.0
"""The scattering transform of a batch of images: the cascade of wavelets, moduli and averages."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from dpjax import checks
from dpjax.scattering._fourier import filtered, moduli, on_columns, on_rows, spectrum_of
from dpjax.scattering.filters import Bank, averaging, coarsen, filter_bank, mirrored, padded_size
from dpjax.trees import wide


def scatter(
    images: Float[ArrayLike, "batch height width channels"], J: int = 2, L: int = 8
) -> Float[Array, "batch out_height out_width features"]:
    r"""The scattering coefficients of images.

    $$ S = \bigl(x * \phi,\ |x * \psi_1| * \phi,\ ||x * \psi_1| * \psi_2| * \phi\bigr) $$

    over all wavelets $\psi_1$ and all coarser $\psi_2$, subsampled by $2^J$.

    Args:
      images: Channels last. Padding reflects the pixels at the edge.
      J: The number of scales; features are ``2**J`` times as coarse as pixels.
      L: The number of angles.

    Returns:
      Features, channels last: ``1 + J L + L**2 J (J - 1) / 2`` for the first channel of the image,
      in the order of the formula, then for the second, and so on. They are ``(batch, 7, 7, 81)``
      for MNIST and ``(batch, 8, 8, 243)`` for CIFAR-10. Their dtype is the images', or float32 if
      that is narrower. The function is jitted, may be called inside ``jax.jit``, and is
      differentiable in the images.

    Privacy:
      Each image's features depend only on that image, so they cost nothing. NaN or
      infinities in an image leave the features of all others untouched.

    Example:
      >>> scatter(jnp.ones((3, 28, 28, 1))).shape
      (3, 7, 7, 81)

    References:
      Bruna and Mallat, "Invariant Scattering Convolution Networks", 2013.
      Andreux et al., "Kymatio: Scattering Transforms in Python", 2020; its ``Scattering2D``
      has the same values.
    """
    images = jnp.asarray(images)
    J = checks.whole("scattering.scatter", "J", J)
    L = checks.whole("scattering.scatter", "L", L)
    if images.ndim != 4 or min(images.shape[1:3]) < 2**J:
        raise ValueError(
            f"scattering.scatter(J={J}): got images of shape {images.shape}; expected (batch, "
            f"height, width, channels), sides from {2**J}. For a missing axis write x[..., None]."
        )
    return _scatter(images.astype(wide(images.dtype)), J, L)


@functools.partial(jax.jit, static_argnames=("J", "L"))
def _scatter(images: Array, J: int, L: int) -> Array:
    """Transforms the images in chunks, whose size changes only speed and memory."""
    count = images.shape[0]
    chunk_size = max(1, min(count, _chunk_size(images, J, L)))  # 1 for an empty batch
    # `jax.lax.map` takes chunks of equal size. The last images are a smaller chunk, because padding
    # computes unused features.
    chunked_count = count // chunk_size * chunk_size
    chunks = images[:chunked_count].reshape(-1, chunk_size, *images.shape[1:])
    # [chunks, chunk_size, height, width, features]
    features = jax.lax.map(lambda chunk: _cascade(chunk, J, L), chunks)
    features = features.reshape(chunked_count, *features.shape[2:])
    if chunked_count == count:
        return features
    last_features = _cascade(images[chunked_count:], J, L)
    return jnp.concatenate([features, last_features])


def _chunk_size(images: Array, J: int, L: int) -> int:
    """The number of images whose spectra fit into a CPU's caches, or occupy an accelerator."""
    _, height, width, channels = images.shape
    pixels = padded_size(height, J) * padded_size(width, J)
    # The largest intermediate: real and imaginary parts of the spectra of all angles of one scale.
    # The second order has L times as many, with a quarter of the pixels.
    spectra = 2 * images.dtype.itemsize * channels * pixels * L * max(1.0, L / 4)
    capacity = 2**30  # in bytes
    if jax.default_backend() == "cpu":
        capacity = 2**23
    return 2 ** max(0, int(math.log2(capacity / spectra)))


def _cascade(images: Array, J: int, L: int) -> Array:
    """The features of one chunk of images: all paths of order 0, 1 and 2.

    A path of order n is a choice of n wavelets. Arrays are ``[rows, images, paths, columns]``: rows
    and columns are outside, because transforms multiply by a matrix on either side, and each
    channel counts as an image.
    """
    field = _field(images, J)  # the padded pixels, [rows, images, columns]
    bank = filter_bank(field.shape[0], field.shape[-1], J, L)
    # Wavelets of scale j subsample by 2**j, which folds as many blocks; the last scale is J - 1.
    spectrum = spectrum_of(field, blocks=2 ** (J - 1))
    # A resolution is the number of times that a field was halved: 0 for the pixels, and j for a
    # response of scale j. The paths of a scale are its angles.
    first_order = [_response(spectrum, bank, j, resolution=0) for j in range(J)]
    averages = [_average(field, bank, resolution=0)[:, :, None]]  # one path
    averages += [_average(modulus, bank, resolution=j) for j, modulus in enumerate(first_order)]
    # A modulus is smoother than its field, so only coarser wavelets respond to it.
    averages += [
        _second_order_averages(modulus, bank, j) for j, modulus in enumerate(first_order[:-1])
    ]
    features = jnp.concatenate(averages, axis=2)  # all averages have the same coarse size
    height, _, _, width = features.shape
    # Each image gets the paths of its first channel, then of the second, and so on.
    features = features.reshape(height, images.shape[0], -1, width)
    return features.transpose(1, 0, 3, 2)  # [images, height, width, channels * paths]


def _second_order_averages(
    first: Array, bank: Bank, j: int
) -> Float[Array, "rows images paths columns"]:
    """The averaged moduli of all coarser wavelets, applied to the first order's at scale ``j``."""
    J = len(bank.wavelets)
    spectrum = spectrum_of(first, 2 ** (J - 1 - j))
    averages = []
    for k in range(j + 1, J):
        second = _response(spectrum, bank, k, j)
        averages.append(_average(second, bank, k))
    # [rows, images, angles of the first order, angles of the second, columns]
    rows, images, *_, columns = averages[0].shape
    return jnp.concatenate(averages, axis=3).reshape(rows, images, -1, columns)


def _response(
    spectrum: Array, bank: Bank, j: int, resolution: int
) -> Float[Array, "rows *images_and_paths angles columns"]:
    """The moduli of all wavelets of scale ``j``; the field was halved ``resolution`` times."""
    blocks = 2 ** (len(bank.wavelets) - 1 - resolution)
    step = 2 ** (j - resolution)
    wavelets = coarsen(bank.wavelets[j], resolution)
    return moduli(filtered(spectrum, wavelets, step, blocks), blocks // step)


def _average(field: Array, bank: Bank, resolution: int) -> Array:
    """The low-pass filter of a field that was halved ``resolution`` times, without its margins."""
    J = len(bank.wavelets)
    down, across = (averaging(factor, resolution, J) for factor in bank.lowpass)
    down = down[:, mirrored(down.shape[1])]
    return on_columns(on_rows(down, field), across.T)


def _field(images: Array, J: int) -> Float[Array, "rows images columns"]:
    """Pads by reflection, and moves rows to the front and columns to the end."""
    batch, height, width, channels = images.shape
    rows = _reflected(height, J)
    columns = _reflected(width, J)
    padded = images[:, rows[mirrored(len(rows))]][:, :, columns]
    return padded.transpose(1, 0, 3, 2).reshape(len(rows), batch * channels, len(columns))


def _reflected(size: int, J: int) -> np.ndarray:
    """The pixel at each place of a padded side."""
    margin = padded_size(size, J) - size
    widths = margin // 2, margin - margin // 2
    return np.pad(np.arange(size), widths, mode="reflect")

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
      Each image's features are a function of that image alone, so they cost nothing. NaN or
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
    J, L = (checks.whole("scattering.scatter", n, v) for n, v in (("J", J), ("L", L)))
    if images.ndim != 4 or min(images.shape[1:3]) < 2**J:
        raise ValueError(
            f"scattering.scatter(J={J}): got images of shape {images.shape}; expected (batch, "
            f"height, width, channels), sides from {2**J}. For a missing axis write x[..., None]."
        )
    return _scatter(images.astype(wide(images.dtype)), J, L)


@functools.partial(jax.jit, static_argnames=("J", "L"))
def _scatter(images: Array, J: int, L: int) -> Array:
    """Transforms the images in parts, whose size changes speed and memory only."""
    size, lot = images.shape[0], min(images.shape[0], _part_size(images, J, L))
    even = size // lot * lot if lot else 0
    # A loop over equal parts, and one rest: padding the last part would compute unused features.
    parts = images[:even].reshape(-1, max(1, lot), *images.shape[1:])
    features = jax.lax.map(lambda part: _cascade(part, J, L), parts)
    features = features.reshape(even, *features.shape[2:])
    if even == size:
        return features
    return jnp.concatenate([features, _cascade(images[even:], J, L)])


def _part_size(images: Array, J: int, L: int) -> int:
    _, height, width, channels = images.shape
    pixels = padded_size(height, J) * padded_size(width, J)
    # The largest intermediate: both parts of all angles of one scale, and of both orders.
    spectra = 2 * images.dtype.itemsize * channels * pixels * L * max(1.0, L / 4)
    # On a CPU the spectra of a part should stay in its caches; elsewhere they should fill the chip.
    room = 2**23 if jax.default_backend() == "cpu" else 2**30
    return 2 ** max(0, int(math.log2(room / spectra)))


def _cascade(images: Array, J: int, L: int) -> Array:
    """All paths of one part of the images, from pixels to features."""
    # Rows first and columns last: transforms are then products with matrices on either side.
    field = _field(images, J)
    bank = filter_bank(field.shape[0], field.shape[-1], J, L)
    orders = [_average(field, bank, 0)[:, :, None]]
    spectrum = spectrum_of(field, 2 ** (J - 1))
    once = [_response(spectrum, bank, j, 0) for j in range(J)]
    orders += [_average(first, bank, j) for j, first in enumerate(once)]
    # A modulus is smoother than its field: only coarser wavelets find anything in it.
    orders += [_second_order(first, bank, j) for j, first in enumerate(once[:-1])]
    features = jnp.concatenate(orders, axis=2)
    height, _, _, width = features.shape
    features = features.reshape(height, images.shape[0], -1, width)  # paths join channels
    return features.transpose(1, 0, 3, 2)


def _second_order(first: Array, bank: Bank, j: int) -> Float[Array, "rows images paths columns"]:
    """The averaged moduli of all coarser wavelets, applied to the first order's at scale ``j``."""
    J = len(bank.wavelets)
    spectrum = spectrum_of(first, 2 ** (J - 1 - j))
    orders = [_average(_response(spectrum, bank, k, j), bank, k) for k in range(j + 1, J)]
    rows, images, *_, columns = orders[0].shape
    return jnp.concatenate(orders, axis=3).reshape(rows, images, -1, columns)


def _response(
    spectrum: Array, bank: Bank, j: int, resolution: int
) -> Float[Array, "rows *images_and_paths angles columns"]:
    """The moduli of all wavelets of scale ``j``; the field was halved ``resolution`` times."""
    blocks = 2 ** (len(bank.wavelets) - 1 - resolution)
    step = 2 ** (j - resolution)
    passed = filtered(spectrum, coarsen(bank.wavelets[j], resolution), step, blocks)
    return moduli(passed, blocks // step)


def _average(field: Array, bank: Bank, resolution: int) -> Array:
    down, across = (averaging(f, resolution, len(bank.wavelets)) for f in bank.lowpass)
    return on_columns(on_rows(down[:, mirrored(down.shape[1])], field), across.T)


def _field(images: Array, J: int) -> Float[Array, "rows images columns"]:
    """Pads by reflection, and moves rows to the front and columns to the end."""
    batch, *sides, channels = images.shape
    rows, columns = (
        np.pad(np.arange(side), (margin // 2, margin - margin // 2), mode="reflect")
        for side in sides
        for margin in [padded_size(side, J) - side]
    )
    images = images[:, rows[mirrored(len(rows))]][:, :, columns]
    return images.transpose(1, 0, 3, 2).reshape(len(rows), batch * channels, len(columns))

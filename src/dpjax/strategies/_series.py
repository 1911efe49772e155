# SPDX-License-Identifier: Apache-2.0
"""Power series in float64: lower-triangular Toeplitz matrices in linear memory.

Products and inverses of such matrices are products and inverses of the series whose coefficients
are their first columns.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike

# Denominators up to this length are divided by recursion, whose relative error is smallest;
# longer ones by Newton's method on Fourier transforms.
_RECURSION = 512


def filtered(above: ArrayLike, below: ArrayLike, values: ArrayLike) -> np.ndarray:
    """The series ``values * above / below``, as long as ``values``; along axis 0."""
    # Imported here: scipy.signal imports scipy.stats, which takes half a second.
    from scipy.signal import lfilter

    return np.asarray(lfilter(above, below, values, axis=0))


def product(
    left: Float[np.ndarray, " m"], right: Float[np.ndarray, " n"], length: int
) -> Float[np.ndarray, " length"]:
    """The first coefficients of a product of two series."""
    from scipy.signal import oaconvolve

    left, right = left[:length], right[:length]
    convolve = np.convolve if min(left.size, right.size) <= _RECURSION else oaconvolve
    return padded(convolve(left, right), length)


def reciprocal(coefficients: Float[np.ndarray, " n"], length: int) -> Float[np.ndarray, " length"]:
    """The first coefficients of 1 / series."""
    if min(coefficients.size, length) <= _RECURSION:
        return filtered([1.0], coefficients[:length], np.eye(1, length)[0])
    half = reciprocal(coefficients, -(-length // 2))
    # One step of Newton's method doubles the number of right coefficients: x + x (1 - c x).
    error = -product(coefficients, half, length)
    error[0] += 1.0
    return padded(half, length) + product(half, error, length)


def quotient(
    poles: Float[np.ndarray, " d"], zeros: Float[np.ndarray, " d"], length: int
) -> Float[np.ndarray, " length"]:
    r"""1 / c of a series c with poles p and zeros q: $\prod_i (1 - p_i x) / (1 - q_i x)$."""
    inverse = np.eye(1, length)[0]
    # In order: a pole beside its nearest zero keeps the coefficients between them small.
    for above, below in zip(np.sort(poles), np.sort(zeros), strict=True):
        inverse = filtered([1.0, -above], [1.0, -below], inverse)
    return inverse


def square_root(length: int, power: float = -0.5) -> Float[np.ndarray, " length"]:
    r"""The series $(1 - x)^{power}$; with -1/2, $c_k = \binom{2k}{k} / 4^k$."""
    k = np.arange(1, length)
    return np.cumprod(np.concatenate([[1.0], (k - 1 - power) / k]))


def correlated(
    left: Float[np.ndarray, " n"], right: Float[np.ndarray, " n"], lags: int
) -> Float[np.ndarray, " lags"]:
    """``[sum_j left[j + k] right[j] for k in range(lags)]``."""
    if lags <= _RECURSION:
        return np.array([left[k:] @ right[: right.size - k] for k in range(lags)])
    from scipy.signal import oaconvolve

    return oaconvolve(left, right[::-1])[right.size - 1 :][:lags]


def padded(values: ArrayLike, length: int) -> Float[np.ndarray, " length"]:
    """The values cut off, or followed by zeros."""
    values = np.asarray(values, np.float64)[:length]
    return np.pad(values, (0, length - values.size))


def lower_triangular(first_column: Float[np.ndarray, " n"]) -> Float[np.ndarray, "n n"]:
    """The lower-triangular Toeplitz matrix with this first column."""
    steps = np.arange(first_column.size)
    lag = steps[:, None] - steps
    return np.where(lag >= 0, first_column[np.maximum(lag, 0)], 0.0)

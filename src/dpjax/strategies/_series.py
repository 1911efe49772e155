# SPDX-License-Identifier: Apache-2.0
"""Power series in float64: lower-triangular Toeplitz matrices in linear memory.

Products and inverses of such matrices are products and inverses of the series whose coefficients
are their first columns.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike

# The coefficients of a series, or one number for each step of a run.
Series = Float[np.ndarray, "_"]
Matrix = Float[np.ndarray, "_ _"]

# Denominators up to this length are divided by recursion, whose relative error is smallest;
# longer ones by Newton's method on Fourier transforms.
_RECURSION = 512


def filtered(above: ArrayLike, below: ArrayLike, values: ArrayLike) -> np.ndarray:
    """The series ``values * above / below``, as long as ``values``; along axis 0."""
    # Imported here: scipy.signal imports scipy.stats, which takes half a second.
    from scipy.signal import lfilter

    return np.asarray(lfilter(above, below, values, axis=0))


def product(left: Series, right: Series, length: int) -> Series:
    """The first coefficients of a product of two series."""
    from scipy.signal import oaconvolve

    left = left[:length]
    right = right[:length]
    if min(left.size, right.size) <= _RECURSION:
        return padded(np.convolve(left, right), length)
    return padded(oaconvolve(left, right), length)


def reciprocal(coefficients: Series, length: int) -> Series:
    """The first coefficients of 1 / series."""
    if min(coefficients.size, length) <= _RECURSION:
        one = np.eye(1, length)[0]
        return filtered([1.0], coefficients[:length], one)
    half = reciprocal(coefficients, -(-length // 2))
    # One step of Newton's method doubles the number of right coefficients: x + x (1 - c x).
    error = -product(coefficients, half, length)
    error[0] += 1.0
    return padded(half, length) + product(half, error, length)


def quotient(poles: Series, zeros: Series, length: int) -> Series:
    r"""1 / c of a series c with poles p and zeros q: $\prod_i (1 - p_i x) / (1 - q_i x)$."""
    inverse = np.eye(1, length)[0]
    # Sorting pairs each pole with its nearest zero, which keeps the coefficients between the two
    # filters small.
    for pole, zero in zip(np.sort(poles), np.sort(zeros), strict=True):
        inverse = filtered([1.0, -pole], [1.0, -zero], inverse)
    return inverse


def square_root(length: int, power: float = -0.5) -> Series:
    r"""The series $(1 - x)^{power}$; with -1/2, $c_k = \binom{2k}{k} / 4^k$."""
    k = np.arange(1, length)
    ratios = np.concatenate([[1.0], (k - 1 - power) / k])
    return np.cumprod(ratios)


def correlated(left: Series, right: Series, lags: int) -> Series:
    """``[sum_j left[j + k] right[j] for k in range(lags)]``."""
    if lags <= _RECURSION:
        sums = [left[k:] @ right[: right.size - k] for k in range(lags)]
        return np.array(sums)
    from scipy.signal import oaconvolve

    all_lags = oaconvolve(left, right[::-1])
    return all_lags[right.size - 1 :][:lags]


def padded(values: ArrayLike, length: int) -> Series:
    """The values cut off, or followed by zeros."""
    values = np.asarray(values, np.float64)[:length]
    return np.pad(values, (0, length - values.size))


def lower_triangular(first_column: Series) -> Matrix:
    """The lower-triangular Toeplitz matrix with this first column."""
    steps = np.arange(first_column.size)
    lag = steps[:, None] - steps
    entries = first_column[np.maximum(lag, 0)]
    return np.where(lag >= 0, entries, 0.0)

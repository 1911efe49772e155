# SPDX-License-Identifier: Apache-2.0
"""Rényi divergence of the Poisson-sampled Gaussian, in closed form, for thousands of multipliers.

A step with rate q and multiplier z has divergence ``log A(alpha) / (alpha - 1)`` at order alpha,
where A is the alpha-th moment of the likelihood ratio f = (1-q) + q exp((2x-1) / 2z^2), x ~ N(0,
z^2); steps add up. Whole orders are a binomial sum. The others are one integral of an analytic
function, for which the trapezoid rule converges exponentially. Both compute A - 1, a sum of
positive terms (f has mean 1, and f^alpha lies above its tangent at 1), so small rates lose no
digits and large rates converge.

dp_accounting takes 37 seconds for a schedule of 2,000 multipliers, and this file takes one. Its
fractional orders are looser, because it adds up an alternating series without its signs.
"""

import functools
import itertools
import math

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import gammaln

# These are the default orders of dp_accounting, and more where those are sparse.
_TENTHS = 1 + np.arange(1, 100) / 10
ORDERS: np.ndarray = np.concatenate(
    [
        1 + np.arange(2, 10) / 100,
        _TENTHS,
        np.arange(11, 64),
        [72, 80, 96, 128, 192, 256, 384, 512, 768, 1024],
    ]
)
# These are the orders of the first DP-SGD tutorials, whose figures the papers print.
CLASSIC: np.ndarray = np.isin(ORDERS, np.concatenate([_TENTHS, np.arange(12, 64)]))

_TAIL = 9.0  # standard deviations that are integrated on either side; e^(-81/2) is left out
_FINEST = 0.02  # a multiplier below which the integral needs too many points
# Larger chunks push the temporaries out of the caches.
_CHUNK = 64  # multipliers
_BLOCK = 32_768  # numbers of a temporary


def renyi_divergence(
    noise_multiplier: ArrayLike, sampling_rate: ArrayLike, orders: ArrayLike = ORDERS
) -> np.ndarray:
    """Rényi divergence of one Poisson-sampled Gaussian step: ``log A(alpha) / (alpha - 1)``.

    Multipliers and rates are numbers or arrays, and broadcast together; orders are above 1, or
    infinite. The answer, ``[..., orders]``, is for one example more or fewer. With a multiplier
    below 0.02 and a fractional order, it is that of the next whole order, an upper bound.

    Example:
      >>> renyi_divergence(2.5, 0.01, [5, 50]) * 50
      array([0.00218076, 0.02384604])

    References:
      Mironov, Talwar, Zhang, *Rényi differential privacy of the sampled Gaussian mechanism*,
      2019, §3.
    """
    orders = np.atleast_1d(np.asarray(orders, np.float64))
    z, q = np.broadcast_arrays(
        np.asarray(noise_multiplier, np.float64), np.asarray(sampling_rate, np.float64)
    )
    if not (np.all(orders > 1) and np.all(z >= 0) and np.all((q >= 0) & (q <= 1))):
        raise ValueError(
            "accounting.renyi_divergence: expected orders > 1, multipliers >= 0, rates in [0, 1]."
        )
    shape = z.shape
    z = z.ravel()
    q = q.ravel()
    divergences = np.empty((z.size, orders.size))
    is_finite = np.isfinite(orders)
    for start in range(0, z.size, _CHUNK):
        rows = slice(start, start + _CHUNK)
        divergences[rows, is_finite] = _divergences(z[rows], q[rows], orders[is_finite])
    divergences[:, ~is_finite] = np.inf  # a sampled Gaussian has unbounded loss
    releases_nothing = (q == 0) | np.isinf(z)
    divergences[releases_nothing] = 0.0
    return divergences.reshape(*shape, orders.size)


def curves(pairs: list[tuple[float, float]]) -> np.ndarray:
    """`renyi_divergence` of (rate, multiplier) pairs on `ORDERS`, ``[pairs, orders]``."""
    # Similar multipliers are computed and cached together, because a longer run of the same
    # schedule adds pairs to few groups.
    groups = itertools.groupby(pairs, lambda pair: (pair[0], round(8 * math.log(pair[1]))))
    return np.concatenate([_group(tuple(group)) for _, group in groups])


@functools.lru_cache(maxsize=4096)
def _group(pairs: tuple[tuple[float, float], ...]) -> np.ndarray:
    """As `curves`, cached."""
    q, z = np.array(pairs).T
    return renyi_divergence(z, q)


def _divergences(z: np.ndarray, q: np.ndarray, orders: np.ndarray) -> np.ndarray:
    """The divergences at finite orders, ``[pairs, orders]``, of pairs of z and q, each ``[pairs]``.

    Where the rate is 0 or the multiplier infinite, the caller replaces them by 0.
    """
    # Start with the divergences without sampling. The rows of sampled steps are replaced below.
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        divergences = orders / (2 * z[:, None] ** 2)
    sampled = np.flatnonzero((q > 0) & (q < 1) & (z > 0) & np.isfinite(z))
    # The moment of a whole order is a finite sum. Other orders need the integral.
    is_whole = orders == np.floor(orders)
    for column in np.flatnonzero(is_whole):
        log_a = _log_moment_whole(z[sampled], q[sampled], int(orders[column]))
        divergences[sampled, column] = log_a / (orders[column] - 1)
    fractional = orders[~is_whole]
    if not fractional.size:
        return divergences
    # Rows whose integrals have equally many points are computed together.
    for grid_size, rows in _by_grid_size(z, sampled, fractional.max()).items():
        cells = np.ix_(rows, ~is_whole)
        if grid_size == 0:
            # These multipliers are too small for the integral. A divergence rises with its order,
            # so the next whole order gives an upper bound.
            divergences[cells] = _divergences(z[rows], q[rows], np.ceil(fractional))
        else:
            log_a = _log_moment_integral(z[rows], q[rows], fractional, grid_size)
            divergences[cells] = log_a / (fractional - 1)
    return divergences


def _log_moment_whole(z: np.ndarray, q: np.ndarray, order: int) -> np.ndarray:
    """``log A`` at a whole order, ``[pairs]``; the terms of the sum are ``[pairs, k]``.

    ``A - 1 = sum_k>=2 C(alpha, k) q^k (1-q)^(alpha-k) (exp(k(k-1) / 2z^2) - 1)``.
    """
    k = np.arange(2, order + 1)
    log_binomial = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
    q = q[:, None]
    exponent = k * (k - 1) / (2 * z[:, None] ** 2)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        # This is log(exp(x) - 1), without overflow for large x or cancellation for small x.
        log_expm1 = exponent + np.log(-np.expm1(-exponent))
        terms = log_binomial + k * np.log(q) + (order - k) * np.log1p(-q) + log_expm1
        return np.logaddexp(0, _summed(terms))


def _by_grid_size(z: np.ndarray, rows: np.ndarray, top: float) -> dict[int, np.ndarray]:
    """Groups rows by the number of points of their integral up to order ``top``; 0: too many."""
    # The integrand in u = x/z is analytic in a strip of half-width pi*z. The error is therefore
    # exp(-2 pi (pi z) / step).
    steps = np.minimum(0.4, 0.8 * z[rows])
    with np.errstate(divide="ignore", over="ignore"):
        points = np.ceil((top / z[rows] + 2 * _TAIL) / steps / 16) * 16
    points = np.where(z[rows] < _FINEST, 0, points).astype(int)
    return {int(size): rows[points == size] for size in np.unique(points)}


def _log_moment_integral(z: np.ndarray, q: np.ndarray, orders: np.ndarray, size: int) -> np.ndarray:
    """``log A``, ``[pairs, orders]``, by the trapezoid rule on ``size`` points of u = x / z.

    The integral is ``A - 1 = E[f^alpha - 1 - alpha (f - 1)]``, over the standard Gaussian u.
    """
    z = z[:, None]
    q = q[:, None]
    # The points are from -9 to order / z + 9, because the integrand of the largest order has its
    # peak at order / z. Arrays are [pairs, size] from here.
    step = (orders.max() / z + 2 * _TAIL) / (size - 1)
    u = -_TAIL + step * np.arange(size)
    log_weight = -(u**2) / 2 + np.log(step / np.sqrt(2 * np.pi))  # of a point: density times step
    log_ratio = u / z - 1 / (2 * z**2)  # of the likelihoods without sampling
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        # f = 1 - q + q ratio. Near 1 it is 1 plus a small number, and `logaddexp` loses the digits
        # of that. A large ratio overflows in `expm1`.
        near = np.log1p(q * np.expm1(np.minimum(log_ratio, 1.0)))
        far = np.logaddexp(np.log1p(-q), np.log(q) + log_ratio)
        log_f = np.where(log_ratio < 1, near, far)
        excess = np.expm1(log_f)  # f - 1
        # Several orders at a time, as many as fit into the caches: [orders, pairs, size].
        block_count = math.ceil(orders.size * log_f.size / _BLOCK)
        log_integrals = []
        for block in np.array_split(orders, block_count):
            if block.size:  # the last blocks are empty if there are more blocks than orders
                log_gap = _log_gap(log_f, excess, block[:, None, None])
                log_integrals.append(_summed(log_gap + log_weight))
    return np.logaddexp(0, np.concatenate(log_integrals).T)  # log(1 + integral)


def _summed(logs: np.ndarray) -> np.ndarray:
    """The logarithm of the sum of exponentials along the last axis, faster than SciPy's."""
    top = np.max(logs, axis=-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0.0)
    return np.log(np.sum(np.exp(logs - top), axis=-1)) + top[..., 0]


def _log_gap(log_f: np.ndarray, excess: np.ndarray, order: np.ndarray) -> np.ndarray:
    """``log(f^alpha - 1 - alpha (f - 1))``, the distance of the power from its tangent at 1.

    ``excess`` is f - 1. Both have the shape ``[pairs, size]``, the order has ``[orders, 1, 1]``,
    and the answer ``[orders, pairs, size]``.
    """
    power = order * log_f
    slope = order * excess
    # This is the logarithm of the tangent where it is positive. Above e^30 only its slope matters.
    tangent = np.where(log_f > 30, np.log(order) + log_f, np.log1p(np.maximum(slope, -1)))
    above = power + np.log(-np.expm1(np.minimum(tangent - power, 0)))
    below = np.logaddexp(power, np.log(np.maximum(-1 - slope, 0)))
    # The power and its tangent agree to many digits if f is near 1. This is the second-order term
    # of their difference, corrected by the third.
    taylor = np.log(order * (order - 1) / 2) + 2 * np.log(np.abs(excess))
    taylor += np.log1p(np.clip((order - 2) / 3 * excess, -0.5, 0.5))
    gap = np.where(slope > -1, above, below)
    return np.where(np.abs(slope) < 1e-4, taylor, gap)

# SPDX-License-Identifier: Apache-2.0
r"""Buffered linear Toeplitz strategies: coefficients that are sums of a few decaying powers.

As a series, $c(x) = \prod_i (1 - \theta_i x) / (1 - \lambda_i x)$, and the inverse matrix is of the
same kind with $\lambda$ and $\theta$ exchanged.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dpjax import checks
from dpjax.strategies import _powers, _series, _streams
from dpjax.strategies._series import Series
from dpjax.strategies._workload import Workload, checked_workload
from dpjax.strategies.participation import Participation
from dpjax.strategies.strategy import Strategy, narrowed
from dpjax.types import PyTree


@dataclass(frozen=True, kw_only=True)
class Buffered(Strategy):
    r"""$c_0 = 1$, $c_k = \sum_i a_i \lambda_i^{k-1}$ with scales $a$ and decays $\lambda$."""

    scales: tuple[float, ...]
    decays: tuple[float, ...]
    kind: ClassVar[str] = "buffered"

    def __post_init__(self) -> None:
        object.__setattr__(self, "scales", narrowed(self.scales))
        object.__setattr__(self, "decays", narrowed(self.decays))

    @property
    def remembers(self) -> int:
        """One array for each power."""
        return len(self.scales)

    @property
    def coefficients(self) -> Series:
        """One for each step; none is cut off, although the last are small."""
        powers = np.array(self.decays)[:, None] ** np.arange(self.steps - 1)
        return np.concatenate([[1.0], np.array(self.scales) @ powers])

    def _next(self, z: PyTree, memory: PyTree, step: Any) -> tuple[PyTree, PyTree]:
        r"""$x_t = z_t - \sum_i a_i s_i$, and then $s_i \leftarrow \lambda_i s_i + x_t$."""
        scales = jnp.asarray(self.scales, jnp.float32)
        decays = jnp.asarray(self.decays, jnp.float32)
        one_or_nan = _streams.one_within_run(step, self.steps)

        def next_noise(leaf: Array, sums: Array) -> tuple[Array, Array]:
            wide = leaf.astype(sums.dtype)
            noise = (wide - _streams.weighted(scales, sums)) * one_or_nan
            # One decay for each row of the sums.
            factors = decays.astype(sums.dtype).reshape(-1, *[1] * noise.ndim)
            return noise, factors * sums + noise

        return _streams.mapped(next_noise, z, memory)

    def _reciprocal(self) -> Series:
        """Filters by one pole after another: the product of nearly equal ones loses all digits."""
        weights = np.sqrt(self.scales)
        # The zeros of c are the eigenvalues of a symmetric matrix, and so real.
        zeros = np.linalg.eigvalsh(np.diag(self.decays) - np.outer(weights, weights))
        return _series.quotient(np.array(self.decays), zeros, self.steps)


def buffered(
    steps: int,
    buffers: int = 4,
    participation: Participation | None = None,
    *,
    momentum: float = 0.0,
    error: str = "mean",
) -> Strategy:
    r"""A buffered linear Toeplitz strategy (BLT) of least error for a participation.

    $$ c_0 = 1, \qquad c_k = \sum_{i=1}^{d} a_i \lambda_i^{k-1} $$

    Poles $\lambda$ and zeros $\theta$ interlace, $1 > \lambda_1 > \theta_1 > \lambda_2 > \dots$. So
    the coefficients are positive and decrease, and the sensitivity is exact. ``buffers`` is d, also
    the memory in copies of the parameters; more than about 6 hardly lower the error.
    The other arguments are as for `banded`, and results are cached too.

    Example:
      >>> strategy = buffered(steps=100, buffers=2)
      >>> strategy.remembers, round(strategy.errors().mean, 2)
      (2, 2.32)

    References:
      Dvijotham et al., "Efficient and near-optimal noise generation for streaming differential
      privacy", 2024.
      McMahan et al., "A hassle-free algorithm for private learning in practice: don't use tree
      aggregation, use BLTs", 2024: several participations.
    """
    call = "strategies.buffered"
    steps = checks.whole(call, "steps", steps)
    buffers = checks.whole(call, "buffers", buffers)
    checks.one_of(call, "error", error, ("mean", "maximal"))
    participation = Participation.or_once(call, participation)
    workload = checked_workload(call, steps, momentum, None)
    return _searched(steps, buffers, participation, workload, error)


@functools.lru_cache(maxsize=64)
def _searched(
    steps: int, buffers: int, participation: Participation, workload: Workload, error: str
) -> Buffered:
    scales, decays = _powers.least_error(steps, buffers, participation, workload, error)
    # At most the largest float32 below 1, because a decay may round to 1.
    decays = np.minimum(decays, 1 - 2.0**-24)
    return Buffered(
        name=f"buffered, {buffers} buffers",
        steps=steps,
        scales=tuple(scales),
        decays=tuple(decays),
    )

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
from jaxtyping import Array, Float

from dpjax import checks
from dpjax.strategies import _powers, _series, _streams
from dpjax.strategies._workload import Workload, workload
from dpjax.strategies.participation import Participation, or_once
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
    def coefficients(self) -> Float[np.ndarray, " steps"]:
        """All of them; the last are small."""
        powers = np.array(self.decays)[:, None] ** np.arange(self.steps - 1)
        return np.concatenate([[1.0], np.array(self.scales) @ powers])

    def _next(self, z: PyTree, memory: PyTree, step: Any) -> tuple[PyTree, PyTree]:
        r"""$x_t = z_t - \sum_i a_i s_i$, and then $s_i \leftarrow \lambda_i s_i + x_t$."""
        scales, decays = (jnp.asarray(x, jnp.float32) for x in (self.scales, self.decays))
        scale = _streams.sound(step, self.steps)

        def one(leaf: Array, sums: Array) -> tuple[Array, Array]:
            noise = (leaf.astype(sums.dtype) - _streams.weighted(scales, sums)) * scale
            return noise, decays.astype(sums.dtype).reshape(-1, *[1] * noise.ndim) * sums + noise

        return _streams.mapped(one, z, memory)

    def _reciprocal(self) -> Float[np.ndarray, " steps"]:
        """Pole by pole: the combined polynomial of nearly equal poles would lose all digits."""
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

    Poles $\lambda$ and zeros $\theta$ interlace, $1 > \lambda_1 > \theta_1 > \lambda_2 > \dots$, so
    that the coefficients are positive and decrease, and the sensitivity is exact. ``buffers`` is d,
    which is also the memory in copies of the parameters; more than about 6 hardly lower the error.
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
    steps, buffers = checks.whole(call, "steps", steps), checks.whole(call, "buffers", buffers)
    checks.one_of(call, "error", error, ("mean", "maximal"))
    participation = or_once(call, participation)
    return _searched(steps, buffers, participation, workload(call, steps, momentum, None), error)


@functools.lru_cache(maxsize=64)
def _searched(
    steps: int, buffers: int, participation: Participation, of: Workload, error: str
) -> Buffered:
    scales, decays = _powers.least_error(steps, buffers, participation, of, error)
    # The largest float32 below 1: a decay may round to 1.
    decays = np.minimum(decays, 1 - 2.0**-24)
    name = f"buffered, {buffers} buffers"
    return Buffered(name=name, steps=steps, scales=tuple(scales), decays=tuple(decays))

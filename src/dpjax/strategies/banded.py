# SPDX-License-Identifier: Apache-2.0
"""Banded strategies: closed forms from the square root of the prefix sums, and BandMF.

Each band more costs the memory of one copy of the parameters. If the steps of one example are at
least ``bands`` apart, the columns of C at these steps do not overlap: then the sensitivity is exact
and sampling amplifies.
"""

from __future__ import annotations

import functools

from numpy.typing import ArrayLike

from dpjax import checks
from dpjax.strategies import _search, _series
from dpjax.strategies._workload import Workload, checked_workload
from dpjax.strategies.participation import Participation
from dpjax.strategies.strategy import LARGEST_MATRIX, Strategy, narrowed
from dpjax.strategies.toeplitz import InverseToeplitz, Toeplitz


def square_root(steps: int, bands: int | None = None) -> Strategy:
    r"""The square root of the prefix sums, a Toeplitz matrix, possibly cut off.

    $$ c_k = \binom{2k}{k} / 4^k, \qquad \sum_k c_k x^k = (1 - x)^{-1/2} $$

    It has ``bands`` coefficients, by default one for each of the run's T ``steps``. Then its
    maximal error for one participation is within a constant of the least, and the stream remembers
    T - 1 arrays.

    Example:
      >>> square_root(steps=5).coefficients
      array([1.       , 0.5      , 0.375    , 0.3125   , 0.2734375])

    References:
      Fichtenberger, Henzinger and Upadhyay, "Constant matters: fine-grained complexity of
      differentially private continual observation", 2023.
      Kalinin and Lampert, "Banded square root matrix factorization for differentially private
      model training", 2024.
    """
    if bands is None:
        bands = steps
    steps, bands = _sizes("strategies.square_root", steps, bands)
    name = "square root"
    if bands < steps:
        name += f", {bands} bands"
    coefficients = _series.square_root(bands)
    return Toeplitz(name=name, steps=steps, values=tuple(coefficients))


def banded_inverse_square_root(steps: int, bands: int) -> Strategy:
    r"""The strategy whose inverse is the cut-off inverse square root of the prefix sums (BISR).

    $$ C^{-1} = \text{the first bands of } (1 - x)^{1/2} = 1 - x/2 - x^2/8 - x^3/16 - \dots $$

    Example:
      >>> banded_inverse_square_root(steps=5, bands=3).inverse()[3]
      array([ 0.   , -0.125, -0.5  ,  1.   ,  0.   ])

    References:
      Kalinin, McKenna, Upadhyay and Lampert, "Back to square roots: an optimal bound on the matrix
      factorization error for multi-epoch differentially private SGD", 2025.
    """
    steps, bands = _sizes("strategies.banded_inverse_square_root", steps, bands)
    return InverseToeplitz(
        name=f"banded inverse square root, {bands} bands",
        steps=steps,
        values=tuple(_series.square_root(bands, 0.5)),
    )


def banded(
    steps: int,
    bands: int,
    participation: Participation | None = None,
    *,
    momentum: float = 0.0,
    learning_rates: ArrayLike | None = None,
    error: str = "mean",
    normalized: bool | None = None,
) -> Strategy:
    r"""The banded Toeplitz strategy of least error for a participation (BandMF).

    $$ \min_{c_1, \dots, c_{b-1}} \ \Delta(C)^2 \; \tfrac1T \lVert W C^{-1} \rVert_F^2 $$

    with the coefficients $c_0 = 1, c_1, \dots$ of $C$, its sensitivity $\Delta(C)$ for the
    participation, and the matrix $W$ from the noise of all steps to the noise in the parameters
    after each step. Without momentum and learning rates $W$ makes prefix sums.

    Args:
      steps: The number of steps T of the run.
      bands: The number of bands b; the memory is b - 1 copies of the parameters.
      participation: Which steps one example may have; by default `once`. With at least ``bands``
        steps between them the sensitivity is exact for any coefficients. Otherwise coefficients
        must decrease.
      momentum: The decay of SGD with momentum.
      learning_rates: One for each step, of at most 4,096 steps; by default 1 at each.
      error: "mean" as above, or "maximal" for the largest squared row norm in place of the mean.
      normalized: Whether the last columns are scaled to the norm of the others, which lowers the
        mean error a little. By default where the participation allows it.

    Results are cached, since the search takes seconds for 100,000 steps.

    Example:
      >>> strategy = banded(steps=100, bands=10)
      >>> strategy.bands, round(strategy.errors().mean, 2)
      (10, 2.94)

    References:
      Choquette-Choo et al., "(Amplified) banded matrix factorization: a unified approach to private
      training", 2023.
      McKenna, "Scaling up the banded matrix factorization mechanism for differentially private
      ML", 2024.
    """
    call = "strategies.banded"
    steps, bands = _sizes(call, steps, bands)
    checks.one_of(call, "error", error, ("mean", "maximal"))
    participation = Participation.or_once(call, participation)
    workload = checked_workload(call, steps, momentum, learning_rates)
    # With learning rates the search holds a matrix of steps by steps, and minimizes only the mean.
    if workload.rates is not None and (steps > LARGEST_MATRIX or error == "maximal"):
        raise ValueError(
            f"{call}(learning_rates): expected error='mean' and at most {LARGEST_MATRIX} steps."
        )
    if normalized is None:
        # Where columns of a pattern do not overlap, the sensitivity is exact with norms of 1 too.
        normalized = bands <= participation.separation or participation.most == 1
    return Toeplitz(
        name=f"banded, {bands} bands",
        steps=steps,
        values=_searched(steps, bands, participation, workload, error),
        normalized=normalized,
    )


@functools.lru_cache(maxsize=64)
def _searched(
    steps: int, bands: int, participation: Participation, workload: Workload, error: str
) -> tuple[float, ...]:
    if participation.most == 1:
        # A single step overlaps with no other, as if steps were a whole run apart.
        participation = Participation(separation=steps, most=1)
    coefficients = _search.banded_coefficients(steps, bands, participation, workload, error)
    return narrowed(coefficients)


def _sizes(call: str, steps: int, bands: int) -> tuple[int, int]:
    steps = checks.whole(call, "steps", steps)
    bands = checks.whole(call, "bands", bands, most=steps)
    return steps, bands

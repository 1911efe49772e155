# SPDX-License-Identifier: Apache-2.0
"""The cost of a search: several private runs, and only the best one is published.

The winner depends on what all runs learnt, even if scores come from public data. A *fixed* number
of runs costs their composition. A *random* number, from `draw_runs`, costs far less, because an
observer cannot tell how many runs the winner has beaten.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from dp_accounting import DpEvent
from scipy import stats
from scipy.optimize import root_scalar
from scipy.special import exprel

from dpjax import checks
from dpjax.accounting import rdp_accountant
from dpjax.accounting.event_parts import split
from dpjax.accounting.methods import checked_delta, epsilon
from dpjax.accounting.rdp_divergence import ORDERS
from dpjax.types import Key, Purpose


class Selection(NamedTuple):
    """The cost of a search, counted in three ways, at one delta.

    Attributes:
      epsilon_one: One run that was fixed beforehand; *not* the price of a search.
      epsilon_best: The best of a random number of runs, if it alone is published.
      epsilon_all: ``mean_runs`` runs (rounded up) composed; then all of them may be published.
      mean_runs: How many runs there are on average.
    """

    epsilon_one: float
    epsilon_best: float
    epsilon_all: float
    mean_runs: float


class Distribution(NamedTuple):
    """How the number of runs is drawn."""

    # From the curve of one run and the mean number to the curve of the best.
    divergence: Callable[[np.ndarray, float], np.ndarray]
    # From the mean number and two uniform numbers in (0, 1) to a number of runs.
    draw: Callable[[float, float, float], int]


def select_best(
    event: DpEvent | Sequence[DpEvent],
    delta: float,
    *,
    runs: float,
    distribution: str = "geometric",
    neighbours: str = "add-or-remove",
) -> Selection:
    """The epsilon of running a training ``K`` times and publishing the best run, ``K`` random.

    With ``r`` the Rényi curve of one run, at every order ``a``, for the truncated negative
    binomials (``eta`` 1: geometric; 0: logarithmic; ``gamma`` their parameter), and for Poisson,

        r(a) + (1 + eta) min_b [(1 - 1/b) r(b) + log(1/gamma) / b] + log(runs) / (a - 1)
        r(a) + runs * delta_hat(log(a / (a - 1))) + log(runs) / (a - 1)

    where ``delta_hat`` is the delta of one run; the best order then gives epsilon.

    Args:
      event: One run; or several events, if each run draws its settings: all that could be drawn.
      delta: As for `accounting.epsilon`.
      runs: The mean of ``K``, 1 or more.
      distribution: "geometric", "logarithmic" (smaller epsilon, heavier tail) or "poisson" (close
        to the mean, now and then no run at all; expensive when one run's epsilon is large).
      neighbours: As for `accounting.epsilon`.

    Returns:
      A `Selection`, by RDP. For a fixed number by another method, or if all runs are published:
      ``accounting.epsilon(accounting.compose(*events), ...)``. To compose the best run with other
      releases there is dp_accounting's `RepeatAndSelectDpEvent`, which the RDP here reads.

    Privacy:
      ``epsilon_best`` holds if all of these do.

      1. ``K`` was drawn by `draw_runs` before the first result was seen, and stays secret: no table
         of runs, no seed from which it follows. To stop early, or to add a run, voids it.
      2. Runs have keys of their own. Settings are drawn independently for each from candidates
         that were fixed beforehand and are *all* in ``event``, drawn or not.
      3. The score is a function of what the run releases and of public data. A score on private
         data that is not paid for in ``event`` has no epsilon.
      4. The best run alone is published; with no run (Poisson), nothing or a constant.

    Example:
      >>> from dpjax import accounting
      >>> event = accounting.subsampled_gaussian(1.1, sampling_rate=256 / 60_000, steps=14_063)
      >>> select_best(event, delta=1e-5, runs=10)
      Selection(epsilon_one=2.596..., epsilon_best=5.049..., epsilon_all=9.593..., mean_runs=10.0)

    References:
      Papernot, Steinke, *Hyperparameter tuning with Rényi differential privacy*, 2022, theorems 2
      and 6. Liu, Talwar, *Private selection from private candidates*, 2019.
    """
    call = "accounting.select_best"
    row, runs = _checked(call, distribution, runs)
    checked_delta(call, delta)
    events = list(event) if isinstance(event, Iterable) else [event]
    # Any candidate may be the one that is published, so the search pays for the most expensive one.
    alone = max(epsilon(run, delta, "rdp", neighbours) for run in events)
    if not math.isfinite(alone):
        return Selection(math.inf, math.inf, math.inf, runs)
    # The theorems are stated for one divergence curve that bounds every run.
    one = np.max([rdp_accountant.total(split(run), neighbours) for run in events], axis=0)
    curves = row.divergence(one, runs), math.ceil(runs) * one
    best, every = (rdp_accountant.to_epsilon(curve, delta) for curve in curves)
    return Selection(alone, best, every, runs)


def draw_runs(key: Key, runs: float, distribution: str = "geometric") -> int:
    """Draws how many runs a search makes, from the distribution that `select_best` accounts.

    ``key`` is from ``noise.secret_key()``, because it reveals the number, and is consumed. 0 is
    possible with "poisson" alone. Probabilities are right to ``2^-53``.

    Example:
      >>> [draw_runs(jax.random.key(seed), runs=10) for seed in range(6)]
      [18, 3, 1, 9, 13, 4]
    """
    row, runs = _checked("accounting.draw_runs", distribution, runs)
    own = jax.random.fold_in(key, Purpose.RUNS)
    words = np.asarray(jax.random.bits(own, (2, 2), "uint32"), np.uint64)
    # Odd multiples of 2^-53: exact in a double, and neither 0 nor 1.
    return row.draw(runs, *map(float, (2 * (words[:, 0] << 20 | words[:, 1] >> 12) + 1) / 2**53))


def _truncated(one: np.ndarray, runs: float, eta: float, tail: float) -> np.ndarray:
    """Theorem 2; ``tail`` is log(1 / gamma). The second order may be 1, where ``r`` has no part."""
    second, r = np.append(1.0, ORDERS), np.append(0.0, one)
    least = np.min((1 - 1 / second) * r + tail / second)
    return one + (1 + eta) * least + math.log(runs) / (ORDERS - 1)


def _poisson(one: np.ndarray, runs: float) -> np.ndarray:
    """Theorem 6; the largest epsilon_hat that it allows has the smallest delta_hat."""
    delta_hat = [rdp_accountant.to_delta(one, math.log1p(1 / (a - 1))) for a in ORDERS]
    return one + runs * np.array(delta_hat) + math.log(runs) / (ORDERS - 1)


def _logarithmic_tail(runs: float) -> float:
    """log(1 / gamma) of the logarithmic distribution, whose mean is ``(1/gamma - 1)`` over it."""
    # SciPy's inverse of this distribution does not end for a mean of 2,000 runs.
    bracket = 0.0, 2 * math.log(runs) + 2
    return root_scalar(lambda t: exprel(t) - runs, bracket=bracket, xtol=1e-14).root


def _geometric(tail: float, coin: float) -> int:
    """The first success of coins with the probability ``gamma``: ``K > k`` if all k fail."""
    gamma = math.exp(-tail)
    return 1 + math.floor(math.log(coin) / math.log1p(-gamma)) if gamma < 1 else 1


DISTRIBUTIONS: dict[str, Distribution] = {
    "geometric": Distribution(
        # After each run a coin says whether there is another.
        lambda one, runs: _truncated(one, runs, 1, math.log(runs)),
        lambda runs, coin, _: _geometric(math.log(runs), coin),
    ),
    "logarithmic": Distribution(
        lambda one, runs: _truncated(one, runs, 0, _logarithmic_tail(runs)),
        # A geometric whose gamma is itself drawn, as gamma to a uniform power.
        lambda runs, coin, power: _geometric(power * _logarithmic_tail(runs), coin),
    ),
    "poisson": Distribution(_poisson, lambda runs, coin, _: int(stats.poisson.ppf(coin, runs))),
}


def _checked(call: str, name: str, runs: float) -> tuple[Distribution, float]:
    hint = "A fixed number of runs costs all of them, accounting.compose(*events)."
    row = DISTRIBUTIONS[checks.one_of(call, "distribution", name, DISTRIBUTIONS, hint)]
    mean = checks.positive(call, "runs", runs, "It is the mean number.")
    if mean < 1:
        raise ValueError(f"{call}(runs={runs}): expected a mean number of 1 or more.")
    return row, mean

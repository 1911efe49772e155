# SPDX-License-Identifier: Apache-2.0
"""The cost of a search: several private runs, and only the best one is published.

The winner depends on what all runs learnt, even if scores come from public data. A *fixed* number
of runs costs their composition. A *random* number, from `draw_runs`, costs far less, because an
observer does not know how many runs the winner has beaten.
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
from dpjax.accounting import _rdp_accountant
from dpjax.accounting._event_parts import split
from dpjax.accounting._rdp_divergence import ORDERS
from dpjax.accounting.methods import epsilon
from dpjax.types import Key, Purpose


class Selection(NamedTuple):
    """The cost of a search, counted in three ways, at one delta.

    Attributes:
      epsilon_one: One run that was fixed beforehand; *not* the price of a search.
      epsilon_best: The best of a random number of runs, if only that run is published.
      epsilon_all: ``mean_runs`` runs (rounded up) composed; then all of them may be published.
      mean_runs: How many runs there are on average.
    """

    epsilon_one: float
    epsilon_best: float
    epsilon_all: float
    mean_runs: float


class Distribution(NamedTuple):
    """A distribution of the number of runs."""

    divergence: Callable[[np.ndarray, float], np.ndarray]
    """The curve of the best run, from the curve of one run and the mean number."""
    draw: Callable[[float, float, float], int]
    """A number of runs, from the mean number and two uniform numbers in (0, 1)."""


def select_best(
    event: DpEvent | Sequence[DpEvent],
    delta: float,
    *,
    runs: float,
    distribution: str = "geometric",
    neighbours: str = "add-or-remove",
) -> Selection:
    """The epsilon of running a training ``K`` times and publishing the best run, ``K`` random.

    With ``r`` the Rényi curve of one run, the best run has at every order ``a`` at most

        r(a) + (1 + eta) min_b [(1 - 1/b) r(b) + log(1/gamma) / b] + log(runs) / (a - 1)

    if ``K`` is geometric (``eta`` 1) or logarithmic (``eta`` 0), with ``gamma`` the parameter of
    that distribution and ``b`` over all orders. If ``K`` is Poisson, with ``delta_hat(epsilon)``
    the delta of one run, it is

        r(a) + runs * delta_hat(log(a / (a - 1))) + log(runs) / (a - 1)

    The order with the smallest epsilon gives the answer.

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
      4. Only the best run is published; with no run (Poisson), nothing or a constant.

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
    law_of_runs, runs = _checked(call, distribution, runs)
    checks.delta(call, delta)
    events = list(event) if isinstance(event, Iterable) else [event]  # of every candidate
    # Any candidate may be published, so the search pays for the most expensive one.
    epsilon_one = max(epsilon(run, delta, "rdp", neighbours) for run in events)
    if not math.isfinite(epsilon_one):
        return Selection(math.inf, math.inf, math.inf, runs)
    # The theorems take one divergence curve. The largest of all candidates bounds every run.
    curves = [_rdp_accountant.total(split(run), neighbours) for run in events]
    of_one_run = np.max(curves, axis=0)
    of_best_run = law_of_runs.divergence(of_one_run, runs)
    epsilon_best = _rdp_accountant.to_epsilon(of_best_run, delta)
    of_all_runs = math.ceil(runs) * of_one_run
    epsilon_all = _rdp_accountant.to_epsilon(of_all_runs, delta)
    return Selection(epsilon_one, epsilon_best, epsilon_all, runs)


def draw_runs(key: Key, runs: float, distribution: str = "geometric") -> int:
    """Draws how many runs a search makes, from the distribution that `select_best` accounts.

    ``key`` is from ``noise.secret_key()``, because it reveals the number, and is consumed. Only
    "poisson" can draw 0. Probabilities are right to ``2^-53``.

    Example:
      >>> [draw_runs(jax.random.key(seed), runs=10) for seed in range(6)]
      [18, 3, 1, 9, 13, 4]
    """
    law_of_runs, runs = _checked("accounting.draw_runs", distribution, runs)
    key = jax.random.fold_in(key, Purpose.RUNS)
    words = np.asarray(jax.random.bits(key, (2, 2), "uint32"), np.uint64)
    bits = words[:, 0] << 20 | words[:, 1] >> 12  # two numbers of 52 bits
    # Odd multiples of 2^-53 are exact in a double, and neither 0 nor 1.
    first, second = ((2 * bits + 1) / 2**53).tolist()
    return law_of_runs.draw(runs, first, second)


def _truncated(one: np.ndarray, runs: float, eta: float, tail: float) -> np.ndarray:
    """The curve by theorem 2, where ``tail`` is log(1 / gamma)."""
    # The second order b may be 1, where the factor of r is 0.
    b = np.append(1.0, ORDERS)
    r = np.append(0.0, one)
    least = np.min((1 - 1 / b) * r + tail / b)
    return one + (1 + eta) * least + math.log(runs) / (ORDERS - 1)


def _poisson_curve(one: np.ndarray, runs: float) -> np.ndarray:
    """The curve by theorem 6, at the largest epsilon_hat that it allows."""
    epsilon_hat = [math.log1p(1 / (a - 1)) for a in ORDERS]
    delta_hat = [_rdp_accountant.to_delta(one, epsilon) for epsilon in epsilon_hat]
    return one + runs * np.array(delta_hat) + math.log(runs) / (ORDERS - 1)


def _logarithmic_tail(runs: float) -> float:
    """The t = log(1 / gamma) of the logarithmic distribution with this mean, ``(e^t - 1) / t``."""
    # SciPy's inverse of this distribution does not terminate for a mean of 2,000 runs.
    bracket = (0.0, 2 * math.log(runs) + 2)
    return root_scalar(lambda t: exprel(t) - runs, bracket=bracket, xtol=1e-14).root


def _geometric(tail: float, coin: float) -> int:
    """The first success of tosses with probability ``gamma``; ``K > k`` if k tosses fail."""
    gamma = math.exp(-tail)
    if gamma == 1:
        return 1
    return 1 + math.floor(math.log(coin) / math.log1p(-gamma))


def _geometric_curve(one: np.ndarray, runs: float) -> np.ndarray:
    return _truncated(one, runs, 1, math.log(runs))


def _logarithmic_curve(one: np.ndarray, runs: float) -> np.ndarray:
    return _truncated(one, runs, 0, _logarithmic_tail(runs))


def _draw_geometric(runs: float, coin: float, unused: float) -> int:
    """A coin after each run decides whether there is another."""
    del unused
    return _geometric(math.log(runs), coin)


def _draw_logarithmic(runs: float, coin: float, power: float) -> int:
    """A geometric distribution, with gamma to a uniform power in place of gamma."""
    return _geometric(power * _logarithmic_tail(runs), coin)


def _draw_poisson(runs: float, coin: float, unused: float) -> int:
    del unused
    return int(stats.poisson.ppf(coin, runs))


DISTRIBUTIONS: dict[str, Distribution] = {
    "geometric": Distribution(_geometric_curve, _draw_geometric),
    "logarithmic": Distribution(_logarithmic_curve, _draw_logarithmic),
    "poisson": Distribution(_poisson_curve, _draw_poisson),
}


def _checked(call: str, name: str, runs: float) -> tuple[Distribution, float]:
    """The row of `DISTRIBUTIONS` and the mean number, checked."""
    hint = "A fixed number of runs costs all of them, accounting.compose(*events)."
    row = DISTRIBUTIONS[checks.one_of(call, "distribution", name, DISTRIBUTIONS, hint)]
    mean = checks.positive(call, "runs", runs, "It is the mean number.")
    if mean < 1:
        raise ValueError(f"{call}(runs={runs}): expected a mean number of 1 or more.")
    return row, mean

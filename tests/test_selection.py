# SPDX-License-Identifier: Apache-2.0
"""Keeping the best of many runs: its price against figures, proofs, truth and draws."""

import math

import jax
import numpy as np
import pytest
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from hypothesis import given
from hypothesis import strategies as st
from mutation import kills
from scipy import optimize, special, stats

from dpjax import accounting
from dpjax.accounting import draw_runs, select_best

MNIST = accounting.subsampled_gaussian(1.1, 256 / 60_000, 14_063)
SHAPES = {"geometric": 1.0, "logarithmic": 0.0, "poisson": math.inf}
ALL = pytest.mark.parametrize("distribution", SHAPES)


@kills("accounting/_selection.py", "(1 - 1 / b) * r + tail / b", "(1 - 1 / b) * r")
@pytest.mark.parametrize(("runs", "best"), [(10, 5.0490), (50, 6.0113)])
def test_published_figures_of_the_reference_run(runs, best):
    found = select_best(MNIST, 1e-5, runs=runs)
    assert found.epsilon_one == pytest.approx(2.5967, abs=5e-5)
    assert found.epsilon_best == pytest.approx(best, abs=5e-5)
    every = accounting.epsilon(accounting.compose(*[MNIST] * runs), 1e-5)
    assert found.epsilon_all == pytest.approx(every, rel=1e-9)
    assert found.mean_runs == runs


@ALL
@pytest.mark.parametrize("runs", [1.5, 10, 300])
def test_never_above_the_accounting_library_and_hardly_below(distribution, runs):
    event = RepeatAndSelectDpEvent(MNIST, runs, SHAPES[distribution])
    library = accounting.epsilon(event, 1e-5)
    ours = select_best(MNIST, 1e-5, runs=runs, distribution=distribution).epsilon_best
    assert 0.999 * library <= ours <= library + 1e-9


def log_inverse_gamma(runs, eta):
    """Of the distribution with this mean, in the paper's own variable."""
    if eta:
        return math.log(runs)
    excess = lambda g: (1 / g - 1) / -math.log(g) - runs  # noqa: E731
    return -math.log(optimize.root_scalar(excess, bracket=(1e-9, 1 - 1e-9), xtol=1e-16).root)


# --- the truth, for a run that releases one Gaussian number and wins by it ---


def slope(distribution, x, runs):
    """The derivative of the generating function of K: with it the law of the largest of K."""
    gamma = 1 / runs
    if distribution == "geometric":
        return gamma / (1 - (1 - gamma) * x) ** 2
    if distribution == "poisson":
        return runs * np.exp(runs * (x - 1))
    gamma = math.exp(-log_inverse_gamma(runs, 0))
    return (1 - gamma) / -math.log(gamma) / (1 - (1 - gamma) * x)


def true_delta(epsilon, z, runs, distribution):
    """What the best run tells about one example, in the worse direction, by quadrature."""
    y = np.linspace(-12, 14, 200_001)
    away, home = (
        slope(distribution, stats.norm.cdf(y - shift), runs) * stats.norm.pdf(y - shift)
        for shift in (1 / z, 0)
    )
    pairs = ((away, home), (home, away))
    return max(np.trapezoid(np.maximum(p - math.exp(epsilon) * q, 0), y) for p, q in pairs)


@pytest.mark.parametrize("z", [0.8, 3.0])
@pytest.mark.parametrize("runs", [2, 20])
@ALL
def test_no_less_than_what_the_best_of_them_truly_tells(distribution, runs, z):
    delta = 1e-3
    found = select_best(accounting.gaussian(z), delta, runs=runs, distribution=distribution)
    assert true_delta(found.epsilon_best, z, runs, distribution) <= delta


# --- laws ---

RUNS, NOISE = st.floats(1, 1000), st.floats(0.5, 20)


@pytest.mark.sample(1)
@given(z=NOISE, runs=st.tuples(RUNS, RUNS), deltas=st.tuples(*[st.floats(1e-9, 0.1)] * 2))
@ALL
def test_more_runs_and_a_smaller_delta_cost_more(distribution, z, runs, deltas):
    few, many = (
        select_best(accounting.gaussian(z), delta, runs=mean, distribution=distribution)
        for mean, delta in zip(sorted(runs), sorted(deltas, reverse=True), strict=True)
    )
    assert few.epsilon_best <= many.epsilon_best + 1e-9


@kills("accounting/_selection.py", "np.max(curves", "np.min(curves")
@ALL
def test_settings_that_may_be_drawn_cost_at_least_the_dearest_of_them(distribution):
    often = accounting.subsampled_gaussian(1.0, 0.01, 1000)
    strong = accounting.gaussian(4.0)
    both, back, one, other = (
        select_best(events, 1e-5, runs=5, distribution=distribution)
        for events in ([often, strong], [strong, often], often, strong)
    )
    assert both == back
    for field in ("epsilon_one", "epsilon_best", "epsilon_all"):
        assert getattr(both, field) >= max(getattr(one, field), getattr(other, field))


def test_what_is_bare_stays_bare_and_neighbours_are_passed_on():
    for event in (accounting.gaussian(0.0), [MNIST, accounting.gaussian(0.0)]):
        assert select_best(event, 1e-5, runs=3)[:3] == (math.inf,) * 3
    swapped = select_best(accounting.gaussian(4.0), 1e-5, runs=3, neighbours="replace-one")
    assert swapped == select_best(accounting.gaussian(2.0), 1e-5, runs=3)


# --- the number of runs ---


def masses(distribution, runs):
    """The probabilities of 0, 1, 2, ... runs, from the paper's definitions."""
    k = np.arange(500.0)
    if distribution == "poisson":
        return np.exp(k * math.log(runs) - runs - special.gammaln(k + 1))
    gamma = math.exp(-log_inverse_gamma(runs, SHAPES[distribution]))
    if distribution == "geometric":
        return np.where(k > 0, gamma * (1 - gamma) ** (k - 1), 0)
    return np.where(k > 0, (1 - gamma) ** k / np.maximum(k, 1) / -math.log(gamma), 0)


@pytest.mark.slow
@kills(
    "accounting/_selection.py", "(math.log(runs), coin)", "(math.log(2 * runs), coin)", slow=True
)
@pytest.mark.parametrize("runs", [1.3, 6])
@ALL
def test_numbers_are_drawn_from_the_distribution_that_is_accounted(distribution, runs):
    keys = jax.random.split(jax.random.key(5), 8000)
    drawn = np.array([draw_runs(key, runs, distribution) for key in keys])
    want = masses(distribution, runs) * len(drawn)
    likely = np.flatnonzero(want >= 8)
    seen = [np.sum(drawn == k) for k in likely] + [np.sum(~np.isin(drawn, likely))]
    wanted = [*want[likely], max(len(drawn) - want[likely].sum(), 1)]
    square = sum((s - w) ** 2 / w for s, w in zip(seen, wanted, strict=True))
    assert stats.chi2.sf(square, len(likely)) > 1e-3
    assert (drawn.min() == 0) == (distribution == "poisson")


# --- errors ---


@pytest.mark.parametrize(
    ("given", "teaches"),
    [
        ({"runs": 0.5}, r"runs=0\.5"),
        ({"distribution": "fixed"}, "geometric, logarithmic, poisson.*compose"),
        ({"neighbours": "replace-one"}, "RDP has no proof for Poisson sampling"),
    ],
)
def test_errors_say_what_to_do(given, teaches):
    with pytest.raises(ValueError, match=teaches):
        select_best(**{"event": MNIST, "delta": 1e-5, "runs": 5, **given})

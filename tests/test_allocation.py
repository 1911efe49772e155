# SPDX-License-Identifier: Apache-2.0
"""Random bins under correlated noise: the bound against exact divergences, and where it is used."""

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest
from mutation import kills
from small_mechanisms import mechanism_with

from dpjax import accounting, reports, sampling, strategies, verify
from dpjax.accounting._allocation import divergence
from dpjax.accounting._rdp_divergence import ORDERS
from dpjax.accounting.events import AllocatedGaussianDpEvent as Allocated

DELTA = 1e-4
STRATEGIES = {
    "white": strategies.white(12),
    "two bands": strategies.toeplitz(12, [1.0, 0.5]),
    "signs": strategies.toeplitz(12, [1.0, -0.5, 0.25]),
    "inverse": strategies.banded_inverse_square_root(12, bands=3),
    "tree": strategies.tree(12),
}


def mechanism(strategy, *, bins=6, **options):
    batches = options.pop("sampling", None) or sampling.balls_in_bins(120, 120 // bins)
    return mechanism_with(
        120, 20, sampling=batches, noise=strategy, steps=strategy.steps, **options
    )


def moved(strategy, bins, gradients):
    """How far the mean of each row moves for each bin, ``[bins, steps, coordinates]``."""
    here = np.arange(strategy.steps) % bins
    return np.stack(
        [strategy.matrix() @ (gradients * (here == b)[:, None]) for b in range(bins)]
    ).reshape(bins, -1)


def leaving(means, variance, order):
    """The exact divergence of a mixture of Gaussians from the one at zero; whole orders."""
    products = means @ means.T / variance
    tuples = np.array(list(itertools.product(range(len(means)), repeat=order)))
    exponents = sum(
        products[tuples[:, i], tuples[:, j]] for i, j in itertools.combinations(range(order), 2)
    )
    return np.log(np.mean(np.exp(exponents))) / (order - 1)


def by_quadrature(means, order):
    """Exact divergences of two bins in both directions, on a grid; means ``[2, 2]``, variance 1."""
    x = np.arange(-16, 16, 0.1)
    grid = np.stack(np.meshgrid(x, x, indexing="ij"), axis=-1)
    base = -np.sum(grid**2, axis=-1) / 2 - math.log(2 * math.pi) + 2 * math.log(0.1)
    ratio = np.logaddexp(*(grid @ m - m @ m / 2 for m in means)) - math.log(2)
    return [np.log(np.exp(base + n * ratio).sum()) / (order - 1) for n in (order, 1 - order)]


@kills("accounting/_allocation.py", "np.maximum(leaves, joins)", "joins", case="2-0.0-0.5")
@pytest.mark.sample(6)
@pytest.mark.parametrize("multiplier", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("shared", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("order", [1.5, 2, 3.7, 5])
def test_no_divergence_of_two_bins_is_above_the_bound(order, shared, multiplier):
    means = np.array([[1.0, 0.0], [shared, math.sqrt(1 - shared**2)]]) / multiplier
    bound = float(divergence(Allocated(multiplier, (1.0, shared)), np.array([order]))[0])
    exact = by_quadrature(means, order)
    assert max(exact) <= bound * (1 + 1e-6)
    assert bound <= order / (2 * multiplier**2)
    if order == 2:  # Hoelder's inequality over one factor loses nothing
        joins = (1 + (1 + shared) / 2) / (2 * multiplier**2)
        assert bound == pytest.approx(max(exact[0], joins), rel=1e-6)


@kills("strategies/strategy.py", "np.abs(self.matrix())", "self.matrix()", case="signs")
@kills("strategies/strategy.py", "[:, first::bins].sum(axis=1)", "[:, first]", case="white")
@pytest.mark.parametrize("name", STRATEGIES)
def test_no_gradients_move_a_run_by_more_than_its_overlaps(name):
    """Exact moments of any gradients within the bound, adversarial and random."""
    strategy, bins, rng = STRATEGIES[name], 3, np.random.default_rng(1)
    # `overlaps` are in bounds, and the event has sensitivities.
    shared = strategy.overlaps(bins)
    event = Allocated(1.3 / shared[0] ** 0.5, tuple((shared / shared[0]).tolist()))
    signs = np.sign(strategy.matrix()[-1])[:, None]
    steps = strategy.steps
    for gradients in (
        np.ones((steps, 1)),
        signs + (signs == 0),
        (-1.0) ** np.arange(steps)[:, None],
        *(g / np.linalg.norm(g, axis=1, keepdims=True) for g in rng.normal(size=(20, steps, 2))),
    ):
        means = moved(strategy, bins, gradients)
        for order in (2, 3, 4):
            bound = float(divergence(event, np.array([float(order)]))[0])
            assert leaving(means, 1.3**2, order) <= bound * (1 + 1e-9)


@kills("accounting/_allocation.py", "np.maximum(leaves, joins)", "leaves")
def test_an_example_that_joins_is_bounded_too():
    """By the Gaussian moment of the geometric mean of the likelihood ratios, row by row."""
    found = divergence(Allocated(2.0, (1.0, 0.3, 0.2)), np.array([1.01, 1.5]))
    joins = (1 + np.array([0.01, 0.5]) * 0.5) / 2 / 4
    assert np.all(found >= joins * (1 - 1e-12))
    # Of almost equal bins all orders are as for one.
    same = divergence(Allocated(2.0, (1.0, 1.0, 1.0)), ORDERS)
    np.testing.assert_allclose(same, ORDERS / 8, rtol=1e-9)


def test_bins_of_a_random_word_are_not_quite_uniform():
    """A bin can hold one word of 2^32 more than its share."""
    bins, precision = 1024, 25.0
    found = divergence(Allocated(0.2, (1.0, *[0.0] * (bins - 1))), np.array([2.0]))[0]
    likeliest = 1 / bins + 2.0**-32
    assert found >= math.log1p(likeliest * math.expm1(precision)) * (1 - 1e-12)


@kills("mechanism/correlated.py", "if not sampler.random_bins:", "if False:")
def test_bins_alone_are_amplified_and_where_they_differ():
    white = strategies.white(12)
    planned = mechanism(white, noise_multiplier=1.2)
    assert isinstance(planned.event, Allocated)
    np.testing.assert_allclose(planned.event.overlaps, [1, 0, 0, 0, 0, 0], atol=1e-8)
    assert planned.event_of(planned.multipliers[:1]) == planned.event, "a prefix costs the same"
    assert planned.epsilon_of(planned.multipliers[:0], DELTA) == 0
    known = sampling.curriculum(np.arange(120), 20, public=True)
    for sampler in (sampling.shuffled(120, 20), known, sampling.full(120)):
        fixed = mechanism(white, sampling=sampler, noise_multiplier=1.2)
        assert fixed.event == accounting.gaussian(1.2)
    # Columns that reach over the epoch hide nothing of the bin.
    wide = mechanism(strategies.toeplitz(12, np.ones(12)), noise_multiplier=1.2)
    assert wide.event == accounting.gaussian(1.2)


def test_other_relations_and_methods_take_the_bin_as_known():
    event = mechanism(STRATEGIES["two bands"], noise_multiplier=2.0).event
    twice = accounting.compose(event, event)
    plain = accounting.gaussian(2.0, 2)
    for method in ("rdp", "rdp-classic", "pld"):
        exchanged = accounting.epsilon(twice, DELTA, method, "replace-one")
        assert exchanged == accounting.epsilon(plain, DELTA, method, "replace-one")
    assert accounting.epsilon(twice, DELTA, "pld") <= accounting.epsilon(twice, DELTA, "rdp")
    large = 0.4  # where every bin is found
    loud = dataclasses.replace(event, noise_multiplier=large)
    assert accounting.epsilon(loud, DELTA, "pld") <= accounting.epsilon(
        accounting.gaussian(large), DELTA, "pld"
    )
    assert accounting.delta(event, 1.0, "pld") <= accounting.delta(event, 1.0)
    assert accounting.for_groups(event, 2) == accounting.gaussian(1.0)
    assert accounting.tightest(event) == "pld"
    bare = dataclasses.replace(event, noise_multiplier=0.0)
    assert accounting.epsilon(bare, DELTA) == math.inf
    with pytest.raises(ValueError, match="Gaussians only"):
        accounting.epsilon(event, DELTA, "gdp")


@kills("verify/_epsilon.py", "divergences + change_by_bins(run, ORDERS)", "divergences", slow=True)
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", STRATEGIES)
def test_verify_finds_what_bins_save(name):
    """The claim of a card is recomputed from the strategy and the number of bins on it."""
    for neighbours in (None, "replace-one"):
        planned = mechanism(STRATEGIES[name], noise_multiplier=3.0, neighbours=neighbours)
        least = min(planned.epsilon(DELTA, method) for method in ("rdp", "pld"))
        for methods in (["rdp"], ["pld"]):
            card = json.loads(json.dumps(reports.card(planned, DELTA, methods=methods)))
            assert all(good for good, _ in verify.findings(card)), list(verify.findings(card))
            for claim in card["epsilon"].values():
                claim["value"] = 0.97 * least
            assert not all(good for good, _ in verify.findings(card))

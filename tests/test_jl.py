# SPDX-License-Identifier: Apache-2.0
"""Norms from random projections: what is estimated, what it costs, and what is refused."""

import json
import math

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.integrate
import scipy.stats
from mutation import kills

import dpjax
from dpjax import accounting, clipping, ledger, noise, reports, sampling, trees, types, verify
from dpjax.accounting._random_projections import ProjectedGaussianDpEvent
from dpjax.data import Stream
from dpjax.mechanism import Spent

PARAMS = {"a": jnp.array([0.3, -0.2, 0.5]), "b": jnp.array(0.1)}
X = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)


def loss(w, x):
    return jnp.tanh(jnp.vdot(w["a"], x) + w["b"]) + 0.1 * jnp.sum(w["a"] ** 2 * x)


def mechanism_for(projections=20, bound=0.5, multiplier=1.0, sampler=None, **facts):
    usual = {"sampling": sampler or sampling.poisson(12, 6), "steps": 6}
    rule = clipping.jl(bound, projections)
    return dpjax.Mechanism(clipping=rule, noise_multiplier=multiplier, **{**usual, **facts})


def estimated(loss=loss, projections=3, bound=1.0, **options):
    return dpjax.clipped_grad(loss, clipping.jl(bound, projections), **options)


# The sum -------------------------------------------------------------------------------


def definition(rule, key, x):
    """Norms, factors and sum, from gradients that are written down."""
    gradients = jax.vmap(jax.grad(loss), (None, 0))(PARAMS, x)
    squares = 0.0
    for j in range(rule.projections):
        u = trees.random_like(
            noise.standard_normal, trees.step_key(key, types.Purpose.PROJECTIONS, j), PARAMS
        )
        squares += (gradients["a"] @ u["a"] + gradients["b"] * u["b"]) ** 2
    norms = jnp.sqrt(squares / rule.projections)
    factors = jnp.minimum(1, rule.bounds[0] / norms)
    return norms, factors, jax.tree.map(lambda g: jnp.tensordot(factors, g, 1), gradients)


@pytest.mark.slow
@kills(
    "gradients/_estimated_norms/jl.py",
    "PROJECTIONS, number)",
    "PROJECTIONS, 0 * number)",
    case="None",
    slow=True,
)
@pytest.mark.parametrize("microbatch_size", [None, 5])
def test_the_sum_is_that_of_the_definition(microbatch_size):
    rule, key = clipping.jl(1.2, 7), jax.random.key(3)
    clipped = dpjax.clipped_grad(loss, rule, microbatch_size=microbatch_size)
    found = clipped(PARAMS, X, np.arange(12) < 10, key=key)
    norms, factors, value = definition(rule, key, X[:10])
    np.testing.assert_allclose(found.norms[:10, 0], norms, rtol=1e-4)
    np.testing.assert_allclose(found.factors[:10, 0], factors, rtol=1e-4)
    assert 0 < np.sum(factors < 1) < 10
    assert not np.any(found.norms[10:])
    for name in value:
        np.testing.assert_allclose(found.value[name], value[name], rtol=1e-4, atol=1e-6)


@pytest.mark.thorough
@kills(
    "gradients/_estimated_norms/jl.py",
    "jnp.mean(jnp.square(products), axis=0)",
    "jnp.square(jnp.mean(jnp.abs(products), axis=0))",
    slow=True,
)
def test_estimates_follow_the_law_that_is_accounted():
    """M / |g| is sqrt(chi2_r / r), whatever the gradient."""
    rule, x = clipping.jl(1.0, 4), jnp.array([[3.0, 0.0, 0.0], [1.0, -2.0, 0.5]])
    clipped = dpjax.clipped_grad(lambda w, x: jnp.vdot(w, x), rule)
    keys = jax.random.split(jax.random.key(0), 3000)
    norms = jax.jit(lambda keys: jax.lax.map(lambda k: clipped(jnp.zeros(3), x, key=k).norms, keys))
    ratios = np.asarray(norms(keys))[:, :, 0] / np.linalg.norm(x, axis=1)
    for column in ratios.T:
        test = scipy.stats.kstest(4 * column.astype(np.float64) ** 2, scipy.stats.chi2(4).cdf)
        assert test.pvalue > 1e-3


def broken_forward(w, x):
    return jnp.vdot(w["a"], x) * jnp.where(x[0] > 100, jnp.nan, 1.0)


def broken_backward(w, x):
    """Sound in forward mode; in reverse mode 0 times infinity."""
    far = x[0] > 100
    length = jnp.where(far, 0 * w["b"], 1 + w["b"] ** 2)
    return jnp.vdot(w["a"], x) / 1000 + jnp.where(far, 0.0, jnp.sqrt(length))


@pytest.mark.slow
@kills(
    "gradients/_estimated_norms/jl.py",
    "_is_finite(clipped_sum),",
    "True | _is_finite(clipped_sum),",
    case="broken_backward",
    slow=True,
)
@pytest.mark.parametrize("broken", [broken_forward, broken_backward])
def test_a_broken_example_leaves_the_others_as_they_are(broken):
    x = jnp.asarray(X).at[2, 0].set(1000.0)
    clipped = dpjax.clipped_grad(broken, clipping.jl(0.5, 7))
    key, mask = jax.random.key(3), np.arange(12) != 2
    sums = [clipped(PARAMS, *batch, key=key).value for batch in ((x,), (x, mask), (X[mask],))]
    for one, two, three in zip(*map(jax.tree.leaves, sums), strict=True):
        assert np.all(np.isfinite(one))
        np.testing.assert_allclose(one, two, rtol=1e-5)
        np.testing.assert_allclose(one, three, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_steps_in_memory_and_from_a_stream_are_the_same_and_their_directions_differ():
    found = []
    for data, size in ((X, None), (X, 5), (Stream(X), 5)):
        algorithm = dpjax.dpsgd(loss, optax.sgd(0.1), mechanism_for(), data, microbatch_size=size)
        state, infos = algorithm.run(algorithm.init(PARAMS, jax.random.key(1)), 6)
        found.append((state.params, infos.norm))
    jax.tree.map(lambda *x: [np.testing.assert_allclose(x[0], y, rtol=1e-4) for y in x[1:]], *found)


@pytest.mark.slow
@kills("training/step.py", "PROJECTIONS, state.step", "PROJECTIONS, 0 * state.step", slow=True)
def test_a_step_draws_directions_of_its_own():
    mechanism = mechanism_for(sampler=sampling.full(12), multiplier=0.0, projections=3)
    algorithm = dpjax.dpsgd(loss, optax.sgd(0.0), mechanism, X)
    state, root = algorithm.init(PARAMS, jax.random.key(1)), jax.random.key(1)
    for step in range(3):
        state, info = algorithm.step(state)
        key = trees.step_key(root, types.Purpose.PROJECTIONS, step)
        want = definition(mechanism.clipping, key, X)[0].mean()
        assert float(info.norm[0]) == pytest.approx(float(want), rel=1e-4)


def test_products_are_not_rounded_by_accelerators():
    clipped = estimated(projections=2)
    found = str(jax.make_jaxpr(lambda p: clipped(p, X, key=jax.random.key(0)).value)(PARAMS))
    products = found.count("dot_general[")
    assert products > 1
    assert found.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") == products


def in_bfloat16(w, x):
    return jnp.vdot(w.astype(jnp.bfloat16), x.astype(jnp.bfloat16)).astype(jnp.float32)


@jax.custom_jvp
def backwards_in_bfloat16(w):
    return w


backwards_in_bfloat16.defjvps(lambda t, _, w: t.astype(jnp.bfloat16).astype(jnp.float32))


NARROWER = {
    "a cast": (in_bfloat16, "bfloat16"),
    "a cast inside": (jax.checkpoint(in_bfloat16), "bfloat16"),
    "a rule": (lambda w, x: jnp.vdot(backwards_in_bfloat16(w), x), "bfloat16"),
}


@pytest.mark.parametrize("name", NARROWER)
def test_a_model_that_would_round_the_sum_is_refused(name):
    """In bfloat16 a sum near 256 moves by 2 or not at all, whatever an example's bound is."""
    narrower, what = NARROWER[name]
    with pytest.raises(TypeError, match=f"computes in {what}.*; expected float32 or wider"):
        estimated(narrower)(jnp.zeros(3), X, key=jax.random.key(0))


# What it costs -------------------------------------------------------------------------


def published(projections):
    event = accounting.subsampled_gaussian(1.1, 256 / 60_000, 14_063)
    return accounting.epsilon(accounting.with_projections(event, projections), 1e-5, "pld")


@pytest.mark.parametrize("multiplier", [0.0, 1e-160])
def test_estimated_norms_without_noise_have_no_epsilon(multiplier):
    event = accounting.with_projections(accounting.gaussian(multiplier), 100)
    assert type(accounting.with_projections(accounting.gaussian(1.0), 100.0).projections) is int
    assert accounting.epsilon(event, 1e-5, "pld") == math.inf


# By an independent computation, that rounds otherwise; 2.3818 with exact norms.
TABLE = [(5, math.inf), (10, 16.2888), (20, 3.4979), (30, 2.7292), (50, 2.5535), (100, 2.4677)]


@pytest.mark.slow
@pytest.mark.parametrize(("projections", "want"), TABLE)
def test_the_published_run_with_fewer_projections(projections, want):
    assert 0.99 * want <= published(projections) <= 1.002 * want  # both are upper bounds


@kills(
    "accounting/_random_projections.py",
    " or (q == 1 and _chance_unprotected(z, r) >= _RARE):",
    ":",
    case="1",
)
@pytest.mark.parametrize("projections", [1, 2, 3])
def test_without_sampling_few_projections_prove_nothing(projections):
    """A scale that is taken for laid bare is likelier than anything is proved for."""
    event = ProjectedGaussianDpEvent(0.2, projections)
    assert accounting.epsilon(event, 1e-5, "pld") == math.inf
    assert accounting.delta(event, 1.0, "pld") == 1.0


def test_runs_with_equal_steps_compose():
    step = ProjectedGaussianDpEvent(40.0, 30)
    two_runs = dp_accounting.ComposedDpEvent(
        [dp_accounting.SelfComposedDpEvent(step, n) for n in (2, 3)]
    )
    one_run = dp_accounting.SelfComposedDpEvent(step, 5)
    together = accounting.epsilon(two_runs, 1e-5, "pld")
    assert together == pytest.approx(accounting.epsilon(one_run, 1e-5, "pld"), rel=1e-9)


@pytest.mark.slow
def test_one_step_costs_the_mean_over_the_scale():
    """delta = E_s delta_Gauss(z / s), by an integral over the density of chi2."""
    z, r, normal = 1.5, 12, scipy.stats.norm

    def integrand(x, epsilon):
        mu = math.sqrt(r / x) / z
        upper, lower = normal.cdf(np.array([mu / 2, -mu / 2]) - epsilon / mu)
        return (upper - math.exp(epsilon) * lower) * scipy.stats.chi2(r).pdf(x)

    for epsilon in (0.5, 2.0):
        want = scipy.integrate.quad(integrand, 1e-3, 100, args=(epsilon,))[0]
        found = accounting.delta(ProjectedGaussianDpEvent(z, r), epsilon, "pld")
        assert want <= found <= 1.06 * want


@pytest.mark.parametrize("method", ["rdp", "rdp-classic", "gdp"])
def test_no_other_method_has_a_number(method):
    mechanism = mechanism_for()
    algorithm = dpjax.dpsgd(loss, optax.sgd(0.1), mechanism, X)
    state = algorithm.init(PARAMS, jax.random.key(0))
    for answer in (
        lambda: mechanism.epsilon(1e-5, method),
        lambda: mechanism.delta(1.0, method),
        lambda: accounting.select_best(mechanism.event, 1e-5, runs=3),
        lambda: dpjax.fit(algorithm, state, method=method),
    ):
        with pytest.raises(ValueError, match="no answer for random projections"):
            answer()


@kills(
    "mechanism/spent.py",
    "return accounting.with_projections(event, projections)",
    "return event",
    slow=True,
)
def test_the_event_says_how_norms_were_known():
    mechanism = mechanism_for(multiplier=2.0, sampler=sampling.full(12))
    assert mechanism.event.event == ProjectedGaussianDpEvent(2.0, 20)
    spent = mechanism.spent(mechanism.multipliers)
    assert spent.event == mechanism.event
    assert Spent.of_run(mechanism.facts, 1)[0].projections == 20
    assert mechanism_for(multiplier=0.0).epsilon(1e-5, "pld") == math.inf


@pytest.mark.slow
def test_statement_and_card_say_what_is_proved():
    mechanism = mechanism_for(40, multiplier=8.0, steps=1)
    text = dpjax.statement(mechanism, 1e-5)
    for words in ("moves the sum by about 0.5", "from 40 random projections", "by pld alone"):
        assert words in text
    assert "rdp:" not in text
    card = reports.card(mechanism, 1e-5)
    assert card["mechanism"]["projections"] == 40
    assert set(card["epsilon"]) == {"pld"}
    with pytest.raises(verify.Unreadable, match="nothing is recomputed"):
        list(verify.findings(json.loads(json.dumps(card))))


@pytest.mark.slow
def test_a_budget_holds():
    mechanism = mechanism_for(40, multiplier=3.0, steps=30)
    budget = ledger.Budget(epsilon=2.0, delta=1e-5, method="pld")
    fits = ledger.affordable(mechanism, budget)
    assert 0 < fits < 30
    assert mechanism.epsilon_of(mechanism.multipliers[:fits], 1e-5, "pld") <= 2.0


def swapped():
    return mechanism_for(multiplier=8.0, neighbours="replace-one")


ADAPTIVE = {"adaptive": clipping.Quantile(count_multiplier=9.0)}
NARROW = jnp.zeros(3, jnp.bfloat16)
GAUSSIANS = "compose with Gaussians only"
NO_PROOF = "no proof for 'replace-one'"
MIXED = [mechanism_for(multiplier=8.0).event, dp_accounting.LaplaceDpEvent(1.0)]
MIXED = dp_accounting.ComposedDpEvent(MIXED)
FIXED = mechanism_for(sampler=sampling.fixed(12, 6))
TEACHES = [
    (lambda: clipping.jl(1.0, 0), ValueError, "at least 1. 30 directions and more are usual"),
    (lambda: estimated()(PARAMS, X), ValueError, "need a key"),
    (lambda: mechanism_for(**ADAPTIVE), ValueError, "norms are estimated"),
    (lambda: swapped().epsilon(1e-5, "pld"), ValueError, NO_PROOF),
    (lambda: swapped().delta(1.0, "pld"), ValueError, NO_PROOF),
    (lambda: accounting.epsilon(MIXED, 1e-5, "pld"), ValueError, GAUSSIANS),
    (lambda: FIXED.event, ValueError, "nothing is proved for estimated norms"),
    (
        lambda: estimated(jnp.vdot)(NARROW, X, key=jax.random.key(0)),
        TypeError,
        "expected float32 or wider",
    ),
]


@pytest.mark.parametrize(("act", "error", "message"), TEACHES)
def test_errors_teach(act, error, message):
    with pytest.raises(error, match=message):
        act()

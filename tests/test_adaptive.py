# SPDX-License-Identifier: Apache-2.0
"""Adapted bounds: they go where the norms are, and what that costs is in the epsilon."""

import json
import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from mutation import kills
from small_mechanisms import mechanism_with

from dpjax import (
    Mechanism,
    accounting,
    clipping,
    dpsgd,
    noise,
    reports,
    sampling,
    schedules,
    statement,
    testing,
    trees,
    types,
)
from dpjax.clipping import Quantile
from dpjax.data import Stream


def linear(w, x):
    """The gradient of an example is the example."""
    return jnp.vdot(w, x)


def make(data, *, multiplier=1.0, bound=1.0, steps=20, sampler=None, quantile=None, **options):
    facts = {"clipping": clipping.flat(bound), "noise_multiplier": multiplier, "steps": steps}
    adaptive = quantile or Quantile(count_multiplier=8.0)
    sampler = sampler or sampling.full(len(data))
    mechanism = mechanism_with(sampling=sampler, adaptive=adaptive, **facts)
    return dpsgd(linear, optax.sgd(1.0), mechanism, data, **options)


def summed(mechanism, total):
    return clipping.trusted_sum(total, mechanism.clipping)


def start(algorithm, size, seed=0):
    return algorithm.init(jnp.zeros(size), jax.random.key(seed))


def silent(**settings):
    """A quantile whose count has no noise, for a mechanism that has none either."""
    return Quantile(count_multiplier=0.0, **settings)


# Where the bound goes ------------------------------------------------------------------

# Trajectories that are published with the records 8.5 and 7.25, and 5 and 2.5.
TRAJECTORIES = [
    (10.0, [8.5, 7.25], {"rate": 0.1, "geometric": False}, [10, 9, 8, 7.5, 7, 7]),
    (16.0, [5.0, 2.5], {"rate": math.log(2)}, [16, 8, 4, 2.8284, 2, 2]),
]


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize(("bound", "records", "settings", "want"), TRAJECTORIES)
@pytest.mark.parametrize("streamed", [False, True])
def test_the_bound_takes_the_published_ways(bound, records, settings, want, streamed):
    data = np.array(records, np.float32)[:, None]
    options = {"multiplier": 0.0, "bound": bound, "quantile": silent(target=0.0, **settings)}
    algorithm = make(Stream(data) if streamed else data, **options)
    state, found = start(algorithm, 1), [bound]
    for _ in want[1:]:
        state, _ = algorithm.step(state)
        found += algorithm.released(state)["bound"].tolist()
    np.testing.assert_allclose(found, want, rtol=1e-4)


@pytest.mark.thorough
@kills("training/recipe.py", "return state.bound_scale\n", "return 1.0\n", slow=True)
def test_sums_are_clipped_to_the_bound_of_their_step():
    """Records 8.5 and -7.25 at the bounds 10, 9, 8, 7.5 and 7."""
    quantile = silent(target=0.0, rate=0.1, geometric=False)
    algorithm = make(jnp.array([[8.5], [-7.25]]), multiplier=0.0, bound=10.0, quantile=quantile)
    state, sums = start(algorithm, 1), []
    for _ in range(5):
        before = state.params
        state, _ = algorithm.step(state)
        sums.append(float(2 * (before - state.params)[0]))
    np.testing.assert_allclose(sums, [1.25, 1.25, 0.75, 0.25, 0], atol=1e-5)


@pytest.mark.slow
def test_it_finds_the_quantile_wherever_it_begins():
    norms = np.exp(0.7 * np.random.default_rng(0).normal(size=2000))
    data = jnp.asarray(norms[:, None] * np.array([0.6, 0.8]), jnp.float32)
    for bound in (0.01, 50.0):
        options = {"steps": 200, "sampler": sampling.poisson(2000, 400)}
        quantile = Quantile(target=0.2, count_multiplier=40.0)
        algorithm = make(data, bound=bound, quantile=quantile, **options)
        state, _ = algorithm.run(start(algorithm, 2), 200)
        (found,) = algorithm.released(state)["bound"]
        assert abs(np.mean(norms <= found) - 0.2) < 0.06


@pytest.mark.thorough
def test_one_scale_moves_the_bounds_of_all_groups():
    """Of four pairs of example and group three are below: a fraction of 3/4."""
    params = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    mechanism = mechanism_with(
        sampling=sampling.full(2),
        clipping=clipping.per_group((1.0, 3.0), clipping.by_leaf(params)),
        noise_multiplier=0.0,
        steps=3,
        adaptive=silent(target=0.5, rate=1.0),
    )
    data = {"a": jnp.array([[0.5], [2.0]]), "b": jnp.array([[2.9], [0.1]])}
    loss = lambda w, x: jnp.sum(w["a"] * x["a"] + w["b"] * x["b"])  # noqa: E731
    algorithm = dpsgd(loss, optax.sgd(1.0), mechanism, data)
    state, _ = algorithm.step(algorithm.init(params, jax.random.key(0)))
    want = np.array([1.0, 3.0]) * math.exp(-0.25)
    np.testing.assert_allclose(algorithm.released(state)["bound"], want, rtol=1e-6)


def test_a_bound_goes_no_further_than_it_can_be_divided_by():
    quantile = Quantile(rate=np.float32(3.0), target=jnp.float32(0.5))
    assert json.dumps(vars(quantile)), "cards hold Python's numbers"
    assert float(quantile.moved(jnp.float32(2e-6), 1.0)) == pytest.approx(1e-6)
    assert float(quantile.moved(jnp.float32(9e5), 0.0)) == pytest.approx(1e6)


# What one example can do to the count --------------------------------------------------

EXTREMES = st.sampled_from([0.0, math.inf, math.nan, 1e30, 1e-30, 1.0])
VALUES = st.one_of(EXTREMES, st.floats(0, 10, width=32))


@kills("clipping/quantile.py", "axis=-1) - 0.5", "axis=-1)")
@pytest.mark.parametrize("rule", [clipping.flat(1.0), clipping.per_group((0.5, 1.0, 2.0), 3)])
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=30)
def test_no_example_moves_the_count_by_more_than_a_half(rule, data):
    shape = (5, rule.partition.size)
    norms = jnp.asarray(data.draw(hnp.arrays(np.float32, shape, elements=VALUES)))
    quantile, everyone = Quantile(), np.ones(5, bool)
    whole = float(quantile.below(rule, norms, everyone))
    for i in range(5):
        rest = float(quantile.below(rule, norms, np.arange(5) != i))
        assert abs(whole - rest) <= 0.5 + 1e-6
        alone = float(quantile.below(rule, norms[i][None], np.ones(1, bool)))
        assert whole - rest == pytest.approx(alone, abs=1e-6)


# Noise: of the sum, and of the count ---------------------------------------------------


def beside(total, count):
    return 1 / math.sqrt(total**-2 - count**-2)


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize("scheduled", [False, True])
def test_the_noise_of_the_mean_is_what_the_count_leaves_times_the_bound(scheduled):
    size, data = 1_000_000, jnp.zeros((3, 1))
    totals = [1.5, 1.2, 0.9] if scheduled else [1.5] * 3
    mechanism = mechanism_with(
        3,
        1.5,
        clipping=clipping.flat(0.5),
        noise_multiplier=schedules.table(np.array(totals)) if scheduled else 1.5,
        steps=3,
        adaptive=Quantile(count_multiplier=2.0),
    )
    loss = lambda w, x: w[0] * x[0]  # noqa: E731
    algorithm = dpsgd(loss, optax.sgd(1.0), mechanism, data)
    state = start(algorithm, size)
    for t, total in enumerate(totals):
        (bound,) = algorithm.released(state)["bound"]
        assert (bound == 0.5) == (t == 0)
        before = state.params
        state, _ = algorithm.step(state)
        found = float(np.std(np.asarray(state.params - before, np.float64)))
        assert found == pytest.approx(beside(total, 2.0) * bound / 1.5, rel=0.005)
    np.testing.assert_allclose(state.ledger.expand(), totals, rtol=1e-6)


@pytest.mark.thorough
def test_each_group_gets_its_share_of_what_is_left():
    params = {"a": jnp.zeros(400_000), "b": jnp.zeros(400_000)}
    mechanism = mechanism_with(
        sampling=sampling.full(10),
        clipping=clipping.per_group((1.0, 2.0), clipping.by_leaf(params)),
        noise_multiplier=(2.0, 1.5),
        steps=1,
        adaptive=Quantile(count_multiplier=2.0),
    )
    link = mechanism.privatize()
    total = summed(mechanism, params)
    mean, _ = link.update(total, link.init(params), below=jnp.float32(0))
    found = [np.std(mean[name]) * 10 / bound for name, bound in (("a", 1.0), ("b", 2.0))]
    assert mechanism.multipliers[0] == pytest.approx(1.2)
    assert accounting.effective_multiplier([*found, 2.0]) == pytest.approx(1.2, rel=0.005)
    assert found[0] / found[1] == pytest.approx(2.0 / 1.5, rel=0.005)
    np.testing.assert_allclose(
        np.array(mechanism.deviations_on_mean(0)) * 10, found * np.array([1, 2]), rtol=0.005
    )


def fractions(mechanism, below, seeds, steps=1):
    """The noised fractions of many runs, ``[seeds, steps]``, read off the scale that moved."""
    quantile = mechanism.adaptive

    def run(key):
        link, seen = mechanism.privatize(key), []
        state = link.init(jnp.zeros(1))
        for _ in range(steps):
            before = state.scale
            _, state = link.update(summed(mechanism, jnp.zeros(1)), state, below=below)
            seen.append(quantile.target - jnp.log(state.scale / before) / quantile.rate)
        return jnp.stack(seen)

    keys = jax.vmap(jax.random.key)(jnp.arange(seeds))
    return np.asarray(jax.jit(lambda keys: jax.lax.map(run, keys))(keys), np.float64)


@kills("mechanism/link.py", "multiplier / 2 * drawn", "0 * drawn", slow=True)
def test_the_noise_of_the_count_is_its_multiplier_times_a_half():
    mechanism = make(jnp.zeros((100, 1)), quantile=Quantile(count_multiplier=8.0)).mechanism
    seen = fractions(mechanism, jnp.float32(30.0), 20_000)
    assert seen.mean() == pytest.approx(0.5 + 30 / 100, abs=0.001)
    assert seen.std() == pytest.approx(8.0 / 2 / 100, rel=0.02)


@kills("mechanism/link.py", "Purpose.COUNT", "Purpose.NOISE", slow=True)
def test_the_count_draws_from_a_stream_of_its_own():
    """That of (key, its own purpose, step), so that a resumed run draws the same."""
    mechanism = make(jnp.zeros((100, 1))).mechanism
    found = fractions(mechanism, jnp.float32(0), 1, steps=2)[0]
    keys = [trees.step_key(jax.random.key(0), types.Purpose.COUNT, t) for t in range(2)]
    drawn = np.array([noise.standard_normal(key, ()) for key in keys])
    np.testing.assert_allclose(found, 0.5 + 8.0 / 2 * drawn / 100, rtol=1e-4)
    assert types.Purpose.COUNT not in (types.Purpose.NOISE, types.Purpose.SAMPLING)


def test_a_step_that_is_not_planned_moves_no_bound():
    mechanism = make(jnp.zeros((10, 1)), steps=1, multiplier=0.5).mechanism
    link, total = mechanism.privatize(), summed(mechanism, jnp.zeros(1))
    update = jax.jit(lambda state: link.update(total, state, below=jnp.float32(3))[1])
    state = update(link.init(jnp.zeros(1)))
    assert np.isfinite(state.scale)
    assert np.isnan(update(state).scale)


# Accounting ----------------------------------------------------------------------------


def described(**changes):
    return mechanism_with(2000, 100, steps=100, **changes)


def test_the_total_is_what_is_accounted():
    plain, adaptive = described(), described(adaptive=Quantile(count_multiplier=3.0))
    assert adaptive.epsilon(1e-5) == plain.epsilon(1e-5)
    both = (adaptive.gradient_multiplier, adaptive.count_multiplier)
    assert accounting.effective_multiplier(both) == pytest.approx(1.0, rel=1e-9)
    assert adaptive.gradient_multiplier > 1
    assert plain.gradient_multiplier == 1.0


@pytest.mark.slow
def test_calibration_finds_the_same_total_and_leaves_the_count_alone():
    plain, adaptive = described(), described(adaptive=Quantile(count_multiplier=3.0))
    one, two = plain.calibrate(1.5, 1e-5), adaptive.calibrate(1.5, 1e-5)
    assert one.noise_multiplier == two.noise_multiplier
    assert two.adaptive == adaptive.adaptive
    assert two.count_multiplier == 3.0
    with pytest.raises(ValueError, match="count_multiplier above"):
        adaptive.calibrate(0.1, 1e-5)


def test_the_usual_count_costs_little_at_any_noise():
    for total in (0.5, 5.0, 500.0):  # a tenth of the batch is 10
        adapted = described(noise_multiplier=total, adaptive=Quantile())
        assert adapted.gradient_multiplier <= 1.04 * total


def test_statement_card_and_facts_name_both_noises():
    mechanism = described(adaptive=Quantile(target=0.7, count_multiplier=3.0))
    text = statement(mechanism, 1e-5)
    noises = f"{beside(1.0, 3.0):.4g} on the sum", "3 on the count"
    for words in ("at first", "0.7 of the norms are below", *noises):
        assert words in text
    assert "at first" not in statement(described(), 1e-5)
    assert "andrew2021differentially" in text
    card = json.loads(json.dumps(reports.card(mechanism, 1e-5)))
    assert card["mechanism"]["multiplier_and_steps"] == [[1.0, 100]]
    assert card["mechanism"]["adaptive"]["count_multiplier"] == 3.0
    assert mechanism.facts["adaptive"]["target"] == 0.7
    assert described().facts["adaptive"] is None


# What it refuses -----------------------------------------------------------------------

X = np.random.default_rng(1).normal(size=(60, 3)).astype(np.float32)


def uncounted():
    mechanism = described(adaptive=Quantile())
    link = mechanism.privatize()
    return link.update(summed(mechanism, jnp.zeros(1)), link.init(jnp.zeros(1)))


UNBOUNDED = {"clipping": clipping.flat(math.inf), "noise_multiplier": 0.0, "adaptive": Quantile()}
TEACHES = [
    (lambda: Quantile(target=1.5), "fraction from 0 to 1"),
    (lambda: Quantile(rate=0.0), "expected a finite number above 0"),
    (lambda: Quantile(count_multiplier=math.inf), "expected a finite number, 0 or more"),
    (lambda: described(adaptive=Quantile(count_multiplier=1.0)), "count_multiplier above 1"),
    (lambda: described(**UNBOUNDED), "expected a positive, finite bound"),
    (lambda: make(X, bound_schedule=lambda step: 1.0), "Leave one out"),
    (uncounted, "update needs the count of the batch"),
]


@pytest.mark.parametrize(("act", "message"), TEACHES)
def test_errors_teach(act, message):
    with pytest.raises((TypeError, ValueError), match=message):
        act()


@pytest.mark.thorough
def test_a_loop_that_passes_the_count_is_private():
    """The count is released too, so two batches with one release have one count."""
    rule, quantile = clipping.flat(1.0), clipping.Quantile(count_multiplier=13.0)
    mechanism = Mechanism(
        sampling=sampling.poisson(100, 10),
        clipping=rule,
        noise_multiplier=1.3,
        steps=20,
        adaptive=quantile,
    )
    link = mechanism.privatize()

    def update(gradients, state, params=None):
        scaled = jax.tree.map(lambda g: g / state.scale, gradients)
        total, norms, _ = clipping.clip(rule, scaled)
        below = quantile.below(rule, norms, jnp.ones(len(norms), bool))
        total = clipping.trusted_sum(total, rule)
        mean, after = link.update(total, state, params, below=below)
        return jax.tree.map(lambda m: m * state.scale, mean), after

    testing.assert_private(optax.GradientTransformation(link.init, update), jnp.ones(5))

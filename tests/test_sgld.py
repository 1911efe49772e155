# SPDX-License-Identifier: Apache-2.0
"""Langevin dynamics: the posterior is the known one, and the noise is what is paid for."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from killable_runs import dies_after
from mutation import kills

import dpjax
from dpjax import accounting, clipping, ledger, noise, sampling, schedules, training, trees

MNIST = {"examples": 60_000, "batch_size": 256}
WIDE = clipping.flat(1000.0)  # never clips here


def square(w, x):
    """The negative log-likelihood of x ~ N(w, I)."""
    return 0.5 * jnp.sum((w - x) ** 2)


def flat(w, x):
    """A likelihood that says nothing: what moves is noise alone."""
    return 0.0 * sum(map(jnp.sum, jax.tree.leaves(w))) * jnp.sum(x)


def after(algorithm, steps, start, key=0):
    """The state after these steps, in one dispatch."""
    state = algorithm.init(start, jax.random.key(key))
    return algorithm.run(trees.copy(state), steps)


def chain(loss=flat, rate=1e-4, rule=WIDE, steps=4, data=None, batch=2.0, **more):
    data = np.zeros((10, 3), np.float32) if data is None else data
    more = {"prior_deviation": math.inf, **more}
    return training.dp_sgld(
        loss, rate, sampling.poisson(len(data), batch), rule, steps, data, **more
    )


class TestThePosterior:
    """x_i ~ N(w, I), w ~ N(0, s^2): mean and variance are known, in each of 4,000 dimensions."""

    examples, deviation = 50, 0.3
    precision = examples + deviation**-2

    @pytest.fixture(scope="class", params=[1.0, 0.25], ids=["posterior", "colder"])
    @classmethod
    def run(cls, request):
        data = np.random.default_rng(0).normal(2.0, 1.0, (cls.examples, 4000)).astype(np.float32)
        # Steps this small wander slowly (200 steps to forget) and are 1 % too wide.
        algorithm = chain(
            square,
            0.02 / cls.precision,
            data=data,
            batch=25.0,
            steps=4000,
            prior_deviation=cls.deviation,
            temperature=request.param,
            samples=50,
            burn_in=1000,
        )
        state, info = after(algorithm, 4000, jnp.zeros(4000))
        assert not np.any(info.clipped)
        return request.param, data, training.samples(state)

    @pytest.mark.slow
    def test_the_mean_is_shrunk_by_the_prior_as_it_should(self, run):
        _, data, draws = run
        mean = data.sum(0) / self.precision
        assert draws.shape == (50, 4000)
        assert np.mean(draws.mean(0) - mean) == pytest.approx(0, abs=0.003)
        assert np.std(draws.mean(0) - mean) < 0.5 * self.precision**-0.5

    @pytest.mark.slow
    def test_the_variance_is_that_of_the_posterior_to_the_power_one_over_t(self, run):
        temperature, data, draws = run
        mean = data.sum(0) / self.precision
        variance = np.mean(np.square(draws - mean))
        assert variance == pytest.approx(temperature / self.precision, rel=0.03)


DECAY = optax.exponential_decay(4e-4, 1, 0.5)


@pytest.mark.sample(1)
@kills("noise/langevin.py", "scale / math.sqrt(learning_rate)", "scale", case="constant", slow=True)
@pytest.mark.parametrize(
    ("rate", "rule", "temperature"),
    [
        (2e-4, clipping.flat(1.0), 1.0),
        (DECAY, clipping.flat(0.5), 1.0),
        (0.3, clipping.grouped(2.0, groups=2), 4.0),
    ],
    ids=["constant", "decaying", "grouped and hot"],
)
def test_the_noise_is_the_root_of_the_rate_through_the_whole_chain(rate, rule, temperature):
    algorithm = chain(rate=rate, rule=rule, temperature=temperature)
    before = {"a": jnp.zeros(150_000), "b": jnp.zeros((2, 75_000))}
    state = algorithm.init(before, jax.random.key(0))
    for step in range(4):
        state, _ = algorithm.step(state)
        expected = math.sqrt(temperature * (rate(step) if callable(rate) else rate))
        for name in before:
            moved = np.asarray(state.params[name] - before[name])
            assert np.std(moved) == pytest.approx(expected, rel=0.01)
        before = state.params


def test_the_link_and_the_multiplier_are_one():
    """`noise.langevin` on sums, in a chain of one's own."""
    rule, rate, size = clipping.flat(2.0), 3e-4, {"examples": 500, "batch_size": 20}
    link = noise.langevin(rate, rule, **size, key=jax.random.key(0))
    zeros = jnp.zeros(300_000)
    noisy, _ = link.update(clipping.trusted_sum(zeros, rule), link.init(zeros))
    assert np.std(noisy / 20 * rate * 500 / 2) == pytest.approx(rate**0.5, rel=0.01)
    multiplier = noise.langevin_multiplier(rate, rule, **size)
    assert np.std(noisy) == pytest.approx(multiplier * rule.sensitivity, rel=0.01)


GOLDEN = [(6.018e-5, 1.1, 2.3819), (1e-5, 2.6985, 0.7068)]


@pytest.mark.sample(1)
@kills("noise/langevin.py", "2 * batch_size", "batch_size", case="1e-05-2.6985-0.7068")
@pytest.mark.parametrize(("rate", "multiplier", "epsilon"), GOLDEN)
def test_what_a_step_size_costs(rate, multiplier, epsilon):
    got = noise.langevin_multiplier(rate, clipping.flat(1.0), **MNIST)
    assert got == pytest.approx(multiplier, abs=6e-5)
    event = accounting.subsampled_gaussian(got, 256 / 60_000, 14_063)
    assert accounting.epsilon(event, 1e-5, "pld") == pytest.approx(epsilon, rel=0.005)


@pytest.mark.slow
@kills("noise/langevin.py", "math.sqrt(temperature)", "temperature", slow=True)
@kills(
    "training/sgld.py", "(sampling.examples * prior_deviation**2)", "prior_deviation**2", slow=True
)
def test_on_the_mean_gradient_it_is_the_papers():
    """A step of rate 2 eta / n at temperature n / 2, by algorithm 3 of Bu et al. (2023)."""
    got = noise.langevin_multiplier(0.2 / 60_000, WIDE, **MNIST, temperature=30_000)
    assert got == pytest.approx(256 / (1000 * 0.1**0.5))
    # One step from 1: rate x (mean gradient + prior) and noise of that variance.
    data = np.full((10, 200_000), 3.0, np.float32)
    algorithm = training.dp_sgld(
        square,
        0.2 / 10,
        temperature=5,
        sampling=sampling.full(10),
        clipping=WIDE,
        steps=1,
        data=data,
        prior_deviation=0.5,
        samples=1,
    )
    state, _ = algorithm.step(algorithm.init(jnp.ones(200_000), jax.random.key(0)))
    assert np.mean(state.params) == pytest.approx(1 - 0.1 * (1 - 3 + 4 / 10), abs=0.003)
    assert np.std(state.params) == pytest.approx(0.1**0.5, rel=0.01)


@pytest.mark.slow
def test_a_rate_that_decays_is_paid_for_step_by_step():
    algorithm = chain(rate=DECAY, rule=clipping.flat(1.0), steps=6)
    rates = 4e-4 * 0.5 ** np.arange(6)
    np.testing.assert_allclose(algorithm.mechanism.multipliers, 4 / (10 * np.sqrt(rates)), 1e-6)
    state, _ = after(algorithm, 4, jnp.zeros(3))
    spent = ledger.epsilon(state.ledger, algorithm.mechanism, 1e-3)
    event = accounting.scheduled_gaussian(algorithm.mechanism.multipliers[:4], 0.2)
    assert spent == pytest.approx(accounting.epsilon(event, 1e-3))


def test_what_came_before_the_first_step_is_paid_for():
    plain, settings = chain(rule=clipping.flat(1.0)), {"rule": clipping.flat(1.0)}
    spent = plain.mechanism.spent(plain.mechanism.multipliers)
    prepared, later = chain(preparation=(8.0, 8.0), **settings), chain(before=[spent], **settings)
    event = plain.mechanism.event
    for algorithm, first in ((prepared, accounting.gaussian(8.0, steps=2)), (later, event)):
        both = accounting.epsilon(accounting.compose(first, event), 1e-3)
        assert algorithm.mechanism.epsilon(1e-3) == pytest.approx(both)
        assert both > plain.mechanism.epsilon(1e-3)


def test_what_runs_is_what_is_accounted_to_the_bit():
    algorithm = chain(rate=optax.cosine_decay_schedule(1e-3, 50, alpha=0.1), steps=40)
    compiled = jax.jit(algorithm.mechanism.noise_multiplier)
    run = np.array([compiled(step) for step in range(40)], np.float64)
    np.testing.assert_array_equal(run, algorithm.mechanism.multipliers)


@pytest.mark.slow
def test_a_killed_run_ends_the_same_to_the_last_bit(tmp_path):
    """Samples too: some were taken before the death, some after it."""
    data = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)

    def fit(directory, dies=None):
        rate = schedules.table([2e-3, 1e-3], steps_per_epoch=20)
        kept = {"prior_deviation": 1.0, "samples": 4, "burn_in": 10, "every": 5}
        algorithm = chain(square, rate, data=data, steps=40, **kept)
        if dies is not None:
            algorithm = dies_after(algorithm, dies)
        state = algorithm.init(jnp.zeros(3), jax.random.key(3))
        options = {"directory": directory, "save_every": 5, "evaluate_every": 10}
        return dpjax.fit(algorithm, state, progress=False, delta=1e-3, **options)

    for steps in (9, 31):
        with pytest.raises(InterruptedError):
            fit(tmp_path / "run", steps)
    (resumed, rows), (whole, _) = fit(tmp_path / "run"), fit(tmp_path / "whole")
    assert [row["step"] for row in rows] == [10, 20, 30, 40]
    np.testing.assert_array_equal(resumed.params, whole.params)
    np.testing.assert_array_equal(training.samples(resumed), training.samples(whole))
    np.testing.assert_array_equal(training.samples(resumed)[-1], resumed.params)


@pytest.mark.parametrize(("steps", "every", "burn_in"), [(23, 1, 0), (23, 4, 3), (5, 4, 3)])
def test_the_ring_holds_the_last_ones_in_order(burn_in, every, steps):
    link = training.keep_samples(3, burn_in=burn_in, every=every)
    params = {"w": jnp.zeros(2)}
    state, update = link.init(params), jax.jit(link.update)
    for _ in range(steps):
        updates, state = update({"w": jnp.ones(2)}, state, params)
        params = optax.apply_updates(params, updates)
    kept = [float(t) for t in range(burn_in + every, steps + 1, every)][-3:]
    if kept:
        assert training.samples(state)["w"].tolist() == [[t, t] for t in kept]
    else:
        with pytest.raises(ValueError, match="steps that ran kept no sample"):
            training.samples(state)


def test_predictions_are_averaged_as_probabilities():
    draws = jnp.array([[2.0, 0.0], [0.0, 1.0], [3.0, 3.0]])
    got = training.predictive(lambda w, x: x[:, None] * w, draws, jnp.array([1.0, -2.0]))
    each = jnp.stack([jax.nn.softmax(jnp.array([[1.0], [-2.0]]) * w) for w in draws])
    np.testing.assert_allclose(jnp.exp(got), each.mean(0), rtol=1e-6)


REFUSED = {
    "no rate": ({"rate": 0.0}, "learning_rate=0.0"),
    "a rate that ends at 0": (
        {"rate": optax.linear_schedule(1e-3, 0.0, 3)},
        r"0\.0 at step 3 of 4",
    ),
    "no bound": ({"rule": clipping.flat(math.inf)}, "rule.sensitivity=inf"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_means_nothing_is_refused(case):
    settings, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        chain(**settings)

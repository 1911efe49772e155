# SPDX-License-Identifier: Apache-2.0
"""Optimizers under differential privacy: any of Optax, Adam without its noise, averages."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_mechanisms import mechanism_with
from training_runs import DATA, algorithm_with, first_step, fit, loss, make, start

from dpjax import clipping, sampling, training, trees


@pytest.mark.thorough
def test_an_optimizer_with_arguments_of_its_own_runs():
    state, _ = first_step(make(optimizer=optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1))))
    assert state.params.shape == (3,)
    assert np.all(np.asarray(state.params) != 0)


@pytest.mark.slow
def test_lookahead_is_that_of_optax_with_its_slow_parameters_in_the_state():
    algorithm = make(3, 0.0, training.lookahead(optax.adam(0.1), 2, 0.5, reset_state=True), 50)
    state, _ = algorithm.run(start(algorithm), 3)
    pair = optax.lookahead(optax.adam(0.1), 2, 0.5, reset_state=True)
    both = optax.LookaheadParams.init_synced(jnp.zeros(3))
    theirs = pair.init(both)
    for _ in range(3):
        gradient = jax.grad(loss)(both.fast, DATA[0])
        gradient = gradient / jnp.maximum(1, jnp.linalg.norm(gradient))
        updates, theirs = pair.update(gradient, theirs, both)
        both = optax.apply_updates(both, updates)
    np.testing.assert_allclose(state.params, both.fast, rtol=1e-5)
    np.testing.assert_allclose(state.optimizer.slow, both.slow, rtol=1e-5)


OPTIMIZERS = {
    "nesterov": optax.sgd(optax.cosine_decay_schedule(0.05, 40), momentum=0.9, nesterov=True),
    "adagrad": optax.adagrad(0.5),
    "adamw": optax.adamw(0.1, weight_decay=1e-4),
    "lookahead": optax.chain(optax.lion(0.05), optax.ema(0.5)),
}


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize("rule", [clipping.flat(0.5), clipping.hard_threshold(0.5, screen=5.0)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_optax_optimizer_with_local_and_global_clipping(optimizer, rule):
    mechanism = mechanism_with(50, 40, steps=40, noise_multiplier=0.05, clipping=rule)
    state, _ = fit(algorithm_with(mechanism, optimizer=OPTIMIZERS[optimizer]))
    distance = np.linalg.norm(np.asarray(state.params) - 1.0)
    assert distance < 0.8 * np.sqrt(3), "it has moved towards where the loss is least"


class TestAdam:
    """Adam without what the noise adds to its second moment."""

    def mechanism(self, multiplier=1.0, rule=None, steps=200):
        return mechanism_with(
            sampling=sampling.full(50),
            clipping=rule or clipping.flat(1.0),
            noise_multiplier=multiplier,
            steps=steps,
        )

    def test_without_noise_it_is_adam(self):
        ours = training.dp_adam(0.1, self.mechanism(0.0), floor=1e-16)
        theirs = optax.adam(0.1, eps=1e-8)
        params, gradients = jnp.zeros(3), jnp.array([1.0, -0.3, 0.02])
        states = [ours.init(params), theirs.init(params)]
        for t in range(5):
            (one, states[0]), (two, states[1]) = (
                link.update(gradients * (t + 1), state, params)
                for link, state in zip((ours, theirs), states, strict=True)
            )
            np.testing.assert_allclose(one, two, rtol=1e-5)

    @pytest.mark.slow
    @pytest.mark.parametrize("scheduled", [False, True])
    def test_what_is_left_is_the_gradients_own_second_moment(self, scheduled):
        """Noise a hundred times the gradient: Adam sees it alone, this one the gradient."""
        steps, size, gradient = 150, 20_000, 3e-3
        noise = (lambda t: 10.0 + t / 10) if scheduled else 10.0
        bounds = (lambda t: jnp.where(t < 50, 1.0, 0.5)) if scheduled else None
        mechanism = self.mechanism(noise, steps=steps)
        ours = training.dp_adam(1.0, mechanism, floor=1e-12)
        params = jnp.zeros(size)
        state = ours.init(params)
        rng = np.random.default_rng(0)
        for t in range(steps):
            scale = 1.0 if bounds is None else bounds(t)
            deviation = float(mechanism.deviations_on_mean(t)[0]) * scale
            mean = jnp.asarray(gradient + deviation * rng.normal(size=size), jnp.float32)
            _, state = ours.update(mean, state, params, bound_scale=scale)
        weight = 1 - 0.999**steps
        second = np.mean(np.asarray(state[0].second, np.float64)) / weight
        noisy = float(state[0].noise[0]) / weight
        assert second > 1000 * gradient**2, "the noise is nearly all of it"
        assert second - noisy == pytest.approx(gradient**2, abs=0.003 * second)
        assert noisy == pytest.approx(second, rel=0.005)

    def test_groups_have_their_own_noise(self):
        rule = clipping.per_group((1.0, 4.0), clipping.by_leaf({"a": 0, "b": 0}))
        ours = training.dp_adam(1.0, self.mechanism((2.0, 3.0), rule), b2=0.5, floor=1e-9)
        params = {"a": jnp.zeros(2), "b": jnp.zeros(2)}
        means = jax.tree.map(lambda x: x + 1.0, params)
        updates, state = ours.update(means, ours.init(params), params)
        want = np.square([2.0 * 1.0 / 50, 3.0 * 4.0 / 50])
        np.testing.assert_allclose(state[0].noise / 0.5, want, rtol=1e-6)
        for name, variance in zip("ab", want, strict=True):
            np.testing.assert_allclose(updates[name], -1 / np.sqrt(1 - variance), rtol=1e-5)

    @pytest.mark.thorough
    def test_lookahead_passes_the_scale_of_the_bounds_to_it(self):
        mechanism = self.mechanism(1.0)
        optimizer = training.lookahead(training.dp_adam(0.1, mechanism, b2=0.5), 5, 0.5)
        options = {"optimizer": optimizer, "bound_schedule": lambda step: 100.0}
        state, _ = first_step(algorithm_with(mechanism, **options))
        (adam,) = trees.nodes(state.optimizer, training.optimizers.DPAdamState)
        np.testing.assert_allclose(adam.noise / 0.5, np.square(100.0 / 50), rtol=1e-6)


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize("optimizer", [optax.sgd(0.1, momentum=0.9), optax.adamw(0.1)])
def test_bfloat16_parameters_stay_bfloat16(optimizer):
    optimizer = optax.chain(optimizer, training.average_parameters())
    algorithm = make(steps=3, optimizer=optimizer)
    state = algorithm.init(jnp.zeros(3, jnp.bfloat16), jax.random.key(0))
    state, _ = fit(algorithm, state)
    assert state.params.dtype == jnp.bfloat16
    assert training.averaged(state.optimizer).dtype == jnp.float32


class TestAveraging:
    def test_the_average_is_that_of_the_formula(self):
        link = optax.chain(optax.sgd(1.0), training.average_parameters(0.5))
        params, state = jnp.array(0.0), link.init(jnp.array(0.0))
        seen = []
        for gradient in (1.0, -2.0, 3.0):
            updates, state = link.update(jnp.array(gradient), state, params)
            params = optax.apply_updates(params, updates)
            seen.append(float(params))
        weights = np.array([0.25, 0.5, 1.0])
        want = np.dot(weights, seen) / weights.sum()
        assert float(training.averaged(state)) == pytest.approx(want)

# SPDX-License-Identifier: Apache-2.0
"""Audits: they measure what is stated, and find what is broken."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpjax
from dpjax import auditing, clipping, sampling


def test_the_audit_sees_a_step_that_is_not_as_stated():
    """Half the noise doubles the separation of two neighbouring batches."""
    like, canary = {"w": jnp.zeros((1, 50_000))}, {"w": jnp.zeros(50_000).at[0].set(9.0)}

    def separation(multiplier):
        mechanism = dpjax.Mechanism(
            sampling=sampling.full(10),
            clipping=clipping.flat(1.0),
            noise_multiplier=multiplier,
            steps=1,
        )
        return auditing.audit_step(mechanism, like, canary, jax.random.key(0))

    assert separation(2.0) == pytest.approx(0.5, rel=0.02)
    assert separation(1.0) == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize("multiplier", [1.0, 1.1])
def test_the_audit_over_many_noise_seeds(multiplier):
    """Twenty thousand steps with and without a canary of gradient C e_0."""
    rule = clipping.flat(1.5)
    mechanism = dpjax.Mechanism(
        sampling=sampling.full(8), clipping=rule, noise_multiplier=multiplier, steps=1
    )
    with_canary, _, _ = clipping.clip(rule, jnp.array([[1.5, 0.0]]))

    @jax.jit
    @jax.vmap
    def first_coordinate(seed):
        link = mechanism.privatize(jax.random.key(seed))
        return link.update(with_canary, link.init(jnp.zeros(2)))[0][0]

    released = np.asarray(first_coordinate(jnp.arange(20_000)))
    assert released.mean() / released.std() == pytest.approx(1 / multiplier, abs=0.04)


def one_run(multiplier, *, steps=20, canaries=1000):
    """Trains once with a thousand one-hot canaries, each in by a fair coin; guesses who was."""
    members = np.random.default_rng(0).random(canaries) < 0.5
    data = jnp.asarray(np.eye(canaries, dtype=np.float32) * members[:, None])
    mechanism = dpjax.Mechanism(
        sampling=sampling.full(canaries),
        clipping=clipping.flat(1.0),
        noise_multiplier=multiplier,
        steps=steps,
    )
    algorithm = dpjax.dpsgd(lambda w, x: -jnp.vdot(w, x), optax.sgd(1.0), mechanism, data)
    state = algorithm.init(jax.random.key(0), jnp.zeros(canaries))
    state, _ = dpjax.fit(algorithm, state, progress=False)
    right, made = auditing.guess_members(np.asarray(state.params), members, guesses=200)
    found = auditing.epsilon_lower_bound(right, made, canaries=canaries, delta=1e-5)
    return found, mechanism.epsilon(1e-5, "pld")


def test_one_run_does_not_refute_the_claim():
    found, claimed = one_run(multiplier=9.0)
    assert 0.3 < found <= claimed


def test_one_run_without_noise_is_found_out():
    claimed = one_run(multiplier=9.0)[1]
    found, infinite = one_run(multiplier=0.0)
    assert found > claimed
    assert infinite == np.inf


def test_lower_bounds():
    # All right: (e^eps / (1 + e^eps))^n = 0.05.
    perfect = auditing.epsilon_lower_bound(1000, 1000, canaries=1000)
    assert perfect == pytest.approx(np.log(0.05**0.001 / (1 - 0.05**0.001)), abs=1e-3)
    assert auditing.epsilon_lower_bound(500, 1000, canaries=1000) == 0.0
    with_delta = auditing.epsilon_lower_bound(1000, 1000, canaries=1000, delta=1e-4)
    assert with_delta < perfect
    with pytest.raises(ValueError, match="guesses"):
        auditing.guess_members(np.zeros(4), np.zeros(4, bool), 6)

# SPDX-License-Identifier: Apache-2.0
"""Audits measure the stated separation and find broken mechanisms."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from mutation import kills

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
    """Trains once with 1,000 one-hot canaries, each included by a fair coin; guesses members."""
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


def audit(gradients, canary):
    mechanism = dpjax.Mechanism(
        sampling=sampling.full(10), clipping=clipping.flat(1.0), noise_multiplier=1.0, steps=1
    )
    return auditing.audit_step(mechanism, gradients, canary, jax.random.key(0))


BOUND = auditing.epsilon_lower_bound
GUESS, SCORES = auditing.guess_members, np.array([3.0, -1.0, 0.1, 2.0])
ROWS = np.ones((2, 3), np.float32)
BAD = {
    "more right than guessed": (lambda: BOUND(200, 100, canaries=200), "each from 0 to the next"),
    "less than none right": (lambda: BOUND(-5, 100, canaries=100), "each from 0 to the next"),
    "more guesses than canaries": (lambda: BOUND(100, 100, canaries=10), "each from 0 to the next"),
    "half a guess": (lambda: BOUND(99.5, 100, canaries=100), "whole numbers"),
    "no number": (lambda: BOUND(math.nan, 100, canaries=100), "whole numbers"),
    "delta below 0": (lambda: BOUND(60, 100, canaries=100, delta=-1), "delta from 0 to 1"),
    "delta NaN": (lambda: BOUND(60, 100, canaries=100, delta=math.nan), "delta from 0 to 1"),
    "per cents": (lambda: BOUND(60, 100, canaries=100, confidence=95), "per cent"),
    "confidence 0": (lambda: BOUND(60, 100, canaries=100, confidence=0), "confidence between"),
    "confidence NaN": (lambda: BOUND(60, 100, canaries=100, confidence=math.nan), "between 0"),
    "scores NaN": (lambda: GUESS([math.nan] * 4, [1, 1, 0, 0], 4), "no NaN"),
    "a table of scores": (lambda: GUESS(np.ones((2, 2)), [True] * 4, 4), "shape"),
    "members short": (lambda: GUESS(SCORES, [True, False], 2), "for each of 4 scores"),
    "members' numbers": (lambda: GUESS(SCORES, [0, 2, 3, 1], 2), "np.isin"),
    "members NaN": (lambda: GUESS(SCORES, [0, 1, 1, math.nan], 2), "True or False"),
    "a guess and a half": (lambda: GUESS(SCORES, [1, 0, 1, 0], 2.5), "2 to 4 guesses"),
    "guesses NaN": (lambda: GUESS(SCORES, [1, 0, 1, 0], math.nan), "2 to 4 guesses"),
    "another canary": (lambda: audit({"w": ROWS}, {"w": np.ones(4)}), r"w has shape \(4,\)"),
    "a canary's batch axis": (lambda: audit(ROWS, ROWS[:1]), r"expected \(3,\).*axis was left on"),
    "another tree": (lambda: audit({"w": ROWS}, {"v": ROWS[0]}), "'v'.*'w'.*expected the same"),
    "no batch": (lambda: audit(np.float32(1), np.float32(1)), "leading axis"),
    "one guess": (lambda: GUESS(SCORES, [1, 0, 1, 0], 1), "2 to 4 guesses"),
}


@kills("auditing/canaries.py", "0 <= correct <= guesses <= canaries:", "0 <= correct:")
@pytest.mark.parametrize("name", BAD)
def test_errors_teach(name):
    call, teaches = BAD[name]
    with pytest.raises(ValueError, match=teaches):
        call()


@kills("auditing/canaries.py", "int(guesses) // 2, truths == 1", "int(guesses) // 2, truths")
@pytest.mark.parametrize("kind", [bool, int, float, list, jnp.asarray])
def test_members_are_members_however_they_are_written(kind):
    members = np.array([1, 0, 1, 0])
    written = members.astype(kind) if kind in (bool, int, float) else kind(members)
    assert GUESS(SCORES, written, 2) == (2, 2)
    assert GUESS(SCORES, written, 4) == (2, 4)


def test_nothing_right_of_nothing_refutes_nothing():
    assert BOUND(0, 0, canaries=100) == 0.0
    assert BOUND(100, 100, canaries=100, delta=1.0) == 0.0


@pytest.mark.sample(1)
@kills("auditing/single_step.py", "if 0 < leaf.size < _ENOUGH]", "if 0 > leaf.size]", slow=True)
@pytest.mark.parametrize("multiplier", [1.0, (2.0, 1.5)])
def test_leaves_of_a_few_numbers_raise_no_alarm(multiplier):
    """The noise of a bias of one number is measured too, over many draws."""
    rule = clipping.flat(1.0) if multiplier == 1.0 else clipping.per_group([1.0, 3.0], 2)
    mechanism = dpjax.Mechanism(
        sampling=sampling.full(10), clipping=rule, noise_multiplier=multiplier, steps=1
    )
    canary = {"bias": jnp.full((), 7.0), "none": jnp.zeros((0,)), "scale": jnp.full(3, 7.0)}
    batch = jax.tree.map(lambda x: jnp.zeros((2, *x.shape)), canary)
    separation = auditing.audit_step(mechanism, batch, canary, jax.random.key(0))
    effective = dpjax.accounting.effective_multiplier(multiplier)
    assert separation == pytest.approx(1 / effective, rel=0.04)


def test_without_noise_the_separation_is_infinite():
    mechanism = dpjax.Mechanism(
        sampling=sampling.full(10), clipping=clipping.flat(1.0), noise_multiplier=0.0, steps=1
    )
    like, canary = {"w": jnp.zeros((1, 5)), "v": jnp.zeros((1, 2))}, {"w": jnp.ones(5)}
    nothing = {"v": jnp.zeros(2)}
    apart = auditing.audit_step(mechanism, like, {**canary, **nothing}, jax.random.key(0))
    assert apart == np.inf

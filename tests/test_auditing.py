# SPDX-License-Identifier: Apache-2.0
"""Audits measure the stated separation and find broken mechanisms."""

import dataclasses
import json
import math
import subprocess
import types
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from experiments.benchmarks import workers
from mutation import kills
from scipy.stats import norm

import dpjax
from dpjax import accounting, auditing, clipping, federated, sampling, strategies, training
from dpjax.accounting import profiles


def test_equal_scores_say_nothing():
    members = np.arange(100) >= 50
    right, made = auditing.guess_members(np.zeros(100), members, guesses=100)
    assert bounded(right, made, 100) == 0.0


def bounded(correct, guesses, canaries, **options):
    options = {"delta": 1e-5, **options}
    return auditing.epsilon_lower_bound(correct, guesses, canaries=canaries, **options)


@kills("auditing/one_run.py", "j / (guesses - j)", "1")
def test_lower_bounds_by_curves_of_gaussians():
    """As published: Mahloujifar et al., by the implementation of jax_privacy 2.0.0."""
    assert bounded(950, 1000, 1000) == pytest.approx(5.0840, abs=1e-4)
    assert bounded(1000, 1000, 1000) == pytest.approx(12.3346, abs=1e-4)
    assert bounded(480, 500, 1000) == pytest.approx(4.9311, abs=1e-4)


@pytest.mark.thorough
def test_lower_bounds_by_the_curve_of_a_run():
    # One Gaussian, whose curve 41 straight lines describe.
    own = bounded(950, 1000, 1000, curve=accounting.gaussian(3.0))
    assert 5.0 < own <= 5.084
    # Losses of few sampled steps are far from Gaussian.
    sampled = accounting.subsampled_gaussian(1.0, 0.01, 1000)
    assert bounded(950, 1000, 1000, curve=sampled) > 6.0
    assert bounded(500, 1000, 1000, curve=sampled) == 0.0


def test_lower_bounds_of_any_run():
    # All right: (e^eps / (1 + e^eps))^n = 0.05.
    perfect = bounded(1000, 1000, 1000, delta=0.0)
    assert perfect == pytest.approx(np.log(0.05**0.001 / (1 - 0.05**0.001)), abs=1e-3)
    assert bounded(500, 1000, 1000, delta=0.0) == 0.0
    assert bounded(1000, 1000, 1000, delta=1e-4, curve="any") < perfect


@pytest.mark.thorough
@pytest.mark.parametrize(("confidence", "most"), [(0.95, 18), (0.999, 0)])
def test_few_simulated_runs_refute_the_truth(confidence, most):
    """Canaries in directions of their own, under Gaussian noise: 200 runs."""
    draw, separation, above = np.random.default_rng(3), 0.9, 0
    truth = profiles.gaussian(separation).epsilon(1e-5)
    for _ in range(200):
        members = draw.random(400) < 0.5
        scores = draw.normal(size=400) + separation * members
        right, made = auditing.guess_members(scores, members, guesses=80)
        above += bounded(right, made, 400, confidence=confidence) > truth
    assert above <= most


PEER = """
import json, sys
from jax_privacy import auditing
for correct, guesses, canaries in json.load(sys.stdin):
    print(auditing._epsilon_one_run_fdp(0.0, canaries, guesses, correct, 0.05, 1e-5))
"""


@pytest.mark.slow
@pytest.mark.skipif(not workers.PEERS.exists(), reason="make bench-peers")
def test_bounds_are_at_least_those_of_jax_privacy():
    grid = [
        (round(share * guesses), guesses, canaries)
        for canaries in (100, 1000)
        for guesses in (20, 40, 60, 80, 100)
        for share in (0.7, 0.8, 0.9, 0.95, 1.0)
    ]
    asked = {"input": json.dumps(grid), "text": True, "capture_output": True, "check": True}
    answers = subprocess.run([workers.PEERS, "-c", PEER], **asked).stdout.split()
    for numbers, theirs in zip(grid, map(float, answers), strict=True):
        assert bounded(*numbers) > theirs - 2e-5, numbers


BOUND = partial(auditing.epsilon_lower_bound, delta=0.0)
GUESS, SCORES = auditing.guess_members, np.array([3.0, -1.0, 0.1, 2.0])
ADAPTED = clipping.Quantile(count_multiplier=1.5)
BAD = {
    "more right than guessed": (
        lambda: BOUND(200, 100, canaries=200),
        "correct=200 <= guesses=100",
    ),
    "per cents": (lambda: BOUND(60, 100, canaries=100, confidence=95), "not per cent"),
    "scores NaN": (lambda: GUESS([math.nan] * 4, [1, 1, 0, 0], 4), "no NaN"),
    "members' numbers": (lambda: GUESS(SCORES, [0, 2, 3, 1], 2), "4 truth values"),
    "too many guesses": (lambda: GUESS(SCORES, [1, 0, 1, 0], 5), "at least 2 and at most 4"),
    "few scores": (
        lambda: auditing.audit_membership([1.0, 2.0, 3.0], np.zeros(9), delta=0.0),
        "four or more",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_teach(name):
    call, teaches = BAD[name]
    with pytest.raises(ValueError, match=teaches):
        call()


@kills("auditing/one_run.py", "2 * canaries * delta", "canaries * delta", slow=True)
def test_delta_is_paid_for_every_canary():
    """One guess is right with q + 2 m delta (1 - q) at most; of ten, by the theorem again."""
    for canaries, delta in ((1, 0.1), (2, 0.05)):
        found = BOUND(1, 1, canaries=canaries, delta=delta, confidence=0.2, curve="any")
        assert found == pytest.approx(math.log(3), abs=1e-5)
    q = 1 / (1 + math.exp(-BOUND(9, 10, canaries=20, delta=1e-3, curve="any")))
    chance = [math.comb(10, k) * q**k * (1 - q) ** (10 - k) for k in range(11)]
    slack = max(sum(chance[9 - i : 9]) / i for i in range(1, 10))
    assert sum(chance[9:]) + 2 * 20 * 1e-3 * slack == pytest.approx(0.05, rel=1e-4)


# Audits of algorithms as they run ---------------------------------------------------------

DATA = {name: np.eye(8, 1000, dtype=np.float32) * 9 for name in "ab"}
DATA = {name: np.where(np.arange(8)[:, None] == 7, -x[:1], x) for name, x in DATA.items()}
WIDE = {name: jnp.zeros(1000) for name in DATA}
PROJECTIONS = 30
TREE = strategies.tree(3)


def linear(w, x):
    return -sum((jnp.vdot(w[name], x[name]) for name in w), jnp.float32(0))


def described(sampler, rule=None, **more):
    rule = clipping.flat(1.0) if rule is None else rule
    options = {"noise_multiplier": 1.0, "steps": 3, **more}
    return dpjax.Mechanism(sampling=sampler, clipping=rule, **options)


def descent(rule=None, **more):
    return lambda sampler: dpjax.dpsgd(
        linear, optax.sgd(1.0), described(sampler, rule, **more), DATA
    )


def langevin(sampler):
    options = {"prior_deviation": 3.0, "samples": 1}
    return training.dp_sgld(linear, 4.0, sampler, clipping.flat(1.0), 3, DATA, **options)


def clients(sampler):
    each = federated.Clients.split(DATA, np.arange(8), 8)
    return federated.fedsgd(linear, optax.sgd(1.0), described(sampler, unit="client"), each)


def separation(build, sampler=None, **options):
    options = {"canary": 0, "pairs": 150, **options}
    return auditing.audit_algorithm(build, sampler or sampling.full(8), WIDE, **options)


STEPS = {
    "two groups": (descent(clipping.per_group([3.0, 4.0], 2), noise_multiplier=(2.0, 1.5)), {}),
    "poisson": (descent(), {"sampler": sampling.poisson(8, 2)}),
    "replaced": (descent(), {"sampler": sampling.fixed(8, 2), "instead": 7}),
    "adapted": (descent(adaptive=ADAPTED), {"pairs": 300}),
    "langevin": (langevin, {}),
    "clients": (clients, {}),
    "tree": (descent(noise=TREE), {}),
}


@pytest.mark.slow
@kills("auditing/algorithm_step.py", "claimed = 2.0 * claimed", "pass", case="replaced", slow=True)
@kills("auditing/algorithm_step.py", "* mechanism.strategy_sensitivity", "", case="tree", slow=True)
@pytest.mark.parametrize("name", STEPS)
def test_a_step_separates_as_its_mechanism_allows(name):
    build, options = STEPS[name]
    found = separation(build, **options)
    # An example of all steps moves C G by a row's sum in each of them, and step 0 by C_00 alone.
    share = TREE.matrix()[0, 0] / np.linalg.norm(TREE.matrix().sum(axis=1))
    allowed = {"replaced": 2.0, "two groups": 1 / 1.2, "tree": share}.get(name, 1.0)
    assert found.claimed == pytest.approx(allowed)
    assert found.measured[0] == pytest.approx(allowed, rel=0.03)
    assert 0.9 * allowed < found.lower[0] < found.measured[0]
    assert not found.refutes
    assert 0 < found.epsilon(1e-5) < found.claimed_epsilon(1e-5)


@pytest.mark.slow
def test_half_of_the_noise_is_found_for_replace_one_neighbours():
    """A program that runs with a multiplier of 1.01, and claims 2."""
    sampler = sampling.fixed(8, 4)

    def build(sampler):
        runs = descent(noise_multiplier=1.01)(sampler)
        return dataclasses.replace(runs, mechanism=described(sampler, noise_multiplier=2.0))

    assert separation(build, sampler, pairs=32).refutes


def quiet_noise(monkeypatch):
    add = dpjax.mechanism.link.add_noise

    def less(total, partition, deviations, *more, **named):
        return add(total, partition, [0.9 * each for each in deviations], *more, **named)

    monkeypatch.setattr("dpjax.mechanism.link.add_noise", less)


def long_gradients(monkeypatch):
    held = dpjax.types._Held.__call__
    monkeypatch.setattr("dpjax.types._Held.__call__", lambda self, norms: 2 * held(self, norms))


def silent_count(monkeypatch):
    zero = types.SimpleNamespace(standard_normal=lambda key, shape: jnp.zeros(shape))
    monkeypatch.setattr("dpjax.mechanism.link.noise", zero)


JL = (descent(clipping.jl(1.0, PROJECTIONS)), {"keys": 200})
BROKEN = {
    "less noise": (quiet_noise, descent()),
    "long gradients": (long_gradients, descent()),
    "a count without noise": (silent_count, descent(adaptive=ADAPTED)),
}


@pytest.mark.thorough
@pytest.mark.sample(1)
@kills("auditing/algorithm_step.py", "max(self.lower) <= self", "max(self.lower) > self", slow=True)
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_step_is_found(name, monkeypatch):
    breaks, build = BROKEN[name]
    breaks(monkeypatch)
    found = separation(build)
    assert found.refutes
    assert found.epsilon(1e-5) > found.claimed_epsilon(1e-5)


@pytest.mark.parametrize("projections", [None, PROJECTIONS])
def test_what_is_not_a_number_is_not_sound(projections):
    unknown = np.array([np.nan, 0.1])
    assert auditing.Separation(unknown, unknown, 1.0, projections, 0.999).refutes
    far = np.array([np.inf, 0.1])
    assert not auditing.Separation(far, far, np.inf, projections, 0.999).refutes, "claims nothing"


@pytest.mark.slow
@kills(
    "auditing/algorithm_step.py",
    "np.maximum(0.0, np.subtract(moved, rounding))",
    "np.asarray(moved)",
    slow=True,
)
def test_roundings_of_parameters_refute_no_step():
    """Parameters of 1 in float32 round each coordinate by half of 2^-23, many times the update."""
    mechanism = dpjax.Mechanism(
        sampling=sampling.full(1000), clipping=clipping.flat(1.0), noise_multiplier=1.0, steps=1
    )
    data, optimizer = jnp.zeros((1000, 1)).at[2].set(9.0), optax.sgd(0.01)

    def build(sampler):
        stated = dataclasses.replace(mechanism, sampling=sampler)
        return dpjax.dpsgd(lambda w, x: -jnp.sum(w) * x[0], optimizer, stated, data)

    params, options = jnp.ones(100_000), {"canary": 2, "pairs": 8}
    found = auditing.audit_algorithm(build, mechanism.sampling, params, **options)
    assert found.measured[0] > 1.1 > found.claimed
    assert not found.refutes


@pytest.mark.slow
def test_estimated_norms_separate_as_their_accountant_allows():
    """Under one key by more than the bound, and over keys not too often."""
    build, options = JL
    found = separation(build, **options)
    assert np.max(found.measured) > 1.1
    assert np.median(found.measured) == pytest.approx(1.0, abs=0.05)
    assert not found.refutes


@kills(
    "auditing/algorithm_step.py", "self.projections * inverse_s**2", "self.projections * inverse_s"
)
def test_chance_alone_refutes_no_estimated_norms():
    """Separations drawn from the law that is accounted; and from that of fewer projections."""
    draw = np.random.default_rng(0)

    def refuted(projections, runs=200, keys=50):
        drawn = np.sqrt(projections / draw.chisquare(projections, (runs, keys)))
        each = [auditing.Separation(x, x, 1.0, PROJECTIONS, 0.9) for x in drawn]
        return np.mean([found.refutes for found in each])

    assert refuted(PROJECTIONS) <= 0.1
    assert refuted(10) > 0.5
    assert auditing.Separation(np.ones(3), np.ones(3), 1.0, 30, 0.9).epsilon(0.9) == 0.0


@kills("auditing/algorithm_step.py", "ppf(risk / len(counts))", "ppf(risk)", slow=True)
def test_the_limit_of_the_noise_holds_as_often_as_stated():
    from dpjax.auditing.algorithm_step import _deviations

    draw = np.random.default_rng(0)

    def noise_of(seed):
        return [draw.normal(5, 1, 3), draw.normal(0, 2, (2, 2))]

    all_hold = [np.all(_deviations(noise_of, 4, 0.1)[1] >= [1, 2]) for _ in range(1000)]
    assert 0.88 < np.mean(all_hold) < 0.94


@pytest.mark.slow
def test_a_step_without_noise_separates_infinitely():
    found = separation(descent(noise_multiplier=0.0), pairs=1)
    assert found.measured[0] == found.claimed == math.inf
    assert found.epsilon(1e-5) == found.claimed_epsilon(1e-5) == math.inf
    assert not found.refutes
    unmoved = separation(descent(clipping.flat(0.0)), pairs=1)
    assert unmoved.measured[0] == unmoved.epsilon(1e-5) == 0.0


SAMPLERS = {"poisson": sampling.poisson(12, 6), "shuffled": sampling.shuffled(12, 5)}


@pytest.mark.thorough
@pytest.mark.parametrize("name", SAMPLERS)
def test_without_some_rows_all_others_are_drawn(name):
    lacking = auditing.without(SAMPLERS[name], [0, 5])
    for step in range(3):
        whole, fewer = (s.draw(jax.random.key(1), step) for s in (SAMPLERS[name], lacking))
        assert fewer.indices.shape == whole.indices.shape
        rows = sampling.on_host(whole).tolist()
        assert sampling.on_host(fewer).tolist() == [i for i in rows if i not in (0, 5)]
    assert lacking.batch_size == SAMPLERS[name].batch_size


@pytest.mark.thorough
def test_a_row_that_is_never_drawn_is_answered_in_a_sentence(monkeypatch):
    monkeypatch.setattr("dpjax.auditing.algorithm_step._SEEDS", 64)
    never = auditing.without(sampling.poisson(8, 2), [0])
    with pytest.raises(ValueError, match="0 of 64 keys draw it"):
        separation(descent(), never, pairs=1)
    with pytest.raises(ValueError, match="at most 7"):
        separation(descent(), canary=8, pairs=1)


# Canaries in a run ------------------------------------------------------------------------


def with_canaries(multiplier, *, per_step=None, canaries=300):
    """One run with one-hot canaries and a rest that moves all parameters alike."""
    members = np.random.default_rng(0).random(canaries) < 0.5
    ones = np.concatenate([np.eye(canaries), np.full((100, canaries), 0.3)]).astype(np.float32)
    mechanism = dpjax.Mechanism(
        sampling=auditing.without(
            sampling.poisson(len(ones), len(ones) / 2), np.flatnonzero(~members)
        ),
        clipping=clipping.flat(1.0),
        noise_multiplier=multiplier,
        steps=10,
    )

    def loss(w, x):
        return -jnp.vdot(w, x[0])

    optimizer = auditing.recording(optax.adam(0.1))
    algorithm = dpjax.dpsgd(loss, optimizer, mechanism, (ones,), per_step=per_step)
    state = algorithm.init(jnp.zeros(canaries), jax.random.key(0))
    parts = (ones[:canaries],), (ones[canaries:],)
    scores, state = auditing.score_canaries(
        algorithm, state, mechanism.steps, loss, *parts, per_step=per_step
    )
    assert int(state.step) == mechanism.steps
    right, made = auditing.guess_members(scores, members, guesses=100)
    found = auditing.epsilon_lower_bound(right, made, canaries=canaries, delta=1e-5)
    return found, mechanism.epsilon(1e-5), scores


@pytest.mark.slow
def test_every_release_scores_the_canaries():
    found, claimed, scores = with_canaries(2.0, per_step=lambda step: step)
    assert 0.5 < found <= claimed
    # Less what is expected of all rows, so that scores of members and others differ in sign.
    assert abs(np.mean(scores)) < 0.3 * np.std(scores)
    found, infinite, _ = with_canaries(0.0)
    assert found > 3.4, "every guess is right"
    assert infinite == math.inf


@pytest.mark.slow
def test_an_optimizer_that_records_trains_alike():
    params = []
    for optimizer in (optax.adam(0.1), auditing.recording(optax.adam(0.1))):
        algorithm = dpjax.dpsgd(linear, optimizer, described(sampling.full(8)), DATA)
        state = algorithm.init(WIDE, jax.random.key(0))
        params.append(dpjax.fit(algorithm, state, progress=False)[0].params)
    assert jax.tree.all(jax.tree.map(np.array_equal, *params))
    plain = descent()(sampling.full(8))
    state = plain.init(WIDE, jax.random.key(0))
    with pytest.raises(TypeError, match="recording"):
        auditing.score_canaries(plain, state, 1, linear, DATA, DATA)


# Membership inference ---------------------------------------------------------------------


def normal(mean, size=2000, seed=0):
    return np.random.default_rng(seed).normal(mean, 1, size)


@pytest.mark.slow
@kills("auditing/membership.py", "(1 - confidence) / 4 / _RANKS / 2", "1 - confidence", slow=True)
def test_losses_that_tell_nothing_refute_little():
    """Scores of one distribution, 40 times: bounds above 0 are rarer than the confidence says."""
    found = [
        auditing.audit_membership(
            normal(0, 200, 2 * seed), normal(0, 200, 2 * seed + 1), delta=0, confidence=0.6
        ).epsilon
        for seed in range(40)
    ]
    assert np.mean(np.array(found) > 0) < 0.15


@kills("auditing/membership.py", "least_true - delta", "least_true", slow=True)
def test_losses_of_randomized_response_refute_less_than_its_epsilon():
    """Members score 1 with three quarters, others with one: epsilon is ln 3."""
    draw = np.random.default_rng(1)
    scores = draw.random(4000) < 0.75, draw.random(4000) < 0.25
    found = auditing.audit_membership(*scores, delta=0.0)
    assert 0.9 < found.epsilon < math.log(3)
    assert found.auroc.low < 0.75 < found.auroc.high < found.auroc.low + 0.03
    assert 0 < auditing.audit_membership(*scores, delta=0.05).epsilon < found.epsilon
    assert auditing.audit_membership(*scores, delta=0.9).epsilon == 0.0
    # The opposite guess refutes as much.
    other = auditing.audit_membership(*(~x for x in scores[::-1]), delta=0.0)
    assert other.epsilon == pytest.approx(found.epsilon)


def test_no_error_at_all_is_bounded_by_the_number_of_rows():
    found = auditing.audit_membership(np.ones(200), np.zeros(200), delta=0.0)
    none = 1 - (0.05 / 480) ** (1 / 200)  # Clopper and Pearson, for none of 200
    assert found.epsilon == pytest.approx(math.log((1 - none) / none))


@kills(
    "auditing/membership.py",
    "norm.ppf(confidence) * standard_error",
    "0 * standard_error",
    slow=True,
)
@pytest.mark.thorough
def test_the_fit_finds_nearly_all_of_a_gaussian_mechanism():
    """20,000 audited steps; and of smaller audits one in twenty is above the truth."""
    truth = profiles.gaussian(1.0).epsilon(1e-5)
    found = auditing.audit_membership(normal(1, 10_000, 1), normal(0, 10_000), delta=1e-5)
    assert 0.95 * truth < found.gaussian_epsilon < truth
    for at, share in found.true_positives.items():
        exact = norm.cdf(norm.ppf(at) + 1)
        assert share.low < exact < share.high
        assert share.low < share.value < share.high
    audits = (
        auditing.audit_membership(normal(1, 50, seed), normal(0, 50, 999 - seed), delta=1e-5)
        for seed in range(100)
    )
    assert sum(audit.gaussian_epsilon > truth for audit in audits) <= 11
    # Of fewer than 1,000 others none can be one in a thousand.
    few = auditing.audit_membership(normal(1, 50), normal(0, 50, 1), delta=1e-5)
    assert math.isnan(few.true_positives[0.001].value)
    assert str(few.true_positives[0.001])[0] == "(", "the limits alone"
    assert few.true_positives[0.1].value > 0.1


@kills("auditing/membership.py", "(out_shift**2 -", "(out_shift -", slow=True)
def test_likelihood_ratios_rank_members_of_every_row():
    """Each row has a level of its own, which hides who is a member from one threshold."""
    draw, size = np.random.default_rng(0), 600
    levels, members = draw.normal(0, 5, size), np.arange(size) < size // 2
    joined = draw.permuted(np.tile(members, (32, 1)), axis=0).reshape(32, size)
    joined[::2] = ~joined[1::2]
    shadows = levels + joined + draw.normal(0, 0.5, joined.shape)
    target = levels + members + draw.normal(0, 0.5, size)

    def auroc(scores):
        pair = scores[members], scores[~members]
        return auditing.audit_membership(*pair, delta=1e-5).auroc.value

    plain, offline = auroc(target), auroc(auditing.lira(target, shadows, joined, online=False))
    online = auroc(auditing.lira(target, shadows, joined))
    assert plain < 0.6 < 0.88 < offline <= online + 0.02
    with pytest.raises(ValueError, match="in two shadow models or more"):
        auditing.lira(target, shadows, np.ones_like(joined))


@kills("auditing/exposure.py", "losses > losses", "losses >= losses")
def test_exposure_counts_bits_by_rank_and_ties_against_the_secret():
    assert auditing.exposure([5.0, 1.0, 3.0, 4.0], secret=1) == 2
    assert auditing.exposure([1.0] * 8, secret=3) == 0
    assert auditing.exposure([np.nan, 1.0], secret=0) == 0

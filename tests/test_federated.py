# SPDX-License-Identifier: Apache-2.0
"""Clients: what one of them can move, whatever it holds and however long it trains."""

import dataclasses
import json
import math
import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from killable_runs import dies_after
from mutation import kills

import dpjax
from dpjax import clipping, federated, sampling, training
from dpjax.federated import _local, _rounds
from dpjax.federated.fedavg import recipe_of
from dpjax.training.recipe import bound_to
from dpjax.training.step import private_step
from dpjax.types import State

PARAMS = {"a": jnp.zeros(3), "b": jnp.zeros(2)}
RULES = {
    "flat": clipping.flat(0.7),
    "grouped": clipping.grouped(bound=0.7, groups=2),
    "per_group": clipping.per_group((0.3, 0.6), 2),
    "automatic": clipping.automatic(0.7),
    "hard_threshold": clipping.hard_threshold(0.7),
    "screen": clipping.hard_threshold(0.7, screen=2.0, groups=2),
}


def mechanism(examples, *, rule=None, sampler=None, multiplier=0.0, **facts):
    usual = {"sampling": sampler or sampling.full(examples), "steps": 5, "unit": "client"}
    rule = rule or clipping.flat(1.0)
    return dpjax.Mechanism(clipping=rule, noise_multiplier=multiplier, **{**usual, **facts})


def towards(params, example):
    """A loss whose gradient is minus the example: a step of rate 1 moves by it."""
    return -jnp.sum(params * example)


def squared(params, example):
    return 0.5 * jnp.sum((params - example) ** 2)


def fedavg(clients, plan, loss=squared, server=None, **options):
    work = {"local_batch_size": 1000, "local_epochs": 1, **options}
    client = work.pop("client_optimizer", optax.sgd(1.0))
    server = optax.sgd(1.0) if server is None else server
    return federated.fedavg(loss, server, plan, clients, client_optimizer=client, **work)


def start(algorithm, seed=0):
    return algorithm.init(jnp.zeros(3), jax.random.key(seed))


def first_round(algorithm):
    return algorithm.step(start(algorithm))


def moved(algorithm, params=None, steps=1, seed=0):
    """What the first rounds moved the server."""
    params = jnp.zeros(3) if params is None else params
    state = algorithm.init(params, jax.random.key(seed))
    for _ in range(steps):
        state, _ = algorithm.step(state)
    return jax.tree.map(lambda a, b: np.asarray(a - b, np.float64), state.params, params)


def some_clients(*sizes, seed=0, features=3):
    draw = np.random.default_rng(seed)
    return federated.Clients.of([draw.normal(size=(n, features)).astype(np.float32) for n in sizes])


def length(tree):
    return math.sqrt(sum(float(np.sum(np.square(x))) for x in jax.tree.leaves(tree)))


# Sensitivity --------------------------------------------------------------------------

VALUES = st.one_of(
    st.sampled_from([0.0, math.inf, -math.inf, math.nan, 1e30, -1e30, 1e-30, 1e18, 1.0]),
    st.floats(-100, 100, width=32),
)
WEIGHTS = federated.Weights(values=[0.5, 9.0, 2.0, math.inf], largest=2.0)


def released(rule, shares, **work):
    """The released sum of a round, without noise, as one program for all data."""
    loss = lambda p, x: -jnp.sum(p["a"] * x[:3]) - jnp.sum(p["b"] * x[3:])  # noqa: E731
    steps = {"batch_size": 1, "epochs": 2, "within": None, **work}
    what = _local.Local(loss, optax.sgd(1.0), **steps)
    plan = mechanism(4, rule=rule)
    optimizer, key = optax.sgd(4.0), jax.random.key(0)
    state = State(PARAMS, optimizer.init(PARAMS), jnp.float32(1), key, key, jnp.int32(0), None)

    @jax.jit
    def run(clients):
        recipe = recipe_of("fedavg", what, optimizer, plan, clients, scale=1.0, microbatch_size=2)
        rows = _rounds.Row(jnp.arange(4), jnp.asarray(shares), clients.counts)
        return private_step(bound_to(recipe, clients), rows, state)[0].params

    def sum_of(examples, counts):
        starts = np.arange(4) * 2
        clients = federated.Clients(*map(jnp.asarray, (examples, starts, counts)), capacity=2)
        return jax.tree.map(lambda x: np.asarray(x, np.float64), run(clients))

    return sum_of


def influences(sum_of, examples):
    counts = np.array([2, 1, 2, 2])
    whole = sum_of(examples, counts)
    for k in range(4):
        without = sum_of(examples, np.where(np.arange(4) == k, 0, counts))
        yield length(jax.tree.map(np.subtract, whole, without)), length(whole)


@pytest.mark.sample(1)
@kills(
    "training/step.py",
    "        recipe.mechanism.clipping,\n",
    '        __import__("dpjax").clipping.flat(jnp.inf),\n',
    case="flat-False",
    slow=True,
)
@pytest.mark.parametrize("project", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_no_client_moves_the_sum_by_more_than_the_sensitivity(name, project):
    rule = RULES[name]
    work = {"within": rule if project else None}
    sum_of = released(rule, WEIGHTS.shares, **work)

    @hypothesis.given(values=hnp.arrays(np.float32, (8, 5), elements=VALUES))
    @hypothesis.settings(max_examples=25)
    def holds(values):
        for found, total in influences(sum_of, values):
            assert found <= rule.sensitivity + 2e-6 * (rule.sensitivity + total)

    holds()


@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted(set(RULES) - {"hard_threshold", "screen"}))
@pytest.mark.sample(1)
def test_the_sensitivity_is_attained_by_heavy_clients_that_move_far(name):
    found = [x for x, _ in influences(released(RULES[name], WEIGHTS.shares), np.full((8, 5), 50.0))]
    assert found[0] == pytest.approx(0.25 * RULES[name].sensitivity, rel=1e-3)
    for heavy in found[1:]:
        assert heavy == pytest.approx(RULES[name].sensitivity, rel=1e-3)


@kills("federated/weights.py", "np.minimum(shares, 1.0)", "shares")
def test_shares_are_weights_over_the_largest_and_never_above_one():
    shares = federated.Weights(values=[0, 30, 100, 700, -5, math.nan, math.inf], largest=100).shares
    np.testing.assert_allclose(shares, [0, 0.3, 1, 1, 0, 0, 1])
    assert shares.max() <= 1.0


@kills("federated/fedavg.py", "len(clients) / weights.total_share", "1.0", slow=True)
@pytest.mark.slow
def test_raw_counts_as_weights_are_capped_and_divided_by_the_public_total():
    clients = federated.Clients.of([np.full((n, 1), 0.5, np.float32) for n in (2, 5, 40)])
    # As of NumPy and JAX: run.json holds Python's numbers.
    weights = federated.Weights(values=clients.counts, largest=jnp.float32(10), total=np.int64(15))
    assert json.dumps([weights.largest, weights.total_share]) == "[10.0, 1.5]"
    sampler = sampling.poisson(3, 3)
    algorithm = fedavg(clients, mechanism(3, sampler=sampler), weights=weights)
    assert algorithm.scaled_by == "the total of weights"
    # Everybody moves by 0.5; shares are 0.2, 0.5 and 1; the public sum of shares is 1.5.
    assert moved(algorithm, jnp.zeros(1))[0] == pytest.approx(0.5 * 1.7 / 1.5, rel=1e-6)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("largest", "want"), [(1, 7.0466), (2, 31.3710)])
def test_noise_as_papers_state_it_is_worth_less_by_the_largest_weight(largest, want):
    multiplier = federated.Weights(values=np.ones(1000), largest=largest).noise_multiplier(1.0)
    plan = mechanism(1000, sampler=sampling.poisson(1000, 100), multiplier=multiplier, steps=100)
    assert plan.epsilon(1e-5, "pld") == pytest.approx(want, rel=1e-3)
    if largest == 1:
        assert plan.epsilon(1e-5) == pytest.approx(7.9039, rel=1e-3)


# What a client does -------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_an_epoch_sees_each_example_of_a_client_once(size):
    clients = federated.Clients.of([np.eye(6, dtype=np.float32)[:4], np.eye(6)[4:5] * 0])
    plan = mechanism(2, rule=clipping.flat(math.inf))
    change = moved(
        fedavg(clients, plan, towards, local_batch_size=size, local_epochs=2), jnp.zeros(6)
    )
    each = [2 / size] * 4 if size in (1, 2) else None
    if each is None:  # the last batch is smaller, and its mean is of what it holds
        assert np.sum(change) * 2 == pytest.approx(2 * -(-4 // size))
        assert np.count_nonzero(change) == 4
    else:
        np.testing.assert_allclose(change * 2, [*each, 0, 0], rtol=1e-6)


@pytest.mark.thorough
def test_the_whole_round_is_what_a_loop_in_python_does():
    """Gradient descent of each client on all it has, clipped, averaged, by another program."""
    sizes, rate = (1, 5, 2, 9, 0, 4), 0.3
    clients, theta = some_clients(*sizes), np.array([0.2, -0.1, 0.4])
    plan = mechanism(6, rule=clipping.flat(0.5))
    algorithm = fedavg(clients, plan, client_optimizer=optax.sgd(rate), local_epochs=4)
    found = moved(algorithm, jnp.asarray(theta, jnp.float32))
    total = np.zeros(3)
    for start, count in zip(clients.starts, clients.counts, strict=True):
        rows, here = np.asarray(clients.examples)[start : start + count], theta.copy()
        for _ in range(4 * (count > 0)):
            here -= rate * (here - rows.mean(axis=0))
        update = here - theta
        total += update * min(1, 0.5 / max(1e-9, np.linalg.norm(update)))
    np.testing.assert_allclose(found, total / 6, rtol=1e-5, atol=1e-7)


@kills("federated/fedavg.py", "(key, Purpose.LOCAL, step)", "(key, Purpose.LOCAL, 0)", slow=True)
@pytest.mark.slow
def test_each_client_and_round_has_an_order_of_its_own():
    """One example is seen; who sees which differs between clients, rounds and runs."""
    alike = [np.arange(1.0, 21, dtype=np.float32)[:, None]] * 6
    clients, plan = federated.Clients.of(alike), mechanism(6, rule=clipping.flat(math.inf))
    once = optax.sgd(lambda step: jnp.where(step == 0, 1.0, 0.0))
    what = _local.Local(towards, once, 1, 1, None)
    algorithm = fedavg(clients, plan, towards, local_batch_size=1, client_optimizer=once)
    state, sums = algorithm.init(jnp.zeros(1), jax.random.key(3)), []
    for _ in range(5):
        before = state.params
        state, _ = algorithm.step(state)
        sums.append(round(float((state.params - before)[0]) * 6))
    assert len(set(sums)) > 2, "rounds differ"
    assert any(total % 6 for total in sums), "clients differ"
    seen = [
        float(_local.trained(what, jnp.zeros(1), clients, jnp.int32(0), jax.random.key(k))[1][0])
        for k in range(8)
    ]
    assert len(set(seen)) > 3, "keys differ"


@pytest.mark.slow
def test_a_projected_client_never_leaves_the_bound_however_long_it_trains():
    """It goes out far and comes back: projected on the way it ends elsewhere."""
    way = np.array([[100.0, 0, 0]], np.float32)
    clients, rule = federated.Clients.of([way]), clipping.hard_threshold(0.5)
    work = {"local_batch_size": 1, "local_epochs": 20}
    assert not moved(fedavg(clients, mechanism(1, rule=rule), towards, **work)).any()
    inside = moved(fedavg(clients, mechanism(1, rule=rule), towards, project=True, **work))
    assert 0.4999 < length(inside) <= 0.5


@pytest.mark.slow
def test_a_client_with_one_broken_example_contributes_exactly_nothing():
    good = np.ones((4, 3), np.float32)
    bad = good * np.array([[1], [math.nan], [1], [1]], np.float32)
    plan = mechanism(3)
    with_bad, without = (
        moved(fedavg(federated.Clients.of([good, rows, good]), plan, local_batch_size=2))
        for rows in (bad, good[:0])
    )
    np.testing.assert_array_equal(with_bad, without)


def convolving(params, example):
    x, numbers = example[None], ("NHWC", "HWIO", "NHWC")
    for kernel in params:
        x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)
        x = jnp.tanh(x)
    return jnp.sum(jnp.square(x))


def images(*counts):
    draw = np.random.default_rng(0).normal
    return federated.Clients.of([draw(size=(n, 6, 6, 3)).astype(np.float32) for n in counts])


KERNELS = [0.1 * jnp.ones((3, 3, 3, 4)), 0.1 * jnp.ones((3, 3, 4, 5))]


@pytest.mark.slow
def test_no_convolution_of_a_round_becomes_a_naive_loop_on_a_cpu():
    """XLA computes convolutions fast in a loop if their channels are last and have no groups."""
    clients, plan, server = images(2, 3), mechanism(2), optax.sgd(1.0)
    what = _local.Local(convolving, optax.sgd(0.1), 2, epochs=1, within=None)
    recipe = recipe_of("fedavg", what, server, plan, clients, scale=1.0)
    key, scale = jax.random.key(0), jnp.float32(1)
    state = State(KERNELS, server.init(KERNELS), scale, key, key, jnp.int32(0), None)

    @jax.jit
    def round_of(clients):
        rows = _rounds.Row(jnp.arange(2), jnp.ones(2), clients.counts)
        return private_step(bound_to(recipe, clients), rows, state)[0].params

    text = round_of.lower(clients).compile().as_text()
    found = re.findall(r"= \S+ convolution\(.*", text)
    assert len(found) >= 5, "two forward, two for kernels, one for the input of the second layer"
    for line in found:
        assert "dim_labels=b01f_01io->b01f" in line
        assert "group_count" not in line


# FedSGD and servers --------------------------------------------------------------------


@pytest.mark.slow
def test_fedsgd_with_one_example_a_client_is_dpsgd():
    data = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    loss = lambda w, x: jnp.sum(jnp.tanh(w @ x) ** 2) + 0.1 * jnp.sum(w * w)  # noqa: E731
    clients = federated.Clients.split(data, owners=np.arange(60), clients=60)
    server = optax.sgd(0.3, momentum=0.9)
    plan = mechanism(60, sampler=sampling.poisson(60, 12), multiplier=0.8, rule=clipping.flat(0.3))
    params = jnp.asarray(np.random.default_rng(1).normal(size=(2, 4)), jnp.float32)
    one = federated.fedsgd(loss, server, plan, clients)
    other = dpjax.dpsgd(loss, server, dataclasses.replace(plan, unit="example"), data)
    states = [a.init(params, jax.random.key(4)) for a in (one, other)]
    for _ in range(4):
        (first, info), (second, seen) = one.step(states[0]), other.step(states[1])
        states = [first, second]
        assert int(info.clients) == int(info.examples) == int(seen.examples)
        np.testing.assert_allclose(info.norm, seen.norm, rtol=1e-5)
        np.testing.assert_allclose(info.loss, seen.loss, rtol=1e-5)
    np.testing.assert_allclose(states[0].params, states[1].params, rtol=1e-5, atol=1e-5)


# Noise and sampling --------------------------------------------------------------------


@kills(
    "training/step.py",
    "block=clipped.value)",
    "block=clipped.value + jax.random.normal(jax.random.key(rows[0][0]), clipped.value.shape))",
    case="7",
    slow=True,
)
@pytest.mark.parametrize("size", [7, 40])
@pytest.mark.slow
def test_the_noise_of_the_whole_round_has_its_scale_whatever_the_microbatches(size):
    clients = federated.Clients.of([np.zeros((n % 3, 1), np.float32) for n in range(60)])
    loss = lambda w, x: x[0] * jnp.sum(w)  # noqa: E731
    plan = mechanism(60, sampler=sampling.poisson(60, 20), multiplier=1.1, rule=clipping.flat(2.0))
    weights = federated.Weights(values=np.ones(60), largest=2.0, total=90.0)
    algorithm = fedavg(clients, plan, loss, weights=weights, microbatch_size=size)
    change = moved(algorithm, jnp.zeros(400_000), seed=1)
    # Shares of 45 clients in all, and a third is expected.
    assert np.std(change) * 15 == pytest.approx(1.1 * 2.0, rel=0.005)


@pytest.mark.parametrize("total", [10.0])
@pytest.mark.slow
def test_adam_at_the_server_takes_away_the_noise_that_a_total_of_weights_makes(total):
    """Updates are all 0, so that the second moment is that of the noise."""
    clients = federated.Clients.of([np.zeros((1, 1), np.float32)] * 100)
    plan = mechanism(100, sampler=sampling.poisson(100, 10), multiplier=2.0)
    weights = federated.Weights(values=np.full(100, 0.1), total=total)
    loss = lambda w, x: x[0] * jnp.sum(w)  # noqa: E731
    server = training.dp_adam(1e-3, plan)
    algorithm = federated.fedsgd(loss, server, plan, clients, weights=weights)
    state = algorithm.init(jnp.zeros(100_000), jax.random.key(0))
    for _ in range(2):
        state, _ = algorithm.step(state)
    adam = state.optimizer[0]
    assert float(adam.noise[0]) == pytest.approx(float(jnp.mean(adam.second)), rel=0.02)


@pytest.mark.slow
def test_the_divisor_does_not_depend_on_who_was_drawn():
    clients = federated.Clients.of([np.full((1, 3), 0.1, np.float32)] * 40)
    plan = mechanism(40, sampler=sampling.poisson(40, 10))
    algorithm = fedavg(clients, plan, towards)
    state = start(algorithm)
    drawn = set()
    for _ in range(5):
        before = state.params
        state, info = algorithm.step(state)
        drawn.add(int(info.clients))
        np.testing.assert_allclose(state.params - before, 0.1 * int(info.clients) / 10, rtol=1e-4)
    assert len(drawn) > 2


# As any algorithm ----------------------------------------------------------------------


def long_run(**options):
    plan = mechanism(30, sampler=sampling.poisson(30, 6), multiplier=1.0, steps=14, **options)
    work = {"local_batch_size": 4, "local_epochs": 2, "client_optimizer": optax.sgd(0.1)}
    return fedavg(some_clients(*range(30)), plan, server=optax.adam(0.1), **work)


@pytest.mark.slow
def test_an_interrupted_run_ends_as_an_uninterrupted_one(tmp_path):
    options = {"evaluate_every": 4, "save_every": 3, "progress": False}
    state = start(long_run(), 5)
    whole, rows = dpjax.fit(long_run(), state, directory=tmp_path / "whole", **options)
    with pytest.raises(InterruptedError):
        dpjax.fit(dies_after(long_run(), 7), state, directory=tmp_path / "cut", **options)
    saved = [p.name for p in (tmp_path / "cut" / "checkpoints").glob("[0-9]*")]
    assert max(map(int, saved)) == 6
    again, others = dpjax.fit(long_run(), state, directory=tmp_path / "cut", **options)
    jax.tree.map(np.testing.assert_array_equal, whole.params, again.params)
    assert [r["private"] for r in rows] == [r["private"] for r in others]
    names = {"loss", "clients", "examples", "dropped", "norm", "clipped"}
    assert names == set(rows[0]["private"])


@pytest.mark.slow
def test_the_statement_and_the_card_say_one_client():
    plan = mechanism(1000, sampler=sampling.poisson(1000, 100), multiplier=1.0, steps=100)
    words = dpjax.statement(plan, 1e-5)
    for line in (
        "unit          one client",
        "data sets that differ by one client added or removed",
        "poisson: 100 of 1,000 clients a step (rate 0.1)",
        "one client moves the sum by at most 1",
        "anyone who sees one client's update",
        "mcmahan2018learning",
    ):
        assert line in words
    assert "example" not in words.split("Not covered")[0]
    assert plan.facts["unit"] == "client"
    assert dataclasses.replace(plan, unit="example").facts["unit"] == "example"
    too_large = dpjax.statement(plan, 0.01)
    assert "1/clients=0.001: publishing one client outright" in too_large


@kills("mechanism/description.py", 'self.unit != "example" and', "True and")
@kills("training/checks.py", "if recipe.mechanism.of_clients:", "if False:")
def test_any_word_is_a_client_and_only_fedavg_runs_it():
    plan = mechanism(3, multiplier=1.0, unit="user")
    words = dpjax.statement(plan, 1e-5)
    for line in (
        "one user: a client with all of its examples",
        "anyone who sees one user's update",
        "mcmahan2018learning",
    ):
        assert line in words
    assert fedavg(some_clients(1, 2, 3), plan).mechanism.facts["unit"] == "user"
    with pytest.raises(ValueError, match="unit is 'user', and full draws rows"):
        dpjax.dpsgd(squared, optax.sgd(1.0), plan, np.ones((3, 3)))
    assert not mechanism(3, unit="example").of_clients


@kills("federated/fedavg.py", 'scale * extra.get("bound_scale", 1.0)', "scale")
def test_adaptive_bounds_of_clients_are_those_of_dpsgd():
    """With one example a client, also the factor that the server's optimizer receives."""
    data = np.random.default_rng(0).normal(size=(30, 3)).astype(np.float32)
    adaptive = clipping.Quantile(target=0.3, rate=0.5, count_multiplier=20.0)
    plan = mechanism(30, multiplier=1.0, rule=clipping.flat(3.0), adaptive=adaptive)
    clients = federated.Clients.split(data, owners=np.arange(30), clients=30)

    def update(mean, state, params=None, *, bound_scale):
        return jax.tree.map(lambda x: -0.1 * x / bound_scale, mean), state

    server = optax.GradientTransformationExtraArgs(lambda params: (), update)
    one = federated.fedsgd(squared, server, plan, clients)
    row_plan = dataclasses.replace(plan, unit="example")
    other = dpjax.dpsgd(squared, server, row_plan, data)
    found, expected = (a.run(start(a), 4)[0] for a in (one, other))
    assert float(expected.bound_scale) < 0.9
    np.testing.assert_allclose(found.bound_scale, expected.bound_scale, rtol=1e-5)
    np.testing.assert_allclose(found.params, expected.params, rtol=1e-4, atol=1e-5)


# What it refuses ------------------------------------------------------------------------


def work(**options):
    return lambda: fedavg(some_clients(1), mechanism(1), **options)


def own(clients, plan, **options):
    """A call with as many clients of one example."""
    return lambda: fedavg(some_clients(*[1] * clients), plan, **options)


ADAPTIVE = {"multiplier": 1.0, "adaptive": clipping.Quantile(count_multiplier=10.0)}
Clients, Weights = federated.Clients, federated.Weights
VALUES_REFUSED = {
    r"^federated\.fed.*20 clients and 20 weights.*from 100": own(20, mechanism(100)),
    r"one example.*Mechanism\(unit='client'": own(3, mechanism(3, unit="example")),
    "or with unequal weights": own(
        9, mechanism(9, **ADAPTIVE), weights=Weights(values=np.arange(9))
    ),
    "adaptive bounds with project": own(9, mechanism(9, **ADAPTIVE), project=True),
    "no estimated norms": own(2, mechanism(2, rule=clipping.jl(1.0, 30))),
    "2 clients and 3 weights": own(2, mechanism(2), weights=Weights(values=np.ones(3))),
    "total=0.0.: expected a finite": lambda: Weights(values=[1], total=0.0),
    "from 0 to 2, for each of 3 rows": lambda: Clients.split(np.ones((3, 2)), [0, 1, 5], clients=3),
    r"local_batch_size=.*expected a": work(local_batch_size=2.5),
    r"^federated\.fedavg: .*real scalar": lambda: start(work(loss=lambda w, x: w - x)()),
}


@pytest.mark.parametrize("words", VALUES_REFUSED)
def test_values_that_are_refused(words):
    with pytest.raises(ValueError, match=words):
        VALUES_REFUSED[words]()


TYPES_REFUSED = {
    "mechanism is a Sampler": lambda: fedavg(some_clients(1), sampling.full(1)),
    "client_optimizer is a float": work(client_optimizer=0.1),
    "given a key as parameters": lambda: work()().init(jax.random.key(0), jnp.zeros(3)),
    r"clients is a list.*Clients\.of": lambda: fedavg([np.ones((2, 3))], mechanism(1)),
    "where the ledger cannot count": lambda: jax.jit(work()().step)(start(work()())),
}


@pytest.mark.parametrize("words", TYPES_REFUSED)
def test_types_that_are_refused(words):
    with pytest.raises(TypeError, match=words):
        TYPES_REFUSED[words]()


# Evaluation -----------------------------------------------------------------------------


def test_each_client_is_scored_by_its_own_examples():
    clients = some_clients(4, 0, 1, 700)
    first = lambda w, x: x[0] + w  # noqa: E731
    found = federated.scores(first, 2.0, clients)
    rows = np.split(np.asarray(clients.examples, np.float64)[:, 0] + 2.0, [4, 4, 5])
    np.testing.assert_allclose(found[[0, 2, 3]], [rows[i].mean() for i in (0, 2, 3)], rtol=1e-5)
    assert math.isnan(found[1])


@pytest.mark.slow
def test_the_distribution_over_clients_is_private_and_reaches_the_log():
    clients, sizes = some_clients(*[3] * 11), 11
    tenth = federated.evaluate_clients(
        lambda params, x: x, None, federated.Clients.split(np.arange(11.0), np.arange(11), 11)
    )["private"]
    assert [tenth[f"client {n}"] for n in ("lowest", "10 %", "median", "90 %", "mean")] == [
        *(0.0, 1.0, 5.0, 9.0, 5.0)
    ]
    algorithm = fedavg(clients, mechanism(sizes, multiplier=1.0, steps=2))
    metric = lambda params, x: jnp.sum(params > x) * 1.0  # noqa: E731
    _, rows = dpjax.fit(
        algorithm,
        start(algorithm),
        evaluate=lambda state: federated.evaluate_clients(metric, state.params, clients),
        progress=False,
    )
    assert {"client mean", "client lowest", "example mean", "loss"} <= set(rows[-1]["private"])
    assert not [name for name in rows[-1] if "client " in name]

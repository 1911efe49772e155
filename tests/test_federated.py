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
from dpjax import clipping, federated, ledger, noise, sampling, training, trees, types
from dpjax.federated import local, rounds
from dpjax.federated.fedavg import recipe_of
from dpjax.mechanism.card import spent_of
from dpjax.training.recipe import bound_to
from dpjax.training.step import private_step
from dpjax.types import State

PARAMS = {"a": jnp.zeros(3), "b": jnp.zeros(2)}
RULES = {
    "flat": clipping.flat(0.7),
    "grouped": clipping.grouped(bound=0.7, groups=2),
    "total": clipping.grouped(total=0.7, groups=2),
    "per_group": clipping.per_group((0.3, 0.6), 2),
    "automatic": clipping.automatic(0.7),
    "normalized": clipping.normalized(0.7),
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
    return algorithm.init(jax.random.key(seed), jnp.zeros(3))


def first_round(algorithm):
    return algorithm.step(start(algorithm))


def moved(algorithm, params=None, steps=1, seed=0):
    """What the first rounds moved the server."""
    params = jnp.zeros(3) if params is None else params
    state = algorithm.init(jax.random.key(seed), params)
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
    steps = {"batch_size": 1, "epochs": 2, "steps": None, "within": None, **work}
    what = local.Local(loss, optax.sgd(1.0), **steps)
    plan = mechanism(4, rule=rule)
    optimizer, key = optax.sgd(4.0), jax.random.key(0)
    state = State(PARAMS, optimizer.init(PARAMS), jnp.float32(1), key, jnp.int32(0), None)

    @jax.jit
    def run(clients):
        recipe = recipe_of("fedavg", what, optimizer, plan, clients, scale=1.0, microbatch_size=2)
        rows = rounds.Row(jnp.arange(4), jnp.asarray(shares), clients.counts)
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
    "clipped_sum(recipe.name, scaled, rule,",
    'clipped_sum(recipe.name, scaled, __import__("dpjax").clipping.flat(jnp.inf),',
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


@pytest.mark.parametrize("name", sorted(set(RULES) - {"hard_threshold", "screen"}))
@pytest.mark.sample(1)
def test_the_sensitivity_is_attained_by_heavy_clients_that_move_far(name):
    found = [x for x, _ in influences(released(RULES[name], WEIGHTS.shares), np.full((8, 5), 50.0))]
    assert found[0] == pytest.approx(0.25 * RULES[name].sensitivity, rel=1e-3)
    for heavy in found[1:]:
        assert heavy == pytest.approx(RULES[name].sensitivity, rel=1e-3)


@kills("federated/weights.py", "np.minimum(shares, 1.0)", "shares")
@kills(
    "federated/weights.py",
    "(self.values, np.float64) / self.largest",
    "(self.values, np.float64)",
    slow=True,
)
def test_shares_are_weights_over_the_largest_and_never_above_one():
    shares = federated.Weights(values=[0, 30, 100, 700, -5, math.nan, math.inf], largest=100).shares
    np.testing.assert_allclose(shares, [0, 0.3, 1, 1, 0, 0, 1])
    assert shares.max() <= 1.0


@kills(
    "federated/weights.py",
    "np.size(self.values) if self.total is None",
    "float(self.shares.sum()) if self.total is None",
    slow=True,
)
def test_no_weight_moves_the_divisor_where_no_total_is_given():
    """The sum of the weights is private: the number of clients alone is public."""
    for weight in (0.0, 3.0, math.inf):
        weights = federated.Weights(values=[weight, 2.0, 0.5], largest=4.0)
        assert weights.total_share == 3


@kills("federated/fedavg.py", "len(clients) / weights.total_share", "1.0", slow=True)
@pytest.mark.slow
def test_raw_counts_as_weights_are_capped_and_divided_by_the_public_total():
    clients = federated.Clients.of([np.full((n, 1), 0.5, np.float32) for n in (2, 5, 40)])
    # As of NumPy and JAX: run.json holds Python's numbers.
    weights = federated.Weights(values=clients.counts, largest=jnp.float32(10), total=np.int64(15))
    assert json.dumps([weights.largest, weights.total_share]) == "[10.0, 1.5]"
    sampler = sampling.poisson(3, 3)
    algorithm = fedavg(clients, mechanism(3, sampler=sampler), weights=weights)
    # Everybody moves by 0.5; shares are 0.2, 0.5 and 1; the public sum of shares is 1.5.
    assert moved(algorithm, jnp.zeros(1))[0] == pytest.approx(0.5 * 1.7 / 1.5, rel=1e-6)


@pytest.mark.sample(1)
@kills("federated/weights.py", "sigma / self.largest", "sigma", case="2-31.371", slow=True)
@pytest.mark.parametrize(("largest", "want"), [(1, 7.0466), (2, 31.3710), (5, 271.9903)])
def test_noise_as_papers_state_it_is_worth_less_by_the_largest_weight(largest, want):
    multiplier = federated.Weights(values=np.ones(1000), largest=largest).noise_multiplier(1.0)
    plan = mechanism(1000, sampler=sampling.poisson(1000, 100), multiplier=multiplier, steps=100)
    assert plan.epsilon(1e-5, "pld") == pytest.approx(want, rel=1e-3)
    if largest == 1:
        assert plan.epsilon(1e-5) == pytest.approx(7.9039, rel=1e-3)


# What a client does -------------------------------------------------------------------


@pytest.mark.slow
def test_clients_of_size_0_1_and_500_train_in_one_round():
    """Examples of a client are alike, so that the number of its steps is all that matters."""
    sizes, values = (0, 1, 500), (7.0, 0.001, 0.001)
    clients = federated.Clients.of(
        [np.full((n, 3), v, np.float32) for n, v in zip(sizes, values, strict=True)]
    )
    work = {"local_batch_size": 32, "local_epochs": 3, "loss": towards}
    change = moved(fedavg(clients, mechanism(3), **work))
    np.testing.assert_allclose(change, 0.001 * (0 + 3 + 3 * 16) / 3, rtol=1e-5)
    _, info = first_round(fedavg(clients, mechanism(3), **work))
    assert (int(info.clients), int(info.examples)) == (3, 501)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 10])
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


@pytest.mark.parametrize("steps", [1, 3, 7])
@pytest.mark.slow
def test_local_steps_continue_over_epochs(steps):
    clients = federated.Clients.of([np.eye(3, dtype=np.float32)])
    plan = mechanism(1, rule=clipping.flat(math.inf))
    work = {"local_batch_size": 1, "local_epochs": None, "local_steps": steps}
    change = moved(fedavg(clients, plan, towards, **work))
    assert change.sum() == pytest.approx(steps)
    assert change.max() - change.min() == pytest.approx(0 if steps % 3 == 0 else 1)


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


@pytest.mark.slow
@kills("federated/local.py", "real = slots < count", "real = slots < clients.capacity", slow=True)
def test_padding_and_other_clients_rows_contribute_nothing():
    """A batch is longer than the client, and the rows behind it are broken ones."""
    rows = np.random.default_rng(1).normal(size=(3, 3)).astype(np.float32)
    broken = np.full((8, 3), math.nan, np.float32)
    plan = mechanism(3, rule=clipping.flat(2.0))
    long, exact = (
        moved(fedavg(federated.Clients.of(c), plan, local_batch_size=size, local_epochs=2))
        for c, size in [([broken, rows, broken], 8), ([rows[:0], rows, rows[:0]], 3)]
    )
    assert np.linalg.norm(exact) > 0.1
    np.testing.assert_allclose(long, exact, rtol=1e-6)


@pytest.mark.slow
@kills("training/recipe.py", 'key(0, impl="threefry2x32")', "key(0)", slow=True)
def test_a_secret_key_trains_clients_whatever_the_default_generator():
    with jax.default_prng_impl("unsafe_rbg"):
        algorithm = fedavg(some_clients(2, 3), mechanism(2))
        algorithm.init(dpjax.noise.secret_key(), jnp.zeros(3))


@pytest.mark.slow
def test_the_order_of_clients_does_not_matter():
    groups = [np.random.default_rng(n).normal(size=(n, 3)).astype(np.float32) for n in range(7)]
    ways = [groups, groups[::-1]]
    one, other = (moved(fedavg(federated.Clients.of(w), mechanism(7)), steps=3) for w in ways)
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@kills(
    "sampling/draws.py", "- which * size < draw.size", "+ size <= draw.size", case="3", slow=True
)
@kills(
    "training/step.py",
    "jnp.where(mask, recipe.sizes(rows), 0)",
    "recipe.sizes(rows)",
    case="3",
    slow=True,
)
@pytest.mark.parametrize("size", [1, 3, 8])
def test_microbatches_of_clients_change_nothing(size):
    clients = some_clients(*range(20, 0, -1))
    plan = mechanism(20, sampler=sampling.poisson(20, 8), multiplier=1.0)
    work = {"local_batch_size": 4, "local_epochs": 2}
    one, other = (
        moved(fedavg(clients, plan, microbatch_size=s, **work), steps=3) for s in (20, size)
    )
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@kills("federated/rounds.py", "jax.random.fold_in(key, client)", "key", slow=True)
@kills("federated/fedavg.py", "(key, Purpose.LOCAL, step)", "(key, Purpose.LOCAL, 0)", slow=True)
@pytest.mark.slow
def test_each_client_and_round_has_an_order_of_its_own():
    """One example is seen; who sees which differs between clients, rounds and runs."""
    alike = [np.arange(1.0, 21, dtype=np.float32)[:, None]] * 6
    clients, plan = federated.Clients.of(alike), mechanism(6, rule=clipping.flat(math.inf))
    what = local.Local(towards, optax.sgd(1.0), 1, None, 1, None)
    algorithm = fedavg(clients, plan, towards, local_batch_size=1, local_epochs=None, local_steps=1)
    state, sums = algorithm.init(jax.random.key(3), jnp.zeros(1)), []
    for _ in range(5):
        before = state.params
        state, _ = algorithm.step(state)
        sums.append(round(float((state.params - before)[0]) * 6))
    assert len(set(sums)) > 2, "rounds differ"
    assert any(total % 6 for total in sums), "clients differ"
    seen = [
        float(local.trained(what, jnp.zeros(1), clients, jnp.int32(0), jax.random.key(k))[1][0])
        for k in range(8)
    ]
    assert len(set(seen)) > 3, "keys differ"


@pytest.mark.slow
@kills(
    "federated/local.py",
    "clipping.clip(_ball(local.within, params), rows)[0]",
    "carry.update + clipping.clip(_ball(local.within, params), change[None])[0]",
    slow=True,
)
def test_a_projected_client_never_leaves_the_bound_however_long_it_trains():
    """It goes out far and comes back: projected on the way it ends elsewhere."""
    way = np.array([[100.0, 0, 0]], np.float32)
    clients, rule = federated.Clients.of([way]), clipping.hard_threshold(0.5)
    work = {"local_batch_size": 1, "local_epochs": 20}
    assert not moved(fedavg(clients, mechanism(1, rule=rule), towards, **work)).any()
    inside = moved(fedavg(clients, mechanism(1, rule=rule), towards, project=True, **work))
    assert 0.4999 < length(inside) <= 0.5


@kills("federated/local.py", "- ON_BOUND - rounding)", "- ON_BOUND)", slow=True)
def test_an_update_in_bfloat16_stays_in_the_ball_that_it_was_projected_onto():
    """Rounded to bfloat16 it may be longer, and this rule drops what is outside of its bound."""
    way, bound = np.array([[100.0, 3.0, 7.0]], np.float32), 0.77
    clients, rule = federated.Clients.of([way]), clipping.hard_threshold(bound)
    algorithm = fedavg(
        clients, mechanism(1, rule=rule), towards, project=True, local_batch_size=1, local_epochs=1
    )
    found = length(moved(algorithm, jnp.zeros(3, jnp.bfloat16)))
    assert 0.98 * bound < found <= bound


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


@pytest.mark.slow
@kills(
    "gradients/engines.py",
    "_vectorised = isolated(vmap)",
    "_vectorised = vmap",
    case="True",
    slow=True,
)
@pytest.mark.parametrize("wiped", [False, True])
def test_what_is_broken_in_one_client_stays_there_through_convolutions(wiped):
    """In float64 XLA on CPU writes grouped convolutions with zeros, and 0 times NaN is NaN.

    A client's optimizer may wipe that out, and then no norm shows it.
    """
    optimizer = optax.chain(optax.zero_nans(), optax.sgd(1.0)) if wiped else optax.sgd(1.0)

    def convolved(kernel, image):
        out = jax.lax.conv_general_dilated(image[None], kernel, (1, 1), "SAME")
        return jnp.mean(jnp.sin(out))

    with jax.enable_x64(True):
        images = np.random.default_rng(0).normal(size=(3, 2, 2, 5, 5))
        broken = [images[0], images[1] * math.nan, images[2]]
        clients = [
            federated.Clients.of(rows) for rows in (broken, [images[0], images[1][:0], images[2]])
        ]
        kernel = jnp.asarray(np.random.default_rng(1).normal(size=(2, 2, 3, 3)))
        work = {"local_batch_size": 1, "local_epochs": 2, "microbatch_size": 3}
        work["client_optimizer"] = optimizer
        found = [moved(fedavg(c, mechanism(3), convolved, **work), kernel) for c in clients]
    assert length(found[1]) > 0.01
    np.testing.assert_allclose(found[0], found[1], rtol=1e-9)


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
@kills(
    "federated/local.py", "value_and_grad(fast(mean_loss))", "value_and_grad(mean_loss)", slow=True
)
@kills("gradients/layout.py", "_trains_kernels(loss, params, example):", "False:", slow=True)
def test_no_convolution_of_a_round_becomes_a_naive_loop_on_a_cpu():
    """XLA computes convolutions fast in a loop if their channels are last and have no groups."""
    clients, plan, server = images(2, 3), mechanism(2), optax.sgd(1.0)
    what = local.Local(convolving, optax.sgd(0.1), 2, epochs=1, steps=None, within=None)
    recipe = recipe_of("fedavg", what, server, plan, clients, scale=1.0)
    key, scale = jax.random.key(0), jnp.float32(1)
    state = State(KERNELS, server.init(KERNELS), scale, key, jnp.int32(0), None)

    @jax.jit
    def round_of(clients):
        rows = rounds.Row(jnp.arange(2), jnp.ones(2), clients.counts)
        return private_step(bound_to(recipe, clients), rows, state)[0].params

    text = round_of.lower(clients).compile().as_text()
    found = re.findall(r"= \S+ convolution\(.*", text)
    assert len(found) >= 5, "two forward, two for kernels, one for the input of the second layer"
    for line in found:
        assert "dim_labels=b01f_01io->b01f" in line
        assert "group_count" not in line


@pytest.mark.slow
def test_clients_of_a_convolutional_network_move_as_by_plain_gradients(monkeypatch):
    """One after the other by fast gradients, and together by JAX's gradients."""
    work = {"local_batch_size": 2, "local_steps": 3, "local_epochs": None}
    work["client_optimizer"] = optax.sgd(0.01)
    plan = mechanism(3, rule=clipping.flat(1e6))

    def found(size):
        algorithm = fedavg(images(3, 0, 2), plan, convolving, microbatch_size=size, **work)
        return moved(algorithm, KERNELS)

    fast = found(None)
    monkeypatch.setattr(local, "fast", lambda function: function)
    assert length(fast) > 1e-3
    for a, b in zip(fast, found(3), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)


@pytest.mark.slow
def test_a_client_whose_loss_is_not_finite_spoils_no_mean():
    """It counts all the same: its optimizer wiped out what was broken."""
    rows = [np.full((2, 3), value, np.float32) for value in (1.0, math.nan, 3.0)]
    wiping = optax.chain(optax.zero_nans(), optax.sgd(1.0))
    found, want = (
        first_round(fedavg(federated.Clients.of(c), mechanism(len(c)), client_optimizer=wiping))[1]
        for c in (rows, rows[::2])
    )
    assert (found.clients, found.dropped) == (3, 0)
    np.testing.assert_allclose(found.loss, want.loss, rtol=1e-6)


@pytest.mark.slow
@kills("training/step.py", "real & ~finite", "real & ~real", slow=True)
def test_clients_that_diverge_are_counted_and_spoil_no_mean(caplog):
    """Clients without examples are drawn too, and are neither counted nor dropped."""
    values = [math.nan, 1e30, *[0.5] * 5, *[7.0] * 3]

    def algorithm(values):
        rows = [np.full((2, 3), v, np.float32) for v in values] + [np.ones((0, 3), np.float32)] * 2
        return fedavg(federated.Clients.of(rows), mechanism(len(rows)))

    broken, sound = algorithm(values), algorithm(values[2:])
    (_, info), (_, want) = first_round(broken), first_round(sound)
    assert (info.dropped, info.clients, want.dropped, want.clients) == (2, 12, 0, 10)
    np.testing.assert_allclose([info.loss, *info.norm], [want.loss, *want.norm], rtol=1e-6)
    assert (float(info.clipped[0]), float(want.clipped[0])) == pytest.approx((4 / 10, 3 / 8))
    with caplog.at_level("WARNING"):
        _, rows = dpjax.fit(broken, start(broken), progress=False)
    assert rows[-1]["private"]["dropped"] == 2
    assert caplog.text.count("2 had no finite") == 1


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
    states = [a.init(jax.random.key(4), params) for a in (one, other)]
    for _ in range(4):
        (first, info), (second, seen) = one.step(states[0]), other.step(states[1])
        states = [first, second]
        assert int(info.clients) == int(info.examples) == int(seen.examples)
        np.testing.assert_allclose(info.norm, seen.norm, rtol=1e-5)
        np.testing.assert_allclose(info.loss, seen.loss, rtol=1e-5)
    np.testing.assert_allclose(states[0].params, states[1].params, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "server", [optax.adam(0.1), optax.sgd(0.5, momentum=0.9), optax.adagrad(0.1)]
)
@pytest.mark.slow
def test_any_optimizer_serves(server):
    """The server's optimizer is given minus the mean update, once a round."""
    clients = some_clients(3, 1, 4)
    found = moved(fedavg(clients, mechanism(3), server=server))
    mean = jnp.asarray(-moved(fedavg(clients, mechanism(3))), jnp.float32)
    want, _ = server.update(mean, server.init(mean), mean)
    np.testing.assert_allclose(found, want, rtol=1e-5)


@pytest.mark.slow
def test_parameters_in_half_precision_do_not_lose_small_steps():
    clients = federated.Clients.of([np.full((200, 3), 1e-4, np.float32)])
    work = {"local_batch_size": 1, "local_epochs": 5, "loss": towards}
    params = jnp.ones(3, jnp.bfloat16)
    what = local.Local(towards, optax.sgd(1.0), 1, 5, None, None)
    _, update = local.trained(what, params, clients, jnp.int32(0), jax.random.key(0))
    np.testing.assert_allclose(update, 0.1, rtol=0.01)
    change = moved(fedavg(clients, mechanism(1), **work), params)
    np.testing.assert_allclose(change, 0.1, rtol=0.05)


# Noise and sampling --------------------------------------------------------------------


@kills(
    "training/step.py",
    "block=part.value)",
    "block=part.value + jax.random.normal(jax.random.key(rows[0][0]), part.value.shape))",
    case="7",
    slow=True,
)
@pytest.mark.parametrize("size", [1, 7, 40])
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


@kills("federated/fedavg.py", "**extra_arguments(server, scale)", "**{}", case="10.0", slow=True)
@pytest.mark.parametrize("total", [None, 10.0])
@pytest.mark.slow
def test_adam_at_the_server_takes_away_the_noise_that_a_total_of_weights_makes(total):
    """Updates are all 0, so that the second moment is that of the noise."""
    clients = federated.Clients.of([np.zeros((1, 1), np.float32)] * 100)
    plan = mechanism(100, sampler=sampling.poisson(100, 10), multiplier=2.0)
    weights = federated.Weights(values=np.full(100, 0.1), total=total)
    loss = lambda w, x: x[0] * jnp.sum(w)  # noqa: E731
    server = training.dp_adam(1e-3, plan)
    algorithm = federated.fedsgd(loss, server, plan, clients, weights=weights)
    state = algorithm.init(jax.random.key(0), jnp.zeros(100_000))
    for _ in range(2):
        state, _ = algorithm.step(state)
    adam = state.optimizer[0]
    assert float(adam.noise[0]) == pytest.approx(float(jnp.mean(adam.second)), rel=0.02)


@pytest.mark.slow
@kills(
    "training/step.py",
    "    if recipe.rescales:\n        mean =",
    "    mean = jax.tree.map(lambda x: x * recipe.mechanism.batch_size / sums.drawn, mean)\n"
    "    if recipe.rescales:\n        mean =",
    slow=True,
)
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


@pytest.mark.slow
def test_an_empty_draw_is_a_round_of_pure_noise():
    plan = mechanism(1000, sampler=sampling.poisson(1000, 0.001), multiplier=1.0)
    state, info = first_round(fedavg(some_clients(*[2] * 1000), plan))
    assert int(info.clients) == int(info.examples) == 0
    key = trees.step_key(jax.random.key(0), types.Purpose.NOISE, 0)
    draw = trees.random_like(noise.standard_normal, key, jnp.zeros(3))
    np.testing.assert_allclose(state.params, -draw * (1 + 2**-10) / 0.001, rtol=1e-5)
    assert all(np.isnan(x).all() for x in (info.loss, info.norm, info.clipped))


@pytest.mark.slow
def test_an_empty_draw_raises_no_error_under_debug_nans():
    plan = mechanism(1000, sampler=sampling.poisson(1000, 0.001), multiplier=1.0)
    with jax.debug_nans(True):
        state, info = first_round(fedavg(some_clients(*[2] * 1000), plan))
    assert int(info.clients) == 0
    assert np.isfinite(state.params).all()


@pytest.mark.slow
def test_rounds_of_all_sizes_trace_the_loss_no_more_than_one_round():
    traces = []

    def counted(params, example):
        traces.append(None)
        return squared(params, example)

    plan = mechanism(50, sampler=sampling.poisson(50, 6), multiplier=1.0, steps=60)
    algorithm = fedavg(some_clients(*range(50)), plan, counted, local_batch_size=8)
    state, info = first_round(algorithm)
    after_one, sizes = len(traces), {int(info.clients)}
    for _ in range(59):
        state, info = algorithm.step(state)
        sizes.add(int(info.clients))
    assert len(traces) == after_one
    assert len(sizes) > 6


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
        dpjax.fit(dies_after(long_run(), 8), state, directory=tmp_path / "cut", **options)
    saved = [p.name for p in (tmp_path / "cut" / "checkpoints").glob("[0-9]*")]
    assert max(map(int, saved)) == 6
    again, others = dpjax.fit(long_run(), state, directory=tmp_path / "cut", **options)
    jax.tree.map(np.testing.assert_array_equal, whole.params, again.params)
    assert [r["private"] for r in rows] == [r["private"] for r in others]
    names = {"loss", "clients", "examples", "dropped", "norm", "clipped"}
    assert names == set(rows[0]["private"])


@pytest.mark.slow
def test_the_log_counts_clients_by_their_name(capsys):
    algorithm = long_run()
    _, rows = dpjax.fit(algorithm, start(algorithm, 5), steps=2)
    assert rows[-1]["clients_per_second"] > 0
    assert "examples_per_second" not in rows[-1]
    shown = capsys.readouterr().err
    assert "clients/s" in shown
    assert "second" not in shown


@pytest.mark.slow
def test_another_run_in_the_folder_is_refused_by_name(tmp_path):
    state = start(long_run(), 5)
    dpjax.fit(long_run(), state, steps=2, directory=tmp_path, progress=False)
    run = json.loads((tmp_path / "run.json").read_text())
    described = run["mechanism"]
    assert (run["algorithm"], described["unit"]) == ("fedavg", "client")
    assert described["sampling"]["examples"] == 30
    other = federated.fedsgd(squared, optax.sgd(0.1), long_run().mechanism, some_clients(*[2] * 30))
    with pytest.raises(ledger.Refused, match="algorithm") as refused:
        dpjax.fit(other, start(other, 5), directory=tmp_path)
    assert "data:" in str(refused.value)


@kills("federated/fedavg.py", "shared=clients, budget=budget,", "shared=clients,", slow=True)
@pytest.mark.slow
def test_a_budget_stops_rounds_before_they_begin():
    clients = some_clients(*[2] * 50)
    plan = mechanism(50, sampler=sampling.poisson(50, 5), multiplier=1.5, steps=50)
    budget = ledger.Budget(epsilon=2.0, delta=1e-5)
    fits = ledger.affordable(plan, budget)
    algorithm = fedavg(clients, plan, budget=budget)
    state = start(algorithm)
    for _ in range(fits):
        state, _ = algorithm.step(state)
    with pytest.raises(ledger.Refused, match=f"{fits} of 50 steps fit"):
        algorithm.step(state)


@pytest.mark.slow
@kills(
    "reports/statement.py",
    'yield f"  unit          one {unit}"',
    'yield "  unit          one example"',
    slow=True,
)
@kills("mechanism/card.py", '"unit": spent.unit,', '"unit": "example",', slow=True)
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


def test_what_was_spent_in_another_unit_is_not_added():
    before = mechanism(30, multiplier=1.0)
    spent = before.spent(before.multipliers)
    assert spent_of(json.loads(json.dumps(before.facts)), 3)[0].unit == "client"
    assert mechanism(30, multiplier=1.0, before=[spent]).epsilon(1e-5) > before.epsilon(1e-5)
    with pytest.raises(ValueError, match="protect one client"):
        dataclasses.replace(before, unit="example", before=[spent])


# What it refuses ------------------------------------------------------------------------


def work(**options):
    return lambda: fedavg(some_clients(1), mechanism(1), **options)


def own(clients, plan, **options):
    """A call with as many clients of one example."""
    return lambda: fedavg(some_clients(*[1] * clients), plan, **options)


ADAPTIVE = {"multiplier": 1.0, "adaptive": clipping.Quantile(count_multiplier=10.0)}
Clients, Weights = federated.Clients, federated.Weights
ROWS, ONE = np.ones((2, 3)), some_clients(1)
NO_NUMBER = r"the metric of one example has shape \(3,\)"
OTHER_LEAVES = "an example of client 1 is {'b': '3'}, one of client 0 is {'a': '3'}"
VALUES_REFUSED = [
    (own(20, mechanism(100)), r"^federated\.fed.*20 clients and 20 weights.*draws from 100"),
    (own(3, mechanism(3, unit="example")), r"Mechanism\(unit='client'"),
    (lambda: federated.scores(lambda params, x: x, None, ONE), NO_NUMBER),
    (own(9, mechanism(9, **ADAPTIVE)), "adapts its bound to a quantile"),
    (own(2, mechanism(2, rule=clipping.jl(1.0, 30))), "exists as a whole"),
    (lambda: mechanism(3, unit="person"), "example, client"),
    (own(2, mechanism(2), weights=Weights(values=np.ones(3))), "2 clients and 3 weights"),
    (lambda: Weights(values=np.ones(3), largest=math.inf), "expected a finite number above 0"),
    (lambda: Weights(values=[1], total=0.0), "total=0.0.: expected a finite number above 0"),
    (lambda: Weights(values=3.0), "one weight per client"),
    (lambda: Clients.of([]), "of each client"),
    (lambda: some_clients(0, 0), "none of 2 clients"),
    (lambda: Clients.of([np.zeros((2**30, 0))] * 2), "another client's row"),
    (
        lambda: Clients.split(np.ones((3, 2)), [0, 1, 5], clients=3),
        "from 0 to 2 for each of 3 rows",
    ),
    (lambda: Clients.split(np.ones((2, 2)), [0.0, 1.0], clients=3), "float64"),
    (lambda: Clients.split(np.ones((2, 2)), ["ann", "bob"], clients=2), r"np\.unique\(owners"),
    (lambda: Clients.of([{"a": ROWS}, {"b": ROWS}]), OTHER_LEAVES),
    (lambda: Clients.of([ROWS, np.ones((0, 3)), np.ones(3)]), "client 2 is a number"),
]
WORK_REFUSED = {
    "expected one of the two": [{"local_epochs": None}, {"local_steps": 2}],
    r"^federated\.fedavg\(local_\w+=.*: expected a (whole )?number": [
        {"local_batch_size": 0},
        {"local_batch_size": 2.5},
        {"local_batch_size": True},
        {"local_epochs": 1.5},
        {"local_epochs": math.nan},
        {"local_epochs": None, "local_steps": 2.5},
        {"local_epochs": None, "local_steps": "3"},
    ],
    r"fed.*\(microbatch_size=.*whole number, at least 1": [
        {"microbatch_size": size} for size in (0, -1, 1.5)
    ],
}
VALUES_REFUSED += [
    (
        lambda: start(fedavg(some_clients(1), mechanism(1), lambda w, x: w - x)),
        r"^federated\.fedavg: the loss of one example is .*expected a real scalar",
    )
]
VALUES_REFUSED += [
    (lambda n=n: Clients.split(ROWS, [0, 1], n), r"Clients\.split\(clients=") for n in (1.5, 0, "2")
]
VALUES_REFUSED += [(work(**given), words) for words, all_ in WORK_REFUSED.items() for given in all_]
NO_CLIENTS = r"clients is a list.*Clients\.of"
WORDS = np.array(["a", "b"])
NO_NUMBERS = r"^federated\.Clients\.(of: client 0: leaf 1|split: leaf 1) is of type <U1.*np\.unique"


TYPES_REFUSED = [
    (work(weights=[1.0]), "expected a Weights"),
    (work(budget=3.0), r"Write dpjax\.ledger\.Budget"),
    (lambda: fedavg(ONE, sampling.full(1)), "mechanism is a Sampler; .*arguments were swapped"),
    (work(project="no"), "project is a str; expected a bool"),
    (work(project=1), "project is a int; expected a bool"),
    (work(client_optimizer=0.1), "client_optimizer is a float"),
    (work(server=optax.sgd), "server_optimizer is a function"),
    (
        lambda: work()().init(jax.random.key(0), jnp.arange(3)),
        r"^federated\.fedavg: init\(.*is int32",
    ),
    (
        lambda: work()().init(jax.random.key(0), {"a": "x"}),
        r"^federated\.fedavg: init\(.*leaf a is of type <U1",
    ),
    (lambda: Clients.of([(ROWS, WORDS)]), NO_NUMBERS),
    (lambda: Clients.split((ROWS, WORDS), owners=[0, 1], clients=2), NO_NUMBERS),
    (lambda: Clients.of([WORDS.astype(object)]), r"client 0: .*is of type object"),
    (lambda: fedavg([ROWS], mechanism(1)), NO_CLIENTS),
    (lambda: federated.fedsgd(squared, optax.sgd(1.0), mechanism(1), [ROWS]), NO_CLIENTS),
    (lambda: federated.fedsgd(squared, 0.1, mechanism(1), ONE), "server_optimizer is a float"),
]


@pytest.mark.parametrize(("call", "words"), VALUES_REFUSED)
def test_values_that_are_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize(("call", "words"), TYPES_REFUSED)
def test_types_that_are_refused(call, words):
    with pytest.raises(TypeError, match=words):
        call()


@pytest.mark.slow
def test_examples_may_hold_keys():
    """For a loss with randomness of its own, as for `dpsgd`."""

    def loss(w, example):
        x, key = example
        return 0.5 * jnp.sum((w - x - jax.random.normal(key, x.shape)) ** 2)

    x, keys = np.ones((6, 2), np.float32), jax.random.split(jax.random.key(0), 6)
    parts = [(x[a:b], keys[a:b]) for a, b in ((0, 2), (2, 3), (3, 6))]
    split = federated.Clients.split((x, keys), owners=[0, 0, 1, 2, 2, 2], clients=3)
    for clients in (federated.Clients.of(parts), split):
        found = moved(fedavg(clients, mechanism(3), loss), jnp.zeros(2))
        assert np.all(np.isfinite(found))
        assert np.any(found)


def test_numbers_of_numpy_are_numbers():
    for options in (
        {"local_epochs": np.int64(2)},
        {"local_epochs": None, "local_steps": np.int8(3)},
    ):
        algorithm = work(microbatch_size=np.int64(1), **options)()
        json.dumps(algorithm.identity(start(algorithm)))


def test_clients_are_read_from_any_sequence():
    rows = [np.ones((2, 3)), np.zeros((0, 3))]
    assert federated.Clients.of(x for x in rows).counts.tolist() == [2, 0]


def test_a_loss_that_is_no_number_is_refused():
    """As many numbers as a batch has rows would pass for the losses of its rows."""
    algorithm = fedavg(some_clients(3), mechanism(1), lambda w, x: w * x, local_batch_size=3)
    with pytest.raises(ValueError, match="expected a real scalar"):
        first_round(algorithm)


def test_a_step_inside_jit_is_refused():
    algorithm = work()()
    with pytest.raises(TypeError, match="ledger has to look"):
        jax.jit(algorithm.step)(start(algorithm))


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

# SPDX-License-Identifier: Apache-2.0
"""Plans: what they cost, what they depend on, and that they train."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpjax
from dpjax import planning, training
from dpjax.planning import sizes

ROWS = 300


def planned_for(examples=ROWS, epsilon=3.0, **options):
    return dpjax.plan(examples, {"w": jnp.zeros(3)}, epsilon=epsilon, delta=1e-5, **options)


@pytest.fixture(scope="module")
def planned():
    return planned_for()


@pytest.mark.parametrize(
    ("examples", "epsilon", "most"),
    [(100, 0.3, 1e3), (1_000, 1.0, np.inf), (60_000, 3.0, np.inf), (10**7, 8.0, 1e6)],
)
def test_sizes_fit_the_data_and_the_time_and_noise_is_never_below_that_of_all_examples(
    examples, epsilon, most
):
    size = planning.size_for(examples, epsilon, 1e-5, most)
    assert min(examples, sizes.LEAST_BATCH, most / size.steps) <= size.batch <= examples
    assert 25 <= size.steps <= sizes.MOST_STEPS
    assert size.examples <= 1.01 * most + size.steps
    assert size.excess >= 1
    noises = [size.excess for size in planning.other_sizes(examples, epsilon, 1e-5, most)]
    assert noises == sorted(noises, reverse=True)


def test_the_parameter_of_gaussian_privacy_is_that_of_the_accountant():
    mu = sizes.gaussian_parameter(2.0, 1e-5)
    event = dpjax.accounting.gaussian(1 / mu)
    assert dpjax.accounting.epsilon(event, 1e-5, "pld") == pytest.approx(2.0, rel=1e-3)


def test_a_plan_costs_at_most_epsilon_by_the_accounting_of_its_mechanism(planned):
    assert 2.9 < planned.mechanism.epsilon() <= 3.0
    assert planned.mechanism.epsilon(1e-5, "pld") <= 3.0


def test_a_plan_reads_the_number_of_examples_and_no_example(planned):
    for value in (0.0, 1e6):
        of_data = planned_for({"x": np.full((ROWS, 2), value)})
        assert of_data.mechanism.facts == planned.mechanism.facts
        assert of_data.reasons == planned.reasons


def test_the_bound_follows_the_norms_only_where_a_count_tells_them():
    assert planned_for(60_000).mechanism.adaptive.target == 0.97
    for examples, epsilon in [(50, 1.0), (150, 0.3), (300, 1.0)]:  # the bound wandered off here
        assert planned_for(examples, epsilon).mechanism.adaptive is None


def test_fewer_minutes_mean_fewer_examples(planned):
    short = planned_for(minutes=0.5, examples_per_second=ROWS)
    assert short.mechanism.batch_size * short.mechanism.steps <= 31 * ROWS
    assert short.mechanism.epsilon() <= 3.0
    assert planned_for(minutes=1.0).mechanism.steps >= 1  # at a speed that is measured


def test_a_plan_prints_its_reasons(planned):
    printed = str(planned)
    assert all(name in printed for name in planned.reasons)
    assert printed.endswith("No setting was chosen on these data.")


def moves(planned, means):
    """The updates of the optimizer for these private means."""
    optimizer = planned.optimizer
    params = {"w": jnp.zeros(3)}
    state = optimizer.init(params)
    made = []
    for mean in means:
        update, state = optimizer.update({"w": jnp.asarray(mean)}, state, params)
        params = optax.apply_updates(params, update)
        made.append(update["w"])
    return np.array(made), state


@pytest.mark.thorough
def test_pure_noise_moves_the_loss_at_the_bound_by_about_the_drift():
    rows = planned_for(1_000)
    mechanism = rows.mechanism
    optimizer = planning.paced(mechanism, drift=0.5)
    params = jnp.zeros(4_000)
    noise = mechanism.deviations_on_mean(0)[0] * jax.random.normal(
        jax.random.key(0), (mechanism.steps, 4_000)
    )

    def step(carry, mean):
        params, state = carry
        update, state = optimizer.update(mean, state)
        return (params + update, state), None

    (params, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), noise)
    # The loss of an example whose gradient is as long as the bound.
    moved = mechanism.clipping.sensitivity * float(jnp.std(params))
    assert 0.4 < moved < 0.5  # the warm-up takes a little


def test_a_schedule_of_bounds_does_not_move_the_rate():
    optimizer = planning.paced(planned_for(50, epsilon=1.0).mechanism)  # its bound stays
    state = optimizer.init(jnp.zeros(3))
    moves = [optimizer.update(s * jnp.ones(3), state, bound_scale=s)[0] for s in (1.0, 0.1)]
    np.testing.assert_allclose(*moves, rtol=1e-5)


def test_steps_follow_from_released_means_and_their_scale_hardly_matters(planned):
    means = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    first, _ = moves(planned, means)
    scaled, _ = moves(planned, 10 * means)  # far above the noise, no floor is reached
    np.testing.assert_allclose(first, scaled, rtol=1e-5)
    quiet = np.full((5, 3), 1e-9, np.float32)
    update, _ = moves(planned, quiet)  # at the known noise, not at what is seen
    assert np.max(np.abs(update)) < 1e-6


@pytest.mark.thorough
@pytest.mark.parametrize("scale", [0.3, 30.0])
def test_a_planned_run_learns_whatever_the_scale_of_its_inputs(planned, scale):
    x = np.random.default_rng(1).normal(size=(ROWS, 3)).astype(np.float32)
    y = x @ np.array([0.5, -1.0, 0.2], np.float32)
    x *= scale

    def loss(params, example):
        return (example[0] @ params["w"] - example[1]) ** 2

    algorithm = dpjax.dpsgd(loss, planned.optimizer, planned.mechanism, (x, y))
    state = algorithm.init({"w": jnp.zeros(3)}, jax.random.key(0))
    state, _ = dpjax.fit(algorithm, state, progress=False)
    learnt = training.averaged(state.optimizer)["w"]
    assert np.mean((x @ learnt - y) ** 2) < 0.3 * np.var(y)

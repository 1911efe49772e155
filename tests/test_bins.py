# SPDX-License-Identifier: Apache-2.0
"""Runs from one state: the bins that they share, and the epsilon of all of them."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import killable_runs as runs
import numpy as np
import optax
import pytest
from mutation import kills
from small_mechanisms import mechanism_with

import dpjax
from dpjax import sampling, strategies, training, trees

EXAMPLES = 200
BATCHES = 10
DATA = np.zeros((EXAMPLES, 5), np.float32)


def algorithm_of(sampler, data=DATA, steps=4 * BATCHES, **options):
    mechanism = mechanism_with(sampling=sampler, steps=steps, **options)
    return dpjax.dpsgd(runs.loss, optax.sgd(0.1), mechanism, data)


def bins_of(algorithm, state):
    """The step of its epoch at which each example is drawn, by the key of a state of `fit`."""
    sampler = algorithm.mechanism.sampling
    bins = np.full(EXAMPLES, -1)
    for step in range(BATCHES):
        draw = sampler.draw(state.key, jnp.int32(step), state.epoch_key)
        bins[sampling.on_host(draw)] = step
    return bins


def ran(algorithm, state, steps):
    return dpjax.fit(algorithm, state, steps=steps, progress=False)[0]


SAMPLERS = {
    "random_allocation": sampling.random_allocation(EXAMPLES, BATCHES),
    "balls_in_bins": sampling.balls_in_bins(EXAMPLES, EXAMPLES / BATCHES),
}


@kills("types.py", "begins = step % self.bins.steps == 0", "begins = False")
@pytest.mark.parametrize("name", SAMPLERS)
def test_runs_from_one_first_state_have_bins_of_their_own(name):
    algorithm = algorithm_of(SAMPLERS[name])
    state = algorithm.init(jnp.zeros(5))
    bins = [bins_of(algorithm, ran(algorithm, state, 1)) for _ in range(3)]
    for one, other in [(0, 1), (0, 2), (1, 2)]:
        # Two uniform bins are equal with probability 1/10.
        assert np.mean(bins[one] == bins[other]) < 0.3


@pytest.mark.thorough
@kills("types.py", "jnp.where(begins, self", "jnp.where(True, self")
@pytest.mark.parametrize("name", SAMPLERS)
def test_continuations_share_the_rest_of_an_epoch(name):
    """The next epoch of random allocation has bins of its own; balls keep theirs for the run."""
    algorithm = algorithm_of(SAMPLERS[name])
    begun = ran(algorithm, algorithm.init(jnp.zeros(5)), 3)
    forks = [ran(algorithm, begun, 2) for _ in range(2)]
    later = [ran(algorithm, state, BATCHES) for state in forks]
    bins = [bins_of(algorithm, state) for state in (begun, *forks)]
    np.testing.assert_array_equal(bins[0], bins[1])
    np.testing.assert_array_equal(bins[0], bins[2])
    first, second = (bins_of(algorithm, state) for state in later)
    if name == "balls_in_bins":
        np.testing.assert_array_equal(first, bins[0])
        np.testing.assert_array_equal(second, bins[0])
    else:
        assert np.mean(first == second) < 0.3
        assert np.mean(first == bins[0]) < 0.3


def own_weight(w, i):
    """Each example moves a weight of its own, so the parameters tell how often it was drawn."""
    return jnp.sum(jnp.where(jnp.arange(EXAMPLES) == i, w, 0))


def drawn_once(folder, data=None):
    """Runs an epoch that dies after 4 steps, resumes it twice, and asserts that it is whole."""
    indices = np.arange(EXAMPLES, dtype=np.float32)
    sampler = SAMPLERS["random_allocation"]
    mechanism = mechanism_with(sampling=sampler, steps=BATCHES, noise_multiplier=1e-4)
    data = indices if data is None else data(indices)
    algorithm = dpjax.dpsgd(own_weight, optax.sgd(BATCHES * 2.0), mechanism, data)
    options = {"evaluate_every": 2, "save_every": 2}
    first = lambda: algorithm.init(jnp.zeros(EXAMPLES))  # noqa: E731
    runs.cut_off(folder / "a", algorithm, after=4, state=first(), **options)
    shutil.copytree(folder / "a", folder / "b")
    for name in ("a", "b"):
        end, _ = runs.fit(folder / name, algorithm, first(), **options)
        np.testing.assert_allclose(-end.params, np.ones(EXAMPLES), atol=0.01)


@kills("training/_streaming.py", "state._replace(epoch_key=epoch_key)", "state", case="stream")
@kills("training/step.py", "state._replace(epoch_key=epoch_key)", "state", case="memory")
@pytest.mark.parametrize("place", ["memory", "stream"])
def test_a_resumed_epoch_draws_each_example_once(tmp_path, place):
    """The checkpoint keeps the bins of the epoch that runs, also in a copy of the folder."""
    drawn_once(tmp_path, None if place == "memory" else dpjax.data.Stream)


SHARDED = """
import pathlib, sys
import jax
jax.config.update("jax_num_cpu_devices", 2)
sys.path.insert(0, {tests!r})
import test_bins
assert len(jax.devices()) == 2
test_bins.drawn_once(pathlib.Path({folder!r}))
"""


@pytest.mark.thorough
def test_a_resumed_epoch_on_two_devices_draws_each_example_once(tmp_path):
    tests = str(pathlib.Path(__file__).parent)
    program = SHARDED.format(tests=tests, folder=str(tmp_path))
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "2"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)


@kills("training/_keys.py", "bins.key(given.noise_key, saved.step)", "given.epoch_key")
@pytest.mark.thorough
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_supplied_key_resumes_in_the_second_epoch_to_the_last_bit(tmp_path, name):
    algorithm = algorithm_of(SAMPLERS[name], runs.DATA, steps=2 * BATCHES)
    options = {"evaluate_every": 4, "save_every": 2}
    state = algorithm.init(jnp.zeros(5), jax.random.key(3))
    whole, _ = runs.fit(tmp_path / "whole", algorithm, state, **options)
    runs.cut_off(tmp_path / "part", algorithm, after=14, state=state, **options)
    resumed, _ = runs.fit(tmp_path / "part", algorithm, state, **options)
    for one, other in zip(*map(jax.tree.leaves, (whole, resumed)), strict=True):
        np.testing.assert_array_equal(*map(trees.on_host, (one, other)))


@pytest.mark.thorough
def test_a_supplied_key_draws_as_its_sampler_alone():
    """No run of a supplied key changed when bins got a key of their own."""
    for sampler in SAMPLERS.values():
        key = jax.random.key(3)
        epoch_key = jax.random.key(0)  # of no epoch: the first step begins one
        for step in range(2 * BATCHES):
            draw, epoch_key = sampler.drawn(key, key, epoch_key, jnp.int32(step))
            np.testing.assert_array_equal(draw.mask, sampler.draw(key, step).mask)
            np.testing.assert_array_equal(draw.indices, sampler.draw(key, step).indices)


# Batches, multiplier, epochs; then epsilon of one run, of two and of three, at 1e-5 by PLD. One run
# with the epochs of all has the same epsilon.
COSTS = [
    (100, 0.7, 1, (2.17, 2.54, 2.83)),
    (1000, 0.5, 1, (3.13, 3.54, 3.82)),
    (20, 0.8, 5, (4.89, 6.77, 8.33)),
    (234, 0.6, 15, (5.45, 7.36, 8.96)),
]


@pytest.mark.parametrize(
    ("batches", "multiplier", "epochs", "epsilons"),
    [
        pytest.param(*COSTS[0], marks=pytest.mark.thorough),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in COSTS[1:]),
    ],
)
def test_runs_from_one_state_cost_what_one_run_of_their_epochs_costs(
    tmp_path, batches, multiplier, epochs, epsilons
):
    """Each run has bins of its own, so the card that counts the earlier runs is right."""
    sampler = sampling.random_allocation(2000, batches)
    facts = {"sampling": sampler, "noise_multiplier": multiplier, "steps": batches * epochs}
    data = np.zeros((2000, 5), np.float32)
    plain = dpjax.dpsgd(runs.loss, optax.sgd(0.1), mechanism_with(**facts), data)
    state, before = plain.init(jnp.zeros(5)), ()
    for number, epsilon in enumerate(epsilons, 1):
        algorithm = dpjax.dpsgd(
            runs.loss, optax.sgd(0.1), mechanism_with(**facts, before=before), data
        )
        folder = tmp_path / str(number)
        options = {"delta": 1e-5, "method": "pld", "progress": False, "evaluate_every": 10**6}
        dpjax.fit(algorithm, state, directory=folder, **options)
        before = training.earlier(folder)
        card = json.loads((folder / "privacy.json").read_text())
        stated = card["epsilon"]["pld"]["value"]
        one_run = mechanism_with(**{**facts, "steps": batches * epochs * number})
        assert stated == pytest.approx(one_run.epsilon(1e-5, "pld"), rel=1e-3)
        assert stated == pytest.approx(epsilon, abs=0.0051)


@pytest.mark.thorough
def test_correlated_noise_counts_bins_that_two_runs_do_not_share():
    """Without a strategy an epoch costs a Gaussian; with one, the unknown batch counts."""
    noise = strategies.banded(4 * BATCHES, bands=2)
    algorithm = algorithm_of(SAMPLERS["balls_in_bins"], noise=noise)
    state = algorithm.init(jnp.zeros(5))
    first, second = (bins_of(algorithm, ran(algorithm, state, 2)) for _ in range(2))
    assert np.mean(first == second) < 0.3


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_checkpoint_holds_no_key_of_a_supplied_run_and_one_byte_of_its_hash(tmp_path, name):
    algorithm = algorithm_of(SAMPLERS[name])
    state = algorithm.init(jnp.zeros(5), jax.random.key(4711234))
    runs.fit(tmp_path, algorithm, state, steps=3)
    checkpoints = training.Checkpoints(tmp_path / "checkpoints")
    named, facts = checkpoints._read(checkpoints.manager.latest_step())
    checkpoints.close()
    keys = {leaf: words for leaf, words in named.items() if "key" in leaf}
    assert len(keys) == 3
    assert not any(np.any(words) for words in keys.values())
    assert re.fullmatch("[0-9a-f]{2}", facts["key"])
    for path in pathlib.Path(tmp_path).rglob("*"):
        if path.is_file():
            assert not re.search(rb"key\W+[0-9a-f]{8}", path.read_bytes()), path

# SPDX-License-Identifier: Apache-2.0
"""Steps of `dpsgd`: one call or many, streams, and the bounds, entries and weights of a step."""

import math
import subprocess
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import killable_runs
import numpy as np
import optax
import pytest
from mutation import kills
from small_mechanisms import mechanism_with
from training_runs import DATA, algorithm_with, fit, loss, make, start

from dpjax import clipping, sampling
from dpjax.data import Stream


@pytest.mark.thorough
def test_steps_run_with_64_bits():
    with jax.enable_x64(True):
        state, _ = fit(make(steps=3, microbatch_size=2))
    assert np.all(np.isfinite(state.params))


def test_two_inits_differ_and_replay_with_one_supplied_key():
    algorithm = make()
    states = [start(algorithm, seed) for seed in (0, 1, 0, None, None)]
    first, second, again, fresh, other = (algorithm.step(state)[0].params for state in states)
    assert not any(np.any(a == b) for a, b in ((first, second), (first, fresh), (fresh, other)))
    np.testing.assert_array_equal(first, again)
    assert [bool(state.ledger.supplied) for state in states] == [True] * 3 + [False] * 2


@pytest.mark.slow
def test_many_steps_in_one_call_are_the_same_steps():
    one, many = make(batch=25), make(batch=25)
    state = start(one)
    losses = []
    for _ in range(7):
        state, info = one.step(state)
        losses.append(info.loss)
    key, params = jax.random.key(0), jnp.zeros(3)
    last, infos = many.run(many.init(params, key), 7)
    assert not params.is_deleted(), "`run` donates the buffers of the state, not the caller's"
    assert not key.is_deleted()
    np.testing.assert_array_equal(last.params, state.params)
    np.testing.assert_array_equal(infos.loss, np.stack(losses))
    assert last.ledger.steps == state.ledger.steps == 7
    assert int(last.step) == 7


def test_a_state_that_was_given_to_fit_or_step_can_be_used_again():
    algorithm = make()
    state = start(algorithm)
    first, _ = fit(algorithm, state)
    stepped, _ = algorithm.step(state)
    second, _ = fit(algorithm, state)
    np.testing.assert_array_equal(first.params, second.params)
    np.testing.assert_array_equal(state.params, np.zeros(3))
    assert np.any(stepped.params != 0)


def steps_in_microbatches():
    """Results of five steps on data in memory and on a stream, with one broken example."""
    x = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    x[7] = np.nan
    mechanism = mechanism_with(50, 20, steps=5)
    results = []
    for data in (x, Stream(x)):
        algorithm = algorithm_with(mechanism, data, microbatch_size=3)
        state, infos = algorithm.run(start(algorithm), 5)
        results += [state.params, infos.examples, infos.norm, infos.clipped]
    return results


TWO_DEVICES = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 2)
import numpy as np
import test_steps
np.savez(sys.argv[1], *test_steps.steps_in_microbatches())
"""


@pytest.mark.slow
@kills(
    "sampling/draws.py",
    "asarray(which * size, jnp.int32)",
    "asarray(0 * size, jnp.int32)",
    slow=True,
)
@kills("training/_streaming.py", "split={1, 2, 3}", "split={3}", slow=True)
def test_two_devices_take_the_steps_of_one(tmp_path):
    """The same draws and the same noise, once; each example on one device alone."""
    program = [sys.executable, "-c", TWO_DEVICES, str(tmp_path / "two.npz")]
    subprocess.run(program, check=True, timeout=300, env=killable_runs.environment())
    with np.load(tmp_path / "two.npz") as two:
        for name, one in zip(two.files, steps_in_microbatches(), strict=True):
            np.testing.assert_allclose(two[name], one, rtol=1e-5)


class TestStreamed:
    X = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)

    @kills(
        "training/_streaming.py",
        "mask[: len(drawn)] = drawn",
        "mask[: len(drawn) + 1] = True",
        case="poisson-8",
        slow=True,
    )
    @pytest.mark.parametrize("microbatch_size", [None, 8])
    @pytest.mark.parametrize("sampler", ["poisson", "full"])
    @pytest.mark.slow
    def test_it_takes_the_steps_of_data_in_memory(self, sampler, microbatch_size):
        samplers = {"poisson": sampling.poisson(50, 20), "full": sampling.full(50)}
        mechanism = mechanism_with(sampling=samplers[sampler])
        options = {"optimizer": optax.adam(0.1), "microbatch_size": microbatch_size}
        runs = []
        for data in (self.X, Stream(self.X)):
            algorithm = algorithm_with(mechanism, data, **options)
            state, info = algorithm.run(start(algorithm), 5)
            runs.append((state.params, info))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), *runs)

    def test_only_what_is_drawn_is_read(self):
        read = []

        class Counted(list):
            def __getitem__(self, index):
                read.append(index)
                return super().__getitem__(index)

        algorithm = algorithm_with(mechanism_with(50, 5), Stream(Counted(self.X)))
        read.clear()
        _, infos = algorithm.run(start(algorithm), 4)
        assert len(read) == infos.examples.sum()
        assert sum(infos.examples) < 45


class TestBoundSchedule:
    """A small bound first, a large one later."""

    late = 8.0

    def schedule(self, step):
        return jnp.where(step < 2, 0.25, self.late)

    def run(self, rule, **options):
        """An algorithm of four steps without noise, and their results."""
        facts = {"clipping": rule, "noise_multiplier": 0.0, "steps": 4}
        mechanism = mechanism_with(sampling=sampling.full(50), **facts)
        algorithm = algorithm_with(mechanism, DATA * 3, optimizer=optax.sgd(1.0), **options)
        # The table that was checked runs, whatever the function reads later.
        with mock.patch.object(self, "late", -1.0):
            return algorithm, algorithm.run(start(algorithm), 4)

    @pytest.mark.thorough
    @kills("training/step.py", "loss(params, example) / scale", "loss(params, example)", slow=True)
    def test_it_is_clipping_to_the_bound_of_the_step(self):
        algorithm, (state, infos) = self.run(clipping.flat(0.4), bound_schedule=self.schedule)
        assert algorithm.scaled_by == "a bound schedule"
        far = np.linalg.norm(3 * np.ones(3))
        moved = [0.1, 0.1, 3.2, 3.2]  # bounds 0.1 and 3.2 x; the gradient is longer at first
        want = 0.0
        for length, seen in zip(moved, infos.norm, strict=True):
            assert seen[0] == pytest.approx(far - want, rel=1e-5)
            want += min(length, far - want)
        np.testing.assert_allclose(np.linalg.norm(state.params), want, rtol=1e-5)
        np.testing.assert_array_equal(infos.clipped[:, 0], [1, 1, 1, 0])

    @pytest.mark.thorough
    @kills(
        "training/step.py",
        "mean = jax.tree.map(lambda x: (x * scale).astype(x.dtype), mean)",
        "pass",
        slow=True,
    )
    def test_noise_follows_the_bound(self):
        facts = {"clipping": clipping.flat(0.4), "noise_multiplier": 2.0, "steps": 3}
        algorithm = algorithm_with(
            mechanism_with(sampling=sampling.full(50), **facts),
            jnp.zeros((50, 100_000)),
            loss=lambda w, x: jnp.sum(w * x),
            optimizer=optax.sgd(1.0),
            bound_schedule=self.schedule,
        )
        state = algorithm.init(jnp.zeros(100_000), jax.random.key(0))
        before = 0.0
        for scale in (0.25, 0.25, 8.0):
            state, _ = algorithm.step(state)
            deviation = np.std(state.params - before)
            assert deviation == pytest.approx(2.0 * 0.4 * scale / 50, rel=0.01)
            before = state.params

    def test_a_bound_that_is_not_positive_is_refused(self):
        with pytest.raises(ValueError, match="at step 3 of"):
            self.run(clipping.flat(1.0), bound_schedule=lambda step: 3.0 - step)


def timed(w, example):
    """A loss whose value shows the epoch, and whose gradient grows with it."""
    x, epoch = example
    return loss(w, x) * (1 + epoch)


class TestPerStep:
    @pytest.mark.thorough
    @pytest.mark.sample(1)
    @kills(
        "training/recipe.py",
        "entry(key, step), size",
        "entry(key, 0 * step), size",
        case="None-vmap",
        slow=True,
    )
    @pytest.mark.parametrize("engine", ["vmap", "scan", "ghost"])
    @pytest.mark.parametrize("microbatch_size", [None, 4])
    def test_the_loss_of_step_t_sees_the_epoch_of_step_t(self, engine, microbatch_size):
        options = {"engine": engine, "microbatch_size": microbatch_size}
        mechanism = mechanism_with(steps=6, clipping=clipping.flat(100.0))
        algorithm = algorithm_with(
            mechanism, (DATA,), loss=timed, per_step=lambda step: step // 2, **options
        )
        state = start(algorithm)
        epochs = []
        for _ in range(6):
            before = state.params
            state, info = algorithm.step(state)
            epochs.append(float(info.loss) / float(loss(before, DATA[0])) - 1)
        np.testing.assert_allclose(epochs, [0, 0, 1, 1, 2, 2], atol=1e-5)

    @pytest.mark.slow
    def test_it_is_as_if_each_example_brought_it(self):
        """The same examples, the same noise: only where the entry comes from differs."""
        x = jnp.arange(150.0).reshape(50, 3)
        mechanism = mechanism_with(steps=1, clipping=clipping.flat(1e6))
        sevens = (x, jnp.full(50, 7, jnp.int32))
        algorithms = [
            algorithm_with(mechanism, data, loss=timed, per_step=per_step)
            for data, per_step in (((x,), lambda step: step + 7), (sevens, None))
        ]
        (one, first), (two, second) = (a.step(start(a)) for a in algorithms)
        np.testing.assert_array_equal(one.params, two.params)
        assert first.loss == second.loss


class TestWeights:
    @staticmethod
    def summed(weights, data, engine="auto", microbatch_size=None, bound=100.0):
        """The sums by which two steps of rate 1 on all examples move the parameters."""
        size = len(data[0])
        facts = {"clipping": clipping.flat(bound), "noise_multiplier": 0.0, "steps": 2}
        algorithm = algorithm_with(
            mechanism_with(sampling=sampling.full(size), **facts),
            data,
            loss=lambda w, example: loss(w, example[0]),
            optimizer=optax.sgd(1.0),
            engine=engine,
            weights=weights,
            microbatch_size=microbatch_size,
        )
        state = start(algorithm)
        moved = []
        for _ in range(2):
            after, _ = algorithm.step(state)
            moved.append(size * np.asarray(after.params - state.params))
            state = after
        return moved

    @pytest.mark.sample(1)
    @pytest.mark.parametrize("engine", ["vmap", "scan", "ghost"])
    @pytest.mark.parametrize("microbatch_size", [None, 2])
    def test_examples_count_as_their_weights_of_the_step(self, engine, microbatch_size):
        data = (jnp.eye(3), jnp.array([1.0, 0.5, 0.0]))
        options = {"engine": engine, "microbatch_size": microbatch_size}
        first, second = self.summed(lambda t, w, x: x[1] / (t + 1), data, **options)
        np.testing.assert_allclose(first, [1, 0.5, 0], atol=1e-6)
        w = first / 3
        expected = [(np.eye(3)[i] - w) * float(data[1][i]) / 2 for i in range(3)]
        np.testing.assert_allclose(second, np.sum(expected, axis=0), atol=1e-6)

    @pytest.mark.sample(2)
    @kills("gradients/clipped_grad.py", "0, jnp.minimum(rows, 1), 0", "0, rows, 0", slow=True)
    @pytest.mark.parametrize("weight", [7.0, math.inf, -1.0, math.nan])
    def test_no_weight_lets_an_example_past_its_bound(self, weight):
        for moved in self.summed(lambda t, w, x: weight, (jnp.full((1, 3), 50.0),), bound=1.0):
            assert np.linalg.norm(moved) <= 1 + 1e-6


KILLS = {
    "test_many_steps_in_one_call_are_the_same_steps": [
        kills(
            "training/assembly.py",
            "trees.copy(state._replace(ledger=ledger.empty(supplied=key is not None)))",
            "state._replace(ledger=ledger.empty(supplied=key is not None))",
            slow=True,
        ),
        kills("training/assembly.py", "budget, steps=count", "budget, steps=1", slow=True),
        kills("training/step.py", "step=state.step + 1,\n", "step=state.step,\n", slow=True),
    ],
}

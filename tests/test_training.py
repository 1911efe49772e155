# SPDX-License-Identifier: Apache-2.0
"""Training: the algorithm's checks, the loop, its log, averaging."""

import io
import json
import math
import shutil
import signal
import subprocess
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import killable_runs
import numpy as np
import optax
import pytest
from flax import linen
from mutation import kills
from small_mechanisms import mechanism_with

import dpjax
from dpjax import clipping, ledger, sampling, strategies, training, trees
from dpjax.data import Dataset, Stream
from dpjax.training._progress import Progress
from dpjax.training.checks import any_finite_row

DATA = jnp.ones((50, 3))


def loss(w, x):
    return 0.5 * jnp.sum((w - x) ** 2)


def make(steps=20, multiplier=1.0, optimizer=None, batch=10, **options):
    mechanism = mechanism_with(50, batch, noise_multiplier=multiplier, steps=steps)
    return algorithm_with(mechanism, optimizer=optimizer, **options)


def algorithm_with(mechanism=None, data=DATA, loss=loss, optimizer=None, **options):
    """Steps of `dpsgd` by SGD, with the mechanism of `make` unless another is given."""
    optimizer = optax.sgd(0.1) if optimizer is None else optimizer
    return dpjax.dpsgd(loss, optimizer, mechanism or mechanism_with(), data, **options)


def start(algorithm, seed=0):
    return algorithm.init(jnp.zeros(3), None if seed is None else jax.random.key(seed))


def first_step(algorithm):
    return algorithm.step(start(algorithm))


def fit(algorithm, state=None, **options):
    """Quietly, and from the beginning unless a state is given."""
    state = start(algorithm) if state is None else state
    return dpjax.fit(algorithm, state, progress=False, **options)


def test_fit_runs_what_is_planned_and_learns():
    algorithm = make(steps=60, multiplier=0.01, batch=25)
    state, history = fit(
        algorithm, evaluate=lambda state: {"distance": jnp.linalg.norm(state.params - 1.0)}
    )
    assert state.ledger.steps == 60
    assert len(history) == 20
    assert history[-1]["distance"] < 0.1 < history[0]["distance"]
    epsilons = [row["epsilon"] for row in history]
    assert epsilons == sorted(epsilons)
    assert epsilons[-1] == algorithm.mechanism.epsilon(1e-5)


def test_the_ledger_refuses_before_the_first_step():
    with pytest.raises(ledger.Refused, match="step 21 of 20 planned"):
        fit(make(), steps=21)
    with pytest.raises(ledger.Refused, match=r"these 20 steps would bring .* of 20 steps fit"):
        fit(make(budget=ledger.Budget(epsilon=2.0, delta=1e-5)))


@pytest.mark.thorough
def test_the_log_keeps_the_two_doors_apart(tmp_path):
    evaluate = lambda state: {"accuracy": jnp.float32(0.5)}  # noqa: E731
    _, history = fit(make(), evaluate=evaluate, directory=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == history
    assert rows[-1]["accuracy"] == 0.5
    assert set(rows[-1]["private"]) == {"loss", "examples", "dropped", "norm", "clipped"}
    assert "loss" not in rows[-1]


def on_the_board(folder):
    """(name, step) -> number, as TensorBoard would find them."""
    from tensorboardX.proto.event_pb2 import Event

    (path,) = (folder / "tensorboard").iterdir()
    content, seen = path.read_bytes(), {}
    while content:  # a length, a checksum of it, an event, a checksum of that
        size = int.from_bytes(content[:8], "little")
        event = Event.FromString(content[12 : 12 + size])
        content = content[16 + size :]
        for value in event.summary.value:
            seen[value.tag, event.step] = value.simple_value
    return seen


@pytest.mark.thorough
def test_a_board_shows_the_log(tmp_path):
    _, rows = fit(make(), directory=tmp_path, evaluate_every=10)
    seen = on_the_board(tmp_path)
    assert seen["epsilon", 20] == pytest.approx(rows[-1]["epsilon"])
    assert seen["private/loss", 10] == pytest.approx(rows[0]["private"]["loss"])
    assert ("loss", 10) not in seen


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"steps": 2.5}, ValueError, r"fit\(steps=2.5\)"),
        ({"evaluate": lambda state: {"epsilon": 0.0}}, ValueError, "epsilon are names of the log"),
        ({"evaluate": lambda state: {"stop": np.zeros(2)}}, ValueError, "truth value"),
    ],
)
def test_options_that_fit_cannot_use_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        fit(make(steps=2), **options)


def until(step):
    """An evaluation that stops the run at a step, and counts its calls."""

    def evaluate(state):
        evaluate.calls += 1
        return {"half": 0.5, "stop": state.ledger.steps >= step}

    evaluate.calls = 0
    return evaluate


@kills("training/_runner.py", "            row |= self._cost()\n", "", slow=True)
@pytest.mark.thorough
def test_an_evaluation_stops_the_run_and_the_ledger_has_what_ran(tmp_path, capsys):
    evaluate, options, shown = until(8), {"evaluate_every": 2, "directory": tmp_path}, []
    algorithm = make()
    show = lambda rows: shown.append([row["step"] for row in rows])  # noqa: E731
    state, rows = dpjax.fit(
        algorithm, start(algorithm), evaluate=evaluate, progress=show, **options
    )
    assert shown == [[2], [2, 4], [2, 4, 6], [2, 4, 6, 8]]
    assert "step" not in capsys.readouterr().err
    assert (state.ledger.steps, evaluate.calls) == (8, 4)
    assert [(row["step"], row["stop"]) for row in rows] == [(2, 0), (4, 0), (6, 0), (8, 1)]
    card = json.loads((tmp_path / "privacy.json").read_text())
    whole = dpjax.reports.card(algorithm.mechanism, 1e-5, ledger=state.ledger)
    assert card == json.loads(json.dumps(whole)), "the card of a last row has all methods"
    assert card["steps"] == algorithm.mechanism.steps
    assert rows[-1]["epsilon"] == card["epsilon"]["rdp"]["value"], "the row says no less"
    assert rows[-1]["counted"] == algorithm.mechanism.steps
    assert rows[-2]["epsilon"] == algorithm.mechanism.epsilon_of(np.ones(6), 1e-5)
    again, same = fit(algorithm, evaluate=evaluate, **options)
    np.testing.assert_array_equal(again.params, state.params)
    assert same == rows
    assert evaluate.calls == 4, "a run that was stopped is over"


@pytest.mark.thorough
def test_an_interrupt_and_a_resumed_run_are_a_sentence_each(tmp_path, capsys):
    def interrupt(state):
        if state.step == 1:
            signal.raise_signal(signal.SIGINT)
        return {}

    algorithm = make(steps=3)
    with pytest.raises(KeyboardInterrupt, match="stopped at step 2 of 3, not saved"):
        fit(algorithm, evaluate=interrupt, evaluate_every=1)
    with pytest.raises(KeyboardInterrupt, match=r"of 3, saved in .*The same command resumes"):
        fit(algorithm, evaluate=interrupt, evaluate_every=1, directory=tmp_path)
    dpjax.fit(algorithm, start(algorithm), directory=tmp_path)
    assert "resumes at step 2 of 3." in capsys.readouterr().err
    dpjax.fit(algorithm, start(algorithm), directory=tmp_path)
    assert "has ended, at step 3 of 3" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "metrics.jsonl").unlink()  # as if killed before the first checkpoint
    dpjax.fit(algorithm, start(algorithm), directory=tmp_path)
    assert "has no checkpoint and starts again" in capsys.readouterr().err


@kills("training/fit.py", "if processes.any_process(stop.asked):", "if interrupted:", slow=True)
def test_a_signal_in_the_last_evaluation_ends_the_process():
    def interrupt(state):
        signal.raise_signal(signal.SIGINT)
        return {"stop": True}

    with pytest.raises(KeyboardInterrupt, match="stopped at step 2 of 3, not saved"):
        fit(make(steps=3), evaluate=interrupt, evaluate_every=2)


@kills("training/checks.py", "finite = finite & np.isfinite", "finite = np.isfinite")
def test_data_without_a_finite_row_are_refused_before_a_step():
    gaps = np.where(np.arange(3) == 1, np.nan, np.ones((50, 3), np.float32))
    with pytest.raises(ValueError, match=r"each of the 50 rows of the data holds a number that is"):
        algorithm_with(mechanism_with(50, 50), gaps)
    last = gaps.copy()
    last[49] = 1
    algorithm_with(mechanism_with(50, 50), last)
    numbers = np.full(300, np.inf)
    numbers[299] = 0
    assert any_finite_row((numbers, np.ones(300)))
    assert not any_finite_row((numbers, numbers[::-1]))
    assert any_finite_row(np.arange(3)), "whole numbers"


@pytest.mark.slow
def test_examples_that_count_as_nothing_are_counted_and_spoil_no_mean(caplog):
    spoilt = DATA.at[3].set(jnp.nan).at[7].set(jnp.inf)
    algorithm = algorithm_with(mechanism_with(50, 50), spoilt)
    sound = algorithm_with(mechanism_with(50, 50))
    (_, info), (_, want) = (a.step(start(a)) for a in (algorithm, sound))
    assert (info.dropped, info.examples, want.dropped) == (2, 50, 0)
    np.testing.assert_allclose([info.loss, *info.norm], [want.loss, *want.norm], rtol=1e-6)
    with caplog.at_level("WARNING"):
        _, rows = fit(algorithm)
    assert rows[-1]["private"]["dropped"] == 2
    assert caplog.text.count("2 of 50 examples up to step 1 had no finite gradient") == 1


@pytest.mark.thorough
def test_empty_draws_pass_debug_nans_and_leave_no_gap_in_the_log():
    with jax.debug_nans(True):
        _, rows = fit(make(batch=0.2))
    assert min(row["private"]["examples"] for row in rows) == 0
    assert '"examples": 0.0' in json.dumps(rows, allow_nan=False)


def test_batch_normalisation_of_one_example_is_named(caplog):
    params = {"BatchNorm_0": {"scale": jnp.ones(3)}, "Dense_0": {"kernel": jnp.ones(3)}}
    loss = lambda p, x: p["BatchNorm_0"]["scale"] @ (x * p["Dense_0"]["kernel"])  # noqa: E731
    with caplog.at_level("WARNING"):
        make(loss=loss).init(params)
    assert "BatchNorm_0/scale belongs to a batch normalisation" in caplog.text


@pytest.mark.parametrize(
    ("key", "params", "message"),
    [
        (jnp.zeros(3), jax.random.key(0), "given a key as parameters"),
        (jax.random.key(0), {"w": jnp.zeros(3), "n": jnp.arange(3)}, "leaf n is int32"),
    ],
)
def test_keys_and_parameters_that_cannot_be_trained_are_refused(key, params, message):
    with pytest.raises(TypeError, match=message):
        make().init(params, key)


MISTAKES = {
    "a rate": ({"optimizer": 0.1}, TypeError, "optimizer is a float; expected an Optax"),
    "a plan": ({"mechanism": optax.sgd(0.1)}, TypeError, "mechanism is a .*; expected a Mechanism"),
    "a module": ({"loss": linen.Dense(2)}, TypeError, r"loss is a Dense.*losses.of\(model"),
    "an epsilon": ({"budget": 3.0}, TypeError, r"budget is a float; expected a Budget\. Write"),
    "an engine": ({"engine": "fast"}, ValueError, "engine='fast'.*one of auto"),
    "a data set": ({"data": Dataset("mine", (DATA, DATA), (), 2)}, TypeError, r"its \.train"),
    "words": ({"data": (DATA, np.array(["a"] * 50))}, TypeError, "leaf 1 is of type <U1"),
    "pairs": ({"data": list(zip(DATA, range(50), strict=True))}, ValueError, "a leading axis"),
    "no tuple": ({"per_step": lambda step: step}, TypeError, r"expected a tuple.*write \(x,\)"),
    "fewer rows": ({"data": DATA[1:]}, ValueError, "the data hold 49 examples, the mechanism's"),
    "a microbatch": ({"microbatch_size": 1.5}, ValueError, "whole number"),
    "a loader": ({"data": iter([DATA])}, TypeError, "got a list_iterator.*draws the batches"),
    "clients": (
        {"mechanism": mechanism_with(unit="client")},
        ValueError,
        "unit is 'client'; expected rows or people",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_an_argument_in_the_wrong_place_is_refused_before_anything_runs(name):
    changed, error, message = MISTAKES[name]
    right = {"loss": loss, "optimizer": optax.sgd(0.1), "mechanism": mechanism_with(), "data": DATA}
    with pytest.raises(error, match=message):
        dpjax.dpsgd(**{**right, **changed})


def test_a_state_that_run_has_used_up_is_refused():
    algorithm = make(steps=3)
    state = start(algorithm)
    after, _ = algorithm.run(state, 1)
    run, train = lambda state: algorithm.run(state, 1), lambda state: fit(algorithm, state)
    for take in (algorithm.step, run, train):
        with pytest.raises((RuntimeError, ValueError), match="deleted"):
            take(state)
    assert algorithm.step(after)[0].ledger.steps == 2


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


def test_progress_is_shown_and_can_be_silenced(capsys):
    algorithm = make()
    dpjax.fit(algorithm, start(algorithm), evaluate=lambda s: {"accuracy": 0.5})
    shown = capsys.readouterr()
    assert shown.out == ""
    lines = shown.err.splitlines()
    assert len(lines) == 20
    for word in ("step 20/20", "epsilon", "loss", "accuracy 0.500", "examples/s"):
        assert word in lines[-1]
    fit(algorithm)
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_one_live_line(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    show = Progress(0, 10, 2.0, stream=Terminal())
    show.begin()
    assert "compiling" in show.stream.getvalue()
    show.tick(5)
    assert show.take_rate() == 0, "compilation is no throughput"
    private = {"private": {"loss": 0.3}}
    numbers = {"accuracy": 0.5, "nll": 0.7, "examples_per_second": 10.0}
    show.line([{"step": 5, "epsilon": 0.9991, **numbers, **private}])
    show.shown -= 1
    show.begin()
    show.tick(6)
    assert show.take_rate() > 0
    show.close()
    text = show.stream.getvalue()
    assert text.count("\n") == 1
    assert text.count("\r") == 4
    assert (
        "step 5/10  epsilon 1.00 of 2.00  accuracy 0.500  private loss 0.300  10 examples/s" in text
    )
    assert text.count("left") == 1, "before two dispatches it would be a guess about compilation"
    assert (
        "step 6/10  0:00:00 left  epsilon 1.00 of 2.00  accuracy 0.500  private loss 0.300" in text
    )
    assert "\u2501" * 5 + "\u2500" * 3 in text
    assert all(len(line.strip()) < 100 for line in text.replace("\x1b[K", "").split("\r"))


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
        for name, part in zip("ab", want, strict=True):
            np.testing.assert_allclose(updates[name], -1 / np.sqrt(1 - part), rtol=1e-5)

    @pytest.mark.thorough
    def test_lookahead_passes_the_scale_of_the_bounds_to_it(self):
        mechanism = self.mechanism(1.0)
        optimizer = training.lookahead(training.dp_adam(0.1, mechanism, b2=0.5), 5, 0.5)
        options = {"optimizer": optimizer, "bound_schedule": lambda step: 100.0}
        state, _ = first_step(algorithm_with(mechanism, **options))
        (found,) = trees.nodes(state.optimizer, training.optimizers.DPAdamState)
        np.testing.assert_allclose(found.noise / 0.5, np.square(100.0 / 50), rtol=1e-6)


@pytest.mark.thorough
def test_steps_run_with_64_bits():
    with jax.enable_x64(True):
        state, _ = fit(make(steps=3, microbatch_size=2))
    assert np.all(np.isfinite(state.params))


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


def test_an_algorithm_is_not_to_be_traced():
    algorithm = make()
    state, keys = start(algorithm), jax.random.split(jax.random.key(0), 2)
    traced = {
        "step": lambda: jax.jit(algorithm.step)(state),
        "run": lambda: jax.jit(lambda state: algorithm.run(state, 2))(state),
        "init": lambda: jax.vmap(algorithm.init, (None, 0))(jnp.zeros(3), keys),
    }
    for name, call in traced.items():
        with pytest.raises(TypeError, match=f"dpsgd: {name}: called inside a JAX transformation"):
            call()


def test_two_inits_differ_and_replay_with_one_supplied_key():
    algorithm = make()
    states = [start(algorithm, seed) for seed in (0, 1, 0, None, None)]
    first, second, again, fresh, other = (algorithm.step(state)[0].params for state in states)
    assert not any(np.any(a == b) for a, b in ((first, second), (first, fresh), (fresh, other)))
    np.testing.assert_array_equal(first, again)
    assert [bool(state.ledger.supplied) for state in states] == [True] * 3 + [False] * 2


@kills("training/assembly.py", "if not supplied(state) and not np.any(", "if False and not np.any(")
def test_a_state_without_a_noise_key_is_refused_until_it_is_renewed():
    algorithm = make()
    state = start(algorithm, None)
    unset = training._keys.without_secrets(state, algorithm.mechanism)
    with pytest.raises(ValueError, match=r"noise\.renew\(state\) sets one"):
        algorithm.step(unset)
    one, two = (algorithm.step(dpjax.noise.renew(unset))[0].params for _ in range(2))
    assert not np.any(one == two)


@pytest.mark.slow
@kills(
    "training/assembly.py",
    "trees.copy(state._replace(ledger=ledger.empty(supplied=key is not None)))",
    "state._replace(ledger=ledger.empty(supplied=key is not None))",
    slow=True,
)
@kills("training/assembly.py", "budget, steps=count", "budget, steps=1", slow=True)
@kills("training/step.py", "step=state.step + 1,\n", "step=state.step,\n", slow=True)
def test_many_steps_in_one_call_are_the_same_steps():
    one, many = make(batch=25), make(batch=25)
    state, losses = start(one), []
    for _ in range(7):
        state, info = one.step(state)
        losses.append(info.loss)
    key, params = jax.random.key(0), jnp.zeros(3)
    whole, infos = many.run(many.init(params, key), 7)
    assert not params.is_deleted(), "`run` donates the buffers of the state, not the caller's"
    assert not key.is_deleted()
    np.testing.assert_array_equal(whole.params, state.params)
    np.testing.assert_array_equal(infos.loss, np.stack(losses))
    assert whole.ledger.steps == state.ledger.steps == 7
    assert int(whole.step) == 7


def steps_in_microbatches():
    """What comes of five steps on data in memory and on a stream, one of them broken."""
    x = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    x[7] = np.nan
    mechanism, found = mechanism_with(50, 20, steps=5), []
    for data in (x, Stream(x)):
        algorithm = algorithm_with(mechanism, data, microbatch_size=3)
        state, infos = algorithm.run(start(algorithm), 5)
        found += [state.params, infos.examples, infos.norm, infos.clipped]
    return found


TWO_DEVICES = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 2)
import numpy as np
import test_training
np.savez(sys.argv[1], *test_training.steps_in_microbatches())
"""


@pytest.mark.slow
@kills(
    "sampling/draws.py",
    "asarray(which * size, jnp.int32)",
    "asarray(0 * size, jnp.int32)",
    slow=True,
)
@kills("training/streaming.py", "split={1, 2, 3}", "split={3}", slow=True)
def test_two_devices_take_the_steps_of_one(tmp_path):
    """The same draws and the same noise, once; each example on one device alone."""
    program = [sys.executable, "-c", TWO_DEVICES, str(tmp_path / "two.npz")]
    subprocess.run(program, check=True, timeout=300, env=killable_runs.environment())
    with np.load(tmp_path / "two.npz") as two:
        for name, one in zip(two.files, steps_in_microbatches(), strict=True):
            np.testing.assert_allclose(two[name], one, rtol=1e-5)


def test_a_state_that_was_given_to_fit_or_step_can_be_used_again():
    algorithm = make()
    state = start(algorithm)
    first, _ = fit(algorithm, state)
    stepped, _ = algorithm.step(state)
    second, _ = fit(algorithm, state)
    np.testing.assert_array_equal(first.params, second.params)
    np.testing.assert_array_equal(state.params, np.zeros(3))
    assert np.any(stepped.params != 0)


class TestStreamed:
    X = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)

    @kills(
        "training/streaming.py",
        "mask[: len(drawn)] = drawn",
        "mask[: len(drawn) + 1] = True",
        case="poisson-8",
        slow=True,
    )
    @pytest.mark.parametrize("microbatch_size", [None, 8])
    @pytest.mark.parametrize("sampler", ["poisson", "full"])
    @pytest.mark.slow
    def test_it_takes_the_steps_of_data_in_memory(self, sampler, microbatch_size):
        sizes = () if sampler == "full" else (20,)
        mechanism = mechanism_with(sampling=getattr(sampling, sampler)(50, *sizes))
        states, infos = [], []
        for data in (self.X, Stream(self.X)):
            algorithm = algorithm_with(
                mechanism, data, optimizer=optax.adam(0.1), microbatch_size=microbatch_size
            )
            state, info = algorithm.run(start(algorithm), 5)
            states.append(state)
            infos.append(info)
        np.testing.assert_allclose(*(state.params for state in states), rtol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), *infos)

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

    def run(self, rule, multiplier=0.0, steps=4, **options):
        facts = {"clipping": rule, "noise_multiplier": multiplier, "steps": steps}
        mechanism = mechanism_with(sampling=sampling.full(50), **facts)
        algorithm = algorithm_with(mechanism, DATA * 3, optimizer=optax.sgd(1.0), **options)
        # The table that was checked runs, whatever the function reads later.
        with mock.patch.object(self, "late", -1.0):
            return algorithm, algorithm.run(start(algorithm), steps)

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
        state, before = algorithm.init(jnp.zeros(100_000), jax.random.key(0)), 0.0
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


def run_timed(per_step, steps, seed=0, state=None, **options):
    mechanism = mechanism_with(steps=6, clipping=clipping.flat(100.0))
    algorithm = algorithm_with(mechanism, (DATA,), loss=timed, per_step=per_step, **options)
    state = start(algorithm, seed) if state is None else state
    seen = []
    for _ in range(steps):
        before = state.params
        state, info = algorithm.step(state)
        seen.append(float(info.loss) / float(loss(before, DATA[0])) - 1)
    return state, seen


class TestPerStep:
    @pytest.mark.thorough
    @pytest.mark.sample(1)
    @kills(
        "training/recipe.py",
        "(key, step), s",
        "(key, 0 * step), s",
        case="None-vmap",
        slow=True,
    )
    @pytest.mark.parametrize("engine", ["vmap", "scan", "ghost"])
    @pytest.mark.parametrize("microbatch_size", [None, 4])
    def test_the_loss_of_step_t_sees_the_epoch_of_step_t(self, engine, microbatch_size):
        options = {"engine": engine, "microbatch_size": microbatch_size}
        _, seen = run_timed(lambda step: step // 2, 6, **options)
        np.testing.assert_allclose(seen, [0, 0, 1, 1, 2, 2], atol=1e-5)

    @pytest.mark.slow
    def test_it_is_as_if_each_example_brought_it(self):
        """The same examples, the same noise: only where the entry comes from differs."""
        x = jnp.arange(150.0).reshape(50, 3)
        mechanism = mechanism_with(steps=1, clipping=clipping.flat(1e6))
        given = (x, jnp.full(50, 7, jnp.int32))
        algorithms = [
            algorithm_with(mechanism, data, loss=timed, per_step=per_step)
            for data, per_step in (((x,), lambda step: step + 7), (given, None))
        ]
        (one, first), (two, second) = (a.step(start(a)) for a in algorithms)
        np.testing.assert_array_equal(one.params, two.params)
        assert first.loss == second.loss


class TestWeights:
    @staticmethod
    def summed(weights, data, engine="auto", microbatch_size=None, noise=0.0, bound=100.0):
        """What two steps of rate 1 on the whole data move, step by step."""
        size = len(data[0])
        facts = {"clipping": clipping.flat(bound), "noise_multiplier": noise, "steps": 2}
        algorithm = algorithm_with(
            mechanism_with(sampling=sampling.full(size), **facts),
            data,
            loss=lambda w, example: loss(w, example[0]),
            optimizer=optax.sgd(1.0),
            engine=engine,
            weights=weights,
            microbatch_size=microbatch_size,
        )
        state, moved = start(algorithm), []
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


BANDED = {"sampling": sampling.cyclic_poisson(50, 5, cycle=2), "noise": strategies.banded(8, 2)}
TRACKED = optax.sgd(0.1).init(jnp.zeros(3))
VALUES = {
    r"scaled_rate\(batch_size // 512=0\)": lambda: training.scaled_rate(0.1, 256),
    "expected independent noise": lambda: training.dp_adam(0.1, mechanism_with(steps=8, **BANDED)),
    r"with training\.average_parameters": lambda: training.averaged(TRACKED),
    r"with training\.keep_samples": lambda: training.samples(TRACKED),
    "adapts its bounds": lambda: algorithm_with(
        mechanism_with(adaptive=clipping.Quantile(count_multiplier=10.0)),
        bound_schedule=lambda step: 1.0,
    ),
}


@pytest.mark.parametrize("words", VALUES)
def test_values_without_a_meaning_are_refused(words):
    with pytest.raises(ValueError, match=words):
        VALUES[words]()


def test_what_is_no_state_is_refused():
    with pytest.raises(
        TypeError, match=r"the state is a dict; expected a State\. Give algorithm\.init"
    ):
        make().step({})

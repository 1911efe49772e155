# SPDX-License-Identifier: Apache-2.0
"""Runs that are killed, copied, changed and starved: no release is lost, and none is repeated."""

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import killable_runs as runs
import numpy as np
import optax
import pytest
from mutation import kills
from small_mechanisms import mechanism_with

from dpjax import (
    clipped_grad,
    clipping,
    dpsgd,
    fit,
    ledger,
    noise,
    sampling,
    strategies,
    training,
    trees,
)
from dpjax._files import held
from dpjax.training.run_folder import Folder
from dpjax.types import Purpose


@pytest.fixture(scope="module")
def server():
    return runs.server()


def steps_of(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def saved(folder):
    return sorted(int(path.name) for path in (folder / "checkpoints").glob("[0-9]*"))


def spent(folder):
    return [run.steps for run in training.earlier(folder)]


def counted(folder):
    return json.loads((folder / "privacy.json").read_text())["steps"]


# --- Killed processes -----------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("kills_", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_kills_neither_lose_nor_repeat_a_release(server, tmp_path, kills_):
    """SIGKILL at random moments: in a step, in a save, between a checkpoint and its row."""
    moments, deaths, number = random.Random(0), 0, 0
    while deaths < kills_:
        folder, number = tmp_path / f"run{number}", number + 1
        while True:
            process = runs.begin(server, folder, evaluate_every=2)
            if deaths < kills_ and runs.killed(process, after=moments.uniform(0.5, 3)):
                deaths += 1
                continue
            process.join(120)
            assert process.exitcode == 0
            break
        assert steps_of(folder) == list(range(2, runs.STEPS + 1, 2)), "each row once"
        releases = {}
        for line in (tmp_path / f"{folder.name}.seen").read_text().splitlines():
            step, params = json.loads(line)
            assert releases.setdefault(step, params) == params, "a second release of a step"
        assert counted(folder) == runs.STEPS


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_obeyed_after_saving(server, tmp_path, number):
    process = runs.begin(server, tmp_path / "run", save_every=None, evaluate_every=1)
    log = tmp_path / "run" / "metrics.jsonl"
    while not (log.exists() and log.read_text().count("\n") > 3):
        time.sleep(0.01)
    os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == (143 if number == signal.SIGTERM else 1)
    assert saved(tmp_path / "run")[-1] == steps_of(tmp_path / "run")[-1] < runs.STEPS


def test_signals_are_given_back_and_a_second_one_ends_the_process():
    before = signal.getsignal(signal.SIGINT)
    with training._signals.Stop() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.slow
def test_two_processes_do_not_share_a_folder(server, tmp_path):
    process = runs.begin(server, tmp_path, evaluate_every=1)
    while not (tmp_path / "run.json").exists():
        time.sleep(0.01)
    for work in (runs.fit, training.forget):
        with pytest.raises(ledger.Refused, match=f"process {process.pid} is running there"):
            work(tmp_path)
    runs.killed(process, after=0)
    runs.fit(tmp_path)  # the lock died with its holder


# --- Saved, then released -------------------------------------------------------------------------


@kills("training/fit.py", "            run.save()\n", "            pass\n")
def test_a_row_is_saved_then_evaluated_then_logged_then_released(tmp_path, monkeypatch):
    order, sync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: order.append(os.fstat(handle)) or sync(handle))

    def evaluate(state):
        step = state.ledger.steps
        assert saved(tmp_path)[-1] == step, "its checkpoint is on disk"
        assert (steps_of(tmp_path) if step > 2 else [0])[-1] == step - 2, "its row is not"
        order.clear()
        return {}

    def follow(rows):
        assert steps_of(tmp_path)[-1] == counted(tmp_path) == rows[-1]["step"]
        assert order[0].st_size == (tmp_path / "metrics.jsonl").stat().st_size, "the row was synced"

    options = {"evaluate": evaluate, "evaluate_every": 2, "progress": follow}
    runs.fit(tmp_path, runs.make(steps=4), **options)


@pytest.mark.thorough
@pytest.mark.parametrize("lost", ["skipped", "failed", "row"])
def test_what_cannot_be_written_is_not_released(tmp_path, monkeypatch, lost):
    """A checkpoint that Orbax skips without a word, one that fails, and a row."""
    algorithm, seen = runs.make(steps=6), []

    def evaluate(state):
        seen.append(state.ledger.steps)
        return {}

    options = {"evaluate": evaluate, "evaluate_every": 2, "save_every": None}
    runs.cut_off(tmp_path, algorithm, after=2, **options)

    def fails(*_, **__):
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        if lost == "row":
            patched.setattr(Folder, "write", fails)
        else:
            import orbax.checkpoint as ocp

            skip = fails if lost == "failed" else lambda *_, **__: False
            patched.setattr(ocp.CheckpointManager, "save", skip)
        with pytest.raises(OSError, match="No space left" if lost == "row" else "step 4 could not"):
            runs.fit(tmp_path, algorithm, **options)
    assert (steps_of(tmp_path), counted(tmp_path)) == ([2], 2)
    assert seen == ([2, 4] if lost == "row" else [2])
    runs.fit(tmp_path, algorithm, **options)
    assert steps_of(tmp_path) == [2, 4, 6]


@kills("training/fit.py", "and terms.has_row(run.done):", "and False:")
@kills("training/_runner.py", "self.infos = list(facts", "self.infos = [] and list(facts")
@pytest.mark.parametrize("moment", ["evaluate", "row", "card"])
def test_a_death_between_checkpoint_and_card_loses_no_row(tmp_path, monkeypatch, moment):
    algorithm, seen = runs.make(steps=6), []
    options = {"evaluate_every": 2, "save_every": None}

    def dies(*_, **__):
        raise InterruptedError

    def evaluate(state):
        seen.append((state.ledger.steps, state.params.tolist()))
        return dies() if moment == "evaluate" and len(seen) == 2 else {}

    with monkeypatch.context() as patched:
        if moment == "row":
            write = Folder.write

            def once(self, row):
                return dies() if row["step"] == 4 else write(self, row)

            patched.setattr(Folder, "write", once)
        if moment == "card":
            write_released = training._runner.write_released

            def late(*x, **y):
                return dies() if x[2].ledger.steps == 4 else write_released(*x, **y)

            patched.setattr(training._runner, "write_released", late)
        with pytest.raises(InterruptedError):
            runs.fit(tmp_path, algorithm, evaluate=evaluate, **options)
    assert saved(tmp_path)[-1] == 4
    _, rows = runs.fit(tmp_path, algorithm, evaluate=evaluate, **options)
    assert steps_of(tmp_path) == [row["step"] for row in rows] == [2, 4, 6]
    assert len({step for step, _ in seen}) == len(set(map(str, seen))), "one release a step"
    assert all(row["private"]["examples"] for row in rows)
    assert counted(tmp_path) == 6


@kills("training/run_folder.py", "if steps > restored_steps:", "if False:")
@pytest.mark.parametrize("hurt", ["cut off", "exchanged", "gone"])
def test_a_damaged_checkpoint_ends_the_run_and_its_steps_are_spent(tmp_path, hurt):
    algorithm = runs.make(steps=6)
    runs.cut_off(tmp_path, algorithm, after=4, evaluate_every=2, save_every=None)
    newest = tmp_path / "checkpoints" / "4"
    if hurt == "cut off":
        for path in newest.rglob("*"):
            if path.is_file():
                os.truncate(path, path.stat().st_size // 2)
    elif hurt == "exchanged":
        shutil.rmtree(newest / "state")
        shutil.copytree(tmp_path / "checkpoints" / "2" / "state", newest / "state")
    else:
        shutil.rmtree(newest)
    with pytest.raises(ledger.Refused, match=r"4 steps ran there, .* before=dpjax\.training"):
        runs.fit(tmp_path, algorithm, evaluate_every=2)
    assert spent(tmp_path) == [4]


def test_what_a_kill_left_half_written_is_no_checkpoint(tmp_path):
    algorithm = runs.make(steps=6)
    runs.cut_off(tmp_path, algorithm, after=2, evaluate_every=2)
    (tmp_path / "checkpoints" / "4.orbax-checkpoint-tmp-0").mkdir()
    with open(tmp_path / "metrics.jsonl", "a") as log:
        log.write('{"step": 4, "eps')
    runs.fit(tmp_path, algorithm, evaluate_every=2)
    assert (steps_of(tmp_path), saved(tmp_path)) == ([2, 4, 6], [3, 4, 6])


# --- Changed, copied and forked -------------------------------------------------------------------


def sharper(w, x):
    return jnp.sum(jnp.abs(w - x))


@pytest.mark.thorough
@pytest.mark.parametrize("change", [{"loss": sharper}, {"rate": 0.3}])
def test_a_changed_run_resumes_and_repeats_no_released_step(tmp_path, change):
    algorithm, releases, ran = runs.make(steps=8), {}, []

    def evaluate(state):
        step, params = state.ledger.steps, state.params.tolist()
        assert releases.setdefault(step, params) == params
        if step == 4 and not ran:
            raise InterruptedError
        return {}

    options = {"evaluate": evaluate, "evaluate_every": 2, "save_every": None}
    with pytest.raises(InterruptedError):
        runs.fit(tmp_path, algorithm, **options)
    other = runs.make(steps=8, **change)

    def run(state, count):
        ran.extend(range(state.ledger.steps, state.ledger.steps + count))
        return other.run(state, count)

    runs_on = dataclasses.replace(other, run=run)
    ran.append(-1)
    runs.fit(tmp_path, runs_on, **options)
    assert ran == [-1, 4, 5, 6, 7]
    assert steps_of(tmp_path) == [2, 4, 6, 8]
    assert "jax" not in (tmp_path / "run.json").read_text(), "versions and devices may change"


WIDE, FULL = 4000, mechanism_with(sampling=sampling.full(8), steps=8)


def wide(loss, mechanism=FULL):
    return dpsgd(loss, optax.sgd(1.0), mechanism, np.arange(8, dtype=np.float32) / 8)


def to_one(w, x):
    return jnp.sum((w - x) ** 2)


def to_zero(w, x):
    return jnp.sum(jnp.cosh(w / 9)) + 0 * x


def noise_of(before, after, loss):
    """The noise on the sum of one step: what was released, less what has no noise."""
    clean = clipped_grad(loss, FULL.clipping)(before, np.arange(8, dtype=np.float32) / 8)
    return np.asarray(8 * (before - after) - clean.value)


@kills("training/_runner.py", "        self.state = renewed(self.state, self.mechanism)\n", "")
@pytest.mark.parametrize("fork", ["two fits", "a copied folder", "the state of evaluate"])
def test_forks_of_a_run_share_no_noise(tmp_path, fork):
    """The difference of two releases has the noise of both, whatever else differs."""
    one, two, shown = wide(to_one), wide(to_zero), []
    options = {"progress": False, "evaluate_every": 1}
    keeps = lambda state: shown.append(state) or {}  # noqa: E731
    state, _ = fit(
        one, one.init(jnp.zeros(WIDE)), steps=2, evaluate=keeps, directory=tmp_path / "a", **options
    )
    if fork == "a copied folder":
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        first = lambda a: a.init(jnp.zeros(WIDE))  # noqa: E731
        ends = [
            fit(a, first(a), steps=3, directory=tmp_path / name, **options)[0]
            for a, name in ((one, "a"), (two, "b"))
        ]
        assert (counted(tmp_path / "a"), counted(tmp_path / "b")) == (3, 3)
    elif fork == "two fits":
        ends = [fit(a, state, steps=1, **options)[0] for a in (one, two)]
    else:  # a bare step of a kept state, and the run itself
        state, other = shown[0], fit(one, shown[0], steps=1, **options)[0]
        ends = [one.step(state)[0], other]
        two = one
    parts = [
        noise_of(state.params, end.params, loss)
        for end, loss in zip(ends, (to_one, to_one if two is one else to_zero), strict=True)
    ]
    assert np.std(parts[0] - parts[1]) == pytest.approx(np.sqrt(2), rel=0.06)
    assert abs(np.corrcoef(*parts)[0, 1]) < 0.07


def candidates(folder):
    """All keys that the leaves of a folder's last checkpoint could be, by name."""
    checkpoints = training.Checkpoints(folder / "checkpoints")
    named, _ = checkpoints._read(checkpoints.manager.latest_step())
    checkpoints.close()
    for name, leaf in named.items():
        words = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
        for start in range(0, min(len(words), 64) - 7, 4):
            key = words[start : start + 8].view(np.uint32)
            yield name, jax.random.wrap_key_data(jnp.asarray(key), impl="threefry2x32")


def explains(key, step, drawn):
    """Whether the noise of a step follows from a key."""
    stream = jax.random.fold_in(trees.step_key(key, Purpose.NOISE, step), 0)  # of the first leaf
    mine = noise.standard_normal(stream, (WIDE,))
    return np.corrcoef(mine, drawn)[0, 1] > 0.5


@kills(
    "training/_runner.py",
    "state = without_secrets(self.state, self.mechanism)",
    "state = self.state",
)
@pytest.mark.parametrize("key", [None, jax.random.key(7)])
def test_no_checkpoint_holds_a_key_from_which_noise_follows(tmp_path, key):
    algorithm, shown = wide(to_one), []
    options = {"progress": False, "evaluate_every": 1, "directory": tmp_path, "steps": 3}
    state = algorithm.init(jnp.zeros(WIDE), key)
    end, _ = fit(algorithm, state, evaluate=lambda s: shown.append(s.params) or {}, **options)
    for step in (1, 2):
        drawn = noise_of(shown[step - 1], shown[step], to_one)
        assert not any(explains(found, step, drawn) for _, found in candidates(tmp_path))
        assert explains(end.noise_key, step, drawn) == (key is not None), "the other direction"
        assert explains(state.noise_key, step, drawn) == (key is not None)


@kills("training/_keys.py", "key=given.key, noise_key=given.noise_key", "noise_key=given.noise_key")
@pytest.mark.sample(1)
@pytest.mark.parametrize("draws", ["shuffled", "random_allocation", "poisson"])
def test_a_supplied_key_resumes_to_the_last_bit(tmp_path, draws):
    sampler = sampling.by_name(draws, 200, 20)
    mechanism, key = mechanism_with(sampling=sampler, steps=12), jax.random.key(3)
    algorithm = dpsgd(runs.loss, optax.adam(0.1), mechanism, runs.DATA)
    options = {"evaluate_every": 4, "save_every": 5}
    whole, rows = runs.fit(tmp_path / "whole", algorithm, runs.start(algorithm, key), **options)
    part, state = tmp_path / "part", runs.start(algorithm, key)
    runs.cut_off(part, algorithm, after=10, state=state, **options)
    end, others = runs.fit(part, algorithm, state, **options)
    for one, other in zip(*map(jax.tree.leaves, (whole, end)), strict=True):
        np.testing.assert_array_equal(*map(trees.on_host, (one, other)))
    assert [row["private"] for row in rows] == [row["private"] for row in others]
    assert json.loads((part / "run.json").read_text())["randomness"] == "supplied"


def test_a_run_keeps_its_randomness_and_its_supplied_key(tmp_path):
    algorithm = runs.make(steps=4)
    keyed, fresh = runs.start(algorithm, jax.random.key(1)), runs.start(algorithm)
    runs.fit(tmp_path / "keyed", algorithm, keyed, steps=2)
    runs.fit(tmp_path / "fresh", algorithm, fresh, steps=2)
    for folder, state in (("keyed", fresh), ("fresh", keyed)):
        with pytest.raises(ledger.Refused, match='randomness: "'):
            runs.fit(tmp_path / folder, algorithm, state)
    with pytest.raises(ledger.Refused, match="began with another key="):
        runs.fit(tmp_path / "keyed", algorithm, runs.start(algorithm, jax.random.key(2)))
    assert training.earlier(tmp_path / "keyed")[0].supplied
    card = json.loads((tmp_path / "keyed" / "privacy.json").read_text())
    assert card["randomness"] == "supplied"


@pytest.mark.thorough
@kills(
    "types.py",
    "return self.draw(key, step, noise_key), epoch_key",
    "return self.draw(key, step), epoch_key",
    slow=True,
)
@kills("sampling/cycles.py", "if coin_key is None:", "if True:")
def test_each_start_renews_draws_and_keeps_what_lasts_for_the_run(tmp_path):
    """Coins are new; the order of an epoch and the parts of a cycle stay."""
    cyclic = sampling.cyclic_poisson(2000, 100, cycle=4)
    for sampler, stays in [
        (sampling.poisson(2000, 100), False),
        (sampling.shuffled(2000, 100), True),
        (sampling.random_allocation(2000, 20), False),
        (cyclic, False),
    ]:
        mechanism = mechanism_with(sampling=sampler, steps=8)
        algorithm = dpsgd(runs.loss, optax.sgd(0.1), mechanism, np.ones((2000, 5)))
        one = algorithm.init(jnp.zeros(5))
        draws = []
        for _ in range(2):
            state, _ = fit(algorithm, one, steps=1, progress=False)
            assert isinstance(state, type(one))
            drawn, _ = sampler.drawn(state.key, state.noise_key, state.epoch_key, 3)
            draws.append(set(np.asarray(drawn.indices)[: int(drawn.size)].tolist()))
        assert (draws[0] == draws[1]) is stays
        if sampler is cyclic:
            parts_key = trees.step_key(one.key, Purpose.PARTS, 0)
            parts = sampling.cycles.parts_of(parts_key, 2000, 4)
            assert all(parts[i] == 3 for draw in draws for i in draw), "of one part in both"


STRATEGIES = {
    "banded": lambda: strategies.banded(8, bands=3),
    "buffered": lambda: strategies.buffered(8, buffers=2),
    "tree": lambda: strategies.tree(8),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_resumed_strategy_has_the_law_of_its_noise(name):
    """The covariance of all steps, over 2,000 runs that were resumed with a new key in between."""
    strategy, runs_ = STRATEGIES[name](), 2000

    def noises(first, second):
        memory, rows = strategy.start(jnp.zeros(16)), []
        for step in range(8):
            key = trees.step_key(first if step < 3 else second, Purpose.NOISE, step)
            drawn = noise.standard_normal(key, (16,))
            mixed, memory = strategy.next(drawn, memory, jnp.int32(step))
            rows.append(mixed)
        return jnp.stack(rows)

    keys = jax.random.split(jax.random.key(0), 2 * runs_)
    resumed = jax.jit(jax.vmap(noises))(keys[:runs_], keys[runs_:])
    whole = jax.jit(jax.vmap(noises))(keys[:runs_], keys[:runs_])
    one, other = (
        np.einsum("rsc,rtc->st", x, x) / (16 * runs_) for x in map(np.asarray, (resumed, whole))
    )
    np.testing.assert_allclose(one, other, atol=0.04 * np.max(np.abs(other)))


TWO_DEVICES = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 2)
import numpy as np
import killable_runs as runs

_, rows = runs.fit(f"{sys.argv[1]}/begun")  # on one device
assert [row["step"] for row in rows][-1] == runs.STEPS
for name, parts in {"whole": [60], "in parts": [20, 60]}.items():
    for steps in parts:
        algorithm = runs.make(microbatch_size=2)
        state = runs.start(algorithm, jax.random.key(3))
        end, _ = runs.fit(f"{sys.argv[1]}/{name}", algorithm, state, steps=steps)
    print(np.asarray(end.params).tobytes().hex())
"""


@pytest.mark.slow
def test_a_run_goes_on_on_two_devices_and_there_resumes_to_the_last_bit(tmp_path):
    runs.cut_off(tmp_path / "begun", after=21)
    program = [sys.executable, "-c", TWO_DEVICES, tmp_path]
    here = {"env": runs.environment(), "capture_output": True, "text": True}
    done = subprocess.run(program, check=False, timeout=300, **here)
    assert done.returncode == 0, done.stderr[-2000:]
    whole, in_parts = done.stdout.split()
    assert whole == in_parts
    assert spent(tmp_path / "begun") == [runs.STEPS]


# --- What a folder holds --------------------------------------------------------------------------


OTHERS = {
    "bound": ({"bound": 0.5}, r"mechanism\.clipping\.bounds: \[1.0\] there, \[0.5\] now"),
    "shape": ({"data": runs.DATA[:, :4]}, r'row.array: "float32\[5\]" there, "float32\[4\]" now'),
    "flag": ({}, "--rate: 0.1 there, 0.2 now"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_run_is_refused_by_name(tmp_path, other):
    settings, message = OTHERS[other]
    runs.fit(tmp_path, runs.make(steps=4), steps=2, configuration={"--rate": 0.1})
    algorithm, log = runs.make(steps=4, **settings), steps_of(tmp_path)
    state = runs.start(algorithm, size=4 if other == "shape" else 5)
    rate = 0.2 if other == "flag" else 0.1
    with pytest.raises(ledger.Refused, match=message) as refusal:
        runs.fit(tmp_path, algorithm, state, configuration={"--rate": rate})
    assert str(refusal.value).count(" there, ") == 1, "only what differs is named"
    assert steps_of(tmp_path) == log


@pytest.mark.thorough
def test_permuted_rows_are_refused_where_they_matter(tmp_path):
    for sampler, refused in (
        (sampling.shuffled(200, 20), True),
        (sampling.poisson(200, 20), False),
    ):
        folder, mechanism = tmp_path / sampler.name, mechanism_with(sampling=sampler, steps=4)
        algorithms = [
            dpsgd(runs.loss, optax.sgd(0.1), mechanism, data)
            for data in (runs.DATA, runs.DATA[::-1])
        ]
        runs.fit(folder, algorithms[0], steps=2)
        if refused:
            with pytest.raises(ledger.Refused, match="rows: "):
                runs.fit(folder, algorithms[1])
        else:
            assert runs.fit(folder, algorithms[1])[0].ledger.steps == 4


@pytest.mark.thorough
def test_another_model_is_refused_by_its_leaves(tmp_path):
    mechanism = runs.make(steps=4).mechanism
    both = lambda w, x: runs.loss(w["a"], x) + runs.loss(w["b"], x)  # noqa: E731
    algorithm = dpsgd(both, optax.sgd(0.1), mechanism, runs.DATA)
    runs.fit(tmp_path, algorithm, algorithm.init({"a": jnp.zeros(5), "b": jnp.zeros(5)}), steps=2)
    other = dpsgd(lambda w, x: runs.loss(w["a"], x), optax.sgd(0.1), mechanism, runs.DATA)
    with pytest.raises(ValueError, match="have other leaves, such as params/b"):
        runs.fit(tmp_path, other, other.init({"a": jnp.zeros(5)}))


def test_a_run_that_spent_nothing_makes_room_unless_it_asked_queries(tmp_path):
    for preparation, refused in (((), False), ((4.0,), True)):
        folder = tmp_path / str(refused)
        mechanism = mechanism_with(200, 20, steps=4, preparation=preparation)
        algorithm = dpsgd(runs.loss, optax.sgd(0.1), mechanism, runs.DATA)
        runs.cut_off(folder, algorithm, after=0)
        if refused:
            with pytest.raises(ledger.Refused, match="another run is there"):
                runs.fit(folder, runs.make(steps=4))
        else:
            runs.fit(folder, runs.make(steps=4))


@pytest.mark.thorough
def test_a_run_continues_another_and_pays_for_both(tmp_path):
    runs.cut_off(tmp_path / "a", runs.make(steps=20), after=6, evaluate_every=3)
    before = training.earlier(tmp_path / "a")
    assert [run.steps for run in before] == [6]
    mechanism = dataclasses.replace(runs.make(multiplier=2.0, steps=4).mechanism, before=before)
    algorithm = dpsgd(runs.loss, optax.sgd(0.1), mechanism, runs.DATA)
    _, rows = runs.fit(tmp_path / "b", algorithm, steps=3)
    assert rows[0]["epsilon"] > mechanism.epsilon_of(np.zeros(0), 1e-5)
    both = training.earlier(tmp_path / "b")
    assert [(run.steps, run.runs[0][0]) for run in both] == [(6, 1.0), (3, 2.0)]
    with pytest.raises(FileNotFoundError, match=r"run\.json"):
        training.earlier(tmp_path)


def test_parts_of_a_run_share_its_folder(tmp_path):
    """Fit after fit in one process, with the state handed on or not."""
    algorithm = runs.make()
    state, _ = runs.fit(tmp_path, algorithm, steps=10)
    state, rows = runs.fit(tmp_path, algorithm, state, steps=10)
    assert [row["step"] for row in rows] == [7, 10, 17, 20]
    state, _ = algorithm.step(state)  # without `fit`
    state, rows = runs.fit(tmp_path, algorithm, state, steps=3)
    assert (state.ledger.steps, [row["step"] for row in rows][-1]) == (24, 24)
    # A script of two calls, begun again: the second would add its steps to what is done already.
    with pytest.raises(ledger.Refused, match="24 steps ran there, and this call asks for steps up"):
        runs.fit(tmp_path, algorithm, steps=10)


def test_a_state_that_was_put_on_a_device_resumes_and_evaluate_may_keep_parameters(tmp_path):
    algorithm, params = runs.make(steps=4), []
    placed = jax.device_put(runs.start(algorithm))

    def evaluate(state):
        params.append(state.params)
        return {}

    options = {"evaluate": evaluate, "evaluate_every": 1}
    runs.cut_off(tmp_path, algorithm, after=2, state=placed, **options)
    assert runs.fit(tmp_path, algorithm, placed, **options)[0].ledger.steps == 4
    assert len(np.unique(np.stack(params), axis=0)) == 4


@pytest.mark.thorough
@kills("training/_runner.py", '"seen": self.infos', '"seen": []', slow=True)
def test_rules_with_several_groups_resume(tmp_path):
    """Infos that are lists survive the checkpoint between two rows."""
    rule = clipping.grouped(1.0, clipping.by_leaf({"a": 0, "b": 0}))
    mechanism = dataclasses.replace(runs.make(steps=8).mechanism, clipping=rule)
    both = lambda w, x: runs.loss(w["a"], x) + runs.loss(w["b"], 2 * x)  # noqa: E731
    algorithm, rows = dpsgd(both, optax.sgd(0.1), mechanism, runs.DATA), []
    options = {"evaluate_every": 6, "save_every": 4}
    for name in ("whole", "parts"):
        state = algorithm.init({"a": jnp.zeros(5), "b": jnp.zeros(5)}, jax.random.key(0))
        if name == "parts":  # stopped at a checkpoint between two rows
            runs.cut_off(tmp_path / name, algorithm, after=4, state=state, **options)
        rows.append(runs.fit(tmp_path / name, algorithm, state, **options)[1])
    assert [r["private"] for r in rows[0]] == [r["private"] for r in rows[1]]
    assert len(rows[0][0]["private"]["norm"]) == 2


@pytest.mark.thorough
def test_a_forgotten_run_makes_room_and_files_of_others_stay(tmp_path):
    runs.fit(tmp_path, runs.make(steps=2))
    (tmp_path / "mine").write_text("stays")
    training.forget(tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert {"mine", "lock"} <= left <= {"mine", "lock", "checkpoints", "tensorboard"}
    with held(tmp_path), pytest.raises(ledger.Refused, match="is running there"):
        runs.fit(tmp_path, runs.make(steps=2))
    with held(tmp_path, "command.lock"):  # of a command around `fit`
        runs.fit(tmp_path, runs.make(steps=2, multiplier=2.0))


@pytest.mark.thorough
def test_what_a_run_is_says_nothing_of_its_key(tmp_path):
    texts = []
    for seed in (0, 1):
        algorithm, folder = runs.make(steps=2), tmp_path / str(seed)
        state = runs.start(algorithm, jax.random.key(seed))
        runs.fit(folder, algorithm, state, configuration={"mine": 3, "randomness": "fresh"})
        texts.append((folder / "run.json").read_text())
    assert texts[0] == texts[1]
    run = json.loads(texts[0])
    assert (run["mine"], run["randomness"]) == (3, "supplied"), "facts of the run come last"

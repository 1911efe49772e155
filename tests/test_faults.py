# SPDX-License-Identifier: Apache-2.0
"""Runs that are killed, starved, cut off and disturbed: they end as if nothing had been."""

import contextlib
import dataclasses
import json
import multiprocessing
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time
from unittest import mock

import jax
import jax.numpy as jnp
import killable_runs as runs
import numpy as np
import optax
import pytest
from mutation import kills

import dpjax
from dpjax import checkpoints, clipping, ledger, noise, training
from dpjax._files import lock
from dpjax.gradients import platforms
from dpjax.training.folder_lock import hold
from dpjax.training.run_folder import Folder


@pytest.fixture(scope="module")
def server():
    return runs.server()


def same(one, other):
    """Two ends of a run with the same key: parameters, ledger and log, to the last bit."""
    (state, rows), (again, others) = one, other
    leaves = (jax.tree.leaves((s.params, s.optimizer)) for s in (state, again))
    for a, b in zip(*leaves, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(state.ledger.expand(), again.ledger.expand())
    assert rows == others


def uninterrupted(folder, directory):
    """The run of another folder, its key included, in one go."""
    algorithm = runs.make()
    key = last_state(folder, runs.start(algorithm)).key
    runs.fit(directory, algorithm, runs.start(algorithm, key))
    return runs.read(directory)


def last_state(folder, like):
    kept = checkpoints.Checkpoints(folder / "checkpoints")
    state = kept.latest(like=like).state
    kept.close()
    return state


def cut_off(folder, algorithm=None, *, after, **options):
    """A run that dies as soon as these steps have run."""
    algorithm = algorithm or runs.make()

    def run(state, count):
        if state.ledger.steps >= after:
            raise InterruptedError
        return algorithm.run(state, count)

    with pytest.raises(InterruptedError):
        runs.fit(folder, dataclasses.replace(algorithm, run=run), **options)


def running(server, folder):
    """A process that trains in the folder."""
    process = runs.begin(server, folder, options={"evaluate_every": 1, "save_every": 1})
    while not (folder / "run.json").exists():
        time.sleep(0.01)
    return process


@pytest.mark.slow
@pytest.mark.parametrize("kills", [10, 30])
def test_kills_change_nothing(server, tmp_path, kills):
    """SIGKILL at random moments: in a step, in a save, between a row and its checkpoint."""
    moments = random.Random(0)
    deaths = number = 0
    while deaths < kills:
        folder, longest = tmp_path / f"run{number}", 1.2
        while True:
            process = runs.begin(server, folder)
            if runs.killed(process, after=moments.uniform(0, longest)):
                deaths += 1
                longest *= 1.1  # else a run whose compilation takes longer would never end
            elif process.exitcode == 0:
                break
            else:
                pytest.fail(f"a life ended by itself, with status {process.exitcode}")
        number += 1
        same(runs.read(folder), uninterrupted(folder, tmp_path / f"whole{number}"))
    assert number < kills, "every run was killed at least once"


@pytest.mark.sample(1)
@kills("training/fit.py", "now=over or interrupted", "now=over", case="15", slow=True)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_obeyed_after_saving(server, tmp_path, number):
    how = {"options": {"save_every": None, "evaluate_every": 1}}
    process = runs.begin(server, tmp_path / "run", **how)
    log = tmp_path / "run" / "metrics.jsonl"
    while not (log.exists() and log.read_text().count("\n") > 3):
        time.sleep(0.01)
    os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == (143 if number == signal.SIGTERM else 1)
    saved = max(int(p.name) for p in (tmp_path / "run" / "checkpoints").glob("[0-9]*"))
    rows = [json.loads(line)["step"] for line in log.read_text().splitlines()]
    assert saved == rows[-1] < runs.STEPS, "nothing that ran was lost"


@pytest.mark.slow
def test_a_full_disk_is_survived_and_reported(server, tmp_path):
    """No file can grow for a while, whatever process writes it."""
    run, log = tmp_path / "run", tmp_path / "run" / "metrics.jsonl"
    cut_off(run, after=9)
    before = log.read_text()
    starved = runs.begin(server, run, largest=len(before) + 50)
    starved.join(60)
    assert starved.exitcode == 1, "the last checkpoint could not be written, and this was said"
    assert log.read_text() == before
    same(runs.read(run), uninterrupted(run, tmp_path / "whole"))


@kills("training/runner.py", "        self.folder.flush()", "        pass", slow=True)
@pytest.mark.slow
def test_the_last_row_that_a_full_disk_rejected_is_written_before_the_checkpoint(tmp_path):
    """No row follows it, and no run that resumes from this checkpoint writes it again."""
    log, away = tmp_path / "metrics.jsonl", tmp_path / "away"

    def evaluate(state):
        if state.ledger.steps == 4:
            log.rename(away)
            log.mkdir()  # cannot be opened
        return {}

    def shown(rows):
        if log.is_dir():
            log.rmdir()
            away.rename(log)

    options = {"evaluate": evaluate, "evaluate_every": 2, "progress": shown}
    runs.fit(tmp_path, runs.make(steps=4), **options)
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [2, 4]


@kills("_files.py", "os.open(path, flags, 0o600)", "os.open(path, flags)", slow=True)
@kills(
    "training/run_folder.py",
    'encoding="utf-8", opener=opened_for_owner',
    'encoding="utf-8"',
    slow=True,
)
@pytest.mark.slow
def test_a_log_that_is_removed_begins_again_and_its_steps_stay_spent(tmp_path):
    log = tmp_path / "metrics.jsonl"

    def evaluate(state):
        if state.ledger.steps == 4:
            log.unlink()
        return {}

    runs.fit(tmp_path, runs.make(steps=4), evaluate=evaluate, evaluate_every=2)
    assert json.loads(log.read_text())["step"] == 4
    assert log.stat().st_mode & 0o077 == 0
    assert _spent(tmp_path) == [4]


def test_nothing_runs_where_nothing_can_be_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints.Checkpoints, "save", lambda *_: False)
    with pytest.raises(OSError, match="No step ran"):
        runs.fit(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == ""


@pytest.mark.slow
@kills(
    "training/run_folder.py",
    'overwrite(self.path / "furthest", 0, f',
    'replace(self.path / "furthest", f',
    slow=True,
)
@kills(
    "training/run_folder.py", "overwrite(path, size, bytes(max(0, room - size)))", "pass", slow=True
)
@kills("training/runner.py", "            folder.reserve(mechanism.steps)\n", "", slow=True)
def test_what_says_which_steps_were_released_needs_no_room_on_a_full_disk(tmp_path):
    files, seen = [tmp_path / "furthest", tmp_path / "seals"], []

    def look(state):
        seen.append([(path.stat().st_ino, path.stat().st_size) for path in files])
        return {}

    algorithm = runs.make(steps=4)

    def run(state, count):
        look(state)
        return algorithm.run(state, count)

    runs.fit(tmp_path, dataclasses.replace(algorithm, run=run), evaluate=look, evaluate_every=1)
    assert len(seen) == 8
    assert all(found == seen[0] for found in seen)


@pytest.mark.parametrize("name", ["furthest", "seals"])
@kills(
    "training/run_folder.py",
    "                self._write_mark(*mark)\n",
    "                pass\n",
    case="furthest",
)
@kills(
    "training/run_folder.py",
    "            if self._sealed < step:\n",
    "            self._write_mark(*mark)\n            if self._sealed < step:\n",
    case="seals",
    slow=True,
)
def test_a_step_that_cannot_be_recorded_is_not_released(tmp_path, monkeypatch, name):
    """Or a later process would count nothing, and release it again with other noise."""
    overwrite, seen = training.run_folder.overwrite, []

    def refused(path, start, content):
        if path.name == name:
            raise OSError("no space left")
        overwrite(path, start, content)

    algorithm = runs.make(steps=4)

    def run(state, count):
        monkeypatch.setattr(training.run_folder, "overwrite", refused)
        return algorithm.run(state, count)

    starved = dataclasses.replace(algorithm, run=run)
    with pytest.raises(OSError, match="cannot record that step 2 is released"):
        runs.fit(tmp_path, starved, evaluate=seen.append, evaluate_every=2, save_every=100)
    assert not seen
    assert _spent(tmp_path) == [0]
    assert not (tmp_path / "params.msgpack").exists()


@kills(
    "training/runner.py",
    "        except OSError as error:\n",
    "        except KeyError as error:\n",
    slow=True,
)
@kills(
    "training/runner.py",
    '("%s The run continues.", error)\n            return False',
    '("%s The run continues.", error)',
    slow=True,
)
def test_a_checkpoint_whose_step_cannot_be_recorded_is_not_written(tmp_path, monkeypatch, caplog):
    mark = Folder.mark

    def refused(folder, step, *rest):
        if step == 2:
            raise OSError("No space.")
        mark(folder, step, *rest)

    monkeypatch.setattr(Folder, "mark", refused)
    runs.fit(tmp_path, runs.make(steps=4), evaluate_every=4, save_every=1)
    assert "No space. The run continues." in caplog.text
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("[0-9]*")) == [
        "1",
        "3",
        "4",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("hurt", ["cut off", "a bit changed", "a file gone"])
def test_a_damaged_checkpoint_is_set_aside(tmp_path, hurt):
    cut_off(tmp_path / "run", after=30)
    newest = max((tmp_path / "run" / "checkpoints").glob("[0-9]*"), key=lambda p: int(p.name))
    for path in (p for p in newest.rglob("*") if p.is_file() and p.stat().st_size > 50):
        content = bytearray(path.read_bytes())
        if hurt == "cut off":
            path.write_bytes(content[: len(content) // 2])
        elif hurt == "a file gone":
            path.unlink()
        else:
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
    end = runs.read(tmp_path / "run")
    assert (newest.parent / f"damaged-{newest.name}").is_dir()
    same(end, uninterrupted(tmp_path / "run", tmp_path / "whole"))


@pytest.mark.slow
def test_numbers_of_another_checkpoint_are_noticed(tmp_path):
    """Every file is whole, and still it is not what was saved."""
    cut_off(tmp_path / "run", after=30)
    older, newest = sorted((tmp_path / "run" / "checkpoints").glob("[0-9]*"))[-2:]
    shutil.rmtree(newest / "state")
    shutil.copytree(older / "state", newest / "state")
    end = runs.read(tmp_path / "run")
    assert (newest.parent / f"damaged-{newest.name}").is_dir()
    same(end, uninterrupted(tmp_path / "run", tmp_path / "whole"))


def test_no_checkpoint_that_can_be_read_is_an_error_that_says_what_is_spent(tmp_path):
    runs.fit(tmp_path, steps=9)
    for path in (tmp_path / "checkpoints").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    with pytest.raises(checkpoints.Damaged, match="spent all the same"):
        runs.fit(tmp_path)
    with pytest.raises(checkpoints.Damaged):
        runs.fit(tmp_path)


def test_what_a_kill_left_half_written_is_no_checkpoint(tmp_path):
    cut_off(tmp_path, after=9)
    half = tmp_path / "checkpoints" / "12.orbax-checkpoint-tmp"
    half.mkdir()
    (half / "state").write_bytes(b"half")
    with (tmp_path / "metrics.jsonl").open("a") as log:
        log.write('{"step": 14, "eps')
    _, rows = runs.read(tmp_path)
    assert [row["step"] for row in rows][:3] == [7, 14, 21]


@pytest.mark.slow
@kills("_files.py", "fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH", slow=True)
def test_two_processes_do_not_share_a_folder(server, tmp_path):
    process = running(server, tmp_path)
    with pytest.raises(ledger.Refused, match=f"process {process.pid} is running there"):
        runs.fit(tmp_path)
    runs.killed(process, after=0)
    runs.read(tmp_path)  # the lock died with its holder


OTHERS = {
    "multiplier": (
        {"multiplier": 1.1},
        r"mechanism\.multiplier_and_steps: \[\[1.0, 60\]\] there, \[\[1.1, 60\]\] now",
    ),
    "rate": ({"batch": 25}, r"mechanism\.sampling\.batch_size: 20 there, 25 now"),
    "bound": ({"bound": 0.5}, r"mechanism\.clipping\.bounds: \[1.0\] there, \[0.5\] now"),
    "steps": ({"steps": 61}, r"\[\[1.0, 60\]\] there, \[\[1.0, 61\]\] now"),
    "data": ({"data": runs.DATA + 1}, "data: "),
    "bounds later": ({"bound_schedule": lambda step: 2.0}, "bound schedule: null there"),
}


@pytest.mark.sample(1)
@kills("training/assembly.py", '"data": self.content,', '"data": None,', case="data", slow=True)
@kills(
    "mechanism/description.py",
    "zip(values.tolist(), counts",
    "zip([1.0] * len(values), counts",
    case="multiplier",
    slow=True,
)
@pytest.mark.parametrize("other", OTHERS)
def test_another_run_is_refused_by_name(tmp_path, other):
    settings, message = OTHERS[other]
    runs.fit(tmp_path, steps=3)
    log = (tmp_path / "metrics.jsonl").read_text()
    algorithm = runs.make(**settings)
    with pytest.raises(ledger.Refused, match=message) as refusal:
        runs.fit(tmp_path, algorithm)
    assert str(refusal.value).count(" there, ") == 1, "only what differs is named"
    assert (tmp_path / "metrics.jsonl").read_text() == log


def test_another_configuration_is_refused_by_name(tmp_path):
    runs.fit(tmp_path, steps=3, configuration={"learning_rate": 0.1, "model": "mlp"})
    with pytest.raises(ledger.Refused, match=r"learning_rate: 0.1 there, 0.2 now"):
        runs.fit(tmp_path, configuration={"learning_rate": 0.2, "model": "mlp"})


def test_another_model_or_optimizer_is_refused(tmp_path):
    runs.fit(tmp_path, steps=3)
    algorithm = runs.make()
    optimizer = optax.chain(optax.adam(0.1), training.average_parameters(0.9))
    longer = lambda w, x: runs.loss(w[:5], x)  # noqa: E731
    larger = dpjax.dpsgd(longer, optimizer, algorithm.mechanism, runs.DATA)
    with pytest.raises(ledger.Refused, match="shapes of the parameters"):
        runs.fit(tmp_path, larger, runs.start(larger, size=6))
    other = dpjax.dpsgd(runs.loss, optax.sgd(0.1), algorithm.mechanism, runs.DATA)
    with pytest.raises(ledger.Refused, match="follows from loss, optimizer"):
        runs.fit(tmp_path, other)


@pytest.mark.slow
def test_a_state_of_another_run_is_refused(tmp_path):
    algorithm = runs.make()
    runs.fit(tmp_path, steps=3)
    state, _ = algorithm.step(runs.start(algorithm))
    with pytest.raises(ledger.Refused, match="another key than the checkpoints there"):
        runs.fit(tmp_path, algorithm, state)


def test_a_log_without_a_run_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ledger.Refused, match=r"no run\.json"):
        runs.fit(tmp_path)


@pytest.mark.slow
@kills("training/run_folder.py", ' if row["step"] <= until]', "]", slow=True)
def test_rows_that_will_be_written_again_are_taken_back(tmp_path):
    options = {"evaluate_every": 3, "save_every": 10}
    cut_off(tmp_path, after=18, **options)
    _, rows = runs.fit(tmp_path, **options)
    logged = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert logged == rows
    assert [row["step"] for row in rows] == list(range(3, 61, 3))


@kills(
    "training/runner.py",
    "            self.mark()\n        except",
    "            pass\n        except",
    slow=True,
)
def test_a_saved_step_is_spent_before_its_checkpoint_has_a_name(tmp_path, monkeypatch):
    """Someone may remove the checkpoint later, and with it the only other trace of the step."""
    save, marks = checkpoints.Checkpoints.save, []

    def watched(kept, step, *rest):
        marks.append((step, *_spent(tmp_path)))
        return save(kept, step, *rest)

    monkeypatch.setattr(checkpoints.Checkpoints, "save", watched)
    cut_off(tmp_path, after=4, evaluate_every=100, save_every=2)
    assert marks == [(0, 0), (2, 2), (4, 4)]
    shutil.rmtree(tmp_path / "checkpoints")
    assert _spent(tmp_path) == [4]
    with pytest.raises(ledger.Refused, match="4 steps ran there, and no checkpoint is left"):
        runs.fit(tmp_path)


@pytest.fixture
def unmarked(monkeypatch):
    """Marks that a full disk refuses."""
    monkeypatch.setattr(training.run_folder.Folder, "mark", lambda self, *steps: None)


# Rows alone tell how far it came: no checkpoint but the first, and `unmarked` no mark.
UNSEEN = {"evaluate": None, "evaluate_every": 3, "save_every": 20}


@kills("training/run_folder.py", '    steps += [row["step"] for row in rows]\n', "", slow=True)
@kills("mechanism/card.py", '(*facts["before"], ran)', "(ran,)", slow=True)
def test_a_run_continues_another_and_pays_for_both(tmp_path, unmarked):
    """Other settings, another folder, another key: the earlier steps are added up, twice over."""
    cut_off(tmp_path / "a", after=18, **UNSEEN)
    before = training.earlier(tmp_path / "a")
    assert [spent.steps for spent in before] == [18], "a row of step 18 is on disk"
    plain = runs.make(multiplier=2.0, batch=10)
    mechanism = dataclasses.replace(plain.mechanism, before=before)
    assert mechanism.epsilon(1e-5) > max(
        plain.mechanism.epsilon(1e-5), runs.make(steps=18).mechanism.epsilon(1e-5)
    )
    algorithm = dpjax.dpsgd(runs.loss, optax.sgd(0.1), mechanism, runs.DATA)
    _, rows = runs.fit(tmp_path / "b", algorithm, steps=30)
    assert rows[0]["epsilon"] > mechanism.epsilon_of(np.zeros(0), 1e-5)
    both = training.earlier(tmp_path / "b")
    assert [(spent.steps, spent.runs[0][0]) for spent in both] == [(18, 1.0), (30, 2.0)]
    with pytest.raises(ledger.Refused, match=r"mechanism\.before: "):
        runs.fit(tmp_path / "b", plain, runs.start(plain))
    with pytest.raises(FileNotFoundError, match="expected the folder of a run"):
        training.earlier(tmp_path)


def _spent(folder):
    return [spent.steps for spent in training.earlier(folder)]


@kills(
    "training/run_folder.py",
    "        self._write_mark(*self._mark)\n",
    "        self._write_mark(0, 0)\n",
    slow=True,
)
def test_released_steps_are_spent_though_the_run_resumes_from_an_earlier_one(tmp_path, unmarked):
    cut_off(tmp_path, after=18, **UNSEEN)
    assert _spent(tmp_path) == [18], "of its rows, the only checkpoint is of step 0"
    for _ in range(2):
        cut_off(tmp_path, after=0, **UNSEEN)
        assert (tmp_path / "metrics.jsonl").read_text() == ""
        assert _spent(tmp_path) == [18]
    runs.fit(tmp_path)
    assert _spent(tmp_path) == [runs.STEPS]


@pytest.mark.slow
@kills("training/run_folder.py", "(?:damaged-)?", "", slow=True)
def test_released_steps_are_spent_though_their_checkpoints_are_damaged_or_gone(tmp_path):
    quiet = {"evaluate_every": 100, "save_every": 10}
    cut_off(tmp_path, after=30, **quiet)
    for path in (tmp_path / "checkpoints" / "30").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    cut_off(tmp_path, after=0, **quiet)
    assert (tmp_path / "checkpoints" / "damaged-30").is_dir()
    (tmp_path / "furthest").unlink()
    assert _spent(tmp_path) == [30]
    runs.fit(tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(ledger.Refused, match="60 steps ran there, and no checkpoint is left"):
        runs.fit(tmp_path)
    assert _spent(tmp_path) == [60]


def _seen(folder, algorithm=None, *, last=None, steps=None, state=None):
    """Four steps at most, each of them evaluated; the evaluation of step `last` dies."""

    def evaluate(state):
        if state.ledger.steps == last:
            raise InterruptedError
        return {}

    algorithm = runs.make(steps=4) if algorithm is None else algorithm
    state = runs.start(algorithm) if state is None else state
    options = {"evaluate_every": 1, "save_every": 100, "progress": False, "steps": steps}
    with pytest.raises(InterruptedError) if last else contextlib.nullcontext():
        return dpjax.fit(algorithm, state, directory=folder, evaluate=evaluate, **options)[0]


CHANGES = {
    "draws": (lambda: jax.threefry_partitionable(False), "partitionable: True there, False now"),
    "width": (lambda: jax.enable_x64(True), "jax_enable_x64: False there, True now"),
    "products": (
        lambda: jax.default_matmul_precision("highest"),
        "jax_default_matmul_precision: None there, highest now",
    ),
    "versions": (
        lambda: mock.patch.object(training.environment, "_installed", return_value="0"),
        r"  dpjax: \S+ there, 0 now\n  jax: .*\n  jaxlib: .*\n  optax: ",
    ),
    "devices": (
        lambda: mock.patch.object(jax, "default_backend", return_value="tpu"),
        "platform: cpu there, tpu now",
    ),
    "flags": (
        lambda: mock.patch.dict(
            os.environ, {"XLA_FLAGS": "--xla_dump_to=x --xla_cpu_max_isa=AVX2"}
        ),
        r"XLA_FLAGS: \S+ there, --xla_cpu_max_isa=AVX2 now\nThe steps",
    ),
    "processor": (
        lambda: mock.patch.object(training.environment, "_processor", return_value="another"),
        r"  processor: \w.*(avx|asimd).* there, another now",
    ),
}


@kills("training/fit.py", "    run.mark()\n", "", case="versions", slow=True)
@kills(
    "training/environment.py",
    "**{name: _installed(name) for name in _PACKAGES},",
    "",
    case="versions",
    slow=True,
)
@kills("training/environment.py", '"jax_threefry_partitionable", ', "", case="draws", slow=True)
@kills("training/environment.py", '"jax_enable_x64", ', "", case="width", slow=True)
@kills(
    "training/environment.py", ', "jax_default_matmul_precision")', ")", case="products", slow=True
)
@kills(
    "training/environment.py",
    '"XLA_FLAGS": " ".join(numeric) or "none", ',
    "",
    case="flags",
    slow=True,
)
@kills("training/environment.py", ', "processor": _processor()}', "}", case="processor", slow=True)
@kills(
    "training/environment.py",
    '        "platform": jax.default_backend(),\n',
    "",
    case="devices",
    slow=True,
)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.slow
def test_released_steps_do_not_run_again_in_another_environment(tmp_path, change):
    """Other noise on the same sums, or the same noise on others, is released twice."""
    _seen(tmp_path, last=1)
    assert _spent(tmp_path) == [1], "though there is no row of it, and no checkpoint"
    algorithm, (changed, message) = runs.make(steps=4), CHANGES[change]
    state = runs.start(algorithm)
    with changed(), pytest.raises(ledger.Refused, match=message):
        _seen(tmp_path, algorithm, state=state)
    assert _seen(tmp_path).ledger.steps == 4


@kills("training/environment.py", "compiler_options=same", "compiler_options=None")
@kills("training/in_memory.py", "return repeatable(several", "return jax.jit(several", slow=True)
def test_a_gpu_compiles_steps_that_release_the_same_bits_again(monkeypatch):
    """By default XLA chooses kernels of a GPU by their time, and adds in the order of threads."""
    monkeypatch.setattr(platforms, "on_gpu", lambda: True)
    # JAX names the options of a program that it finds inside another.
    with pytest.raises(ValueError, match="'xla_gpu_deterministic_ops': True"):
        jax.jit(training.environment.repeatable(jnp.sin))(1.0)
    others = {
        path.name: path.read_text().count("jax.jit(")
        for path in pathlib.Path(training.__file__).parent.glob("*.py")
    }
    assert {name for name, count in others.items() if count} == {"environment.py"}


@kills("training/assembly.py", '            "engine": self.recipe.engine,\n', "", slow=True)
def test_released_steps_do_not_run_again_by_another_engine(tmp_path):
    _seen(tmp_path, last=1)
    for options in ({"engine": "vmap"}, {"microbatch_size": 2}):
        (name,) = options
        with pytest.raises(ledger.Refused, match=f"{name}: (auto|32) there, (vmap|2) now"):
            _seen(tmp_path, runs.make(steps=4, **options))


@kills("training/run_folder.py", "max(step, before.furthest)", "step", slow=True)
def test_a_mark_stays_where_it_was_furthest(tmp_path):
    for last in (3, 1):
        _seen(tmp_path, last=last)
        assert _spent(tmp_path) == [3]


@pytest.mark.slow
@kills("training/run_identity.py", ', "processor", "XLA_FLAGS"}', "}", slow=True)
@kills("training/run_folder.py", '"" if PLACES.issuperset(names) else BLIND', '""', slow=True)
@kills("training/run_folder.py", '"" if PLACES.issuperset(names) else BLIND', "BLIND", slow=True)
@kills(
    "training/run_folder.py",
    'replace(path, json.dumps(kept, indent=2) + "\\n")',
    "pass",
    slow=True,
)
@kills(
    "training/run_folder.py",
    "before.get(INODE, self.identity[INODE])",
    "self.identity[INODE]",
    slow=True,
)
@kills("training/run_identity.py", '"small seed", INODE)', '"small seed")', slow=True)
@kills(
    "training/runner.py",
    "not changed_numerics(under, self.began_under)",
    "not changed_numerics(self.began_under, self.began_under)",
    slow=True,
)
def test_numerics_may_change_where_nothing_runs_again(tmp_path, caplog):
    _seen(tmp_path, steps=2)
    algorithm = runs.make(steps=4)
    other = algorithm.init(jnp.ones(5))  # as of a seed under other numerics
    with jax.threefry_partitionable(False):
        with caplog.at_level("WARNING"):
            _seen(tmp_path, algorithm, last=3, state=other)
        assert "resumes at step 2. This folder records no later step" in caplog.text
        assert "loss, optimizer and rate were not compared" in caplog.text
    with pytest.raises(ledger.Refused, match="partitionable: False there, True now"):
        _seen(tmp_path)
    caplog.clear()
    with jax.threefry_partitionable(False), caplog.at_level("WARNING"):
        _seen(tmp_path, algorithm, steps=3, state=other)  # its parameters are of these numerics
        assert _seen(tmp_path, runs.make(steps=4, microbatch_size=2)).ledger.steps == 4
    assert "microbatch_size: 32 there, 2 now" in caplog.text
    assert "not compared" not in caplog.text
    caplog.clear()
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path, copy)
    with jax.threefry_partitionable(False):
        assert _seen(copy, runs.make(steps=4, microbatch_size=2)).ledger.steps == 4
    with pytest.raises(ledger.Refused, match=r"is a copy: (?s:.*)partitionable: False there"):
        _seen(copy, runs.make(steps=4, microbatch_size=2))
    elsewhere = mock.patch.object(training.environment, "_processor", return_value="another")
    flags = mock.patch.dict(os.environ, {"XLA_FLAGS": "--xla_cpu_max_isa=AVX2"})
    with jax.threefry_partitionable(False), elsewhere, flags, caplog.at_level("WARNING"):
        assert _seen(tmp_path, runs.make(steps=4, microbatch_size=2)).ledger.steps == 4
    assert "there, another now" in caplog.text
    assert "not compared" not in caplog.text


@pytest.mark.slow
@kills(
    "training/environment.py",
    "return trees.fingerprint([np",
    'return ""\n    return trees.fingerprint([np',
    slow=True,
)
@kills("training/environment.py", "np.asarray(part, np.int64)", "part", slow=True)
@kills("types.py", "independent: bool = False", "independent: bool = True", slow=True)
@kills("ledger.py", "{Purpose.NOISE:d} {drawn}", "{Purpose.NOISE:d}", slow=True)
@pytest.mark.parametrize("folder", [True, False])
def test_the_rest_of_an_epoch_is_not_drawn_by_another_generator(tmp_path, folder):
    """Nothing runs again, but an example of the first part could be drawn a second time."""
    directory = tmp_path if folder else None

    def run(steps, state=None):
        mechanism = dpjax.Mechanism(
            sampling=dpjax.sampling.shuffled(20, 5),
            clipping=clipping.flat(1.0),
            noise_multiplier=1.0,
            steps=4,
        )
        algorithm = dpjax.dpsgd(lambda p, x: jnp.vdot(p, x), optax.sgd(0.1), mechanism, np.eye(20))
        state = state or algorithm.init(jnp.zeros(20, jnp.float32))
        state, _ = dpjax.fit(algorithm, state, steps=steps, directory=directory, progress=False)
        return state

    first = run(2)
    begun, steps = (None, 4) if folder else (first, 2)
    with (
        jax.threefry_partitionable(False),
        pytest.raises(ledger.Refused, match="drew other numbers from it"),
    ):
        run(steps, begun)
    with jax.enable_x64(True):  # draws alike
        assert run(steps, begun).ledger.steps == 4


@kills("training/run_folder.py", '.get("numerics", {})\n', '.get("numerics", now)\n', slow=True)
def test_runs_without_recorded_numerics_resume_where_nothing_runs_again(tmp_path):
    def forgotten():
        known = json.loads(path.read_text())
        lacks = ("numerics", "inode of lock")
        path.write_text(json.dumps({k: v for k, v in known.items() if k not in lacks}))

    path = tmp_path / "run.json"
    _seen(tmp_path, steps=1)
    forgotten()
    _seen(tmp_path, last=2)
    forgotten()
    with pytest.raises(ledger.Refused, match="  jax: unknown there"):
        _seen(tmp_path)


@kills("training/runner.py", '"began under": self.began_under', '"began under": {}', slow=True)
def test_a_run_that_began_with_other_parameters_is_refused(tmp_path):
    algorithm = runs.make(steps=4)
    _seen(tmp_path, algorithm, steps=2)
    other = algorithm.init(jnp.ones(5))
    with pytest.raises(ledger.Refused, match="began with other parameters"):
        _seen(tmp_path, algorithm, state=other)
    last = last_state(tmp_path, other)
    assert _seen(tmp_path, algorithm, state=last).ledger.steps == 4


@kills(
    "training/runner.py",
    "            _require_saved(self.state, found.state, folder)\n",
    "            pass\n",
    slow=True,
)
def test_a_state_that_was_changed_between_two_calls_is_refused(tmp_path):
    algorithm = runs.make(steps=4)
    state = _seen(tmp_path, algorithm, steps=2)
    with pytest.raises(ledger.Refused, match=r"params of the given state .* at this step, 2"):
        _seen(tmp_path, algorithm, steps=1, state=state._replace(params=state.params + 1))
    assert _seen(tmp_path, algorithm, steps=1, state=state).ledger.steps == 3


@kills("training/runner.py", "given > found.state.ledger.steps", "False", slow=True)
def test_steps_that_ran_without_fit_count_when_fit_has_seen_them(tmp_path):
    algorithm = runs.make(steps=4)
    state = _seen(tmp_path, algorithm, steps=1)
    further, _ = algorithm.step(algorithm.step(state)[0])
    with pytest.raises(KeyboardInterrupt):
        _interrupted(algorithm, further, tmp_path)
    assert _spent(tmp_path) == [3]


def _interrupted(algorithm, state, folder):
    """A call of `fit` that ends before its first step."""

    def never(*_):
        raise KeyboardInterrupt

    algorithm = dataclasses.replace(algorithm, step=never, run=never)
    dpjax.fit(algorithm, state, directory=folder, progress=False)


@kills("training/runner.py", "jax.device_get(state.ledger)", "state.ledger", slow=True)
def test_a_state_that_was_put_on_a_device_resumes(tmp_path):
    algorithm = runs.make(steps=4)
    placed = jax.device_put(runs.start(algorithm))
    _seen(tmp_path, algorithm, state=placed, steps=2)  # whose ledger the checkpoint holds
    assert _seen(tmp_path, algorithm, state=placed).ledger.steps == 4


def test_the_info_of_a_step_of_ones_own_is_a_named_tuple():
    algorithm = runs.make(steps=2)

    def step(state):
        state, info = algorithm.step(state)
        return state, info._asdict()

    own = dataclasses.replace(algorithm, step=step, run=None)
    with pytest.raises(TypeError, match="info of a step is a dict; expected a NamedTuple"):
        dpjax.fit(own, runs.start(own), progress=False)


@kills("training/fit.py", "evaluate(trees.copy(run.state))", "evaluate(run.state)", slow=True)
def test_evaluate_may_keep_the_best_parameters():
    kept = []
    algorithm = runs.make(steps=4)

    def evaluate(state):
        kept.append(state.params)
        return {}

    state = runs.start(algorithm)
    dpjax.fit(algorithm, state, evaluate=evaluate, evaluate_every=1, progress=False)
    assert len(np.unique(np.stack(kept), axis=0)) == 4


@kills("training/fit.py", "if run.done > terms.begin:", "if False:", slow=True)
def test_a_given_state_that_is_ignored_is_logged(tmp_path, caplog):
    algorithm = runs.make(steps=4)
    with caplog.at_level("WARNING"):
        state = _seen(tmp_path, algorithm, steps=2)
        _seen(tmp_path, algorithm, steps=1, state=state)
    assert not caplog.text
    with caplog.at_level("INFO"):
        _seen(tmp_path, algorithm)
    assert f"resuming from step 3 of {tmp_path}. The given state" in caplog.text


def test_what_a_run_is_says_nothing_of_its_key(tmp_path):
    """Nor of parameters that the same seed may have made, which would confirm a guess of it."""
    algorithm, found = runs.make(steps=4), []
    for seed in (0, 1):
        key = jax.random.key(seed)
        state = algorithm.init(jax.random.normal(key, 5), key)
        _seen(tmp_path / str(seed), algorithm, state=state, steps=1)
        found.append(json.loads((tmp_path / str(seed) / "run.json").read_text()))
        assert found[-1].pop("inode of lock") > 0, "which is of the folder"
    assert found[0] == found[1]


@pytest.mark.slow
@kills("_files.py", " and number == len(lines):", ":", slow=True)
def test_a_log_that_was_altered_is_left_as_it_is(tmp_path):
    runs.fit(tmp_path, steps=30)
    log = tmp_path / "metrics.jsonl"
    lines = log.read_text().splitlines()
    log.write_text("\n".join([lines[0], lines[1][:20], *lines[2:], ""]))
    altered = log.read_text()
    for look in (runs.fit, training.earlier):
        with pytest.raises(ValueError, match=f"line 2 of {len(lines)} is not a JSON"):
            look(tmp_path)
    assert log.read_text() == altered


TWO_DEVICES = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 2)
import numpy as np
import dpjax
import killable_runs as runs

data = runs.DATA
if sys.argv[2] == "stream":
    data = dpjax.data.Stream(data, example=lambda x: x)
key = jax.random.key(3)
for name, parts in {"whole": [60], "in parts": [20, 60]}.items():
    for steps in parts:
        algorithm = runs.make(data=data, microbatch_size=2)
        state = runs.start(algorithm, key)
        end, _ = runs.fit(f"{sys.argv[1]}/{name}", algorithm, state, steps=steps)
    print(np.asarray(end.params).tobytes().hex())
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memory", "stream"])
def test_a_run_on_two_devices_resumes_to_the_last_bit(tmp_path, kind):
    program = [sys.executable, "-c", TWO_DEVICES, tmp_path, kind]
    here = {"env": runs.environment(), "capture_output": True, "text": True}
    done = subprocess.run(program, check=False, timeout=300, **here)
    assert done.returncode == 0, done.stderr[-2000:]
    whole, in_parts = done.stdout.split()
    assert whole == in_parts


@pytest.mark.slow
def test_a_forgotten_run_makes_room_for_another(tmp_path):
    runs.fit(tmp_path, steps=3)
    (tmp_path / "mine").write_text("stays")
    training.forget(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "mine"]
    _, rows = runs.fit(tmp_path, runs.make(multiplier=2.0), steps=3)
    assert [row["step"] for row in rows] == [3]
    training.forget(tmp_path / "nothing")


@kills(
    "training/run_folder.py",
    'for path in (*folder.glob("[0-9]*"), *folder.glob("damaged-*")):',
    "for path in ():",
    slow=True,
)
@kills("training/run_folder.py", "_holds(folder / name)]", "(folder / name).exists()]", slow=True)
@pytest.mark.slow
def test_checkpoints_on_another_disk_are_forgotten_too(tmp_path):
    """They hold the root key. The link stays, and serves the next run."""
    folder, scratch = tmp_path / "run", tmp_path / "scratch"
    for path in (folder, scratch):
        path.mkdir()
    (folder / "checkpoints").symlink_to(scratch)
    for multiplier in (1.0, 2.0):
        runs.fit(folder, runs.make(multiplier=multiplier), save_every=1, steps=3)
        assert (scratch / "3").is_dir()
        (scratch / "2").rename(scratch / "damaged-2")
        training.forget(folder)
        assert not list(scratch.iterdir())


@kills(
    "training/run_folder.py",
    "pathlib.Path(directory).absolute()",
    "pathlib.Path(directory)",
    slow=True,
)
@pytest.mark.slow
def test_a_working_folder_that_changes_moves_no_run(tmp_path, monkeypatch):
    """A relative folder would lead into that of another run, whose lock this run never took."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "a")
    runs.fit("run", runs.make(steps=2))
    files = {path.name: path.read_bytes() for path in pathlib.Path("run").glob("*.*")}

    def evaluate(state):
        monkeypatch.chdir(tmp_path / "a")
        return {}

    monkeypatch.chdir(tmp_path / "b")
    runs.fit("run", runs.make(steps=4), evaluate=evaluate, evaluate_every=1)
    assert _spent(tmp_path / "b" / "run") == [4]
    assert files == {path.name: path.read_bytes() for path in pathlib.Path("run").glob("*.*")}


@kills(
    "training/run_folder.py",
    "            self._unlock()\n            raise\n",
    "            raise\n",
    slow=True,
)
@kills(
    "training/run_folder.py",
    "        finally:\n            self._unlock()\n",
    "        finally:\n            pass\n",
    slow=True,
)
def test_a_start_or_an_end_that_fails_releases_the_folder(tmp_path, monkeypatch):
    """As where the disk of the checkpoints is not mounted yet: the same process tries again."""
    (tmp_path / "checkpoints").symlink_to(tmp_path / "mounted")
    with pytest.raises(FileExistsError, match="checkpoints"):
        Folder(tmp_path, {"numerics": {}})
    (tmp_path / "mounted").mkdir()
    folder = Folder(tmp_path, {"numerics": {}})
    with monkeypatch.context() as patched:
        patched.setattr(checkpoints.Checkpoints, "close", mock.Mock(side_effect=KeyError))
        with pytest.raises(KeyError):
            folder.close()
    folder.checkpoints.close()
    Folder(tmp_path, {"numerics": {}}).close()


@pytest.mark.sample(1)
@kills(
    "training/run_folder.py",
    "if self._lock is not None and not is_lock(self._lock, self._path):",
    "if False:",
    slow=True,
)
@kills(
    "training/run_folder.py",
    "path, before = self.path, ",
    "path, before = self._path, ",
    case="step-True",
    slow=True,
)
@kills(
    "training/run_folder.py",
    'self.path / "metrics.jsonl"',
    'self._path / "metrics.jsonl"',
    case="evaluate-True",
    slow=True,
)
@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("place", ["evaluate", "step"])
def test_a_folder_that_was_removed_receives_no_file_of_its_run(tmp_path, place, again):
    """As where a notebook still runs, and a script removes its folder and begins again there."""
    folder, kept, seen = tmp_path / "run", {}, []

    def files():
        return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def removed(state):
        if state.ledger.steps == 4 and folder.exists() and not seen:
            seen.append(4)
            shutil.rmtree(folder)
            if again:
                runs.fit(folder, runs.make(steps=2))
            kept.update(files())

    algorithm = runs.make(steps=8)

    def run(state, count):
        if place == "step":
            removed(state)
        return algorithm.run(state, count)

    def evaluate(state):
        seen.extend([state.ledger.steps] if seen else [])
        if place == "evaluate":
            removed(state)
        return {}

    options = {"evaluate": evaluate, "evaluate_every": 2, "save_every": 100}
    with pytest.raises(ledger.Refused, match="was removed while its run continued"):
        runs.fit(folder, dataclasses.replace(algorithm, run=run), **options)
    assert seen == [4], "no later parameters were released"
    assert files() == kept


@kills(
    "training/folder_lock.py",
    "os.register_at_fork(after_in_child=_close_in_child)\n",
    "",
    slow=True,
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")  # of the fork
def test_a_forked_worker_does_not_hold_the_folder(tmp_path):
    """As of a loader, which lives on where its run is killed."""
    fork = multiprocessing.get_context("fork")
    begun = fork.Event()
    with contextlib.closing(Folder(tmp_path, {"numerics": {}})):
        worker = fork.Process(target=lambda: (begun.set(), time.sleep(60)))
        worker.start()
        assert begun.wait(60)  # a child closes its handles when it begins, after `start` returns
        assert lock(tmp_path / "lock") is None, "its run still holds it"
    try:
        Folder(tmp_path, {"numerics": {}}).close()
    finally:
        worker.kill()
        worker.join()


def test_a_folder_that_is_held_says_by_which_process(tmp_path):
    handle = lock(tmp_path / "lock")
    for number, words in {
        str(os.getpid()): f"process {os.getpid()} is running there",
        "": "process unknown is running there",
        "99999999": "process 99999999 was running .* that it had started still holds the folder",
    }.items():
        (tmp_path / "lock").write_text(number)
        with pytest.raises(ledger.Refused, match=words):
            Folder(tmp_path, {"numerics": {}})
    os.close(handle)


@kills("training/folder_lock.py", "else os.dup(held)", "else held", slow=True)
def test_a_held_folder_is_joined_by_its_own_process_alone(tmp_path):
    with hold(tmp_path):
        runs.fit(tmp_path, steps=3)
        training.forget(tmp_path)
        assert lock(tmp_path / "lock") is None, "until the block ends"
    runs.fit(tmp_path, steps=3)
    (tmp_path / "run.json").unlink()
    training.forget(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock"], (
        "no run.json, but its marks"
    )
    (tmp_path / "checkpoints").mkdir()
    training.forget(tmp_path)
    assert (tmp_path / "checkpoints").exists(), "nothing says that a run made it"


@pytest.mark.slow
def test_a_running_run_is_not_forgotten(server, tmp_path):
    process = running(server, tmp_path)
    with pytest.raises(ledger.Refused, match="is running there"):
        training.forget(tmp_path)
    runs.killed(process, after=0)
    assert (tmp_path / "run.json").exists()


@pytest.mark.slow
def test_parts_of_a_run_share_its_folder(tmp_path):
    """Fit after fit in one process, with the state handed on or not."""
    algorithm = runs.make()
    state, _ = runs.fit(tmp_path, algorithm, steps=10)
    state, rows = runs.fit(tmp_path, algorithm, state, steps=10)
    assert [row["step"] for row in rows] == [7, 10, 17, 20]
    assert state.ledger.steps == 20
    done, _ = runs.fit(tmp_path, algorithm, steps=20)
    assert done.ledger.steps == 20
    # A script of two calls, begun again: the second would add its steps to what is done already.
    with pytest.raises(
        ledger.Refused, match="20 steps ran there, and this call asks for steps up to"
    ):
        runs.fit(tmp_path, algorithm, steps=10)


@kills("training/runner.py", "if found.state.ledger.steps >= self.done:", "if False:", slow=True)
@kills(
    "training/runner.py",
    'self.state, self.seen = found.state, list(found.facts["seen"])',
    "self.state, self.seen = found.state._replace(key=self.state.key), []",
    slow=True,
)
@kills("training/runner.py", "if not self.save(wait=True):", "if False:", slow=True)
def test_the_root_key_is_on_disk_before_the_first_step(tmp_path):
    class Died(Exception):
        pass

    algorithm = runs.make()

    def die(state, count):
        raise Died

    with pytest.raises(Died):
        runs.fit(tmp_path, dataclasses.replace(algorithm, run=die))
    key = last_state(tmp_path, runs.start(algorithm)).key
    end, _ = runs.fit(tmp_path)
    np.testing.assert_array_equal(*map(jax.random.key_data, (key, end.key)))


@pytest.mark.slow
def test_an_algorithm_without_run_takes_single_steps(tmp_path):
    algorithm = runs.make()
    key = jax.random.key(3)
    slow, rows = runs.fit(
        tmp_path / "slow", dataclasses.replace(algorithm, run=None), runs.start(algorithm, key)
    )
    fast, others = runs.fit(tmp_path / "fast", algorithm, runs.start(algorithm, key))
    np.testing.assert_array_equal(slow.params, fast.params)
    for row, other in zip(rows, others, strict=True):
        assert row["private"] == other["private"]


@pytest.mark.slow
def test_checkpoints_are_for_their_owner_alone_and_the_last_three(tmp_path):
    runs.fit(tmp_path)
    folder = tmp_path / "checkpoints"
    assert folder.stat().st_mode & 0o077 == 0
    assert sorted(int(p.name) for p in folder.glob("[0-9]*")) == [54, 57, 60]


def test_signals_are_given_back(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    runs.fit(tmp_path, steps=1)
    assert before == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]


def test_a_second_signal_is_obeyed_immediately():
    with training.signals.Stop() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.slow
@kills("training/runner.py", '"seen": list(self.seen)', '"seen": []', slow=True)
def test_rules_with_several_groups_resume(tmp_path):
    """Infos that are lists survive the checkpoint between two rows."""
    rule = clipping.grouped(1.0, clipping.by_leaf({"a": 0, "b": 0}))
    mechanism = dataclasses.replace(runs.make().mechanism, clipping=rule)

    def both(w, x):
        return runs.loss(w["a"], x) + runs.loss(w["b"], 2 * x)

    def algorithm():
        return dpjax.dpsgd(both, optax.sgd(0.1), mechanism, runs.DATA)

    ends = []
    for name, parts in (("whole", (60,)), ("parts", (20, 60))):
        for steps in parts:
            fresh = algorithm()
            state = fresh.init({"a": jnp.zeros(5), "b": jnp.zeros(5)}, jax.random.key(0))
            options = {"evaluate_every": 25, "save_every": 10, "progress": False}
            if steps == 20:  # stopped at a checkpoint between two rows
                cut_off(tmp_path / name, fresh, after=20, state=state, evaluate=None, **options)
            else:
                ends.append(dpjax.fit(fresh, state, directory=tmp_path / name, **options))
    (one, rows), (two, others) = ends
    jax.tree.map(np.testing.assert_array_equal, one.params, two.params)
    assert [r["private"] for r in rows] == [r["private"] for r in others]
    assert len(rows[0]["private"]["norm"]) == 2

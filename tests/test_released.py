# SPDX-License-Identifier: Apache-2.0
"""What `dpjax.fit` leaves in the folder of a run, for any model, and who can read it."""

import dataclasses
import json
import shutil
import signal
from collections import OrderedDict
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from mutation import kills
from small_mechanisms import mechanism_with

import dpjax
from dpjax import ledger, noise, sampling, verify
from dpjax.reports import load_run
from dpjax.training.released import serialized

DATA = (np.linspace(0, 1, 50).reshape(50, 1), np.linspace(0, 2, 50))


def loss(params, example):
    x, y = example
    return jnp.sum((x @ params["w"] - y) ** 2)


MECHANISM = mechanism_with(sampling=sampling.full(50), steps=8).calibrate(4.0, 1e-3)


def algorithm(budget=None):
    return dpjax.dpsgd(loss, optax.sgd(0.1), MECHANISM, DATA, budget=budget)


def started(algorithm):
    return algorithm.init(noise.secret_key(), {"w": jnp.zeros((1,))})


def left(folder):
    card = json.loads((folder / "privacy.json").read_text())
    return card, dpjax.training.released_params(folder, {"w": jnp.zeros(1)})


@kills(
    "training/fit.py",
    "    run.write_released(terms.delta, terms.method, last=over)\n    return over",
    "    return over",
    slow=True,
)
def test_every_row_leaves_card_statement_and_parameters(tmp_path):
    run, seen = algorithm(), []

    def evaluate(state):
        if seen:  # what the row before has left
            card, params = left(tmp_path)
            assert card["steps"] == seen[-1][0]
            np.testing.assert_array_equal(params["w"], seen[-1][1])
        seen.append((state.ledger.steps, np.array(state.params["w"])))
        return {}

    options = {"evaluate": evaluate, "evaluate_every": 2, "progress": False}
    state, _ = dpjax.fit(run, started(run), directory=tmp_path, **options)
    card, params = left(tmp_path)
    assert card == json.loads(json.dumps(dpjax.reports.card(run.mechanism, ledger=state.ledger)))
    assert card["delta"] == 1e-3, "the delta for which the noise was chosen"
    statement = dpjax.statement(run.mechanism, ledger=state.ledger)
    assert statement in (tmp_path / "statement.txt").read_text()
    np.testing.assert_array_equal(params["w"], state.params["w"])
    assert verify.main([str(tmp_path)]) == 0


@kills("ledger.py", "max(int(ledger.chosen), len(steps))]", "len(steps)]", slow=True)
@kills("training/fit.py", "        run.end()\n", "", slow=True)
@kills(
    "reports/load_run.py",
    'rows[-1].get("counted", rows[-1]["step"])',
    'rows[-1]["step"]',
    slow=True,
)
def test_a_run_that_results_ended_counts_all_planned_steps(tmp_path):
    run = algorithm()
    options = {"evaluate": lambda state: {"stop": True}, "evaluate_every": 2, "progress": False}
    state, _ = dpjax.fit(run, started(run), directory=tmp_path, **options)
    card, _ = left(tmp_path)
    assert state.ledger.steps == 2 < card["steps"] == MECHANISM.steps
    planned = dpjax.reports.card(MECHANISM)["epsilon"]
    assert card["epsilon"] == json.loads(json.dumps(planned))
    words = (tmp_path / "statement.txt").read_text()
    assert f"2 (of {MECHANISM.steps} planned)\n" in words
    assert f"results chose where to stop, so {MECHANISM.steps} that could run count" in words
    assert verify.main([str(tmp_path)]) == 0
    for _ in range(2):  # steps after the stop leave it as it is
        assert load_run.read(tmp_path).foreign == ""
        assert dpjax.training.earlier(tmp_path)[0].steps == MECHANISM.steps
        assert left(tmp_path)[0]["steps"] == MECHANISM.steps
        state, _ = run.step(state)
        state, _ = dpjax.fit(run, state, steps=1, directory=tmp_path, progress=False)
    assert dpjax.ledger.epsilon(state.ledger, MECHANISM) == MECHANISM.epsilon()


@kills(
    "training/runner.py",
    "(allowed := folder.chosen()) or self.state.ledger.chosen",
    "(allowed := folder.chosen())",
    slow=True,
)
@kills(
    "training/runner.py",
    "(allowed := folder.chosen()) or self.state",
    "(allowed := 0) or self.state",
    slow=True,
)
@kills("training/run_folder.py", "max(_marked(folder))", "_marked(folder).furthest", slow=True)
@kills(
    "training/run_folder.py",
    "self._write_mark(*self._mark)",
    "self._write_mark(self._mark.furthest, 0)",
    slow=True,
)
@kills("training/run_folder.py", "max([*counted, *mark[1:]]", "max(counted", slow=True)
@kills("training/run_folder.py", "max([*counted, *mark[1:]]", "max(mark[1:]", slow=True)
def test_a_stop_by_results_is_not_forgotten(tmp_path):
    """Not by another folder, by a lost log or mark, nor by a run that was killed as it stopped."""
    run, (one, two) = algorithm(), (tmp_path / name for name in ("one", "two"))
    options = {"evaluate_every": 2, "progress": False}

    def spent(folder):
        return dpjax.training.earlier(folder)[0].steps

    def stop(state):
        return {"stop": True}

    state, _ = dpjax.fit(run, started(run), evaluate=stop, directory=one, **options)
    _, rows = dpjax.fit(run, state, steps=0, directory=two, **options)
    assert (spent(two), rows) == (MECHANISM.steps, []), "before its first row"
    _, rows = dpjax.fit(run, state, steps=2, directory=two, **options)
    assert rows[-1]["epsilon"] == MECHANISM.epsilon()
    assert left(two)[0]["steps"] == spent(two) == MECHANISM.steps
    assert "4 (of 8 planned)\n" in (two / "statement.txt").read_text()
    assert load_run.read(two).foreign == ""
    mark = (one / "furthest").read_text()
    (one / "furthest").unlink()
    assert spent(one) == MECHANISM.steps, "by its row"
    (one / "furthest").write_text("2 x")
    with pytest.raises(ValueError, match=r"furthest: holds '2 x'; expected the last released"):
        spent(one)
    (one / "furthest").write_text(mark)
    shutil.rmtree(one / "checkpoints" / "2")
    state, rows = dpjax.fit(run, started(run), steps=2, directory=one, **options)
    assert rows[-1]["counted"] == left(one)[0]["steps"] == MECHANISM.steps, "killed as it stopped"
    (one / "metrics.jsonl").unlink()
    assert spent(one) == MECHANISM.steps, "by its mark"

    def dies(state, count):
        raise InterruptedError

    (one / "furthest").unlink()
    with pytest.raises(InterruptedError):
        dpjax.fit(dataclasses.replace(run, run=dies), started(run), directory=one, **options)
    assert spent(one) == MECHANISM.steps, "by its checkpoint"


def test_a_run_that_results_ended_has_no_shorter_plan():
    run = algorithm()
    options = {"evaluate": lambda state: {"stop": True}, "evaluate_every": 2, "progress": False}
    state, _ = dpjax.fit(run, started(run), **options)
    shorter = dataclasses.replace(MECHANISM, steps=4)
    for refused in (
        lambda: dpjax.statement(shorter, ledger=state.ledger),
        lambda: dpjax.dpsgd(loss, optax.sgd(0.1), shorter, DATA).step(state),
    ):
        with pytest.raises(ledger.Refused, match="when 8 steps were allowed, so all of them count"):
            refused()


@kills("ledger.py", "max(int(ledger.chosen), done + steps)", "done + steps", slow=True)
def test_a_budget_admits_no_step_of_a_run_whose_plan_passes_it():
    budget = ledger.Budget(epsilon=3.9, delta=1e-3)
    book = ledger.admit(ledger.empty(), MECHANISM, budget, steps=2)
    ledger.require(book, MECHANISM, 1, budget)
    with pytest.raises(ledger.Refused, match=r"would bring epsilon to 4"):
        ledger.require(ledger.ended(book, MECHANISM), MECHANISM, 1, budget)


@kills(
    "training/runner.py",
    "mechanism, budget, least",
    "mechanism, None, least",
    slow=True,
)
@kills("ledger.py", "return ended(after, mechanism, budget) if", "return after if", slow=True)
def test_a_budget_bounds_what_a_stop_by_results_costs(tmp_path):
    """It was fixed before the results, so no more steps could run than it allows."""
    budget = ledger.Budget(epsilon=2.5, delta=1e-3)
    fits = ledger.affordable(MECHANISM, budget)
    assert 2 < fits < MECHANISM.steps
    run = algorithm(budget)
    options = {"evaluate": lambda state: {"stop": True}, "evaluate_every": 2, "progress": False}
    state, rows = dpjax.fit(run, started(run), steps=fits, directory=tmp_path, **options)
    assert (rows[-1]["counted"], left(tmp_path)[0]["steps"]) == (fits, fits)
    assert rows[-1]["epsilon"] <= budget.epsilon
    assert dpjax.training.earlier(tmp_path)[0].steps == fits
    # Results chose to take one more step, of a larger budget: all that this one allows count.
    state, _ = algorithm().step(state)
    assert ledger.epsilon(state.ledger, MECHANISM, 1e-3) == MECHANISM.epsilon(1e-3)


@kills(
    "training/run_identity.py",
    '("numerics", "small seed", INODE)',
    '("numerics", INODE)',
    slow=True,
)
@kills("training/runner.py", "        folder.begin()\n", "", slow=True)
@kills(
    "training/runner.py", "if trees.seeded(found.state.key) and not", "if False and not", slow=True
)
def test_a_resumed_run_keeps_the_kind_of_its_key(tmp_path, caplog):
    run = algorithm()
    seeded = run.init(jax.random.key(0), {"w": jnp.zeros((1,))})
    options = {"directory": tmp_path, "progress": False}

    def dies(state):
        raise InterruptedError

    for state in (seeded, started(run)):
        with pytest.raises(InterruptedError):
            dpjax.fit(run, state, evaluate=dies, evaluate_every=2, **options)
    assert "keeps that key; the given one is ignored" in caplog.text
    assert dpjax.training.earlier(tmp_path)[0].seeded
    # Without a checkpoint and without a step it takes the key that it is given.
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    facts = json.loads((tmp_path / "run.json").read_text())
    (fresh / "run.json").write_text(json.dumps(facts))
    dpjax.fit(run, started(run), directory=fresh, progress=False)
    assert not dpjax.training.earlier(fresh)[0].seeded


@kills("training/released.py", 'read_json(path / "run.json")', "folder.identity", slow=True)
def test_a_secret_run_that_is_resumed_with_a_seed_is_for_release(tmp_path):
    run = algorithm()

    def dies(state):
        raise InterruptedError

    with pytest.raises(InterruptedError):
        dpjax.fit(
            run, started(run), directory=tmp_path, progress=False, evaluate=dies, evaluate_every=2
        )
    seeded = run.init(jax.random.key(0), {"w": jnp.zeros((1,))})
    dpjax.fit(run, seeded, directory=tmp_path, progress=False)
    assert left(tmp_path)[0]["seed_published"] is None
    assert "not for release" not in (tmp_path / "statement.txt").read_text()


@kills("_files.py", "0o666 if public else 0o600", "0o666", slow=True)
@kills("_files.py", "os.O_WRONLY | os.O_CREAT, 0o600)", "os.O_WRONLY | os.O_CREAT)", slow=True)
def test_files_with_private_numbers_are_their_owners_alone(tmp_path):
    run = algorithm()
    dpjax.fit(run, started(run), directory=tmp_path, progress=False)
    open_to_all = {path.name for path in tmp_path.iterdir() if path.stat().st_mode & 0o077}
    assert open_to_all == {"privacy.json", "statement.txt", "params.msgpack"}


@kills("training/fit.py", "if run.at_row:", "if False:", slow=True)
def test_what_a_full_disk_cost_is_left_by_the_same_call(tmp_path):
    """Or a kill between the row and its files: a page would have no card, or an older one."""
    run, names = algorithm(), ("privacy.json", "statement.txt", "params.msgpack")
    state, seen = started(run), []
    options = {"evaluate_every": 2, "directory": tmp_path, "progress": False}
    options["evaluate"] = lambda state: seen.append(state.ledger.steps) or {}
    for steps in (4, None):  # at a row of the run, and at its end
        dpjax.fit(run, state, steps=steps, **options)
        before = [(tmp_path / name).read_bytes() for name in names]
        for name in names:
            (tmp_path / name).unlink()
        dpjax.fit(run, state, steps=steps, **options)
        assert [(tmp_path / name).read_bytes() for name in names] == before
    assert seen == [2, 4, 6, 8], "no row is evaluated again"


@kills("training/released.py", "int(state.ledger.chosen)) < furthest", "0) < 0", slow=True)
@kills(
    "training/fit.py",
    "if max(run.done, furthest) > terms.end",
    "if run.done > terms.end",
    slow=True,
)
@kills("training/released.py", "int(state.ledger.chosen)) < furthest", "0) < furthest", slow=True)
def test_no_file_states_fewer_steps_than_are_public(tmp_path):
    """A run that was killed after step 8 repeats steps, and is killed again."""

    def life(died=None, *, interrupt=None, stop=None, **options):
        def evaluate(state):
            if state.ledger.steps == died:
                raise InterruptedError
            if state.ledger.steps == interrupt:
                signal.raise_signal(signal.SIGINT)
            return {"stop": state.ledger.steps == stop}

        run = algorithm()
        settings = {"evaluate_every": 2, "save_every": 100, "progress": False, **options}
        return dpjax.fit(run, started(run), directory=tmp_path, evaluate=evaluate, **settings)

    def files():
        names = ("privacy.json", "statement.txt", "params.msgpack")
        return [(tmp_path / name).read_bytes() for name in names]

    with pytest.raises(InterruptedError):
        life(died=8)
    before = files()
    assert left(tmp_path)[0]["steps"] == 6
    with pytest.raises(InterruptedError):  # the checkpoint is of step 0
        life(died=4)
    assert files() == before
    with pytest.raises(KeyboardInterrupt):  # saved at the row of step 4
        life(interrupt=2)
    assert files() == before
    with pytest.raises(ledger.Refused, match="8 steps ran there, and"):
        life(steps=6)
    with pytest.raises(InterruptedError):
        life(died=6)
    assert files() == before
    life(stop=6)  # which counts all that are planned
    assert left(tmp_path)[0]["steps"] == MECHANISM.steps
    assert files() != before


@kills("training/fit.py", "elif terms.begin < run.done == terms.end:", "elif False:", slow=True)
@kills("training/fit.py", "elif terms.begin < run.done ==", "elif run.done ==", slow=True)
@kills("training/runner.py", "self.seen = [] if self.at_row else self.seen", "pass", slow=True)
def test_a_run_that_died_before_its_last_row_is_evaluated_and_counted(tmp_path):
    """Its checkpoint of the last step is there, and no row had been planned at that step."""
    whole, seen = algorithm(), []

    def run(state, count):
        if state.ledger.steps == 6:
            raise InterruptedError
        return whole.run(state, count)

    def evaluate(state):
        seen.append(state.ledger.steps)
        return {}

    state = started(whole)
    options = {"evaluate": evaluate, "directory": tmp_path, "progress": False}
    dying = dataclasses.replace(whole, run=run)
    with pytest.raises(InterruptedError):
        dpjax.fit(dying, state, evaluate_every=4, save_every=6, **options)
    for _ in range(2):  # the user ends it there
        end, rows = dpjax.fit(whole, state, steps=6, evaluate_every=4, **options)
        assert end.ledger.steps == rows[-1]["step"] == left(tmp_path)[0]["steps"] == 6
        assert seen == [row["step"] for row in rows] == [4, 6]
        assert rows[-1]["epsilon"] == ledger.epsilon(end.ledger, MECHANISM)
    _, rows = dpjax.fit(whole, end, steps=0, directory=tmp_path / "on", progress=False)
    assert rows == []
    _, rows = dpjax.fit(whole, state, evaluate_every=4, **options)
    _, others = dpjax.fit(whole, state, evaluate_every=2, progress=False)
    assert rows[-1]["private"]["loss"] == pytest.approx(others[-1]["private"]["loss"])


@kills("training/run_folder.py", "        _remove_parts(self._path)\n", "", slow=True)
def test_a_run_that_is_forgotten_leaves_no_half_a_file(tmp_path):
    run = algorithm()
    half = tmp_path / "metrics.jsonl.0123.part"
    half.write_text("private numbers")
    dpjax.fit(run, started(run), directory=tmp_path, progress=False)
    assert not half.exists(), "of an earlier process, which was killed"
    half.write_text("private numbers")
    dpjax.training.forget(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


class Blocks(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(11)])


class Half(NamedTuple):
    scale: Any


TREES = {
    "array": lambda: jnp.ones(3),
    "bfloat16": lambda: {"layer": {"w": jnp.ones(2, jnp.bfloat16)}},
    "eleven": lambda: (
        jnp.ones(1),
        [jnp.full((2,), float(i)) for i in range(11)],
        Half(jnp.ones(1)),
    ),
    "haiku": lambda: {"mlp/~/linear_0": {"w": jnp.ones(2)}, "mlp": {"~": {"w": jnp.zeros(3)}}},
    "slash": lambda: OrderedDict(a={"b": jnp.ones(2)}, **{"a/b": jnp.zeros(2)}),
    "boxed": lambda: nn.Dense(
        2, kernel_init=nn.with_partitioning(nn.initializers.ones, (None, "model"))
    ).init(jax.random.key(0), jnp.ones(2)),
    "nnx": lambda: nnx.split(Blocks(nnx.Rngs(0)), nnx.Param, ...)[1],
    "equinox": lambda: eqx.partition(
        eqx.nn.MLP(1, 1, 2, depth=11, key=jax.random.key(0)), eqx.is_inexact_array
    )[0],
}


@kills(
    "training/released.py",
    "for name in sorted(places, key=places.__getitem__))",
    "for name in places)",
    case="nnx",
    slow=True,
)
@pytest.mark.parametrize("name", TREES)
def test_parameters_of_any_tree_are_left_and_read_again(name, tmp_path):
    """Leaves without a number of their own come back where they were."""
    leaves, structure = jax.tree.flatten(TREES[name]())
    trained = structure.unflatten(x + i for i, x in enumerate(leaves))
    file = tmp_path / "params.msgpack"
    file.write_bytes(serialized(trained))
    for where, like in [(tmp_path, TREES[name]()), (file, jax.eval_shape(TREES[name]))]:
        found = dpjax.training.released_params(where, like)
        assert jax.tree.structure(found) == structure
        for new, old in zip(jax.tree.leaves(found), jax.tree.leaves(trained), strict=True):
            np.testing.assert_array_equal(new, old)
            assert isinstance(new, jax.Array)
            assert new.dtype == old.dtype


def test_parameters_of_another_model_are_not_read(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "params.msgpack").write_bytes(serialized({"w": jnp.zeros(1)}))
    read = dpjax.training.released_params
    for like, words in [
        ({"w": jnp.zeros(2)}, r"found shape \[1\] at 'w', expected shape \[2\]\. Usually"),
        ({"params": {"w": jnp.zeros(1)}}, r"found no leaf at 'params/w', expected shape \[1\]"),
        ({}, "found shape .* at 'w', expected no leaf"),
    ]:
        with pytest.raises(ValueError, match=rf"^training\.released_params\('.*'\): {words}"):
            read(tmp_path / "run", like)
    with pytest.raises(FileNotFoundError, match=r"found no params\.msgpack; expected the folder"):
        read(tmp_path, {"w": jnp.zeros(1)})


def test_the_log_is_at_the_delta_of_the_budget_or_of_the_target(capsys):
    run = algorithm()
    _, rows = dpjax.fit(run, started(run), progress=False)
    assert rows[-1]["delta"] == 1e-3
    assert rows[-1]["epsilon"] == run.mechanism.epsilon() == pytest.approx(4.0, rel=1e-3)
    run = algorithm(ledger.Budget(epsilon=9.0, delta=1e-4))
    _, rows = dpjax.fit(run, started(run))
    assert rows[-1]["delta"] == 1e-4
    assert "of 9.0" in capsys.readouterr().err
    dpjax.fit(run, started(run), delta=1e-3)
    assert "of 9.0" not in capsys.readouterr().err

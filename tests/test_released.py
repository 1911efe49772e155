# SPDX-License-Identifier: Apache-2.0
"""What `dpjax.fit` leaves in the folder of a run, for any model, and who can read it."""

import dataclasses
import json
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
from dpjax import ledger, sampling, verify
from dpjax.cli.report import load_run
from dpjax.trees import digest, serialized

DATA = (np.linspace(0, 1, 50).reshape(50, 1), np.linspace(0, 2, 50))


def loss(params, example):
    x, y = example
    return jnp.sum((x @ params["w"] - y) ** 2)


MECHANISM = mechanism_with(sampling=sampling.full(50), steps=8).calibrate(4.0, 1e-3)


def algorithm(budget=None):
    return dpjax.dpsgd(loss, optax.sgd(0.1), MECHANISM, DATA, budget=budget)


def started(algorithm):
    return algorithm.init({"w": jnp.zeros((1,))})


def left(folder):
    card = json.loads((folder / "privacy.json").read_text())
    return card, dpjax.training.released_params(folder, {"w": jnp.zeros(1)})


@kills("training/released.py", "    replace(path / _FILE", "    (lambda *_, **__: 0)(path / _FILE")
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
    facts = {"ledger": state.ledger, "parameters": digest(state.params)}
    assert card == json.loads(json.dumps(dpjax.reports.card(run.mechanism, **facts)))
    assert card["delta"] == 1e-3, "the delta for which the noise was chosen"
    statement = dpjax.statement(run.mechanism, ledger=state.ledger)
    assert statement in (tmp_path / "statement.txt").read_text()
    board = dpjax.reports.board(run.mechanism, ledger=state.ledger)
    assert (tmp_path / "board.txt").read_text() == f"{board}\n"
    np.testing.assert_array_equal(params["w"], state.params["w"])
    assert verify.main([str(tmp_path)]) == 0


@kills("ledger.py", "max(int(ledger.chosen), len(steps))]", "len(steps)]", slow=True)
@kills("training/_runner.py", "            self._end()\n", "", slow=True)
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


@kills("training/_runner.py", "least = counted(self.rows)", "least = 0")
@kills("training/run_folder.py", "counted(read_log(folder", "len(read_log(folder")
def test_a_stop_by_results_is_not_forgotten(tmp_path, monkeypatch):
    """Not by another folder, nor by a run that was killed as it stopped."""
    run, (one, two) = algorithm(), (tmp_path / name for name in ("one", "two"))
    options = {"evaluate_every": 2, "progress": False}

    def dies(*_, **__):
        raise InterruptedError

    def spent(folder):
        return dpjax.training.earlier(folder)[0].steps

    stop = lambda state: {"stop": True}  # noqa: E731
    with monkeypatch.context() as patched:
        patched.setattr(dpjax.training._runner, "write_released", dies)
        with pytest.raises(InterruptedError):
            dpjax.fit(run, started(run), evaluate=stop, directory=one, **options)
    state, rows = dpjax.fit(run, started(run), directory=one, **options)
    assert (state.ledger.steps, rows[-1]["stop"]) == (2, 1.0)
    assert rows[-1]["counted"] == left(one)[0]["steps"] == spent(one) == MECHANISM.steps
    assert ledger.epsilon(state.ledger, MECHANISM) == MECHANISM.epsilon()
    _, rows = dpjax.fit(run, state, steps=2, directory=two, **options)
    assert rows[-1]["epsilon"] == MECHANISM.epsilon()
    assert left(two)[0]["steps"] == spent(two) == MECHANISM.steps
    assert "4 (of 8 planned)\n" in (two / "statement.txt").read_text()
    assert load_run.read(two).foreign == ""


def test_a_run_that_results_ended_has_no_shorter_plan():
    run = algorithm()
    options = {"evaluate": lambda state: {"stop": True}, "evaluate_every": 2, "progress": False}
    state, _ = dpjax.fit(run, started(run), **options)
    shorter = dataclasses.replace(MECHANISM, steps=4)
    for refused in (
        lambda: dpjax.statement(shorter, ledger=state.ledger),
        lambda: dpjax.dpsgd(loss, optax.sgd(0.1), shorter, DATA).step(state),
    ):
        with pytest.raises(ledger.Refused, match="so all 8 steps count that were"):
            refused()


@kills("training/_runner.py", "mechanism, budget, least", "mechanism, None, least", slow=True)
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


def test_files_with_private_numbers_are_their_owners_alone(tmp_path):
    run = algorithm()
    dpjax.fit(run, started(run), directory=tmp_path, progress=False)
    open_to_all = {path.name for path in tmp_path.iterdir() if path.stat().st_mode & 0o077}
    assert open_to_all == {"privacy.json", "statement.txt", "board.txt", "params.msgpack"}


class Blocks(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(11)])


class Half(NamedTuple):
    scale: Any


TREES = {
    "bfloat16": lambda: {"layer": {"w": jnp.ones(2, jnp.bfloat16)}},
    "eleven": lambda: (
        jnp.ones(1),
        [jnp.full((2,), float(i)) for i in range(11)],
        Half(jnp.ones(1)),
    ),
    "slash": lambda: OrderedDict(a={"b": jnp.ones(2)}, **{"a/b": jnp.zeros(2)}),
    "boxed": lambda: nn.Dense(
        2, kernel_init=nn.with_partitioning(nn.initializers.ones, (None, "model"))
    ).init(jax.random.key(0), jnp.ones(2)),
    "nnx": lambda: nnx.split(Blocks(nnx.Rngs(0)), nnx.Param, ...)[1],
    "equinox": lambda: eqx.partition(
        eqx.nn.MLP(1, 1, 2, depth=11, key=jax.random.key(0)), eqx.is_inexact_array
    )[0],
}


@pytest.mark.thorough
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
        ({"w": jnp.zeros(2)}, r"found \[1\] at 'w', expected \[2\]\. Give"),
        ({"params": {"w": jnp.zeros(1)}}, r"found no leaf at 'params/w', expected \[1\]"),
    ]:
        with pytest.raises(ValueError, match=rf"^training\.released_params\('.*'\): {words}"):
            read(tmp_path / "run", like)
    (tmp_path / "run" / "params.msgpack").write_bytes(b"<html></html>")
    with pytest.raises(ValueError, match="extra data"):
        read(tmp_path / "run", {"w": jnp.zeros(1)})


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

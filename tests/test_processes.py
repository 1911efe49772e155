# SPDX-License-Identifier: Apache-2.0
"""What the first process tells the others, and what all of them compare."""

import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mutation import kills
from processes_in_threads import in_threads, small_run
from small_mechanisms import mechanism_with

from dpjax import fit, ledger, processes, trees
from dpjax.checks import Refused
from dpjax.mechanism import Spent
from dpjax.training._keys import first_keys
from dpjax.training.run_folder import spending


def require_refused(outcomes, words, count=2):
    assert len(outcomes) == count
    for error in outcomes:
        with pytest.raises(Refused, match=words):
            raise error


@kills("processes.py", "    if first_process():\n        try:", "    if True:\n        try:")
def test_the_first_process_alone_runs_what_all_receive(monkeypatch):
    ran = []

    def make():
        ran.append(jax.process_index())
        return {"rows": ["a" * 300]}

    answers = in_threads(monkeypatch, lambda _: processes.from_first(make))
    assert answers == 2 * [{"rows": ["a" * 300]}]
    assert ran == [0]


@kills("processes.py", "pickle.dumps((False, error))", "pickle.dumps((True, error))", slow=True)
def test_an_error_of_the_first_process_is_raised_in_all(monkeypatch):
    def make():
        raise OSError("the disk is full")

    # In a list, because `in_threads` also returns what was raised.
    answers = in_threads(monkeypatch, lambda _: [processes.from_first(make)])
    assert list(map(repr, answers)) == 2 * ["OSError('the disk is full')"]
    answers = in_threads(monkeypatch, lambda _: processes.from_first(lambda: lambda: 0))
    # Pythons differ in the error of a function that cannot be pickled, and in its words.
    assert all(isinstance(error, AttributeError | pickle.PicklingError) for error in answers)


def test_a_signal_to_one_process_reaches_all(monkeypatch):
    for given in ([False, False], [False, True], [True, True]):
        answers = in_threads(monkeypatch, lambda i, given=given: processes.any_process(given[i]))
        assert answers == 2 * [any(given)]


@kills("processes.py", "if any_process(fault is not None):", "if fault is not None:")
@kills("processes.py", "    if not same.all():", "    if False:")
def test_what_differs_is_refused_by_name_in_all(monkeypatch):
    def work(process):
        facts = {"the data": "a", "the plan": "b" if process == 2 else "c"}
        processes.require_equal("dpsgd", lambda: facts)

    words = "^dpsgd: the 3 processes differ in the plan. Start"
    require_refused(in_threads(monkeypatch, work, count=3), words, count=3)

    def fails(process):
        processes.require_equal("fit", lambda: {"the data": str(1 / process)})

    one, other = in_threads(monkeypatch, fails)
    assert isinstance(one, ZeroDivisionError)
    require_refused([other], "another process failed", count=1)


def test_processes_learn_what_an_earlier_run_spent(monkeypatch, tmp_path):
    mechanism = mechanism_with(50, 10, noise_multiplier=2.0, steps=9)
    (tmp_path / "run.json").write_text(json.dumps(mechanism.identity))
    (tmp_path / "metrics.jsonl").write_text('{"step": 3}')
    answers = in_threads(monkeypatch, lambda _: processes.from_first(lambda: spending(tmp_path)))
    assert [Spent.of_run(**told)[0].runs for told in answers] == 2 * [((2.0, 3),)]


@kills(
    "training/_keys.py", "processes.from_first(lambda: trees.on_host(key))", "trees.on_host(key)"
)
@pytest.mark.parametrize("supplied", [True, False])
def test_all_processes_have_the_keys_of_the_first(monkeypatch, supplied):
    def work(process):
        return [trees.on_host(k) for k in first_keys(jax.random.key(process) if supplied else None)]

    one, other = in_threads(monkeypatch, work)
    np.testing.assert_array_equal(one, other)
    assert np.array_equal(one[0], one[1]) is supplied, "draws and noise of two secret keys"


OTHERS = {
    "the data": {"data": np.ones((50, 3), np.float32)},
    "the mechanism": {"multiplier": 2.0},
    "the budget": {"budget": ledger.Budget(epsilon=9.0, delta=1e-3)},
}


@pytest.mark.parametrize("name", OTHERS)
def test_runs_that_differ_are_told_apart_at_the_start(monkeypatch, name):
    """A process with other rows, another plan or another limit."""
    runs = [small_run()[0], small_run(**OTHERS[name])[0]]
    answers = in_threads(monkeypatch, lambda i: runs[i].init(jnp.zeros(3)))
    require_refused(answers, f"^dpsgd: the 2 processes differ in {name}\\.")


def test_parameters_and_states_that_differ_are_told_apart(monkeypatch):
    algorithm, state = small_run()
    answers = in_threads(monkeypatch, lambda i: algorithm.init(jnp.full(3, float(i))))
    require_refused(answers, "differ in the parameters")
    later, _ = algorithm.step(state)

    def work(process):
        return fit(algorithm, later if process else state, progress=False, steps=0)

    require_refused(in_threads(monkeypatch, work), "^fit: the 2 processes differ in the state")


def test_steps_and_delta_are_those_of_the_first_process(monkeypatch):
    algorithm, state = small_run()

    def work(process):
        options = {"steps": process + 1, "delta": 10.0 ** (-4 - process), "progress": False}
        return fit(algorithm, state, **options)[1][-1]

    one, other = in_threads(monkeypatch, work)
    assert (one["step"], one["delta"]) == (other["step"], other["delta"]) == (1, 1e-4)

# SPDX-License-Identifier: Apache-2.0
"""What several processes of one run agree on, and by which name they refuse the rest."""

import json
import types

import jax
import jax.numpy as jnp
import pytest
from mutation import kills
from processes_in_threads import in_threads, small_run
from small_mechanisms import mechanism_with

import dpjax
from dpjax import ledger, processes, sampling
from dpjax.checks import Refused
from dpjax.cli.train import build
from dpjax.training import environment

KEY = jax.random.key(0)


@kills("processes.py", "if same(name, json.dumps(texts)):", "if True:", slow=True)
@kills("processes.py", "if not same(f", "if same(f", slow=True)
@pytest.mark.parametrize(
    ("differs", "words"),
    [
        ("the root key", r"2 processes differ in the root key; .*drew its own key"),
        ("the mechanism", r"differ in the mechanism; (?!.*drew its own key).*one command"),
        ("directory", r"differ in directory; .*give it to all"),
    ],
)
def test_processes_that_differ_are_refused_by_name(monkeypatch, differs, words):
    """In each of them, with the cure of what differs."""
    facts = {"the root key": "a", "the mechanism": {"b": 1}, "directory": False}

    def work(process):
        processes.require_agreement("dpsgd", lambda: facts | ({differs: 2} if process else {}))

    require_refused(in_threads(monkeypatch, work), words)


def require_refused(found, words, count=2):
    assert len(found) == count
    for error in found:
        with pytest.raises(Refused, match=words):
            raise error


@kills("processes.py", "    if first_process():\n        try:", "    if True:\n        try:")
@kills("processes.py", "bytes(int.from_bytes(answers[0]))", "bytes(7)", slow=True)
def test_the_first_process_alone_runs_what_all_receive(monkeypatch):
    ran = []

    def make():
        ran.append(jax.process_index())
        return {"rows": ["a" * 300]}

    found = in_threads(monkeypatch, lambda _: processes.from_first(make))
    assert found == 2 * [{"rows": ["a" * 300]}]
    assert ran == [0]


class Folder:
    """Says which of its methods ran, with the process that ran it."""

    @processes.in_first
    def read(self, name, *, times=1):
        return times * f"{name} in {jax.process_index()} "

    @processes.in_first
    def write(self, name):
        return name


@kills("processes.py", "        return from_first(call)\n", "        return call()\n", slow=True)
@kills("processes.py", "inspect.unwrap(function), ", "function, ", slow=True)
def test_a_method_runs_in_the_first_process_and_returns_in_all(monkeypatch):
    folder = Folder()
    found = in_threads(monkeypatch, lambda _: folder.read("log", times=2))
    assert found == 2 * ["log in 0 log in 0 "]
    assert folder.read.__name__ == "read"
    different = in_threads(monkeypatch, lambda i: folder.write("log") if i else folder.read("log"))
    line = Folder.read.__wrapped__.__code__.co_firstlineno
    require_refused(
        different[:1], rf"at '.*Folder\.read:{line}', and processes \[1\] are elsewhere", count=1
    )


@kills("processes.py", "pickle.dumps((False, error))", "pickle.dumps((True, error))", slow=True)
@kills(
    "processes.py",
    "        raise value\n",
    "        raise value if first_process() else SystemExit\n",
    slow=True,
)
def test_an_error_of_the_first_process_is_raised_in_all(monkeypatch):
    def make():
        raise OSError("the disk is full")

    # In a list, because `in_threads` also returns what was raised.
    found = in_threads(monkeypatch, lambda _: [processes.from_first(make)])
    assert list(map(repr, found)) == 2 * ["OSError('the disk is full')"]


def test_processes_learn_what_an_earlier_run_spent(monkeypatch, tmp_path):
    mechanism = mechanism_with(50, 10, noise_multiplier=2.0, steps=9)
    (tmp_path / "run.json").write_text(json.dumps(mechanism.identity))
    (tmp_path / "metrics.jsonl").write_text('{"step": 3}')
    given = types.SimpleNamespace(continue_from=str(tmp_path))
    found = in_threads(monkeypatch, lambda _: [build.earlier_runs(given)])
    assert [spent.runs for (each,) in found for spent in each] == 2 * [((2.0, 3),)]


def test_what_cannot_be_sent_is_an_error_in_all(monkeypatch):
    found = in_threads(monkeypatch, lambda _: processes.from_first(lambda: lambda: 0))
    assert len(found) == 2
    assert all("pickle" in str(error).lower() for error in found)


@kills("processes.py", "if each[:32] != asked]", "if False]", slow=True)
@pytest.mark.parametrize(
    "other", [lambda: processes.from_first(lambda: 2), lambda: processes.any_process(False)]
)
def test_processes_at_different_questions_are_refused(monkeypatch, other):
    """Each would take the answer to the other's question for its own."""
    found = in_threads(monkeypatch, lambda i: other() if i else processes.from_first(lambda: 1))
    require_refused(found, "are elsewhere; .*jax.process_index")


@kills("processes.py", "return any(map(any, ", "return all(map(any, ", slow=True)
def test_a_signal_to_one_process_reaches_all(monkeypatch):
    for given in ([False, False], [False, True], [True, True]):
        found = in_threads(monkeypatch, lambda i, given=given: processes.any_process(given[i]))
        assert found == 2 * [any(given)]


@pytest.mark.sample(3)
@kills(
    "training/assembly.py",
    "processes.require_agreement(name, lambda: _facts_of_dispatch(state, count) | plan())",
    "pass",
    slow=True,
)
@kills("training/assembly.py", "        **environment.numerics(),\n", "", case="setting", slow=True)
@kills("training/assembly.py", '"the number of steps": count,', "", case="count", slow=True)
@kills(
    "training/assembly.py",
    '"the ledger": trees.fingerprint(state.ledger),',
    "",
    case="ledger",
    slow=True,
)
@pytest.mark.parametrize(
    ("differs", "words"),
    [
        pytest.param(
            "setting",
            "differ in jax_threefry_partitionable;",
            id="setting",
            marks=pytest.mark.slow,
        ),
        pytest.param("key", "differ in the root key;", id="key"),
        pytest.param("step", "differ in the step;", id="step"),
        pytest.param("ledger", "differ in the ledger;", id="ledger"),
        pytest.param("count", "differ in the number of steps;", id="count"),
    ],
)
def test_processes_agree_on_key_step_and_settings_before_each_dispatch(monkeypatch, differs, words):
    """Also on a later one: a process that went back would add the draw of another step."""
    other = {
        "key": {"key": jax.random.key(1)},
        "step": {"step": jnp.int32(0)},
        "ledger": {"ledger": ledger.empty()},
    }

    def work(process):
        algorithm, state = small_run()
        state, _ = algorithm.run(state, 1)
        if not process:
            return algorithm.run(state, 1)
        setting = jax.threefry_partitionable(differs != "setting")
        with setting:
            state = state._replace(**other.get(differs, {}))
            return algorithm.run(state, 1 + (differs == "count"))

    require_refused(in_threads(monkeypatch, work), words)


@pytest.mark.sample(2)
@kills(
    "training/assembly.py",
    "_facts_of_dispatch(state, count) | plan()",
    "_facts_of_dispatch(state, count)",
    case="run-budget",
    slow=True,
)
@kills(
    "training/fit.py",
    "            **ledger.terms(terms.mechanism, algorithm.budget),\n",
    "",
    case="fit-budget",
    slow=True,
)
@kills("ledger.py", '"the mechanism": _plan(mechanism), ', "", case="fit-noise", slow=True)
@kills("ledger.py", "mechanism.accounted.encode() + ", "", case="run-rate", slow=True)
@pytest.mark.parametrize("differs", ["budget", "steps", "noise", "rate"])
@pytest.mark.parametrize("call", ["run", "fit"])
def test_processes_agree_on_plan_and_budget_before_one_alone_could_refuse(
    monkeypatch, call, differs
):
    """The ledger of one process would refuse these steps, and the other would wait for it."""
    other = {
        "budget": {"budget": ledger.Budget(epsilon=0.1, delta=1e-5)},
        "steps": {"steps": 2},
        "noise": {"multiplier": 0.5},
        "rate": {"batch": 40},
    }

    def work(process):
        budget = {"budget": ledger.Budget(epsilon=12.0, delta=1e-5)}
        algorithm, state = small_run(**budget | (other[differs] if process else {}))
        if call == "fit":
            return dpjax.fit(algorithm, state, steps=3, progress=False)
        return algorithm.run(state, 3)

    word = "budget" if differs == "budget" else "mechanism"
    require_refused(in_threads(monkeypatch, work), f"differ in the {word};")


@kills(
    "training/assembly.py",
    "processes.require_agreement(name, lambda: self._facts_of_run(state))",
    "pass",
    slow=True,
)
@kills("training/assembly.py", '"the draw and the noise": drawn,', "", case="draw", slow=True)
@kills(
    "training/assembly.py",
    '"the optimizer\'s state": trees.fingerprint(state.optimizer),',
    "",
    case="rate",
    slow=True,
)
@kills(
    "training/assembly.py",
    '"the scale of the bounds": trees.fingerprint(state.bound_scale),',
    "",
    case="bound_scale",
    slow=True,
)
@kills(
    "training/assembly.py",
    '"the memory of the noise": trees.fingerprint(state.memory),',
    "",
    case="memory",
    slow=True,
)
@pytest.mark.parametrize(
    ("differs", "words"),
    [
        pytest.param("draw", "differ in the draw and the noise;", id="draw"),
        pytest.param("rate", "differ in the optimizer's state;", id="rate"),
        pytest.param("params", "differ in the parameters;", id="params"),
        pytest.param("bound_scale", "differ in the scale of the bounds;", id="bound_scale"),
        pytest.param("memory", "differ in the memory of the noise", id="memory"),
        pytest.param("engine", "differ in engine;", id="engine"),
    ],
)
def test_processes_agree_on_every_field_of_the_state_once_a_run(monkeypatch, differs, words):
    other = {
        "params": lambda state: {"params": state.params + 1},
        "bound_scale": lambda state: {"bound_scale": state.bound_scale + 1},
        "memory": lambda state: {"memory": state.params},
    }
    if differs == "draw":
        monkeypatch.setattr(environment, "draw_and_noise", lambda *_: jax.process_index())

    def work(process):
        rate = 0.3 if process and differs == "rate" else 0.1
        engine = "vmap" if process and differs == "engine" else "auto"
        algorithm, state = small_run(rate, engine=engine)
        if process and differs in other:
            state = state._replace(**other[differs](state))
        algorithm.run(state, 1)

    require_refused(in_threads(monkeypatch, work), words)


@kills(
    "training/environment.py",
    "(sampling.draw(root, jnp.int32(step)), numbers)",
    "numbers",
    slow=True,
)
@kills("training/environment.py", "jnp.int32(step)), numbers)", "jnp.int32(step)),)", slow=True)
def test_the_hash_of_draw_and_noise_follows_from_key_step_and_settings():
    """A setting that changes random numbers changes it, whether or not dpjax knows its name."""
    draw = environment.draw_and_noise
    found = [draw(sampling.poisson(50, 10), KEY, 0), draw(sampling.poisson(50, 40), KEY, 0)]
    assert found[0] == draw(sampling.poisson(50, 10), KEY, 0)
    found += [draw(sampling.full(50), KEY, step) for step in (0, 1)]
    with jax.threefry_partitionable(False):
        found.append(draw(sampling.poisson(50, 10), KEY, 0))
    assert len(set(found)) == 5


@kills(
    "training/assembly.py",
    'if processes.any_process("agreed" not in happened):',
    'if "agreed" not in happened:',
    slow=True,
)
def test_a_process_that_begins_again_alone_leaves_no_other_waiting(monkeypatch):
    def work(process):
        algorithm, state = small_run()
        state, _ = algorithm.run(state, 1)
        if process:
            algorithm.init(KEY, jnp.zeros(3))
        return algorithm.run(state, 1)[0].ledger.steps

    assert in_threads(monkeypatch, work) == [2, 2]


@kills("training/fit.py", '"steps": terms.end,', "", case="steps", slow=True)
@kills("training/fit.py", '"directory": terms.directory is None,', "", case="directory", slow=True)
@kills("training/fit.py", '"evaluate_every": terms.evaluate_every,', "", case="every", slow=True)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param({"steps": 2}, "fit: .* differ in steps;", id="steps"),
        pytest.param({"steps": 99}, "fit: .* differ in steps;", id="too many steps"),
        pytest.param({"evaluate_every": 2}, "differ in evaluate_every;", id="every"),
        pytest.param({"save_every": 2}, "differ in save_every;", id="save"),
        pytest.param({"delta": 1e-6}, "differ in delta;", id="delta"),
        pytest.param({"method": "pld"}, "differ in method;", id="method"),
        pytest.param({"directory": True}, "differ in directory; .*give it to all", id="directory"),
    ],
)
def test_arguments_of_fit_that_differ_are_refused_in_all_processes(
    monkeypatch, tmp_path, options, words
):
    options = options | ({"directory": tmp_path / "run"} if "directory" in options else {})

    def work(process):
        algorithm, state = small_run()
        return dpjax.fit(algorithm, state, progress=False, **({} if process else options))

    require_refused(in_threads(monkeypatch, work), words)
    assert not (tmp_path / "run").exists()

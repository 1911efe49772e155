# SPDX-License-Identifier: Apache-2.0
"""`fit`: the planned steps, its log and progress, and the ways in which a run ends."""

import io
import json
import shutil
import signal
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mutation import kills
from small_mechanisms import mechanism_with
from training_runs import DATA, algorithm_with, fit, make, start

from dpjax import ledger, reports, trees
from dpjax.training._progress import Progress


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
    _, history = fit(
        make(), evaluate=lambda state: {"accuracy": jnp.float32(0.5)}, directory=tmp_path
    )
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == history
    assert rows[-1]["accuracy"] == 0.5
    assert set(rows[-1]["private"]) == {"loss", "examples", "dropped", "norm", "clipped"}
    assert "loss" not in rows[-1]


def on_the_board(folder):
    """(name, step) -> number, as TensorBoard would find them."""
    from tensorboardX.proto.event_pb2 import Event

    (path,) = (folder / "tensorboard").iterdir()
    content = path.read_bytes()
    seen = {}
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
    return mock.Mock(side_effect=lambda state: {"half": 0.5, "stop": state.ledger.steps >= step})


@kills("training/_runner.py", "            row |= self._cost()\n", "", slow=True)
@pytest.mark.thorough
def test_an_evaluation_stops_the_run_and_the_ledger_has_what_ran(tmp_path, capsys):
    options = {"evaluate": until(8), "evaluate_every": 2, "directory": tmp_path}
    shown = []
    algorithm = make()
    state, rows = fit(
        algorithm, progress=lambda rows: shown.append([row["step"] for row in rows]), **options
    )
    assert shown == [[2], [2, 4], [2, 4, 6], [2, 4, 6, 8]]
    assert "step" not in capsys.readouterr().err
    assert (state.ledger.steps, options["evaluate"].call_count) == (8, 4)
    assert [(row["step"], row["stop"]) for row in rows] == [(2, 0), (4, 0), (6, 0), (8, 1)]
    card = json.loads((tmp_path / "privacy.json").read_text())
    digest = trees.digest(state.params)
    full = reports.card(algorithm.mechanism, 1e-5, ledger=state.ledger, parameters=digest)
    assert card == json.loads(json.dumps(full)), "the card of a last row has all methods"
    assert card["steps"] == algorithm.mechanism.steps
    assert rows[-1]["epsilon"] == card["epsilon"]["rdp"]["value"], "the row says no less"
    assert rows[-1]["counted"] == algorithm.mechanism.steps
    assert rows[-2]["epsilon"] == algorithm.mechanism.epsilon_of(np.ones(6), 1e-5)
    again, same = fit(algorithm, **options)
    np.testing.assert_array_equal(again.params, state.params)
    assert same == rows
    assert options["evaluate"].call_count == 4, "a run that was stopped is over"


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
    fit(algorithm, progress=True, directory=tmp_path)
    assert "resumes at step 2 of 3." in capsys.readouterr().err
    fit(algorithm, progress=True, directory=tmp_path)
    assert "has ended, at step 3 of 3" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "metrics.jsonl").unlink()  # as if killed before the first checkpoint
    fit(algorithm, progress=True, directory=tmp_path)
    assert "has no checkpoint and starts again" in capsys.readouterr().err


@kills("training/fit.py", "if processes.any_process(stop.asked):", "if interrupted:", slow=True)
def test_a_signal_in_the_last_evaluation_ends_the_process():
    def interrupt(state):
        signal.raise_signal(signal.SIGINT)
        return {"stop": True}

    with pytest.raises(KeyboardInterrupt, match="stopped at step 2 of 3, not saved"):
        fit(make(steps=3), evaluate=interrupt, evaluate_every=2)


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


def test_progress_is_shown_and_can_be_silenced(capsys):
    algorithm = make()
    fit(algorithm, progress=True, evaluate=lambda state: {"accuracy": 0.5})
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

# SPDX-License-Identifier: Apache-2.0
"""The loop around any `Algorithm`: steps, checkpoints, evaluation, a log, released files.

The ledger checks that all steps fit before the first runs, so the budget never cuts a run short.
`fit` writes two kinds of numbers and keeps them apart: released ones (parameters, and what follows
from them and public data) and, under ``"private"``, those computed from private data without noise.

With a folder, a step is saved before it is released: first its checkpoint, then `evaluate`, the
row of the log, card and parameters, and the progress. A killed run resumes at its last checkpoint,
so no released step ever runs again, whatever changed in between.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from absl import logging

from dpjax import accounting, checks, ledger, processes, trees
from dpjax._files import FIELDS
from dpjax.training.checks import check_state
from dpjax.training.keys import renewed
from dpjax.training.progress import Progress
from dpjax.training.run_folder import Folder, identity_of
from dpjax.training.runner import Run, numbers
from dpjax.training.signals import Stop
from dpjax.types import Algorithm, Plan

Evaluate = Callable[[Any], Mapping[str, Any]]
Show = Callable[[Sequence[Mapping[str, Any]]], object]

_SAVE = 300.0  # seconds between checkpoints


def fit(
    algorithm: Algorithm,
    state: Any,
    *,
    steps: int | None = None,
    evaluate: Evaluate | None = None,
    evaluate_every: int | None = None,
    delta: float | None = None,
    method: str | None = None,
    directory: str | os.PathLike[str] | None = None,
    configuration: Mapping[str, Any] | None = None,
    save_every: int | None = None,
    progress: bool | Show = True,
) -> tuple[Any, list[dict[str, Any]]]:
    """Runs an algorithm, and resumes an interrupted run.

    Args:
      algorithm: For example from `dpjax.dpsgd`.
      state: From ``algorithm.init``, or from an earlier `fit`; `fit` copies it.
      steps: How many more steps; by default all that are planned.
      evaluate: ``state -> {name: number}``, for example the accuracy on test data; an array is
        logged as a list. Numbers that depend on private data go under ``{"private": {name:
        number}}``. The state is a copy, which you may keep. With ``"stop": True`` among the
        numbers the run ends after this row. After a kill it may see the same parameters twice.
      evaluate_every: Steps between evaluations; by default a twentieth of the run. With a folder
        each waits for a checkpoint.
      delta: The delta at which epsilon is shown; by default that of the budget, or of
        ``mechanism.target``, or 1e-5.
      method: The `dpjax.accounting` method that computes epsilon; by default that of the budget,
        or of ``mechanism.target``, or "rdp".
      directory: The folder of this run alone. Each row leaves ``privacy.json`` (the card),
        ``statement.txt`` and ``params.msgpack`` (`released_params` reads it), which may be
        released, and ``metrics.jsonl``, ``run.json`` (the identity of the run), ``checkpoints``
        and, if that extra is installed, TensorBoard's events in ``tensorboard``, which their owner
        alone can read.
      configuration: What else identifies the run (flags, a name, ...), in JSON types. The folder
        refuses another one.
      save_every: Steps between checkpoints that have no row; by default about five minutes.
      progress: Whether to show a live line; or a function that gets the rows of the log after each
        evaluation instead, as `dpjax.reports.live_plot` makes one.

    Returns:
      The last state, and the rows of the log. ``row["private"]`` was computed from private
      data without noise: look at it, do not publish it. Unless the caller supplied the key, the
      state holds a noise key that made no noise.

    Raises:
      dpjax.ledger.Refused: Before the first step: not all steps fit, another process holds the
        folder, or the folder holds another run.
      OSError: A checkpoint, a row or a file cannot be written; the step is not released.

    | the folder | what happens |
    |---|---|
    | is empty | the run begins |
    | holds this run, stopped or killed | resumes at the last checkpoint |
    | ... with another loss, optimizer, rate, version or device | resumes with these |
    | holds a run of another mechanism, row shape or configuration | refused |
    | ... of rows in another order, where steps share an order | refused |
    | holds a run whose key was supplied | resumes if the key is given again; else refused |
    | holds this run, finished or stopped by `evaluate` | returns its last state and rows |
    | holds this run, further than ``steps`` | refused |
    | holds released steps whose checkpoint is damaged or gone | refused |

    On SIGTERM and Ctrl-C the current step ends and is saved before the process ends (with
    ``SystemExit(143)`` and ``KeyboardInterrupt``).

    Privacy:
      Each call draws its noise from a new key, unless the caller supplied one. So two calls with
      one state, or a folder and its copy, are two runs: each card counts its own steps, and the
      costs add up. A supplied key is in no file, and a run that is resumed with it ends with the
      same bits on a CPU.

      Card and statement count the steps that ran, so a run that stops early costs less if the time
      to stop was fixed without its results. If `evaluate` chose it (``"stop": True``) by what was
      released, such as the parameters and their accuracy on data that no step draws, the epsilon of
      all planned steps holds: the ledger of the state, and so row, card, statement and
      `dpjax.training.earlier`, count them all, also after further steps. A choice by the training
      data themselves, such as their loss or ``info``, is a release without noise, which no epsilon
      covers.

    Example:
      Stops when the accuracy has not improved in five evaluations. A resumed run begins with an
      empty list: keep what must last in a file.

      >>> import dpjax, jax.numpy as jnp, optax
      >>> mechanism = dpjax.Mechanism(
      ...     sampling=dpjax.sampling.full(examples=3),
      ...     clipping=dpjax.clipping.flat(bound=1.0),
      ...     noise_multiplier=1.0,
      ...     steps=100,
      ... )
      >>> loss = lambda params, x: (params["w"] - x) ** 2
      >>> algorithm = dpjax.dpsgd(loss, optax.sgd(0.1), mechanism, jnp.arange(3.0))
      >>> seen = []
      >>> def evaluate(state):
      ...     accuracy = 0.5  # of the model with state.params, on held-out data
      ...     seen.append(accuracy)
      ...     return {"accuracy": accuracy, "stop": max(seen[-5:]) <= max(seen[:-5], default=0)}
      >>> state = algorithm.init({"w": jnp.zeros(())})
      >>> state, rows = fit(algorithm, state, evaluate=evaluate, evaluate_every=2, progress=False)
      >>> state.ledger.steps
      12
    """
    terms = _checked(algorithm, state, steps, evaluate_every, save_every, delta, method)
    # First, since what follows would be refused in one process alone, and the others would wait.
    processes.require_equal("fit", lambda: {"the state": _told(state)})
    ledger.require(state.ledger, terms.mechanism, terms.end - terms.begin, algorithm.budget)
    most = _most(algorithm, terms)
    directory = processes.from_first(lambda: directory and os.fspath(directory))

    with contextlib.ExitStack() as stack:
        folder = None
        if directory is not None:
            folder = Folder(directory, identity_of(algorithm, state, configuration or {}))
            stack.callback(folder.close)
        # Signals are caught after the folder is locked, and restored before the lock is released.
        run = Run(algorithm, terms.mechanism, state, folder)
        stop = stack.enter_context(Stop())
        stack.callback(run.close)
        if run.done > terms.end:
            raise ledger.Refused(
                f"fit(directory={directory!r}): {run.done} steps ran there, and this call asks for "
                f"steps up to {terms.end}. Call fit once for all steps, or give each part a folder."
            )
        first = processes.first_process()
        shown = first and bool(progress) and not callable(progress)
        show = Progress(run.done, terms.end, most, unit=terms.mechanism.unit, enabled=shown)
        stack.callback(show.close)
        if run.done > terms.begin:
            logging.info("fit: the given state is ignored; %s is at step %d.", directory, run.done)
            if run.done < terms.end:
                show.say(f"The run in {directory} resumes at step {run.done:,} of {terms.end:,}.")
        _loop(run, terms, stop, show, evaluate, progress if callable(progress) and first else None)
        return renewed(run.state, terms.mechanism), run.rows


class _Terms(NamedTuple):
    """What a call of `fit` runs and logs, checked."""

    mechanism: Plan
    begin: int
    """The step of the given state."""
    end: int
    evaluate_every: int | None
    save_every: int | None
    delta: float
    method: str

    @property
    def row_every(self) -> int:
        """Steps between rows of the log."""
        # Twenty rows draw a curve; the last `or` is for a call without steps.
        return self.evaluate_every or -(-(self.end - self.begin) // 20) or 1

    def has_row(self, done: int) -> bool:
        """Whether the log has a row of this step."""
        return done == self.end or (done - self.begin) % self.row_every == 0

    def steps_from(self, done: int) -> int:
        """Steps until the next row or checkpoint, or until the end."""
        to_row = self.row_every - (done - self.begin) % self.row_every
        to_save = to_row if self.save_every is None else self.save_every - done % self.save_every
        return min(self.end - done, to_row, to_save)


def _checked(
    algorithm: Algorithm,
    state: Any,
    steps: int | None,
    evaluate_every: int | None,
    save_every: int | None,
    delta: float | None,
    method: str | None,
) -> _Terms:
    """The checked arguments of `fit`, which are equal in all processes, and their defaults."""
    hint = "dpjax.dpsgd makes one. Usually arguments were swapped: fit(algorithm, state)."
    checks.instance("fit", "algorithm", algorithm, Algorithm, hint)
    check_state("fit", state)
    mechanism = algorithm.mechanism
    if mechanism is None:
        raise ValueError(
            "fit: this algorithm has no mechanism, so the cost of a step is unknown. Build it as "
            "Algorithm(init, step, mechanism)."
        )
    hint = "For epochs: round(epochs * examples / batch_size)."
    steps = checks.whole_or_none("fit", "steps", steps, hint, least=0)
    evaluate_every = checks.whole_or_none("fit", "evaluate_every", evaluate_every, hint)
    save_every = checks.whole_or_none("fit", "save_every", save_every, hint)
    # A budget without a target for the noise, or a target without a budget, is the usual case.
    chosen = algorithm.budget or mechanism.target
    delta = float((chosen.delta if chosen else 1e-5) if delta is None else delta)
    stated = mechanism.stated(delta, method or (chosen.method if chosen else None))
    begin = state.ledger.steps
    # `steps` counts from the given state, so a restarted script asks for the same end.
    end = mechanism.steps if steps is None else begin + steps
    agreed = processes.from_first(lambda: (begin, end, evaluate_every, save_every, *stated))
    return _Terms(mechanism, *agreed)


def _told(state: Any) -> str:
    """A hash of what the states of all processes have in common. Keys are told, not compared."""
    names = ("params", "optimizer", "bound_scale", "step", "ledger", "memory")
    return trees.fingerprint([getattr(state, name, ()) for name in names])


def _most(algorithm: Algorithm, terms: _Terms) -> float:
    """The largest epsilon that the progress shows: that of the budget, or of the plan."""
    mechanism, budget, shown = terms.mechanism, algorithm.budget, (terms.delta, terms.method)
    # An accountant without an answer raises here, before the first step runs.
    planned = mechanism.epsilon_of(mechanism.multipliers[: terms.end], *shown)
    # Epsilons at two deltas, or by two methods, are not shown as one.
    same = budget and mechanism.stated(budget.delta, budget.method) == shown
    return budget.epsilon if same else planned


def _loop(
    run: Run,
    terms: _Terms,
    stop: Stop,
    show: Progress,
    evaluate: Evaluate | None,
    follow: Show | None,
) -> None:
    """Runs the steps: each row is saved, and then released."""
    over, interrupted = run.stopped or run.done == terms.end, False
    if run.at_row:  # a kill may have come between the row of this step and its files
        run.write_released(terms.delta, terms.method, last=over)
    elif terms.begin < run.done and terms.has_row(run.done):  # or between checkpoint and row
        over = _release(run, terms, show, evaluate, follow)
    while not over and not interrupted:
        show.begin()
        run.advance(terms.steps_from(run.done))
        show.tick(run.done)
        # A signal to one process stops all of them at the same step.
        interrupted = processes.any_process(stop.asked)
        row = terms.has_row(run.done)
        if run.folder is not None and (row or interrupted or _save_is_due(run, terms)):
            run.save()
        if row:
            over = _release(run, terms, show, evaluate, follow)
    # Asked again: a signal may have come while the last row was evaluated.
    if processes.any_process(stop.asked):
        saved = "not saved, for want of a directory."
        if run.folder is not None:
            saved = f"saved in {run.folder.path}. The same command resumes the run."
        stop.end_process(f"stopped at step {run.done:,} of {terms.end:,}, {saved}")


def _save_is_due(run: Run, terms: _Terms) -> bool:
    if terms.save_every is not None:
        return run.done % terms.save_every == 0
    return processes.from_first(lambda: time.monotonic() - run.saved > _SAVE)


def _release(
    run: Run, terms: _Terms, show: Progress, evaluate: Evaluate | None, follow: Show | None
) -> bool:
    """Releases the last step, whose checkpoint is on disk; returns whether the run ends here."""
    row = _row(run, terms, show.take_rate())
    if evaluate is not None:
        # A number by a name that only some rows have would be read as that of `fit` too.
        taken = {*row, *FIELDS, _speed(terms)} - {"stop", "private"}
        row |= _evaluated(evaluate(run.shown()), taken)
    # Processes may measure different numbers, and all of them stop at one step.
    chosen = processes.from_first(lambda: bool(row.get("stop")))
    if chosen:
        run.end()
        row |= _cost(run.state.ledger, terms)
    over = chosen or run.done == terms.end
    full = run.add(row)
    run.write_released(terms.delta, terms.method, last=over)
    # What a user saw is in the log.
    if run.board is not None:
        run.board.write(full)
    show.line(run.done, full)
    if follow is not None:
        follow(run.rows)
    return over


def _row(run: Run, terms: _Terms, speed: float) -> dict[str, Any]:
    """What the log says of a step before it is evaluated; ``speed`` is in steps per second."""
    spent = run.state.ledger
    row: dict[str, Any] = {
        "step": spent.steps,
        **_cost(spent, terms),
        "delta": terms.delta,
        "method": terms.method,
        **({} if accounting.METHODS[terms.method].proven else {"estimate": True}),
        **numbers(run.algorithm.released(run.state)),
    }
    return {**row, _speed(terms): speed * terms.mechanism.batch_size} if speed else row


def _speed(terms: _Terms) -> str:
    return f"{terms.mechanism.unit}s_per_second"


def _cost(spent: ledger.Ledger, terms: _Terms) -> dict[str, Any]:
    """Epsilon, and of how many steps it is where these are not the steps that ran."""
    mechanism = terms.mechanism
    counted = {"counted": len(ledger.counted(spent, mechanism))} if spent.chosen else {}
    return {"epsilon": ledger.epsilon(spent, mechanism, terms.delta, terms.method), **counted}


def _evaluated(answer: Mapping[str, Any], taken: set[str]) -> dict[str, Any]:
    """The numbers of an evaluation, without the names of the log that are taken."""
    if clash := sorted(taken & answer.keys()):
        raise ValueError(f"fit(evaluate=...): {', '.join(clash)} are names of the log itself.")
    # An array of several truth values raises here, and would be true as a list.
    stop = {"stop": bool(answer["stop"])} if "stop" in answer else {}
    return {**numbers(answer), **stop}

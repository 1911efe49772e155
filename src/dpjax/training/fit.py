# SPDX-License-Identifier: Apache-2.0
"""The loop around any `Algorithm`: steps, checkpoints, evaluation, a log, released files.

With a folder, a step is saved before it is released: first its checkpoint, then `evaluate`, the
row of the log, card and parameters, and the progress. So no released step ever runs again.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping
from typing import Any

from dpjax import checks, ledger, processes, trees
from dpjax.training._keys import renewed, supplied
from dpjax.training._progress import Follow, Progress
from dpjax.training._runner import Evaluate, Run, Terms
from dpjax.training._signals import Stop
from dpjax.training.checks import check_state
from dpjax.training.run_folder import Folder
from dpjax.types import Algorithm, HeldOut


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
    progress: bool | Follow = True,
    held_out: HeldOut | None = None,
    settings: str | None = None,
) -> tuple[Any, list[dict[str, Any]]]:
    """Runs an algorithm, and resumes an interrupted run.

    Args:
      algorithm: For example from `dpjax.dpsgd`.
      state: From ``algorithm.init``, or from an earlier `fit`; `fit` copies it.
      steps: How many more steps; by default all that are planned.
      evaluate: ``state -> {name: number}``, for example the accuracy on test data; an array is
        logged as a list. Numbers that depend on private data go under ``"private"``, which is a
        mapping too. The state is a copy, which you may keep. With ``"stop": True`` among the
        numbers the run ends after this row. After a kill it may see the same parameters twice.
      evaluate_every: Steps between evaluations; by default a twentieth of the run. With a folder
        each waits for a checkpoint.
      delta: The delta at which epsilon is shown; by default that of the budget, or of
        ``mechanism.target``, or 1e-5.
      method: The `dpjax.accounting` method; by default of the budget or the target, or
        `dpjax.accounting.default_method`.
      directory: A folder for only this run. Each row leaves ``privacy.json`` (the card),
        ``statement.txt``, ``board.txt`` and ``params.msgpack`` (`released_params` reads it), which
        may be released, and ``metrics.jsonl``, ``run.json`` (the identity of the run),
        ``checkpoints`` and, if that extra is installed, TensorBoard's events in ``tensorboard``,
        which only their owner can read.
      configuration: Further facts that identify the run (flags, a name, ...), in JSON types.
      save_every: Steps between checkpoints that have no row; by default about five minutes.
      progress: Whether to show a live line; or a function that gets the rows of the log after each
        evaluation instead, as `dpjax.cli.report.live_plot` makes one.
      held_out: The units that were held out for ``evaluate``, as `dpjax.data.Dataset.held_out` has
        them. No epsilon covers them, so the statements in the folder name them.
      settings: How settings were chosen, in a sentence such as `dpjax.planning.NO_SETTING`; the
        statements in the folder have it.

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
    | holds this run, stopped or killed | resumes at the last checkpoint |
    | ... with another loss, optimizer, rate, version or device | resumes with these |
    | holds a run of another mechanism, row shape or configuration | refused |
    | ... on rows that changed, if steps do not draw independently | refused |
    | holds a run whose key was supplied | resumes if the key is given again; else refused |
    | holds this run, finished or stopped by `evaluate` | returns its last state and rows |
    | holds this run, further than ``steps`` | refused |
    | holds released steps whose checkpoint is damaged or gone | refused |

    On SIGTERM and Ctrl-C the current step ends and is saved before the process ends (with
    ``SystemExit(143)`` and ``KeyboardInterrupt``).

    Privacy:
      Each call draws its noise from a new key, unless the caller supplied one. So two calls with
      one state, or a folder and its copy, are two runs: each card counts its own steps, and the
      costs add up. `dpjax.sampling.random_allocation` puts the examples of an epoch into bins, and
      the bins follow from the new key only from the next epoch on. So the costs of two copies that
      part within an epoch do not add up: they share the rest of its bins, and with
      `dpjax.sampling.balls_in_bins` all later bins. No file holds a supplied key, and a run that
      resumes with it ends with the same bits on a CPU.

      Card and statement count the steps that ran, so a run that stops early costs less if the time
      to stop was fixed without its results. If `evaluate` chose it (``"stop": True``) by what was
      released, such as the accuracy on data that no step draws, ledger, row, card, statement and
      `dpjax.training.earlier` count all planned steps, also after further steps. A choice by the
      training data themselves, such as their loss or ``info``, is a release without noise, which
      no epsilon covers.

    Example:
      Stops when the accuracy has not improved in five evaluations. The list of a resumed run is
      empty at first: keep numbers that must last in a file.

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
    terms = terms._replace(held_out=held_out, settings=settings)
    # Processes compare their states first. Otherwise one of them may raise an error below while the
    # others wait for it. Keys are left out, because `init` and `renewed` give all processes the
    # same ones.
    without_keys = state._replace(key=None, noise_key=None, epoch_key=None)
    processes.require_equal("fit", lambda: {"the state": trees.fingerprint(without_keys)})
    ledger.require(state.ledger, terms.mechanism, terms.end - terms.begin, algorithm.budget)
    largest_epsilon = _largest_epsilon(algorithm, terms)
    # Processes may have been started with different folders, and only the first one writes.
    directory = processes.from_first(lambda: directory and os.fspath(directory))

    with contextlib.ExitStack() as stack:
        folder = None
        if directory is not None:
            randomness = "supplied" if supplied(state) else "fresh"
            # The facts that decide the cost come last, so no configuration replaces them.
            identity = {
                **(configuration or {}),
                **algorithm.identity(state),
                "randomness": randomness,
            }
            folder = Folder(directory, identity)
            stack.callback(folder.close)
        run = Run(algorithm, terms, state, folder)
        # `Stop` catches signals while the folder is locked: the stack unlocks it last.
        stop = stack.enter_context(Stop())
        stack.callback(run.close)
        if run.done > terms.end:
            raise ledger.Refused(
                f"fit(directory={directory!r}): {run.done} steps ran there, and this call asks for "
                f"steps up to {terms.end}. Call fit once for all steps, or give each part a folder."
            )
        show = Progress(
            run.done, terms.end, largest_epsilon, unit=terms.mechanism.unit, show=progress
        )
        stack.callback(show.close)
        if folder is not None and folder.is_resumed:
            show.say(_resumed(folder, run))
        _loop(run, stop, show, evaluate)
        return renewed(run.state, terms.mechanism), run.rows


def _checked(
    algorithm: Algorithm,
    state: Any,
    steps: int | None,
    evaluate_every: int | None,
    save_every: int | None,
    delta: float | None,
    method: str | None,
) -> Terms:
    """Checks the arguments of `fit`, and fills in the default of each that is None."""
    hint = "Write fit(algorithm, state) with that of dpjax.dpsgd."
    checks.instance("fit", "algorithm", algorithm, Algorithm, hint)
    check_state("fit", state)
    mechanism: Any = algorithm.mechanism
    hint = "For epochs: round(epochs * examples / batch_size)."
    steps = checks.whole_or_none("fit", "steps", steps, hint, least=0)
    evaluate_every = checks.whole_or_none("fit", "evaluate_every", evaluate_every, hint)
    save_every = checks.whole_or_none("fit", "save_every", save_every, hint)

    # The goal is the budget, or else the target to which the noise was calibrated.
    goal = algorithm.budget or mechanism.target
    if goal is not None:
        if delta is None:
            delta = goal.delta
        method = method or goal.method
    if delta is None:
        delta = 1e-5
    # The mechanism knows the default method for its sampler.
    delta, method = mechanism.stated(float(delta), method)

    begin = state.ledger.steps
    # `steps` counts from the given state, so a restarted script asks for the same end.
    end = mechanism.steps if steps is None else begin + steps
    # It is at least 1, also for a call without steps, because `Terms.has_row` divides by it.
    row_every = evaluate_every or max(1, math.ceil((end - begin) / 20))
    numbers: dict[str, Any] = {
        "begin": begin,
        "end": end,
        "row_every": row_every,
        "save_every": save_every,
        "delta": delta,
        "method": method,
    }
    # Processes with different periods save at different steps, and then wait for each other.
    return Terms(mechanism=mechanism, **processes.from_first(lambda: numbers))


def _largest_epsilon(algorithm: Algorithm, terms: Terms) -> float:
    """The epsilon that the progress line counts up to: the budget's or the plan's."""
    mechanism = terms.mechanism
    multipliers = mechanism.multipliers[: terms.end]
    # An accountant without an answer raises here, also with a budget, before the first step runs.
    planned = mechanism.epsilon_of(multipliers, terms.delta, terms.method)
    budget = algorithm.budget
    shown = (terms.delta, terms.method)
    # The line shows epsilons at one delta and by one method. Others are not comparable with them.
    if budget is None or mechanism.stated(budget.delta, budget.method) != shown:
        return planned
    return budget.epsilon


def _resumed(folder: Folder, run: Run) -> str:
    """Reports how this call continues the run that is in the folder."""
    name = f"The run in {folder.path}"
    place = f"at step {run.done:,} of {run.terms.end:,}"
    if run.over:
        return f"{name} has ended, {place}: no step runs again."
    if run.done:
        return f"{name} resumes {place}."
    return f"{name} has no checkpoint and starts again. Unsaved steps cost nothing."


def _loop(run: Run, stop: Stop, show: Progress, evaluate: Evaluate | None) -> None:
    """Runs the steps. A step with a row is saved, and then released."""
    terms = run.terms
    interrupted = False

    def release() -> None:
        """Releases the last step, which is saved: its row, its files, and the progress line."""
        run.release(evaluate, show.take_rate())
        show.line(run.rows)

    # A killed process may have left a row without its files, or a checkpoint without its row. The
    # state that `fit` was given, at step `begin`, has no row.
    if run.at_row:
        run.write_released()
    elif terms.begin < run.done and terms.has_row(run.done):
        release()

    while not (run.over or interrupted):
        show.begin()
        run.advance(terms.steps_from(run.done))
        show.tick(run.done)
        # A signal to one process stops all of them at the same step.
        interrupted = processes.any_process(stop.asked)
        has_row = terms.has_row(run.done)
        if run.folder is not None and (has_row or interrupted or run.save_is_due()):
            run.save()
        if has_row:
            release()

    # `stop` is read again, because a signal may have come while the last row was evaluated.
    if processes.any_process(stop.asked):
        saved = "not saved, for want of a directory."
        if run.folder is not None:
            saved = f"saved in {run.folder.path}. The same command resumes the run."
        stop.end_process(f"stopped at step {run.done:,} of {terms.end:,}, {saved}")

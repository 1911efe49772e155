# SPDX-License-Identifier: Apache-2.0
"""The loop around any `Algorithm`: steps, evaluation, progress, a log, checkpoints.

The ledger checks that all steps fit before the first runs, so the budget never cuts a run short.
`fit` writes two kinds of numbers and keeps them apart: released ones (parameters, and what follows
from them and public data) and, under ``"private"``, those computed from private data without noise.

With a folder, a killed run resumes from its last checkpoint. A step is a function of the state,
keys included, so a repeated step releases the same parameters and spends nothing. If the numerics
changed, so that it would not be the same step, no released step runs again.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging

from dpjax import accounting, checks, ledger, meshes, trees
from dpjax.training.checks import check_state
from dpjax.training.environment import numerics
from dpjax.training.progress import Progress
from dpjax.training.released import leave
from dpjax.training.run_folder import Folder
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
      evaluate: ``state -> {name: number}``, for example the accuracy on test data. Numbers that
        depend on private data go under ``{"private": {name: number}}``. The next steps reuse the
        buffers of the state: copy what you keep. With ``"stop": True`` among the numbers the run
        ends after this row.
      evaluate_every: Steps between evaluations; by default a twentieth of the run.
      delta: The delta at which epsilon is shown; by default that of the budget, or of
        ``mechanism.target``, or 1e-5.
      method: The `dpjax.accounting` method that computes epsilon; by default that of the budget,
        or of ``mechanism.target``, or "rdp".
      directory: The folder of this run alone. Each row leaves ``privacy.json`` (the card),
        ``statement.txt`` and ``params.msgpack``, which may be released, and ``metrics.jsonl``,
        ``run.json`` (the identity of the run), ``checkpoints`` and, if that extra is installed,
        TensorBoard's events in ``tensorboard``, which their owner alone can read.
      configuration: What else identifies the run (flags, a name, ...), in JSON types. The folder
        refuses another one. Loss, optimizer, weights and data need no name here: `fit` compares
        the program of a step and the data.
      save_every: Steps between checkpoints; by default about five minutes.
      progress: Whether to show a live line; or a function that gets the rows of the log after each
        evaluation instead, as `dpjax.reports.live_plot` makes one.

    Returns:
      The last state, and the rows of the log. ``row["private"]`` was computed from private
      data without noise: look at it, do not publish it.

    Raises:
      dpjax.ledger.Refused: Before the first step: not all steps fit, another process holds the
        folder, or the folder holds another run or one whose released steps would change.

    | the folder | what happens |
    |---|---|
    | is empty | the state, with the root key, is saved before the first step |
    | holds this run, stopped or killed | resumes from the last sound checkpoint, to the bit |
    | holds this run, under other numerics | logged; refused if released steps would change |
    | holds released steps of other data | refused |
    | ... of another loss, optimizer or rate | refused; not seen if versions or settings changed |
    | holds a run that began with other parameters | refused |
    | holds this run, finished or stopped by `evaluate` | returns its last state and rows |
    | holds this run, further than ``steps`` | refused |
    | is on a full disk | logged; the run continues, and tries the next checkpoint |

    On SIGTERM and Ctrl-C the current step ends and is saved before the process ends (with
    ``SystemExit(143)`` and ``KeyboardInterrupt``).

    Privacy:
      Checkpoints hold the root key: never release them.

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
      >>> state = algorithm.init(dpjax.noise.secret_key(), {"w": jnp.zeros(())})
      >>> state, rows = fit(algorithm, state, evaluate=evaluate, evaluate_every=2, progress=False)
      >>> state.ledger.steps
      12
    """
    if not isinstance(algorithm, Algorithm):
        raise TypeError(
            f"fit: the algorithm is a {type(algorithm).__name__}; expected an Algorithm, such as "
            "dpjax.dpsgd gives. Usually arguments were swapped: fit(algorithm, state)."
        )
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
    delta, method = _settled(algorithm, mechanism, delta, method)
    begin = state.ledger.steps
    # `steps` counts from the given state, so a restarted script asks for the same end.
    end = mechanism.steps if steps is None else begin + steps
    # Before anything that one process alone could refuse, or ask the others for.
    meshes.require_agreement(
        "fit",
        lambda: {
            "the root key": trees.fingerprint(state.key),
            "the ledger": trees.fingerprint(state.ledger),
            "steps": end,
            "evaluate_every": evaluate_every,
            "save_every": save_every,
            "directory": directory is None,
            "delta": delta,
            "method": method,
            **ledger.terms(mechanism, algorithm.budget),
        },
    )
    ledger.require(state.ledger, mechanism, end - begin, algorithm.budget)
    # An accountant without an answer raises here, before the first step runs.
    planned = mechanism.epsilon_of(mechanism.multipliers[:end], delta, method)
    # Twenty rows draw a curve; the last `or` is for a call without steps.
    every = evaluate_every or -(-(end - begin) // 20) or 1

    with contextlib.ExitStack() as stack:
        folder = None
        if directory is not None:
            identity = identity_of(algorithm, state, configuration or {})
            folder = stack.enter_context(contextlib.closing(Folder(directory, identity)))
        # Signals are caught after the folder is locked, and restored before the lock is released.
        run, stop = Run(algorithm, state, folder), stack.enter_context(Stop())
        stack.callback(run.close)
        # A script of two fits in one folder, killed in the second and restarted, would otherwise
        # run the steps of the first call again on top.
        if run.done > end:
            raise ledger.Refused(
                f"fit(directory={str(directory)!r}): {run.done} steps ran there, and this call "
                f"asks for steps up to {end}. Usually a script calls fit several times in one "
                "folder: restarted after an interrupt, it would run more steps than it says. Call "
                "fit once for all steps, or give each part its own folder."
            )
        if run.done > begin:
            logging.info(
                "fit: resuming from step %d of %s. The given state and its key are ignored.",
                *(run.done, directory),
            )
        # Epsilons at two deltas, or by two methods, are not shown as one.
        budget = algorithm.budget
        most = planned
        if budget and mechanism.stated(budget.delta, budget.method) == (delta, method):
            most = budget.epsilon
        first = meshes.first_process()
        shown = first and bool(progress) and not callable(progress)
        show = Progress(run.done, end, most, unit=mechanism.unit, enabled=shown)
        if begin < run.done < end:
            show.say(f"The run in {directory} resumes at step {run.done:,} of {end:,}.")
        stack.callback(show.close)
        ended = run.stopped
        # A kill or a full disk may have come between the row of this step and its files.
        if run.at_row:
            _leave(run, delta, method, last=ended or run.done == end)
        while run.done < end and not ended:
            to_row, to_save = _until(run.done - begin, every), _until(run.done, save_every)
            show.begin()
            run.advance(min(end - run.done, to_row, to_save))
            show.tick(run.done)
            # A signal to one process stops all of them at the same step.
            stopped = meshes.any_process(stop.asked)
            if run.done == end or _until(run.done - begin, every) == every:
                row = _row(algorithm, run.state, delta, method, show.rate())
                # Before `evaluate` or a file gets the parameters: what happens with them is out of
                # reach, so the step counts as released.
                run.mark()
                if evaluate is not None:
                    row |= _evaluated(evaluate(run.state), {**row, "counted": 0})
                # Processes may measure different numbers, and all of them stop at one step.
                ended = meshes.from_first(lambda row=row: bool(row.get("stop")))
                if ended:
                    run.end()
                    row |= _cost(run.state.ledger, mechanism, delta, method)
                # The row is on disk before the line is printed: what a user saw is in the log.
                show.line(run.done, run.add(row))
                if first and callable(progress):
                    progress(run.rows)
                _leave(run, delta, method, last=ended or run.done == end)
            if folder is not None:
                _save(run, save_every, now=ended or run.done == end or stopped)
            if stopped:
                kept = f"saved in {directory}" if folder else "not saved, for want of a directory"
                stop.leave(
                    f"stopped at step {run.done:,} of {end:,}, {kept}."
                    + " The same command resumes the run." * (folder is not None)
                )
        return run.state, run.rows


def _settled(
    algorithm: Algorithm, mechanism: Plan, delta: float | None, method: str | None
) -> tuple[float, str]:
    """The delta and the method of the log, as given or as the run was planned."""
    # A budget without a target for the noise, or a target without a budget, is the usual case.
    chosen = algorithm.budget or mechanism.target
    delta = float((chosen.delta if chosen else 1e-5) if delta is None else delta)
    return mechanism.stated(delta, method or (chosen.method if chosen else None))


def _row(
    algorithm: Algorithm, state: Any, delta: float, method: str, speed: float
) -> dict[str, Any]:
    """What the log says of a step before it is evaluated; ``speed`` is in steps per second."""
    mechanism = algorithm.mechanism
    assert mechanism is not None  # `fit` refuses such an algorithm
    row: dict[str, Any] = {
        "step": state.ledger.steps,
        **_cost(state.ledger, mechanism, delta, method),
        "delta": delta,
        "method": method,
        **({} if accounting.METHODS[method].proven else {"estimate": True}),
        **numbers(algorithm.released(state)),
    }
    if speed:
        row[f"{mechanism.unit}s_per_second"] = speed * mechanism.batch_size
    return row


def _leave(run: Run, delta: float, method: str, *, last: bool) -> None:
    """Leaves what may be released of the last row in the run's folder, if it has one."""
    if run.folder is not None:
        assert run.algorithm.mechanism is not None  # `fit` refuses such an algorithm
        leave(run.folder, run.algorithm.mechanism, run.state, delta, method, last=last)


def identity_of(
    algorithm: Algorithm, state: Any, configuration: Mapping[str, Any]
) -> dict[str, Any]:
    """The identity of the run. The configuration may not replace accounted facts."""
    # Versions and devices join what the algorithm says of itself: both may change last bits.
    identity = dict(algorithm.identity(state))
    identity["numerics"] = {**numerics(), **identity.get("numerics", {})}
    # Not the key: one bit, by which a run that continues this one knows that its seed is public.
    identity["small seed"] = trees.seeded(state.key)
    taken = sorted(identity.keys() & configuration.keys())
    if taken:
        raise ValueError(
            f"fit(configuration=...): {', '.join(taken)} would replace facts by which the run is "
            "accounted. Usually all flags are passed as they are: leave these out, or rename them, "
            "for example 'microbatch' for a batch on the device."
        )
    return {**identity, **configuration}


def _cost(spent: ledger.Ledger, mechanism: Any, delta: float, method: str) -> dict[str, Any]:
    """Epsilon, and of how many steps it is where these are not the steps that ran."""
    counted = {"counted": len(ledger.counted(spent, mechanism))} if spent.chosen else {}
    return {"epsilon": ledger.epsilon(spent, mechanism, delta, method), **counted}


def _evaluated(found: Any, row: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of an evaluation, checked against the names of the log."""
    named = isinstance(found, Mapping) and all(isinstance(name, str) for name in found)
    if not named or found.keys() & row.keys():
        what = list(found) if isinstance(found, Mapping) else type(found).__name__
        raise TypeError(
            f"fit(evaluate=...): it returned {what}; expected a mapping such as "
            f"{{'accuracy': 0.9}}, by words and without the names of the log: {', '.join(row)}."
        )
    if not isinstance(found.get("private", {}), Mapping):
        raise TypeError(
            f"fit(evaluate=...): 'private' is {found['private']!r:.60}; expected a mapping of the "
            "numbers that depend on private data, such as {'private': {'loss': 0.3}}."
        )
    if np.size(stop := found.get("stop", False)) != 1:
        raise TypeError(
            f"fit(evaluate=...): 'stop' is {stop!r:.60}; expected one truth value. Usually arrays "
            "were compared: reduce the result by all() or any()."
        )
    try:
        return numbers(found)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"fit(evaluate=...): not all of {', '.join(found)} are numbers ({error}); expected a "
            "mapping such as {'accuracy': 0.9}. Usually text or a whole state was returned."
        ) from error


def _until(done: int, every: int | None) -> int:
    """Steps until the next multiple of ``every``; unlimited if it is None."""
    return sys.maxsize if every is None else every - done % every


def _save(run: Run, every: int | None, *, now: bool) -> None:
    """Saves if a checkpoint is due. ``now``: the last chance, so a failure raises."""
    late = meshes.from_first(lambda: time.monotonic() - run.saved > _SAVE)
    due = late if every is None else run.done % every == 0
    if (now or due) and not run.save(wait=now) and now:
        raise OSError(
            f"fit: the last checkpoint could not be written, so the state in memory is lost after "
            f"{run.done} steps. The log above says why. Free the disk and run the same command "
            "again: it resumes from the last sound checkpoint."
        )

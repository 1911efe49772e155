# SPDX-License-Identifier: Apache-2.0
"""The loop around any `Algorithm`: steps, evaluation, progress, a log, checkpoints.

The ledger checks that all steps fit before the first runs, so the budget never cuts a run short.
`fit` writes two kinds of numbers and keeps them apart: released ones (parameters, and what follows
from them and public data) and, under ``"private"``, those computed from private data without noise.

With a folder, a killed run resumes from its last checkpoint. A step is a function of the state,
keys included, so a repeated step releases the same parameters and spends nothing. If the numerics
changed, so that it would not be the same step, no released step runs again, and a copy of the
folder is refused.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from dpjax import accounting, checks, ledger, processes, trees
from dpjax._files import FIELDS
from dpjax.training.checks import check_state
from dpjax.training.progress import Progress
from dpjax.training.run_folder import Folder
from dpjax.training.run_identity import identity_of
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
        numbers the run ends after this row.
      evaluate_every: Steps between evaluations; by default a twentieth of the run.
      delta: The delta at which epsilon is shown; by default that of the budget, or of
        ``mechanism.target``, or 1e-5.
      method: The `dpjax.accounting` method that computes epsilon; by default that of the budget,
        or of ``mechanism.target``, or "rdp".
      directory: The folder of this run alone. Each row leaves ``privacy.json`` (the card),
        ``statement.txt`` and ``params.msgpack`` (`released_params` reads it), which may be
        released, and ``metrics.jsonl``, ``run.json`` (the identity of the run), ``checkpoints``
        and, if that extra is installed, TensorBoard's events in ``tensorboard``, which their owner
        alone can read. While a resumed run repeats rows, the released files of the last row before
        stay.
      configuration: What else identifies the run (flags, a name, ...), in JSON types. The folder
        refuses another one. Loss, optimizer, weights and data need no name here: `fit` compares
        the program of a step and the data; of a `dpjax.data.Stream`, the number of examples and 16
        of them, so name its version here.
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
    | holds released steps of other data | refused; of a `Stream`, 16 examples are compared |
    | ... of another loss, optimizer or rate | refused; not seen if versions or settings changed |
    | holds a run that began with other parameters | refused |
    | holds this run, and the given state was changed since its step | refused |
    | holds this run, finished or stopped by `evaluate` | returns its last state and rows |
    | holds this run, released further than ``steps`` | refused |
    | is on a full disk | logged; the run continues, and tries the next checkpoint |
    | cannot record, even in place, that a step is released | an error, before the step is |

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
    terms = _checked(algorithm, state, steps, evaluate_every, save_every, delta, method, directory)
    # Before anything that one process alone could refuse, or ask the others for.
    _agree(algorithm, state, terms)
    ledger.require(state.ledger, terms.mechanism, terms.end - terms.begin, algorithm.budget)
    most = _most(algorithm, terms)

    with contextlib.ExitStack() as stack:
        folder = None
        if directory is not None:
            identity = identity_of(algorithm, state, configuration or {})
            folder = stack.enter_context(contextlib.closing(Folder(directory, identity)))
        # Signals are caught after the folder is locked, and restored before the lock is released.
        run = Run(algorithm, terms.mechanism, state, folder)
        stop = stack.enter_context(Stop())
        stack.callback(run.close)
        _check_further(run, terms)
        shown = processes.first_process() and bool(progress) and not callable(progress)
        unit = terms.mechanism.unit
        show = Progress(run.done, terms.end, most, unit=unit, enabled=shown)
        stack.callback(show.close)
        follow = progress if callable(progress) and processes.first_process() else None
        _loop(run, terms, stop, show, functools.partial(_log, run, terms, show, evaluate, follow))
        return run.state, run.rows


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
    directory: str | os.PathLike[str] | None

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
    directory: str | os.PathLike[str] | None,
) -> _Terms:
    """The arguments of `fit`, checked, and their defaults."""
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
    delta, method = mechanism.stated(delta, method or (chosen.method if chosen else None))
    begin = state.ledger.steps
    # `steps` counts from the given state, so a restarted script asks for the same end.
    end = mechanism.steps if steps is None else begin + steps
    return _Terms(mechanism, begin, end, evaluate_every, save_every, delta, method, directory)


def _agree(algorithm: Algorithm, state: Any, terms: _Terms) -> None:
    """Refuses a call whose arguments differ between processes."""
    processes.require_agreement(
        "fit",
        lambda: {
            "the root key": trees.fingerprint(state.key),
            "the ledger": trees.fingerprint(state.ledger),
            "steps": terms.end,
            "evaluate_every": terms.evaluate_every,
            "save_every": terms.save_every,
            "directory": terms.directory is None,
            "delta": terms.delta,
            "method": terms.method,
            **ledger.terms(terms.mechanism, algorithm.budget),
        },
    )


def _most(algorithm: Algorithm, terms: _Terms) -> float:
    """The largest epsilon that the progress shows: that of the budget, or of the plan."""
    mechanism, budget, shown = terms.mechanism, algorithm.budget, (terms.delta, terms.method)
    # An accountant without an answer raises here, before the first step runs.
    planned = mechanism.epsilon_of(mechanism.multipliers[: terms.end], *shown)
    # Epsilons at two deltas, or by two methods, are not shown as one.
    same = budget and mechanism.stated(budget.delta, budget.method) == shown
    return budget.epsilon if same else planned


def _check_further(run: Run, terms: _Terms) -> None:
    """Refuses a folder that is further than the call, and logs that a later state is taken."""
    # A script of two fits in one folder, killed in the second and restarted, would otherwise
    # run the steps of the first call again on top. After a kill the checkpoint may lie behind what
    # was released: a run that ended there would state fewer steps than are public.
    furthest = 0 if run.folder is None else run.folder.furthest()
    if max(run.done, furthest) > terms.end:
        raise ledger.Refused(
            f"fit(directory={str(terms.directory)!r}): {max(run.done, furthest)} steps ran there, "
            f"and this call asks for steps up to {terms.end}. Usually a script calls fit several "
            "times in one folder: restarted after an interrupt, it would run more steps than it "
            "says. Call fit once for all steps, or give each part its own folder."
        )
    if run.done > terms.begin:
        logging.info(
            "fit: resuming from step %d of %s. The given state and its key are ignored.",
            run.done,
            terms.directory,
        )


def _loop(run: Run, terms: _Terms, stop: Stop, show: Progress, log: Callable[[], bool]) -> None:
    """Runs the steps; ``log()`` releases the last one and returns whether the run ends there."""
    if terms.begin < run.done < terms.end:
        show.say(f"The run in {terms.directory} resumes at step {run.done:,} of {terms.end:,}.")
    over = run.stopped or run.done == terms.end
    # A kill or a full disk may have come between the row of this step and its files.
    if run.at_row:
        run.write_released(terms.delta, terms.method, last=over)
    # Or between the checkpoint of the last step and its row.
    elif terms.begin < run.done == terms.end:
        log()
    interrupted = False
    while not over and not interrupted:
        show.begin()
        run.advance(terms.steps_from(run.done))
        show.tick(run.done)
        # A signal to one process stops all of them at the same step.
        interrupted = processes.any_process(stop.asked)
        over = run.done == terms.end
        if terms.has_row(run.done):
            over = log()
        if run.folder is not None:
            _save(run, terms.save_every, now=over or interrupted)
    # Asked again: a signal may have come while the last row was evaluated or saved.
    if processes.any_process(stop.asked):
        folder, again = terms.directory, " The same command resumes the run."
        kept = f"saved in {folder}" if run.folder else "not saved, for want of a directory"
        stop.end_process(
            f"stopped at step {run.done:,} of {terms.end:,}, {kept}."
            + again * (run.folder is not None)
        )


def _log(
    run: Run, terms: _Terms, show: Progress, evaluate: Evaluate | None, follow: Show | None
) -> bool:
    """Releases the last step: evaluates it, logs it and writes its files.

    Returns:
      Whether the run ends here.
    """
    row = _row(run, terms, show.take_rate())
    # Before `evaluate` or a file gets the parameters: what happens with them is out of reach, so
    # the step counts as released.
    run.mark()
    if evaluate is not None:
        # The next step donates the buffers of the state, and users keep the best parameters.
        # A number by a name that only some rows have would be read as that of `fit` too.
        speed = f"{terms.mechanism.unit}s_per_second"
        taken = {*row, *FIELDS, speed} - {"stop", "private"}
        row |= _evaluated(evaluate(trees.copy(run.state)), taken)
    # Processes may measure different numbers, and all of them stop at one step.
    chosen = processes.from_first(lambda: bool(row.get("stop")))
    if chosen:
        run.end()
        row |= _cost(run.state.ledger, terms)
    over = chosen or run.done == terms.end
    # The row is on disk before the line is printed: what a user saw is in the log.
    show.line(run.done, run.add(row))
    if follow is not None:
        follow(run.rows)
    run.write_released(terms.delta, terms.method, last=over)
    return over


def _row(run: Run, terms: _Terms, speed: float) -> dict[str, Any]:
    """What the log says of a step before it is evaluated; ``speed`` is in steps per second."""
    mechanism, spent = terms.mechanism, run.state.ledger
    row: dict[str, Any] = {
        "step": spent.steps,
        **_cost(spent, terms),
        "delta": terms.delta,
        "method": terms.method,
        **({} if accounting.METHODS[terms.method].proven else {"estimate": True}),
        **numbers(run.algorithm.released(run.state)),
    }
    if speed:
        row[f"{mechanism.unit}s_per_second"] = speed * mechanism.batch_size
    return row


def _cost(spent: ledger.Ledger, terms: _Terms) -> dict[str, Any]:
    """Epsilon, and of how many steps it is where these are not the steps that ran."""
    mechanism = terms.mechanism
    counted = {"counted": len(ledger.counted(spent, mechanism))} if spent.chosen else {}
    return {"epsilon": ledger.epsilon(spent, mechanism, terms.delta, terms.method), **counted}


def _evaluated(found: Any, taken: set[str]) -> dict[str, Any]:
    """The numbers of an evaluation, checked against the names of the log that are taken."""
    named = isinstance(found, Mapping) and all(isinstance(name, str) for name in found)
    if not named or found.keys() & taken:
        what = list(found) if isinstance(found, Mapping) else type(found).__name__
        raise TypeError(
            f"fit(evaluate=...): it returned {what}; expected a mapping such as "
            f"{{'accuracy': 0.9}}, by words and without the names of the log: "
            f"{', '.join(sorted(taken))}."
        )
    if not isinstance(found.get("private", {}), Mapping):
        raise TypeError(
            f"fit(evaluate=...): 'private' is {found['private']!r:.60}; expected a mapping of the "
            "numbers that depend on private data, such as {'private': {'loss': 0.3}}."
        )
    if math.prod(np.shape(stop := found.get("stop", False))) != 1:
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


def _save(run: Run, every: int | None, *, now: bool) -> None:
    """Saves if a checkpoint is due. ``now``: the last chance, so a failure raises."""
    late = processes.from_first(lambda: time.monotonic() - run.saved > _SAVE)
    due = late if every is None else run.done % every == 0
    if (now or due) and not run.save(wait=now) and now:
        raise OSError(
            f"fit: the last checkpoint could not be written, so the state in memory is lost after "
            f"{run.done} steps. The log above says why. Free the disk and run the same command "
            "again: it resumes from the last sound checkpoint."
        )

# SPDX-License-Identifier: Apache-2.0
"""The loop around any `Algorithm`: steps, evaluation, progress, a log, checkpoints.

`fit` asks the ledger whether all steps fit before it runs the first, so a run is never
cut short half-way by its budget.  It writes two kinds of numbers and keeps them apart:
what was released (parameters and what follows from them and public data) and what was
computed from private data without noise (under ``"private"``).

With a folder, a run that was killed goes on where its last checkpoint is.  Every step is a
function of the state, keys included, so steps that are run again are the same steps: what
they release is the same, and nothing is spent twice.  Where `numerics` tells that they would
not be, nothing that was released is run again.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from absl import logging

from dpjax import accounting, ledger
from dpjax.training.checks import check_state, whole
from dpjax.training.environment import numerics
from dpjax.training.progress import Progress
from dpjax.training.run_folder import Folder
from dpjax.training.runner import Run, numbers
from dpjax.training.signals import Stop
from dpjax.types import Algorithm

Evaluate = Callable[[Any], Mapping[str, Any]]

_SAVE = 300.0  # seconds between two checkpoints


def fit(
    algorithm: Algorithm,
    state: Any,
    *,
    steps: int | None = None,
    evaluate: Evaluate | None = None,
    evaluate_every: int | None = None,
    delta: float = 1e-5,
    method: str = "rdp",
    directory: str | os.PathLike[str] | None = None,
    configuration: Mapping[str, Any] | None = None,
    save_every: int | None = None,
    progress: bool = True,
) -> tuple[Any, list[dict[str, Any]]]:
    """Runs an algorithm, and goes on with a run that was interrupted.

    Args:
      algorithm: For example from `dpjax.dpsgd`.
      state: From ``algorithm.init``, or from an earlier `fit`; it can be used again.
      steps: How many more steps; by default all that are planned.
      evaluate: ``state -> {name: number}``, for example the accuracy on test data; what it
        finds out about private data it returns as ``{"private": {name: number}}``.  The
        next steps reuse the state's buffers: copy what is to be kept.
      evaluate_every: Evaluate after this many steps; by default twenty times a run.
      delta: The delta at which epsilon is shown.
      method: The `dpjax.accounting` method by which it is.
      directory: The folder of this run, and of no other: ``metrics.jsonl``, a line an
        evaluation; ``run.json``, what the run is; ``checkpoints``; and TensorBoard's events
        in ``tensorboard``, if that extra is installed.
      configuration: What else makes the run what it is (learning rate, seed, ...), as JSON
        has it.  Another one in the same folder is refused.  Loss and optimizer are functions,
        which nobody can compare: without their names here, a run goes on with others.
      save_every: Steps between two checkpoints; by default about five minutes.
      progress: Whether to show a live line.

    Returns:
      The last state, and the rows of the log.  ``row["private"]`` was computed from
      private data without noise: look at it, do not publish it.

    Raises:
      dpjax.ledger.Refused: Before the first step, if not all steps fit, or if the folder
        is held by another process or holds another run, or one whose last steps would now run
        otherwise.

    | the folder | what happens |
    |---|---|
    | is empty | the state is saved, the root key with it, before the first step |
    | holds this run, stopped or killed at any moment | the last whole checkpoint is taken
      instead of a fresh ``state``, and this is logged; the result is the same to the last bit |
    | holds this run, under other versions, settings of JAX or devices | logged; refused if
      rows or evaluations are younger than the checkpoint: their steps would run otherwise |
    | holds a run that began with other parameters | refused |
    | holds this run, done | its last state and rows are returned |
    | holds this run, further than ``steps`` says | refused |
    | is full | logged; the run goes on, and the next checkpoint is tried |

    On SIGTERM and Ctrl-C the step at hand is finished and saved before the process ends (by
    ``SystemExit(143)`` and ``KeyboardInterrupt``).

    Privacy:
      Checkpoints hold the root key: never release them.
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
            "fit: this algorithm has no mechanism, so nothing says what a step costs. Build it "
            "as Algorithm(init, step, mechanism)."
        )
    steps = None if steps is None else whole("fit(steps", steps, least=0)
    evaluate_every = None if evaluate_every is None else whole("fit(evaluate_every", evaluate_every)
    save_every = None if save_every is None else whole("fit(save_every", save_every)
    begin = state.ledger.steps
    end = mechanism.steps if steps is None else begin + steps
    ledger.require(state.ledger, mechanism, end - begin, algorithm.budget)
    # What accounting cannot answer had better be refused before the first step.
    planned = mechanism.epsilon_of(mechanism.multipliers[:end], delta, method)
    every = evaluate_every or -(-(end - begin) // 20) or 1

    with contextlib.ExitStack() as stack:
        folder = None
        if directory is not None:
            identity = _identity(algorithm, configuration or {})
            folder = stack.enter_context(contextlib.closing(Folder(directory, identity)))
        run, stop = Run(algorithm, state, folder), stack.enter_context(Stop())
        stack.callback(run.close)
        if run.done > end:
            raise ledger.Refused(
                f"fit(directory={str(directory)!r}): {run.done} steps ran there, this call asks "
                f"for those up to {end}. Usually a script calls fit several times in one folder: "
                "once interrupted, it would run more steps than it says. Call it once for all "
                "steps, or give each part a folder of its own."
            )
        if run.done > begin:
            _tell_of_going_on(directory, run.done, configuration)
        most = algorithm.budget.epsilon if algorithm.budget else planned
        show = Progress(run.done, end, most, unit=mechanism.unit, enabled=progress)
        stack.callback(show.close)
        while run.done < end:
            to_row, to_save = _until(run.done - begin, every), _until(run.done, save_every)
            run.advance(min(end - run.done, to_row, to_save))
            show.tick(run.done)
            if run.done == end or _until(run.done - begin, every) == every:
                epsilon = ledger.epsilon(run.state.ledger, mechanism, delta, method)
                row: dict[str, Any] = {
                    "step": run.done,
                    "epsilon": epsilon,
                    "delta": delta,
                    **({} if accounting.METHODS[method].proven else {"estimate": True}),
                    **numbers(algorithm.released(run.state)),
                    f"{mechanism.unit}s_per_second": show.rate(run.done) * mechanism.batch_size,
                }
                if evaluate is not None:
                    run.mark()
                    row |= _evaluated(evaluate(run.state), row)
                show.line(run.done, run.add(row))
            if folder is not None:
                _save(run, save_every, now=run.done == end or stop.asked)
            if stop.asked:
                stop.leave()
        return run.state, run.rows


def _identity(algorithm: Algorithm, configuration: Mapping[str, Any]) -> dict[str, Any]:
    """What the run is; the caller's words may not stand for those that are accounted."""
    identity = dict(algorithm.identity())
    identity["numerics"] = {**numerics(), **identity.get("numerics", {})}
    taken = sorted(identity.keys() & configuration.keys())
    if taken:
        raise ValueError(
            f"fit(configuration=...): {', '.join(taken)} would replace what the run says of "
            "itself, by which it is accounted. Usually flags are handed over whole: leave these "
            "out, or give them another name, such as 'microbatch' for a batch on the device."
        )
    return {**identity, **configuration}


def _tell_of_going_on(directory: Any, done: int, configuration: Mapping[str, Any] | None) -> None:
    """Says that a state was given in vain; loudly where nothing tells this run from another."""
    logging.log(
        logging.INFO if configuration else logging.WARNING,
        "fit: going on from step %d of %s; the state that was given, with its key, is not used. "
        "Whether loss and optimizer are those of that run nobody can tell from functions: name "
        "what they hang on in configuration=, and others are refused.",
        *(done, directory),
    )


def _evaluated(found: Any, row: Mapping[str, Any]) -> dict[str, Any]:
    """What an evaluation found, under names that are its own."""
    if not isinstance(found, Mapping) or found.keys() & row.keys():
        what = sorted(found) if isinstance(found, Mapping) else type(found).__name__
        raise TypeError(
            f"fit(evaluate=...): it returned {what}; expected a mapping such as "
            f"{{'accuracy': 0.9}}, under names other than {', '.join(row)}, which are the log's."
        )
    try:
        return numbers(found)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"fit(evaluate=...): of {', '.join(found)} not all are numbers ({error}); expected a "
            "mapping such as {'accuracy': 0.9}. Usually a word or a whole state was returned."
        ) from error


def _until(done: int, every: int | None) -> int:
    """Steps until the next multiple of ``every``; there is one, if at all, ahead."""
    return sys.maxsize if every is None else every - done % every


def _save(run: Run, every: int | None, *, now: bool) -> None:
    """Saves where it is time to; insists where there will be no other time."""
    due = time.monotonic() - run.saved > _SAVE if every is None else run.done % every == 0
    if (now or due) and not run.save(wait=now) and now:
        raise OSError(
            f"fit: the last checkpoint could not be written, so what is in memory would be lost; "
            f"{run.done} steps ran. The log above says why. With room on the disk, run the same "
            "again: it goes on from the last checkpoint that is whole."
        )

# SPDX-License-Identifier: Apache-2.0
"""The loop around any `Algorithm`: steps, evaluation, progress, a log.

`fit` asks the ledger whether all steps fit before it runs the first, so a run is never
cut short half-way by its budget.  It writes two kinds of numbers and keeps them apart:
what was released (parameters and what follows from them and public data) and what was
computed from private data without noise (under ``"private"``).
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from dpjax import ledger
from dpjax.training.progress import Progress
from dpjax.types import Algorithm

__all__ = ["fit"]

Evaluate = Callable[[Any], Mapping[str, Any]]


def fit(
    algorithm: Algorithm,
    state: Any,
    *,
    steps: int | None = None,
    evaluate: Evaluate | None = None,
    evaluate_every: int | None = None,
    delta: float = 1e-5,
    method: str = "rdp",
    directory: str | pathlib.Path | None = None,
    progress: bool = True,
) -> tuple[Any, list[dict[str, Any]]]:
    """Runs an algorithm.

    Args:
      algorithm: For example from `dpjax.dpsgd`.
      state: From ``algorithm.init``, or from an earlier `fit`.
      steps: How many more steps; by default all that are planned.
      evaluate: ``state -> {name: number}``, for example the accuracy on test data.
      evaluate_every: Evaluate after this many steps; by default twenty times a run.
      delta: The delta at which epsilon is shown.
      method: The `dpjax.accounting` method by which it is.
      directory: Where ``metrics.jsonl`` is written, a line an evaluation.
      progress: Whether to show a live line.

    Returns:
      The last state, and the rows of the log.  ``row["private"]`` was computed from
      private data without noise: look at it, do not publish it.

    Raises:
      dpjax.ledger.Refused: Before the first step, if not all steps fit.
    """
    mechanism = algorithm.mechanism
    if mechanism is None:
        raise ValueError(
            "fit: this algorithm has no mechanism, so nothing says what a step costs. Build it "
            "as Algorithm(init, step, mechanism)."
        )
    count = mechanism.steps - state.ledger.steps if steps is None else steps
    ledger.require(state.ledger, mechanism, count, algorithm.budget)
    # What accounting cannot answer had better be refused before the first step.
    mechanism.epsilon_of(mechanism.multipliers[: state.ledger.steps + count], delta, method)
    every = evaluate_every or -(-count // 20) or 1
    show, log = Progress(count, enabled=progress), _Log(directory)
    history: list[dict[str, Any]] = []
    seen: list[Any] = []
    for step in range(1, count + 1):
        state, info = algorithm.step(state)
        seen.append(info)
        if step % every and step != count:
            show.tick(step)
            continue
        row = {
            "step": state.ledger.steps,
            "epsilon": ledger.epsilon(state.ledger, mechanism, delta, method),
            "delta": delta,
            **({} if evaluate is None else _numbers(evaluate(state))),
            "examples_per_second": show.rate(step) * mechanism.batch_size,
            "private": _means(seen),
        }
        seen.clear()
        history.append(row)
        log.write(row)
        show.line(step, row)
    show.close()
    return state, history


def _means(infos: list[Any]) -> dict[str, Any]:
    """The mean of each field of the infos since the last row, empty draws left out."""
    fields = [info._asdict() for info in jax.device_get(infos)]
    stacked = {name: np.stack([row[name] for row in fields]) for name in fields[0]}
    drawn = stacked.get("examples", np.ones(len(fields))) > 0
    kept = {k: v if k == "examples" else v[drawn] for k, v in stacked.items()}
    return {k: _plain(np.mean(v, axis=0)) for k, v in kept.items() if len(v)}


def _numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _plain(value) for name, value in row.items()}


def _plain(value: Any) -> Any:
    """A number (or a list, for several groups) that JSON can hold."""
    array = np.atleast_1d(np.asarray(value, np.float64))
    numbers = [float(x) if math.isfinite(x) else None for x in array.ravel()]
    return numbers[0] if len(numbers) == 1 else numbers


class _Log:
    """Appends rows to ``metrics.jsonl``, each on disk before the next step."""

    def __init__(self, directory: str | pathlib.Path | None) -> None:
        self.path = None if directory is None else pathlib.Path(directory, "metrics.jsonl")
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, row: dict[str, Any]) -> None:
        if self.path is None:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

# SPDX-License-Identifier: Apache-2.0
"""The progress of a run: its state, its rows, and the infos since the last row.

A checkpoint holds the first and the last, so a resumed run writes the rows of an uninterrupted one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from absl import logging

from dpjax import ledger, processes, trees
from dpjax.ledger import Refused
from dpjax.training.keys import renewed, supplied, with_supplied, without_secrets
from dpjax.training.released import write_released
from dpjax.training.run_folder import Folder, counted
from dpjax.training.tensorboard import Board
from dpjax.types import Algorithm, Plan

_DISPATCH = 0.25  # seconds of steps per dispatch; signals and the clock are read between them


class Run:
    """A run in progress."""

    def __init__(
        self, algorithm: Algorithm, mechanism: Plan, state: Any, folder: Folder | None
    ) -> None:
        self.algorithm, self.mechanism, self.folder = algorithm, mechanism, folder
        self.rows: list[dict[str, Any]] = []
        self.seen: list[Mapping[str, Any]] = []
        # The ledger on the host, where it grows: a caller may have put the state on a device.
        self.state = _with_ledger(trees.copy(state), jax.device_get(state.ledger))
        self.pace, self.saved, self.board, self._told = 1, time.monotonic(), None, False
        if folder is not None:
            self._take_up(folder)
            if processes.first_process():
                self.board = Board(folder.path / "tensorboard", self.done)
        self.state = renewed(self.state, mechanism)

    @property
    def done(self) -> int:
        """How many steps ran."""
        return self.state.ledger.steps

    @property
    def at_row(self) -> bool:
        """Whether the last row of the log is of the last step."""
        return bool(self.rows) and self.rows[-1]["step"] == self.done

    @property
    def stopped(self) -> bool:
        """Whether the evaluation after the last step ended the run."""
        return self.at_row and bool(self.rows[-1].get("stop"))

    def _take_up(self, folder: Folder) -> None:
        """Resumes from the last checkpoint, if there is one."""
        found = folder.latest(without_secrets(self.state, self.mechanism))
        if found is None:
            return
        facts = found.facts
        if processes.from_first(lambda: facts["key"] != self._digest_of_key()):
            raise Refused(
                f"fit(directory={str(folder.path)!r}): the run there began with another key=. Give "
                "its key again; no file holds it."
            )
        if found.state.ledger.steps >= self.done:
            self.state = with_supplied(found.state, self.state)
        self.rows = folder.rows()
        # A row may be younger than the checkpoint of its step: it has these infos.
        self.seen = [] if self.at_row else list(facts["seen"])
        if (missing := facts["rows"] - len(self.rows)) > 0:
            logging.warning("fit: %d rows are missing in %s.", missing, folder.log)
        # The checkpoint is older than a stop in the row of its step.
        if (least := counted(self.rows)) or self.state.ledger.chosen:
            self.end(least)

    def _digest_of_key(self) -> str | None:
        """A hash of a supplied key, by which a resumed run knows it again."""
        if not supplied(self.state):
            return None
        return hashlib.sha256(trees.on_host(self.state.key).tobytes()).hexdigest()

    def end(self, least: int = 0) -> None:
        """Records that results ended the run; at least ``least`` steps count."""
        mechanism, budget = self.mechanism, self.algorithm.budget
        spent = ledger.ended(self.state.ledger, mechanism, budget, least=least)
        self.state = _with_ledger(self.state, spent)

    def shown(self) -> Any:
        """The state with buffers of its own, and keys that made no noise: users keep it."""
        return trees.copy(renewed(self.state, self.mechanism))

    def advance(self, most: int) -> None:
        """Takes at most ``most`` steps, and about as many as run in a quarter of a second."""
        # Each process has a clock of its own, and all must take equally many steps.
        count = processes.from_first(lambda: min(most, self.pace))
        started, before = time.monotonic(), self.done
        self.state, infos = _several(self.algorithm, self.state, count)
        if self.done != before + count:
            raise RuntimeError(
                f"fit: {count} steps ran and the ledger counts {self.done - before}. An algorithm "
                "must call dpjax.ledger.admit for every step before it runs."
            )
        # Python numbers: they go into a checkpoint's JSON.
        self.seen.append({k: np.asarray(v).tolist() for k, v in infos._asdict().items()})
        elapsed = max(1e-9, time.monotonic() - started)
        # At most twice the last count: a first dispatch without compilation would otherwise be too
        # long.
        self.pace = max(1, min(2 * self.pace, int(count * _DISPATCH / elapsed)))

    def save(self) -> None:
        """Writes a checkpoint: from here on the steps so far count as released."""
        assert self.folder is not None
        self.saved = time.monotonic()
        facts = {"seen": self.seen, "rows": len(self.rows), "key": self._digest_of_key()}
        state = without_secrets(self.state, self.mechanism)
        self.folder.checkpoints.save(self.done, state, facts)

    def add(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Adds a row to the log, with the mean infos since the last row."""
        full = {**row, "private": {**_means(self.seen), **row.get("private", {})}}
        self._warn_of_dropped()
        self.seen = []
        if self.folder is not None:
            self.folder.write(full)
        self.rows.append(full)
        return full

    def write_released(self, delta: float, method: str, *, last: bool) -> None:
        """Writes what may be released of the last row into the folder, if there is one."""
        if self.folder is not None:
            write_released(self.folder, self.mechanism, self.state, delta, method, last=last)

    def _warn_of_dropped(self) -> None:
        """Warns once that examples or clients contributed zero. Every row has their number."""
        dropped = sum(int(np.sum(s.get("dropped", 0))) for s in self.seen)
        if not dropped or self._told:
            return
        self._told = True
        units = f"{self.mechanism.unit}s"
        drawn = sum(int(np.sum(s[units])) for s in self.seen)
        logging.warning(
            "fit: of %d %s drawn up to step %d, %d had no finite gradient. Usually there is a NaN "
            "in the data, or the rate is too large.",
            drawn,
            units,
            self.done,
            dropped,
        )

    def close(self) -> None:
        """Closes the TensorBoard file."""
        if self.board is not None:
            self.board.close()


def _with_ledger(state: Any, spent: Any) -> Any:
    """The state with another ledger."""
    # The states of dpjax are named tuples, a user's may be a dataclass.
    replace: Any = getattr(type(state), "_replace", dataclasses.replace)
    return replace(state, ledger=spent)


def _several(algorithm: Algorithm, state: Any, count: int) -> tuple[Any, Any]:
    """Several steps, in one dispatch if the algorithm has ``run``."""
    if algorithm.run is not None:
        return algorithm.run(state, count)
    infos = []
    for _ in range(count):
        state, info = algorithm.step(state)
        infos.append(info)
    return state, jax.tree.map(lambda *x: np.stack(x), *jax.device_get(infos))


def _means(seen: list[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean of each field of the infos since the last row.

    An empty draw has a size and no loss or norm, so only its finite fields count.
    """
    if not seen:
        return {}
    # Each dispatch holds several steps; a row of the log is their mean.
    joined = {k: np.concatenate([np.asarray(s[k], float) for s in seen]) for k in seen[0]}
    drawn = joined.get("examples", np.ones(len(next(iter(joined.values()))))) > 0
    known = {k: np.isfinite(v.reshape(len(v), -1)).all(axis=1) for k, v in joined.items()}
    some = {k: v[drawn | known[k]] for k, v in joined.items()}
    return {k: _plain(np.mean(v, axis=0)) for k, v in some.items() if len(v)}


def numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping of arrays in JSON types."""
    return {
        str(name): numbers(value) if isinstance(value, Mapping) else _plain(value)
        for name, value in row.items()
    }


def _plain(value: Any) -> Any:
    """A number, or a list of numbers for several groups; null for what JSON cannot hold."""
    array = np.atleast_1d(np.asarray(value, np.float64))
    flat = [float(x) if math.isfinite(x) else None for x in array.ravel()]
    return flat[0] if len(flat) == 1 else flat

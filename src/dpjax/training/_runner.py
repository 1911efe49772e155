# SPDX-License-Identifier: Apache-2.0
"""The progress of a run: its state, its rows, and the infos since the last row.

A checkpoint holds the first and the last, so a resumed run writes the rows of an uninterrupted one.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging

from dpjax import accounting, ledger, processes, trees
from dpjax._files import FIELDS
from dpjax.ledger import Refused
from dpjax.mechanism import Mechanism
from dpjax.training._keys import renewed, supplied, with_supplied, without_secrets
from dpjax.training._tensorboard import Board
from dpjax.training.released import write_released
from dpjax.training.run_folder import Folder, counted
from dpjax.types import Algorithm, State

Evaluate = Callable[[Any], Mapping[str, Any]]

_DISPATCH = 0.25  # seconds of steps per dispatch; signals and the clock are read between them
_SAVE = 300.0  # seconds between checkpoints


class Terms(NamedTuple):
    """What a call of `fit` runs and logs, checked."""

    mechanism: Mechanism
    begin: int
    """The step of the given state."""
    end: int
    row_every: int
    save_every: int | None
    delta: float
    method: str

    def has_row(self, done: int) -> bool:
        """Whether the log has a row of this step."""
        return done == self.end or (done - self.begin) % self.row_every == 0

    def steps_from(self, done: int) -> int:
        """Steps until the next row or checkpoint, or until the end."""
        to_row = self.row_every - (done - self.begin) % self.row_every
        to_save = to_row if self.save_every is None else self.save_every - done % self.save_every
        return min(self.end - done, to_row, to_save)


class Run:
    """A run in progress."""

    def __init__(
        self, algorithm: Algorithm, terms: Terms, state: State, folder: Folder | None
    ) -> None:
        self.algorithm, self.terms, self.folder = algorithm, terms, folder
        self.mechanism = mechanism = terms.mechanism
        self.rows: list[dict[str, Any]] = []
        self.seen: list[Mapping[str, Any]] = []
        # The ledger on the host, where it grows: a caller may have put the state on a device.
        self.state = trees.copy(state)._replace(ledger=jax.device_get(state.ledger))
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
    def over(self) -> bool:
        """Whether all steps ran, or the evaluation after the last one ended the run."""
        return self.done == self.terms.end or (self.at_row and bool(self.rows[-1].get("stop")))

    def _take_up(self, folder: Folder) -> None:
        latest = folder.latest(without_secrets(self.state, self.mechanism))
        if latest is None:
            return
        facts = latest.facts
        if processes.from_first(lambda: facts["key"] != self._digest_of_key()):
            raise Refused(
                f"fit(directory={str(folder.path)!r}): the run there began with another key=."
            )
        if latest.state.ledger.steps >= self.done:
            self.state = with_supplied(latest.state, self.state, self.mechanism)
        self.rows = folder.rows()
        # A row may be younger than the checkpoint of its step: it has these infos.
        self.seen = [] if self.at_row else list(facts["seen"])
        # The checkpoint is older than a stop in the row of its step.
        if (least := counted(self.rows)) or self.state.ledger.chosen:
            self._end(least)

    def _digest_of_key(self) -> str | None:
        """One byte of the hash of a supplied key: another key has another in 255 of 256 cases."""
        if not supplied(self.state):
            return None
        # Two hexadecimal digits: from more of them a finder of the folder could search the seed.
        return hashlib.sha256(trees.on_host(self.state.key).tobytes()).hexdigest()[:2]

    def _end(self, least: int = 0) -> None:
        """Records that results ended the run; at least ``least`` steps count."""
        mechanism, budget = self.mechanism, self.algorithm.budget
        spent = ledger.ended(self.state.ledger, mechanism, budget, least=least)
        self.state = self.state._replace(ledger=spent)

    def advance(self, most: int) -> None:
        """Takes at most ``most`` steps, and about as many as run in a quarter of a second."""
        # Each process has a clock of its own, and all must take equally many steps.
        count = processes.from_first(lambda: min(most, self.pace))
        started = time.monotonic()
        self.state, infos = self.algorithm.run(self.state, count)
        # Python numbers: they go into a checkpoint's JSON.
        self.seen.append({k: np.asarray(v).tolist() for k, v in infos._asdict().items()})
        elapsed = max(1e-9, time.monotonic() - started)
        # At most twice the last count: a first dispatch may not have compiled.
        self.pace = max(1, min(2 * self.pace, int(count * _DISPATCH / elapsed)))

    def save_is_due(self) -> bool:
        """Whether a step without a row is saved."""
        if self.terms.save_every is not None:
            return self.done % self.terms.save_every == 0
        return processes.from_first(lambda: time.monotonic() - self.saved > _SAVE)

    def save(self) -> None:
        """Writes a checkpoint: from here on the steps so far count as released."""
        assert self.folder is not None
        self.saved = time.monotonic()
        facts = {"seen": self.seen, "key": self._digest_of_key()}
        state = without_secrets(self.state, self.mechanism)
        self.folder.checkpoints.save(self.done, state, facts)

    def release(self, evaluate: Evaluate | None, speed: float) -> None:
        """Releases the last step, whose checkpoint is on disk: its row, then its files."""
        terms, pace = self.terms, f"{self.mechanism.unit}s_per_second"
        row: dict[str, Any] = {
            "step": self.done,
            **self._cost(),
            "delta": terms.delta,
            "method": terms.method,
            **({} if accounting.METHODS[terms.method].proven else {"estimate": True}),
            **_numbers(self.algorithm.released(self.state)),
            **({pace: speed * self.mechanism.batch_size} if speed else {}),
        }
        if evaluate is not None:
            # Users keep the state, so it has buffers of its own and keys that made no noise.
            answer = evaluate(trees.copy(renewed(self.state, self.mechanism)))
            # A number by a name that only some rows have would be read as that of `fit` too.
            taken = {*row, *FIELDS, pace} - {"stop", "private"}
            if clash := sorted(taken & answer.keys()):
                raise ValueError(f"fit(evaluate=...): {', '.join(clash)} are names of the log.")
            row |= _numbers(answer)
            # Processes may measure different numbers, and all of them stop at one step. An array
            # of several truth values raises here, and would be true as a list.
            stop = processes.from_first(lambda: bool(answer.get("stop")))
            row |= {"stop": stop} if stop or "stop" in answer else {}
        if row.get("stop"):
            self._end()
            row |= self._cost()
        row["private"] = {**_means(self.seen), **row.get("private", {})}
        self._warn_of_dropped()
        self.seen = []
        if self.folder is not None:
            self.folder.write(row)
        self.rows.append(row)
        self.write_released()
        # What a user saw is in the log.
        if self.board is not None:
            self.board.write(row)

    def _cost(self) -> dict[str, Any]:
        """Epsilon, and of how many steps it is where these are not the steps that ran."""
        spent, mechanism = self.state.ledger, self.mechanism
        steps = {"counted": len(ledger.counted(spent, mechanism))} if spent.chosen else {}
        epsilon = ledger.epsilon(spent, mechanism, self.terms.delta, self.terms.method)
        return {"epsilon": epsilon, **steps}

    def write_released(self) -> None:
        """Writes what may be released of the last row into the folder, if there is one."""
        if self.folder is not None:
            stated = (self.terms.delta, self.terms.method)
            write_released(self.folder, self.mechanism, self.state, *stated, last=self.over)

    def _warn_of_dropped(self) -> None:
        """Warns once that examples or clients contributed zero. Every row has their number."""
        dropped = sum(int(np.sum(s.get("dropped", 0))) for s in self.seen)
        if not dropped or self._told:
            return
        self._told = True
        units = f"{self.mechanism.unit}s"
        drawn = sum(int(np.sum(s.get(units, s["examples"]))) for s in self.seen)
        logging.warning(
            "fit: %d of %d %s up to step %d had no finite gradient. Look for NaN in the data, or "
            "lower the rate.",
            dropped,
            drawn,
            units,
            self.done,
        )

    def close(self) -> None:
        """Closes the TensorBoard file."""
        if self.board is not None:
            self.board.close()


def _means(seen: list[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean of each field of the infos; of an empty draw, only the finite fields count."""
    if not seen:
        return {}
    joined = {k: np.concatenate([np.asarray(s[k], float) for s in seen]) for k in seen[0]}
    drawn = joined["examples"] > 0
    known = {k: np.isfinite(v.reshape(len(v), -1)).all(axis=1) for k, v in joined.items()}
    some = {k: v[drawn | known[k]] for k, v in joined.items()}
    return {k: _plain(np.mean(v, axis=0)) for k, v in some.items() if len(v)}


def _numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        str(name): _numbers(value) if isinstance(value, Mapping) else _plain(value)
        for name, value in row.items()
    }


def _plain(value: Any) -> Any:
    """A number, or a list of numbers for several groups; null for what JSON cannot hold."""
    array = np.atleast_1d(np.asarray(value, np.float64))
    flat = [float(x) if math.isfinite(x) else None for x in array.ravel()]
    return flat[0] if len(flat) == 1 else flat

# SPDX-License-Identifier: Apache-2.0
"""A run in progress: its state, the rows of its log, and the infos of the steps since the last row.

An info holds the measurements of a step, such as its mean loss. A checkpoint holds state and infos,
so a resumed run writes the rows of an uninterrupted one.
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
from dpjax.types import Algorithm, HeldOut, State

Evaluate = Callable[[Any], Mapping[str, Any]]

_DISPATCH = 0.25  # seconds of steps per dispatch; signals and the clock are read between them
_SAVE = 300.0  # seconds between checkpoints


class Terms(NamedTuple):
    """The checked arguments of a call of `fit`, without None where there is a default."""

    mechanism: Mechanism
    begin: int
    """The step of the given state."""
    end: int
    row_every: int
    save_every: int | None
    """None for a checkpoint about every five minutes."""
    delta: float
    method: str
    held_out: HeldOut | None = None
    settings: str | None = None

    def has_row(self, done: int) -> bool:
        """Whether the log has a row of this step."""
        return done == self.end or (done - self.begin) % self.row_every == 0

    def steps_from(self, done: int) -> int:
        """Steps until the next row or checkpoint, or until the end."""
        to_end = self.end - done
        to_row = self.row_every - (done - self.begin) % self.row_every
        if self.save_every is None:
            return min(to_end, to_row)
        to_save = self.save_every - done % self.save_every
        return min(to_end, to_row, to_save)


class Run:
    """A run in progress, which resumes the run in its folder."""

    def __init__(
        self, algorithm: Algorithm, terms: Terms, state: State, folder: Folder | None
    ) -> None:
        self.algorithm = algorithm
        self.terms = terms
        self.mechanism = terms.mechanism
        self.folder = folder
        # A copy, because `algorithm.run` donates the buffers of the state. The ledger grows on the
        # host; the caller may have put the whole state on a device.
        self.state = trees.copy(state)._replace(ledger=jax.device_get(state.ledger))
        self.rows: list[dict[str, Any]] = []
        # The infos of each dispatch since the last row: from the name of a field to a list of its
        # values, one for each step.
        self.infos: list[Mapping[str, Any]] = []
        self.dispatch_size = 1  # in steps
        self.saved_at = time.monotonic()
        self.board = None  # of TensorBoard
        self._warned = False  # of examples without a finite gradient
        if folder is not None:
            self._resume(folder)
            if processes.first_process():
                # TensorBoard drops events of later steps, which run again.
                self.board = Board(folder.path / "tensorboard", self.done)
        # The noise of this start has a new key, unless the caller supplied one. So it shares no
        # noise with a copy of the state, and no checkpoint has to hold a noise key.
        self.state = renewed(self.state, self.mechanism)

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

    def _resume(self, folder: Folder) -> None:
        """Restores state, rows and infos from the folder, if it has a checkpoint."""
        # A checkpoint was saved without secrets, so it has the structure of such a state.
        latest = folder.latest(without_secrets(self.state, self.mechanism))
        if latest is None:
            return
        facts = latest.facts
        if processes.from_first(lambda: facts["key"] != self._digest_of_key()):
            raise Refused(
                f"fit(directory={str(folder.path)!r}): the run there began with another key=."
            )
        # The caller may have taken steps since the checkpoint. Then the given state stays.
        # Otherwise the saved one runs, with the given state's keys if the caller supplied them,
        # because no file holds these.
        if latest.state.ledger.steps >= self.done:
            self.state = with_supplied(latest.state, self.state, self.mechanism)
        self.rows = folder.rows()
        # If the log has a row of this step, that row already holds the means of these infos.
        if not self.at_row:
            self.infos = list(facts["seen"])
        # If `evaluate` stopped the run, all planned steps count, also in a resumed run, which may
        # plan more. The row of that step records their number, and so do checkpoints of later steps
        # in `ledger.chosen`. The checkpoint of the step itself was written before `evaluate` ran.
        least = counted(self.rows)  # 0 if no row records a stop
        if least > 0 or self.state.ledger.chosen:
            self._end(least)

    def _digest_of_key(self) -> str | None:
        """One byte of the hash of a supplied key: another key has another in 255 of 256 cases."""
        if not supplied(self.state):
            return None
        # Two hexadecimal digits: with more, a finder of the folder could search for the seed.
        return hashlib.sha256(trees.on_host(self.state.key).tobytes()).hexdigest()[:2]

    def _end(self, least: int = 0) -> None:
        """Records that results ended the run; at least ``least`` steps count."""
        budget = self.algorithm.budget
        spent = ledger.ended(self.state.ledger, self.mechanism, budget, least=least)
        self.state = self.state._replace(ledger=spent)

    def advance(self, most: int) -> None:
        """Takes at most ``most`` steps, and about as many as run in `_DISPATCH` seconds."""
        # The first process decides: clocks differ, and all processes take equally many steps.
        count = processes.from_first(lambda: min(most, self.dispatch_size))
        started = time.monotonic()
        self.state, infos = self.algorithm.run(self.state, count)
        # Lists of Python numbers, which the JSON of a checkpoint can hold.
        self.infos.append({k: np.asarray(v).tolist() for k, v in infos._asdict().items()})
        elapsed = max(1e-9, time.monotonic() - started)
        in_time = int(count * _DISPATCH / elapsed)
        # The size at most doubles, because one step may be too short to be timed.
        self.dispatch_size = max(1, min(2 * self.dispatch_size, in_time))

    def save_is_due(self) -> bool:
        """Whether a step without a row is saved."""
        if self.terms.save_every is not None:
            return self.done % self.terms.save_every == 0
        return processes.from_first(lambda: time.monotonic() - self.saved_at > _SAVE)

    def save(self) -> None:
        """Writes a checkpoint: from here on the steps so far count as released."""
        assert self.folder is not None
        self.saved_at = time.monotonic()
        facts = {"seen": self.infos, "key": self._digest_of_key()}
        state = without_secrets(self.state, self.mechanism)
        self.folder.checkpoints.save(self.done, state, facts)

    def release(self, evaluate: Evaluate | None, speed: float) -> None:
        """Releases the last step, whose checkpoint is on disk: its row, then its files."""
        row = self._next_row(evaluate, speed)
        self._warn_of_dropped()
        self.infos = []

        if self.folder is not None:
            self.folder.write(row)
        self.rows.append(row)
        self.write_released()
        # TensorBoard comes last, so each number that a user saw there is in the log.
        if self.board is not None:
            self.board.write(row)

    def _next_row(self, evaluate: Evaluate | None, speed: float) -> dict[str, Any]:
        """The row of the log for the last step, evaluated.

        ``speed`` is in steps per second, or 0 if no steps were timed.
        """
        method = self.terms.method
        per_second = f"{self.mechanism.unit}s_per_second"
        row: dict[str, Any] = {
            "step": self.done,
            **self._cost(),
            "delta": self.terms.delta,
            "method": method,
        }
        if not accounting.METHODS[method].proven:
            row["estimate"] = True  # epsilon is not an upper bound by this method
        row |= _plain(self.algorithm.released(self.state))  # such as adapted bounds
        if speed > 0:
            # The expected size of a batch, because the drawn sizes are private.
            row[per_second] = speed * self.mechanism.batch_size
        if evaluate is not None:
            row |= self._evaluated(evaluate, {*row, *FIELDS, per_second})
        if row.get("stop"):
            # Results ended the run, so all planned steps count from here on.
            self._end()
            row |= self._cost()
        # Numbers without noise: means over the steps since the last row, and numbers of `evaluate`.
        row["private"] = {**_means(self.infos), **row.get("private", {})}
        return row

    def _evaluated(self, evaluate: Evaluate, names: set[str]) -> dict[str, Any]:
        """The numbers that ``evaluate`` returns.

        ``names`` are the fields of the log. Of these it may return ``stop`` and ``private``.
        """
        # Users may keep this state: it has buffers of its own, and keys that made no noise.
        answer = evaluate(trees.copy(renewed(self.state, self.mechanism)))
        clashes = sorted((names - {"stop", "private"}) & answer.keys())
        if clashes:
            raise ValueError(f"fit(evaluate=...): {', '.join(clashes)} are names of the log.")
        numbers = _plain(answer)
        # Processes may measure different numbers, and all of them stop at one step. `bool` reads
        # the answer and not `numbers`: it raises for an array of several values, not for a list.
        stop = processes.from_first(lambda: bool(answer.get("stop")))
        if stop or "stop" in answer:
            numbers["stop"] = stop
        return numbers

    def _cost(self) -> dict[str, Any]:
        """Epsilon, and the number of steps that it counts if it is not the number that ran."""
        spent = self.state.ledger
        cost: dict[str, Any] = {
            "epsilon": ledger.epsilon(spent, self.mechanism, self.terms.delta, self.terms.method)
        }
        if spent.chosen:
            cost["counted"] = len(ledger.counted(spent, self.mechanism))
        return cost

    def write_released(self) -> None:
        """Writes the files of the last row that may be released, if the run has a folder."""
        if self.folder is not None:
            write_released(
                self.folder,
                self.algorithm,
                self.state,
                self.terms.delta,
                self.terms.method,
                last=self.over,
                held_out=self.terms.held_out,
                settings=self.terms.settings,
            )

    def _warn_of_dropped(self) -> None:
        """Warns once that examples or clients contributed zero. Every row has their number."""
        dropped = sum(int(np.sum(info.get("dropped", 0))) for info in self.infos)
        if not dropped or self._warned:
            return
        self._warned = True
        units = f"{self.mechanism.unit}s"
        # Rounds of clients have both fields, and their ``examples`` are rows of clients.
        drawn = sum(int(np.sum(info.get("clients", info["examples"]))) for info in self.infos)
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


def _means(infos: list[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean of each field over the steps; leaves out a field that no step has a value for.

    ``infos`` has a mapping for each dispatch, from the name of a field to its values at the steps
    of the dispatch: ``[steps]`` or ``[steps, groups]``.
    """
    if not infos:
        return {}
    # The steps of all dispatches, one after the other.
    fields = {
        name: np.concatenate([np.asarray(info[name], float) for info in infos]) for name in infos[0]
    }
    has_examples = fields["examples"] > 0
    means = {}
    for name, values in fields.items():
        # The loss and the norm of an empty draw are NaN, which the means leave out. A NaN from
        # examples stays, so the mean shows it.
        is_finite = np.isfinite(values.reshape(len(values), -1)).all(axis=1)
        averaged = values[has_examples | is_finite]
        if len(averaged):
            means[name] = _plain(np.mean(averaged, axis=0))
    return means


def _plain(value: Any) -> Any:
    """A value as JSON has it: mappings of numbers, lists of them, and None for infinity and NaN."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    flat = np.asarray(value, np.float64).ravel()
    numbers = [float(number) if math.isfinite(number) else None for number in flat]
    return numbers[0] if len(numbers) == 1 else numbers

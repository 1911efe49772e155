# SPDX-License-Identifier: Apache-2.0
"""The progress of a run: its state, its rows, and the infos since the last row.

A checkpoint holds all three, so a resumed run writes the rows of an uninterrupted one. The first
checkpoint, with the root key, is written before the first step: without the key, a released step
could not run again with the same noise.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from dpjax import ledger, processes, trees
from dpjax.ledger import Refused
from dpjax.training.released import write_released
from dpjax.training.run_folder import Folder
from dpjax.training.run_identity import changed_numerics
from dpjax.training.tensorboard import Board
from dpjax.types import Algorithm, Plan

_DISPATCH = 0.25  # seconds of steps per dispatch; signals and the clock are read between them


class Run:
    """A run in progress.

    Args:
      algorithm: What is run.
      mechanism: Its mechanism, which `fit` requires.
      state: The first state, unless the folder has a later one.
      folder: The folder of the run, or None.
    """

    def __init__(
        self, algorithm: Algorithm, mechanism: Plan, state: Any, folder: Folder | None
    ) -> None:
        self.algorithm, self.mechanism, self.folder = algorithm, mechanism, folder
        self.rows: list[dict[str, Any]] = []
        self.seen: list[Mapping[str, Any]] = []
        # The ledger on the host, where it grows: a caller may have put the state on a device.
        self.state = _with_ledger(trees.copy(state), jax.device_get(state.ledger))
        self.pace, self.saved = 1, time.monotonic()
        self.board, self._told, self.began, self.began_under = None, False, "", {}
        if folder is not None:
            # In the checkpoint beside the key, not in run.json: where one seed makes both key and
            # parameters, the hash would let anyone search for the seed.
            self.began = trees.fingerprint(state.params)
            self.began_under = folder.identity["numerics"]
            folder.reserve(mechanism.steps)
            self._take_up(folder)
            # Its files may know that results ended it and its last checkpoint not, or the reverse.
            if (allowed := folder.chosen()) or self.state.ledger.chosen:
                self.end(allowed)
            if processes.first_process():
                self.board = Board(folder.path / "tensorboard", self.done)

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
        """Resumes from the last checkpoint, or writes the first."""
        found = folder.checkpoints.latest(like=self.state)
        if found is None:
            self._begin(folder)
            return
        if self.done and not _same_key(self.state, found.state):
            raise Refused(
                f"fit(directory={str(folder.path)!r}): the state has run {self.done} steps with "
                "another key than the checkpoints there. Choose another folder for this run."
            )
        if self.done and found.state.ledger.steps == self.done:
            _require_saved(self.state, found.state, folder)
        if trees.seeded(found.state.key) and not trees.seeded(self.state.key):
            logging.warning(
                "fit: the run in %s began with the key of a small seed and keeps that key; the "
                "given one is ignored. For a release, choose another folder, or, if nothing was "
                "released there, dpjax.training.forget this one.",
                folder.path,
            )
        given, began = self.done, found.facts.get("began", self.began)
        under = found.facts.get("began under", {})
        if found.state.ledger.steps >= self.done:
            self.state, self.seen = found.state, list(found.facts["seen"])
        folder.resume(self.done)
        # Under other numerics than in the first call, one seed may make other parameters. Equal
        # settings with other first parameters are another run: its noise would meet other sums.
        comparable = not given and not changed_numerics(under, self.began_under)
        if processes.any_process(comparable and began != self.began):
            raise Refused(
                f"fit(directory={str(folder.path)!r}): the run there began with other parameters. "
                "Usually another seed made them, or they come from another run. Choose another "
                "folder, or dpjax.training.forget this one. If the first parameters are lost, pass "
                "the last state: dpjax.checkpoints.Checkpoints(...).latest(like=state).state."
            )
        self.began, self.began_under, self.rows = began, under, folder.rows(until=self.done)
        # A row may be younger than the checkpoint of its step: it has these infos.
        self.seen = [] if self.at_row else self.seen
        if given > found.state.ledger.steps:  # steps that ran without `fit` count from now on
            self.mark()

    def _begin(self, folder: Folder) -> None:
        """Writes the first checkpoint."""
        if folder.furthest() > self.done:
            raise Refused(
                f"fit(directory={str(folder.path)!r}): {folder.furthest()} steps ran there, "
                "and no checkpoint is left. The checkpoints held the root key, so these steps "
                "cannot be repeated and are spent. Start in another folder, and count them: "
                "Mechanism(..., before=dpjax.training.earlier(folder))."
            )
        folder.resume(self.done)
        folder.begin()
        folder.rows(until=self.done)
        if not self.save(wait=True):
            raise OSError(
                f"fit: no checkpoint can be written to {folder.path}, so the root key of the run "
                "would be lost with this process. No step ran. Usually the disk is full."
            )

    def mark(self) -> None:
        """Records that the steps so far are released, before the state leaves `fit`."""
        if self.folder is not None:
            sealed = np.zeros(self.done, np.uint64)
            self.folder.mark(self.done, int(self.state.ledger.chosen), sealed)

    def end(self, least: int = 0) -> None:
        """Records that results ended the run: in the state, and in the folder before the log.

        Args:
          least: How many steps count at the least.
        """
        mechanism, budget = self.mechanism, self.algorithm.budget
        spent = ledger.ended(self.state.ledger, mechanism, budget, least=least)
        self.state = _with_ledger(self.state, spent)
        self.mark()

    def write_released(self, delta: float, method: str, *, last: bool) -> None:
        """Writes what may be released of the last row into the folder, if there is one."""
        if self.folder is not None:
            write_released(self.folder, self.mechanism, self.state, delta, method, last=last)

    def advance(self, most: int) -> None:
        """Takes at most ``most`` steps, and about as many as run in a quarter of a second."""
        # Each process has a clock of its own, and all must take equally many steps.
        count = processes.from_first(lambda: min(most, self.pace))
        started, before = time.monotonic(), self.done
        self.state, infos = _several(self.algorithm, self.state, count)
        if self.done != before + count:
            raise RuntimeError(
                f"fit: {count} steps ran and the ledger counts {self.done - before}. An algorithm "
                "must call dpjax.ledger.admit for every step before it runs. These steps are spent."
            )
        if not hasattr(infos, "_asdict"):
            raise TypeError(
                f"fit: the info of a step is a {type(infos).__name__}; expected a NamedTuple of "
                "arrays. These steps are spent."
            )
        # Python numbers: they go into a checkpoint's JSON.
        self.seen.append({k: np.asarray(v).tolist() for k, v in infos._asdict().items()})
        elapsed = max(1e-9, time.monotonic() - started)
        # At most twice the last count: a first dispatch without compilation would otherwise be too
        # long.
        self.pace = max(1, min(2 * self.pace, int(count * _DISPATCH / elapsed)))

    def add(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Adds a row to the log, with the mean infos since the last row."""
        whole = {**row, "private": {**_means(self.seen), **row.get("private", {})}}
        self.rows.append(whole)
        self._warn_of_dropped()
        self.seen = []
        if self.folder is not None:
            self.folder.write(whole)
        if self.board is not None:
            self.board.write(whole)
        return whole

    def _warn_of_dropped(self) -> None:
        """Warns once that examples or clients contributed zero. Every row has their number."""
        dropped = sum(int(np.sum(s.get("dropped", 0))) for s in self.seen)
        if dropped and not self._told:
            self._told = True
            units = f"{self.mechanism.unit}s"
            drawn = sum(int(np.sum(s[units])) for s in self.seen)
            usual = "there is a NaN in the data, a label out of range, or a loss that overflows"
            if dropped == drawn:  # a bad example spoils itself alone
                usual = "all inputs are out of the model's range, as tokens beyond its vocabulary"
                if not all(map(_finite, jax.tree.leaves(self.state.params))):
                    usual = "the parameters are not finite: at the start, or by too large a rate"
            logging.warning(
                "fit: of %d %s drawn up to step %d, %d had no finite gradient and contributed "
                "zero. Usually %s.",
                drawn,
                units,
                self.done,
                dropped,
                usual,
            )

    def close(self) -> None:
        """Closes the TensorBoard file."""
        if self.board is not None:
            self.board.close()

    def save(self, *, wait: bool = False) -> bool:
        """Starts a checkpoint, and returns whether all went well."""
        assert self.folder is not None
        # Before the checkpoint has a name: its steps count also where someone removes it later.
        try:
            self.mark()
        except OSError as error:
            logging.error("%s The run continues.", error)
            return False
        self.folder.flush()  # its rows are not in the checkpoint
        self.saved, kept = time.monotonic(), self.folder.checkpoints
        facts = {"seen": list(self.seen), "began": self.began, "began under": self.began_under}
        started = kept.save(self.done, self.state, facts)
        return kept.wait() and started if wait else started


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


def _finite(leaf: Any) -> bool:
    return bool(jnp.isfinite(leaf).all())


def _require_saved(given: Any, saved: Any, folder: Folder) -> None:
    """Refuses a state that was changed since its step: the change would be dropped."""

    def content(state: Any, name: str) -> str:
        return trees.fingerprint(getattr(state, name, ()))

    names = ("params", "optimizer", "bound_scale", "memory")
    changed = [name for name in names if content(given, name) != content(saved, name)]
    # A process that refused alone would leave the others waiting.
    if processes.any_process(bool(changed)):
        where = ", ".join(changed) or "in another process, parts"
        raise Refused(
            f"fit(directory={str(folder.path)!r}): {where} of the given state differ from what the "
            f"folder saved at this step, {given.ledger.steps}. Usually a script set a rate or "
            "parameters between two calls of fit. A folder is one run: give a rate that changes "
            "as an Optax schedule. Or start from these parameters in another folder, and count "
            "what was spent: Mechanism(..., before=dpjax.training.earlier(folder))."
        )


def _same_key(one: Any, other: Any) -> bool:
    return trees.fingerprint(one.key) == trees.fingerprint(other.key)


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
    kept = {k: v[drawn | known[k]] for k, v in joined.items()}
    return {k: _plain(np.mean(v, axis=0)) for k, v in kept.items() if len(v)}


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

# SPDX-License-Identifier: Apache-2.0
"""The folder of one run: one process at a time, one identity, one log, its checkpoints.

`run.json` says what the run is: the mechanism, the data's hash, whatever the caller calls
its configuration.  A process that comes later, with anything else, is refused and told the
difference; with the same, it goes on from the last checkpoint, and rows of the log that
are younger than it are taken back, because they will be written again, and alike.  Its
``numerics`` say by what they would not be alike: those may change where nothing runs again.

Nothing here knows what a step does.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import pathlib
import re
import shutil
from collections.abc import Mapping
from typing import Any

from absl import logging

from dpjax.checkpoints import Checkpoints
from dpjax.ledger import Refused
from dpjax.mechanism import Spent
from dpjax.mechanism.card import check_format, spent_of


class Folder:
    """The folder of one run, held by this process until `close`.

    Args:
      directory: Made if it is not there.
      identity: What the run is, as JSON has it; equal for every process that takes part, but
        for its ``numerics``.

    Raises:
      Refused: Another process holds the folder, or it holds another run.
    """

    def __init__(self, directory: str | os.PathLike[str], identity: Mapping[str, Any]) -> None:
        self.path = pathlib.Path(directory)
        self.path.mkdir(parents=True, exist_ok=True)
        self.log, self._waiting = self.path / "metrics.jsonl", list[str]()
        self._lock = _locked(self.path / "lock", self.path)
        self.identity = json.loads(json.dumps(identity))
        try:
            _same_run(self.path / "run.json", self.identity, self.path)
            self._marked = self.furthest()
            self.checkpoints = Checkpoints(self.path / "checkpoints")
        except BaseException:
            os.close(self._lock)
            raise

    def go_on(self, done: int) -> bool:
        """Takes the run up after so many steps; whether its numerics are others than before.

        Raises:
          Refused: They are, and what was released after that step would be released anew.
        """
        path, now = self.path / "run.json", self.identity["numerics"]
        was = json.loads(path.read_text(encoding="utf-8")).get("numerics", {})
        changed = "\n".join(
            f"  {name}: {was.get(name, 'unknown')} there, {now.get(name)} now"
            for name in {**was, **now}
            if was.get(name, "unknown") != now.get(name)
        )
        if changed and self.furthest() > done:
            raise Refused(
                f"fit(directory={str(self.path)!r}): steps up to {self.furthest()} were released "
                f"there, the checkpoint to go on from is of step {done}, and between them changed:"
                f"\n{changed}\nThe steps after it would run again with other draws, other noise or "
                "other last bits, and be released twice, counted once. Go on with what it ran "
                "with; or begin in another folder from what it released, and count what it spent: "
                "Mechanism(..., before=dpjax.training.earlier(folder))."
            )
        if changed:
            logging.warning(
                "fit: %s goes on at step %d, nothing runs again, and there changed:\n%s",
                *(self.path, done, changed),
            )
            _replace(path, json.dumps(self.identity, indent=2) + "\n")
        return bool(changed)

    def mark(self, step: int) -> None:
        """Counts a step as released, before anybody is handed what it gave."""
        if step <= self._marked:
            return
        try:
            _replace(self.path / "furthest", f"{step}\n")
            self._marked = step
        except OSError as error:
            logging.error("fit: %s cannot be marked (%s); the run goes on.", self.path, error)

    def rows(self, until: int) -> list[dict[str, Any]]:
        """The rows of the log up to a step; later ones are taken back, but not forgotten."""
        rows = _rows(self.log)
        kept = [row for row in rows if row["step"] <= until]
        again = "".join(map(_line, kept))
        if not self.log.exists() or again != self.log.read_text(encoding="utf-8"):
            _replace(self.path / "furthest", f"{self.furthest()}\n")
            _replace(self.log, again)
        return kept

    def furthest(self) -> int:
        """The last step of which anything is or ever was on disk, or that an evaluation saw."""
        return _furthest(self.path)

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends a row to the log; what a full disk does not take is kept for the next time."""
        self._waiting.append(_line(row))
        size = self.log.stat().st_size
        try:
            with self.log.open("a", encoding="utf-8") as file:
                file.write("".join(self._waiting))
            self._waiting.clear()
        except OSError as error:
            os.truncate(self.log, size)  # half a line is no line
            logging.error("fit: %s could not be written (%s); the run goes on.", self.log, error)

    def close(self) -> None:
        """Waits for checkpoints, and lets another process have the folder."""
        self.checkpoints.close()
        os.close(self._lock)


def earlier(directory: str | os.PathLike[str]) -> tuple[Spent, ...]:
    """What the run in a folder has spent, and what had been spent before it.

    For a run that goes on from what that one released, with other settings:
    ``Mechanism(..., before=earlier(folder))``, in a folder of its own and with a key of its
    own.  Steps count as soon as something of them is on disk, a checkpoint, a row
    or the mark that an evaluation sees them, and go on counting if it is damaged later, or taken
    back because the run goes on from before.

    Example:
      >>> import tempfile
      >>> folder = pathlib.Path(tempfile.mkdtemp())
      >>> import dpjax
      >>> mechanism = dpjax.Mechanism(
      ...     sampling=dpjax.sampling.full(9),
      ...     clipping=dpjax.clipping.flat(1.0),
      ...     noise_multiplier=2.0,
      ...     steps=50,
      ... )
      >>> _ = (folder / "run.json").write_text(json.dumps(mechanism.identity))
      >>> _ = (folder / "metrics.jsonl").write_text('{"step": 30}')
      >>> earlier(folder)[0].runs
      ((2.0, 30),)
    """
    folder = pathlib.Path(directory)
    try:
        run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"training.earlier({str(directory)!r}): there is no run.json, so no run of dpjax.fit "
            "with this directory; give the folder that holds it."
        ) from error
    check_format(run.get("mechanism"), f"training.earlier({str(directory)!r})")
    return spent_of(run["mechanism"], _furthest(folder))


def forget(directory: str | os.PathLike[str]) -> None:
    """Removes a run from its folder, so that another can begin there; other files stay.

    Privacy: what it released is spent all the same.  Of that, nothing here will tell.

    Raises:
      Refused: A process is running there.
    """
    folder = pathlib.Path(directory)
    if not (folder / "run.json").exists():
        return
    lock = _locked(folder / "lock", folder)
    try:
        _remove(folder)
    finally:
        os.close(lock)


def _remove(folder: pathlib.Path) -> None:
    for name in ("checkpoints", "tensorboard"):
        shutil.rmtree(folder / name, ignore_errors=True)
    # The run exists as long as the last of these.
    for name in ("metrics.jsonl", "furthest", "run.json"):
        (folder / name).unlink(missing_ok=True)


def _furthest(folder: pathlib.Path) -> int:
    """The last step of which anything is on disk, or was marked or taken back."""
    names = (path.name for path in (folder / "checkpoints").glob("*"))
    saved = (re.fullmatch(r"(?:damaged-)?(\d+)(?:-\d+)?", name) for name in names)
    mark = folder / "furthest"
    steps = [int(found[1]) for found in saved if found]
    steps += [row["step"] for row in _rows(folder / "metrics.jsonl")]
    return max([*steps, int(mark.read_text()) if mark.exists() else 0])


def _line(row: Mapping[str, Any]) -> str:
    """A row as JSON, which has no infinite epsilon: it is null there."""
    infinite = math.isinf(row.get("epsilon", 0))
    return json.dumps({**row, "epsilon": None} if infinite else row, allow_nan=False) + "\n"


def _rows(log: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of a log; a last one that was cut off as it was written is none."""
    rows, lines = [], log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            rows.append(row | ({"epsilon": math.inf} if row.get("epsilon", 0) is None else {}))
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise ValueError(
                f"{log}: line {number} of {len(lines)} is no row ({error}). Only the last can have "
                "been cut off by a kill, so the file was altered, and nothing is taken back. Put "
                "the line right, or remove it if the rows before and after tell enough."
            ) from error
    return rows


def _locked(path: pathlib.Path, folder: pathlib.Path) -> int:
    """Takes the lock, which the system gives back whenever and however this process ends."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(handle, 20, 0).decode() or "unknown"
        os.close(handle)
        raise Refused(
            f"fit(directory={str(folder)!r}): process {holder} is running there. Two processes in "
            "one folder would overwrite each other's checkpoints. Wait for it, or choose another "
            "folder."
        ) from error
    os.ftruncate(handle, 0)
    os.pwrite(handle, str(os.getpid()).encode(), 0)
    return handle


def _same_run(path: pathlib.Path, identity: Mapping[str, Any], folder: pathlib.Path) -> None:
    """Writes down what a run is, or compares it with what was written down."""
    if not path.exists():
        if (folder / "metrics.jsonl").exists():
            raise Refused(
                f"fit(directory={str(folder)!r}): there is a metrics.jsonl, and no run.json that "
                "says which run wrote it. Choose another folder, or remove what is there."
            )
        _replace(path, json.dumps(identity, indent=2) + "\n")
        return
    before = json.loads(path.read_text(encoding="utf-8"))
    if "mechanism" in identity:
        check_format(before.get("mechanism"), f"fit(directory={str(folder)!r})")
    there, now = map(_leaves, (before, identity))
    names = [name for name in {**there, **now} if there.get(name) != now.get(name)]
    if names and not _furthest(folder) and not before.get("mechanism", {}).get("preparation"):
        logging.info("fit: nothing was spent by what was begun in %s; it is begun anew.", folder)
        _remove(folder)
        _replace(path, json.dumps(identity, indent=2) + "\n")
    elif names:
        lines = (
            f"  {'.'.join(name)}: {_short(there.get(name))} there, {_short(now.get(name))} now"
            for name in names
        )
        raise Refused(
            f"fit(directory={str(folder)!r}): another run is there:\n" + "\n".join(lines) + "\n"
            "To go on with it, use its own settings. To change them, begin in another folder from "
            "what this run released, and count what it spent: "
            "Mechanism(..., before=dpjax.training.earlier(folder))."
        )


def _leaves(facts: Mapping[str, Any], path: tuple[str, ...] = ()) -> dict[tuple[str, ...], str]:
    """Each value of nested mappings as JSON, under its path; without ``numerics``."""
    leaves = {}
    for name, value in facts.items():
        if not path and name == "numerics":  # `Folder.go_on` compares them
            continue
        if isinstance(value, Mapping) and value:
            leaves |= _leaves(value, (*path, name))
        else:  # as JSON, because NaN is not equal to itself
            leaves[*path, name] = json.dumps(value, sort_keys=True)
    return leaves


def _short(text: str | None) -> str:
    text = "null" if text is None else text
    return text if len(text) <= 60 else text[:57] + "..."


def _replace(path: pathlib.Path, text: str) -> None:
    """Writes a file beside its place and moves it there: whole, or as it was."""
    beside = path.with_name(path.name + ".part")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)

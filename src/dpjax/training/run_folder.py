# SPDX-License-Identifier: Apache-2.0
"""The folder of one run: one process at a time, one identity, one log, its checkpoints.

`run.json` says what the run is, see `run_identity`; `seals` says what each step released. A later
process with another identity is refused with the differences. With an equal identity it resumes
from the last checkpoint and drops the rows of the log after that checkpoint: the same steps write
the same rows again. Numerics may change only where no released step would run again, and only
in the folder that the run began in.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import shutil
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from dpjax import processes
from dpjax._files import (
    line_of_log,
    opened_for_owner,
    overwrite,
    read_json,
    read_log,
    replace,
)
from dpjax.checkpoints import Checkpoints
from dpjax.ledger import Refused
from dpjax.mechanism import Spent
from dpjax.mechanism.card import check_format, spent_of
from dpjax.reports.load_run import seed_of
from dpjax.training.folder_lock import close, is_lock, locked
from dpjax.training.run_identity import BLIND, INODE, PLACES, changed_numerics, differences

# The files and folders of a run, whose identity is in run.json.
_RECORDS = ("metrics.jsonl", "furthest", "seals")
_FOLDERS = ("checkpoints", "tensorboard")
PRIVATE = ("run.json", *_RECORDS, "lock", *_FOLDERS)
RELEASED = ("privacy.json", "statement.txt", "params.msgpack")  # by `training.released`


class Folder:
    """The folder of one run, held by this process until `close`.

    Args:
      directory: Created if it does not exist.
      identity: What the run is, in JSON types; equal for every process of the run, except for
        its ``numerics``.

    Raises:
      Refused: Another process holds the folder, or it holds another run.
    """

    def __init__(self, directory: str | os.PathLike[str], identity: Mapping[str, Any]) -> None:
        # Absolute: an `evaluate` that changes the working folder would move a relative one, past
        # its lock, into the folder of another run.
        self._path, self._waiting = pathlib.Path(directory).absolute(), list[str]()
        self.identity = json.loads(json.dumps(identity))
        self._lock: int | None = None
        self._sealed = 0  # how many seals this process has written
        try:
            # Where several processes run, the first one alone touches files.
            self._open()
            self.checkpoints = Checkpoints(self.path / "checkpoints")
        except BaseException:
            self._unlock()
            raise

    @property
    def path(self) -> pathlib.Path:
        """Where the folder is; all of its files are found by it.

        Raises:
          Refused: The folder that this process holds is not there any more.
        """
        # Another run may have begun there, which holds a lock of its own.
        if self._lock is not None and not is_lock(self._lock, self._path):
            raise Refused(
                f"fit(directory={str(self._path)!r}): this folder was removed while its run "
                "continued, so nothing says any more which steps it released, and another run may "
                "be there. Usually the same script was started again while the first one still "
                "ran, as in a notebook. The steps of this run stay spent."
            )
        return self._path

    @property
    def log(self) -> pathlib.Path:
        """The rows of the run."""
        return self.path / "metrics.jsonl"

    @processes.in_first
    def _open(self) -> None:
        self._path.mkdir(parents=True, exist_ok=True)
        # The lock first: everything below reads and writes files that another process may hold.
        self._lock = locked(self._path)
        # By it `resume` knows a copy. Without the number of the device, which network file systems
        # may change when they are mounted again; `mv` within one file system keeps the inode.
        self.identity[INODE] = os.fstat(self._lock).st_ino
        _remove_parts(self._path)
        _same_run(self.path / "run.json", self.identity, self.path)
        # Before `rows` removes rows that the resumed run writes again: someone may have seen
        # them; and before the first step, so that a full disk has room for it.
        self._mark = _marked(self.path)
        self._write_mark(*self._mark)

    @processes.in_first
    def resume(self, done: int) -> None:
        """Resumes the run after ``done`` steps, and records the numerics of now.

        Raises:
          Refused: They changed, and released steps would run a second time, or could in a copy.
        """
        path, now = self.path / "run.json", self.identity["numerics"]
        before = read_json(path)
        was = before.get("numerics", {})
        # Other versions or devices may change draws, noise or last bits. A repeated step would
        # then be a second release of the same data, counted once.
        names = changed_numerics(was, now)
        changed = "\n".join(
            f"  {name}: {was.get(name, 'unknown')} there, {now.get(name)} now" for name in names
        )
        if changed and (furthest := self._mark.furthest) > done:
            raise Refused(
                f"fit(directory={str(self.path)!r}): steps up to {furthest} were released, "
                f"the last checkpoint is of step {done}, and these settings changed since then:"
                f"\n{changed}\nThe steps after the checkpoint would run again with other draws, "
                "other noise or other last bits: released twice and counted once. Resume with the "
                "settings of the run; or start in another folder from its released parameters, and "
                "count what it spent: Mechanism(..., before=dpjax.training.earlier(folder))."
            )
        # Folders of earlier versions have no number, and count as originals.
        if changed and before.get(INODE, self.identity[INODE]) != self.identity[INODE]:
            raise Refused(
                f"fit(directory={str(self.path)!r}): this folder is a copy: its file 'lock' is "
                f"not the one that the run began with, and these settings changed:\n{changed}\n"
                "A copy cannot know which steps the original released since, and they would be "
                "released twice and counted once. Usually the folder was restored from a backup or "
                "moved to another machine. Continue the original, or resume with the settings of "
                "the run; or start in another folder from its released parameters, and count what "
                "it spent: Mechanism(..., before=dpjax.training.earlier(original))."
            )
        if changed:
            logging.warning(
                "fit: %s resumes at step %d. This folder records no later step, but these settings "
                "changed:\n%s%s",
                self.path,
                done,
                changed,
                "" if PLACES.issuperset(names) else BLIND,
            )
            # The run keeps the key of its checkpoint, whatever key the caller gave.
            kept = {**self.identity, "small seed": before.get("small seed", False)}
            replace(path, json.dumps(kept, indent=2) + "\n")

    @processes.in_first
    def begin(self) -> None:
        """Records the identity again, with the key of a run that has no checkpoint yet."""
        replace(self.path / "run.json", json.dumps(self.identity, indent=2) + "\n")

    @processes.in_first
    def reserve(self, steps: int) -> None:
        """Makes room for the seals of ``steps`` steps, at most a million, before they run."""
        path, room = self.path / "seals", 8 * min(steps, 2**20)
        size = path.stat().st_size if path.exists() else 0
        overwrite(path, size, bytes(max(0, room - size)))

    @processes.in_first
    def mark(self, step: int, chosen: int, seals: np.ndarray) -> None:
        """Counts a step as released, before its parameters leave `fit`.

        Args:
          step: The step.
          chosen: How many steps were planned, if results ended the run; they all count.
          seals: What the steps so far released; see `dpjax.noise.seals`.

        Raises:
          OSError: The disk refused.
        """
        path, before = self.path, self._mark
        mark = Mark(max(step, before.furthest), max(chosen, before.chosen))
        try:
            # First, because the seals of released steps bind every later process.
            if self._sealed < step:
                overwrite(path / "seals", 8 * self._sealed, seals[self._sealed :].tobytes())
                self._sealed = step
            if mark != before:
                self._write_mark(*mark)
                self._mark = mark
        # A step that no file counts could be released again, with other noise.
        except OSError as error:
            raise OSError(
                f"fit: {path} cannot record that step {step} is released ({error}), so its "
                "parameters are not. Usually the disk is full. Free it and run the same command "
                "again: it resumes from the last sound checkpoint."
            ) from error

    def _write_mark(self, step: int, chosen: int) -> None:
        # Of one length, so that it needs no room on a full disk.
        overwrite(self.path / "furthest", 0, f"{step:19} {chosen:19}\n".encode())

    @processes.in_first
    def seals(self) -> np.ndarray:
        """The seals of all released steps."""
        data = (self.path / "seals").read_bytes()
        # Steps that ran and were not released may run again with another sum.
        return np.frombuffer(data[: len(data) // 8 * 8], np.uint64)[: self._mark.furthest]

    @processes.in_first
    def rows(self, until: int) -> list[dict[str, Any]]:
        """The rows of the log up to a step. Later rows are removed and stay counted as released."""
        rows = read_log(self.log)
        kept = [row for row in rows if row["step"] <= until]
        # Compared as text, so that an unchanged log is not written again.
        again = "".join(map(line_of_log, kept))
        if not self.log.exists() or again != self.log.read_text(encoding="utf-8"):
            replace(self.log, again)
        return kept

    @processes.in_first
    def furthest(self) -> int:
        """The last released step: that was ever on disk, or that an evaluation saw."""
        return self._mark.furthest

    @processes.in_first
    def chosen(self) -> int:
        """How many steps were planned, if results ever ended the run; 0 if not."""
        return self._mark.chosen

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends a row to the log, or keeps it for the next `flush` if the disk rejects it."""
        if processes.first_process():
            self._waiting.append(line_of_log(row))
        self.flush()

    @processes.in_first
    def flush(self) -> None:
        """Appends the rows that the disk rejected so far to the log."""
        if not self._waiting:
            return
        size = None
        try:
            # A log that was removed while the run continues begins again, closed to others.
            with open(self.log, "a", encoding="utf-8", opener=opened_for_owner) as file:
                size = file.tell()
                file.write("".join(self._waiting))
            self._waiting.clear()
        except OSError as error:
            if size is not None:
                os.truncate(self.log, size)  # half a line is no line
            logging.error("fit: %s could not be written (%s); the run continues.", self.log, error)

    def close(self) -> None:
        """Waits for checkpoints and releases the lock of the folder."""
        try:
            self.checkpoints.close()
        finally:
            self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            close(self._lock)
            self._lock = None


def earlier(directory: str | os.PathLike[str]) -> tuple[Spent, ...]:
    """What the run in a folder has spent, and what was spent before it.

    For a run that starts from the released parameters of that one, with other settings:
    ``Mechanism(..., before=earlier(folder))``, in its own folder and with its own key. A step
    counts as soon as a checkpoint, a row or the mark of an evaluation is on disk, and it still
    counts when that file is damaged or removed later. All planned steps count if `evaluate` ever
    ended the run.

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
    return spent_of(**spending(directory))


def spending(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """The arguments of `spent_of` for `earlier`: unlike a sampler, they can be sent."""
    folder = pathlib.Path(directory)
    try:
        run = read_json(folder / "run.json")
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"training.earlier({str(directory)!r}): found no run.json; expected the folder of a "
            "run of dpjax.fit(directory=...). Usually the folder above it was given."
        ) from error
    check_format(run.get("mechanism"), f"training.earlier({str(directory)!r})")
    seeded = seed_of(run) is not None
    return {"facts": run["mechanism"], "steps": max(_marked(folder)), "supplied": seeded}


def forget(directory: str | os.PathLike[str]) -> None:
    """Removes a run from its folder, so that another can start there; other files stay.

    Privacy:
      What the run released stays spent, and no file records it any more.

    Raises:
      Refused: A process is running there.
    """
    folder = pathlib.Path(directory)
    # Names that runs alone have: without any of them `checkpoints` may be another program's.
    if not any((folder / name).exists() for name in ("run.json", "furthest", "seals")):
        return
    held = locked(folder)
    try:
        _remove(folder)
    finally:
        close(held)


def _remove(folder: pathlib.Path) -> None:
    for name in _FOLDERS:
        _remove_folder(folder / name)
    _remove_parts(folder)
    # In this order: the run exists as long as run.json does.
    for name in (*_RECORDS, *RELEASED, "run.json"):
        (folder / name).unlink(missing_ok=True)


def _remove_parts(folder: pathlib.Path) -> None:
    """Removes what a killed process left of the run's files; a report may be written just now."""
    for name in (*PRIVATE, *RELEASED):
        for path in folder.glob(f"{name}.*.part"):
            path.unlink(missing_ok=True)


def _remove_folder(folder: pathlib.Path) -> None:
    """Removes a folder; of a link to one, as to another disk, its checkpoints."""
    if folder.is_symlink():  # `shutil.rmtree` refuses it, and the root key would stay there
        for path in (*folder.glob("[0-9]*"), *folder.glob("damaged-*")):
            shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)


class Mark(NamedTuple):
    """How far a run is released."""

    furthest: int
    """The last step that is on disk, was marked as released, or was removed from the log."""
    chosen: int
    """How many steps were planned, if results ever ended the run; 0 if not."""


def _marked(folder: pathlib.Path) -> Mark:
    """How far a run is released, by its checkpoints, its log and what `Folder.mark` wrote."""
    names = (path.name for path in (folder / "checkpoints").glob("*"))
    saved = (re.fullmatch(r"(?:damaged-)?(\d+)(?:-\d+)?", name) for name in names)
    steps = [int(found[1]) for found in saved if found]
    rows, path = read_log(folder / "metrics.jsonl"), folder / "furthest"
    steps += [row["step"] for row in rows]
    counted = [row.get("counted", 0) for row in rows]
    words = path.read_text(errors="replace").split() if path.exists() else []
    if not all(word.isdecimal() for word in words):
        raise ValueError(
            f"{path}: holds {' '.join(words)[:60]!r}; expected the last released step and the "
            "number of steps that count. Usually the disk is damaged. Write the number of planned "
            "steps into it twice: then all of them count as released."
        )
    mark = [int(word) for word in words]
    return Mark(max([*steps, *mark[:1]], default=0), max([*counted, *mark[1:]], default=0))


def _same_run(path: pathlib.Path, identity: Mapping[str, Any], folder: pathlib.Path) -> None:
    """Writes the identity of a run, or compares it with the one in the folder."""
    if not path.exists():
        # An empty folder is of no run: the user may have linked one on another disk.
        if left := [name for name in (*_RECORDS, "checkpoints") if _holds(folder / name)]:
            raise Refused(
                f"fit(directory={str(folder)!r}): found {', '.join(left)} and no run.json that "
                "says which run wrote them. Usually run.json was deleted. Choose another folder; "
                "what the run released stays spent."
            )
        replace(path, json.dumps(identity, indent=2) + "\n")
        return
    before = read_json(path)
    if "mechanism" in identity:
        check_format(before.get("mechanism"), f"fit(directory={str(folder)!r})")
    lines, _ = differences(before, identity)
    queried = before.get("mechanism", {}).get("preparation")
    # Queries of preparation are spent before the first step, so such a folder is never replaced.
    if lines and not queried and not _marked(folder).furthest:
        # A first step that does not compile would otherwise block the folder for good.
        logging.info("fit: the run in %s spent nothing; a new run replaces it.", folder)
        _remove(folder)
        replace(path, json.dumps(identity, indent=2) + "\n")
    elif lines:
        raise Refused(
            f"fit(directory={str(folder)!r}): another run is there:\n" + "\n".join(lines) + "\n"
            "To resume it, use its settings. To change them, start in another folder from its "
            "released parameters, and count what it spent: "
            "Mechanism(..., before=dpjax.training.earlier(folder))."
        )


def _holds(path: pathlib.Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.exists()

# SPDX-License-Identifier: Apache-2.0
"""The folder of one run: one process at a time, one identity, one log, its checkpoints.

`run.json` says what the run is; a process with another identity is refused. Loss, optimizer,
versions and devices are not part of it: with others a resumed run releases no step twice either.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

from dpjax import processes
from dpjax._files import line_of_log, lock, opened_for_owner, read_json, read_log, replace
from dpjax.ledger import Refused
from dpjax.mechanism import Spent
from dpjax.mechanism.card import check_format, spent_of
from dpjax.training.checkpoints import Checkpoints, Damaged, Restored

# The files and folders of a run.
PRIVATE = ("run.json", "metrics.jsonl", "lock", "command.lock", "checkpoints", "tensorboard")
RELEASED = ("privacy.json", "statement.txt", "board.txt", "params.msgpack")  # by `released`


class Folder:
    """The folder of one run, held until `close`; the first process alone reads and writes files."""

    def __init__(self, directory: str | os.PathLike[str], identity: Mapping[str, Any]) -> None:
        # Absolute: an `evaluate` may change the working folder.
        self.path = pathlib.Path(directory).absolute()
        self.identity = json.loads(json.dumps(identity))
        self.log = self.path / "metrics.jsonl"
        self.is_resumed = False  # known to the first process
        with contextlib.ExitStack() as stack:
            processes.from_first(lambda: self._open(stack))
            self.checkpoints = Checkpoints(self.path / "checkpoints")
            stack.callback(self.checkpoints.close)
            self.close = stack.pop_all().close

    def _open(self, stack: contextlib.ExitStack) -> None:
        # The lock first: everything below reads and writes files that another process may hold.
        stack.enter_context(held(self.path))
        path = self.path / "run.json"
        if path.exists():
            before = read_json(path)
            check_format(before.get("mechanism"), f"fit(directory={str(self.path)!r})")
            there, now = map(_leaves, (before, self.identity))
            lines = [
                f"  {name}: {there.get(name, 'null'):.60} there, {now.get(name, 'null'):.60} now\n"
                for name in {**there, **now}
                if there.get(name) != now.get(name)
            ]
            if not lines:
                self.is_resumed = True
                return
            # A first step that does not compile would otherwise block the folder. Queries of
            # preparation are spent before the first step.
            if released_steps(self.path) or before.get("mechanism", {}).get("preparation"):
                raise Refused(
                    f"fit(directory={str(self.path)!r}): another run is there:\n{''.join(lines)}"
                    "Use its settings, or another folder with before=training.earlier(folder)."
                )
            _remove(self.path)
        replace(path, json.dumps(self.identity, indent=2) + "\n")  # whole, also after a kill

    def latest(self, like: Any) -> Restored | None:
        """The last checkpoint, if any; refused if released steps have none: they must not rerun."""
        try:
            latest, why = self.checkpoints.latest(like), "no checkpoint is as late"
        except Damaged as damage:
            latest, why = None, str(damage)
        steps = processes.from_first(lambda: released_steps(self.path))
        if steps > (0 if latest is None else latest.state.ledger.steps):
            raise Refused(
                f"fit(directory={str(self.path)!r}): {steps} steps ran there, and {why}. Start in "
                "another folder with before=dpjax.training.earlier(folder)."
            )
        return latest

    def rows(self) -> list[dict[str, Any]]:
        """The rows of the log. A line that a kill cut off is removed."""

        def read() -> list[dict[str, Any]]:
            rows = read_log(self.log)
            text = "".join(map(line_of_log, rows))
            if self.log.exists() and text != self.log.read_text(encoding="utf-8"):
                replace(self.log, text)
            return rows

        return processes.from_first(read)

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends a row to the log, and returns when it is on disk."""
        if processes.first_process():
            with open(self.log, "a", encoding="utf-8", opener=opened_for_owner) as file:
                file.write(line_of_log(row))
                file.flush()
                os.fsync(file.fileno())


@contextlib.contextmanager
def held(directory: str | os.PathLike[str], name: str = "lock") -> Iterator[None]:
    """Holds a run's folder, which is made if necessary, by the lock file ``name``.

    The system frees a killed process's lock.
    """
    path = pathlib.Path(directory) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if (handle := lock(path)) is None:
        raise Refused(
            f"fit(directory={str(directory)!r}): process {path.read_text() or 'unknown'} is "
            "running there. Choose another folder."
        )
    try:
        yield
    finally:
        os.close(handle)


def _leaves(facts: Mapping[str, Any], path: str = "") -> dict[str, str]:
    """The values of nested mappings as JSON, in which NaN is equal to itself, by path."""
    leaves = {}
    for name, value in facts.items():
        nested = isinstance(value, Mapping) and value
        here = {path + name: json.dumps(value, sort_keys=True)}
        leaves |= _leaves(value, f"{path}{name}.") if nested else here
    return leaves


def earlier(directory: str | os.PathLike[str]) -> tuple[Spent, ...]:
    """What the run in a folder has spent, and what was spent before it.

    For a run that starts from the released parameters of that one, with other settings:
    ``Mechanism(..., before=earlier(folder))``, in its own folder. A step counts as soon as a
    checkpoint or a row is on disk. All planned steps count if `evaluate` ended the run.

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
    folder, call = pathlib.Path(directory), f"training.earlier({str(directory)!r})"
    run = read_json(folder / "run.json")
    check_format(run.get("mechanism"), call)
    steps = max(released_steps(folder), counted(read_log(folder / "metrics.jsonl")))
    # A key that was supplied stays so in all that follows from the run.
    supplied = run.get("randomness") == "supplied"
    return {"facts": run["mechanism"], "steps": steps, "supplied": supplied}


def forget(directory: str | os.PathLike[str]) -> None:
    """Removes a run from its folder, so that another can start there; other files stay.

    Privacy:
      What the run released stays spent, and no file records it any more.

    Raises:
      Refused: A process is running there.
    """
    folder = pathlib.Path(directory)
    # A name that runs alone have: without it `checkpoints` may be another program's.
    if (folder / "run.json").exists():
        with held(folder):
            _remove(folder)


def _remove(folder: pathlib.Path) -> None:
    for name in ("checkpoints", "tensorboard"):
        # Of a link to a folder, as on another disk, what is in it.
        for path in (folder / name).glob("*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    # The run exists as long as run.json does.
    for name in ("metrics.jsonl", *RELEASED, "run.json"):
        (folder / name).unlink(missing_ok=True)


def released_steps(folder: pathlib.Path) -> int:
    """The last step that counts as released: that has a checkpoint or a row."""
    names = (path.name for path in (folder / "checkpoints").glob("*"))
    steps = [int(name) for name in names if re.fullmatch(r"\d+", name)]
    return max([*steps, *(row["step"] for row in read_log(folder / "metrics.jsonl"))], default=0)


def counted(rows: list[dict[str, Any]]) -> int:
    """How many steps count, if results ever ended the run; 0 if not."""
    return max((row.get("counted", 0) for row in rows), default=0)

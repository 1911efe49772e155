# SPDX-License-Identifier: Apache-2.0
"""The folder of one run: one process at a time, one identity, one log, its checkpoints.

`run.json` holds the identity of the run; a process with another identity is refused. Loss,
optimizer, versions and devices are not part of the identity, because a run that resumes with others
still releases no step twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import shutil
from collections.abc import Mapping
from typing import Any

from dpjax import processes
from dpjax._files import held, line_of_log, opened_for_owner, read_json, read_log, replace
from dpjax.ledger import Refused
from dpjax.mechanism import Spent
from dpjax.mechanism.card import check_format
from dpjax.training.checkpoints import Checkpoints, Damaged, Restored

# The files that `released` writes.
_RELEASED = ("privacy.json", "statement.txt", "board.txt", "params.msgpack")


class Folder:
    """The folder of one run, held until `close`. Only the first process reads and writes files."""

    def __init__(self, directory: str | os.PathLike[str], identity: Mapping[str, Any]) -> None:
        # An absolute path, because `evaluate` may change the working folder.
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
        """Locks the folder until ``stack`` closes, and compares the run in it with this one."""
        # The lock comes first: another process may write the files that are read below.
        stack.enter_context(held(self.path))
        path = self.path / "run.json"
        if path.exists():
            recorded = read_json(path)
            # Another version of dpjax may have written it, in a format that cannot be compared.
            check_format(recorded.get("mechanism"), f"fit(directory={str(self.path)!r})")
            differences = _differences(recorded, self.identity)
            if not differences:
                self.is_resumed = True
                return
            # A run that spent nothing gives way, for example one whose first step did not compile.
            # Queries of a preparation are spent before the first step.
            if released_steps(self.path) or recorded.get("mechanism", {}).get("preparation"):
                raise Refused(
                    f"fit(directory={str(self.path)!r}): another run is there:\n"
                    f"{''.join(differences)}"
                    "Use its settings, or another folder with before=training.earlier(folder)."
                )
            _remove(self.path)
        replace(path, json.dumps(self.identity, indent=2) + "\n")

    def latest(self, like: Any) -> Restored | None:
        """The last checkpoint, if any. Refuses released steps without one: they must not rerun."""
        restored = None
        why = "no checkpoint is as late"
        try:
            restored = self.checkpoints.latest(like)
        except Damaged as damage:
            why = str(damage)
        restored_steps = 0 if restored is None else restored.state.ledger.steps
        steps = processes.from_first(lambda: released_steps(self.path))
        if steps > restored_steps:
            raise Refused(
                f"fit(directory={str(self.path)!r}): {steps} steps ran there, and {why}. Start in "
                "another folder with before=dpjax.training.earlier(folder)."
            )
        return restored

    def rows(self) -> list[dict[str, Any]]:
        """The rows of the log. Removes a last line that a killed process wrote only in part."""

        def read() -> list[dict[str, Any]]:
            rows = read_log(self.log)
            text = "".join(line_of_log(row) for row in rows)
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


def _differences(before: Mapping[str, Any], identity: Mapping[str, Any]) -> list[str]:
    """A line for each value that differs between two identities."""
    there = _leaves(before)
    now = _leaves(identity)
    return [
        f"  {name}: {there.get(name, 'null'):.60} there, {now.get(name, 'null'):.60} now\n"
        for name in {**there, **now}
        if there.get(name) != now.get(name)
    ]


def _leaves(facts: Mapping[str, Any], path: str = "") -> dict[str, str]:
    """The values of nested mappings by path, as JSON text, in which NaN is equal to itself."""
    leaves = {}
    for name, value in facts.items():
        if isinstance(value, Mapping) and value:
            leaves |= _leaves(value, f"{path}{name}.")
        else:
            leaves[path + name] = json.dumps(value, sort_keys=True)
    return leaves


def earlier(directory: str | os.PathLike[str]) -> tuple[Spent, ...]:
    """The cost of the run in a folder, and the costs of the runs before it.

    A run that starts from the released parameters of that run, with other settings and in its own
    folder, takes them as ``Mechanism(..., before=earlier(folder))``. A step counts as soon as a
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
    return Spent.of_run(**spending(directory))


def spending(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """The arguments of `Spent.of_run` for `earlier`, which a process can send to the others."""
    folder = pathlib.Path(directory)
    run = read_json(folder / "run.json")
    check_format(run.get("mechanism"), f"training.earlier({str(directory)!r})")
    steps = max(released_steps(folder), counted(read_log(folder / "metrics.jsonl")))
    # Later runs build on this one, so their statements report its supplied key too.
    supplied = run.get("randomness") == "supplied"
    return {"facts": run["mechanism"], "steps": steps, "supplied": supplied}


def forget(directory: str | os.PathLike[str]) -> None:
    """Removes a run from its folder, so another run can start there; other files stay.

    Privacy:
      The run's privacy cost stays spent, but no file records it any more.

    Raises:
      Refused: A process is running there.
    """
    folder = pathlib.Path(directory)
    # Only runs have this file: without it, `checkpoints` may belong to another program.
    if (folder / "run.json").exists():
        with held(folder):
            _remove(folder)


def _remove(folder: pathlib.Path) -> None:
    """Removes the files of a run, but neither its locks nor files of others."""
    for name in ("checkpoints", "tensorboard"):
        # Only the content is removed: the name may be a link to a folder on another disk.
        for path in (folder / name).glob("*"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
    # `run.json` is removed last, because a run exists as long as its `run.json`.
    for name in ("metrics.jsonl", *_RELEASED, "run.json"):
        (folder / name).unlink(missing_ok=True)


def released_steps(folder: pathlib.Path) -> int:
    """The last step that counts as released, because it has a checkpoint or a row; 0 if none."""
    names = [path.name for path in (folder / "checkpoints").glob("*")]
    saved_steps = [int(name) for name in names if re.fullmatch(r"\d+", name)]
    logged_steps = [row["step"] for row in read_log(folder / "metrics.jsonl")]
    return max(saved_steps + logged_steps, default=0)


def counted(rows: list[dict[str, Any]]) -> int:
    """The number of steps that count if results ended the run; 0 if they did not."""
    return max((row.get("counted", 0) for row in rows), default=0)

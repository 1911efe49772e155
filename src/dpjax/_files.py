# SPDX-License-Identifier: Apache-2.0
"""Files of a folder that several processes may read while one of them writes.

A file is replaced as a whole: a reader, also after a kill, finds the new content or the old one.
Only its owner can read it, from its first byte on, unless it is public.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import pathlib
import secrets
from collections.abc import Iterator, Mapping
from typing import IO, Any

import numpy as np

from dpjax.checks import Refused

FIELDS = frozenset(
    ["step", "counted", "epsilon", "delta", "method", "estimate", "bound", "stop", "private"]
)
"""The numbers that `fit` itself writes into a row of a log; `evaluate` returns the others."""


def replace(path: pathlib.Path, content: str | bytes, *, public: bool = False) -> None:
    """Replaces a file atomically: it holds the whole new content, or the old one."""
    if isinstance(content, str):
        content = content.encode()
    with replacing(path, public=public) as file:
        file.write(content)


def opened_for_owner(path: str, flags: int) -> int:
    """The ``opener`` of `open` for a file that only its owner can read."""
    return os.open(path, flags, 0o600)


@contextlib.contextmanager
def replacing(path: pathlib.Path, *, public: bool = False) -> Iterator[IO[bytes]]:
    """A new file to write and read; it replaces ``path`` when the block ends without an error."""
    # The temporary file is in the same folder, because a rename is atomic only within one file
    # system. Its name is random, because another process may write too.
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    permissions = 0o666 if public else 0o600
    handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, permissions)
    try:
        with os.fdopen(handle, "w+b") as file:
            yield file
            file.flush()
            # Synced before the rename, so the new name is not empty after a power failure.
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def lock(path: pathlib.Path) -> int | None:
    """The handle of a lock, or None if another process holds it; the file names its process."""
    # The system frees a lock of flock when the last process with the handle ends.
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    os.ftruncate(handle, 0)
    os.pwrite(handle, str(os.getpid()).encode(), 0)
    return handle


@contextlib.contextmanager
def turn(path: pathlib.Path) -> Iterator[None]:
    """Waits for a lock file, and holds it during the block."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def held(directory: str | os.PathLike[str], name: str = "lock") -> Iterator[None]:
    """Holds a run's folder, which is made if necessary, by the lock file ``name``.

    When a process is killed, the operating system frees its lock.
    """
    path = pathlib.Path(directory) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = lock(path)
    if handle is None:
        raise Refused(
            f"fit(directory={str(directory)!r}): process {path.read_text() or 'unknown'} is "
            "running there. Choose another folder."
        )
    try:
        yield
    finally:
        os.close(handle)


def strict(value: Any) -> Any:
    """A value as strict JSON holds it: tuples are lists, inf and nan are words."""
    if isinstance(value, Mapping):
        return {name: strict(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [strict(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def read_arrays(path: pathlib.Path, call: str) -> dict[str, np.ndarray]:
    """All arrays of an ``.npz`` by name; errors name the file and its reader, ``call``."""
    try:
        # Pickled arrays are refused, because they can run code when they are read.
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise
    except Exception as error:  # zipfile, zlib and NumPy raise many kinds
        message = f"{call}: {path} is not a whole .npz file of plain arrays ({error})."
        raise ValueError(message) from error


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The JSON object in a file."""
    content = path.read_bytes()
    fault = "no object"
    try:
        value = json.loads(content)
        if isinstance(value, dict):
            return value
    except ValueError as error:  # also for bytes that are not UTF-8
        fault = str(error)
    raise ValueError(f"{path}: expected a JSON object ({fault}). Restore or remove the file.")


def line_of_log(row: Mapping[str, Any]) -> str:
    """A row as JSON. JSON has no infinity, so an infinite epsilon becomes null."""
    if math.isinf(row.get("epsilon", 0)):
        row = {**row, "epsilon": None}
    return json.dumps(row, allow_nan=False) + "\n"


def read_log(path: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of a run's log, sorted by step, without a last line that is cut.

    If several rows have one step, as after a run continued from a checkpoint, the last one counts.
    """
    lines = path.read_bytes().splitlines() if path.exists() else []
    rows = {}
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            rows[row["step"]] = row
        except (ValueError, KeyError, TypeError) as error:
            # JSON that was cut is a ValueError. A whole line without a step is another error.
            if isinstance(error, ValueError) and number == len(lines):
                break  # the process was killed while it wrote this line
            raise ValueError(
                f"{path}: line {number} of {len(lines)} is not a JSON object with a step. "
                "Restore the line or remove it."
            ) from error
        if row.get("epsilon", 0) is None:  # as `line_of_log` writes infinity
            row["epsilon"] = math.inf
    return [rows[step] for step in sorted(rows)]

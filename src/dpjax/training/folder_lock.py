# SPDX-License-Identifier: Apache-2.0
"""The lock of a run's folder: one process at a time, until its last handle is closed.

Two processes in one folder would overwrite each other's checkpoints, and release steps twice. The
system frees the lock of a process that is killed.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator

from dpjax._files import lock
from dpjax.ledger import Refused

_held: dict[pathlib.Path, int] = {}  # locks of this process, by `hold`
_handles: set[int] = set()  # of all locks of this process


@contextlib.contextmanager
def hold(directory: str | os.PathLike[str]) -> Iterator[None]:
    """Locks a folder for the work before and after `fit`, which joins this lock.

    Privacy:
      Of two processes that query private data before their first steps, one alone would be counted.

    Raises:
      Refused: Another process holds the folder.
    """
    handle, folder = locked(pathlib.Path(directory)), pathlib.Path(directory).resolve()
    _held[folder] = handle
    try:
        yield
    finally:
        del _held[folder]
        close(handle)


def locked(folder: pathlib.Path) -> int:
    """Takes the lock of a run's folder, or joins the lock of `hold`."""
    held = _held.get(folder.resolve())
    # The system frees the lock with its last handle.
    handle = lock(folder / "lock") if held is None else os.dup(held)
    if handle is None:
        raise Refused(
            f"fit(directory={str(folder)!r}): {_holder(folder / 'lock')} Two processes in one "
            "folder would overwrite each other's checkpoints. Wait until it ends, or choose "
            "another folder."
        )
    _handles.add(handle)
    return handle


def is_lock(handle: int, folder: pathlib.Path) -> bool:
    """Whether a handle is that of the lock that is in a folder now."""
    try:
        return os.path.samestat(os.fstat(handle), (folder / "lock").stat())
    except FileNotFoundError:
        return False


def _holder(path: pathlib.Path) -> str:
    """Says which process holds a lock."""
    number = path.read_text()
    try:
        os.kill(int(number), 0)  # sends nothing
    except ProcessLookupError:
        return (
            f"process {number} was running there and is not on this machine. Either it runs on "
            "another one, or it was killed and a process that it had started still holds the "
            f"folder: `fuser {path}` names it."
        )
    except (OSError, ValueError, OverflowError):  # another user's, or it has not written yet
        pass
    return f"process {number or 'unknown'} is running there."


def close(handle: int) -> None:
    """Closes a handle of a lock, unless this process is a forked child, which closed it already."""
    if handle in _handles:
        _handles.remove(handle)
        os.close(handle)


def _close_in_child() -> None:
    """A worker that outlives a killed run would hold its folder."""
    for handle in _handles.copy():
        close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)

# SPDX-License-Identifier: Apache-2.0
"""Runs commands, some at once, so that they can be stopped and gone on with.

Each command has a folder, in which `output.txt` has what it printed, and `finished` is made when
it ends well: then it is not run again.  A lock lies there that the command itself holds as long
as it lives.  So if this process is killed, and its children go on, the next one waits for them
instead of running beside them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from dpjax.training.signals import Stop

FINISHED = "finished"


class Ended(NamedTuple):
    """How a command ended: with a status of its own, or because it was asked to."""

    folder: pathlib.Path
    status: int
    seconds: float
    asked: bool


def locked(path: pathlib.Path) -> int | None:
    """The handle of a lock, or None if somebody has it; it is free when all holders are gone."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle


def begin(command: Sequence[str], folder: pathlib.Path) -> subprocess.Popen[bytes] | None:
    """Starts a command in a session of its own, unless it is still running from before."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = locked(folder / "sweep.lock")
    if handle is None:
        return None
    try:
        with (folder / "output.txt").open("ab") as output:
            # Its own session: Ctrl-C comes to us alone, and is passed on once.
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[handle],
                # Several on one accelerator: none takes all of its memory beforehand.
                env={"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ},
            )
    finally:
        os.close(handle)


def run_all(
    commands: Mapping[pathlib.Path, Sequence[str]], jobs: int, stop: Stop
) -> Iterator[Ended]:
    """Runs commands, each in its folder, so many at once; yields them as they end.

    When a signal comes no more are started, and those that run are asked to end.
    """
    waiting, running, asked = deque(commands), {}, set[pathlib.Path]()
    try:
        while running or (waiting and not stop.asked):
            for _ in range(0 if stop.asked else len(waiting)):
                if len(running) < jobs:
                    _start(waiting, running, commands)
            for folder in running if stop.asked else ():
                if folder not in asked:
                    running[folder][0].terminate()
                    asked.add(folder)
            for folder, (child, began) in list(running.items()):
                if child.poll() is not None:
                    del running[folder]
                    if child.returncode == 0:
                        (folder / FINISHED).touch()
                    yield Ended(folder, child.returncode, time.time() - began, folder in asked)
            time.sleep(0.05)
    finally:
        for child, _ in running.values():  # a second signal, or an error here: no more patience
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            child.wait()


def _start(
    waiting: deque[pathlib.Path],
    running: dict[pathlib.Path, tuple[subprocess.Popen[bytes], float]],
    commands: Mapping[pathlib.Path, Sequence[str]],
) -> None:
    """Starts the first that waits; one that still runs from before goes to the end."""
    folder = waiting.popleft()
    child = begin(commands[folder], folder)
    if child is None:
        waiting.append(folder)
    else:
        running[folder] = (child, time.time())


def last_line(folder: pathlib.Path) -> str:
    lines = (folder / "output.txt").read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "nothing printed")

# SPDX-License-Identifier: Apache-2.0
"""Runs commands in parallel processes that can be stopped, resumed and killed safely.

Each command has a folder with its output in `output.txt`; a command that succeeds leaves the file
`finished` there and does not run again.  The child process holds a lock in the folder while it
lives.  If this process is killed while children run, the next process waits for their locks.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from dpjax._files import lock, opened_for_owner
from dpjax.training.signals import Stop

FINISHED = "finished"


class Ended(NamedTuple):
    """The end of a command; ``asked`` says that this process terminated it."""

    folder: pathlib.Path
    status: int
    seconds: float
    asked: bool


def begin(command: Sequence[str], folder: pathlib.Path) -> subprocess.Popen[bytes] | None:
    """Starts a command in its own session, or returns None if its folder is locked."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = lock(folder / "sweep.lock")
    if handle is None:
        return None
    try:
        # Closed to others, as metrics.jsonl is: it holds private losses too.
        with open(folder / "output.txt", "ab", opener=opened_for_owner) as output:
            # In its own session Ctrl-C reaches only this process, which passes it on once.
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[handle],
                # Several children may share an accelerator: none may preallocate all its memory.
                env={"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ},
            )
    finally:
        os.close(handle)


def run_all(
    commands: Mapping[pathlib.Path, Sequence[str]], jobs: int, stop: Stop
) -> Iterator[Ended]:
    """Runs commands, each in its folder, at most ``jobs`` in parallel; yields each end.

    After a signal no command starts, and running commands are terminated.
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
        for child, _ in running.values():  # after a second signal or an error
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            child.wait()


def _start(
    waiting: deque[pathlib.Path],
    running: dict[pathlib.Path, tuple[subprocess.Popen[bytes], float]],
    commands: Mapping[pathlib.Path, Sequence[str]],
) -> None:
    """Starts the first waiting command, or moves it to the end if its folder is locked."""
    folder = waiting.popleft()
    child = begin(commands[folder], folder)
    if child is None:
        waiting.append(folder)
    else:
        running[folder] = (child, time.time())


def last_line(folder: pathlib.Path) -> str:
    """The last line that the command in a folder printed."""
    text = (folder / "output.txt").read_text(errors="replace")
    # A refusal of flags ends with a hint at the help, and an error of JAX with one at its frames.
    hints = ("For all flags:", "JAX has removed its internal frames", "-" * 20)
    lines = (line.strip() for line in text.split("\n"))
    said = [line for line in lines if line and not any(hint in line for hint in hints)]
    return said[-1] if said else "nothing printed"

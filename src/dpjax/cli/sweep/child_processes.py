# SPDX-License-Identifier: Apache-2.0
"""Runs commands in parallel child processes, each with a folder; no child outlives this one."""

from __future__ import annotations

import os
import pathlib
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence

from dpjax._files import opened_for_owner

FINISHED = "finished"


def begin(command: Sequence[str], folder: pathlib.Path) -> subprocess.Popen[bytes]:
    """Starts a command, which writes into its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    # Closed to others, as metrics.jsonl is: it holds private losses too.
    with open(folder / "output.txt", "ab", opener=opened_for_owner) as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # In its own session Ctrl-C reaches only this process, which passes it on once.
            start_new_session=True,
            # Several children may share an accelerator: none may preallocate all its memory.
            env={"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ},
        )


def run_all(
    commands: Mapping[pathlib.Path, Sequence[str]], jobs: int
) -> Iterator[tuple[pathlib.Path, int, float]]:
    """Runs the command of each folder, at most ``jobs`` in parallel.

    Yields ``(folder, exit status, seconds)`` when a command ends. A folder whose command succeeded
    receives the file ``finished``, by which a search knows that it need not run again.
    """
    waiting = list(commands)
    # The child of each folder, and the time at which it began.
    running = dict[pathlib.Path, tuple[subprocess.Popen[bytes], float]]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                folder = waiting.pop(0)
                running[folder] = (begin(commands[folder], folder), time.time())
            for folder, (child, began) in list(running.items()):
                if child.poll() is not None:
                    del running[folder]
                    if child.returncode == 0:
                        (folder / FINISHED).touch()
                    yield folder, child.returncode, time.time() - began
            time.sleep(0.05)  # between two looks at the children, in seconds
    finally:
        # Children still run here after Ctrl-C or an error. All are told to stop, which saves their
        # state, before this process waits for the first of them.
        for child, _ in running.values():
            child.terminate()
        for child, _ in running.values():
            child.wait()


def last_line(folder: pathlib.Path) -> str:
    """The last line that the command in a folder printed, without its hint at the help."""
    last = ""
    for line in (folder / "output.txt").read_text(errors="replace").split("\n"):
        if line and not line.startswith("For all flags:"):
            last = line
    return last

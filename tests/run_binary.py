# SPDX-License-Identifier: Apache-2.0
"""The binaries as users run them, but for the seconds in which they import what they need.

Each runs in a process of its own, which is forked from a server that has imported everything and
computed nothing (`killable_runs.server`).
"""

import contextlib
import importlib
import os
import pathlib
import runpy
import sys
import tempfile
from typing import NamedTuple

import killable_runs

ROOT = pathlib.Path(__file__).parent.parent
EXPERIMENTS = ROOT / "experiments"


class Outcome(NamedTuple):
    """What a process wrote."""

    stdout: str
    stderr: str


def run(binary, *flags, status=0):
    """Runs ``dpjax`` or ``python -m binary``, which must end with this status."""
    (outcome,) = run_together(binary, [flags], status=status)
    return outcome


def run_together(binary, commands, status=0):
    """Runs a binary in several processes, one for each list of flags; all end with this status."""
    with contextlib.ExitStack() as stack:
        folders = [stack.enter_context(tempfile.TemporaryDirectory()) for _ in commands]
        processes = [
            killable_runs.server().Process(target=_run, args=([binary, *map(str, flags)], folder))
            for flags, folder in zip(commands, folders, strict=True)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        texts = [[pathlib.Path(at, name).read_text() for name in Outcome._fields] for at in folders]
    outcomes = [Outcome(*text) for text in texts]
    for process, (stdout, stderr) in zip(processes, outcomes, strict=True):
        assert process.exitcode == status, stdout[-2000:] + stderr[-2000:]
    return outcomes


def _run(command, folder):
    for stream, name in enumerate(Outcome._fields, 1):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT), stream)
    sys.argv, sys.path[0] = command, str(ROOT)
    if command[0] == "dpjax":  # the console command
        importlib.import_module("dpjax.cli").main(command[1:])
    else:
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)

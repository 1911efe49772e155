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
from absl import logging
from absl.flags import FLAGS

EXPERIMENTS = pathlib.Path(__file__).parent.parent / "experiments"


class Outcome(NamedTuple):
    """What a process wrote."""

    stdout: str
    stderr: str


def run(binary, *flags, status=0):
    """Runs a binary, which must end with this status."""
    (outcome,) = run_together(binary, [flags], status=status)
    return outcome


def run_together(binary, each, status=0):
    """Runs a binary in several processes, one for each list of flags; all end with this status."""
    with contextlib.ExitStack() as stack:
        folders = [stack.enter_context(tempfile.TemporaryDirectory()) for _ in each]
        processes = [
            killable_runs.server().Process(
                target=_run, args=([str(EXPERIMENTS / binary), *map(str, flags)], folder)
            )
            for flags, folder in zip(each, folders, strict=True)
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


@contextlib.contextmanager
def importing():
    """Imports binaries, and takes their flags away again: two of them may have one of a name.

    Their `main` may change the level of the log, which other tests read.
    """
    folders, before = [str(EXPERIMENTS), str(EXPERIMENTS / "papers")], set(sys.modules)
    logger, verbosity = logging.get_absl_logger(), logging.get_verbosity()
    level = logger.level  # which need not be that of the verbosity before it is set
    sys.path[:0] = folders
    try:
        yield importlib.import_module
    finally:
        logging.set_verbosity(verbosity)
        logger.setLevel(level)
        del sys.path[: len(folders)]
        for name in set(sys.modules) - before:
            if str(EXPERIMENTS) in str(getattr(sys.modules[name], "__file__", "")):
                flags = FLAGS.get_flags_for_module(sys.modules[name])
                FLAGS.remove_flag_values([flag.name for flag in flags])
                parent, _, child = name.rpartition(".")
                if parent in sys.modules:  # `from parent import child` would find it there
                    vars(sys.modules[parent]).pop(child, None)
                del sys.modules[name]


def _run(command, folder):
    for stream, name in enumerate(Outcome._fields, 1):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT), stream)
    sys.argv, sys.path[0] = command, os.path.dirname(command[0])
    if command[0].endswith("/dpjax"):  # the console command
        importlib.import_module("dpjax.cli").main(command[1:])
    else:
        runpy.run_path(command[0], run_name="__main__")

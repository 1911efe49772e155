# SPDX-License-Identifier: Apache-2.0
"""The console command: `dpjax train --flag=value ...`, or `python -m dpjax train ...`.

`COMMANDS` lists the subcommands.  A subcommand is a package with `FLAGS`, a set of absl flags
of its own, and `WORDS`, what it takes beside flags; its module `job` has `run(given, argv)`.
The package imports neither JAX nor another room of dpjax, and `job` is imported after the flags
have been read: a mistake in them is answered immediately.  So a new subcommand is a package and a
row.  `verify` is a module outside of this package, because it imports nothing of dpjax.
"""

from __future__ import annotations

import copy
import difflib
import importlib
import inspect
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

from absl import app, flags, logging

import dpjax
from dpjax.cli.flag_checks import cure, only_flags
from dpjax.cli.flag_groups import described

__all__ = ["COMMANDS", "main", "run_command"]

COMMANDS = {
    "train": "train a classifier with differential privacy and report on it",
    "verify": "recompute the epsilon of a run from its privacy card",
    "report": "draw the figures and the page of a run's folder",
    "compare": "draw the accuracy that runs reached for their epsilon on one page",
    "sweep": "train with many settings, and compute the privacy cost of the search",
    "audit": "measure lower bounds on the epsilon of a run, beside its claim",
}
_HELP = {"-h", "--help", "-help", "-?"}
_MORE = "`dpjax SUBCOMMAND --help` lists the flags; `dpjax --version` prints the version."
_RESUMING = {"train", "sweep"}  # the others keep nothing before they end


def main(words: Sequence[str] | None = None) -> None:
    """Runs the subcommand that the first word names; this is the entry point of `dpjax`.

    A reader that closes the pipe, as in ``dpjax train | head``, ends the process quietly.
    """
    if sys.stdout is None:  # closed, as daemons have it
        sys.stdout = io.StringIO()
    # A terminal that knows ASCII alone shows a question mark in place of a letter of a name.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            _run_named(words)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)  # as a shell reports a program that a closed pipe ended


def _run_named(words: Sequence[str] | None) -> None:
    name, *rest = (sys.argv[1:] if words is None else list(words)) or ["--help"]
    if name in _HELP:
        listed = "\n".join(f"  {name:<8} {purpose}" for name, purpose in COMMANDS.items())
        print(f"usage: dpjax SUBCOMMAND [--flag=value ...]\n\n{listed}\n\n{_MORE}")
    elif name == "--version":
        print(f"dpjax {dpjax.__version__}")
    elif name == "verify":
        sys.exit(importlib.import_module("dpjax.verify").main(rest))
    elif name in COMMANDS:
        sys.argv = [f"dpjax {name}", *rest]
        run_command(name)
    else:
        near = "".join(f"{word} " for word in difflib.get_close_matches(name, COMMANDS, 1))
        sys.exit(
            f"dpjax {name}: there is no such subcommand. Expected one of {', '.join(COMMANDS)}; "
            f"flags follow the subcommand. Usually the word is misspelt: dpjax {near}--help"
        )


def run_command(name: str) -> None:
    """Runs one subcommand with the flags in `sys.argv`, then leaves the process.

    A flag that is unknown, out of range or in conflict with another ends the process with
    status 1 and a message, and Ctrl-C with status 130 and one sentence.
    """
    command = importlib.import_module(f"dpjax.cli.{name}")
    program, *words = sys.argv
    if _HELP & set(words):
        print(f"{inspect.getdoc(command)}\n\n{described(command.FLAGS)}")
        return

    def job(_: list[str]) -> None:
        given = copy.deepcopy(command.FLAGS)  # parsing changes the copy alone
        logging.set_verbosity(logging.WARNING)  # JAX reports the accelerators it did not find
        logging.get_absl_handler().addFilter(_not_of_orbax)
        try:
            argv = given([program, *words])
            if not command.WORDS:
                only_flags(argv)
            importlib.import_module(f"dpjax.cli.{name}.job").run(given, argv)
        except (flags.Error, app.UsageError) as error:
            sys.exit(f"{error}{cure(error, command.FLAGS)}\nFor all flags: {program} --help")
        except KeyboardInterrupt as stopped:
            # A loop that stopped after a step says what it saved; Ctrl-C elsewhere has no words.
            said = str(stopped) or f"interrupted; the same command {_next(name)}"
            print(f"\n{program}: {said}", file=sys.stderr)
            sys.exit(130)  # as a shell reports a program that Ctrl-C ended

    app.run(job, argv=[program])


def _next(name: str) -> str:
    if name in _RESUMING:
        return "resumes from what was saved, if anything was."
    return "begins again."


def _not_of_orbax(record: Any) -> bool:
    """Drops Orbax's remarks on its speed; `dpjax.checkpoints` reports what went wrong."""
    return record.levelname in ("ERROR", "CRITICAL") or "orbax" not in record.pathname

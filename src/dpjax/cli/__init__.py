# SPDX-License-Identifier: Apache-2.0
"""The console command: `dpjax train --flag=value ...`, or `python -m dpjax train ...`.

`flag_sets/NAME.py` declares a subcommand, and imports no JAX: `FLAGS`, the help in its docstring,
and `WORDS`, the names of the arguments that are no flags, empty if it takes none. `cli/NAME` has
`run(given, argv)`, with the parsed flags and ``[program, *words]``; it is imported after the flags
were read, so a mistake in them ends immediately.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import os
import sys
from collections.abc import Sequence
from logging import Formatter
from typing import Any

from absl import app, flags, logging

import dpjax
from dpjax.cli.flag_sets import described

__all__ = ["COMMANDS", "main", "run_command"]

COMMANDS = {
    "train": "train a model with differential privacy and report on it",
    "predict": "predict new rows with the released model of a run",
    "plan": "plan a run without a search, and show what more time gains",
    "columns": "draft the declarations of a table's columns",
    "verify": "recompute the epsilon of a run from its privacy card",
    "card": "write the privacy card of a run as a model card, or for a registry",
    "export": "write the released model of a run as a file that needs no dpjax",
    "report": "draw the figures and the page of a run's folder",
    "compare": "draw the accuracy that runs reached for their epsilon on one page",
    "sweep": "train with many settings, and compute the privacy cost of the search",
    "audit": "measure lower bounds on the epsilon of a run, beside its claim",
}
# Names that users type for other flags, and the flags that they mean.
_MEANT = {"epsilon": "target_epsilon", "lr": "learning_rate"}
_HELP = ("-h", "--help", "-help", "-?")
_MORE = "`dpjax SUBCOMMAND --help` lists the flags; `dpjax --version` prints the version."


def main(words: Sequence[str] | None = None) -> None:
    """Runs the subcommand that the first word names; this is the entry point of `dpjax`."""
    try:
        _run_named(words)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader closed the pipe, as in ``dpjax train --help | head``
        # Python flushes once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)  # as a shell reports a program that a closed pipe ended


def _run_named(words: Sequence[str] | None) -> None:
    """Runs the subcommand ``words[0]`` with the other words; by default those in `sys.argv`."""
    typed = sys.argv[1:] if words is None else words
    name, *rest = typed or ["--help"]
    if name in _HELP:
        listed = "\n".join(f"  {name:<8} {purpose}" for name, purpose in COMMANDS.items())
        print(f"usage: dpjax SUBCOMMAND [--flag=value ...]\n\n{listed}\n\n{_MORE}")
    elif name == "--version":
        print(f"dpjax {dpjax.__version__}")
    elif name == "verify":  # a program of its own, which reads its own flags
        sys.exit(importlib.import_module("dpjax.verify").main(rest))
    elif name in COMMANDS:
        # `run_command` reads the flags from here, and config.json records the command.
        sys.argv = [f"dpjax {name}", *rest]
        run_command(name)
    else:
        sys.exit(f"dpjax {name}: expected one of {', '.join(COMMANDS)}. Flags follow that word.")


def run_command(name: str) -> None:
    """Runs one subcommand with the flags in `sys.argv`, or prints its help if they ask for it.

    After a run `absl.app.run` ends the process.
    """
    declared = importlib.import_module(f"dpjax.cli.flag_sets.{name}")
    program, *words = sys.argv
    if any(word in _HELP for word in words):
        print(f"{inspect.getdoc(declared)}\n\n{described(declared.FLAGS) or 'It has no flags.'}")
        return

    def parse_and_run(_: list[str]) -> None:
        """Runs the subcommand; a mistake in its flags, or Ctrl-C, exits with a short message.

        absl passes its own ``argv``, which is only the program, see below.
        """
        given = copy.deepcopy(declared.FLAGS)  # parsing changes only the copy
        # JAX reports the accelerators that it did not find, at a lower level.
        logging.set_verbosity(logging.WARNING)
        _print_plainly()
        try:
            argv = given([program, *words])  # the program, and the arguments without flags
            # An argument without dashes may be a mistyped flag. Otherwise
            # `train target_epsilon=0.5` runs at the default epsilon.
            if argv[1:] and not declared.WORDS:
                extra = " ".join(argv[1:])
                raise app.UsageError(f"{extra}: expected flags alone, which begin with two dashes.")
            importlib.import_module(f"dpjax.cli.{name}").run(given, argv)
        except flags.UnrecognizedFlagError as error:
            meant = _MEANT.get(error.flagname)
            hint = f"Did you mean --{meant}?" if meant in declared.FLAGS else ""
            sys.exit(f"{error} {hint}\nFor all flags: {program} --help")
        except (flags.Error, app.UsageError) as error:
            sys.exit(f"{error}\nFor all flags: {program} --help")
        except KeyboardInterrupt as stopped:
            # The message of a loop that stopped after a step names what it saved.
            print(f"\n{program}: {str(stopped) or 'interrupted.'}", file=sys.stderr)
            sys.exit(130)  # as a shell reports a program that Ctrl-C ended

    # absl sets up its log, calls the function, and ends the process. It gets no flags, because
    # `given` parses them.
    app.run(parse_and_run, argv=[program])


def _print_plainly() -> None:
    """Makes absl's log print each message only once, as ``Warning: ...``.

    absl's own format has the time, the process and the file in front of each message. Messages of
    Orbax below the level of an error are dropped.
    """
    handler = logging.get_absl_handler()
    printed = set[str]()

    def is_new(record: Any) -> bool:
        """A filter of `logging`, which drops a record if the result is False."""
        record.title = record.levelname.capitalize()  # for the format below
        message = record.getMessage()
        is_repeated = message in printed
        printed.add(message)
        return not is_repeated

    handler.addFilter(_not_of_orbax)
    handler.addFilter(is_new)
    handler.setFormatter(Formatter("%(title)s: %(message)s"))


def _not_of_orbax(record: Any) -> bool:
    """Drops Orbax's remarks, which are on its speed; `dpjax.training` reports its failures."""
    return record.levelname in ("ERROR", "CRITICAL") or "orbax" not in record.pathname

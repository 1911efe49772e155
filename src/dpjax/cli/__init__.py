# SPDX-License-Identifier: Apache-2.0
"""The console command: `dpjax train --flag=value ...`, or `python -m dpjax train ...`.

`COMMANDS` lists the subcommands.  A subcommand is a package with `FLAGS`, a set of absl flags
of its own, and `run(given)`, which takes a parsed copy of them.  It is imported when it is
used, so a new subcommand is a package and a row.  `verify` is a module outside of this package,
because it imports nothing of dpjax.
"""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import inspect
import sys
from collections.abc import Sequence

from absl import app, flags

from dpjax.cli.flag_checks import only_flags

__all__ = ["COMMANDS", "main", "run_command"]

COMMANDS = {
    "train": "train a classifier with differential privacy and report on it",
    "verify": "recompute the epsilon of a run from its privacy card",
}
_HELP = {"-h", "--help", "-help", "-?"}
_MORE = "`dpjax SUBCOMMAND --help` lists the flags; `dpjax --version` prints the version."


def main(words: Sequence[str] | None = None) -> None:
    """Runs the subcommand that the first word names; this is the entry point of `dpjax`."""
    name, *rest = (sys.argv[1:] if words is None else list(words)) or ["--help"]
    if name in _HELP:
        listed = "\n".join(f"  {name:<8} {purpose}" for name, purpose in COMMANDS.items())
        print(f"usage: dpjax SUBCOMMAND [--flag=value ...]\n\n{listed}\n\n{_MORE}")
    elif name == "--version":
        print(f"dpjax {importlib.metadata.version('dpjax')}")
    elif name == "verify":
        sys.exit(importlib.import_module("dpjax.verify").main(rest))
    elif name in COMMANDS:
        sys.argv = [f"dpjax {name}", *rest]
        run_command(name)
    else:
        sys.exit(
            f"dpjax {name}: there is no such subcommand. Expected one of {', '.join(COMMANDS)}; "
            "flags follow the subcommand, as in dpjax train --out=runs/demo."
        )


def run_command(name: str) -> None:
    """Runs one subcommand with the flags in `sys.argv`, then leaves the process.

    A flag that is unknown, out of range or in conflict with another ends the process with
    status 1 and a message.
    """
    # Imported when it is needed: `dpjax --help` answers before JAX is loaded.
    command = importlib.import_module(f"dpjax.cli.{name}")
    program, *words = sys.argv
    if _HELP & set(words):
        # absl's own help would list the flags of every imported library too.
        print(f"{inspect.getdoc(command)}\n\nFlags:\n{command.FLAGS.get_help()}")
        return

    def job(_: list[str]) -> None:
        given = copy.deepcopy(command.FLAGS)  # parsing changes the copy alone
        try:
            only_flags(given([program, *words]))
            command.run(given)
        except (flags.Error, app.UsageError) as error:
            sys.exit(f"{error}\nFor all flags: {program} --help")

    app.run(job, argv=[program])

# SPDX-License-Identifier: Apache-2.0
"""What can be typed: a module for each subcommand, with its flags and its help.

`Group` defines flags, and `described` lists them for `--help`.  Each subcommand has a set of flags
of its own rather than absl's process-wide one, so that an import defines no flag for another
program, and tests parse the flags several times.  Nothing in this package imports JAX.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from absl import flags

__all__ = ["LARGEST_SEED", "Group", "described"]

LARGEST_SEED = 2**32 - 1  # of a larger seed JAX keeps the last 32 bits


class _Path(flags.ArgumentParser[str]):
    """A path, with the home folder for ``~``: shells leave it in --out=~/runs."""

    syntactic_help = "a path"

    def parse(self, argument: str) -> str:
        return os.path.expanduser(argument)

    def flag_type(self) -> str:
        return "path"


class Group(NamedTuple):
    """Defines flags in a set, under a title."""

    values: flags.FlagValues
    title: str

    @property
    def _where(self) -> dict[str, Any]:
        # absl groups flags by the module that defines them; here a group has that place.
        return {"flag_values": self.values, "module_name": self.title}

    def text(self, name: str, default: str | None, words: str) -> None:
        """A flag with a text."""
        flags.DEFINE_string(name, default, words, **self._where)

    def named(self, name: str, default: str, valid: Callable[[str], bool], *words: str) -> None:
        """A flag with a name that ``valid`` knows: the help, then what is expected."""
        self.path(name, default, "".join(words))
        flags.register_validator(name, valid, f"expected {words[-1]}", self.values)

    def path(self, name: str, default: str | None, words: str) -> None:
        """A flag with a file or folder, which may begin with ``~``."""
        plain = flags.ArgumentSerializer()
        flags.DEFINE(_Path(), name, default, words, serializer=plain, **self._where)

    def choice(self, name: str, default: str, values: Sequence[str], words: str) -> None:
        """A flag with one of several values."""
        flags.DEFINE_enum(name, default, values, words, **self._where)

    def yes_no(self, name: str, default: bool, words: str) -> None:
        """A flag that is on (`--name`) or off (`--noname`)."""
        flags.DEFINE_bool(name, default, words, **self._where)

    def whole(self, name: str, default: int | None, words: str, *limits: Any) -> None:
        """A flag with a whole number, in ``limits``: the least, and the largest."""
        flags.DEFINE_integer(name, default, words, *limits, **self._where)

    def number(self, name: str, default: float | None, words: str, *limits: Any) -> None:
        """A flag with a number, in ``limits``: the least, and the largest."""
        flags.DEFINE_float(name, default, words, *limits, **self._where)

    def several(self, name: str, default: Sequence[str], words: str) -> None:
        """A flag with values separated by commas."""
        flags.DEFINE_list(name, list(default), words, **self._where)


def described(values: flags.FlagValues) -> str:
    """All groups with their flags, in the order of their definitions."""
    # absl's own help is alphabetical, and lists the flags of imported libraries too.
    return "\n\n".join(
        "\n".join([f"{title}:", *map(_described, members)])
        for title, members in values.flags_by_module_dict().items()
    )


def _described(flag: flags.Flag[Any]) -> str:
    name = f"--[no]{flag.name}" if flag.boolean else f"--{flag.name}"
    default = "" if flag.default is None else f" (default: {flag.default_as_str})"
    words = textwrap.wrap(f"{flag.help}{default}", 74)
    return "\n".join([f"  {name}", *(f"      {line}" for line in words)])

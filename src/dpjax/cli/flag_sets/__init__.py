# SPDX-License-Identifier: Apache-2.0
"""The flags and the help of each subcommand, in a module of its name.

Each subcommand has a set of flags of its own rather than absl's process-wide one, so an import
defines no flag for another program.  Nothing in this package imports JAX.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable
from functools import partial
from typing import Any

from absl import flags

__all__ = ["LARGEST_SEED", "Group", "described"]

LARGEST_SEED = 2**32 - 1  # JAX drops all bits but the last 32


class _Path(flags.ArgumentParser[str]):
    """A path, with the home folder for ``~``: shells leave it in --out=~/runs."""

    def parse(self, argument: str) -> str:
        return os.path.expanduser(argument)


class Group:
    """Defines flags in a set, under a title."""

    def __init__(self, values: flags.FlagValues, title: str) -> None:
        # absl groups flags by the module that defines them; here a group has that place.
        where = self._where = {"flag_values": values, "module_name": title}
        self.text = partial(flags.DEFINE_string, **where)
        self.choice = partial(flags.DEFINE_enum, **where)
        self.yes_no = partial(flags.DEFINE_bool, **where)
        self.whole = partial(flags.DEFINE_integer, **where)
        self.number = partial(flags.DEFINE_float, **where)
        self.several = partial(flags.DEFINE_list, **where)

    def path(self, name: str, default: str | None, words: str) -> None:
        """A flag with a file or folder, which may begin with ``~``."""
        plain = flags.ArgumentSerializer()
        flags.DEFINE(_Path(), name, default, words, serializer=plain, **self._where)

    def named(
        self, name: str, default: str | None, valid: Callable[[Any], bool], *words: str
    ) -> None:
        """A flag with a name that ``valid`` knows; ``words`` are the help, and the valid names."""
        self.path(name, default, "".join(words))
        values = self._where["flag_values"]
        flags.register_validator(name, valid, f"expected {words[-1]}", values)


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

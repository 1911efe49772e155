# SPDX-License-Identifier: Apache-2.0
"""The mechanisms of all runs of `dpjax train` that a search could draw, drawn or not.

The best of a random number of runs pays for the most expensive setting.  No list says which flags
change a cost: momentum does for some correlated noise, and not otherwise.  So each mechanism is
built from its flags, and `Recorded` notes which flags were read.  Settings that differ in other
flags alone share a mechanism.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from absl import app, flags

from dpjax.cli.sweep import search_space
from dpjax.cli.train import build, inputs
from dpjax.cli.train.job import load
from dpjax.mechanism import Mechanism

Settings = dict[str, str]

# Noise is in units of the bound, so a finite bound changes no event. Ends of ranges are finite.
_UNIT = "bound"


class Recorded:
    """Parsed flags that note the names of the flags that are read; they have no other member."""

    def __init__(self, given: flags.FlagValues) -> None:
        self._given, self.names_read = given, set[str]()

    def __getitem__(self, name: str) -> Any:
        self.names_read.add(name)
        return self._given[name]

    def __getattr__(self, name: str) -> Any:
        return self[name].value


def mechanisms(
    candidates: search_space.Candidates, parse: Callable[[Settings], flags.FlagValues]
) -> tuple[list[Mechanism], str]:
    """The mechanisms of all settings, and why some are not known, or an empty text.

    Args:
      candidates: What the search draws from.
      parse: The flags of a run with these settings.
    """
    ranges = {n: each for n, each in candidates.items() if isinstance(each, search_space.Range)}
    # One value stands for a range, which is refused below if a mechanism reads it.
    values = {**candidates, **{name: [each.text(each.high)] for name, each in ranges.items()}}
    sizes: list[tuple[Settings, int]] = []
    found: list[tuple[Settings, Mechanism | None]] = []
    for settings in search_space.every(values):
        if any(read.items() <= settings.items() for read, _ in found):
            continue
        try:
            given: Any = Recorded(parse(settings))  # what reads flags takes them
        except flags.Error as error:
            if ranges:  # their other values may be flags
                return [], f"{search_space.words(settings)} is refused: {error}"
            continue  # such a run costs nothing
        known = [each for each in sizes if each[0].items() <= settings.items()]
        if not known:
            try:
                size = load(given).examples
            except app.UsageError as error:
                return [], f"the data of {search_space.words(settings)} cannot be read: {error}"
            known = [(_read(given, settings), size)]
            sizes += known
        (read, size), *_ = known
        given.names_read.update(read)
        try:
            asked = inputs.build_normalization(given, size)
            queries = () if asked is None else asked.multipliers
            mechanism = build.build_mechanism(given, size, queries)
        except (ValueError, app.UsageError):  # refused likewise, before it reads private data
            mechanism = None
        found.append((_read(given, settings), mechanism))
        free = {_UNIT} if mechanism is not None else set[str]()
        if unlisted := sorted(ranges.keys() & given.names_read - free):
            return [], (
                f"a cost depends on {', '.join(unlisted)}, which is drawn from a range; give a "
                "list of values"
            )
    return [mechanism for _, mechanism in found if mechanism is not None], ""


def _read(given: Recorded, settings: Settings) -> Settings:
    """The searched values that were read."""
    return {name: value for name, value in settings.items() if name in given.names_read}

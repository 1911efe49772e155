# SPDX-License-Identifier: Apache-2.0
"""Kinds of columns as a table of private rows declares them, and the numbers of one cell of each.

Ranges and lists of words are declared from public knowledge; nothing here is computed from rows.
So the numbers of a row follow from that row alone, and no other row can change them.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias

from dpjax import checks

GAPS = frozenset(["", "nan", "na", "n/a", "nat", "null", "none", "<na>", "?"])
"""A missing cell, as other programs write it, in small letters."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Number:
    """A number, scaled from its range to [-1, 1] and clipped to it."""

    low: float
    high: float
    parts: ClassVar[tuple[str, ...]] = ("",)

    def __post_init__(self) -> None:
        low, high = (checks.number("number", name, getattr(self, name)) for name in ("low", "high"))
        checks.positive("number", "high - low", high - low)

    def numbers(self, word: str) -> tuple[float, ...]:
        """The number that a word is."""
        return (_scaled(number(word), self.low, self.high),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Date:
    """A date, as a number of days from 0 to ``days``; ``format`` as `datetime.strptime` has it."""

    since: str | datetime.date
    days: float
    format: str | None = None
    parts: ClassVar[tuple[str, ...]] = ("",)

    def __post_init__(self) -> None:
        checks.positive("date", "days", self.days)
        date(str(self.since))

    def numbers(self, word: str) -> tuple[float, ...]:
        """The number that a date is; a time of day is a part of a day."""
        passed = date(word, self.format) - date(str(self.since))
        return (_scaled(passed / datetime.timedelta(days=1), 0, self.days),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Category:
    """A word of a list, one-hot; with ``other``, words that are not listed have a place too."""

    values: tuple[str, ...]
    other: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.values, list | tuple) or not self.values:
            raise ValueError(f"category(values={self.values!r}): expected a list of words")
        words = tuple(map(text, self.values))
        if len({*words}) < len(words):
            raise ValueError(f"category(values={list(words)}): expected each word once")
        object.__setattr__(self, "values", words)

    @property
    def parts(self) -> tuple[str, ...]:
        """What a name of a feature ends in."""
        return tuple(f"={word}" for word in (*self.values, *["(other)"] * self.other))

    def numbers(self, word: str) -> tuple[float, ...]:
        """A one in the place of the word."""
        if word not in self.values and not self.other:
            raise ValueError(f"{word!r}; expected one of {', '.join(self.values)}")
        hot = [float(word == value) for value in self.values]
        return (*hot, 1.0 - sum(hot)) if self.other else tuple(hot)


class Column(NamedTuple):
    """A column: its kind, the encoding of its cells, and the word that a gap counts as."""

    kind: str
    form: Any  # a Number, Date or Category
    fill: str | None

    @property
    def values(self) -> tuple[str, ...]:
        """The words of a category or a label; else none."""
        return getattr(self.form, "values", ())

    @property
    def parts(self) -> tuple[str, ...]:
        """What the names of the features end in."""
        return self.form.parts if self.fill is None else (*self.form.parts, " (missing)")

    def numbers(self, word: str) -> tuple[float, ...]:
        """The numbers of a cell; with ``fill``, the last says whether the cell is a gap."""
        gap = word.lower() in GAPS and word not in self.values
        if self.fill is not None:
            return (*self.form.numbers(self.fill if gap else word), float(gap))
        # Where unlisted words have a place, a gap has it too.
        if gap and not getattr(self.form, "other", False):
            raise ValueError("a gap; expected a value, or `fill` in the declaration")
        return self.form.numbers(word)


Columns: TypeAlias = Mapping[str, Column | None]
"""Columns by name; None is one that is not read."""

# The keys that a kind needs, and those it may have.
_KEYS: dict[str, tuple[Any, set[str], set[str]]] = {
    "number": (Number, {"low", "high"}, {"fill"}),
    "category": (Category, {"values"}, {"other", "fill"}),
    "date": (Date, {"since", "days"}, {"fill", "format"}),
    "label": (Category, {"values"}, set()),
    "target": (Number, {"low", "high"}, set()),
    "ignore": (None, set(), set()),
}


def declared(
    columns: Mapping[str, Any] | str | os.PathLike[str], call: str, unit: str | None = None
) -> Columns:
    """Columns but ``unit`` from a TOML file or its content; checked, with one label or target."""
    if not isinstance(columns, Mapping):
        call, path = f"{call}: {os.fspath(columns)}", Path(columns)
        try:
            columns = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        except ValueError as error:  # of TOML or of UTF-8
            raise ValueError(f"{call}: expected TOML ({error}).") from error
    kinds = {name: entries for name, entries in columns.items() if name != unit}
    made = {name: _column(entries, f"{call}: [{name}]") for name, entries in kinds.items()}
    learnt = [name for name, column in made.items() if column and is_learnt(column)]
    if len(learnt) != 1:
        raise ValueError(f"{call}: got {learnt} to be learnt; expected one label or one target.")
    return made


def is_learnt(column: Column) -> bool:
    """Whether a column is what a model learns, rather than what it reads."""
    return column.kind in ("label", "target")


def _column(entries: Any, call: str) -> Column | None:
    if not isinstance(entries, Mapping):
        raise ValueError(f"{call}: got {entries!r:.50}; expected a kind and what belongs to it.")
    kind = checks.one_of(call, "kind", entries.get("kind"), _KEYS)
    form, needed, possible = _KEYS[kind]
    given = {name: value for name, value in entries.items() if name != "kind"}
    if not needed <= given.keys() <= needed | possible:
        may = f", and may have {' and '.join(sorted(possible))}" if possible else ""
        raise ValueError(
            f"{call}: got {' and '.join(given) or 'nothing'}; a {kind} has "
            f"{' and '.join(sorted(needed)) or 'nothing'}{may}."
        )
    fill = None if "fill" not in given else text(given.pop("fill"))
    try:
        column = form and Column(kind, form(**given), fill)
        if column and fill is not None:
            column.numbers("")  # a fill that is no value of the column
    except (TypeError, ValueError) as error:
        raise ValueError(f"{call}: {str(error).rstrip('.')}.") from error
    return column


def text(cell: Any) -> str:
    """A cell of a frame or a file as a word; a number without a fraction as a whole number."""
    word = "" if cell is None else str(cell).strip()
    # pandas makes and writes 1.0 for a code 1 where another row of the column has a gap.
    return word[:-2] if re.fullmatch(r"-?\d+\.0", word) else word


def number(word: str) -> float:
    """A finite number from a word."""
    try:
        value = math.nan if "_" in word else float(word)  # Python reads 1_0 as 10
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{word!r}; expected a finite number, such as 1.5")
    return value


def date(word: str, form: str | None = None) -> datetime.datetime:
    """A date, or a date with a time, from a word."""
    read = datetime.datetime
    try:
        value = read.strptime(word, form) if form else read.fromisoformat(word)
    except ValueError as error:
        expected = f"a date of the format {form}" if form else "a date, such as 2021-03-31"
        raise ValueError(f"{word!r}; expected {expected}") from error
    return value.replace(tzinfo=None)


def _scaled(value: float, low: float, high: float) -> float:
    return min(max(2 * (value - low) / (high - low) - 1, -1.0), 1.0)

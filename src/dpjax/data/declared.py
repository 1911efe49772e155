# SPDX-License-Identifier: Apache-2.0
"""Kinds of columns as a table of private rows declares them, and the numbers of one cell of each.

Ranges and lists of words are declared from public knowledge; nothing here is computed from rows.
So the numbers of a row follow only from that row, and no other row can change them.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dpjax import checks

GAPS = frozenset(["", "nan", "na", "n/a", "nat", "null", "none", "<na>", "?"])
"""A missing cell, as other programs write it, in small letters."""


class Column(NamedTuple):
    """A column of a table, each of whose cells becomes one or several features."""

    numbers: Callable[[str], tuple[float, ...]]
    """From the text of a cell to its features; a ValueError if the column has no such cell."""
    parts: tuple[str, ...] = ("",)
    """The ends of the names of these features, which begin with the name of the column."""
    values: tuple[str, ...] = ()
    """The words of a category or a label."""
    span: tuple[float, float] | None = None
    """The range of a target."""
    learnt: bool = False
    """Whether it is a label or a target, and not a feature."""

    def filled(self, fill: Any = None) -> Column:
        """The column with a rule for gaps, which are errors if ``fill`` is None.

        Otherwise a gap has the features of the cell ``fill``, and one more feature is 1 for gaps.
        """
        if fill is None:
            return self._replace(numbers=self._without_gaps)
        filling = self.numbers(text(fill))  # raises here if it is not a value of the column

        def numbers(word: str) -> tuple[float, ...]:
            if self._is_gap(word):
                return (*filling, 1.0)
            return (*self.numbers(word), 0.0)

        return self._replace(numbers=numbers, parts=(*self.parts, " (missing)"))

    def _without_gaps(self, word: str) -> tuple[float, ...]:
        if self._is_gap(word):
            raise ValueError("a gap; expected a value, or `fill` in the declaration")
        return self.numbers(word)

    def _is_gap(self, word: str) -> bool:
        return word.lower() in GAPS and word not in self.values


def _number(low: float, high: float, fill: Any = None) -> Column:
    low = checks.number("number", "low", low)
    high = checks.number("number", "high", high)
    checks.positive("number", "high - low", high - low)

    def numbers(word: str) -> tuple[float, ...]:
        return (_scaled(number_of(word), low, high),)

    return Column(numbers).filled(fill)


def _target(low: float, high: float) -> Column:
    return _number(low, high)._replace(span=(low, high), learnt=True)


def _date(since: Any, days: float, fill: Any = None, format: str | None = None) -> Column:
    first = date_of(str(since))  # TOML holds it as a date or as text
    checks.positive("date", "days", days)

    def numbers(word: str) -> tuple[float, ...]:
        passed = (date_of(word, format) - first) / datetime.timedelta(days=1)
        return (_scaled(passed, 0, days),)

    return Column(numbers).filled(fill)


def _category(values: Sequence[Any], other: bool = False, fill: Any = None) -> Column:
    """One-hot features: one for each word of ``values``, and with ``other`` one for all others.

    A gap has the features of the word ``fill``. Without ``fill`` it is one of the others, or an
    error if there is no ``other``.
    """
    words: tuple[str, ...] = ()
    if not isinstance(values, str):  # a string is a sequence too, of letters
        # Values may be numbers. `text` makes words of them, as it does of cells.
        words = tuple(map(text, values))
    if not words or len({*words}) < len(words):
        raise ValueError(f"values are {values!r}; expected a list of different words")
    parts = [f"={word}" for word in words]
    if other:
        parts.append("=(other)")

    def numbers(word: str) -> tuple[float, ...]:
        one_hot = [float(word == value) for value in words]
        if other:
            one_hot.append(1.0 - sum(one_hot))
        if not any(one_hot):
            raise ValueError(f"{word!r}; expected one of {', '.join(words)}")
        return tuple(one_hot)

    column = Column(numbers, parts=tuple(parts), values=words)
    if other and fill is None:
        return column  # `numbers` encodes a gap as any other word that is not listed
    return column.filled(fill)


def _label(values: Sequence[Any]) -> Column:
    return _category(values)._replace(learnt=True)


def _ignored(**entries: Any) -> None:
    """A column that is not read; a draft may leave all keys in it."""
    del entries


_KINDS: Mapping[str, Callable[..., Column | None]] = {
    "number": _number,
    "category": _category,
    "date": _date,
    "label": _label,
    "target": _target,
    "ignore": _ignored,
}


def declarations(
    columns: Mapping[str, Any] | str | os.PathLike[str], call: str
) -> Mapping[str, Any]:
    """The declarations of a TOML file, or of its content."""
    if isinstance(columns, Mapping):
        return columns
    try:
        return tomllib.loads(Path(columns).read_text(encoding="utf-8-sig"))
    except ValueError as error:  # TOML, or UTF-8
        raise ValueError(f"{call}: {os.fspath(columns)}: expected TOML ({error}).") from error


def declared(
    columns: Mapping[str, Any], call: str, unit: str | None = None
) -> dict[str, Column | None]:
    """How all columns but ``unit`` are read. A column that is not read is None."""
    blanks = []
    for name, entries in columns.items():
        is_read = isinstance(entries, Mapping) and entries.get("kind") != "ignore"
        if name != unit and is_read:
            blanks += [f"[{name}] {key}" for key, value in entries.items() if value == "?"]
    if blanks:
        raise ValueError(
            f'{call}: "?" is still in {", ".join(blanks)}. Fill in each from public knowledge.'
        )
    return {
        name: _declared(entries, f"{call}: [{name}]")
        for name, entries in columns.items()
        if name != unit
    }


def _declared(entries: Any, call: str) -> Column | None:
    given = {}
    if isinstance(entries, Mapping):
        given = dict(entries)
    kind = checks.one_of(call, "kind", given.pop("kind", None), _KINDS)
    try:
        return _KINDS[kind](**given)
    except (TypeError, ValueError) as error:  # the keys, or their values
        # Python's error of a wrong key begins with the name of the function, such as `_number()`.
        fault = str(error).rstrip(".").removeprefix("_")
        raise ValueError(f"{call}: {fault}.") from error


def text(cell: Any) -> str:
    """A cell of a frame or a file as a word; a number without a fraction as a whole number."""
    if cell is None:
        return ""
    word = str(cell).strip()
    # pandas makes and writes 1.0 for a code 1 where another row of the column has a gap.
    if re.fullmatch(r"-?\d+\.0", word):
        return word.removesuffix(".0")
    return word


def number_of(word: str) -> float:
    """A finite number from a word."""
    value = math.nan
    if "_" not in word:  # Python reads 1_0 as 10
        with contextlib.suppress(ValueError):
            value = float(word)
    if not math.isfinite(value):
        raise ValueError(f"{word!r}; expected a finite number with a decimal point, such as 1.5")
    return value


def date_of(word: str, form: str | None = None) -> datetime.datetime:
    """A date, or a date with a time, from a word."""
    try:
        if form:
            value = datetime.datetime.strptime(word, form)
        else:
            value = datetime.datetime.fromisoformat(word)
    except ValueError as error:
        raise ValueError(f"{word!r}; expected a date, as {form or '2021-03-31'}") from error
    # Python subtracts no date with a time zone from one without.
    return value.replace(tzinfo=None)


def _scaled(value: float, low: float, high: float) -> float:
    """Maps [low, high] to [-1, 1], and clips values beyond it."""
    place = 2 * (value - low) / (high - low) - 1
    return min(max(place, -1.0), 1.0)

# SPDX-License-Identifier: Apache-2.0
"""Kinds of columns as a table of private rows declares them, and the numbers of one cell of each.

Ranges and lists of words are declared from public knowledge; nothing here is computed from rows.
So the numbers of a row follow from that row alone, and no other row can change them.
"""

from __future__ import annotations

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
    """A column: the numbers of a word, and what the names of these features end in."""

    numbers: Callable[[str], tuple[float, ...]]
    parts: tuple[str, ...] = ("",)
    values: tuple[str, ...] = ()  # of a category or a label
    span: tuple[float, float] | None = None  # of a target
    learnt: bool = False  # rather than read

    def filled(self, fill: Any = None) -> Column:
        """The column in which gaps are errors, or with ``fill`` this value and a feature of 1."""

        def numbers(word: str) -> tuple[float, ...]:
            gap = word.lower() in GAPS and word not in self.values
            if fill is not None:
                return (*self.numbers(text(fill) if gap else word), float(gap))
            if gap:
                raise ValueError("a gap; expected a value, or `fill` in the declaration")
            return self.numbers(word)

        if fill is None:
            return self._replace(numbers=numbers)
        self.numbers(text(fill))  # raises here if it is no value of the column
        return self._replace(numbers=numbers, parts=(*self.parts, " (missing)"))


def _number(low: float, high: float, fill: Any = None) -> Column:
    low, high = checks.number("number", "low", low), checks.number("number", "high", high)
    checks.positive("number", "high - low", high - low)
    return Column(lambda word: (_scaled(number_of(word), low, high),)).filled(fill)


def _target(low: float, high: float) -> Column:
    return _number(low, high)._replace(span=(low, high), learnt=True)


def _date(since: Any, days: float, fill: Any = None, format: str | None = None) -> Column:
    first, day = date_of(str(since)), datetime.timedelta(days=1)
    checks.positive("date", "days", days)
    return Column(lambda w: (_scaled((date_of(w, format) - first) / day, 0, days),)).filled(fill)


def _category(values: Sequence[Any], other: bool = False, fill: Any = None) -> Column:
    words = () if isinstance(values, str) else tuple(map(text, values))
    if not words or len({*words}) < len(words):
        raise ValueError(f"values are {values!r}; expected a list of different words")

    def numbers(word: str) -> tuple[float, ...]:
        hot = [float(word == value) for value in words]
        if not any(hot) and not other:
            raise ValueError(f"{word!r}; expected one of {', '.join(words)}")
        return (*hot, 1.0 - sum(hot)) if other else tuple(hot)

    parts = tuple(f"={word}" for word in (*words, *["(other)"] * other))
    column = Column(numbers, parts, words)
    return column if other and fill is None else column.filled(fill)  # a gap is an other word


def _label(values: Sequence[Any]) -> Column:
    return _category(values)._replace(learnt=True)


_KINDS: Mapping[str, Callable[..., Column | None]] = {
    "number": _number,
    "category": _category,
    "date": _date,
    "label": _label,
    "target": _target,
    "ignore": lambda **_: None,  # of a draft, with all keys
}


def declared(
    columns: Mapping[str, Any] | str | os.PathLike[str], call: str, unit: str | None = None
) -> dict[str, Column | None]:
    """Columns but ``unit``, of a TOML file or its content, one of them learnt; None is not read."""
    if not isinstance(columns, Mapping):
        call, path = f"{call}: {os.fspath(columns)}", Path(columns)
        try:
            columns = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        except ValueError as error:  # of TOML or of UTF-8
            raise ValueError(f"{call}: expected TOML ({error}).") from error
    made: dict[str, Column | None] = {}
    for name, entries in columns.items():
        if name == unit:
            continue
        entries = dict(entries) if isinstance(entries, Mapping) else {}
        kind = checks.one_of(f"{call}: [{name}]", "kind", entries.pop("kind", None), _KINDS)
        try:
            made[name] = _KINDS[kind](**entries)
        except (TypeError, ValueError) as error:  # of the keys, or of their values
            fault = str(error).rstrip(".").removeprefix("_")
            raise ValueError(f"{call}: [{name}]: {fault}.") from error
    learnt = [name for name, column in made.items() if column and column.learnt]
    if len(learnt) != 1:
        raise ValueError(f"{call}: got {learnt} to be learnt; expected one label or one target.")
    return made


def text(cell: Any) -> str:
    """A cell of a frame or a file as a word; a number without a fraction as a whole number."""
    word = "" if cell is None else str(cell).strip()
    # pandas makes and writes 1.0 for a code 1 where another row of the column has a gap.
    return word[:-2] if re.fullmatch(r"-?\d+\.0", word) else word


def number_of(word: str) -> float:
    """A finite number from a word."""
    try:
        value = math.nan if "_" in word else float(word)  # Python reads 1_0 as 10
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{word!r}; expected a finite number, such as 1.5")
    return value


def date_of(word: str, form: str | None = None) -> datetime.datetime:
    """A date, or a date with a time, from a word."""
    read = datetime.datetime
    try:
        value = read.strptime(word, form) if form else read.fromisoformat(word)
    except ValueError as error:
        raise ValueError(f"{word!r}; expected a date, as {form or '2021-03-31'}") from error
    return value.replace(tzinfo=None)


def _scaled(value: float, low: float, high: float) -> float:
    return min(max(2 * (value - low) / (high - low) - 1, -1.0), 1.0)

# SPDX-License-Identifier: Apache-2.0
"""Tables of private rows whose columns are declared: a ``.csv``, a frame, or lists by name.

Cells are read as text, by rules of dpjax alone: three readers of tables infer three types for one
column. A cell that breaks its declaration is an error, and no row is left out.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dpjax.data.dataset import Dataset, Split
from dpjax.data.declared import GAPS, Column, declared, text
from dpjax.data.files import distinct, read_table


def table(
    frame: Any, columns: Mapping[str, Any] | str | os.PathLike[str], unit: str | None = None
) -> Dataset[Split]:
    r"""Makes a data set of a table, by declarations of its columns.

    | kind | declared | becomes |
    |---|---|---|
    | ``number`` | ``low``, ``high`` | a number in [-1, 1]; beyond its range it is clipped |
    | ``category`` | ``values``; ``other = true`` | one-hot; ``other`` is for unlisted words |
    | ``date`` | ``since``, ``days``; ``format`` | a number in [-1, 1]; such as ``2021-03-31`` |
    | ``label`` | ``values`` | the class, in the order of the words |
    | ``target`` | ``low``, ``high`` | a number in [-1, 1] to be learnt |
    | ``ignore`` | | nothing |

    The first three may have ``fill``: a gap (empty, nan, NA, null, none, ?) counts as this value,
    and a further feature is 1 for gaps. Without it, a gap is an error, or an other word. Every
    column of the table is declared, except that of ``unit``. A fifth of the rows, or of the
    persons with all of their rows, is held out for the test, by a fixed shuffle.

    Args:
      frame: The path of a ``.csv`` with a header; a frame of pandas or Polars; or lists by name.
      columns: The path of a TOML file with a table a column, as ``dpjax columns my.csv`` drafts
        it; or such a mapping.
      unit: The column that says whose row it is. It is no feature; ``owners`` of the data set
        has its values, numbered, for `dpjax.sampling.persons`.

    Privacy:
      Declarations must be public knowledge: a range or a list of words that is read off the rows
      is a release that no accountant sees. Each row becomes numbers by itself. No epsilon covers
      the rows of the test part. With ``unit``, the number of persons counts as public, and the
      number of rows does not.

    Example:
      >>> columns = {
      ...     "age": {"kind": "number", "low": 0, "high": 100, "fill": 50},
      ...     "sex": {"kind": "category", "values": ["F", "M"]},
      ...     "died": {"kind": "label", "values": ["no", "yes"]},
      ... }
      >>> rows = {"age": [25, None] * 5, "sex": ["M", "F"] * 5, "died": ["no", "yes"] * 5}
      >>> patients = table(rows, columns)
      >>> patients.columns
      ('age', 'age (missing)', 'sex=F', 'sex=M')
      >>> patients.train[0][:2].tolist()
      [[-0.5, 0.0, 0.0, 1.0], [0.0, 1.0, 1.0, 0.0]]
    """
    call, name = "data.table", "table"
    if isinstance(frame, str | os.PathLike):
        call, name = f"{call}({os.fspath(frame)!r})", Path(frame).stem
        header, rows = read_table(Path(frame), call)
        frame = {column: [row[place] for row in rows] for place, column in enumerate(header)}
    forms = declared(columns, "data.table", unit)
    # A frame of pandas may have a name twice, and one of Polars iterates over its columns.
    names = distinct(list(getattr(frame, "columns", frame)), call)
    _match(names, [*forms, *filter(None, [unit])], call)
    owners = _owners(frame, names[0], unit, call)
    test = _held_out(owners, call)
    read = {key: form for key, form in forms.items() if form.form is not None}
    cells = {key: _encoded(key, form, frame[key], call) for key, form in read.items()}
    (learnt,) = [key for key, form in read.items() if form.is_learnt]
    y, goal = cells.pop(learnt), read.pop(learnt)
    x = np.concatenate([*cells.values()], axis=1)
    y = y.argmax(axis=1).astype(np.int32) if goal.kind == "label" else y[:, 0]
    held = f"a fifth of the {'rows' if unit is None else 'persons'}"
    return Dataset(
        name=name,
        train=(x[~test], y[~test]),
        test=(x[test], y[test]),
        classes=len(goal.values) or None,
        note=f"(values beyond their ranges are clipped; {held} held out for the test)",
        class_names=goal.values,
        columns=tuple(f"{key}{part}" for key, form in read.items() for part in form.parts),
        owners=None if unit is None else np.unique(owners[~test], return_inverse=True)[1],
        target_range=(goal.form.low, goal.form.high) if goal.kind == "target" else None,
    )


def _match(names: list[str], expected: list[str], call: str) -> None:
    """Refuses a table without a declared column, or with one that is not declared."""
    if absent := [column for column in expected if column not in names]:
        raise ValueError(f"{call}: got columns {', '.join(names)}; expected {absent[0]!r} too.")
    if odd := [column for column in names if column not in expected]:
        hint = 'With kind = "ignore" it is not read.'
        raise ValueError(f"{call}: column {odd[0]!r} is not declared. {hint}")


def _encoded(name: str, column: Column, cells: Any, call: str) -> np.ndarray:
    """The features of a column, ``[rows, features]``; an error names row, column and rule."""
    rows = []
    for row, cell in enumerate(cells, 1):
        try:
            rows.append(column.numbers(text(cell)))
        except ValueError as fault:
            raise ValueError(f"{call}: row {row}, column {name!r}: {fault}.") from None
    return np.array(rows, np.float32)


def _owners(frame: Any, first: str, unit: str | None, call: str) -> np.ndarray:
    """Whose row each is, numbered from 0; without a unit each row is its own."""
    if unit is None:
        return np.arange(len(frame[first]))
    words = [text(cell) for cell in frame[unit]]
    for row, word in enumerate(words, 1):
        if word.lower() in GAPS:
            raise ValueError(
                f"{call}: row {row}, column {unit!r}: a gap; expected whose row it is."
            )
    return np.unique(words, return_inverse=True)[1]


def _held_out(owners: np.ndarray, call: str) -> np.ndarray:
    """Which rows are for the test: all rows of a fifth of the owners, by a fixed shuffle."""
    count = int(owners.max(initial=-1)) + 1
    if count < 2:
        raise ValueError(f"{call}: the table has {count} rows or persons; expected two or more.")
    order = np.random.default_rng(0).permutation(count)
    return np.isin(owners, order[: max(1, count // 5)])

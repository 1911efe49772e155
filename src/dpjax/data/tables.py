# SPDX-License-Identifier: Apache-2.0
"""Tables of private rows whose columns are declared: a ``.csv``, a frame, or lists by name.

Cells are read as text, by rules of dpjax alone: three readers of tables infer three types for one
column. A cell that breaks its declaration is an error, and no row is left out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dpjax.data.dataset import Dataset, Split, hold_out
from dpjax.data.declared import GAPS, declared, text
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
    and a further feature is 1. Without it, a gap is an error, or an other word. A fifth of the
    rows, or of the persons with all rows, is held out for the test, by a fixed shuffle.

    Args:
      frame: The path of a ``.csv`` with a header; a frame of pandas or Polars; or lists by name.
      columns: The path of a TOML file with a table for every column, as ``dpjax columns my.csv``
        drafts it; or such a mapping.
      unit: The column that says whose row it is. It is no feature, and needs no declaration;
        `Dataset.owners` has its values, numbered, for `dpjax.sampling.persons`.

    Privacy:
      Declarations must be public knowledge: what is read off the rows is a release that no
      accountant sees. No epsilon covers the rows of the test part. With ``unit``, the number of
      persons counts as public, and the number of rows does not.

    Example:
      >>> columns = {
      ...     "age": {"kind": "number", "low": 0, "high": 100, "fill": 50},
      ...     "died": {"kind": "label", "values": ["no", "yes"]},
      ... }
      >>> patients = table({"age": [25, None] * 5, "died": ["no", "yes"] * 5}, columns)
      >>> patients.columns, patients.train[0][:2].tolist()
      (('age', 'age (missing)'), [[-0.5, 0.0], [0.0, 1.0]])
    """
    call, name = "data.table", "table"
    if isinstance(frame, str | os.PathLike):
        call, name = f"{call}({os.fspath(frame)!r})", Path(frame).stem
        header, rows = read_table(Path(frame), call)
        frame = {column: [row[place] for row in rows] for place, column in enumerate(header)}
    forms = declared(columns, "data.table", unit)
    # A frame of pandas may have a name twice, and one of Polars iterates over its columns.
    names = distinct(list(getattr(frame, "columns", frame)), call)
    expected = [*forms, *filter(None, [unit])]
    if absent := [column for column in expected if column not in names]:
        raise ValueError(f"{call}: got columns {', '.join(names)}; expected {absent[0]!r} too.")
    if odd := [column for column in names if column not in expected]:
        hint = 'With kind = "ignore" it is not read.'
        raise ValueError(f"{call}: column {odd[0]!r} is not declared. {hint}")
    rows = range(len(frame[names[0]]))
    whose = rows if unit is None else _cells(_owner, unit, frame, call)
    owners = np.unique(whose, return_inverse=True)[1]
    if (count := len(np.unique(owners))) < 2:
        raise ValueError(f"{call}: the table has {count} rows or persons; expected two or more.")
    numbers = np.arange(count)
    test = np.isin(owners, hold_out((numbers, numbers), max(1, count // 5))[1][1])
    read = {key: form for key, form in forms.items() if form is not None}
    cells = {key: _cells(form.numbers, key, frame, call) for key, form in read.items()}
    (learnt,) = [key for key, form in read.items() if form.learnt]
    y, goal = np.array(cells.pop(learnt), np.float32), read.pop(learnt)
    x = np.concatenate([np.array(part, np.float32) for part in cells.values()], axis=1)
    y = y.argmax(axis=1).astype(np.int32) if goal.values else y[:, 0]
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
        target_range=goal.span,
    )


def _cells(read: Callable[[str], Any], name: str, frame: Any, call: str) -> list[Any]:
    """What each cell of a column becomes; an error names row, column and rule."""
    cells = []
    for row, cell in enumerate(frame[name], 1):
        try:
            cells.append(read(text(cell)))
        except ValueError as fault:
            raise ValueError(f"{call}: row {row}, column {name!r}: {fault}.") from None
    return cells


def _owner(word: str) -> str:
    if word.lower() in GAPS:
        raise ValueError("a gap; expected whose row it is")
    return word

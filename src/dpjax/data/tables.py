# SPDX-License-Identifier: Apache-2.0
"""Tables of private rows whose columns are declared: a ``.csv``, a frame, or lists by name.

Cells are read as text, by rules of dpjax only: three readers of tables infer three types for one
column. A cell that breaks its declaration is an error, and no row is left out.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from dpjax.data.dataset import Dataset, Split, units_held_out
from dpjax.data.declared import GAPS, Column, date_of, declared, number_of, text
from dpjax.data.files import distinct, read_table
from dpjax.types import HeldOut

_Columns: TypeAlias = Mapping[str, Column | None]


def table(
    frame: Any,
    columns: Mapping[str, Any] | str | os.PathLike[str],
    unit: str | None = None,
    *,
    test: Any = None,
    holdout: float | None = None,
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
    and a further feature is 1. Without it, a gap is an error, or an other word.

    Args:
      frame: The path of a ``.csv`` with a header; a frame of pandas or Polars; or lists by name.
      columns: The path of a TOML file with a table for every column, as ``dpjax columns my.csv``
        drafts it; or such a mapping.
      unit: The column that names the person of each row. It is not a feature, and needs no
        declaration; `Dataset.owners` has its values, numbered, for `dpjax.sampling.persons`.
      test: Public rows for the test, with the columns of ``frame``; then no row is held out.
      holdout: The fraction of rows, or of the persons with all rows, that is held out for the test
        by a fixed shuffle; by default 0.2. With 0 all rows are for training.

    Privacy:
      Declarations must be public knowledge: what is read off the rows is a release that no
      accountant sees. No epsilon covers the rows that are held out: give `Dataset.held_out` to
      `dpjax.fit` or `dpjax.statement`, which then name them. With ``unit``, the number of persons
      counts as public, and the number of rows does not.

    Example:
      >>> columns = {
      ...     "age": {"kind": "number", "low": 0, "high": 100, "fill": 50},
      ...     "died": {"kind": "label", "values": ["no", "yes"]},
      ... }
      >>> patients = table({"age": [25, None] * 5, "died": ["no", "yes"] * 5}, columns)
      >>> patients.columns, patients.train[0][:2].tolist()
      (('age', 'age (missing)'), [[-0.5, 0.0], [0.0, 1.0]])
      >>> patients.held_out
      HeldOut(units=2, public=False)
    """
    if test is not None and holdout is not None:
        raise ValueError("data.table: got test= and holdout=; expected one of the two.")
    private = _opened(frame)
    forms = declared(columns, "data.table", unit)
    expected = [*forms]
    if unit is not None:
        expected.append(unit)
    _check_columns(private, expected)
    owners = _owners(private, unit)
    units = int(owners.max(initial=-1)) + 1
    if units < 2:
        raise ValueError(
            f"{private.call}: the table has {units} rows or persons; expected two or more."
        )
    x, y = _numbers(private, forms)
    if test is None:
        held = units_held_out(private.call, units, holdout)
        in_test = np.isin(owners, held)
        test_rows = (x[in_test], y[in_test])
        held_out = HeldOut(len(held))
        kind = "rows" if unit is None else "persons"
        split = f"{len(held)} of {units} {kind} are held out for the test"
    else:
        public = _opened(test)
        _check_columns(public, forms, also=unit)
        in_test = np.zeros(len(owners), bool)
        test_rows = _numbers(public, forms)
        held_out = HeldOut(public=True)
        split = "the test rows are public"
    features = _features(forms)
    (learnt,) = (form for form in forms.values() if form is not None and form.learnt)
    return Dataset(
        name=private.name,
        train=(x[~in_test], y[~in_test]),
        test=test_rows,
        classes=len(learnt.values) or None,
        note=f"(values beyond their ranges are clipped; {split})",
        class_names=learnt.values,
        columns=tuple(f"{name}{part}" for name, form in features.items() for part in form.parts),
        owners=None if unit is None else np.unique(owners[~in_test], return_inverse=True)[1],
        target_range=learnt.span,
        held_out=held_out,
    )


class _Table(NamedTuple):
    """A table by column; ``call`` begins its errors."""

    name: str
    call: str
    columns: Any  # indexed by the names
    names: list[str]


def kinds_of(path: Path, call: str) -> dict[str, str]:
    """A guess of the kind of each column of a ``.csv``, from its rows: no epsilon covers it."""
    header, rows = read_table(path, call)
    # The label of `dpjax.data.load_file`.
    label = next((name for name in header if name.lower() == "label"), header[-1])
    kinds = {}
    for name, *words in zip(header, *rows, strict=True):
        kinds[name] = "label" if name == label else _kind_of({word.strip() for word in words})
    return kinds


def _kind_of(words: Collection[str]) -> str:
    """The first kind that all cells but gaps have."""
    for kind, read in (("number", number_of), ("date", date_of)):
        with contextlib.suppress(ValueError):
            _ = [read(word) for word in words if word.lower() not in GAPS]
            return kind
    return "category"


def _opened(frame: Any) -> _Table:
    """Reads the table of a path; frames and mappings stay as they are."""
    name, call = "table", "data.table"
    if isinstance(frame, str | os.PathLike):
        path = Path(frame)
        name = path.stem
        call = f"data.table({os.fspath(frame)!r})"
        header, rows = read_table(path, call)
        frame = {column: [row[place] for row in rows] for place, column in enumerate(header)}
    # A frame of pandas may have a name twice, and one of Polars iterates over its columns.
    names = distinct(list(getattr(frame, "columns", frame)), call)
    return _Table(name, call, frame, names)


def _check_columns(table: _Table, expected: Collection[str], also: str | None = None) -> None:
    """Refuses a table without one of the expected columns, or with one that is not declared."""
    for name in expected:
        if name not in table.names:
            given = ", ".join(table.names)
            raise ValueError(f"{table.call}: got columns {given}; expected {name!r} too.")
    for name in table.names:
        if name not in expected and name != also:
            hint = 'With kind = "ignore" it is not read.'
            raise ValueError(f"{table.call}: column {name!r} is not declared. {hint}")


def _owners(table: _Table, unit: str | None) -> np.ndarray:
    """The number of the person that each row belongs to; without ``unit`` each row has its own."""
    if unit is None:
        return np.arange(len(table.columns[table.names[0]]))
    words = _cells(table, unit, _owner)
    return np.unique(words, return_inverse=True)[1]


def _features(forms: _Columns) -> dict[str, Column]:
    """The columns that a model reads, in the order of their declarations."""
    return {name: form for name, form in forms.items() if form is not None and not form.learnt}


def _numbers(table: _Table, forms: _Columns) -> Split:
    """Inputs and targets, with a row for each row of the table."""
    read = {name: form for name, form in forms.items() if form is not None}
    cells = {name: _cells(table, name, form.numbers) for name, form in read.items()}
    (learnt,) = (name for name, form in read.items() if form.learnt)
    targets = np.array(cells.pop(learnt), np.float32)
    parts = [np.array(part, np.float32) for part in cells.values()]
    if not len(targets):
        raise ValueError(f"{table.call}: the table has 0 rows; expected one or more.")
    x = np.concatenate(parts, axis=1)
    if read[learnt].values:
        return x, targets.argmax(axis=1).astype(np.int32)  # one-hot before
    return x, targets[:, 0]


def _cells(table: _Table, name: str, read: Callable[[str], Any]) -> list[Any]:
    """Reads each cell of a column; an error names row, column and rule."""
    cells = []
    for row, cell in enumerate(table.columns[name], 1):
        try:
            cells.append(read(text(cell)))
        except ValueError as fault:
            raise ValueError(f"{table.call}: row {row}, column {name!r}: {fault}.") from None
    return cells


def _owner(word: str) -> str:
    if word.lower() in GAPS:
        raise ValueError("a gap; expected whose row it is")
    return word

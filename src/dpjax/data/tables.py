# SPDX-License-Identifier: Apache-2.0
"""Tables of private rows whose columns are declared, as data sets; and guesses of their kinds."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from dpjax.data.dataset import Dataset, Split, units_held_out
from dpjax.data.declared import GAPS, date_of, number_of
from dpjax.data.encoding import (
    Columns,
    Table,
    cells_of,
    check_columns,
    features_of,
    inputs_of,
    opened,
    read_owner,
    readers,
    targets_of,
)
from dpjax.data.files import parses, read_table
from dpjax.types import HeldOut


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
      frame: The path of a ``.csv`` with a header, or of a ``.parquet``, ``.arrow`` or ``.feather``
        (``pip install pyarrow``); a frame of pandas or Polars, or a table of Arrow; or
        lists by name.
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
    declared = Columns.read(columns, unit)
    _, learnt = declared.learnt  # the declaration of the label or the target
    forms = declared.forms  # the declaration of each column
    private = opened(frame, "data.table")
    expected = [*forms]
    reader_of = readers(forms)
    if unit is not None:
        expected.append(unit)
        reader_of[unit] = read_owner
    check_columns(private, expected)
    cells = cells_of(private, reader_of)

    # The person of each row, from 0. Without a column of persons, each row is a unit of its own.
    first_column = private.columns[private.names[0]]
    owners = np.arange(len(first_column))
    if unit is not None:
        owners = _numbered(cells[unit])
    units = int(owners.max(initial=-1)) + 1  # 0 of an empty table
    if units < 2:
        raise ValueError(
            f"{private.call}: the table has {units} rows or persons; expected two or more."
        )
    x, y = _numbers(private, declared, cells)
    if test is None:
        held = units_held_out(private.call, units, holdout)
        in_test = np.isin(owners, held)
        test_rows = (x[in_test], y[in_test])
        held_out = HeldOut(len(held))
        split_note = f"{len(held)} of {units} rows are held out for the test"
        if unit is not None:
            split_note = f"{len(held)} of {units} persons are held out for the test"
    else:
        public = opened(test, "data.table")
        check_columns(public, forms, allowed=[unit])  # persons are not read
        in_test = np.zeros(len(owners), bool)  # no private row
        test_rows = _numbers(public, declared, cells_of(public, readers(forms)))
        held_out = HeldOut(public=True)
        split_note = "the test rows are public"
    owners_of_train = None
    if unit is not None:
        # The persons of the test leave gaps in the numbers.
        owners_of_train = _numbered(owners[~in_test])
    return Dataset(
        name=private.name,
        train=(x[~in_test], y[~in_test]),
        test=test_rows,
        classes=len(learnt.values) or None,  # a target has no words
        note=f"(values beyond their ranges are clipped; {split_note})",
        class_names=learnt.values,
        columns=declared.features,
        owners=owners_of_train,
        target_range=learnt.span,
        held_out=held_out,
    )


def _numbered(owners: Any) -> np.ndarray:
    """The owner of each row, renumbered from 0 without gaps."""
    return np.unique(owners, return_inverse=True)[1]


def _numbers(table: Table, declared: Columns, cells: Mapping[str, list[Any]]) -> Split:
    """Inputs and targets, with a row for each row of the table."""
    name, learnt = declared.learnt
    x = inputs_of(table, features_of(declared.forms), cells)
    return x, targets_of(learnt, cells[name])


def kinds_of(path: Path, call: str) -> dict[str, str]:
    """A guess of the kind of each column of a file, from its rows: no epsilon covers it."""
    header, rows = read_table(path, call)
    # The label of `dpjax.data.load_file`.
    label = next((name for name in header if name.lower() == "label"), header[-1])
    kinds = {}
    for place, name in enumerate(header):
        words = [row[place].strip() for row in rows]
        kinds[name] = "label" if name == label else _kind_of(words)
    return kinds


def _kind_of(words: Collection[str]) -> str:
    """The first kind that most cells have, of those without a gap."""
    cells = [word for word in words if word.lower() not in GAPS]
    for kind, read in _GUESSES.items():
        if 2 * sum(parses(read, cell) for cell in cells) > len(cells):
            return kind
    return "category"


_GUESSES: Mapping[str, Callable[[str], Any]] = MappingProxyType(
    {
        "number": number_of,
        "date": date_of,
        "date, day first": partial(date_of, form="%d.%m.%Y"),
    }
)

# SPDX-License-Identifier: Apache-2.0
"""Declared columns: from the cells of a table to the numbers that a model reads, row by row.

Cells are read as text, by rules of dpjax only: three readers of tables infer three types for one
column. A cell that breaks its declaration is an error, and no row is left out.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int, Shaped

from dpjax.data.declared import GAPS, Column, declarations, declared, text
from dpjax.data.files import checked_names, listed, read_table


class Columns(NamedTuple):
    """The declared columns of a table, which encode rows for training and for prediction alike.

    Example:
      >>> columns = Columns.read(
      ...     {
      ...         "age": {"kind": "number", "low": 0, "high": 100, "fill": 50},
      ...         "died": {"kind": "label", "values": ["no", "yes"]},
      ...     }
      ... )
      >>> columns.features
      ('age', 'age (missing)')
      >>> columns.encode({"age": [25, None]}).tolist()
      [[-0.5, 0.0], [0.0, 1.0]]
    """

    declared: Mapping[str, Any]
    """The kind and the keys of each column, as a TOML file holds them."""
    unit: str | None = None
    """The column that names the person of each row; it is not declared."""

    @classmethod
    def read(
        cls, columns: Mapping[str, Any] | str | os.PathLike[str], unit: str | None = None
    ) -> Columns:
        """Reads and checks declarations, as `dpjax.data.table` takes them.

        Args:
          columns: The path of a TOML file, or its content.
          unit: The column that names the person of each row, if there is one.
        """
        found = cls(declarations(columns, "data.Columns"), unit)
        _ = found.forms  # raises if a declaration is wrong
        return found

    @property
    def forms(self) -> dict[str, Column | None]:
        """How each column is read; None for one that is not."""
        # Computed when it is needed, because functions of a declaration cannot be pickled.
        return declared(self.declared, "data.Columns", self.unit)

    @property
    def learnt(self) -> tuple[str, Column]:
        """The one label or target, by its name."""
        learnt = {name: form for name, form in self.forms.items() if form and form.learnt}
        if len(learnt) != 1:
            raise ValueError(
                f"data.Columns: got {[*learnt]} to be learnt; expected one label or one target."
            )
        return learnt.popitem()

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the features, in the order of the numbers that `encode` returns."""
        forms = features_of(self.forms)
        return tuple(f"{name}{part}" for name, form in forms.items() for part in form.parts)

    @property
    def class_names(self) -> tuple[str, ...]:
        """The words of the label, in the order of their classes; empty for a target."""
        return self.learnt[1].values

    @property
    def target_range(self) -> tuple[float, float] | None:
        """The declared range of a target, which is encoded as a number in [-1, 1]; else None."""
        return self.learnt[1].span

    def encode(self, frame: Any) -> Float[np.ndarray, "rows features"]:
        """The features of each row of a table, in the order of its rows; it needs no label.

        Args:
          frame: A table as `dpjax.data.table` takes it. The label, the unit and columns that are
            not read may be missing.
        """
        table = opened(frame, "data.Columns.encode")
        features = features_of(self.forms)
        check_columns(table, features, [*self.forms, self.unit])
        return inputs_of(table, features, cells_of(table, readers(features)))

    def encode_targets(self, frame: Any) -> Shaped[np.ndarray, " rows"]:
        """The class of each row as int32, or its target as float32 in [-1, 1]."""
        table = opened(frame, "data.Columns.encode_targets")
        name, form = self.learnt
        check_columns(table, [name], allowed=table.names)
        cells = cells_of(table, {name: form.numbers})
        return targets_of(form, cells[name])

    def owners(self, frame: Any) -> Int[np.ndarray, " rows"]:
        """The person of each row, numbered, by the column ``unit``."""
        table = opened(frame, "data.Columns.owners")
        unit = str(self.unit)
        check_columns(table, [unit], allowed=table.names)
        return np.unique(cells_of(table, {unit: read_owner})[unit], return_inverse=True)[1]


class Table(NamedTuple):
    """A table by column."""

    name: str  # of the data set that is made of it
    call: str  # begins an error
    columns: Any  # a frame or a mapping: ``columns[name]`` iterates over the cells of a column
    names: list[str]  # of the columns


def opened(frame: Any, call: str) -> Table:
    """The table of a path, a frame or a mapping; ``call`` begins an error."""
    name = "table"
    if isinstance(frame, str | os.PathLike):
        path = Path(frame)
        name = path.stem
        call = f"{call}({os.fspath(frame)!r})"
        header, rows = read_table(path, call)
        frame = {column: [row[place] for row in rows] for place, column in enumerate(header)}
    if hasattr(frame, "column_names"):  # a table of Arrow, whose `columns` are not names
        frame = frame.to_pydict()
    # A frame of pandas or Polars has its names in `columns`; a mapping iterates over them.
    names = list(getattr(frame, "columns", frame))
    # A frame of pandas may have a name twice, which is refused.
    return Table(name, call, columns=frame, names=checked_names(names, call))


def check_columns(
    table: Table, expected: Collection[str], allowed: Collection[str | None] = ()
) -> None:
    """Refuses a table without an expected column, or with one that is not declared."""
    missing = [repr(name) for name in expected if name not in table.names]
    if missing:
        given = ", ".join(table.names)
        words = f"got columns {given}; expected {', '.join(missing)} too."
        raise ValueError(f"{table.call}: {words}")
    unknown = [
        f"column {name!r} is not declared"
        for name in table.names
        if name not in expected and name not in allowed
    ]
    if unknown:
        hint = 'With kind = "ignore" it is not read.'
        raise ValueError(f"{listed(table.call, unknown)} {hint}")


def cells_of(table: Table, reader_of: Mapping[str, Callable[[str], Any]]) -> dict[str, list[Any]]:
    """The values of the cells of each column that ``reader_of`` names, in the order of the rows.

    The reader of a column maps the text of a cell to its value, and raises a ValueError if the cell
    breaks the declaration. The error of the table lists the first ten of these cells, row by row.
    """
    cells: dict[str, list[Any]] = {name: [] for name in reader_of}
    faults: list[tuple[int, str]] = []  # the number of a row, and the fault in it
    for name, read in reader_of.items():
        for row, cell in enumerate(table.columns[name], 1):
            try:
                cells[name].append(read(text(cell)))
            except ValueError as fault:
                faults.append((row, f"row {row}, column {name!r}: {fault}"))
    if faults:
        by_row = sorted(faults, key=operator.itemgetter(0))  # found column by column
        raise ValueError(listed(table.call, [fault for _, fault in by_row]))
    return cells


def readers(forms: Mapping[str, Column | None]) -> dict[str, Callable[[str], Any]]:
    """How a cell of each column becomes numbers, for the columns that are read."""
    return {name: form.numbers for name, form in forms.items() if form is not None}


def features_of(forms: Mapping[str, Column | None]) -> dict[str, Column]:
    """The columns that a model reads, in the order of their declarations."""
    return {name: form for name, form in forms.items() if form is not None and not form.learnt}


def inputs_of(
    table: Table, features: Collection[str], cells: Mapping[str, list[Any]]
) -> np.ndarray:
    """The numbers of these columns next to each other, a row for each row of the table."""
    parts = [np.array(cells[name], np.float32) for name in features]
    if not parts or not len(parts[0]):
        raise ValueError(f"{table.call}: the table has 0 rows; expected one or more.")
    return np.concatenate(parts, axis=1)


def targets_of(form: Column, cells: list[Any]) -> np.ndarray:
    """The classes of a label, or the numbers of a target."""
    targets = np.array(cells, np.float32)
    if form.values:
        return targets.argmax(axis=1).astype(np.int32)  # one-hot before
    return targets[:, 0]


def read_owner(word: str) -> str:
    """The person of a row, from the cell of the column that names it."""
    if word.lower() in GAPS:
        raise ValueError("a gap; expected whose row it is")
    return word

# SPDX-License-Identifier: Apache-2.0
"""Data sets of the user: an ``.npz`` of arrays, or a ``.csv`` table, for classification.

A named data set has a shape and a number of classes in a table (`sources`); here both come from
the file. Nothing else is computed from the examples: features keep their units, because a mean
of private examples would be a release that the accountant does not see.
"""

from __future__ import annotations

import csv
import os
from pathlib import Path

import numpy as np

from dpjax.data.dataset import Dataset, Split, hold_out
from dpjax.data.files import plain_arrays

_FORMAT = (
    "Expected x and y, or x_train, y_train, x_test and y_test, one example a row and a label for "
    "each: numpy.savez(path, x=x, y=y)."
)


def load_file(path: str | os.PathLike[str], classes: int | None = None) -> Dataset[Split]:
    r"""Loads a data set of your own from a file.

    | file | content |
    |---|---|
    | ``.npz`` | ``x_train``, ``y_train``, ``x_test``, ``y_test``; or ``x`` and ``y`` |
    | ``.csv`` | a header; the label in the column ``label``, or else the last; else numbers |

    Without a test part, a fifth of the rows is held out as one, by a fixed shuffle. Bytes of
    images, ``[examples, height, width]`` or with channels last, become float32 in [0, 1] with a
    channel axis; other whole numbers become int32, and other numbers float32. Labels are whole
    numbers from 0, or words, which are numbered in alphabetical order.

    Args:
      path: The file; its name ends in ``.npz`` or ``.csv``.
      classes: The number of classes; by default the largest label and 1, or the number of words.

    Returns:
      The data set, equal in every call.

    Privacy:
      Which labels occur counts as public, and so does the number of examples. Scale features by
      public constants (`standardize`) before they are stored: nothing is scaled here. Rows of the
      test part are not trained on, and no epsilon covers them.

    Example:
      >>> import pathlib, tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp(), "flowers.csv")
      >>> rows = "".join(f"{i},{i % 3},{'rose' if i % 2 else 'iris'}\n" for i in range(10))
      >>> _ = path.write_text("width,length,label\n" + rows)
      >>> flowers = load_file(path)
      >>> flowers.train[0].shape, flowers.test[1].shape, flowers.classes
      ((8, 2), (2,), 2)
    """
    path = Path(path)
    call = f"data.load_file({str(path)!r})"
    if path.suffix not in (".npz", ".csv"):
        raise ValueError(f"{call}: expected a file whose name ends in .npz or .csv.")
    if not path.is_file():
        raise FileNotFoundError(f"{call}: there is no such file. Usually its folder is missing.")
    parts = _table(path, call) if path.suffix == ".csv" else _arrays(path, call)
    labels, count = _numbered([y for _, y in parts], classes, call)
    inputs = [_inputs(x, call) for x, _ in parts]
    parts = list(zip(inputs, labels, strict=True))
    if len(parts) == 1:
        parts = list(hold_out(parts[0], max(1, len(labels[0]) // 5)))
    train, test = parts
    if train[0].shape[1:] != test[0].shape[1:]:
        raise ValueError(
            f"{call}: examples of the train part have shape {train[0].shape[1:]}, examples of "
            f"the test part {test[0].shape[1:]}; expected one shape."
        )
    note = "(a fifth held out for the test)" if len(inputs) == 1 else ""
    return Dataset(path.stem, train, test, count, note)


def _arrays(path: Path, call: str) -> list[Split]:
    """The parts of an ``.npz``: train and test, or all examples."""
    hint = f"{_FORMAT} Arrays of Python objects cannot be read."
    arrays = plain_arrays(path, call, hint)
    for names in (["x_train", "y_train", "x_test", "y_test"], ["x", "y"]):
        if set(names) <= set(arrays):
            found = [arrays[name] for name in names]
            return [_paired(x, y, call) for x, y in zip(found[::2], found[1::2], strict=True)]
    raise ValueError(f"{call}: the file holds {', '.join(sorted(arrays)) or 'nothing'}. {_FORMAT}")


def _paired(x: np.ndarray, y: np.ndarray, call: str) -> Split:
    column = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    if column.ndim != 1 or x.ndim < 2 or len(x) != len(y):
        raise ValueError(
            f"{call}: inputs have shape {x.shape} and labels {y.shape}. Expected an example a row, "
            "and one label for each. Convert one-hot labels by y.argmax(axis=1), and a single "
            "feature by x[:, None]."
        )
    if len(column) < 2:
        raise ValueError(f"{call}: {len(column)} examples in one part; expected at least 2.")
    return x, column


def _table(path: Path, call: str) -> list[Split]:
    """All rows of a ``.csv``."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{call}: expected text in UTF-8 ({error}).") from error
    first = text.partition("\n")[0]
    separator = max(",;\t", key=first.count)
    header, *rows = [row for row in csv.reader(text.splitlines(), delimiter=separator) if row] or [
        []
    ]
    header = [name.strip() for name in header]
    if len(header) < 2 or any(_number(name) is not None for name in header):
        raise ValueError(
            f"{call}: the first line is {first[:60]!r}. Expected the names of the columns, and at "
            "least two columns: features and a label."
        )
    if wrong := [i for i, row in enumerate(rows, 2) if len(row) != len(header)]:
        raise ValueError(
            f"{call}: line {wrong[0]} has {len(rows[wrong[0] - 2])} columns and the header "
            f"{len(header)}. Expected a value in every column of every line."
        )
    place = header.index("label") if "label" in header else len(header) - 1
    columns = [
        _column(name, [row[i] for row in rows], header[place], call)
        for i, name in enumerate(header)
        if i != place
    ]
    x = np.stack(columns, axis=1)
    return [_paired(x, np.array([row[place].strip() for row in rows]), call)]


def _column(name: str, words: list[str], label: str, call: str) -> np.ndarray:
    """The numbers of a column of features."""
    try:
        return np.array(words, np.float64)
    except ValueError as error:
        row, word = next((i, word) for i, word in enumerate(words, 1) if _number(word) is None)
        raise ValueError(
            f"{call}: column {name!r} has {word!r} in its row {row}; expected numbers in every "
            "column but that of the label. Encode words as numbers, fill gaps, or leave the column "
            f"out. The label here is {label!r}: the column named label, or else the last."
        ) from error


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _inputs(x: np.ndarray, call: str) -> np.ndarray:
    """Inputs in the types that models take; refuses what is not a finite number."""
    if x.dtype == np.uint8 and x.ndim in (3, 4):
        images = x[..., None] if x.ndim == 3 else x
        return images.astype(np.float32) / np.float32(255)
    if x.dtype.kind not in "biuf":
        raise ValueError(f"{call}: inputs are of type {x.dtype}; expected numbers.")
    if not np.isfinite(x).all():
        raise ValueError(
            f"{call}: some inputs are NaN or infinite; expected numbers. Usually values are "
            "missing: fill them, or leave their rows out."
        )
    if x.dtype.kind in "iu" and not (x.min() >= -(2**31) and x.max() < 2**31):
        raise ValueError(f"{call}: some inputs are whole numbers of more than 32 bits.")
    return x.astype(np.int32 if x.dtype.kind in "iu" else np.float32)


def _numbered(
    parts: list[np.ndarray], classes: int | None, call: str
) -> tuple[list[np.ndarray], int]:
    """Labels of all parts as int32 from 0, and the number of classes."""
    joined = np.concatenate(parts)
    if joined.dtype.kind == "U" and all(_number(word) is not None for word in joined):
        joined = joined.astype(np.float64)
    if joined.dtype.kind == "U":
        names, joined = np.unique(joined, return_inverse=True)
        found = len(names)
    elif joined.dtype.kind in "biuf" and np.isfinite(joined).all() and not np.any(joined % 1):
        found = int(joined.max()) + 1
    else:
        raise ValueError(
            f"{call}: labels are {joined.dtype} such as {joined.ravel()[0]!r}. Expected whole "
            "numbers from 0, or words. Usually the column is a quantity, which is not classified."
        )
    count = found if classes is None else classes
    if joined.min() < 0 or found > count or found > len(joined) // 2:
        raise ValueError(
            f"{call}: labels from {joined.min():g} to {joined.max():g} of {len(joined)} examples. "
            f"Expected {'0 and above' if classes is None else f'0 to {classes - 1}'}, and far "
            "fewer classes than examples. Usually the column is a number of a row, or a quantity."
        )
    edges = np.cumsum([len(part) for part in parts])[:-1]
    return np.split(joined.astype(np.int32), edges), count

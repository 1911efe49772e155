# SPDX-License-Identifier: Apache-2.0
"""Data sets of the user: an ``.npz`` of arrays, or a ``.csv`` table, for classification."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dpjax import checks
from dpjax._arrays import native
from dpjax._files import read_arrays
from dpjax.data.dataset import Dataset, Split, units_held_out
from dpjax.data.declared import GAPS
from dpjax.data.files import (
    flat_labels,
    float_images,
    int_labels,
    is_table,
    numbers,
    read_table,
)
from dpjax.types import HeldOut


def load_file(
    path: str | os.PathLike[str],
    classes: int | None = None,
    label: str | None = None,
    *,
    test: str | os.PathLike[str] | None = None,
    holdout: float | None = None,
) -> Dataset[Split]:
    r"""Loads a data set of your own from a file.

    | file | content |
    |---|---|
    | ``.npz`` | ``x_train``, ``y_train``, ``x_test``, ``y_test``; or ``x`` and ``y`` |
    | ``.csv`` | a header; numbers, and the label in the column ``label``, or else in the last |
    | ``.parquet``, ``.arrow``, ``.feather`` | as a ``.csv`` (``pip install pyarrow``) |

    Bytes of images, ``[examples, height, width]`` or with channels last, become float32 in [0, 1]
    with a channel axis; other whole numbers become int32, and other numbers float32. ``Label`` and
    ``LABEL`` are names of the column ``label`` too. Labels are whole numbers from 0, or words,
    which are numbered in alphabetical order. Missing labels (empty, nan, NA, null, none, ?) are
    refused.

    Args:
      path: The file; its name ends as above.
      classes: The number of classes; by default the largest label plus 1, or the number of words.
      label: The name of the column of labels in a ``.csv``, if it is another one.
      test: A public file of the same form with the rows for the test; then no row is held out.
      holdout: The fraction of rows that is held out for the test by a fixed shuffle, if the file
        has no test part; by default 0.2. With 0 all rows are for training.

    Privacy:
      Which labels occur counts as public, and so does the number of examples. Scale features by
      public constants (`standardize`) before they are stored: nothing is scaled here. Rows of the
      test part are not trained on, and no epsilon covers them: give `Dataset.held_out` to
      `dpjax.fit` or `dpjax.statement`, which then name them.

    Example:
      >>> import pathlib, tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp(), "flowers.csv")
      >>> rows = "".join(f"{i},{i % 3},{'rose' if i % 2 else 'iris'}\n" for i in range(10))
      >>> _ = path.write_text("width,length,label\n" + rows)
      >>> flowers = load_file(path)
      >>> flowers.train[0].shape, flowers.test[1].shape, flowers.classes
      ((8, 2), (2,), 2)
    """
    call = f"data.load_file({str(path)!r})"
    classes = checks.whole_or_none("data.load_file", "classes", classes)
    private = _read(Path(path), label, call)
    sources_of_test = [len(private.parts) > 1, test is not None, holdout is not None]
    if sum(sources_of_test) > 1:
        raise ValueError(f"{call}: expected a test part in the file, or test=, or holdout=.")
    parts = list(private.parts)
    if test is not None:
        parts.append(_public(Path(test), private))
    # The words of both parts are numbered together, so a word is the same class in each.
    labels, names, count = _numbered([y for _, y in parts], classes, call)
    inputs = [_in_model_dtype(x, call) for x, _ in parts]
    shapes = {x.shape[1:] for x in inputs}
    if len(shapes) > 1:
        raise ValueError(f"{call}: examples have shapes {shapes}; expected one.")
    splits = list(zip(inputs, labels, strict=True))

    notes = []
    if private.label is not None:  # the file is a table
        notes.append(f"the label is column {private.label!r}")
    if len(splits) == 2:  # the file has a test part, or ``test`` is one
        train, test_rows = splits
        # A test part of the same file is private too, so its rows count as held out.
        held_out = HeldOut(units=len(labels[1]))
        if test is not None:
            held_out = HeldOut(public=True)
            notes.append("the test rows are public")
    else:
        x, y = splits[0]
        held = units_held_out(call, len(y), holdout)
        # `held` is shuffled. A mask keeps the rows in the order of the file.
        in_test = np.isin(np.arange(len(y)), held)
        train = (x[~in_test], y[~in_test])
        test_rows = (x[in_test], y[in_test])
        held_out = HeldOut(units=len(held))
        notes.append(f"{len(held)} of {len(y)} rows are held out for the test")
    note = f"({'; '.join(notes)})" if notes else ""
    return Dataset(
        name=Path(path).stem,
        train=train,
        test=test_rows,
        classes=count,
        note=note,
        class_names=names,
        columns=private.columns,
        held_out=held_out,
    )


def load_inputs(path: str | os.PathLike[str], columns: Sequence[str] = ()) -> np.ndarray:
    r"""Loads the inputs of a file of your own, in the order of its rows; it needs no labels.

    Args:
      path: A file of `load_file`'s formats. In an ``.npz`` the array ``x`` is read, or ``x_test``.
      columns: The columns of a table, as `Dataset.columns` of the data set that was trained on has
        them; other columns are not read. An ``.npz`` needs none.

    Example:
      >>> import pathlib, tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp(), "new.csv")
      >>> _ = path.write_text("length,id,width\n1,a,2\n3,b,4\n")
      >>> load_inputs(path, columns=("width", "length")).tolist()
      [[2.0, 1.0], [4.0, 3.0]]
    """
    call = f"data.load_inputs({str(path)!r})"
    path = Path(path)
    if not is_table(path):
        arrays = read_arrays(path, call)
        for name in ("x", "x_test"):
            if name in arrays:
                return _in_model_dtype(arrays[name], call)
        raise ValueError(f"{call}: the file holds {sorted(arrays)}; expected x.")
    header, rows = read_table(path, call)
    missing = [repr(name) for name in columns if name not in header]
    if missing:
        raise ValueError(
            f"{call}: got columns {', '.join(header)}; expected {', '.join(missing)} too."
        )
    places = [header.index(name) for name in columns]
    words = [[row[place] for place in places] for row in rows]
    return _in_model_dtype(numbers(list(columns), words, call), call)


class _File(NamedTuple):
    """The content of a file, with labels as they are written."""

    parts: list[Split]
    """All rows; or those for training, and those for the test."""
    columns: tuple[str, ...] = ()
    """The names of the features of a table."""
    label: str | None = None
    """The column of a table from which the labels are."""


def _read(path: Path, label: str | None, call: str) -> _File:
    """The content of a file of either kind."""
    if not path.is_file():
        raise FileNotFoundError(f"{call}: there is no such file.")
    if is_table(path):
        return _table(path, label, call)
    if path.suffix == ".npz" and label is None:
        return _File(_arrays(path, call))
    raise ValueError(f"{call}: expected a .csv or .parquet, or an .npz without label=.")


def _public(path: Path, own: _File) -> Split:
    """The rows of a public test file, with the label and the columns of the private one."""
    call = f"data.load_file(test={str(path)!r})"
    public = _read(path, own.label, call)
    if len(public.parts) > 1 or public.columns != own.columns:
        raise ValueError(f"{call}: expected one part, with the columns of the private file.")
    return public.parts[0]


def _arrays(path: Path, call: str) -> list[Split]:
    arrays = read_arrays(path, call)
    in_parts = [("x_train", "y_train"), ("x_test", "y_test")]
    for pairs in (in_parts, [("x", "y")]):
        names = {name for pair in pairs for name in pair}
        if names <= set(arrays):
            return [_paired(arrays[x], arrays[y], call) for x, y in pairs]
    raise ValueError(
        f"{call}: the file holds {sorted(arrays)}; expected x and y, or a train and a test part."
    )


def _paired(x: np.ndarray, y: np.ndarray, call: str) -> Split:
    labels = flat_labels(y)
    numbers_in_rows = x.ndim > 1 and x.dtype.kind in "biuf"
    if not numbers_in_rows or labels.shape != x.shape[:1] or len(labels) < 2:
        raise ValueError(
            f"{call}: inputs are {x.dtype}{list(x.shape)} and labels {y.dtype}{list(y.shape)}; "
            "expected an example a row, and one label for each, such as y.argmax(axis=1)."
        )
    return x, labels


def _table(path: Path, label: str | None, call: str) -> _File:
    """A table as inputs and labels.

    ``label`` is the column of the labels; by default one of this name in any case, or the last.
    """
    header, rows = read_table(path, call)
    if label is not None and label not in header:
        raise ValueError(f"{call}: label={label!r}; expected one of {', '.join(header)}.")
    if label is None:
        # `max` takes `label` before `Label`, since small letters sort last.
        spelled = [name for name in header if name.lower() == "label"]
        label = max(spelled, default=header[-1])
    place = header.index(label)
    # `pop` removes the label from each row, so features remain.
    y = np.array([row.pop(place).strip() for row in rows])
    columns = header[:place] + header[place + 1 :]
    x = numbers(columns, rows, f"{call}: the label is column {label!r}")
    return _File([_paired(x, y, call)], tuple(columns), label)


def _in_model_dtype(x: np.ndarray, call: str) -> np.ndarray:
    """Inputs in the dtype that models read: int32 for whole numbers, else finite float32.

    Bytes of images become float32 in [0, 1].
    """
    if x.dtype == np.uint8 and x.ndim in (3, 4):
        return float_images(x)
    # This refuses words and whole numbers beyond int32, which the cast below wraps silently.
    x = native(x, f"{call}: inputs", np.int32)
    if x.dtype.kind in "iu":
        return x.astype(np.int32)
    with np.errstate(over="ignore"):  # an overflow is infinite, and refused below
        values = x.astype(np.float32)
    if not np.isfinite(values).all():
        raise ValueError(f"{call}: some inputs are NaN, infinite or beyond float32.")
    return values


def _numbered(
    parts: list[np.ndarray], classes: int | None, call: str
) -> tuple[list[np.ndarray], tuple[str, ...], int]:
    """Labels of each part as int32 from 0, the words that they were, and the number of classes.

    A part is the training or the test part. Words are numbered in alphabetical order; labels that
    are numbers stay as they are, and have no words. ``classes`` is the number that the user
    expects, or None. A class that the user expects may have no label in the file.
    """
    # NumPy and h5py also keep words as bytes (kind S).
    decoded = [np.char.decode(y) if y.dtype.kind == "S" else y for y in parts]
    labels = np.concatenate(decoded)
    names: tuple[str, ...] = ()
    if labels.dtype.kind == "U":  # text, as all cells of a table are
        missing = np.isin(np.char.lower(np.char.strip(labels)), sorted(GAPS))
        if missing.any():
            raise ValueError(f"{call}: label {missing.argmax() + 1} of {len(labels)} is missing.")
        try:
            labels = labels.astype(np.float64)
        except ValueError:  # not all are numbers, so all are words
            words, labels = np.unique(labels, return_inverse=True)
            names = tuple(words.tolist())
    labels = int_labels(labels, call)
    count = len(names) or int(labels.max()) + 1
    expected = "0 and up"
    most_classes = len(labels) // 2  # labels with more values are quantities or identifiers
    if classes is not None:
        expected = f"0 to {classes - 1}"
        most_classes = min(most_classes, classes)
    if labels.min() < 0 or count > most_classes:
        raise ValueError(
            f"{call}: labels from {labels.min()} to {labels.max()} of {len(labels)} examples; "
            f"expected {expected}, and far fewer classes."
        )
    beginnings = np.cumsum([len(y) for y in parts])[:-1]  # of all parts but the first
    return np.split(labels, beginnings), names, classes or count

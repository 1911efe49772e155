# SPDX-License-Identifier: Apache-2.0
"""Data sets of the user: an ``.npz`` of arrays, or a ``.csv`` table, for classification."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from dpjax import checks
from dpjax._files import read_arrays
from dpjax.data.arrays import native
from dpjax.data.dataset import Dataset, Split, hold_out
from dpjax.data.files import column, floats, numbers, read_table, whole

_MISSING = ("", "nan", "na", "n/a", "null", "none", "<na>", "?")  # as other programs write it


def load_file(
    path: str | os.PathLike[str], classes: int | None = None, label: str | None = None
) -> Dataset[Split]:
    r"""Loads a data set of your own from a file.

    | file | content |
    |---|---|
    | ``.npz`` | ``x_train``, ``y_train``, ``x_test``, ``y_test``; or ``x`` and ``y`` |
    | ``.csv`` | a header; numbers, and the label in the column ``label``, or else in the last |

    Without a test part, a fifth of the rows is held out as one, by a fixed shuffle. Bytes of
    images, ``[examples, height, width]`` or with channels last, become float32 in [0, 1] with a
    channel axis; other whole numbers become int32, and other numbers float32. ``Label`` and
    ``LABEL`` are names of the column ``label`` too. Labels are whole numbers from 0, or words,
    which are numbered in alphabetical order. Missing labels (empty, nan, NA, null, none, ?) are
    refused.

    Args:
      path: The file; its name ends in ``.npz`` or ``.csv``.
      classes: The number of classes; by default the largest label and 1, or the number of words.
      label: The name of the column of labels in a ``.csv``, if it is another one.

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
    classes = checks.whole_or_none("data.load_file", "classes", classes)
    if not path.is_file():
        raise FileNotFoundError(f"{call}: there is no such file.")
    columns, notes = (), []
    if path.suffix == ".csv":
        parts, columns, chosen = _table(path, label, call)
        notes.append(f"the label is column {chosen!r}")
    elif path.suffix == ".npz" and label is None:
        parts = _arrays(path, call)
    else:
        raise ValueError(f"{call}: expected a .csv, or an .npz without label=.")
    labels, names, count = _numbered([y for _, y in parts], classes, call)
    parts = [(_inputs(x, call), y) for (x, _), y in zip(parts, labels, strict=True)]
    if len(parts) == 1:
        parts = list(hold_out(parts[0], max(1, len(labels[0]) // 5)))
        notes.append("a fifth held out for the test")
    if len(shapes := {x.shape[1:] for x, _ in parts}) > 1:
        raise ValueError(f"{call}: examples have shapes {shapes}; expected one.")
    note = f"({'; '.join(notes)})" if notes else ""
    train, test = parts
    return Dataset(path.stem, train, test, count, note, names, columns)


def _arrays(path: Path, call: str) -> list[Split]:
    arrays = read_arrays(path, call)
    for pairs in ((("x_train", "y_train"), ("x_test", "y_test")), (("x", "y"),)):
        if {name for pair in pairs for name in pair} <= set(arrays):
            return [_paired(arrays[x], arrays[y], call) for x, y in pairs]
    raise ValueError(
        f"{call}: the file holds {sorted(arrays)}; expected x and y, or a train and a test part."
    )


def _paired(x: np.ndarray, y: np.ndarray, call: str) -> Split:
    labels = column(y)
    numbers_in_rows = x.ndim > 1 and x.dtype.kind in "biuf"
    if not numbers_in_rows or labels.shape != x.shape[:1] or len(labels) < 2:
        raise ValueError(
            f"{call}: inputs are {x.dtype}{list(x.shape)} and labels {y.dtype}{list(y.shape)}; "
            "expected an example a row, and one label for each, such as y.argmax(axis=1)."
        )
    return x, labels


def _table(path: Path, label: str | None, call: str) -> tuple[list[Split], tuple[str, ...], str]:
    """All rows of a ``.csv``, the names of its features, and that of the label."""
    header, rows = read_table(path, call)
    if label is not None and label not in header:
        raise ValueError(f"{call}: label={label!r}; expected one of {', '.join(header)}.")
    # `label` stands before `Label`, since small letters sort last.
    labels = [name for name in header if name.lower() == "label"]
    chosen = label or max(labels, default=header[-1])
    place = header.index(chosen)
    y = np.array([row.pop(place).strip() for row in rows])
    columns = header[:place] + header[place + 1 :]
    x = numbers(columns, rows, f"{call}: the label is column {chosen!r}")
    return [_paired(x, y, call)], tuple(columns), chosen


def _inputs(x: np.ndarray, call: str) -> np.ndarray:
    if x.dtype == np.uint8 and x.ndim in (3, 4):
        return floats(x)
    x = native(x, f"{call}: inputs")
    if x.dtype.kind in "iu":
        return x.astype(np.int32)
    with np.errstate(over="ignore"):
        values = x.astype(np.float32)
    if not np.isfinite(values).all():
        raise ValueError(f"{call}: some inputs are NaN, infinite or beyond float32.")
    return values


def _numbered(
    parts: list[np.ndarray], classes: int | None, call: str
) -> tuple[list[np.ndarray], tuple[str, ...], int]:
    """Labels of all parts as int32 from 0, the words that they were, and the number of classes."""
    names: tuple[str, ...] = ()
    # NumPy and h5py also keep words as bytes.
    labels = np.concatenate([np.char.decode(y) if y.dtype.kind == "S" else y for y in parts])
    if labels.dtype.kind == "U":
        missing = np.isin(np.char.lower(np.char.strip(labels)), _MISSING)
        if missing.any():
            raise ValueError(f"{call}: label {missing.argmax() + 1} of {len(labels)} is missing.")
        try:
            labels = labels.astype(np.float64)
        except ValueError:
            words, labels = np.unique(labels, return_inverse=True)
            names = tuple(words.tolist())
    labels = whole(labels, call)
    count = len(names) or int(labels.max()) + 1
    if labels.min() < 0 or count > (classes or count) or count > len(labels) // 2:
        raise ValueError(
            f"{call}: labels from {labels.min()} to {labels.max()} of {len(labels)} examples; "
            f"expected {f'0 to {classes - 1}' if classes else '0 and up'}, and far fewer classes."
        )
    edges = np.cumsum([len(y) for y in parts])[:-1]
    return np.split(labels, edges), names, classes or count

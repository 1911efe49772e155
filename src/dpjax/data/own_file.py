# SPDX-License-Identifier: Apache-2.0
"""Data sets of the user: an ``.npz`` of arrays, or a ``.csv`` table, for classification.

A named data set has a shape and a number of classes in a table (`sources`); here both come from
the file. Nothing else is computed from the examples: features keep their units, because a mean
of private examples would be a release that the accountant does not see.
"""

from __future__ import annotations

import csv
import io
import math
import os
from pathlib import Path

import numpy as np
from absl import logging

from dpjax import checks
from dpjax._files import read_arrays
from dpjax._foreign import fits
from dpjax.data.dataset import Dataset, Split, hold_out
from dpjax.data.files import column, floats, number

_FORMAT = (
    "Expected x and y, or x_train, y_train, x_test and y_test, one example a row and a label for "
    "each: numpy.savez(path, x=x, y=y)."
)
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
    refused, and so is a mixture of numbers and words.

    Args:
      path: The file; its name ends in ``.npz`` or ``.csv``.
      classes: The number of classes; by default the largest label and 1, or the number of words.
      label: The name of the column of labels in a ``.csv``, if it is another one.

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
    hint = "It is the number of outputs of the model; leave it out to count the labels."
    classes = checks.whole_or_none("data.load_file", "classes", classes, hint)
    if not path.is_file():
        raise FileNotFoundError(f"{call}: there is no such file. Usually its folder is missing.")
    columns, labelled, notes = (), call, []
    if path.suffix == ".csv":
        parts, columns, chosen = _table(path, label, call)
        labelled = f"{call}: the label is column {chosen!r}"
        notes.append(f"the label is column {chosen!r}")
    elif label is None:
        parts = _arrays(path, call)
    else:
        raise ValueError(
            f"{call[:-1]}, label={label!r}): only a .csv has columns by name; the labels of an "
            ".npz are its array y."
        )
    labels, names, count = _numbered([y for _, y in parts], classes, labelled)
    inputs = _inputs([x for x, _ in parts], call)
    parts = list(zip(inputs, labels, strict=True))
    if len(parts) == 1:
        parts = list(hold_out(parts[0], max(1, len(labels[0]) // 5)))
    train, test = parts
    if train[0].shape[1:] != test[0].shape[1:]:
        raise ValueError(
            f"{call}: examples of the train part have shape {train[0].shape[1:]}, examples of "
            f"the test part {test[0].shape[1:]}; expected one shape."
        )
    if len(inputs) == 1:
        notes.append("a fifth held out for the test")
    note = f"({'; '.join(notes)})" if notes else ""
    return Dataset(path.stem, train, test, count, note, names, columns)


def _arrays(path: Path, call: str) -> list[Split]:
    """The parts of an ``.npz``: train and test, or all examples."""
    hint = f"{_FORMAT} Arrays of Python objects cannot be read."
    arrays = read_arrays(path, call, hint)
    for names in (["x_train", "y_train", "x_test", "y_test"], ["x", "y"]):
        if set(names) <= set(arrays):
            if more := sorted(set(arrays) - set(names)):
                raise ValueError(
                    f"{call}: the file holds {', '.join(names)}, and also {', '.join(more)}, which "
                    f"would be ignored. {_FORMAT} Leave other arrays out of the file."
                )
            found = [arrays[name] for name in names]
            return [_paired(x, y, call) for x, y in zip(found[::2], found[1::2], strict=True)]
    raise ValueError(f"{call}: the file holds {', '.join(sorted(arrays)) or 'nothing'}. {_FORMAT}")


def _paired(x: np.ndarray, y: np.ndarray, call: str) -> Split:
    labels = column(y)
    if labels.ndim != 1 or x.ndim < 2 or len(x) != len(y) or 0 in x.shape[1:]:
        raise ValueError(
            f"{call}: inputs have shape {x.shape} and labels {y.shape}. Expected an example a row, "
            "and one label for each. Convert one-hot labels by y.argmax(axis=1), and a single "
            "feature by x[:, None]."
        )
    if len(labels) < 2:
        raise ValueError(f"{call}: {len(labels)} examples in one part; expected at least 2.")
    return x, labels


def _table(path: Path, label: str | None, call: str) -> tuple[list[Split], tuple[str, ...], str]:
    """All rows of a ``.csv``, the names of its features, and that of the label."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{call}: expected text in UTF-8 ({error}).") from error
    first = text.partition("\n")[0]
    separator = max(",;\t", key=first.count)
    try:
        # Not `splitlines`, which ends a line at characters that a label may hold.
        # Strict: an open quotation mark would make one label of all lines behind it.
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
        lines = [(reader.line_num, row) for row in reader if row]
    except csv.Error as error:
        raise ValueError(
            f"{call}: expected a table with {separator!r} ({error}). Usually a quotation mark is "
            "not closed: inside of a quoted value write it twice."
        ) from error
    header, *rows = [row for _, row in lines] or [[]]
    header = [name.strip() for name in header]
    if len(header) < 2 or any(number(name) is not None for name in header):
        raise ValueError(
            f"{call}: the first line is {first[:60]!r}. Expected the names of the columns, and at "
            "least two columns: features and a label."
        )
    if "" in header:
        raise ValueError(
            f"{call}: column {header.index('') + 1} has no name; expected one for every column. "
            "Usually pandas wrote its index, the numbers of the rows: write the table again by "
            "df.to_csv(path, index=False)."
        )
    if wrong := [(line, len(row)) for line, row in lines if len(row) != len(header)]:
        raise ValueError(
            f"{call}: line {wrong[0][0]} has {wrong[0][1]} columns and the header {len(header)}. "
            "Expected a value in every column of every line."
        )
    if label is not None and label not in header:
        raise ValueError(
            f"{call[:-1]}, label={label!r}): the columns are {', '.join(header)}. Expected the "
            "name of one of them."
        )
    # `label` stands before `Label`, since small letters sort last.
    labels = [name for name in header if name.lower() == "label"]
    chosen = label or max(labels, default=header[-1])
    if (count := header.count(chosen)) > 1:
        raise ValueError(
            f"{call}: {count} columns are named {chosen!r}; expected one, the label. The others "
            "would be features that give the label away. Usually two tables were joined: leave "
            "all but one out."
        )
    place = header.index(chosen)
    kept = [i for i in range(len(header)) if i != place]
    x = np.stack([_column(header[i], [row[i] for row in rows], chosen, call) for i in kept], axis=1)
    y = np.array([row[place].strip() for row in rows])
    return [_paired(x, y, call)], tuple(header[i] for i in kept), chosen


def _column(name: str, words: list[str], label: str, call: str) -> np.ndarray:
    """The numbers of a column of features."""
    numbers = [number(word) for word in words]
    for row, (word, value) in enumerate(zip(words, numbers, strict=True), 1):
        if value is None or not math.isfinite(value):
            raise ValueError(
                f"{call}: column {name!r} has {word!r} in its row {row}; expected finite numbers "
                "in every column but that of the label. Encode words as numbers, fill gaps, or "
                f"leave the column out. The label here is column {label!r}; label= of load_file, "
                "and --label of dpjax train, name another."
            )
    return np.array(numbers, np.float64)


def _inputs(parts: list[np.ndarray], call: str) -> list[np.ndarray]:
    """Inputs of all parts in the types that models take; refuses parts on different scales."""
    images = [x.dtype == np.uint8 and x.ndim in (3, 4) for x in parts]
    if all(images):
        return [floats(x) for x in parts]
    if any(images) or len({x.dtype.kind in "iu" for x in parts}) > 1:
        raise ValueError(
            f"{call}: inputs of the train part are of type {parts[0].dtype}, inputs of the test "
            f"part {parts[1].dtype}. Bytes of images would be scaled to [0, 1] and the others not; "
            "usually one part was scaled already: store both as uint8, or both scaled as float32."
        )
    return [_numbers(x, call) for x in parts]


def _numbers(x: np.ndarray, call: str) -> np.ndarray:
    """Inputs as int32 or float32; refuses what is not a finite number."""
    if x.dtype.kind not in "biuf":
        raise ValueError(f"{call}: inputs are of type {x.dtype}; expected numbers.")
    if x.dtype.kind in "iu":
        if not fits(x, np.int32):
            raise ValueError(f"{call}: some inputs are whole numbers of more than 32 bits.")
        return x.astype(np.int32)
    with np.errstate(over="ignore"):
        found = x.astype(np.float32)
    if not np.isfinite(found).all():
        first = np.argwhere(~np.isfinite(found))[0].tolist()
        raise ValueError(
            f"{call}: some inputs are NaN, infinite or beyond float32, the first at index {first}; "
            "expected finite numbers below 3e38. Usually values are missing: fill them, or leave "
            "their rows out."
        )
    return found


def _decoded(y: np.ndarray, call: str) -> np.ndarray:
    """Labels whose words are text; NumPy and h5py also keep them as bytes."""
    try:
        return np.char.decode(y, "utf-8") if y.dtype.kind == "S" else y
    except UnicodeDecodeError as error:
        raise ValueError(f"{call}: expected labels in UTF-8 ({error}).") from error


def _require_all(words: list[str], call: str) -> None:
    """Refuses missing labels, and a mixture of numbers and words."""
    for row, word in enumerate(words, 1):
        if word.strip().lower() in _MISSING:
            raise ValueError(
                f"{call}: label {row} of {len(words)} is {word!r}, which stands for a missing "
                "value. Expected a label for every example: fill it, or leave the example out. If "
                "it names a class, write another word for it."
            )
    numbers = [number(word) is not None for word in words]
    if any(numbers) != all(numbers):
        numeral, word = words[numbers.index(True)], words[numbers.index(False)]
        raise ValueError(
            f"{call}: some labels are numbers, such as {numeral!r}, and others words, such as "
            f"{word!r}. Expected one of the two. Usually a word stands for a missing label: leave "
            "these examples out. If all are names of classes, write every one of them as a word."
        )


def _numbered(
    parts: list[np.ndarray], classes: int | None, call: str
) -> tuple[list[np.ndarray], tuple[str, ...], int]:
    """Labels of all parts as int32 from 0, the words that they were, and the number of classes."""
    names: list[str] = []
    joined = np.concatenate([_decoded(y, call) for y in parts])
    if joined.dtype.kind == "U" or (joined.dtype.kind == "f" and np.isnan(joined).any()):
        _require_all(joined.astype(str).tolist(), call)
    if joined.dtype.kind == "U" and number(joined[0]) is not None:
        joined = joined.astype(np.float64)
    if joined.dtype.kind == "U":
        words, joined = np.unique(joined, return_inverse=True)
        names, found = words.tolist(), len(words)
    elif joined.dtype.kind in "biuf" and np.isfinite(joined).all() and not np.any(joined % 1):
        found = int(joined.max()) + 1
    else:
        raise ValueError(
            f"{call}: labels are {joined.dtype} such as {joined.ravel()[0].item()!r}. Expected "
            "whole numbers from 0, or words. Usually the column is a quantity, which is not "
            "classified."
        )
    count = found if classes is None else classes
    if joined.min() < 0 or found > count or found > len(joined) // 2:
        raise ValueError(
            f"{call}: labels from {joined.min():g} to {joined.max():g} of {len(joined)} examples. "
            f"Expected {'0 and above' if classes is None else f'0 to {classes - 1}'}, and far "
            "fewer classes than examples. Usually the column is a number of a row, or a quantity."
        )
    present = len(np.unique(joined))
    if present == 1:
        only = names[0] if names else int(joined[0])
        raise ValueError(
            f"{call}: all {len(joined)} labels are {only!r}. Expected at least 2 classes. Usually "
            "another column is the label, or the file holds one class alone."
        )
    if classes is None and present < found:
        logging.warning(
            "%s: labels are %d different numbers from %d to %d, and the model gets an output for "
            "each number from 0 to the largest: %d classes. Number them from 0 without gaps.",
            call,
            present,
            joined.min(),
            joined.max(),
            count,
        )
    edges = np.cumsum([len(part) for part in parts])[:-1]
    return np.split(joined.astype(np.int32), edges), tuple(names), count

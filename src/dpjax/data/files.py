# SPDX-License-Identifier: Apache-2.0
"""Readers of files: ``.npz`` of images (or of their JPEG or PNG streams), and tables."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dpjax import checks
from dpjax._files import read_arrays
from dpjax.data.dataset import Dataset, Split, hold_out
from dpjax.data.declared import text
from dpjax.data.sources import Source

_OF_ARROW = (".parquet", ".arrow", ".feather")
_LISTED = 10  # faults of a table in one error
_PARTS = ("train", "test")
# The names of the arrays of images and labels, where {} is the part: as Keras names them, also
# encoded images, and as MedMNIST does.
_LAYOUTS = (("x_{}", "y_{}"), ("png_{}", "y_{}"), ("jpeg_{}", "y_{}"), ("{}_images", "{}_labels"))


def read(name: str, source: Source, path: Path) -> Dataset[Split]:
    """The data set ``name`` from its file: a table in a ``.csv``, or images in an ``.npz``."""
    call = f"data.load({name!r}): {path}"
    if path.suffix == ".csv":
        header, words = read_table(path, call)
        rows = numbers(header, words, call)
        return table(name, source, rows[:, :-1], rows[:, -1])  # the target is the last column
    arrays = read_arrays(path, f"data.load({name!r})")  # its errors name the path too
    for image_key, label_key in _LAYOUTS:
        expected = {key.format(part) for part in _PARTS for key in (image_key, label_key)}
        # A file may hold further arrays.
        if expected <= set(arrays):
            parts = []
            for part in _PARTS:
                x = scaled_images(_pixels(arrays, image_key, part, call), call)
                y = int_labels(arrays[label_key.format(part)], call)
                parts.append((x, y))
            train, test = parts
            note = _note(arrays, image_key) or source.note
            return Dataset(name, train, test, source.classes, note)
    raise ValueError(f"{call} holds {sorted(arrays)}; expected x_train, y_train, x_test, y_test.")


def is_table(path: Path) -> bool:
    """Whether the name of a file is that of a table."""
    return path.suffix in (".csv", *_OF_ARROW)


def read_table(path: Path, call: str) -> tuple[list[str], list[list[str]]]:
    """The names of the columns of a table, and its rows, with each cell as a word."""
    if path.suffix in _OF_ARROW:
        header, rows = _read_arrow(path, call)
    else:
        header, rows = _read_csv(path, call)
    header = checked_names([name.strip() for name in header], call)
    # If a name is a number, the first line is a row of a table without names. An empty name is that
    # of the index, which pandas writes as a column.
    if len(header) < 2 or "" in header or any(parses(float, name) for name in header):
        raise ValueError(
            f"{call}: expected the names of at least two columns: df.to_csv(path, index=False)."
        )
    faults = [
        f"row {number} has {len(row)} of {len(header)} columns"
        for number, row in enumerate(rows, 1)
        if len(row) != len(header)
    ]
    if faults:
        raise ValueError(listed(call, faults))
    return header, rows


def _read_csv(path: Path, call: str) -> tuple[list[str], list[list[str]]]:
    """The cells of the first line, which are names, and of each other line that is not empty."""
    try:
        content = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{call}: expected a table of text in UTF-8 ({error}).") from error
    # The separator is the one that the first line has most often; a comma, if it has none.
    first, _, _ = content.partition("\n")
    separator = max(",;\t", key=first.count)
    # `splitlines` is not used, because it ends a line at characters that a label may hold.
    file = io.StringIO(content, newline="")
    lines: list[list[str]] = []
    try:
        # `strict=True` refuses an open quotation mark, which otherwise makes one label of all lines
        # behind it.
        for row in csv.reader(file, delimiter=separator, strict=True):
            if row:
                lines.append(row)
    except csv.Error as error:
        fault = f"{call}: row {len(lines)}: {error}; expected quotation marks in pairs."
        raise ValueError(fault) from error
    header, *rows = lines or [[]]  # `read_table` refuses the empty header of an empty file
    return header, rows


def _read_arrow(path: Path, call: str) -> tuple[list[str], list[list[str]]]:
    """The names of the columns, and the rows with each cell as a word."""
    checks.importable(call, "pyarrow")
    import pyarrow
    from pyarrow import feather, parquet

    reader = parquet.read_table
    if path.suffix != ".parquet":
        reader = feather.read_table  # .arrow and .feather are one format
    try:
        # A path that is missing is an OSError with its name, as for a `.csv`.
        with open(path, "rb") as file:
            table = reader(file)
    except pyarrow.ArrowException as error:
        raise ValueError(f"{call}: expected a table of Parquet or Arrow ({error}).") from error
    columns = [map(text, column.to_pylist()) for column in table.columns]
    return table.column_names, [list(row) for row in zip(*columns, strict=True)]


def listed(call: str, faults: list[str]) -> str:
    """The message of an error with the first ten faults of a table."""
    if len(faults) == 1:
        return f"{call}: {faults[0]}."
    heading = f"{call}: {len(faults)} faults"
    if len(faults) > _LISTED:
        heading += f"; the first {_LISTED} are"
    return "\n  ".join([f"{heading}:", *[f"{fault}." for fault in faults[:_LISTED]]])


def checked_names(header: list[str], call: str) -> list[str]:
    """The names of columns; refuses a name that occurs twice."""
    twice = {name for name in header if header.count(name) > 1}
    if twice:
        raise ValueError(f"{call}: column {min(twice)!r} occurs twice; expected each once.")
    return header


def numbers(header: list[str], rows: list[list[str]], call: str) -> np.ndarray:
    """The words of a table as finite float32, ``[rows, columns]``; an error names the column."""
    values = np.empty((len(rows), len(header)), np.float32)
    for place, name in enumerate(header):
        try:
            values[:, place] = [row[place] for row in rows]
            if not np.isfinite(values[:, place]).all():
                raise ValueError("NaN or infinite")
        except ValueError as error:
            raise ValueError(
                f"{call}: expected finite numbers in every column; column {name!r}: {error}. "
                "Words, dates and gaps are for data.table, or --columns."
            ) from error
    return values


def scaled_images(x: np.ndarray, where: str) -> np.ndarray:
    """Images as float32 in [0, 1] with a channel axis."""
    scaled = x.dtype.kind == "f" and not (x.size and (x.min() < 0 or x.max() > 1))
    if x.ndim not in (3, 4) or not (scaled or x.dtype == np.uint8):
        raise ValueError(
            f"{where}: got images {x.dtype}{list(x.shape)}; expected bytes, or numbers in [0, 1], "
            "[examples, height, width, channels]."
        )
    return float_images(x)


def float_images(x: np.ndarray) -> np.ndarray:
    """Images as float32 with a channel axis; bytes are scaled to [0, 1]."""
    images = x.astype(np.float32)
    if x.ndim == 3:
        images = images[..., None]
    if x.dtype == np.uint8:
        # A float64 copy takes eight times their bytes.
        images /= np.float32(255)
    return images


def flat_labels(y: np.ndarray) -> np.ndarray:
    """Labels as ``[examples]``, also those stored as one column."""
    # A one-hot row of several classes is not a label.
    if y.ndim == 2 and y.shape[1] == 1:
        return y[:, 0]
    return y


def int_labels(y: np.ndarray, call: str) -> np.ndarray:
    """Labels as int32, ``[examples]``; refuses one-hot rows, and numbers that int32 changes."""
    labels = flat_labels(y)
    good = labels.ndim == 1 and labels.dtype.kind in "biuf"
    with np.errstate(invalid="ignore"):  # NaN, which equals no number
        good = good and np.array_equal(labels, labels.astype(np.int32))
    if not good:
        raise ValueError(
            f"{call}: got labels {y.dtype}{list(y.shape)}; expected a whole number for each "
            "example, such as y.argmax(axis=1)."
        )
    return labels.astype(np.int32)


def table(name: str, source: Source, x: np.ndarray, y: np.ndarray) -> Dataset[Split]:
    """A table as a data set; the test part is split off from its rows."""
    rows = (x.astype(np.float32), y.astype(np.float32))
    return Dataset(name, *hold_out(rows, source.test_size), source.classes, source.note)


def parses(read: Callable[[str], Any], word: str) -> bool:
    """Whether ``read`` takes a word, and raises no ValueError."""
    try:
        read(word)
    except ValueError:
        return False
    return True


def _note(arrays: Mapping[str, np.ndarray], image_key: str) -> str:
    if image_key == "jpeg_{}":
        return "lossy: decoded from JPEG copies"
    # A lossless file lists the images that exist only as lossy copies.
    lossy = sum(arrays[key].size for key in ("lossy_train", "lossy_test") if key in arrays)
    return f"{lossy} of the images are lossy copies" if lossy else ""


def _pixels(arrays: Mapping[str, np.ndarray], image_key: str, part: str, call: str) -> np.ndarray:
    """The images of the "train" or "test" part, ``[examples, height, width]``, or channels last.

    ``image_key`` is the name of their array, as in `_LAYOUTS`. Images that are encoded as JPEG or
    PNG lie in one buffer of bytes, one behind the other.
    """
    x = arrays[image_key.format(part)]
    if image_key not in ("png_{}", "jpeg_{}"):
        return x
    checks.importable(call, "PIL")
    from PIL import Image

    buffer = x.tobytes()
    # An image begins at each offset but the last, which is the end of the buffer.
    offsets = arrays[f"offsets_{part}"].tolist()
    decoded = []
    try:
        for begin, end in itertools.pairwise(offsets):
            image = Image.open(io.BytesIO(buffer[begin:end]))
            if image.mode == "P":
                # The pixels of a palette are indices rather than shades.
                image = image.convert("RGB")
            decoded.append(np.asarray(image))
        return np.stack(decoded)
    except (OSError, SyntaxError, ValueError) as error:  # a SyntaxError of a PNG's chunks
        raise ValueError(f"{call} holds encoded images that do not decode ({error}).") from error

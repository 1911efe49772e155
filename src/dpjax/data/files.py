# SPDX-License-Identifier: Apache-2.0
"""Readers of files: ``.npz`` of images (or of their JPEG or PNG streams), ``.csv`` tables.

Files are data, never code: nothing is unpickled. A truncated or changed file raises an error
that names it.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from dpjax._foreign import fits
from dpjax.data.dataset import Dataset, Split, hold_out
from dpjax.data.encoded import decoded
from dpjax.data.sources import Source

# The errors of zipfile and NumPy for a truncated or changed file.
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, TypeError)
# An AttributeError, because NumPy returns a lone array, without `files`.
_DAMAGED += (KeyError, NotImplementedError, RuntimeError, AttributeError)

# The names of a part's arrays: Keras's, Keras's with encoded images, and MedMNIST's.
_ENCODED = ("png_{}", "jpeg_{}")
_LAYOUTS = (("x_{}", "y_{}"), *((name, "y_{}") for name in _ENCODED), ("{}_images", "{}_labels"))


def read(name: str, source: Source, path: Path) -> Dataset[Split]:
    """A data set from its file."""
    return (_read_csv if path.suffix == ".csv" else _read_npz)(name, source, path)


def unit(x: np.ndarray, where: str) -> np.ndarray:
    """Images as float32 in [0, 1] with a channel axis."""
    x = x[..., None] if x.ndim == 3 else x
    if x.ndim != 4:
        raise ValueError(
            f"data.load: {where}: got images of shape {x.shape}; expected [examples, height, "
            "width, channels], or [examples, height, width] for one channel."
        )
    if x.dtype == np.uint8:
        # In float32 alone: a float64 copy of all images would take eight times their bytes.
        return x.astype(np.float32) / np.float32(255)
    if x.dtype.kind != "f" or (x.size and not (x.min() >= 0 and x.max() <= 1)):
        reach = f" from {x.min()} to {x.max()}" if x.size else ""
        raise ValueError(
            f"data.load: {where}: got images of type {x.dtype}{reach}; "
            "expected bytes, or numbers in [0, 1]. Usually the images were standardised: store "
            "the original ones."
        )
    return x.astype(np.float32)


def table(name: str, source: Source, x: np.ndarray, y: np.ndarray, where: str) -> Dataset[Split]:
    """A table as a data set; the test part is split off from its rows."""
    if len(x) <= source.test_size:
        raise ValueError(
            f"data.load({name!r}): {where}: got {len(x)} rows; expected more than the "
            f"{source.test_size} rows of the test part. The file may have been cut off."
        )
    rows = (x.astype(np.float32), y.astype(np.float32))
    return Dataset(name, *hold_out(rows, source.test_size), source.classes, source.note)


def _read_csv(name: str, source: Source, path: Path) -> Dataset[Split]:
    try:
        header, *lines = path.read_text(encoding="utf-8-sig").splitlines() or [""]
        separator = ";" if ";" in header else ","
        # Without this check a table without a header would silently lose its first row.
        if all(map(_number, header.split(separator))):
            raise ValueError(f"its first line has numbers and no names ({header[:60]})")
        # A "#" in a row is an error, not a comment that hides the rest of the row.
        options = {"delimiter": separator, "comments": None, "ndmin": 2}
        rows = np.loadtxt(lines, **options) if lines else np.zeros((0, 1))
    except ValueError as error:
        raise ValueError(
            f"data.load({name!r}): {path} is not a table of numbers: {error}. Expected a header, "
            "and then rows of equal length with the target last, and no comments."
        ) from error
    return table(name, source, rows[:, :-1], rows[:, -1], str(path))


def _number(word: str) -> bool:
    try:
        float(word.strip(' "'))
    except ValueError:
        return False
    return True


def _read_npz(name: str, source: Source, path: Path) -> Dataset[Split]:
    hint = "It may have been cut off while it was copied: fetch it again."
    arrays = plain_arrays(path, f"data.load({name!r})", hint)
    for images, labels in _LAYOUTS:
        keys = [key.format(part) for part in ("train", "test") for key in (images, labels)]
        # The first layout whose four arrays all exist; a file may hold further arrays.
        if not set(keys) <= set(arrays):
            continue
        train, test = (
            _part(arrays, images.format(part), labels.format(part), path)
            for part in ("train", "test")
        )
        return Dataset(name, train, test, source.classes, _note(arrays, images) or source.note)
    raise ValueError(
        f"data.load({name!r}): {path} holds {sorted(arrays)}; expected x_train, y_train, "
        "x_test and y_test. It may be another data set under this name."
    )


def _note(arrays: Mapping[str, np.ndarray], images: str) -> str:
    """What readers of results should know about the images."""
    if images == "jpeg_{}":
        return "lossy: decoded from JPEG copies"
    # A file without loss names the images that were to be had as lossy copies alone.
    lossy = sum(arrays[key].size for key in ("lossy_train", "lossy_test") if key in arrays)
    return f"{lossy} of the images are lossy copies" if lossy else ""


def plain_arrays(path: Path, call: str, hint: str) -> Mapping[str, np.ndarray]:
    """All arrays of a file; an error of ``call``, with this hint, if any cannot be read."""
    try:
        # Pickled arrays are refused, because they can run code when they are read.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            return {key: stored[key] for key in stored.files}
    except _DAMAGED as error:
        what = f"{call}: {path} is not a whole .npz file of plain arrays ({error})."
        raise ValueError(f"{what} {hint}") from error


def _part(arrays: Mapping[str, np.ndarray], images: str, labels: str, path: Path) -> Split:
    x, y = arrays[images], arrays[labels]
    form, _, part = images.partition("_")
    if f"{form}_{{}}" in _ENCODED:
        x = decoded(x, arrays.get(f"offsets_{part}"), path)
    return unit(x, str(path)), _whole(y, path)


def _whole(y: np.ndarray, path: Path) -> np.ndarray:
    """Labels as int32, ``[examples]``; MedMNIST's have a second axis of length 1."""
    # Columns of length 1 alone: a one-hot row of one class would otherwise pass as a label.
    column = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    numbers = column.ndim == 1 and column.dtype.kind in "iuf" and np.isfinite(column).all()
    if not numbers or not fits(column, np.int32) or np.any(column % 1):
        raise ValueError(
            f"data.load: {path}: got labels of type {y.dtype} and shape {y.shape}; expected a "
            "whole number for each example, counted from 0. Convert one-hot rows by "
            ".argmax(axis=1)."
        )
    return column.astype(np.int32)

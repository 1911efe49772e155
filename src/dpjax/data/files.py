# SPDX-License-Identifier: Apache-2.0
"""Readers of files: ``.npz`` of images (or of their JPEG or PNG streams), ``.csv`` tables.

Files are data, never code: nothing is unpickled. A truncated or changed file raises an error
that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from dpjax._files import read_arrays
from dpjax._foreign import fits
from dpjax.data.dataset import Dataset, Split, hold_out
from dpjax.data.encoded import decoded
from dpjax.data.sources import Source

# The names of a part's arrays: Keras's, Keras's with encoded images, and MedMNIST's.
_ENCODED = ("png_{}", "jpeg_{}")
_LAYOUTS = (("x_{}", "y_{}"), *((name, "y_{}") for name in _ENCODED), ("{}_images", "{}_labels"))


def read(name: str, source: Source, path: Path) -> Dataset[Split]:
    """A data set from its file."""
    return (_read_csv if path.suffix == ".csv" else _read_npz)(name, source, path)


def unit(x: np.ndarray, where: str) -> np.ndarray:
    """Images as float32 in [0, 1] with a channel axis."""
    if x.ndim not in (3, 4):
        raise ValueError(
            f"data.load: {where}: got images of shape {x.shape}; expected [examples, height, "
            "width, channels], or [examples, height, width] for one channel."
        )
    if x.dtype != np.uint8 and (
        x.dtype.kind != "f" or (x.size and not (x.min() >= 0 and x.max() <= 1))
    ):
        reach = f" from {x.min()} to {x.max()}" if x.size else ""
        raise ValueError(
            f"data.load: {where}: got images of type {x.dtype}{reach}; "
            "expected bytes, or numbers in [0, 1]. Usually the images were standardised: store "
            "the original ones."
        )
    return floats(x)


def floats(x: np.ndarray) -> np.ndarray:
    """Images as float32 with a channel axis; bytes are scaled to [0, 1]."""
    x = x[..., None] if x.ndim == 3 else x
    found = x.astype(np.float32)
    # In float32 alone: a float64 copy of all images would take eight times their bytes.
    return found / np.float32(255) if x.dtype == np.uint8 else found


def column(y: np.ndarray) -> np.ndarray:
    """Labels as ``[examples]``, also of a file that stores them as a table of one column."""
    # Columns of length 1 alone: a one-hot row of one class would otherwise pass as a label.
    return y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y


def number(word: str) -> float | None:
    """The number that a word of a table is, or None."""
    try:
        return None if "_" in word else float(word)  # Python reads 1_000 as a number
    except ValueError:
        return None


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
        if all(number(name.strip(' "')) is not None for name in header.split(separator)):
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


def _read_npz(name: str, source: Source, path: Path) -> Dataset[Split]:
    hint = "It may have been cut off while it was copied: fetch it again."
    arrays = read_arrays(path, f"data.load({name!r})", hint)
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


def _part(arrays: Mapping[str, np.ndarray], images: str, labels: str, path: Path) -> Split:
    x, y = arrays[images], arrays[labels]
    form, _, part = images.partition("_")
    if f"{form}_{{}}" in _ENCODED:
        x = decoded(x, arrays.get(f"offsets_{part}"), path)
    return unit(x, str(path)), _whole(y, path)


def _whole(y: np.ndarray, path: Path) -> np.ndarray:
    """Labels as int32, ``[examples]``; MedMNIST's have a second axis of length 1."""
    found = column(y)
    numbers = found.ndim == 1 and found.dtype.kind in "iuf" and np.isfinite(found).all()
    if not numbers or not fits(found, np.int32) or np.any(found % 1):
        raise ValueError(
            f"data.load: {path}: got labels of type {y.dtype} and shape {y.shape}; expected a "
            "whole number for each example, counted from 0. Convert one-hot rows by "
            ".argmax(axis=1)."
        )
    return found.astype(np.int32)

# SPDX-License-Identifier: Apache-2.0
"""Files in a folder: ``.npz`` of images (or of their JPEG streams), ``.csv`` tables.

Files are data, never code: nothing is unpickled.  One that was cut off or changed is an
error that names it.
"""

from __future__ import annotations

import io
import itertools
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from dpjax.data.dataset import Dataset, Split, hold_out
from dpjax.data.sources import Source

__all__ = ["read", "table", "unit"]

# What the arrays of a part are called: as Keras does, and as MedMNIST does.
_LAYOUTS = (("x_{}", "y_{}"), ("jpeg_{}", "y_{}"), ("{}_images", "{}_labels"))


def read(name: str, source: Source, path: Path) -> Dataset[Split]:
    """A data set from its file."""
    return (_read_csv if path.suffix == ".csv" else _read_npz)(name, source, path)


def unit(x: np.ndarray, where: str) -> np.ndarray:
    """Images as float32 in [0, 1] with a channel axis."""
    x = x[..., None] if x.ndim == 3 else x
    if x.ndim != 4:
        raise ValueError(
            f"data.load: {where}: got images of shape {x.shape}; expected [examples, height, "
            "width, channels], or without the channels if there is one."
        )
    if x.dtype == np.uint8:
        return x.astype(np.float32) / np.float32(255)
    if x.dtype.kind != "f" or not (x.min() >= 0 and x.max() <= 1):
        raise ValueError(
            f"data.load: {where}: got images of type {x.dtype} from {x.min()} to {x.max()}; "
            "expected bytes, or numbers in [0, 1]. Images that were standardised must be stored "
            "as they came."
        )
    return x.astype(np.float32)


def table(name: str, source: Source, x: np.ndarray, y: np.ndarray) -> Dataset[Split]:
    """A table as a data set: some of its rows are split off for the test."""
    if len(x) <= source.test_size:
        raise ValueError(
            f"data.load({name!r}): got {len(x)} rows; expected more than the {source.test_size} "
            "that are kept for the test. The file may have been cut off."
        )
    rows = (x.astype(np.float32), y.astype(np.float32))
    return Dataset(name, *hold_out(rows, source.test_size), source.classes, source.note)


def _read_csv(name: str, source: Source, path: Path) -> Dataset[Split]:
    with path.open(encoding="utf-8") as lines:
        separator = ";" if ";" in lines.readline() else ","
    try:
        rows = np.loadtxt(path, delimiter=separator, skiprows=1, ndmin=2, encoding="utf-8")
    except ValueError as error:
        raise ValueError(
            f"data.load({name!r}): {path} is not a table of numbers: {error}. Expected a header, "
            "and then rows of equal length with the target last."
        ) from error
    return table(name, source, rows[:, :-1], rows[:, -1])


def _read_npz(name: str, source: Source, path: Path) -> Dataset[Split]:
    arrays = _arrays(name, path)
    for images, labels in _LAYOUTS:
        keys = [key.format(part) for part in ("train", "test") for key in (images, labels)]
        if not set(keys) <= set(arrays):
            continue
        train, test = (
            _part(arrays, images.format(part), labels.format(part), path)
            for part in ("train", "test")
        )
        lossy = "lossy: decoded from JPEG copies" if images == "jpeg_{}" else source.note
        return Dataset(name, train, test, source.classes, lossy)
    raise ValueError(
        f"data.load({name!r}): {path} holds {sorted(arrays)}; expected x_train, y_train, "
        "x_test and y_test. It may be another data set under this name."
    )


def _arrays(name: str, path: Path) -> Mapping[str, np.ndarray]:
    """All arrays of a file, or an error if one of them is not whole."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            return {key: stored[key] for key in stored.files}
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"data.load({name!r}): {path} is not a whole .npz file of plain arrays ({error}). It "
            "may have been cut off while it was copied: fetch it again."
        ) from error


def _part(arrays: Mapping[str, np.ndarray], images: str, labels: str, path: Path) -> Split:
    x, y = arrays[images], arrays[labels]
    if images.startswith("jpeg"):
        x = _decoded(x, arrays[images.replace("jpeg", "offsets")], path)
    return unit(x, str(path)), y.astype(np.int32).ravel()


def _decoded(stream: np.ndarray, starts: np.ndarray, path: Path) -> np.ndarray:
    """Images from a buffer of JPEG streams."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(
            f"data.load: {path} holds JPEG streams, and Pillow, which decodes them, is not "
            "installed. Install the extra: pip install 'dpjax[data]'."
        ) from error
    whole = stream.tobytes()
    pieces = (io.BytesIO(whole[a:b]) for a, b in itertools.pairwise(starts))
    try:
        return np.stack([np.asarray(Image.open(piece)) for piece in pieces])
    except (OSError, ValueError) as error:
        raise ValueError(
            f"data.load: {path} holds JPEG streams that do not decode ({error}). It may have been "
            "cut off while it was copied: fetch it again."
        ) from error

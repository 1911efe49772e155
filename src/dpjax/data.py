# SPDX-License-Identifier: Apache-2.0
"""Data sets by name, as plain arrays in memory.

`load` looks in a folder (``data_dir``, or the environment variable ``DPJAX_DATA_DIR``),
then asks TensorFlow Datasets if that is installed; ``"digits"`` comes with scikit-learn
and needs neither.  Images are float32 in [0, 1], channels last; labels are int32; tables
are float32 in their own units.

Nothing here looks at the data to decide anything: a mean or a scale that is computed from
private examples is itself a release.  This room must never know how data is sampled.
"""

from __future__ import annotations

import importlib.util
import io
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

__all__ = ["NAMES", "Dataset", "Split", "load", "standardize"]

Split: TypeAlias = tuple[np.ndarray, np.ndarray]


class Dataset(NamedTuple):
    """Examples to learn from and examples to test on.

    Attributes:
      name: The word it was loaded by.
      train: Inputs and targets, ``(x, y)``, with one example a row.
      test: The same, never trained on.
      classes: How many labels there are; None where the target is a quantity.
      note: What a reader of results must be told about the data; often empty.
    """

    name: str
    train: Split
    test: Split
    classes: int | None
    note: str = ""


def load(name: str, data_dir: str | os.PathLike[str] | None = None) -> Dataset:
    """Loads a data set by name.

    ======================  ==========  ===========  ====================================
    name                    train/test  one example  looked for in the folder
    ======================  ==========  ===========  ====================================
    ``digits``              1437/360    (8, 8, 1)    (embedded in scikit-learn)
    ``mnist``               60000/10000 (28, 28, 1)  ``mnist.npz``
    ``fashion_mnist``       60000/10000 (28, 28, 1)  ``fashion_mnist.npz``
    ``cifar10``             50000/10000 (32, 32, 3)  ``cifar10.npz``
    ``california_housing``  18576/2064  (8,)         ``california_housing.csv``
    ``wine_quality``        1279/320    (11,)        ``wine_quality_red.csv``
    ======================  ==========  ===========  ====================================

    An ``.npz`` holds ``x_train, y_train, x_test, y_test`` (bytes, or numbers in [0, 1]), or
    instead of each ``x`` a buffer ``jpeg_train`` of JPEG streams that begin at
    ``offsets_train``.  A ``.csv`` has a header, and its target in the last column.

    Args:
      name: One of the names above.
      data_dir: The folder; by default what ``DPJAX_DATA_DIR`` says.

    Returns:
      The data set, the same in every call.

    Example:
      >>> digits = load("digits")
      >>> digits.train[0].shape, digits.test[1].dtype, digits.classes
      ((1437, 8, 8, 1), dtype('int32'), 10)
    """
    if name == "digits":
        return _digits()
    if name not in _SOURCES:
        raise ValueError(
            f"data.load({name!r}): no such data set; expected one of {', '.join(NAMES)}. "
            "Data of your own needs no name: wherever a data set is asked for, arrays do."
        )
    source = _SOURCES[name]
    folder = data_dir if data_dir is not None else os.environ.get("DPJAX_DATA_DIR")
    path = Path(folder, source.file) if folder else None
    if path is not None and path.is_file():
        return source.read(name, source, path)
    if importlib.util.find_spec("tensorflow_datasets") is not None:
        return _from_tfds(name, source, folder)
    raise FileNotFoundError(
        f"data.load({name!r}): found neither {path or source.file} nor TensorFlow Datasets. Put "
        f"{source.file} into a folder and name it by data_dir=... or the environment variable "
        "DPJAX_DATA_DIR, or install the extra: pip install 'dpjax[tfds]'. "
        "load('digits') needs neither."
    )


def standardize(values: np.ndarray, mean: ArrayLike, scale: ArrayLike) -> np.ndarray:
    """Shifts and scales features by constants that the caller knows from elsewhere.

    Args:
      values: ``[examples, features]``, or images ``[examples, height, width, channels]``.
      mean: What becomes 0; one number, or one a feature.
      scale: What becomes 1; one number, or one a feature; positive.

    Returns:
      ``(values - mean) / scale`` in float32.

    Privacy:
      The constants must be public: published about data of this kind, or measured on other
      data.  A mean of the private examples themselves is a release that nobody accounts.

    Example:
      >>> standardize(np.array([[10.0, 2.0]]), mean=[8.0, 0.0], scale=[2.0, 1.0])
      array([[1., 2.]], dtype=float32)
    """
    if not np.all(np.asarray(scale) > 0):
        raise ValueError(
            f"data.standardize(scale={scale}): every scale must be positive. A feature that never "
            "changes has no scale of its own: give it 1, or leave it out."
        )
    return ((values - np.asarray(mean)) / np.asarray(scale)).astype(np.float32)


# --- sources --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Source:
    """Where a data set is found and how it is read."""

    file: str
    read: Callable[[str, _Source, Path], Dataset]
    classes: int | None = None
    test_size: int = 0
    tfds: str | None = None
    note: str = ""


def _digits() -> Dataset:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "data.load('digits'): the digits come with scikit-learn, which is not installed. "
            "Install the extra: pip install 'dpjax[data]'."
        ) from error
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32).reshape(-1, 8, 8, 1)  # pixels are counts from 0 to 16
    train, test = _divide(x, y.astype(np.int32), test_size=360)
    return Dataset("digits", train, test, classes=10)


def _read_npz(name: str, source: _Source, path: Path) -> Dataset:
    with np.load(path, allow_pickle=False) as arrays:
        jpeg = "jpeg_train" in arrays
        read = _jpeg_images if jpeg else _images
        try:
            train, test = (
                (read(arrays, part), arrays[f"y_{part}"].astype(np.int32).ravel())
                for part in ("train", "test")
            )
        except KeyError as error:
            raise ValueError(
                f"data.load({name!r}): {path} holds {sorted(arrays)}; expected x_train, y_train, "
                "x_test and y_test. It may be another data set under this name."
            ) from error
    note = "lossy: decoded from JPEG copies" if jpeg else source.note
    return Dataset(name, train, test, source.classes, note)


def _images(arrays: Mapping[str, np.ndarray], part: str) -> np.ndarray:
    return _unit(arrays[f"x_{part}"])


def _jpeg_images(arrays: Mapping[str, np.ndarray], part: str) -> np.ndarray:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(
            "data.load: this file holds JPEG streams, and Pillow, which decodes them, is not "
            "installed. Install the extra: pip install 'dpjax[data]'."
        ) from error
    stream, starts = arrays[f"jpeg_{part}"].tobytes(), arrays[f"offsets_{part}"]
    pieces = (stream[a:b] for a, b in itertools.pairwise(starts))
    return _unit(np.stack([np.asarray(Image.open(io.BytesIO(piece))) for piece in pieces]))


def _unit(x: np.ndarray) -> np.ndarray:
    """Images as float32 in [0, 1] with a channel axis."""
    x = x[..., None] if x.ndim == 3 else x
    if x.dtype == np.uint8:
        return x.astype(np.float32) / np.float32(255)
    if x.dtype.kind != "f" or x.min() < 0 or x.max() > 1:
        raise ValueError(
            f"data.load: got images of type {x.dtype} from {x.min()} to {x.max()}; expected bytes, "
            "or numbers in [0, 1]. Images that were standardised must be stored as they came."
        )
    return x.astype(np.float32)


def _read_csv(name: str, source: _Source, path: Path) -> Dataset:
    with path.open(encoding="utf-8") as lines:
        separator = ";" if ";" in lines.readline() else ","
    table = np.loadtxt(path, delimiter=separator, skiprows=1, ndmin=2, encoding="utf-8")
    return _table(name, source, table[:, :-1], table[:, -1])


def _table(name: str, source: _Source, x: np.ndarray, y: np.ndarray) -> Dataset:
    if len(x) <= source.test_size:
        raise ValueError(
            f"data.load({name!r}): got {len(x)} rows; expected more than the {source.test_size} "
            "that are kept for the test. The file may have been cut off."
        )
    train, test = _divide(x.astype(np.float32), y.astype(np.float32), source.test_size)
    return Dataset(name, train, test, source.classes, source.note)


def _divide(x: np.ndarray, y: np.ndarray, test_size: int) -> tuple[Split, Split]:
    # Shuffled, because tables come sorted; always alike, because a split is part of a result.
    order = np.random.default_rng(0).permutation(len(x))
    train, test = order[test_size:], order[:test_size]
    return (x[train], y[train]), (x[test], y[test])


# --- TensorFlow Datasets ----------------------------------------------------------------------


def _from_tfds(name: str, source: _Source, folder: str | os.PathLike[str] | None) -> Dataset:
    if source.tfds is None:
        raise FileNotFoundError(
            f"data.load({name!r}): TensorFlow Datasets does not have it. Put {source.file} into a "
            "folder and name it by data_dir=... or the environment variable DPJAX_DATA_DIR."
        )
    splits = _tfds_splits(name, source.tfds, folder)
    if source.classes is None:
        rows = splits["train"]
        x = np.stack([rows["features"][column] for column in _WINE], axis=1)
        return _table(name, source, x, np.asarray(rows["quality"]))
    train, test = (
        (_unit(np.asarray(rows["image"])), np.asarray(rows["label"]).astype(np.int32))
        for rows in (splits["train"], splits["test"])
    )
    return Dataset(name, train, test, source.classes, source.note)


def _tfds_splits(
    name: str, tfds_name: str, folder: str | os.PathLike[str] | None
) -> Mapping[str, Any]:
    """All columns of all splits; what is on the disk already is not downloaded again."""
    tfds = importlib.import_module("tensorflow_datasets")

    place = None if folder is None else os.fspath(folder)
    failure: Exception | None = None
    for download in (False, True):
        try:
            if importlib.util.find_spec("tensorflow") is not None:
                batch = tfds.load(tfds_name, data_dir=place, download=download, batch_size=-1)
                return tfds.as_numpy(batch)
            # Without TensorFlow, TFDS still reads the formats that allow random access.
            rows: Any = tfds.data_source(tfds_name, data_dir=place, download=download)
            return {
                split: _columns(list(rows[split])) for split in ("train", "test") if split in rows
            }
        except Exception as error:  # TFDS and its storage layers raise many unrelated kinds
            failure = error
    raise FileNotFoundError(
        f"data.load({name!r}): TensorFlow Datasets could neither find {tfds_name} in "
        f"{place or 'its default folder'} nor download it. Without a network, prepare it elsewhere "
        "and copy the folder, or set DPJAX_DATA_DIR to a folder with the file that data.load's "
        "documentation names. Without TensorFlow, prepare it with file_format='array_record'."
    ) from failure


def _columns(rows: Sequence[Any]) -> Any:
    """Turns a list of (nested) dictionaries into a (nested) dictionary of arrays."""
    if isinstance(rows[0], Mapping):
        return {key: _columns([row[key] for row in rows]) for key in rows[0]}
    return np.stack(rows)


_WINE = (
    "fixed acidity",
    "volatile acidity",
    "citric acid",
    "residual sugar",
    "chlorides",
    "free sulfur dioxide",
    "total sulfur dioxide",
    "density",
    "pH",
    "sulphates",
    "alcohol",
)

_SOURCES = MappingProxyType(
    {
        "mnist": _Source(file="mnist.npz", read=_read_npz, classes=10, tfds="mnist"),
        "fashion_mnist": _Source(
            file="fashion_mnist.npz", read=_read_npz, classes=10, tfds="fashion_mnist"
        ),
        "cifar10": _Source(file="cifar10.npz", read=_read_npz, classes=10, tfds="cifar10"),
        "california_housing": _Source(
            file="california_housing.csv", read=_read_csv, test_size=2_064
        ),
        "wine_quality": _Source(
            file="wine_quality_red.csv",
            read=_read_csv,
            test_size=320,
            tfds="wine_quality/red",
            note="some rows repeat exactly; the unit of privacy is a row",
        ),
    }
)

NAMES: tuple[str, ...] = ("digits", *_SOURCES)

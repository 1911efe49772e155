# SPDX-License-Identifier: Apache-2.0
"""From a name to a data set: a file in a folder first, then TensorFlow Datasets (TFDS).

TensorFlow is needed to download, and to open the wine table.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dpjax import checks
from dpjax._stream import Stream
from dpjax.data.dataset import Dataset, Split, checked, hold_out
from dpjax.data.files import read, scaled_images, table
from dpjax.data.sources import SOURCES, Source

NAMES: tuple[str, ...] = ("digits", *SOURCES)
"""The names that `load` knows."""


def load(name: str, data_dir: str | os.PathLike[str] | None = None) -> Dataset[Split]:
    """Loads a data set by name.

    | name | train/test | one example | file in the folder |
    |---|---|---|---|
    | ``digits`` | 1437/360 | (8, 8, 1) | (embedded in scikit-learn) |
    | ``mnist`` | 60000/10000 | (28, 28, 1) | ``mnist.npz`` |
    | ``fashion_mnist`` | 60000/10000 | (28, 28, 1) | ``fashion_mnist.npz`` |
    | ``cifar10`` | 50000/10000 | (32, 32, 3) | ``cifar10_lossless.npz``, ``cifar10.npz`` |
    | ``cifar100`` | 50000/10000 | (32, 32, 3) | ``cifar100.npz`` |
    | ``svhn`` | 73257/26032 | (32, 32, 3) | ``svhn.npz`` |
    | ``pathmnist`` | 89996/7180 | (28, 28, 3) | ``pathmnist.npz`` |
    | ``organamnist`` | 34561/17778 | (28, 28, 1) | ``organamnist.npz`` |
    | ``organcmnist`` | 12975/8216 | (28, 28, 1) | ``organcmnist.npz`` |
    | ``organsmnist`` | 13932/8827 | (28, 28, 1) | ``organsmnist.npz`` |
    | ``california_housing`` | 18576/2064 | (8,) | ``california_housing.csv`` |
    | ``wine_quality`` | 1279/320 | (11,) | ``wine_quality_red.csv`` |

    An ``.npz`` holds ``x_train, y_train, x_test, y_test`` (bytes, or numbers in [0, 1]). Instead
    of ``x_train`` it may hold ``png_train`` or ``jpeg_train``, a buffer of encoded images, and
    ``offsets_train``, where each begins and the last ends; so too for the test part. MedMNIST's
    files are read as published, without their validation part.
    A ``.csv`` has a header, and its target in the last column.

    Args:
      name: One of the names above.
      data_dir: The folder; by default, and if empty, the environment variable ``DPJAX_DATA_DIR``.

    Example:
      >>> digits = load("digits")
      >>> digits.train[0].shape, digits.test[1].dtype, digits.classes
      ((1437, 8, 8, 1), dtype('int32'), 10)
    """
    if name == "digits":
        return _digits()
    source = _source(name, call="data.load")
    folder = _folder(data_dir)
    if folder:
        # A file of the user comes first: it needs no network, and the user put it there.
        path = source.path(folder)
        if path.is_file():
            return checked(read(name, source, path), source.shape, str(path))
    streams = _from_tfds(name, source, folder)
    parts = {part: _whole(rows) for part, rows in streams.items()}
    if source.classes is None:
        # A table comes as one part, and `table` splits the rows for the test off it.
        dataset = table(name, source, *parts["train"])
    else:
        dataset = Dataset(name, parts["train"], parts["test"], source.classes, source.note)
    return checked(dataset, source.shape, "TensorFlow Datasets")


def stream(name: str, data_dir: str | os.PathLike[str] | None = None) -> Dataset[Stream]:
    """Loads a data set by name, but leaves its training part on the disk.

    For this TensorFlow Datasets must have prepared it as ``array_record`` or ``parquet``. A file
    of `load`'s formats comes first; it is read whole and stays in memory.

    Args:
      name: One of `load`'s names, of images.
      data_dir: As for `load`.

    Returns:
      The data set; ``train`` is a `Stream` of ``(image in [0, 1], label)``, and ``test`` is in
      memory. For other data sets, make a `Stream` yourself.
    """
    # The embedded digits and the tables, which have no classes, are small.
    if name == "digits" or _source(name, call="data.stream").classes is None:
        raise ValueError(f"data.stream({name!r}): it fits into memory. Use data.load({name!r}).")
    source = SOURCES[name]
    folder = _folder(data_dir)
    if folder and source.path(folder).is_file():
        dataset = load(name, folder)
        x, y = dataset.train
        train = Stream(range(len(y)), example=lambda i: (x[i], y[i]))
        return Dataset(name, train, dataset.test, dataset.classes, dataset.note)
    parts = _from_tfds(name, source, folder)
    dataset = Dataset(name, parts["train"], _whole(parts["test"]), source.classes, source.note)
    return checked(dataset, source.shape, "TensorFlow Datasets")


def _whole(rows: Stream) -> Split:
    """All rows of a stream, in memory."""
    return rows.rows(np.arange(len(rows)))


def _folder(data_dir: str | os.PathLike[str] | None) -> str | os.PathLike[str] | None:
    """The folder that the caller or the environment names, or None; it must exist."""
    origin = "data_dir"
    folder = data_dir
    # An empty name counts as none, because Path("") is the current folder.
    if not folder:
        origin = "DPJAX_DATA_DIR"
        folder = os.environ.get(origin)
    if not folder:
        return None
    # Otherwise a misspelt folder starts a download into a new folder of that name.
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"data.load: {origin} is {str(folder)!r}; there is no such folder.")
    return folder


def _source(name: str, call: str) -> Source:
    hint = "A file of your own is read by data.load_file."
    return SOURCES[checks.one_of(call, "name", name, NAMES, hint)]


def _digits() -> Dataset[Split]:
    checks.importable("data.load('digits')", "sklearn")
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32).reshape(-1, 8, 8, 1)  # pixels are counts from 0 to 16
    train, test = hold_out((x, y.astype(np.int32)), size=360)
    return Dataset("digits", train, test, classes=10)


def _from_tfds(
    name: str, source: Source, folder: str | os.PathLike[str] | None
) -> dict[str, Stream]:
    """Each part of a data set, such as "train", from TensorFlow Datasets; downloads if necessary.

    ``source.tfds`` is the name of the data set there, or None.
    """
    fault = "it has no such data set"
    if source.tfds is not None:
        # Maps a record to an example.
        example_of = functools.partial(_image, classes=source.classes)
        # The wine table is the only regression that TensorFlow Datasets has.
        if source.classes is None:
            example_of = _wine
        try:
            parts = _prepared(source.tfds, folder)
            return {part: Stream(records, example_of) for part, records in parts.items()}
        except NotImplementedError:  # raised by `as_data_source`
            fault = "it is prepared in a format without random access; array_record has it"
        except Exception as error:  # TFDS and its storage layers raise many unrelated kinds
            fault = f"{type(error).__name__}: {error}"
    raise FileNotFoundError(
        f"data.load({name!r}): found no {source.path(folder or '')}, and TensorFlow Datasets does "
        f"not help ({fault}). Name the folder of {source.file} by data_dir= or DPJAX_DATA_DIR."
    )


def _prepared(name: str, folder: str | os.PathLike[str] | None) -> Mapping[str, Any]:
    """The records of each part, with random access; downloads them if necessary."""
    tfds = importlib.import_module("tensorflow_datasets")
    place = None
    if folder is not None:
        place = os.fspath(folder)
    builder = tfds.builder(name, data_dir=place)
    if not builder.is_prepared():
        # Only TensorFlow writes and reads the default format.
        builder = tfds.builder(name, data_dir=place, file_format="array_record")
        builder.download_and_prepare()
    return builder.as_data_source()


def _image(record: Mapping[str, Any], *, classes: int | None) -> Split:
    """One example; its label is checked here, because a stream is never read whole."""
    label = int(record["label"])
    if classes is not None and not 0 <= label < classes:
        raise ValueError(f"its label is {label}; expected 0 to {classes - 1}")
    image = scaled_images(np.asarray(record["image"])[None], "TensorFlow Datasets")[0]
    return image, np.asarray(label, np.int32)


def _wine(record: Mapping[str, Any]) -> Split:
    columns = record["features"]
    return np.stack([columns[column] for column in _WINE]), np.asarray(record["quality"])


# The columns in the order of the file `wine_quality_red.csv`.
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

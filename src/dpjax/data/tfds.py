# SPDX-License-Identifier: Apache-2.0
"""Data sets that TensorFlow Datasets (TFDS) prepares: found, or downloaded by it.

Formats that allow random access are read without TensorFlow, whole or as a `Stream`.  What
is on the disk already is not downloaded again.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpjax.data.dataset import Dataset, Split
from dpjax.data.files import table, unit
from dpjax.data.sources import Source
from dpjax.data.streaming import Stream


def from_tfds(name: str, source: Source, folder: str | os.PathLike[str] | None) -> Dataset[Split]:
    """A data set as TensorFlow Datasets has it, in memory.

    Args:
      name: The word it is asked for by.
      source: Where it is found.
      folder: Where TFDS keeps its data; by default where it likes.
    """
    builder = _prepared(f"load({name!r})", source, folder)
    try:
        parts = _random_access(name, builder)
    except ValueError:
        if importlib.util.find_spec("tensorflow") is None:
            raise
        as_numpy = importlib.import_module("tensorflow_datasets").as_numpy
        parts = {part: list(as_numpy(rows)) for part, rows in builder.as_dataset().items()}
    if source.classes is None:
        rows = _whole(Stream(parts["train"], _wine), builder)
        return table(name, source, *rows, "TensorFlow Datasets")
    train, test = (_images(parts[part], source.classes) for part in ("train", "test"))
    whole = _whole(train, builder), _whole(test, builder)
    return Dataset(name, *whole, source.classes, source.note)


def stream_from_tfds(
    name: str, source: Source, folder: str | os.PathLike[str] | None
) -> Dataset[Stream]:
    """The same, with a training part that stays on the disk; of images."""
    builder = _prepared(f"stream({name!r})", source, folder)
    parts = _random_access(name, builder)
    assert source.classes is not None
    train, test = (_images(parts[part], source.classes) for part in ("train", "test"))
    return Dataset(name, train, _whole(test, builder), source.classes, source.note)


def is_prepared(source: Source, folder: str | os.PathLike[str]) -> bool:
    """Whether TFDS has it on the disk.  Nothing is downloaded, and no folder made.

    Args:
      source: What it is called.
      folder: Where TFDS would keep it.
    """
    if source.tfds is None or not Path(folder, source.tfds).is_dir():
        return False
    tfds = importlib.import_module("tensorflow_datasets")
    return tfds.builder(source.tfds, data_dir=os.fspath(folder)).is_prepared()


def _prepared(asked: str, source: Source, folder: str | os.PathLike[str] | None) -> Any:
    """The TFDS builder of a data set that is on the disk, downloaded if it was not."""
    if source.tfds is None:
        raise FileNotFoundError(
            f"data.{asked}: TensorFlow Datasets does not have it. Put {source.file} into a "
            "folder and name it by data_dir=... or the environment variable DPJAX_DATA_DIR."
        )
    tfds = importlib.import_module("tensorflow_datasets")
    place = None if folder is None else os.fspath(folder)
    before = set() if place is None else set(os.listdir(place))
    try:
        builder = tfds.builder(source.tfds, data_dir=place)
        if not builder.is_prepared():
            # The default format is one that only TensorFlow writes and reads.
            builder = tfds.builder(source.tfds, data_dir=place, file_format="array_record")
            builder.download_and_prepare()
        return builder
    except Exception as error:  # TFDS and its storage layers raise many unrelated kinds
        if place is not None:
            _sweep([Path(place, entry) for entry in set(os.listdir(place)) - before])
        raise FileNotFoundError(
            f"data.{asked}: TensorFlow Datasets could neither find {source.tfds} in "
            f"{place or 'its default folder'} nor download it. Without a network, prepare it "
            "elsewhere and copy the folder, or set DPJAX_DATA_DIR to a folder with the file that "
            "data.load's documentation names."
        ) from error


def _sweep(entries: list[Path]) -> None:
    """Removes the empty folders that a failed download left."""
    for entry in entries:
        for folder, _, _ in os.walk(entry, topdown=False):
            with contextlib.suppress(OSError):  # it is not empty
                os.rmdir(folder)


def _random_access(name: str, builder: Any) -> Mapping[str, Sequence[Any]]:
    """Parts that are read by index; nothing is read yet."""
    try:
        return builder.as_data_source()
    except NotImplementedError as error:
        raise ValueError(
            f"data: {name!r} is prepared in {builder.data_dir} in a format without random access, "
            "which only TensorFlow reads. Prepare it again, in another folder: tfds build "
            f"{builder.name} --file_format=array_record --data_dir=..."
        ) from error


def _whole(stream: Stream, builder: Any) -> Split:
    try:
        return stream.rows(np.arange(len(stream)))
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"data: what TensorFlow Datasets prepared in {builder.data_dir} cannot be read whole. "
            f"{error} Delete that folder, and it is prepared anew."
        ) from error


def _images(rows: Sequence[Any], classes: int) -> Stream:
    return Stream(rows, functools.partial(_image, classes=classes))


def _image(record: Mapping[str, Any], *, classes: int) -> Split:
    """One example; checked here, because nobody reads all of them at once."""
    label = int(record["label"])
    if not 0 <= label < classes:
        raise ValueError(f"its label is {label}; expected 0 to {classes - 1}")
    return unit(np.asarray(record["image"])[None], "TensorFlow Datasets")[0], np.asarray(
        label, np.int32
    )


def _wine(record: Mapping[str, Any]) -> Split:
    columns = record["features"]
    return np.stack([columns[column] for column in _WINE]), np.asarray(record["quality"])


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

# SPDX-License-Identifier: Apache-2.0
"""Data sets that TensorFlow Datasets (TFDS) has prepared or downloads.

Formats that allow random access are read without TensorFlow, whole or as a `Stream`. Data sets
on the disk are not downloaded again. TFDS needs TensorFlow to download, and to open the wine table.
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
    """A data set of TensorFlow Datasets, in memory; without a folder, from TFDS's default one."""
    builder = _prepared(f"load({name!r})", source, folder)
    try:
        parts = _random_access(name, builder)
    except ValueError:
        if importlib.util.find_spec("tensorflow") is None:
            raise
        as_numpy = importlib.import_module("tensorflow_datasets").as_numpy
        # An older preparation in TensorFlow's own format, which TensorFlow alone can read.
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
    """A data set of images whose training part stays on the disk; see `from_tfds`."""
    builder = _prepared(f"stream({name!r})", source, folder)
    return _streamed(name, source, builder, _random_access(name, builder))


def stream_on_the_disk(
    name: str, source: Source, folder: str | os.PathLike[str]
) -> Dataset[Stream] | None:
    """As `stream_from_tfds`, but downloads nothing, makes no folder and may find nothing.

    A data set in a format without random access is not found.
    """
    if source.tfds is None or not Path(folder, source.tfds).is_dir():
        return None
    tfds = importlib.import_module("tensorflow_datasets")
    builder = tfds.builder(source.tfds, data_dir=os.fspath(folder))
    if not builder.is_prepared():
        return None
    try:
        # `is_prepared` does not look at the format; this call does, and reads no example.
        parts = builder.as_data_source()
    except NotImplementedError:
        return None
    return _streamed(name, source, builder, parts)


def _streamed(
    name: str, source: Source, builder: Any, parts: Mapping[str, Sequence[Any]]
) -> Dataset[Stream]:
    assert source.classes is not None
    train, test = (_images(parts[part], source.classes) for part in ("train", "test"))
    return Dataset(name, train, _whole(test, builder), source.classes, source.note)


def _prepared(asked: str, source: Source, folder: str | os.PathLike[str] | None) -> Any:
    """The TFDS builder of a data set on the disk; downloads the data set if necessary."""
    if source.tfds is None:
        raise FileNotFoundError(
            f"data.{asked}: found no {source.path(folder or '')}, and TensorFlow Datasets does not "
            f"have it. Put {source.file} into a folder, and give that folder as data_dir=... or in "
            "DPJAX_DATA_DIR."
        )
    tfds = importlib.import_module("tensorflow_datasets")
    place = None if folder is None else os.fspath(folder)
    # TFDS makes folders before it fails; `_sweep` removes the new ones.
    before = set() if place is None else set(os.listdir(place))
    try:
        builder = tfds.builder(source.tfds, data_dir=place)
        if not builder.is_prepared():
            # TFDS's default format is written and read by TensorFlow only.
            builder = tfds.builder(source.tfds, data_dir=place, file_format="array_record")
            builder.download_and_prepare()
        return builder
    except Exception as error:  # TFDS and its storage layers raise many unrelated kinds
        if place is not None:
            _sweep([Path(place, entry) for entry in set(os.listdir(place)) - before])
        # TFDS may name a missing package in an error of another kind.
        if isinstance(error, ImportError) or "No module named" in str(error):
            raise ImportError(
                f"data.{asked}: TensorFlow Datasets needs a package that cannot be imported "
                f"({error}). Usually the one that writes its files is missing: pip install "
                "array_record importlib-resources. To download and extract, it needs tensorflow."
            ) from error
        # The kind and the words, since a command line shows no cause: it may be a full disk.
        raise FileNotFoundError(
            f"data.{asked}: TensorFlow Datasets could neither find {source.tfds} in "
            f"{place or 'its default folder'} nor download it ({type(error).__name__}: {error}). "
            "Without a network, prepare it elsewhere and copy the folder, or set DPJAX_DATA_DIR "
            "to a folder with the file that data.load's documentation names."
        ) from error


def _sweep(entries: list[Path]) -> None:
    """Removes the empty folders that a failed download left."""
    for entry in entries:
        # From the leaves up, because only an empty folder can be removed: nothing that holds a file
        # is touched.
        for folder, _, _ in os.walk(entry, topdown=False):
            with contextlib.suppress(OSError):  # it is not empty
                os.rmdir(folder)


def _random_access(name: str, builder: Any) -> Mapping[str, Sequence[Any]]:
    """The parts as sources that read by index; reads nothing yet."""
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
            f"data: the data set that TensorFlow Datasets prepared in {builder.data_dir} cannot be "
            f"read whole. {error} Delete that folder, and TFDS prepares the data set again."
        ) from error


def _images(rows: Sequence[Any], classes: int) -> Stream:
    return Stream(rows, functools.partial(_image, classes=classes))


def _image(record: Mapping[str, Any], *, classes: int) -> Split:
    """One example; its label is checked here, because a stream is never read whole."""
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

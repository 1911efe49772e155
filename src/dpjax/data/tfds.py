# SPDX-License-Identifier: Apache-2.0
"""Data sets that TensorFlow Datasets (TFDS) prepares: found, or downloaded by it.

TFDS reads the formats that allow random access without TensorFlow.  What is on the disk
already is not downloaded again.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dpjax.data.dataset import Dataset
from dpjax.data.files import table, unit
from dpjax.data.sources import Source

__all__ = ["from_tfds"]


def from_tfds(name: str, source: Source, folder: str | os.PathLike[str] | None) -> Dataset:
    """A data set as TensorFlow Datasets has it.

    Args:
      name: The word it is asked for by.
      source: Where it is found.
      folder: Where TFDS keeps its data; by default where it likes.
    """
    if source.tfds is None:
        raise FileNotFoundError(
            f"data.load({name!r}): TensorFlow Datasets does not have it. Put {source.file} into a "
            "folder and name it by data_dir=... or the environment variable DPJAX_DATA_DIR."
        )
    splits = _tfds_splits(name, source.tfds, folder)
    if source.classes is None:
        rows = splits["train"]
        x = np.stack([rows["features"][column] for column in _WINE], axis=1)
        return table(name, source, x, np.asarray(rows["quality"]))
    train, test = (
        (
            unit(np.asarray(rows["image"]), "TensorFlow Datasets"),
            np.asarray(rows["label"]).astype(np.int32),
        )
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

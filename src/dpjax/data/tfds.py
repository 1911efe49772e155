# SPDX-License-Identifier: Apache-2.0
"""Data sets that TensorFlow Datasets (TFDS) has prepared or downloads.

Formats that allow random access are read without TensorFlow, whole or as a `Stream`. Data sets
on the disk are not downloaded again. TFDS needs TensorFlow to download, and to open the wine table.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from dpjax.data.dataset import Split
from dpjax.data.files import unit
from dpjax.data.sources import Source
from dpjax.data.streaming import Stream


def from_tfds(
    name: str, source: Source, folder: str | os.PathLike[str] | None
) -> dict[str, Stream]:
    """The parts of a data set of TensorFlow Datasets; without a folder, from its default one."""
    fault, place = "it has no such data set", None if folder is None else os.fspath(folder)
    if source.tfds is not None:
        try:
            tfds = importlib.import_module("tensorflow_datasets")
            builder = tfds.builder(source.tfds, data_dir=place)
            if not builder.is_prepared():
                # TFDS's default format is written and read by TensorFlow only.
                builder = tfds.builder(source.tfds, data_dir=place, file_format="array_record")
                builder.download_and_prepare()
            image = functools.partial(_image, classes=source.classes)
            parts, example = builder.as_data_source(), _wine if source.classes is None else image
            return {part: Stream(records, example) for part, records in parts.items()}
        except NotImplementedError:
            fault = "it is prepared in a format without random access; array_record has it"
        except Exception as error:  # TFDS and its storage layers raise many unrelated kinds
            fault = f"{type(error).__name__}: {error}"
    raise FileNotFoundError(
        f"data.load({name!r}): found no {source.path(folder or '')}, and TensorFlow Datasets does "
        f"not help ({fault}). Name the folder of {source.file} by data_dir= or DPJAX_DATA_DIR."
    )


def _image(record: Mapping[str, Any], *, classes: int | None) -> Split:
    """One example; its label is checked here, because a stream is never read whole."""
    label = int(record["label"])
    if classes is not None and not 0 <= label < classes:
        raise ValueError(f"its label is {label}; expected 0 to {classes - 1}")
    image = unit(np.asarray(record["image"])[None], "TensorFlow Datasets")[0]
    return image, np.asarray(label, np.int32)


def _wine(record: Mapping[str, Any]) -> Split:
    columns = record["features"]
    return np.stack([columns[column] for column in _WINE]), np.asarray(record["quality"])


# In the order of the file `wine_quality_red.csv`.
_WINE = (
    *("fixed acidity", "volatile acidity", "citric acid", "residual sugar", "chlorides"),
    *("free sulfur dioxide", "total sulfur dioxide", "density", "pH", "sulphates", "alcohol"),
)

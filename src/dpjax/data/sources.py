# SPDX-License-Identifier: Apache-2.0
"""The table of names: the file of each data set, its shape, its name in TensorFlow Datasets.

A new data set of a known format is a row here. The shape belongs to the name, so that a file of
another data set under this name is an error.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType


@dataclass(frozen=True, kw_only=True)
class Source:
    """The place and the format of a data set.

    Args:
      file: The file's name in the folder; ``.npz`` or ``.csv``.
      better: The name of a file that is read instead if it exists.
      shape: The shape of one example's inputs.
      classes: The number of labels; None if the target is a quantity.
      test_size: The number of rows of a table in the test part.
      tfds: The name in TensorFlow Datasets; None if it has no such data set.
      note: A caveat for readers of results.
    """

    file: str
    shape: tuple[int, ...]
    classes: int | None = None
    test_size: int = 0
    tfds: str | None = None
    note: str = ""
    better: str | None = None

    def path(self, folder: str | os.PathLike[str]) -> Path:
        """The file of this data set in a folder, whether or not it exists."""
        better = Path(folder, self.better or self.file)
        return better if better.is_file() else Path(folder, self.file)


SOURCES: MappingProxyType[str, Source] = MappingProxyType(
    {
        "mnist": Source(file="mnist.npz", shape=(28, 28, 1), classes=10, tfds="mnist"),
        "fashion_mnist": Source(
            file="fashion_mnist.npz", shape=(28, 28, 1), classes=10, tfds="fashion_mnist"
        ),
        "cifar10": Source(
            file="cifar10.npz",
            better="cifar10_lossless.npz",
            shape=(32, 32, 3),
            classes=10,
            tfds="cifar10",
        ),
        "cifar100": Source(file="cifar100.npz", shape=(32, 32, 3), classes=100, tfds="cifar100"),
        "svhn": Source(file="svhn.npz", shape=(32, 32, 3), classes=10, tfds="svhn_cropped"),
        "pathmnist": Source(file="pathmnist.npz", shape=(28, 28, 3), classes=9),
        "organamnist": Source(file="organamnist.npz", shape=(28, 28, 1), classes=11),
        "organcmnist": Source(file="organcmnist.npz", shape=(28, 28, 1), classes=11),
        "organsmnist": Source(file="organsmnist.npz", shape=(28, 28, 1), classes=11),
        "california_housing": Source(file="california_housing.csv", shape=(8,), test_size=2_064),
        "wine_quality": Source(
            file="wine_quality_red.csv",
            shape=(11,),
            test_size=320,
            tfds="wine_quality/red",
            note="some rows repeat exactly; the unit of privacy is a row",
        ),
    }
)
"""Every name but ``digits``, which comes with scikit-learn."""

# SPDX-License-Identifier: Apache-2.0
"""The table of names: the file of each data set, its shape, its name in TensorFlow Datasets."""

from __future__ import annotations

import os
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple


class Source(NamedTuple):
    """The place and the format of a data set."""

    file: str
    shape: tuple[int, ...]  # of one example's inputs
    classes: int | None = None  # None if the target is a quantity
    tfds: str | None = None  # the name in TensorFlow Datasets
    test_size: int = 0  # rows of a table
    note: str = ""
    better: str | None = None  # a file that is read instead if it exists

    def path(self, folder: str | os.PathLike[str]) -> Path:
        """The file of this data set in a folder, whether or not it exists."""
        better = Path(folder, self.better or self.file)
        return better if better.is_file() else Path(folder, self.file)


_REPEATS = "some rows repeat exactly; the unit of privacy is a row"

SOURCES: MappingProxyType[str, Source] = MappingProxyType(
    {
        "mnist": Source("mnist.npz", (28, 28, 1), 10, "mnist"),
        "fashion_mnist": Source("fashion_mnist.npz", (28, 28, 1), 10, "fashion_mnist"),
        "cifar10": Source("cifar10.npz", (32, 32, 3), 10, "cifar10", better="cifar10_lossless.npz"),
        "cifar100": Source("cifar100.npz", (32, 32, 3), 100, "cifar100"),
        "svhn": Source("svhn.npz", (32, 32, 3), 10, "svhn_cropped"),
        "pathmnist": Source("pathmnist.npz", (28, 28, 3), 9),
        "organamnist": Source("organamnist.npz", (28, 28, 1), 11),
        "organcmnist": Source("organcmnist.npz", (28, 28, 1), 11),
        "organsmnist": Source("organsmnist.npz", (28, 28, 1), 11),
        "california_housing": Source("california_housing.csv", (8,), test_size=2_064),
        "wine_quality": Source(
            "wine_quality_red.csv", (11,), None, "wine_quality/red", 320, _REPEATS
        ),
    }
)

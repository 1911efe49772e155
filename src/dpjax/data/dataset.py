# SPDX-License-Identifier: Apache-2.0
"""What a data set is: two parts of inputs and targets, and what a reader must be told.

Every data set passes `checked` before anyone sees it, so that a damaged or mistaken file is
an error that names it, and not a strange accuracy later.  Splits depend on the number of
examples alone.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from dpjax.data.streaming import Stream

Split: TypeAlias = tuple[np.ndarray, np.ndarray]
_Train = TypeVar("_Train", Split, Stream)


class Dataset(NamedTuple, Generic[_Train]):
    """Examples to learn from and examples to test on.

    Attributes:
      name: The word it was loaded by.
      train: Inputs and targets, ``(x, y)``, with one example a row; or a `Stream` of them.
      test: Inputs and targets, never trained on.
      classes: How many labels there are; None where the target is a quantity.
      note: What a reader of results must be told about the data; often empty.
    """

    name: str
    train: _Train
    test: Split
    classes: int | None
    note: str = ""

    @property
    def examples(self) -> int:
        """How many there are to learn from."""
        return len(self.train) if isinstance(self.train, Stream) else len(self.train[1])

    def rows(self, indices: np.ndarray) -> Split:
        """Some of the examples to learn from, read from the disk if they lie there."""
        if isinstance(self.train, Stream):
            return self.train.rows(indices)
        x, y = self.train
        return x[indices], y[indices]


def hold_out(split: Split, size: int) -> tuple[Split, Split]:
    """Splits rows off a data set, to validate on or to test on.

    Shuffled, because tables come sorted; always alike, because a split is part of a result.

    Args:
      split: Inputs and targets.
      size: How many rows to split off.

    Returns:
      ``(rest, held)``; every row is in one of them.

    Privacy:
      Rows split off from private data are private too.  They are not in the training's
      epsilon, nor is a choice that was made by looking at them.

    Example:
      >>> rest, held = hold_out((np.zeros((10, 3)), np.arange(10)), size=2)
      >>> len(rest[1]), len(held[1])
      (8, 2)
    """
    x, y = split
    if not 0 < size < len(y):
        raise ValueError(
            f"data.hold_out(size={size}): the data hold {len(y)} rows; expected at least 1 row to "
            "split off and at least 1 to be left."
        )
    order = np.random.default_rng(0).permutation(len(y))
    rest, held = order[size:], order[:size]
    return (x[rest], y[rest]), (x[held], y[held])


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


def checked(dataset: Dataset[_Train], shape: tuple[int, ...], where: str) -> Dataset[_Train]:
    """The data set, if it is one.  Of a `Stream` only the shape: its rows are not here yet.

    Args:
      dataset: As it was read.
      shape: Of one example's inputs.
      where: The file, or the place it was read from, for the error.
    """
    train = dataset.train
    if isinstance(train, Stream):
        first = _other_shape(train.row[0].shape, shape)
    else:
        first = _fault(*train, shape, dataset.classes)
    faults = {"train": first, "test": _fault(*dataset.test, shape, dataset.classes)}
    for part, fault in faults.items():
        if fault:
            raise ValueError(
                f"data.load({dataset.name!r}): {where}: its {part} part has {fault}. The file may "
                "be damaged, or another data set under this name."
            )
    return dataset


def _fault(x: np.ndarray, y: np.ndarray, shape: tuple[int, ...], classes: int | None) -> str | None:
    if not len(y) or len(x) != len(y):
        return f"{len(x)} inputs and {len(y)} targets; each needs one"
    if x.shape[1:] != shape:
        return _other_shape(x.shape[1:], shape)
    if not np.isfinite(x).all() or not np.isfinite(y).all():
        return "numbers that are NaN or infinite"
    if classes is not None and not (y.min() >= 0 and y.max() < classes):
        return f"labels from {y.min()} to {y.max()}; expected 0 to {classes - 1}"
    return None


def _other_shape(found: tuple[int, ...], shape: tuple[int, ...]) -> str | None:
    return None if found == shape else f"examples of shape {found}; expected {shape}"

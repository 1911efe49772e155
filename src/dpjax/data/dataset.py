# SPDX-License-Identifier: Apache-2.0
"""A data set: a training part, a test part, and a note for readers of results."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from dpjax import checks, trees
from dpjax._display import brief
from dpjax._stream import Stream
from dpjax.types import HeldOut

Split: TypeAlias = tuple[np.ndarray, np.ndarray]
_Train = TypeVar("_Train", Split, Stream)


class Dataset(NamedTuple, Generic[_Train]):
    """Training examples and test examples."""

    name: str
    """The name that `load` was called with."""
    train: _Train
    """Inputs and targets, ``(x, y)``, with one example a row; or a `Stream` of them."""
    test: Split
    """Inputs and targets that are not trained on."""
    classes: int | None
    """The number of labels; None if the target is a quantity."""
    note: str = ""
    """A caveat about the data for readers of results; often empty."""
    class_names: tuple[str, ...] = ()
    """The words that the labels stand for, in their order; empty if labels were numbers."""
    columns: tuple[str, ...] = ()
    """The names of the features of a table of yours; else empty."""
    owners: np.ndarray | None = None
    """Whose row each training row is, from 0; None if each row is of another person."""
    target_range: tuple[float, float] | None = None
    """The declared range of a target that is stored as a number in [-1, 1]; else None."""
    held_out: HeldOut | None = None
    """How many units of your file or frame are in ``test``; None for a public data set by name."""

    def __repr__(self) -> str:
        fields = [
            f"name={self.name!r}",
            f"train={_shapes(self.train)}",
            f"test={_shapes(self.test)}",
            f"classes={self.classes}",
        ]
        if self.class_names:
            fields.append(f"class_names={brief(self.class_names)}")
        return f"Dataset({', '.join(fields)})"

    @property
    def examples(self) -> int:
        """The number of training examples."""
        if isinstance(self.train, Stream):
            return len(self.train)
        _, y = self.train
        return len(y)

    @property
    def units(self) -> int:
        """The number of persons in the training part; without owners, of training examples."""
        if self.owners is None:
            return self.examples
        return int(self.owners.max()) + 1

    def rows(self, indices: np.ndarray) -> Split:
        """The training examples at these indices; a `Stream` reads them from the disk."""
        if isinstance(self.train, Stream):
            return self.train.rows(indices)
        x, y = self.train
        return x[indices], y[indices]


def _shapes(rows: Split | Stream) -> str:
    if isinstance(rows, Stream):
        return f"a Stream of {len(rows)} examples"
    return f"({', '.join(f'{x.dtype}{list(x.shape)}' for x in rows)})"


def hold_out(split: Split, size: int) -> tuple[Split, Split]:
    """Splits ``size`` rows off inputs and targets: ``(rest, held)``.

    Privacy:
      Rows of private data are private in either part. The epsilon of a training does not cover
      the held rows, nor a choice that was made by looking at them.

    Example:
      >>> rest, held = hold_out((np.zeros((10, 3)), np.arange(10)), size=2)
      >>> len(rest[1]), len(held[1])
      (8, 2)
    """
    rows = trees.leading_size(tuple(split), name="data.hold_out")
    # A Series of pandas takes `rest` for its labels.
    x, y = map(np.asarray, split)
    size = checks.whole("data.hold_out", "size", size, most=rows - 1)
    # Tables come sorted, so rows are shuffled; the seed is fixed, as a split is part of a result.
    order = np.random.default_rng(0).permutation(rows)
    held = order[:size]
    rest = order[size:]
    return (x[rest], y[rest]), (x[held], y[held])


def units_held_out(call: str, units: int, fraction: float | None) -> np.ndarray:
    """The units that are held out for the test by a fixed shuffle, as indices below ``units``.

    A unit is a row, or a person with all rows. ``fraction`` is the user's ``holdout``, and 0.2 if
    it is None; 0 holds out no unit, and a larger one at least one. ``call`` begins an error.
    """
    if fraction is None:
        fraction = 0.2
    fraction = checks.not_negative(call, "holdout", fraction)
    if fraction >= 1:
        raise ValueError(f"{call}: holdout={fraction:g}; expected a fraction from 0 to below 1.")
    indices = np.arange(units)
    if fraction == 0:
        return indices[:0]  # `hold_out` takes 1 or more
    size = max(1, int(units * fraction))
    # `hold_out` splits pairs of arrays; here both are the indices.
    _, (held, _) = hold_out((indices, indices), size)
    return held


def standardize(values: np.ndarray, mean: ArrayLike, scale: ArrayLike) -> np.ndarray:
    """Shifts and scales features by public constants: ``(values - mean) / scale`` in float32.

    Args:
      values: ``[examples, features]``, or images ``[examples, height, width, channels]``.
      mean: One number, or one a feature.
      scale: As ``mean``, and positive.

    Privacy:
      The constants must be public: published about data of this kind, or measured on other
      data. A mean of the private examples themselves is a release that no accountant sees.

    Example:
      >>> standardize(np.array([[10.0, 2.0]]), mean=[8.0, 0.0], scale=[2.0, 1.0])
      array([[1., 2.]], dtype=float32)
    """
    # Float32 rounds large offsets, and bytes wrap around.
    mean = np.asarray(mean, np.float64)
    scale = np.asarray(scale, np.float64)
    positive = (scale > 0) & np.isfinite(scale)
    if not np.all(np.isfinite(mean)) or not np.all(positive):
        raise ValueError("data.standardize: expected finite numbers, and positive scales.")
    return ((values - mean) / scale).astype(np.float32)


def checked(dataset: Dataset[_Train], shape: tuple[int, ...], where: str) -> Dataset[_Train]:
    """The data set, if shapes, numbers and labels are right; ``where`` opens the error."""
    for part, rows in (("train", dataset.train), ("test", dataset.test)):
        if isinstance(rows, Stream):
            x, _ = rows.row  # the rows themselves are read later
            fault = _fault_of_shape(x.shape, shape)
        else:
            fault = _fault(*rows, shape, dataset.classes)
        # A wrong label contributes zero in training, or trains another class.
        if fault:
            raise ValueError(f"data.load({dataset.name!r}): {where}: its {part} part has {fault}.")
    return dataset


def _fault(x: np.ndarray, y: np.ndarray, shape: tuple[int, ...], classes: int | None) -> str | None:
    """The first fault of inputs and targets, in words; None if they have none.

    ``shape`` is that of one input, and ``classes`` is None if the target is a quantity.
    """
    if not len(y) or len(x) != len(y):
        return f"{len(x)} inputs and {len(y)} targets"
    fault = _fault_of_shape(x.shape[1:], shape)
    if fault:
        return fault
    # Otherwise clipping silently drops examples with NaN.
    if not np.isfinite(x).all() or not np.isfinite(y).all():
        return "numbers that are NaN or infinite"
    if classes is not None and not (y.min() >= 0 and y.max() < classes):
        return f"labels from {y.min()} to {y.max()}; expected 0 to {classes - 1}"
    return None


def _fault_of_shape(given: tuple[int, ...], expected: tuple[int, ...]) -> str | None:
    if given == expected:
        return None
    return f"examples of shape {given}; expected {expected}"

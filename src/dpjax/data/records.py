# SPDX-License-Identifier: Apache-2.0
"""Records of a source with random access, and the examples that are made of them.

A record that cannot be read is an error that says which, whether records were asked for one by
one or many at once.  This page must never know of batches or threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from dpjax.types import PyTree


class RandomAccess(Protocol):
    """A source of records: a length, and the record at an index.

    This is grain's ``RandomAccessDataSource``.  A source that also has
    ``__getitems__(indices)``, as those of TensorFlow Datasets do, is asked for many at once.
    """

    def __len__(self) -> int:
        """How many records there are."""
        ...

    def __getitem__(self, index: Any, /) -> Any:
        """The record at an index."""
        ...


def examples(
    source: RandomAccess, example: Callable[[Any], PyTree] | None, indices: list[int]
) -> Iterator[PyTree]:
    """The examples at indices, in their order.

    Args:
      source: Where the records are.
      example: What an example is made of; by default the record itself.
      indices: Of the records; they may repeat.
    """
    records = _at_once(source, indices)
    for place, index in enumerate(indices):
        try:
            record = source[index] if records is None else records[place]
            made = record if example is None else example(record)
        except Exception as error:
            raise RuntimeError(
                f"data.Stream: example {index} could not be read ({type(error).__name__}: "
                f"{error}). The source may be damaged there, or `example` does not fit its "
                "record."
            ) from error
        yield made


def _at_once(source: RandomAccess, indices: list[int]) -> list[Any] | None:
    """All records by one call; None if they have to be read one by one."""
    many = getattr(source, "__getitems__", None)
    if many is None:
        return None
    try:
        records = list(many(indices))
    except Exception:  # it cannot say where: found again, and named, one by one
        return None
    if len(records) != len(indices):
        raise ValueError(
            f"data.Stream: the source's __getitems__ gave {len(records)} records for "
            f"{len(indices)} indices; expected one for each, repeated ones too."
        )
    return records


def checked_indices(indices: np.ndarray, size: int) -> np.ndarray:
    """Indices that are whole numbers and lie in a source of this size, ``[n]``.

    Args:
      indices: As they were given; an empty list may be of any type.
      size: The number of records.
    """
    indices = np.asarray(indices)
    if indices.ndim != 1 or (indices.size and indices.dtype.kind not in "iu"):
        raise TypeError(
            f"data.Stream: got indices of shape {indices.shape} and type {indices.dtype}; "
            "expected a list of whole numbers, [n]."
        )
    if indices.size and not (indices.min() >= 0 and indices.max() < size):
        raise IndexError(
            f"data.Stream: got indices from {indices.min()} to {indices.max()}; the source has "
            f"{size} examples. Padding is cut off before reading: draw.indices[:draw.size]."
        )
    return indices.astype(np.int64)

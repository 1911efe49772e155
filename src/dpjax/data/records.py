# SPDX-License-Identifier: Apache-2.0
"""Records of a source with random access, and the examples that are made of them.

An error names the record that cannot be read, whether records were read one by one or in one
call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np

from dpjax.types import PyTree


@runtime_checkable
class RandomAccess(Protocol):
    """A source of records: a length, and the record at an index.

    This is grain's ``RandomAccessDataSource``. If a source also has ``__getitems__(indices)``,
    as sources of TensorFlow Datasets do, many records are read in one call.
    """

    def __len__(self) -> int:
        """The number of records."""
        ...

    def __getitem__(self, index: Any, /) -> Any:
        """The record at an index."""
        ...


def examples(
    source: RandomAccess, example: Callable[[Any], PyTree] | None, indices: list[int]
) -> Iterator[PyTree]:
    """The examples at indices, which may repeat, in their order; see `Stream` for ``example``."""
    # Sources such as grain's read many records in one call faster than one by one.
    records = _in_one_call(source, indices)
    for place, index in enumerate(indices):
        try:
            record = source[index] if records is None else records[place]
            made = record if example is None else example(record)
        except Exception as error:
            # With the index: in a thread pool the user's traceback alone does not say which record
            # failed.
            raise RuntimeError(
                f"data.Stream: example {index} could not be read ({type(error).__name__}: "
                f"{error}). The source may be damaged there, or `example` does not fit its "
                "record."
            ) from error
        yield made


def _in_one_call(source: RandomAccess, indices: list[int]) -> list[Any] | None:
    """All records by one call; None if they have to be read one by one."""
    many = getattr(source, "__getitems__", None)
    if many is None:
        return None
    try:
        records = list(many(indices))
    except Exception:  # it does not name the record: reading one by one finds it
        return None
    if len(records) != len(indices):
        raise ValueError(
            f"data.Stream: the source's __getitems__ gave {len(records)} records for "
            f"{len(indices)} indices; expected one for each index, also where indices repeat."
        )
    return records


def checked_indices(indices: np.ndarray, size: int) -> np.ndarray:
    """Indices that are whole numbers and lie in a source of this size, ``[n]``."""
    # An empty list may have any type: NumPy reads [] as floats.
    indices = np.asarray(indices)
    if indices.ndim != 1 or (indices.size and indices.dtype.kind not in "iu"):
        raise TypeError(
            f"data.Stream: got indices of shape {indices.shape} and type {indices.dtype}; "
            "expected a list of whole numbers, [n]."
        )
    # NumPy would take a negative index from the end: padding would silently train on the last
    # example.
    if indices.size and not (indices.min() >= 0 and indices.max() < size):
        raise IndexError(
            f"data.Stream: got indices from {indices.min()} to {indices.max()}; the source has "
            f"{size} examples. Usually padding was not cut off: draw.indices[:draw.size]."
        )
    return indices.astype(np.int64)

# SPDX-License-Identifier: Apache-2.0
"""Which record stands behind each index of a source, as far as known libraries say.

Sensitivity is that of one index, so a record must have one index. Data sets of PyTorch, grain and
Hugging Face are made of others: the walk follows them to the data sets, or the buffers, that hold
records. It imports no library and reads no record. Copies, as ``x[np.repeat(rows, 2)]`` makes
them, and classes of the user's own cannot be seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain, pairwise
from typing import Any, TypeAlias

import numpy as np

from dpjax._foreign import kind_of
from dpjax.data.records import RandomAccess

_Rows: TypeAlias = list[range | np.ndarray]
# From a data set or a buffer to its number, and what keeps its address from being used again.
_Seen: TypeAlias = dict[Any, tuple[int, Any]]

_SEVERAL = "gives one record several indices, so one example could count several times"
_TRANSFORMATIONS = {
    "grain.BatchMapDataset": "its `.batch(...)` makes one record of several examples",
    "grain.FilterMapDataset": "its `.filter(...)` leaves holes: filter before the source is made",
    "grain.FlatMapMapDataset": f"its flat map {_SEVERAL}",
    "grain.RepeatMapDataset": f"its `.repeat(...)` {_SEVERAL}",
}
# Where a data set keeps what it is made of. All others of grain have parents.
_INSIDE = {
    "torch.Subset": "dataset",
    "torch.ConcatDataset": "datasets",
    "torch.StackDataset": "datasets",
    "datasets.Dataset": "_data",
    "grain.SourceMapDataset": "_source",
}


def not_single(source: RandomAccess) -> str | None:
    """Why the indices of a source are not one example each; None if its objects do not say so."""
    # Transformations first: an endless `.repeat()` has no rows to look at.
    return _transformed(source) or (f"it {_SEVERAL}" if _repeat(_rows(source, {})) else None)


def _transformed(source: Any) -> str | None:
    found = map(_transformed, _parts(source))
    return _TRANSFORMATIONS.get(kind_of(source)) or next(filter(None, found), None)


def _parts(source: Any) -> list[Any]:
    """The data sets that a data set is made of; none if its kind is not known."""
    kind = kind_of(source)
    name = _INSIDE.get(kind, "parents" if kind.startswith("grain.") else None)
    found = getattr(source, name, ()) if name else ()
    if name in ("datasets", "parents"):
        return list(found.values() if isinstance(found, Mapping) else found)
    return [found] if name else []


def _rows(source: Any, seen: _Seen) -> _Rows:
    """Numbers of the records in the order of the indices; equal numbers are one record."""
    if hasattr(source, "combine_chunks"):  # a table of Arrow
        return [_chunk(chunk, seen) for chunk in source.column(0).chunks]
    size, parts = len(source), [_rows(part, seen) for part in _parts(source)]
    sizes = [sum(map(len, part)) for part in parts]
    if parts and (chosen := _chosen(source)) is not None:
        return [_joined(chain(*parts))[chosen]]
    if sum(sizes) == size:  # joined, or mapped; the order of a shuffle does not matter
        return list(chain(*parts))
    if set(sizes) == {size}:  # zipped: one part without repeats tells all records apart
        return min(parts, key=_repeat)
    return [_numbered(id(source), source, range(size), seen)]


def _chosen(source: Any) -> np.ndarray | None:
    """The place of each index in the parts; None if the source does not choose them."""
    match kind_of(source):
        case "torch.Subset":
            return np.array([int(place) for place in source.indices], int)
        case "datasets.Dataset" if source._indices is not None:
            return np.asarray(source._indices.column(0))
        case "grain.SliceMapDataset":
            return np.arange(source._start, source._stop, source._step)
    return None


def _chunk(chunk: Any, seen: _Seen) -> range:
    # Selected and joined tables share the buffers of the first one, and no object.
    buffers = [buffer.address for buffer in chunk.buffers() if buffer and buffer.size]
    key = ("buffer", buffers[0]) if buffers else id(chunk)
    return _numbered(key, chunk, range(chunk.offset, chunk.offset + len(chunk)), seen)


def _numbered(key: Any, kept: Any, rows: range, seen: _Seen) -> range:
    """The rows of one data set, with numbers that no other one has."""
    number, _ = seen.setdefault(key, (len(seen), kept))
    return range((number << 40) + rows.start, (number << 40) + rows.stop)


def _joined(rows: Iterable[range | np.ndarray]) -> np.ndarray:
    parts = [np.arange(r.start, r.stop) if isinstance(r, range) else r for r in rows]
    return np.concatenate([np.arange(0), *parts])


def _repeat(rows: _Rows) -> bool:
    """Whether a number occurs twice."""
    # Without an array of all numbers where nothing was selected: the data may be huge.
    rows = [part for part in rows if len(part)]
    ranges = sorted((part for part in rows if isinstance(part, range)), key=lambda r: r.start)
    if len(ranges) == len(rows):
        return any(left.stop > right.start for left, right in pairwise(ranges))
    numbers = np.sort(_joined(rows))
    return bool((numbers[1:] == numbers[:-1]).any())

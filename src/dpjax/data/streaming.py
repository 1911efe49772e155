# SPDX-License-Identifier: Apache-2.0
"""Examples that stay on the disk, for data larger than memory.

A `Stream` reads examples by their index from any source with random access: a data source of
grain or of TensorFlow Datasets, a memory map, a list. It reads the requested rows only, and
threads read the next batches while the device computes. The indices come from a sampler, whose
draws are accounted; so iterators, which choose their own order, are refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from absl import logging

from dpjax import checks, trees
from dpjax._foreign import fits, fitted, kind_of, plain
from dpjax.data.origins import not_single
from dpjax.data.records import RandomAccess, checked_indices, examples
from dpjax.types import PyTree


@dataclass(frozen=True, eq=False)
class Stream:
    """Examples that stay on the disk and are read by index.

    Args:
      source: A length and a record for each index; see `RandomAccess`.
      example: From a record to a tree of NumPy arrays, on the host, such as
        ``(image / 255, label)``; by default the record itself. Equal records must give equal
        examples; otherwise a resumed run differs from an uninterrupted one.
      workers: The number of threads that read; 1 for a source that is not thread-safe.

    Every example has the shapes and types of the first, because a compiled step has one shape.
    The types are JAX's for these arrays: float32 for float64 unless ``jax_enable_x64`` is set.

    Privacy:
      The records are private, and so are the indices that are read: amplification by sampling
      assumes that the draw is secret, so a storage service that logs its reads must be trusted.
      One index is one example. A repeated or resampled data set, which gives a record several
      indices, is refused. Copies of records are not seen.
      Shapes and the number of examples count as public.

    Example:
      >>> squares = Stream(range(100), example=lambda i: (np.float32(i), np.int32(i * i)))
      >>> x, y = squares.rows(np.array([3, 1, 3]))
      >>> x.tolist(), y.tolist()
      ([3.0, 1.0, 3.0], [9, 1, 9])

      With a data set that TensorFlow Datasets has prepared in a format with random access:
      ``Stream(tfds.data_source("imagenet2012", split="train"), example=...)``.
    """

    source: RandomAccess
    example: Callable[[Any], PyTree] | None = None
    workers: int = 8

    def __post_init__(self) -> None:
        kind = kind_of(self.source)
        if not isinstance(self.source, RandomAccess):
            hint = " Give its data set: Stream(loader.dataset)."
            raise TypeError(
                f"data.Stream: the source is of type {kind}, which has no length or cannot be "
                "indexed; expected random access, as data sources of grain and of TensorFlow "
                "Datasets, memory maps and lists have. An iterator chooses its own order, which no "
                f"accountant describes.{hint if hasattr(self.source, 'dataset') else ''}"
            )
        if kind.startswith(("pandas.", "polars.")):
            raise TypeError(
                f"data.Stream: the source is a {kind}, which is indexed by column or by label; "
                "expected one record an index. It is in memory and needs no Stream: pass it as the "
                "data, or its arrays, (frame[inputs].to_numpy(), frame[target].to_numpy())."
            )
        if isinstance(self.source, Mapping) and 0 not in self.source:
            raise TypeError(
                f"data.Stream: the source is a {kind} with the keys {list(self.source)!s:.200}; "
                "expected one record an index. Give one split or one data set of it: "
                "Stream(source[key])."
            )
        if why := not_single(self.source):
            raise TypeError(
                f"data.Stream: the source is a {kind}, and {why}; expected one example an index. "
                "The sampler draws the batches, and `steps` of the mechanism says how long "
                "training lasts. In place of repeats, weigh rare classes in the loss by public "
                "weights, and average views of one example by losses.augmented."
            )
        if _is_columns(self.source):
            raise TypeError(
                f"data.Stream: the source is a {type(self.source).__name__} of arrays, which would "
                f"be taken for {len(self.source)} examples; expected one record an index. Usually "
                "these are inputs and targets: Stream(range(len(x)), example=lambda i: (x[i], "
                "y[i])). Arrays in memory need no Stream: pass (x, y) as the data."
            )
        if not len(self.source):
            raise ValueError("data.Stream: the source is empty; expected at least one record.")
        checks.whole("data.Stream", "workers", self.workers, "At least one thread reads.")

    def __len__(self) -> int:
        """The number of examples."""
        return len(self.source)

    @cached_property
    def row(self) -> PyTree:
        """Shapes and types of one example on the device; reads the first example."""
        return jax.tree.map(
            lambda r: jax.ShapeDtypeStruct(r.shape, jax.dtypes.canonicalize_dtype(r.dtype)),
            self._first,
        )

    @cached_property
    def _first(self) -> PyTree:
        """Shapes and types of the first example in the source."""
        (example,) = examples(self.source, self.example, [0])
        for path, leaf in jax.tree_util.tree_leaves_with_path(example):
            if np.asarray(leaf).dtype.kind not in "biufcV":  # V: bfloat16 and its like
                raise TypeError(
                    f"data.Stream: {jax.tree_util.keystr(path) or 'the example'} is {leaf!r:.60}; "
                    "expected numbers. Select the entries that the loss needs: "
                    "Stream(source, example=lambda record: (record['image'], record['label']))."
                )
        if type(self.source) is list:
            _warn_of_batches([np.shape(leaf) for leaf in jax.tree.leaves(example)])
        # They would reach the loss as lists of scalars.
        parts = jax.tree.leaves(example, is_leaf=_is_list_of_numbers)
        if lists := [part for part in parts if isinstance(part, list)]:
            raise TypeError(
                f"data.Stream: an example holds the list {lists[0]!r:.60}; expected arrays. "
                "Usually the records are of Hugging Face: Stream(dataset.with_format('numpy')). "
                "For others, example=lambda record: np.asarray(record, 'float32') makes an array."
            )
        return jax.tree.map(lambda leaf: _shape(plain(leaf, "data.Stream: example 0")), example)

    @property
    def fingerprint(self) -> str:
        """The number of examples, and a hash of 16 of them spread over the stream."""
        # Hashing all examples would read the whole data set before a run starts.
        some = np.linspace(0, len(self) - 1, 16).astype(int)
        return f"{len(self)} streamed, {trees.fingerprint(self.rows(some))}"

    def rows(self, indices: np.ndarray) -> PyTree:
        """Reads examples.

        Args:
          indices: ``[n]``, in any order; an index may repeat, and there may be none.

        Returns:
          The examples stacked, ``[n, ...]`` for every leaf of `row`, in the order of ``indices``.
        """
        (batch,) = self.batches([indices], ahead=0)
        return batch

    def batches(self, draws: Iterable[np.ndarray], ahead: int = 2) -> Generator[PyTree, None, None]:
        """Reads batch after batch; threads read the next ones while the caller computes.

        Args:
          draws: The indices of each batch, as `rows` takes them. The caller's own thread
            iterates over them, ``ahead`` batches before they are needed.
          ahead: The number of batches that are read in advance; ``ahead + 1`` are in memory.

        Returns:
          An iterator of batches. Its threads end when it is exhausted, closed or garbage
          collected, or when it raises.
        """
        # A bounded queue: reading further ahead would hold more batches in memory than the device
        # can use.
        waiting: deque[tuple[list[np.ndarray], list[Future[None]]]] = deque()
        pool = ThreadPoolExecutor(self.workers, thread_name_prefix="dpjax-stream")
        try:
            for indices in draws:
                waiting.append(self._begin(pool, indices))
                if len(waiting) > ahead:
                    yield self._finish(*waiting.popleft())
            while waiting:
                yield self._finish(*waiting.popleft())
        finally:
            # Also when the caller leaves the loop early, which closes the generator.
            pool.shutdown(cancel_futures=True)

    def _begin(
        self, pool: ThreadPoolExecutor, indices: np.ndarray
    ) -> tuple[list[np.ndarray], list[Future[None]]]:
        """Arrays for a batch, and the futures of the threads that fill them."""
        indices = checked_indices(indices, len(self))
        # Threads write rows into one array, so that a batch is in memory once.
        room = [np.empty((len(indices), *r.shape), r.dtype) for r in jax.tree.leaves(self.row)]
        count = max(1, min(self.workers, len(indices)))
        shares = zip(*(np.array_split(each, count) for each in (indices, *room)), strict=True)
        return room, [pool.submit(self._fill, mine.tolist(), room) for mine, *room in shares]

    def _finish(self, room: list[np.ndarray], promises: list[Future[None]]) -> PyTree:
        for promise in promises:
            promise.result()  # raises what the thread raised
        return jax.tree.unflatten(jax.tree.structure(self.row), room)

    def _fill(self, indices: list[int], room: list[np.ndarray]) -> None:
        """Reads a share of a batch into its rows."""
        first, structure = jax.tree.flatten(self._first)
        expected = [(r.shape, r.dtype) for r in first]
        # Wider whole numbers are read into an array of their own type first, so that one check is
        # for all rows. Wider than the rows: JAX's settings hold for the thread of the caller alone.
        places = [
            np.empty(rows.shape, r.dtype)
            if r.dtype.kind in "iu" and r.dtype != rows.dtype
            else rows
            for r, rows in zip(first, room, strict=True)
        ]
        for place, example in enumerate(examples(self.source, self.example, indices)):
            leaves, found = jax.tree.flatten(example)
            called = f"data.Stream: example {indices[place]}"
            arrays = [plain(leaf, called) for leaf in leaves]
            # Checked row by row, because a stream is never read whole before it is trained on.
            kinds = [(array.shape, array.dtype) for array in arrays]
            if found != structure or kinds != expected:
                raise ValueError(
                    f"{called} is {found.unflatten(map(_shape, arrays))}; "
                    f"the first one, and so every one, is {self._first}. Let `example` return one "
                    "shape and type for all records."
                )
            for rows, array in zip(places, arrays, strict=True):
                rows[place] = array
        for rows, read in zip(room, places, strict=True):
            if read is rows:
                continue
            if not fits(read, rows.dtype):
                for index, row in zip(indices, read, strict=True):
                    fitted(row, rows.dtype, f"data.Stream: example {index}")
            rows[...] = read


def _is_columns(source: Any) -> bool:
    """Whether a tuple or list holds arrays of all examples, rather than examples."""
    pair = isinstance(source, tuple) or type(source) is list
    if not pair or len(source) < 2:
        return False
    first, second = source[:2]
    arrays = all(hasattr(x, "__array__") and getattr(x, "ndim", 0) for x in (first, second))
    return arrays and (isinstance(source, tuple) or _shape(first) != _shape(second))


def _warn_of_batches(shapes: list[tuple[int, ...]]) -> None:
    """Warns if all arrays of a record have one number of rows, as in ``list(loader)``."""
    # The loss of a batch would train, and clipping would bound a batch in place of an example.
    rows = {shape[:1] for shape in shapes}
    if len(shapes) > 1 and len(rows) == 1 and max(rows) > (1,):
        logging.warning(
            "data.Stream: all %d arrays of a record have %d rows. If a record is a batch, as in "
            "list(DataLoader(...)), epsilon holds for no single example: give the data set. If "
            "the rows are parts of one example, all is well.",
            len(shapes),
            shapes[0][0],
        )


def _is_list_of_numbers(given: Any) -> bool:
    """Whether it is a list of Python's numbers, or of lists of them."""
    return isinstance(given, list) and all(type(x) in (int, float) for x in jax.tree.leaves(given))


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    array = np.asarray(leaf)
    return jax.ShapeDtypeStruct(array.shape, array.dtype)

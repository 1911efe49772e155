# SPDX-License-Identifier: Apache-2.0
"""Examples that stay on the disk, for data larger than memory.

A `Stream` reads examples by their index out of any source with random access: a data source
of grain or of TensorFlow Datasets, a memory map, a list.  Nothing but the rows asked for is
ever read, and threads read the next batches while the present one is computed.

Everything here is host code.  It must never choose an index: that is sampling, and is
accounted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from dpjax import trees
from dpjax.data.records import RandomAccess, checked_indices, examples
from dpjax.types import PyTree


@dataclass(frozen=True, eq=False)
class Stream:
    """Examples that stay on the disk and are read by index.

    Args:
      source: A length and a record for each index; see `RandomAccess`.
      example: What an example is made of, on the host: ``record -> tree of NumPy arrays``,
        such as ``(image / 255, label)``; by default the record itself.  The
        same record must give the same example, or a resumed run would be another one.
      workers: How many threads read; 1 for a source that only one thread may read.

    Every example has the shapes and types of the first, because a compiled step has one
    shape; they are the types that JAX makes of them (float32 for float64 unless JAX is told
    otherwise).

    Privacy:
      The source holds the private data, and all that is read from it is private.  Which
      indices are read is private as well: amplification by sampling rests on nobody knowing
      the draw, so a storage service that logs its reads is trusted with it.  Shapes and the
      number of examples are taken to be public.

    Example:
      >>> squares = Stream(range(100), example=lambda i: (np.float32(i), np.int32(i * i)))
      >>> x, y = squares.rows(np.array([3, 1, 3]))
      >>> x.tolist(), y.tolist()
      ([3.0, 1.0, 3.0], [9, 1, 9])

      Any data set that TensorFlow Datasets has prepared in a format with random access::

          source = tfds.data_source("imagenet2012", split="train")
          images = Stream(source, example=lambda r: (resized(r["image"]), r["label"]))
    """

    source: RandomAccess
    example: Callable[[Any], PyTree] | None = None
    workers: int = 8

    def __post_init__(self) -> None:
        if not (hasattr(self.source, "__len__") and hasattr(self.source, "__getitem__")):
            raise TypeError(
                f"data.Stream: the source is of type {type(self.source).__name__}, which has no "
                "length or cannot be indexed; expected random access, as data sources of grain and "
                "of TensorFlow Datasets, memory maps and lists have. An iterator can only be "
                "read in its own order, and that is no sampling that can be accounted."
            )
        if _is_columns(self.source):
            raise TypeError(
                f"data.Stream: the source is a {type(self.source).__name__} of arrays, which would "
                f"be taken for {len(self.source)} examples; expected one record an index. Usually "
                "these are inputs and targets: Stream(range(len(x)), example=lambda i: (x[i], "
                "y[i])). Arrays in memory need no Stream: give (x, y) itself as the data."
            )
        if not len(self.source):
            raise ValueError("data.Stream: the source is empty; expected at least one record.")
        if self.workers < 1:
            raise ValueError(f"data.Stream(workers={self.workers}): at least one thread reads.")

    def __len__(self) -> int:
        """How many examples there are."""
        return len(self.source)

    @cached_property
    def row(self) -> PyTree:
        """Shapes and types of one example, found by reading the first."""
        return jax.tree.map(
            lambda r: jax.ShapeDtypeStruct(r.shape, jax.dtypes.canonicalize_dtype(r.dtype)),
            self._first,
        )

    @cached_property
    def _first(self) -> PyTree:
        """Shapes and types of the first example as they are read."""
        (example,) = examples(self.source, self.example, [0])
        for path, leaf in jax.tree_util.tree_leaves_with_path(example):
            if np.asarray(leaf).dtype.kind not in "biufcV":  # V: bfloat16 and its like
                raise TypeError(
                    f"data.Stream: {jax.tree_util.keystr(path) or 'the example'} is {leaf!r:.60}, "
                    "not numbers. Pick what the loss needs: "
                    "Stream(source, example=lambda record: (record['image'], record['label']))."
                )
        return jax.tree.map(_shape, example)

    @property
    def fingerprint(self) -> str:
        """A hash of 16 examples spread over the stream, and their number."""
        some = np.linspace(0, len(self) - 1, 16).astype(int)
        return f"{len(self)} streamed, {trees.fingerprint(self.rows(some))}"

    def rows(self, indices: np.ndarray) -> PyTree:
        """Reads examples.

        Args:
          indices: ``[n]``, in any order; an index may repeat, and there may be none.

        Returns:
          The examples stacked, ``[n, ...]`` for every leaf of `row`, in the order asked for.
        """
        (batch,) = self.batches([indices], ahead=0)
        return batch

    def batches(self, draws: Iterable[np.ndarray], ahead: int = 2) -> Generator[PyTree, None, None]:
        """Reads batch after batch, the next ones while the caller works on this one.

        Args:
          draws: The indices of each batch, as `rows` takes them.  They are asked for from the
            caller's own thread, `ahead` batches before they are needed.
          ahead: How many batches are read in advance; so many and one more are in memory.

        Returns:
          What `rows` gives for each of them, in their order.  Threads end with the
          iterator: when it is exhausted, closed or no longer referred to, or an error leaves
          it.
        """
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
            pool.shutdown(cancel_futures=True)

    def _begin(
        self, pool: ThreadPoolExecutor, indices: np.ndarray
    ) -> tuple[list[np.ndarray], list[Future[None]]]:
        """Room for a batch, and the threads' promises to fill it."""
        indices = checked_indices(indices, len(self))
        room = [np.empty((len(indices), *r.shape), r.dtype) for r in jax.tree.leaves(self.row)]
        shares = np.array_split(np.arange(len(indices)), max(1, min(self.workers, len(indices))))
        return room, [pool.submit(self._fill, room, indices, share) for share in shares]

    def _finish(self, room: list[np.ndarray], promises: list[Future[None]]) -> PyTree:
        for promise in promises:
            promise.result()
        return jax.tree.unflatten(jax.tree.structure(self.row), room)

    def _fill(self, room: list[np.ndarray], indices: np.ndarray, share: np.ndarray) -> None:
        """Puts a share of a batch in its places."""
        first, structure = jax.tree.flatten(self._first)
        read = examples(self.source, self.example, indices[share].tolist())
        for place, example in zip(share, read, strict=True):
            leaves, found = jax.tree.flatten(example)
            arrays = [np.asarray(leaf) for leaf in leaves]
            kinds = [(array.shape, array.dtype) for array in arrays]
            if found != structure or kinds != [(r.shape, r.dtype) for r in first]:
                raise ValueError(
                    f"data.Stream: example {indices[place]} is {jax.tree.map(_shape, example)}; "
                    f"the first one, and so every one, is {self._first}. Let `example` bring them "
                    "to one shape and type."
                )
            for rows, array in zip(room, arrays, strict=True):
                rows[place] = array


def _is_columns(source: Any) -> bool:
    """Whether a tuple or list holds arrays of all examples, rather than examples."""
    pair = isinstance(source, tuple) or type(source) is list
    if not pair or len(source) < 2:
        return False
    first, second = source[:2]
    arrays = all(isinstance(x, np.ndarray | jax.Array) and x.ndim for x in (first, second))
    return arrays and (isinstance(source, tuple) or _shape(first) != _shape(second))


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    array = np.asarray(leaf)
    return jax.ShapeDtypeStruct(array.shape, array.dtype)

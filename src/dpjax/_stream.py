# SPDX-License-Identifier: Apache-2.0
"""Examples that stay on the disk, for data larger than memory.

A sampler chooses which examples are read, because privacy is accounted for its draws. So iterators,
which choose their own order, are refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from dpjax import trees
from dpjax._arrays import native
from dpjax.types import PyTree


@runtime_checkable
class RandomAccess(Protocol):
    """A source of records: a length, and the record at an index.

    A list, a memory map and grain's ``RandomAccessDataSource`` are some. If one also has
    ``__getitems__(indices)``, as sources of TensorFlow Datasets do, many records are read in one
    call.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


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
      One index is one example. Where a record has several indices, as after ``repeat`` or in a
      resampled data set, one person moves the sum by several bounds, which is not seen here.
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
        if not isinstance(self.source, RandomAccess):
            raise TypeError(
                f"data.Stream: got a {type(self.source).__name__}; expected a source with a "
                "length and an index. Of a loader give its data set: Stream(loader.dataset)."
            )

    def __len__(self) -> int:
        """The number of examples."""
        return len(self.source)

    @cached_property
    def row(self) -> PyTree:
        """Shapes and types of one example on the device; reads the first example."""

        def on_device(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))

        return jax.tree.map(on_device, self._first)

    @cached_property
    def _first(self) -> PyTree:
        """Shapes and types of the first example on the host."""
        (example,) = self._examples([0])
        return jax.tree.map(lambda leaf: _shape(native(leaf, "data.Stream: example 0")), example)

    @property
    def fingerprint(self) -> str:
        """The number of examples, and a hash of 16 of them spread over the stream."""
        # A hash of all examples reads the whole data set before a run starts.
        some = np.linspace(0, len(self) - 1, 16).astype(int)
        return f"{len(self)} streamed, {trees.fingerprint(self.rows(some))}"

    def rows(self, indices: np.ndarray) -> PyTree:
        """The examples at ``indices``, ``[n]`` or ``[n, m]``, in their order; one may repeat."""
        (batch,) = self.batches([indices], ahead=0)
        return batch

    def batches(self, draws: Iterable[np.ndarray], ahead: int = 2) -> Generator[PyTree, None, None]:
        """Reads batch after batch; threads read the next ones while the caller computes.

        Args:
          draws: The indices of each batch, as `rows` takes them. The caller's own thread
            iterates over them, ``ahead`` batches before they are needed.
          ahead: The number of batches that are read in advance; ``ahead + 1`` are in memory.
        """
        # Each entry has the arrays of a batch, and the futures of the threads that fill them. It
        # waits until ``ahead`` later batches have begun.
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
            # This also runs when the caller leaves the loop early, which closes the generator.
            pool.shutdown(cancel_futures=True)

    def _begin(
        self, pool: ThreadPoolExecutor, indices: np.ndarray
    ) -> tuple[list[np.ndarray], list[Future[None]]]:
        """Begins a batch: its arrays, and the futures of the threads that fill them.

        The batch has one array for each leaf of an example, ``[*indices.shape, *leaf.shape]``.
        """
        indices = np.asarray(indices, np.int64)  # NumPy's default for an empty list is float64
        threads = max(1, min(self.workers, indices.size))
        batch = []
        # The indices, and then the rows of each leaf, are split into one part for each thread.
        parts_of_threads = [np.array_split(indices.ravel(), threads)]
        for leaf in jax.tree.leaves(self.row):  # the shapes and types of one example
            # All threads write into views of one array, so the batch is in memory once.
            rows = np.empty((indices.size, *leaf.shape), leaf.dtype)
            parts_of_threads.append(np.array_split(rows, threads))
            batch.append(rows.reshape(*indices.shape, *leaf.shape))
        # Each thread has its part of the indices, and its rows of every leaf.
        futures = [
            pool.submit(self._fill, some_indices.tolist(), rows_of_leaves)
            for some_indices, *rows_of_leaves in zip(*parts_of_threads, strict=True)
        ]
        return batch, futures

    def _finish(self, batch: list[np.ndarray], futures: list[Future[None]]) -> PyTree:
        """The batch, when all threads have filled it."""
        for future in futures:
            future.result()  # raises what the thread raised
        return jax.tree.unflatten(jax.tree.structure(self.row), batch)

    def _fill(self, indices: list[int], rows_of_leaves: list[np.ndarray]) -> None:
        """Writes the examples of one thread into its rows of the batch."""
        expected, structure = jax.tree.flatten(self._first)
        for place, example in enumerate(self._examples(indices)):
            called = f"data.Stream: example {indices[place]}"
            leaves, form = jax.tree.flatten(example)
            shapes = [_shape(leaf) for leaf in leaves]
            # Each row is checked, because a stream is never read whole before it is trained on.
            if form != structure or shapes != expected:
                raise ValueError(
                    f"{called} is {form.unflatten(shapes)}; expected the shapes and types of the "
                    f"first one, {self._first}."
                )
            for rows, leaf in zip(rows_of_leaves, leaves, strict=True):
                # JAX's settings hold for the thread of the caller, which made the rows.
                rows[place] = native(leaf, called, rows.dtype)

    def _examples(self, indices: list[int]) -> Iterator[PyTree]:
        """The examples at indices, which may repeat, in their order."""
        records = self._records(indices)
        for index in indices:
            try:
                example = next(records)  # the record itself, unless it is converted
                if self.example is not None:
                    example = self.example(example)
            except Exception as error:
                # The traceback of the user's code in a thread does not name the record.
                why = f"could not be read ({type(error).__name__}: {error})"
                raise RuntimeError(f"data.Stream: example {index} {why}.") from error
            yield example

    def _records(self, indices: list[int]) -> Iterator[Any]:
        many = getattr(self.source, "__getitems__", None)
        if many is None:
            return (self.source[index] for index in indices)
        # Sources such as grain's read many records in one call faster than one by one.
        return iter(many(indices))


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    array = np.asarray(leaf)
    return jax.ShapeDtypeStruct(array.shape, array.dtype)

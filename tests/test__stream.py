# SPDX-License-Identifier: Apache-2.0
"""Streams: what was asked for, in its order, and nothing else; errors say where."""

import itertools
import threading
import time
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mutation import kills

from dpjax.data import Stream


class Counted:
    """A source as grain's protocol has it, that remembers what was read."""

    def __init__(self, records):
        self.records, self.read = records, []

    def __len__(self):
        return len(self.records)

    def __getitem__(self, index):
        self.read.append(index)
        if isinstance(self.records[index], Exception):
            raise self.records[index]
        return self.records[index]


class Many(Counted):
    """A source that answers many indices by one call."""

    def __getitems__(self, indices):
        assert type(indices) is list
        self.calls = [*getattr(self, "calls", []), indices]
        return [self.records[index] for index in indices]


def records(count=10):
    return [(np.full((2, 3), i, np.float32), np.int32(i)) for i in range(count)]


def threads():
    return [t for t in threading.enumerate() if t.name.startswith("dpjax-stream")]


@kills(
    "_stream.py",
    "some_indices.tolist(), rows_of_leaves)",
    "sorted(some_indices.tolist()), rows_of_leaves)",
)
@pytest.mark.parametrize("source", [Counted, Many])
@pytest.mark.parametrize("workers", [1, 3])
def test_rows_come_as_they_are_asked_for_and_nothing_else_is_read(source, workers):
    stored = source(records(1000))
    stream = Stream(stored, workers=workers)
    assert len(stream) == 1000
    asked = np.array([7, 3, 3, 999, 7])
    x, y = stream.rows(asked)
    assert (x.shape, x.dtype, y.dtype) == ((5, 2, 3), np.float32, np.int32)
    assert y.tolist() == x[:, 1, 2].tolist() == asked.tolist()
    if source is Many:
        assert stored.read == []  # the first one too came by the call for many
        assert sorted(itertools.chain(*stored.calls)) == [0, 3, 3, 7, 7, 999]
        assert len(stored.calls) == 1 + min(workers, 5)
    else:
        assert sorted(stored.read) == [0, 3, 3, 7, 7, 999]
    none, _ = stream.rows(np.array([]))
    assert (none.shape, none.dtype) == ((0, 2, 3), np.float32)


def test_types_are_those_that_jax_makes_of_them():
    stream = Stream([{"x": 0.5, "y": 3, "image": np.zeros((2, 2), np.uint8)}] * 2)
    rows = stream.rows(np.array([1]))
    on_device = jax.tree.map(jnp.asarray, rows)
    assert jax.tree.map(lambda x: x.dtype, rows) == jax.tree.map(lambda x: x.dtype, on_device)
    assert jax.tree.map(lambda x: x.dtype, stream.row) == jax.tree.map(lambda x: x.dtype, rows)


def test_a_memory_map_is_a_source_and_examples_are_made_on_the_host(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(24.0, dtype=np.float32).reshape(6, 4))
    stream = Stream(
        np.load(tmp_path / "x.npy", mmap_mode="r"), example=lambda row: (row, row.sum())
    )
    x, total = stream.rows(np.array([5, 0]))
    assert x.tolist() == [[20, 21, 22, 23], [0, 1, 2, 3]]
    assert total.tolist() == [86, 6]


@pytest.mark.parametrize("ahead", [0, 1, 20])
def test_batches_come_in_order(ahead):
    def slow_at_first(i):
        time.sleep(0.01 if i < 3 else 0)
        return np.int32(i)

    stream = Stream(range(10), slow_at_first, workers=3)
    draws = [np.array(d, int) for d in ([1, 2], [], [9], [3, 3, 3], [0])]
    got = [y.tolist() for y in stream.batches(iter(draws), ahead=ahead)]
    assert got == [d.tolist() for d in draws]
    assert not threads()


@pytest.mark.parametrize("ahead", [0, 2])
def test_no_more_batches_are_read_ahead_than_asked(ahead):
    asked = []
    draws = (asked.append(i) or np.array([i]) for i in itertools.count())
    stored = Counted(records(100))
    batches = Stream(stored, workers=4).batches(draws, ahead=ahead)
    assert asked == []
    for step in range(5):
        next(batches)
        assert asked == list(range(step + 1 + ahead))
    batches.close()
    assert max(stored.read) <= 4 + ahead


def test_threads_end_with_a_consumer_that_stops_early():
    stream = Stream(Counted(records()), workers=4)
    for _ in stream.batches(itertools.repeat(np.arange(10)), ahead=3):
        assert threads()
        break
    assert not threads()

    def fails():
        for _ in stream.batches(itertools.repeat(np.arange(10))):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert not threads()


@pytest.mark.parametrize("source", [Counted, Many])
def test_what_cannot_be_read_is_named(source):
    def example(record):
        if isinstance(record, Exception):
            raise record
        return record

    stream = Stream(source([*records(6), OSError("bad sector"), *records(3)]), example, workers=4)
    batches = stream.batches([np.array([1, 2]), np.array([5, 4, 6, 8])])
    assert next(batches)[1].tolist() == [1, 2]
    with pytest.raises(RuntimeError, match=r"example 6 could not be read \(OSError: bad sector\)"):
        next(batches)
    assert not threads()


@pytest.mark.parametrize(
    "other",
    [
        (np.zeros((3, 2), np.float32), np.int32(0)),
        (np.zeros((2, 3), np.float64), np.int32(0)),
        (np.zeros((2, 3), np.float32),),
        {"x": np.zeros((2, 3), np.float32)},
    ],
    ids=["shape", "dtype", "parts", "structure"],
)
def test_examples_of_another_kind_are_refused_by_their_index(other):
    stream = Stream(Counted([*records(4), other]))
    stream.rows(np.arange(4))
    with pytest.raises(ValueError, match=r"example 4 is .*expected the shapes and types of"):
        stream.rows(np.array([0, 4]))


def test_a_stream_has_random_access_and_records_of_numbers():
    with pytest.raises(TypeError, match="got a generator; expected a source with a length"):
        Stream(cast("Any", (i for i in range(3))))
    with pytest.raises(TypeError, match="example 0 is of type <U3; expected numbers"):
        _ = Stream([{"image": np.zeros(2), "name": "cat"}]).row
    with pytest.raises(RuntimeError, match=r"example 10 could not be read \(IndexError"):
        Stream(Counted(records())).rows(np.array([10]))

# SPDX-License-Identifier: Apache-2.0
"""The door for data: what NumPy and JAX read alike trains, and the rest is answered by name.

The classes below stand for classes of torch, pandas, grain and Arrow, which tests do not install.
"""

from collections import UserDict
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from mutation import kills

import dpjax
from dpjax import _foreign, clipping, federated, metrics, sampling
from dpjax.data import Stream
from dpjax.data.origins import not_single

X = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
Y = np.arange(20) % 2
RULE = clipping.flat(1.0)
MECHANISM = dpjax.Mechanism(
    sampling=sampling.full(20), clipping=RULE, noise_multiplier=1.0, steps=3
)


def loss(w, example):
    x, y = example
    return (x @ w - y) ** 2


def of(module):
    """Makes a class look like one of another library."""

    def moved(kind):
        kind.__module__ = module
        return kind

    return moved


@of("torch")
class Tensor:
    def __init__(self, values, why=None):
        self.values, self.why = np.asarray(values), why
        self.ndim, self.dtype = self.values.ndim, "torch.float32"

    def __array__(self, dtype=None, copy=None):
        if self.why is not None:
            raise RuntimeError(self.why)
        return self.values

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return Tensor(self.values[index])


@of("pandas.core.frame")
class DataFrame(Tensor):
    pass


@of("__main__")
class Pairs:
    """As a torch data set: a length, and a pair of tensors at an index."""

    parents = ()

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return Tensor(X[index]), Tensor(Y[index])


@of("torch.utils.data.dataloader")
class DataLoader:
    dataset = Pairs()

    def __iter__(self):
        return iter([(X, Y)])


def source(kind, size=20, **attributes):
    """A data set of this kind, as grain.MapMapDataset, that is made of its attributes."""
    module, name = kind.split(".")
    methods = {"__module__": f"{module}.inside", "__len__": lambda self: size}
    return type(name, (Pairs,), {**methods, **attributes})()


def stepped(data, params=None, loss=loss):
    algorithm = dpjax.dpsgd(loss, optax.sgd(0.1), MECHANISM, data)
    params = jnp.zeros(3) if params is None else params
    return algorithm.step(algorithm.init(jax.random.key(0), params))[0].params


SAME = {
    "tensors": lambda: (Tensor(X), Tensor(Y)),
    "frames": lambda: (DataFrame(X.astype(np.float64)), DataFrame(Y)),
    "a torch data set": lambda: Stream(Pairs()),
    "a grain data set": lambda: Stream(source("grain.MapMapDataset", parents=(Pairs(),))),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", SAME)
def test_tensors_and_frames_train_as_their_arrays_do(name):
    np.testing.assert_allclose(stepped(SAME[name]()), stepped((X, Y)), rtol=1e-5)


@pytest.mark.slow
def test_tensors_are_parameters_batches_and_the_data_of_clients():
    tensors, clipped = (Tensor(X), Tensor(Y)), dpjax.clipped_grad(loss, RULE)
    np.testing.assert_array_equal(stepped((X, Y), Tensor(np.zeros(3, np.float32))), stepped((X, Y)))
    want = clipped(jnp.zeros(3), (X, Y)).value
    np.testing.assert_array_equal(clipped(jnp.zeros(3), tensors).value, want)
    clients = federated.Clients.split(tensors, owners=Y, clients=2)
    np.testing.assert_array_equal(clients.examples[0], X[np.argsort(Y, kind="stable")])


@of("pandas.core.series")
class Series(Tensor):
    pass


class File(UserDict):
    """As a file of h5py: a mapping that JAX takes for a leaf."""


WORDS = DataFrame(np.array([["a", 1.0]] * 20, object))
REFUSED = {
    "a tensor with a gradient": (
        lambda: stepped((Tensor(X, "requires grad"), Tensor(Y))),
        r"leaf 0 is a torch.Tensor.*\(requires grad\).*tensor.detach\(\).cpu\(\).numpy\(\)",
    ),
    "a frame with words": (
        lambda: stepped({"x": WORDS}),
        r"leaf x is a pandas.DataFrame.*no number.*frame\[columns\].to_numpy",
    ),
    "categories": (
        lambda: stepped((X, Series(np.array(["a", "b"] * 10, object)))),
        r"leaf 1 is a pandas.Series.*series.cat.codes.to_numpy\(\).*np.unique\(series",
    ),
    "text among parameters": (
        lambda: stepped((X, Y), {"w": jnp.zeros(3), "name": "linear"}),
        r"init\(params\): leaf name is of type <U6.*a name among the parameters",
    ),
    "the state of a module": (
        lambda: stepped((X, Y), (jnp.zeros(3), {"counter": jnp.int32(0)})),
        "1/counter is int32.*Close the loss over the rest",
    ),
    "lists of numbers": (
        lambda: stepped(Stream([{"x": x.tolist(), "y": 0} for x in X])),
        r"an example holds the list \[.*with_format\('numpy'\).*np.asarray",
    ),
    "nested lists": (lambda: Stream([(x, [[1, 2], [3, 4]]) for x in X]).row, "the list .*3, 4"),
    "a torch data set": (
        lambda: stepped(Pairs()),
        r"dpsgd data: got a Pairs.*read by index: dpjax.data.Stream\(source\)",
    ),
    "a torch loader": (
        lambda: stepped(DataLoader()),
        r"got a torch.DataLoader.*dpjax.data.Stream\(loader.dataset\)",
    ),
    "a data set as a batch": (
        lambda: dpjax.clipped_grad(loss, RULE)(jnp.zeros(3), Pairs()),
        r"clipped_grad: batch: got a Pairs; expected arrays.*one batch of arrays",
    ),
    "an iterator as a batch": (
        lambda: dpjax.clipped_grad(loss, RULE)(jnp.zeros(3), iter([X])),
        r"clipped_grad: batch: got a list_iterator; expected arrays",
    ),
    "a stream of a loader": (
        lambda: Stream(DataLoader()),
        r"of type torch.DataLoader.*Stream\(loader.dataset\)",
    ),
    "a stream of a frame": (lambda: Stream(DataFrame(X)), "is a pandas.DataFrame.*needs no Stream"),
    "a stream of columns": (lambda: Stream((Tensor(X), Tensor(Y))), "taken for 2 examples"),
    "batches of grain": (
        lambda: Stream(source("grain.BatchMapDataset")),
        r"grain.BatchMapDataset, and its `.batch\(...\)`.*The sampler draws the batches",
    ),
    "batches of grain, mapped": (
        lambda: Stream(source("grain.MapMapDataset", parents=(source("grain.BatchMapDataset"),))),
        r"grain.MapMapDataset, and its `.batch\(...\)`",
    ),
    "epochs of grain": (lambda: Stream(source("grain.RepeatMapDataset")), "several indices"),
    "a flat map of grain": (lambda: Stream(source("grain.FlatMapMapDataset")), "several indices"),
    "a filter of grain": (lambda: Stream(source("grain.FilterMapDataset")), "leaves holes"),
    "a dictionary of arrays": (
        lambda: Stream({"x": X, "y": Y}),
        r"is a dict with the keys \['x', 'y'\].*Stream\(source\[key\]\)",
    ),
    "a file of arrays": (lambda: stepped(File(x=X)), "It is a mapping: give the arrays"),
}


@kills(
    "data/origins.py",
    "found = map(_transformed, _parts(source))",
    "found = ()",
    case="batches of grain, mapped",
)
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_array_is_answered_by_name(name):
    make, message = REFUSED[name]
    with pytest.raises(TypeError, match=message):
        make()


def test_a_stream_of_batches_is_answered_before_its_size(caplog):
    records = Stream([(X[:10], Y[:10]), (X[10:], Y[10:])])
    with pytest.raises(ValueError, match=r"2 examples.*Build the sampler"):
        stepped(records)
    for stream, warned in ((Stream(list(zip(X, Y, strict=True))), 0), (records, 1)):
        assert stream.row
        assert caplog.text.count("all 2 arrays of a record have 10 rows") == warned


def subset(rows, dataset=None):
    return source("torch.Subset", len(rows), dataset=dataset or PAIRS, indices=rows)


def joined(*parts):
    return source("torch.ConcatDataset", sum(map(len, parts)), datasets=list(parts))


def of_grain(kind, size, *parents, **attributes):
    return source(f"grain.{kind}MapDataset", size, parents=parents, **attributes)


class Chunk:
    """Rows of a buffer of Arrow's, which lies at 64."""

    address = 64

    def __init__(self, start, stop):
        self.offset, self.size = start, stop - start

    def __len__(self):
        return self.size

    def buffers(self):
        return [None, SimpleNamespace(address=self.address, size=80)]


class Other(Chunk):
    address = 128


def face(*chunks, rows=None):
    """A data set of Hugging Face: a table, and another one of the rows that were selected."""

    def table(column):
        return source("pyarrow.Table", combine_chunks=None, column=lambda self, place: column)

    chosen = None if rows is None else table(np.array(rows))
    size = sum(map(len, chunks)) if rows is None else len(rows)
    data = table(SimpleNamespace(chunks=list(chunks)))
    return source("datasets.Dataset", size, _data=data, _indices=chosen)


PAIRS, RECORDS = Pairs(), list(range(20))


def sliced(start, stop, step=1):
    size = len(range(start, stop, step))
    return of_grain("Slice", size, PAIRS, _start=start, _stop=stop, _step=step)


SEVERAL = {
    "selected": lambda: subset([3, 1, 3]),
    "selected in a selection": lambda: subset([0, 2], subset([3, 5, 3])),
    "joined": lambda: joined(PAIRS, PAIRS),
    "joined selections": lambda: joined(subset([1, 2]), subset([2, 3])),
    "selected from joined": lambda: subset([1, 21], joined(PAIRS, PAIRS)),
    "zipped": lambda: source(
        "torch.StackDataset", datasets={"x": subset([1] * 20), "y": subset([2] * 20)}
    ),
    "mapped": lambda: of_grain("Map", 40, joined(PAIRS, of_grain("Map", 20, PAIRS))),
    "a list": lambda: joined(*[of_grain("Source", 20, _source=RECORDS) for _ in range(2)]),
    "slices": lambda: joined(sliced(0, 11), sliced(19, 9, -1)),
    "a table": lambda: face(Chunk(0, 20), Chunk(0, 20)),
    "overlapping tables": lambda: face(Chunk(0, 11), Other(0, 20), Chunk(10, 20)),
    "rows of a table": lambda: face(Chunk(0, 20), rows=[4, 4]),
    "rows of joined tables": lambda: face(Chunk(0, 20), Chunk(5, 20), rows=[5, 6, 20]),
}
ONCE = {
    "selected": lambda: subset([3, 1, 0]),
    "selected in a selection": lambda: subset([0, 1], subset([7, 3, 3])),
    "folds": lambda: joined(subset([1, 2]), subset([0, 3]), Pairs()),
    "selected from joined": lambda: subset([1, 22], joined(PAIRS, PAIRS)),
    "zipped": lambda: source("torch.StackDataset", datasets=(PAIRS, PAIRS)),
    "zipped with what classes share": lambda: source(
        "torch.StackDataset", datasets={"x": PAIRS, "y": subset([1] * 20)}
    ),
    "slices": lambda: joined(sliced(0, 20, 2), sliced(1, 20, 2)),
    "tables": lambda: face(Chunk(0, 10), Other(0, 20), Chunk(10, 20)),
    "rows of tables": lambda: face(Chunk(0, 10), Chunk(10, 20), rows=[3, 13, 10]),
    # Attributes of a class of the user's own may mean something else.
    "a class of its own": lambda: source("mine.Labelled", 2, dataset=PAIRS, indices=[1, 1]),
    "an empty part": lambda: joined(subset([1, 2]), face()),
    "an empty slice": lambda: face(Chunk(0, 10), Chunk(5, 5), Chunk(10, 20)),
}


@kills("data/origins.py", "if _repeat(_rows(source, {})) else", "if False else", case="joined")
@kills(
    "data/origins.py",
    "left.stop > right.start",
    "left.stop > right.stop",
    case="joined",
    slow=True,
)
@kills(
    "data/origins.py",
    "return [_joined(chain(*parts))[chosen]]",
    "return [_joined(chain(*parts))]",
    case="rows of a table",
    slow=True,
)
@kills(
    "data/origins.py",
    'key = ("buffer", buffers[0]) if buffers else id(chunk)',
    "key = id(chunk)",
    case="overlapping tables",
    slow=True,
)
@kills(
    "data/origins.py",
    "seen.setdefault(key, (",
    "seen.setdefault(object(), (",
    case="a list",
    slow=True,
)
@pytest.mark.parametrize("name", SEVERAL)
def test_a_source_with_several_indices_of_one_record_is_refused(name):
    """One person would move the sum by several bounds."""
    with pytest.raises(TypeError, match=r"one record several indices.*weigh .*losses.augmented"):
        Stream(SEVERAL[name]())


@kills("data/origins.py", "min(parts, key=_repeat)", "parts[-1]", slow=True)
@pytest.mark.parametrize("name", ONCE)
def test_a_source_with_one_index_of_each_record_passes(name):
    assert not_single(ONCE[name]()) is None


# All doors through which rows enter; each returns what it made of them.
DOORS = {
    "dpsgd": lambda rows: stepped(rows, jnp.zeros(rows.shape[1:]), lambda w, x: jnp.sum(w * x)),
    "a stream": lambda rows: Stream(list(rows)).rows(np.arange(20)),
    "a batch": lambda rows: (
        dpjax.clipped_grad(lambda w, x: jnp.sum(w * x), RULE)(jnp.zeros(rows.shape[1:]), rows).value
    ),
    "clients": lambda rows: federated.Clients.of([rows[:5], rows[5:]]).examples,
    "owners": lambda rows: federated.Clients.split(rows, np.zeros(20, int), 1).examples,
    "predictions": lambda rows: metrics.accuracy(rows, np.zeros(20, ">i4")),
}
NUMBERS = DOORS


@pytest.mark.sample(2)
@kills("_foreign.py", 'array.astype(array.dtype.newbyteorder("="))', "array.byteswap()", slow=True)
@pytest.mark.parametrize("door", DOORS)
def test_either_byte_order_gives_the_same_numbers(door):
    other = X.astype(X.dtype.newbyteorder())
    np.testing.assert_array_equal(DOORS[door](other), DOORS[door](X))


@pytest.mark.sample(2)
@kills("_foreign.py", "kind != array.dtype and not fits(array, kind)", "False", case="owners")
@kills(
    "data/streaming.py", "if not fits(read, rows.dtype):", "if False:", case="a stream", slow=True
)
@pytest.mark.parametrize("door", NUMBERS)
def test_whole_numbers_of_more_bits_are_refused_by_every_door(door):
    """JAX would take the last 32 bits, and so train a label of 2^32 as class 0."""
    rows = np.ones((20, 3), np.int64)
    np.testing.assert_array_equal(NUMBERS[door](rows), NUMBERS[door](rows.astype(np.int32)))
    for value, kind in ((2**31, "int32"), (-(2**31) - 1, "int32"), (2**63, "uint32")):
        rows = np.ones((20, 3), np.uint64 if kind == "uint32" else np.int64)
        rows[7, 1] = value
        with pytest.raises(ValueError, match=f"whole numbers from .* that fit into {kind},"):
            NUMBERS[door](rows)


def test_a_stream_names_the_example_whose_whole_numbers_have_more_bits():
    rows = np.arange(20)
    rows[7] = 2**40
    with pytest.raises(ValueError, match=r"Stream: example 7 has whole numbers from 1099511627776"):
        Stream(rows).rows(np.array([3, 7, 7, 19]))


def test_whole_numbers_keep_their_bits_where_jax_has_as_many():
    rows = np.full((20, 3), 2**32 + 1)
    with jax.enable_x64(True):
        assert _foreign.native(rows, "x") is rows
        np.testing.assert_array_equal(Stream(rows).rows(np.arange(20)), rows)


@pytest.mark.sample(2)
@pytest.mark.parametrize("door", DOORS)
def test_a_mask_is_refused_by_every_door(door):
    """NumPy would leave it out, and hidden values would train like all others."""
    with pytest.raises(TypeError, match="is a masked array, and its mask would be ignored"):
        DOORS[door](np.ma.masked_array(X, mask=X > 1))
    with pytest.raises(TypeError, match=r"split: the argument owners is a masked array"):
        federated.Clients.split(X, np.ma.masked_array(Y, mask=Y), 2)


@pytest.mark.sample(2)
@pytest.mark.parametrize("door", DOORS)
def test_a_structured_array_is_refused_by_every_door(door):
    """`np.genfromtxt(names=True)` gives one."""
    table = np.zeros((20, 3), [("height", "f4"), ("weight", "f4")])
    with pytest.raises(TypeError, match=r"fields height, weight; .*structured_to_unstructured"):
        DOORS[door](table)


@pytest.mark.parametrize("kind", [jnp.bfloat16, jnp.int4])
def test_narrow_numbers_pass(kind):
    """NumPy calls their kind V, as that of a structured array."""
    rows = np.ones((20, 3), kind)
    assert _foreign.native(rows, "x") is rows
    assert Stream(list(rows)).rows(np.arange(20)).dtype == rows.dtype


def test_what_jax_holds_already_is_not_copied_to_the_host():
    rows, whole = jnp.asarray(X), np.ones((20, 3), np.int64)
    assert _foreign.arrays({"x": rows}, "data")["x"] is rows
    assert _foreign.arrays([whole], "data")[0] is whole


class Index(list):
    """As an index of pandas."""

    equals = list.__eq__


def test_frames_of_other_rows_are_refused():
    """NumPy would pair them by position, and so train each input with the target of another."""
    frame, series = DataFrame(X), Series(Y)
    frame.index, series.index = Index(range(20)), Index(range(20))
    np.testing.assert_array_equal(_foreign.arrays((frame, series), "data")[1], Y)
    series.index = Index(range(19, -1, -1))
    with pytest.raises(ValueError, match=r"data: the index of one frame.*series.loc\[frame.index"):
        _foreign.arrays((frame, series), "data")


def test_clients_are_frames_with_an_index_of_their_own():
    frames = DataFrame(X[:5]), DataFrame(X[5:])
    for frame, index in zip(frames, (range(5), range(5, 20)), strict=True):
        frame.index = Index(index)
    assert federated.Clients.of(frames).counts.tolist() == [5, 15]


def test_a_trained_leaf_may_be_called_batch_stats():
    params = {"batch_stats": jnp.zeros(3)}
    after = stepped((X, Y), params, lambda p, e: loss(p["batch_stats"], e))
    np.testing.assert_array_equal(after["batch_stats"], stepped((X, Y)))

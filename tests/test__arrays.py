# SPDX-License-Identifier: Apache-2.0
"""What users pass as data: tensors and frames train as arrays do, and the rest is answered.

The classes below stand for classes of torch, pandas and h5py, which tests do not install.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from mutation import kills

import dpjax
from dpjax import clipping, federated, sampling
from dpjax._arrays import arrays, native
from dpjax.data import Stream

X = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
Y = np.arange(20) % 2
RULE = clipping.flat(1.0)
MECHANISM = dpjax.Mechanism(
    sampling=sampling.full(20), clipping=RULE, noise_multiplier=1.0, steps=3
)


def loss(w, example):
    x, y = example
    return (x @ w - y) ** 2


class Tensor:
    def __init__(self, values):
        self.values = np.asarray(values)

    def __array__(self, dtype=None, copy=None):
        return self.values

    def __len__(self):
        return len(self.values)


class Pairs:
    """As a torch data set: a length, and a pair of tensors at an index."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return Tensor(X[index]), Tensor(Y[index])


class DataLoader:
    dataset = Pairs()

    def __iter__(self):
        return iter([(X, Y)])


def stepped(data, params=None, loss=loss):
    algorithm = dpjax.dpsgd(loss, optax.sgd(0.1), MECHANISM, data)
    params = jnp.zeros(3) if params is None else params
    return algorithm.step(algorithm.init(params, jax.random.key(0)))[0].params


@pytest.mark.parametrize("data", [(Tensor(X), Tensor(Y)), Stream(Pairs())], ids=["tensors", "set"])
def test_tensors_train_as_their_arrays_do(data):
    np.testing.assert_allclose(stepped(data), stepped((X, Y)), rtol=1e-5)


def test_tensors_are_batches_and_the_data_of_clients():
    clipped = dpjax.clipped_grad(loss, RULE)
    want = clipped(jnp.zeros(3), (X, Y)).value
    np.testing.assert_array_equal(clipped(jnp.zeros(3), (Tensor(X), Tensor(Y))).value, want)
    clients = federated.Clients.split((Tensor(X), Tensor(Y)), owners=Y, clients=2)
    np.testing.assert_array_equal(clients.examples[0], X[np.argsort(Y, kind="stable")])


REFUSED = {
    "words": (lambda: stepped((X, np.array(["a", "b"] * 10))), "leaf 1 is of type <U1"),
    "a frame with words": (
        lambda: arrays({"x": Tensor(np.array([["a", 1.0]], object))}, "data"),
        "data: leaf x is of type object; expected numbers",
    ),
    "text among parameters": (
        lambda: stepped((X, Y), {"w": jnp.zeros(3), "name": "linear"}),
        r"init\(params\): leaf name is of type <U6",
    ),
    "a data set": (lambda: stepped(Pairs()), r"dpsgd data: got a Pairs.*data.Stream\(source\)"),
    "a loader": (lambda: stepped(DataLoader()), "got a DataLoader.*give its data set"),
    "an iterator": (lambda: arrays(iter([X]), "batch"), "batch: got a list_iterator"),
    "a stream of a loader": (lambda: Stream(DataLoader()), r"got a DataLoader.*loader.dataset"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_array_is_answered_by_name(name):
    make, message = REFUSED[name]
    with pytest.raises(TypeError, match=message):
        make()


# The doors through which rows enter; each returns what it made of them.
DOORS = {
    "dpsgd": lambda rows: stepped(rows, jnp.zeros(3), lambda w, x: jnp.sum(w * x)),
    "a stream": lambda rows: Stream(list(rows)).rows(np.arange(20)),
    "clients": lambda rows: federated.Clients.of([rows[:5], rows[5:]]).examples,
    "an array": lambda rows: native(rows, "x"),
}


@kills("_arrays.py", "dtype != array.dtype and", "False and", case="clients")
@pytest.mark.parametrize("door", DOORS)
def test_whole_numbers_of_more_bits_are_refused_by_every_door(door):
    """JAX would take the last 32 bits, and so train a label of 2^32 as class 0."""
    for value, kind in ((2**31, "int32"), (-(2**31) - 1, "int32"), (2**63, "uint32")):
        rows = np.ones((20, 3), np.uint64 if kind == "uint32" else np.int64)
        rows[7, 1] = value
        with pytest.raises(ValueError, match=f"whole numbers from .* that fit into {kind},"):
            DOORS[door](rows)


def test_whole_numbers_keep_their_bits_where_jax_has_as_many():
    rows = np.full((20, 3), 2**32 + 1)
    with jax.enable_x64(True):
        assert native(rows, "x") is rows
        np.testing.assert_array_equal(Stream(rows).rows(np.arange(20)), rows)


def test_what_needs_no_change_is_not_copied():
    rows, whole = jnp.asarray(X), np.ones((20, 3), np.int64)
    assert arrays({"x": rows}, "data")["x"] is rows
    assert arrays([whole], "data")[0] is whole

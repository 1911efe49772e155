# SPDX-License-Identifier: Apache-2.0
"""Data of other libraries: what NumPy can read trains, and the rest is answered by name.

The classes below stand for classes of torch, pandas and grain, which tests do not install.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from mutation import kills

import dpjax
from dpjax import clipping, federated, sampling
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


@of("grain._src.python.dataset.transformations.batch")
class BatchMapDataset(Pairs):
    pass


@of("grain._src.python.dataset.transformations.repeat")
class RepeatMapDataset(Pairs):
    pass


@of("grain._src.python.dataset.transformations.map")
class MapMapDataset(Pairs):
    def __init__(self, *parents):
        self.parents = parents


def stepped(data, params=None, loss=loss):
    algorithm = dpjax.dpsgd(loss, optax.sgd(0.1), MECHANISM, data)
    params = jnp.zeros(3) if params is None else params
    return algorithm.step(algorithm.init(jax.random.key(0), params))[0].params


SAME = {
    "tensors": lambda: (Tensor(X), Tensor(Y)),
    "frames": lambda: (DataFrame(X.astype(np.float64)), DataFrame(Y)),
    "a torch data set": lambda: Stream(Pairs()),
    "a grain data set": lambda: Stream(MapMapDataset(Pairs())),
}


@pytest.mark.sample(2)
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
        lambda: Stream(BatchMapDataset()),
        r"grain.BatchMapDataset, and `.batch\(...\)`.*the sampler draws the batches",
    ),
    "batches of grain, mapped": (
        lambda: Stream(MapMapDataset(BatchMapDataset())),
        r"grain.MapMapDataset, and `.batch\(...\)`",
    ),
    "epochs of grain": (lambda: Stream(RepeatMapDataset()), "could count twice"),
}


@kills(
    "_foreign.py",
    'map(joined_records, getattr(source, "parents", ()))',
    "()",
    case="batches of grain, mapped",
)
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_array_is_answered_by_name(name):
    make, message = REFUSED[name]
    with pytest.raises(TypeError, match=message):
        make()


def test_a_stream_of_another_size_is_asked_for_batches():
    records = [(X[:10], Y[:10]), (X[10:], Y[10:])]
    with pytest.raises(ValueError, match=r"2 examples.*If a record is a batch"):
        stepped(Stream(records))


LOSSES = {
    "three arguments": (lambda w, x, y: w @ x - y, (X, Y), r"loss\(params, x, y\)"),
    "a batch": (lambda w, e: jnp.sum(e[0] @ w - e[1][:, None]), (X, Y), r"y\[:, None\]"),
    "a dictionary": (lambda w, e: e[0] @ w, {"x": X}, r"by name, example\['x'\]"),
}


@pytest.mark.parametrize("path", ["dpsgd", "clipped_grad"])
@pytest.mark.parametrize("name", LOSSES)
def test_an_error_inside_a_loss_says_what_the_loss_was_given(name, path):
    loss, data, usual = LOSSES[name]
    calls = {
        "dpsgd": lambda: stepped(data, loss=loss),
        "clipped_grad": lambda: dpjax.clipped_grad(loss, RULE)(jnp.zeros(3), data),
    }
    with pytest.raises((IndexError, KeyError, TypeError)) as raised:
        calls[path]()
    (note,) = [text for text in raised.value.__notes__ if text.startswith("dpjax called")]
    assert "float32[3]" in note
    assert "one example, without a batch axis" in note
    assert re.search(usual, note)


def test_a_trained_leaf_may_be_called_batch_stats():
    params = {"batch_stats": jnp.zeros(3)}
    after = stepped((X, Y), params, lambda p, e: loss(p["batch_stats"], e))
    np.testing.assert_array_equal(after["batch_stats"], stepped((X, Y)))

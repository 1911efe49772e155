# SPDX-License-Identifier: Apache-2.0
"""Whose examples they are: all clients' examples one after the other, and where each begins.

Clients are of unequal size, and programs are not.  Padding every client to the largest would
cost memory by the worst of them, so the rows are stored without any, and a client's batch is
gathered by index; only batches are padded, with rows of the client's own and a mask.

This file must never know a model, nor what is private.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Int

from dpjax import trees
from dpjax.types import PyTree

_MOST = 2**31 - 1  # rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Clients:
    """The examples of all clients; build one with `of` or `split`.

    Args:
      examples: A tree of arrays ``[examples, ...]``, client after client.
      starts: The first row of each client.
      counts: How many rows each has; 0 is allowed.
      capacity: The most that any has; at least 1.
    """

    examples: PyTree
    starts: Int[Array, " clients"]
    counts: Int[Array, " clients"]
    capacity: int = field(metadata={"static": True})

    @classmethod
    def of(cls, examples: Sequence[PyTree]) -> Clients:
        """From one tree of arrays a client, each with as many rows as that client has.

        Example:
          >>> clients = Clients.of([jnp.ones((2, 3)), jnp.ones((0, 3)), jnp.ones((5, 3))])
          >>> clients.counts.tolist(), clients.capacity
          ([2, 0, 5], 5)
        """
        examples = list(examples)
        if not examples:
            raise ValueError("federated.Clients.of([]): expected the examples of each client.")
        counts = [trees.leading_size(tree, name="a client's examples") for tree in examples]
        for number, tree in enumerate(examples):
            if _row(tree) != _row(examples[0]):
                raise ValueError(
                    f"federated.Clients.of: an example of client {number} is {_row(tree)}, one of "
                    f"client 0 is {_row(examples[0])}; expected the same arrays of all, for one "
                    "model trains on them. Usually a client without examples was given as [], or "
                    "one with a single example lacks its axis: write shape (0, ...) or (1, ...)."
                )
        joined = jax.tree.map(lambda *rows: _home(rows[0]).concatenate(rows), *examples)
        return cls._joined(joined, np.asarray(counts))

    @classmethod
    def split(cls, data: PyTree, owners: ArrayLike, clients: int) -> Clients:
        """From a data set and the client to whom each of its rows belongs.

        Args:
          data: A tree of arrays with one example a row.
          owners: A number from 0 to ``clients - 1`` for each row.
          clients: How many there are, those without examples counted.

        Example:
          >>> clients = Clients.split(jnp.arange(4.0), owners=[2, 0, 2, 2], clients=3)
          >>> clients.examples.tolist(), clients.starts.tolist()
          ([1.0, 0.0, 2.0, 3.0], [0, 1, 1])
        """
        rows, owners = trees.leading_size(data, name="federated data"), np.asarray(owners)
        whole = owners.shape == (rows,) and np.issubdtype(owners.dtype, np.integer)
        if not whole or not np.all((owners >= 0) & (owners < clients)):
            raise ValueError(
                f"federated.Clients.split(clients={clients}): expected one whole number from 0 to "
                f"{clients - 1} for each of {rows} rows; got {owners.dtype} of shape "
                f"{owners.shape}. It says to whom the row belongs."
            )
        order = np.argsort(owners, kind="stable")
        sorted_rows = jax.tree.map(lambda x: _home(x).asarray(x)[order], data)
        return cls._joined(sorted_rows, np.bincount(owners, minlength=clients))

    @classmethod
    def _joined(cls, examples: PyTree, counts: np.ndarray) -> Clients:
        if not counts.sum():
            raise ValueError(
                f"federated.Clients: none of {len(counts)} clients has an example; there is "
                "nothing to train on. Usually the data were filtered away before this."
            )
        if counts.sum() > _MOST:
            raise ValueError(
                f"federated.Clients: {counts.sum():,} examples; expected at most {_MOST:,}, for "
                "rows are found by indices of 32 bits, and beyond them a client would train on "
                "another client's rows. Leave out what clients have beyond a number that you fix."
            )
        starts = np.cumsum(counts) - counts
        on_device = jax.tree.map(jnp.asarray, (examples, starts, counts))
        return cls(*on_device, capacity=int(counts.max()))

    def __len__(self) -> int:
        """How many clients there are; public, as the size of a data set is."""
        return self.counts.shape[0]


def _home(rows: Any) -> Any:
    """Where rows are joined: NumPy, off the accelerator, but for typed keys, which are JAX's."""
    keys = isinstance(rows, jax.Array) and jnp.issubdtype(rows.dtype, jax.dtypes.prng_key)
    return jnp if keys else np


def _row(tree: PyTree) -> PyTree:
    """The shape of one example, leaf by leaf."""
    return jax.tree.map(lambda x: "x".join(map(str, np.shape(x)[1:])) or "a number", tree)

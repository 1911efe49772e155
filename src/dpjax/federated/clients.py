# SPDX-License-Identifier: Apache-2.0
"""The examples of all clients, one client after the other, and where each client begins.

Only batches are padded, with rows of the same client and a mask. Clients that are all padded to the
largest one need its memory each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Int

from dpjax import checks, trees
from dpjax._arrays import arrays
from dpjax.types import PyTree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Clients:
    """The examples of all clients. Build one with `of` or `split`.

    Args:
      examples: A tree of arrays ``[examples, ...]``, client after client.
      starts: The first row of each client.
      counts: The number of rows of each; 0 is allowed.
      capacity: The largest of these numbers; at least 1.
    """

    examples: PyTree
    starts: Int[Array, " clients"]
    counts: Int[Array, " clients"]
    capacity: int = field(metadata={"static": True})

    @classmethod
    def of(cls, examples: Sequence[PyTree]) -> Clients:
        """From one tree of arrays per client, with the rows of that client.

        Example:
          >>> clients = Clients.of([jnp.ones((2, 3)), jnp.ones((0, 3)), jnp.ones((5, 3))])
          >>> clients.counts.tolist(), clients.capacity
          ([2, 0, 5], 5)
        """
        of_clients = []
        for number, tree in enumerate(examples):
            # Each client by itself: data frames of two clients may have different indices.
            of_clients.append(arrays(tree, f"federated.Clients.of: client {number}"))
        counts = [trees.leading_size(tree, name="a client's examples") for tree in of_clients]
        joined = jax.tree.map(lambda *rows: np.concatenate(rows), *of_clients)
        return cls._joined(joined, np.asarray(counts))

    @classmethod
    def split(cls, data: PyTree, owners: ArrayLike, clients: int) -> Clients:
        """Groups the rows of a data set by the client that owns each.

        ``owners`` has a number from 0 to ``clients - 1`` for each row of ``data``; ``clients``
        includes clients without examples.

        Example:
          >>> clients = Clients.split(jnp.arange(4.0), owners=[2, 0, 2, 2], clients=3)
          >>> clients.examples.tolist(), clients.starts.tolist()
          ([1.0, 0.0, 2.0, 3.0], [0, 1, 1])
        """
        clients = checks.whole("federated.Clients.split", "clients", clients)
        data = arrays(data, "federated.Clients.split")
        rows = trees.leading_size(data, name="federated data")
        owners = np.asarray(owners)
        one_integer_a_row = owners.shape == (rows,) and np.issubdtype(owners.dtype, np.integer)
        if not one_integer_a_row or not np.all((owners >= 0) & (owners < clients)):
            raise ValueError(
                f"federated.Clients.split(clients={clients}): expected owners from 0 to "
                f"{clients - 1}, for each of {rows} rows."
            )
        # A stable sort keeps the rows of a client in the order of the data set.
        order = np.argsort(owners, kind="stable")
        sorted_rows = jax.tree.map(lambda x: np.asarray(x)[order], data)
        return cls._joined(sorted_rows, np.bincount(owners, minlength=clients))

    @classmethod
    def _joined(cls, examples: PyTree, counts: np.ndarray) -> Clients:
        """From the rows of all clients, client after client, and how many rows each has."""
        return cls(
            examples=jax.tree.map(jnp.asarray, examples),
            starts=jnp.asarray(np.cumsum(counts) - counts),
            counts=jnp.asarray(counts),
            capacity=int(counts.max()),
        )

    def __len__(self) -> int:
        """The number of clients; public, like the size of a data set."""
        return self.counts.shape[0]

# SPDX-License-Identifier: Apache-2.0
"""A client as a loss, whose gradient is minus its update, and the measurements of a round."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dpjax.federated._local import Local, trained
from dpjax.federated.clients import Clients
from dpjax.training.info import Seen, mean_info
from dpjax.types import Draw, Key, LossFn, PyTree, Sampler


class Row(NamedTuple):
    """One client as a row of the data, and as an example once the round has appended its key."""

    client: Int[Array, ""]
    share: Float[Array, ""]
    """How much the client counts, from 0 to 1."""
    size: Int[Array, ""]
    """How many examples it has."""


def client_loss(local: Local) -> LossFn:
    """``loss(params, (client, share, size, key), clients)``; its gradient is minus the update."""

    def loss(
        params: PyTree, example: tuple[Array, Array, Array, Key], clients: Clients
    ) -> Float[Array, ""]:
        client, _, _, key = example
        of_client = jax.random.fold_in(key, client)
        # Local training is not differentiated: its update is a constant.
        start = jax.lax.stop_gradient(params)
        local_run = trained(local, start, clients, client, of_client)
        value, update = jax.lax.stop_gradient(local_run)
        return value + with_update(params, update)

    return loss


def with_update(params: PyTree, update: PyTree) -> Float[Array, ""]:
    """The number 0, with the gradient ``-update``."""
    # The product of -update and (p - start) is 0 at p = start, and has the gradient -update.
    start = jax.lax.stop_gradient(params)
    # These are elementwise products, because accelerators round the inputs of a dot product.
    products = jax.tree.map(lambda p, s, u: jnp.sum((p - s) * -u), params, start, update)
    total: Any = sum(jax.tree.leaves(products))
    return total


def by_size(sampler: Sampler, clients: Clients) -> Sampler:
    """The sampler, with drawn clients in the order of their sizes.

    All clients of a microbatch wait for its largest one, so clients of similar sizes go together.
    """
    unsorted = sampler.draw

    # Samplers with bins or coins take one more key; see `Sampler.drawn`.
    def draw(key: Key, step: Int[Array, ""], *more: Key) -> Draw:
        indices, mask = unsorted(key, step, *more)
        # Padding sorts behind every drawn client, so the mask still covers it.
        sizes = jnp.where(mask, clients.counts[indices], clients.capacity + 1)
        order = jnp.argsort(sizes)
        return Draw(indices[order], mask)

    return replace(sampler, draw=draw)


class Info(NamedTuple):
    """Measurements of a round, **before** any noise: look at it, do not publish it."""

    loss: Float[Array, ""]
    """Mean loss of clients during their training, over the clients that counted and have a
    finite loss; NaN if none."""
    examples: Int[Array, ""]
    """How many examples the drawn clients have together."""
    clients: Int[Array, ""]
    """How many clients were drawn. The fields below leave out clients without examples."""
    dropped: Int[Array, ""]
    """How many clients contributed zero because their update was not finite."""
    norm: Float[Array, " groups"]
    """Mean norm of an update per group before clipping, over the clients that counted."""
    clipped: Float[Array, " groups"]
    """Fraction of the updates with a norm above the bound, per group."""


def round_info(seen: Seen) -> Info:
    """The means of rounds, from their sums; `mean_info` for clients."""
    means = mean_info(seen)
    seen = jax.tree.map(np.asarray, seen)
    return Info(
        loss=means.loss,
        examples=seen.examples,
        clients=seen.drawn,
        dropped=means.dropped,
        norm=means.norm,
        clipped=means.clipped,
    )

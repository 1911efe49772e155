# SPDX-License-Identifier: Apache-2.0
"""A client as a loss, whose gradient is minus its update, and what an observer sees of a round."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dpjax.federated.clients import Clients
from dpjax.federated.local import Local, trained
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
    """``loss(params, (client, share, size, key), clients)``, with minus the update as gradient."""

    def loss(
        params: PyTree, example: tuple[Array, Array, Array, Key], clients: Clients
    ) -> Float[Array, ""]:
        client, _, _, key = example
        # Local training is not differentiated: the update is a constant, and its product with (p -
        # start) has gradient -update at p = start and value 0.
        start = jax.lax.stop_gradient(params)
        value, update = jax.lax.stop_gradient(
            trained(local, start, clients, client, jax.random.fold_in(key, client))
        )
        # Elementwise products and a sum: accelerators round the inputs of a dot product.
        back = jax.tree.map(lambda p, s, u: jnp.sum((p - s) * -u), params, start, update)
        return value + sum(jax.tree.leaves(back))

    return loss


def by_size(sampler: Sampler, clients: Clients) -> Sampler:
    """The sampler, with drawn clients in order of size: a microbatch waits for its largest."""
    inner = sampler.draw

    def draw(key: Key, step: Int[Array, ""], *coins: Key) -> Draw:
        indices, mask = inner(key, step, *coins)
        # Padding sorts behind every drawn client, so the mask still covers it.
        sizes = jnp.where(mask, clients.counts[indices], clients.capacity + 1)
        return Draw(indices[jnp.argsort(sizes)], mask)

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
    """The means of rounds, from what they saw; `mean_info` of a client."""
    means, seen = mean_info(seen), jax.tree.map(np.asarray, seen)
    return Info(means.loss, seen.examples, seen.drawn, means.dropped, means.norm, means.clipped)

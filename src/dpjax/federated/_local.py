# SPDX-License-Identifier: Apache-2.0
"""Local training: one client trains from the server's parameters and returns its update.

Under `jax.vmap` all clients wait for the largest one. Nothing here clips for privacy or adds noise:
the step of the server does both, for whole updates.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from dpjax import clipping, trees
from dpjax.clipping.rules import ON_BOUND
from dpjax.federated.clients import Clients
from dpjax.gradients._xla_cpu.primitives import fast
from dpjax.types import Clipping, Key, LossFn, PyTree


class Local(NamedTuple):
    """The training of each client: ``epochs`` over its examples, in batches of ``batch_size``."""

    loss: LossFn
    optimizer: optax.GradientTransformation
    batch_size: int
    epochs: int
    within: Clipping | None
    """The rule with the bounds onto which each local step projects the update, if any."""


class _State(NamedTuple):
    """The carry of the loop over batches."""

    losses: Float[Array, ""]
    """The sum of the mean losses of all batches so far."""
    update: PyTree
    """The client's parameters minus the server's."""
    optimizer: Any


def trained(
    local: Local, params: PyTree, clients: Clients, index: Int[Array, ""], key: Key
) -> tuple[Float[Array, ""], PyTree]:
    """A client's mean loss, and its update: last minus first parameters, 0 without examples.

    ``index`` is the number of the client, and ``key`` orders its rows.
    """
    start = clients.starts[index]  # the first of its rows
    count = clients.counts[index]  # how many rows it has
    size = local.batch_size
    batches = -(-count // size)  # in an epoch
    # Each round has a fresh optimizer. A state that is kept carries a client's data into the next
    # draw of the client, outside the accounting.
    optimizer_state = local.optimizer.init(trees.widened(params))
    # Update and optimizer are in float32: a bfloat16 parameter rounds small steps to nothing.
    carry = _State(
        losses=jnp.zeros(()),
        update=trees.zeros_wide(params),
        optimizer=optimizer_state,
    )

    def epoch(number: Int[Array, ""], carry: _State) -> _State:
        """One pass over all batches of the client's rows, in a random order of this epoch."""
        # Sorting random numbers puts the client's rows in a random order. Behind them comes padding
        # up to the capacity, the rows of the largest client; its number 2 is above all others. The
        # number of rows is traced, and jax.random.permutation needs a constant.
        numbers = jax.random.uniform(jax.random.fold_in(key, number), (clients.capacity,))
        is_row = jnp.arange(clients.capacity) < count
        order = jnp.argsort(jnp.where(is_row, numbers, 2.0))

        def batch(batch_number: Int[Array, ""], carry: _State) -> _State:
            first = batch_number * size
            places = first + jnp.arange(size)  # in ``order``, [size]
            real = places < count  # the others are padding of the last batch
            # Padding repeats a row of the same client, so it is finite if the client's rows are.
            rows = start + order[jnp.where(real, places, first)]
            examples = jax.tree.map(lambda x: x[rows], clients.examples)
            return _after_batch(local, params, examples, real, carry)

        return jax.lax.fori_loop(0, batches, batch, carry)

    carry = jax.lax.fori_loop(0, local.epochs, epoch, carry)
    all_batches = jnp.maximum(batches * local.epochs, 1)  # a client without rows has 0
    return carry.losses / all_batches, carry.update


def _after_batch(
    local: Local, params: PyTree, examples: PyTree, real: Bool[Array, " size"], carry: _State
) -> _State:
    """The carry after one step of the client's optimizer, on the mean loss of one batch.

    ``params`` are the server's, and ``real`` is False for padding.
    """
    client_params = jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, carry.update)

    def mean_loss(client_params: PyTree) -> Float[Array, ""]:
        losses = jax.vmap(local.loss, (None, 0))(client_params, examples)
        losses = losses.astype(jnp.float32)
        # Each batch has a real row, so this divides by 1 or more. Under `jax.vmap`, the steps after
        # a client's last batch, which have none, are discarded.
        return jnp.sum(jnp.where(real, losses, 0)) / jnp.sum(real).astype(losses.dtype)

    # XLA on CPU compiles gradients of convolutions inside a loop to naive loops; `fast` avoids it.
    loss, gradient = jax.value_and_grad(fast(mean_loss))(client_params)
    change, optimizer_state = local.optimizer.update(
        trees.widened(gradient), carry.optimizer, trees.widened(client_params)
    )
    update = jax.tree.map(lambda u, c: u + c.astype(u.dtype), carry.update, change)
    if local.within is not None:
        # The update is clipped like the gradient of one example, so groups and norms mean the same
        # as in the server's step. `clip` returns the sum over the rows, which is again one update.
        one_row = jax.tree.map(lambda x: x[None], update)
        update, _, _ = clipping.clip(_projection(local.within, params), one_row)
    return _State(carry.losses + loss, update, optimizer_state)


def _projection(rule: Clipping, params: PyTree) -> Clipping:
    """The projection of an update of these parameters onto the bounds of a rule."""
    # The ball is smaller by the rounding to the parameters' dtype. Otherwise the update can exceed
    # the bound, and a rule such as `hard_threshold` may drop it.
    rounding = max(float(jnp.finfo(leaf.dtype).eps) / 2 for leaf in jax.tree.leaves(params))
    shrink = 1 - ON_BOUND - rounding
    bounds = tuple(bound * shrink for bound in rule.bounds)
    # The wish of `jnp.ones_like` keeps an update as it is; `clip` shortens one beyond its bound.
    return Clipping(rule.partition, bounds, jnp.ones_like, "projection")

# SPDX-License-Identifier: Apache-2.0
"""Local training: one client trains from the server's parameters and returns its update.

Under `jax.vmap` all clients wait for the largest one. Nothing here is private: updates are clipped.
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
    """What each client does: ``epochs`` of batches of ``batch_size``."""

    loss: LossFn
    optimizer: optax.GradientTransformation
    batch_size: int
    epochs: int
    within: Clipping | None
    """The rule onto whose bounds each step projects the update, if any."""


def trained(
    local: Local, params: PyTree, clients: Clients, index: Int[Array, ""], key: Key
) -> tuple[Float[Array, ""], PyTree]:
    """A client's mean loss, and its update: last minus first parameters, 0 without examples."""
    start, count, size = clients.starts[index], clients.counts[index], local.batch_size
    batches = -(-count // size)
    # A fresh optimizer in every round: its state would carry one client's data into the next draw
    # of the client, outside the accounting.
    optimizer = local.optimizer.init(trees.widened(params))
    # The update is carried: a small step on a large bfloat16 parameter would be rounded away.
    carry = _State(jnp.zeros(()), trees.zeros_wide(params), optimizer)

    def epoch(number: Int[Array, ""], carry: _State) -> _State:
        # The client's rows in random order, then padding. By sorting a number for each place: the
        # client's size is traced, and jax.random.permutation needs a constant.
        places = jax.random.uniform(jax.random.fold_in(key, number), (clients.capacity,))
        own = jnp.arange(clients.capacity) < count
        order = jnp.argsort(jnp.where(own, places, 2.0))

        def batch(which: Int[Array, ""], carry: _State) -> _State:
            slots = which * size + jnp.arange(size)
            real = slots < count
            # Padding repeats a row of the same client, so it is finite if the client's rows are.
            rows = start + order[jnp.where(real, slots, which * size)]
            examples = jax.tree.map(lambda x: x[rows], clients.examples)
            return _moved(local, params, examples, real, carry)

        return jax.lax.fori_loop(0, batches, batch, carry)

    carry = jax.lax.fori_loop(0, local.epochs, epoch, carry)
    return carry.losses / jnp.maximum(batches * local.epochs, 1), carry.update


class _State(NamedTuple):
    losses: Float[Array, ""]
    update: PyTree
    optimizer: Any


def _moved(
    local: Local, params: PyTree, examples: PyTree, real: Bool[Array, " size"], carry: _State
) -> _State:
    here = jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, carry.update)

    def mean_loss(params: PyTree) -> Float[Array, ""]:
        losses = jax.vmap(local.loss, (None, 0))(params, examples).astype(jnp.float32)
        return jnp.sum(jnp.where(real, losses, 0)) / jnp.sum(real).astype(losses.dtype)

    # In a loop XLA on CPU compiles the gradients of convolutions as written to naive loops.
    loss, gradient = jax.value_and_grad(fast(mean_loss))(here)
    gradient, here = trees.widened(gradient), trees.widened(here)
    change, state = local.optimizer.update(gradient, carry.optimizer, here)
    update = jax.tree.map(lambda u, c: u + c.astype(u.dtype), carry.update, change)
    if local.within is not None:
        # By the clipping of one example, so groups and norms mean the same as in the step.
        rows = jax.tree.map(lambda x: x[None], update)
        update = clipping.clip(_ball(local.within, params), rows)[0]
    return _State(carry.losses + loss, update, state)


def _ball(rule: Clipping, params: PyTree) -> Clipping:
    """The projection of an update of these parameters onto the bounds of a rule."""
    # Inside by more than rounding to the parameters' dtype: outside, a user's rule may drop it.
    rounding = max(float(jnp.finfo(leaf.dtype).eps) / 2 for leaf in jax.tree.leaves(params))
    bounds = tuple(bound * (1 - ON_BOUND - rounding) for bound in rule.bounds)
    return Clipping(rule.partition, bounds, jnp.ones_like, "projection")

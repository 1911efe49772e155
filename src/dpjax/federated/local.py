# SPDX-License-Identifier: Apache-2.0
"""What one client does: trains for itself from the server's parameters, and says how it moved.

Epochs over its own examples in an order of its own, in batches whose last one is padded.  A
client with more examples takes more steps; under `jax.vmap` the others wait.  What is carried
is the *update*, in float32 or wider, so that small steps are not lost in large parameters.

A client's optimizer begins anew each round.  Nothing here is private, and nothing has to be:
whatever comes out is clipped.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from dpjax import clipping, trees
from dpjax.federated.clients import Clients
from dpjax.types import Clipping, Key, LossFn, PyTree

# By as much a projected update stays inside its bound, so that rounding does not put it
# outside, where a rule that drops long updates would drop it.
_INSIDE = 1 - 2**-16


class Local(NamedTuple):
    """What each client is asked to do; ``steps`` or ``epochs`` of batches of ``batch_size``."""

    loss: LossFn
    optimizer: optax.GradientTransformation
    batch_size: int
    epochs: int | None
    steps: int | None
    ball: Clipping | None

    def trips(self, batches: Any) -> Any:
        """How many steps a client takes whose epoch has so many batches."""
        return batches * self.epochs if self.steps is None else self.steps


def ball(rule: Clipping) -> Clipping:
    """The projection onto the bounds of a rule, whatever the rule itself wishes."""
    bounds = tuple(bound * _INSIDE for bound in rule.bounds)
    return Clipping(rule.partition, bounds, jnp.ones_like, "projection")


def trained(
    local: Local, params: PyTree, clients: Clients, index: Int[Array, ""], key: Key
) -> tuple[Float[Array, ""], PyTree]:
    """Trains one client.

    Args:
      local: What it does.
      params: Where it begins.
      clients: All clients.
      index: Which one.
      key: For the order of its examples; consumed.

    Returns:
      Its mean loss on the way, and its update: where it ended, less where it began.  A client
      without examples does not move.
    """
    start, count, size = clients.starts[index], clients.counts[index], local.batch_size
    batches = jnp.maximum(1, -(-count // size))
    steps = jnp.where(count > 0, local.trips(batches), 0)
    optimizer = local.optimizer.init(trees.widened(params))
    carry = _State(jnp.zeros(()), trees.zeros_wide(params), optimizer)

    def epoch(number: Int[Array, ""], carry: _State) -> _State:
        order = _shuffled(jax.random.fold_in(key, number), count, clients.capacity)

        def batch(which: Int[Array, ""], carry: _State) -> _State:
            slots = which * size + jnp.arange(size)
            real = slots < count
            # Padding repeats the first row of the batch: sound if the client's own rows are.
            rows = start + order[jnp.where(real, slots, which * size)]
            examples = jax.tree.map(lambda x: x[rows], clients.examples)
            return _moved(local, params, examples, real, carry)

        return jax.lax.fori_loop(0, jnp.minimum(batches, steps - number * batches), batch, carry)

    carry = jax.lax.fori_loop(0, -(-steps // batches), epoch, carry)
    return carry.losses / jnp.maximum(steps, 1), carry.update


class _State(NamedTuple):
    """A client on its way."""

    losses: Float[Array, ""]
    update: PyTree
    optimizer: Any


def _moved(
    local: Local, params: PyTree, examples: PyTree, real: Bool[Array, " size"], carry: _State
) -> _State:
    """One step of one client, on one batch."""
    here = jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, carry.update)

    def mean_loss(params: PyTree) -> Float[Array, ""]:
        losses = jax.vmap(local.loss, (None, 0))(params, examples).astype(jnp.float32)
        return jnp.sum(jnp.where(real, losses, 0)) / jnp.sum(real)

    loss, gradient = jax.value_and_grad(mean_loss)(here)
    gradient, here = trees.widened(gradient), trees.widened(here)
    change, state = local.optimizer.update(gradient, carry.optimizer, here)
    update = jax.tree.map(lambda u, c: u + c.astype(u.dtype), carry.update, change)
    if local.ball is not None:
        update = clipping.clip(local.ball, jax.tree.map(lambda x: x[None], update))[0]
    return _State(carry.losses + loss, update, state)


def _shuffled(key: Key, count: Int[Array, ""], capacity: int) -> Int[Array, " capacity"]:
    """The numbers below ``count`` in random order; the rest come after them."""
    places = jax.random.uniform(key, (capacity,))
    return jnp.argsort(jnp.where(jnp.arange(capacity) < count, places, 2.0))

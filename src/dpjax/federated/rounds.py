# SPDX-License-Identifier: Apache-2.0
"""One round: draw clients, let them train, clip and sum what they moved, release once.

A client is turned into a *loss* whose gradient is minus its update, and handed to
`dpjax.clipped_grad`: rules, weights, masks, and what is broken in one client staying there
are those of one example, and not written a second time.  A draw of any size takes as many
microbatches of clients as it needs; clients of like size share one.

This file must never look at the ledger.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from dpjax import sampling, trees
from dpjax.federated.clients import Clients
from dpjax.federated.local import Local, trained
from dpjax.gradients import clipped_grad, layout
from dpjax.gradients.clipped_grad import check_loss
from dpjax.mechanism import Mechanism
from dpjax.types import Draw, Key, Purpose, PyTree


class Info(NamedTuple):
    """What a round saw, **before** any noise.

    Privacy: computed from private data without noise.  Look at it, do not publish it.
    """

    loss: Float[Array, ""]
    """Mean of the losses that clients had while they trained, over those that counted and whose
    loss is finite; NaN if none."""
    examples: Int[Array, ""]
    """How many examples the drawn clients have together."""
    clients: Int[Array, ""]
    """How many clients were drawn; below, only those with examples are meant."""
    dropped: Int[Array, ""]
    """How many of them counted as nothing, because their update was not finite."""
    norm: Float[Array, " groups"]
    """Mean length of an update per group of those that counted, before clipping."""
    clipped: Float[Array, " groups"]
    """Fraction of the updates that are longer than the bound, per group."""


class Recipe(NamedTuple):
    """What a run was asked to do.

    Args:
      local: What each client does.
      server: The server's optimizer.
      mechanism: What is run and accounted, its unit a client.
      shares: How much each client counts, from 0 to 1.
      scale: The number of clients / the public sum of all shares.
      microbatch_size: How many clients train at once.
    """

    local: Local
    server: optax.GradientTransformation
    mechanism: Mechanism
    shares: Float[Array, " clients"]
    scale: float
    microbatch_size: int | None


class Sums(NamedTuple):
    """What a round has added up so far: secret, all of it."""

    updates: PyTree
    losses: Float[Array, ""]
    scored: Int[Array, ""]
    norms: Float[Array, " groups"]
    over: Float[Array, " groups"]
    clients: Int[Array, ""]
    working: Int[Array, ""]
    dropped: Int[Array, ""]
    examples: Int[Array, ""]


def played(
    recipe: Recipe, params: PyTree, moved: Any, key: Key, clients: Clients
) -> tuple[PyTree, Any, Sums]:
    """One round.

    Args:
      recipe: What is run.
      params: The server's parameters.
      moved: The states of the noise and of the server's optimizer.
      key: The root key of the run.
      clients: All of them.

    Returns:
      New parameters and states, and the round's sums but for the updates, for `observed`.

    Privacy: the parameters that come out are private; the sums are not.
    """
    noise_state, inner = moved
    mechanism = recipe.mechanism
    draw = _by_size(mechanism.sampling.draw(key, noise_state.step), clients)
    loss = _as_loss(recipe.local, clients, trees.step_key(key, Purpose.LOCAL, noise_state.step))
    sums = _summed(recipe, loss, params, draw, clients)
    mean, noise_state = mechanism.privatize(key).update(sums.updates, noise_state)
    mean = jax.tree.map(lambda x: x * jnp.asarray(recipe.scale, x.dtype), mean)
    server = optax.with_extra_args_support(recipe.server)
    change, inner = server.update(mean, inner, params, bound_scale=recipe.scale)
    return optax.apply_updates(params, change), (noise_state, inner), sums._replace(updates=None)


def _by_size(draw: Draw, clients: Clients) -> Draw:
    """The drawn clients, smallest first: those of one microbatch wait for its largest."""
    drawn = jnp.arange(draw.indices.shape[0]) < draw.size
    sizes = jnp.where(drawn, clients.counts[draw.indices], clients.capacity + 1)
    return Draw(draw.indices[jnp.argsort(sizes)], draw.size)


def _as_loss(local: Local, clients: Clients, key: Key) -> Callable[[PyTree, Any], Array]:
    """The loss of a client: its value is the client's own, its gradient minus the update."""

    def loss(params: PyTree, index: Int[Array, ""]) -> Float[Array, ""]:
        start = jax.lax.stop_gradient(params)
        value, update = jax.lax.stop_gradient(
            trained(local, start, clients, index, jax.random.fold_in(key, index))
        )
        # Factor by factor rather than a product of vectors, whose inputs accelerators round.
        back = jax.tree.map(lambda p, s, u: jnp.sum((p - s) * -u), params, start, update)
        return value + sum(jax.tree.leaves(back))

    return loss


def _summed(
    recipe: Recipe, loss: Callable[..., Array], params: PyTree, draw: Draw, clients: Clients
) -> Sums:
    """The clipped, weighted sum over the drawn clients."""
    rule, one = recipe.mechanism.clipping, trees.one_row(clients.examples)
    check_loss(lambda p, x: (recipe.local.loss(p, x), None), params, one)
    size = _microbatch(recipe, loss, params)
    clipped = clipped_grad(loss, rule, "vmap")

    def add(rows: Int[Array, " size"], drawn: Bool[Array, " size"], sums: Sums) -> Sums:
        counts = jnp.where(drawn, clients.counts[rows], 0)
        working = counts > 0
        part = clipped(params, rows, working, recipe.shares[rows])
        sound = jnp.all(jnp.isfinite(part.norms), axis=1)
        scored = working & sound & jnp.isfinite(part.losses)
        over = jnp.sum(part.norms > jnp.asarray(rule.bounds), axis=0, dtype=jnp.float32)
        more = Sums(
            part.value,
            jnp.sum(jnp.where(scored, part.losses, 0), dtype=jnp.float32),
            jnp.sum(scored, dtype=jnp.int32),
            jnp.sum(jnp.where(sound[:, None], part.norms, 0), axis=0, dtype=jnp.float32),
            over,
            *(jnp.sum(x, dtype=jnp.int32) for x in (drawn, working, working & ~sound, counts)),
        )
        return jax.tree.map(jnp.add, sums, more)

    groups, zero, none = jnp.zeros(len(rule.bounds)), jnp.zeros(()), jnp.zeros((), jnp.int32)
    nothing = Sums(trees.zeros_wide(params), zero, none, groups, groups, none, none, none, none)
    return sampling.fold(draw, size, add, nothing)


def _microbatch(recipe: Recipe, loss: Callable[..., Array], params: PyTree) -> int:
    """How many clients train at once, by shapes alone."""
    client = jax.ShapeDtypeStruct((), jnp.int32)
    most = recipe.mechanism.sampling.usual_size

    def with_aux(params: PyTree, index: Int[Array, ""]) -> tuple[Array, None]:
        return loss(params, index), None

    chosen = {"microbatch_size": recipe.microbatch_size, "devices": 1}
    return layout(with_aux, params, client, most, "vmap", **chosen).microbatch_size


def observed(sums: Sums) -> Info:
    """What the observer is told of a round's sums.

    On the host, because an empty draw is lawful, and its means are not: a device that looks for
    NaN would end the run there.
    """
    sums = jax.tree.map(np.asarray, sums)
    counted = sums.working - sums.dropped
    with np.errstate(divide="ignore", invalid="ignore"):
        over = np.float32(sums.over / sums.working)
        loss, norm = np.float32(sums.losses / sums.scored), np.float32(sums.norms / counted)
    return Info._make([loss, sums.examples, sums.clients, sums.dropped, norm, over])

# SPDX-License-Identifier: Apache-2.0
"""Engines: ways to compute the same clipped sum.

An engine is a function ``(loss, rule, params, batch, mask, weights, microbatch_size)`` of
which the loss returns ``(scalar, aux)``; a new one joins by a row in `ENGINES` and is then
held to the others by the laws.  `microbatched` and `spread` make engines of engines: over
time, and over devices.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float

from dpjax import clipping, trees
from dpjax.gradients.ghost import ghost
from dpjax.types import ClippedSum, Clipping, LossFn, PyTree

__all__ = ["ENGINES", "Engine", "microbatched", "spread", "vmap"]

Mask = Bool[Array, " batch"]
Weights = Float[Array, "batch groups"]
Engine = Callable[[LossFn, Clipping, PyTree, PyTree, Mask, Weights, int], ClippedSum]


def vmap(
    loss: LossFn,
    rule: Clipping,
    params: PyTree,
    batch: PyTree,
    mask: Mask,
    weights: Weights,
    microbatch_size: int,
) -> ClippedSum:
    """All per-example gradients at once: the definition, and the yardstick of the rest."""
    del microbatch_size
    per_example = jax.vmap(jax.value_and_grad(loss, has_aux=True), in_axes=(None, 0))
    (losses, aux), gradients = per_example(params, batch)
    value, norms, factors = clipping.clip(rule, gradients, mask, weights)
    return ClippedSum(value, jnp.where(mask, losses, 0), norms, factors, aux)


def microbatched(engine: Engine) -> Engine:
    """Microbatch after microbatch: memory of one, the sum of all, one compiled body."""

    def loop(
        loss: LossFn,
        rule: Clipping,
        params: PyTree,
        batch: PyTree,
        mask: Mask,
        weights: Weights,
        microbatch_size: int,
    ) -> ClippedSum:
        size = mask.shape[0]
        if size <= microbatch_size:
            return engine(loss, rule, params, batch, mask, weights, microbatch_size)
        trips = -(-size // microbatch_size)

        def fold(x: Array) -> Array:
            x = _padded(x, trips * microbatch_size)
            return x.reshape((trips, microbatch_size, *x.shape[1:]))

        def unfold(x: Array) -> Array:
            return x.reshape((trips * microbatch_size, *x.shape[2:]))[:size]

        def body(total: PyTree, inputs: tuple[PyTree, Mask, Weights]) -> tuple[PyTree, ClippedSum]:
            part = engine(loss, rule, params, *inputs, microbatch_size)
            total = jax.tree.map(jnp.add, total, part.value)
            return total, part._replace(value=None)

        folded = jax.tree.map(fold, (batch, mask, weights))
        total, parts = jax.lax.scan(body, trees.zeros_wide(params), folded)
        return jax.tree.map(unfold, parts)._replace(value=total)

    return loop


def spread(engine: Engine, devices: int) -> Engine:
    """The batch in equal parts on several devices, each with the engine; the sum of all.

    Args:
      engine: What each device runs.
      devices: How many of this process's devices take part.
    """
    mesh = Mesh(np.array(jax.local_devices()[:devices]), ("examples",))
    whole, parts = PartitionSpec(), PartitionSpec("examples")

    def together(
        loss: LossFn,
        rule: Clipping,
        params: PyTree,
        batch: PyTree,
        mask: Mask,
        weights: Weights,
        microbatch_size: int,
    ) -> ClippedSum:
        def on_one(params: PyTree, batch: PyTree, mask: Mask, weights: Weights) -> ClippedSum:
            part = engine(loss, rule, params, batch, mask, weights, microbatch_size)
            return part._replace(value=jax.lax.psum(part.value, "examples"))

        size = mask.shape[0]
        even = -(-size // devices) * devices
        inputs = jax.tree.map(lambda x: _padded(x, even), (batch, mask, weights))
        outputs = ClippedSum._make([whole, parts, parts, parts, parts])
        split = jax.shard_map(
            on_one,
            mesh=mesh,
            in_specs=(whole, parts, parts, parts),
            out_specs=outputs,
            check_vma=False,
        )
        result = split(params, *inputs)
        each = jax.tree.map(lambda x: x[:size], result._replace(value=None))
        return each._replace(value=result.value)

    return together


def _padded(x: Array, size: int) -> Array:
    return jnp.pad(x, [(0, size - x.shape[0])] + [(0, 0)] * (x.ndim - 1))


ENGINES: dict[str, Engine] = {
    "vmap": vmap,
    "scan": microbatched(vmap),
    "ghost": microbatched(ghost),
}

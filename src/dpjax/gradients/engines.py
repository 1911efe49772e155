# SPDX-License-Identifier: Apache-2.0
"""Engines: ways to compute the same clipped sum.

An engine is a function ``(loss, rule, params, batch, mask, microbatch_size)`` of which
the loss returns ``(scalar, aux)``; a new one joins by a row in `ENGINES` and is then held
to the others by the laws.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from dpjax import clipping, trees
from dpjax.gradients.ghost import ghost
from dpjax.types import ClippedSum, Clipping, LossFn, PyTree

__all__ = ["ENGINES", "Engine", "microbatched", "vmap"]

Mask = Bool[Array, " batch"]
Engine = Callable[[LossFn, Clipping, PyTree, PyTree, Mask, int], ClippedSum]


def vmap(
    loss: LossFn,
    rule: Clipping,
    params: PyTree,
    batch: PyTree,
    mask: Mask,
    microbatch_size: int,
) -> ClippedSum:
    """All per-example gradients at once: the definition, and the yardstick of the rest."""
    del microbatch_size
    per_example = jax.vmap(jax.value_and_grad(loss, has_aux=True), in_axes=(None, 0))
    (losses, aux), gradients = per_example(params, batch)
    value, norms, factors = clipping.clip(rule, gradients, mask)
    return ClippedSum(value, jnp.where(mask, losses, 0), norms, factors, aux)


def microbatched(engine: Engine) -> Engine:
    """Microbatch after microbatch: memory of one, the sum of all, one compiled body."""

    def loop(
        loss: LossFn,
        rule: Clipping,
        params: PyTree,
        batch: PyTree,
        mask: Mask,
        microbatch_size: int,
    ) -> ClippedSum:
        size = mask.shape[0]
        if size <= microbatch_size:
            return engine(loss, rule, params, batch, mask, microbatch_size)
        trips = -(-size // microbatch_size)

        def fold(x: Array) -> Array:
            padding = [(0, trips * microbatch_size - size)] + [(0, 0)] * (x.ndim - 1)
            return jnp.pad(x, padding).reshape((trips, microbatch_size, *x.shape[1:]))

        def unfold(x: Array) -> Array:
            return x.reshape((trips * microbatch_size, *x.shape[2:]))[:size]

        def body(total: PyTree, inputs: tuple[PyTree, Mask]) -> tuple[PyTree, ClippedSum]:
            part = engine(loss, rule, params, *inputs, microbatch_size)
            total = jax.tree.map(jnp.add, total, part.value)
            return total, part._replace(value=None)

        folded = jax.tree.map(fold, (batch, mask))
        total, parts = jax.lax.scan(body, trees.zeros_wide(params), folded)
        return jax.tree.map(unfold, parts)._replace(value=total)

    return loop


ENGINES: dict[str, Engine] = {
    "vmap": vmap,
    "scan": microbatched(vmap),
    "ghost": microbatched(ghost),
}

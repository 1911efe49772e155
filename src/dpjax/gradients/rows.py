# SPDX-License-Identifier: Apache-2.0
"""Rows: the examples that an engine is given, and ways to give them in pieces.

`microbatched` and `spread` make engines of engines: over time, and over devices.  What
they need of an engine is that the clipped sum of two pieces is the sum of theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float

from dpjax import trees
from dpjax.types import ClippedSum, Clipping, LossFn, PyTree

__all__ = ["Engine", "Rows", "adding", "microbatched", "spread"]


class Rows(NamedTuple):
    """Examples, and what is to be made of each; all with the same leading axis.

    Args:
      batch: The examples.
      mask: Which are real; the others are padding.
      weights: In [0, 1]; they multiply the factors of the rule.
    """

    batch: PyTree
    mask: Bool[Array, " batch"]
    weights: Float[Array, "batch groups"]


Engine = Callable[[LossFn, Clipping, PyTree, Rows, PyTree], ClippedSum]
"""``(loss, rule, params, rows, start) -> clipped sum``, added to what was there at the start;
the loss returns ``(scalar, aux)``."""


def adding(engine: Callable[[LossFn, Clipping, PyTree, Rows], ClippedSum]) -> Engine:
    """An engine of one that begins at zero."""

    def added(
        loss: LossFn, rule: Clipping, params: PyTree, rows: Rows, start: PyTree
    ) -> ClippedSum:
        found = engine(loss, rule, params, rows)
        return found._replace(value=jax.tree.map(jnp.add, start, found.value))

    return added


def microbatched(engine: Engine, size: int) -> Engine:
    """Microbatch after microbatch: memory of one, the sum of all, one compiled body.

    Args:
      engine: What each microbatch is given to.
      size: Of a microbatch; the last one is padded.
    """

    def loop(loss: LossFn, rule: Clipping, params: PyTree, rows: Rows, start: PyTree) -> ClippedSum:
        count = rows.mask.shape[0]
        if count <= size:
            return engine(loss, rule, params, rows, start)
        trips = -(-count // size)

        def fold(x: Array) -> Array:
            return x.reshape((trips, size, *x.shape[1:]))

        def unfold(x: Array) -> Array:
            return x.reshape((trips * size, *x.shape[2:]))[:count]

        def body(total: PyTree, some: Rows) -> tuple[PyTree, ClippedSum]:
            part = engine(loss, rule, params, some, total)
            return part.value, part._replace(value=None)

        folded = jax.tree.map(fold, _padded(rows, trips * size))
        total, parts = jax.lax.scan(body, start, folded)
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

    def together(loss: LossFn, rule: Clipping, params: PyTree, rows: Rows) -> ClippedSum:
        def on_one(params: PyTree, some: Rows) -> ClippedSum:
            part = engine(loss, rule, params, some, trees.zeros_wide(params))
            return part._replace(value=jax.lax.psum(part.value, "examples"))

        count = rows.mask.shape[0]
        even = -(-count // devices) * devices
        split = jax.shard_map(
            on_one,
            mesh=mesh,
            in_specs=(whole, parts),
            out_specs=ClippedSum._make([whole, parts, parts, parts, parts]),
            check_vma=False,
        )
        result = split(params, _padded(rows, even))
        each = jax.tree.map(lambda x: x[:count], result._replace(value=None))
        return each._replace(value=result.value)

    return adding(together)


def _padded(rows: Rows, size: int) -> Rows:
    """More rows, all masked: copies of the last one, so that they are sound if it is."""
    count = rows.mask.shape[0]

    def grow(x: Array) -> Array:
        return jnp.concatenate([x, jnp.broadcast_to(x[-1:], (size - count, *x.shape[1:]))])

    grown: Rows = rows if size == count else jax.tree.map(grow, rows)
    return grown._replace(mask=grown.mask & (jnp.arange(size) < count))

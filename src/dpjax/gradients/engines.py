# SPDX-License-Identifier: Apache-2.0
"""Engines: ways to compute the same clipped sum.

An engine is a function ``(loss, rule, params, rows, start)``; a new one joins by a row in
`ENGINES` and is then held to the others by the laws.  It is given as many rows as are
worth working on at once, and never needs to know how many there are in all.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dpjax import clipping
from dpjax.gradients._bookkeeping.ghost import by_patches, ghost
from dpjax.gradients.batching import Engine, Rows, adding
from dpjax.gradients.nan_isolation import isolated
from dpjax.types import ClippedSum, Clipping, LossFn, PyTree


def vmap(loss: LossFn, rule: Clipping, params: PyTree, rows: Rows) -> ClippedSum:
    """All per-example gradients at once: the definition, and the yardstick of the rest."""
    per_example = jax.vmap(jax.value_and_grad(loss, has_aux=True), in_axes=(None, 0))
    (losses, aux), gradients = per_example(params, rows.batch)
    value, norms, factors = clipping.clip(rule, gradients, rows.mask, rows.weights)
    return ClippedSum(value, jnp.where(rows.mask, losses, 0), norms, factors, aux)


# "scan" is "vmap" in microbatches.
ENGINES: dict[str, Engine] = {
    "vmap": isolated(adding(vmap)),
    "scan": isolated(adding(vmap)),
    "ghost": isolated(ghost, harmless=by_patches),
}

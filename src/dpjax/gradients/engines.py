# SPDX-License-Identifier: Apache-2.0
"""Engines: different ways to compute one clipped sum.

``tests/test_laws.py`` compares every row of `ENGINES`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dpjax import checks, clipping
from dpjax.gradients._bookkeeping.ghost import by_patches, ghost
from dpjax.gradients.batching import Engine, Rows
from dpjax.gradients.nan_isolation import isolated
from dpjax.gradients.traced import Traced
from dpjax.types import ClippedSum, Clipping, PyTree


def vmap(loss: Traced, rule: Clipping, params: PyTree, rows: Rows, start: PyTree) -> ClippedSum:
    """All per-example gradients, vectorised: the definition that other engines must equal."""
    per_example = jax.vmap(jax.value_and_grad(loss, has_aux=True), in_axes=(None, 0))
    (losses, aux), gradients = per_example(params, rows.batch)
    value, norms, factors = clipping.clip(rule, gradients, rows.mask, rows.weights)
    value = jax.tree.map(jnp.add, start, value)
    losses = jnp.where(rows.mask, losses, 0)
    return ClippedSum(value, losses, norms, factors, aux)


_vectorised = isolated(vmap)

ENGINES: dict[str, Engine] = {
    "vmap": _vectorised,
    "scan": _vectorised,
    "ghost": isolated(ghost, harmless=by_patches),
}


def named(call: str, engine: str) -> str:
    """The name of an engine in `ENGINES`, where "auto" is "ghost"; refuses other names."""
    checks.one_of(call, "engine", engine, ("auto", *ENGINES), "Engines differ in speed alone.")
    return "ghost" if engine == "auto" else engine

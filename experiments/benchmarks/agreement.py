# SPDX-License-Identifier: Apache-2.0
"""Correctness of the timed gradients: each is compared with its definition on the timed batch.

Two entries of a max-pool window may be so close that rounding decides which is larger; then the
gradient of that example jumps, in plain JAX too.  Such examples are found by perturbing inputs
and parameters by about a rounding error, and are left out.  On all others a gradient must agree
with its definition, or no time is printed.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

import dpjax
from dpjax import clipping
from experiments.benchmarks.plain import plain_gradients

BOUND = 1.0
TOLERANCE = 1e-4  # between two gradients, relative to their length
# Relative size and number of perturbations.  On W2 they move gradients by less than 3e-6, or
# else by more than 1e-3.
MOVED, DRAWS = 1e-6, 3
TOGETHER = 16  # examples, whose gradients are all in memory


def clipped_sum(loss: Any, engine: str) -> Any:
    """The clipped sum of one engine."""
    clipped = dpjax.clipped_grad(loss, clipping.flat(BOUND), engine)
    return lambda params, batch: clipped(params, batch).value


def held(names: list[str], loss: Any, params: Any, batch: Any) -> dict[str, Any]:
    """Compares each of dpjax's gradients with its definition, vmap's or plain's.

    Returns:
      The relative distances, and the number of examples that were left out.
    """
    sound, size = steady(loss, params, batch), len(batch[1])
    some = jax.tree.map(lambda x: x[np.resize(sound, size)], batch)  # others in their places
    gradients = plain_gradients(loss)
    gradients |= {n: clipped_sum(loss, n.removeprefix("dpjax ")) for n in names if "dpjax" in n}
    definitions = {"plain": gradients["plain"], "dpjax vmap": clipped_sum(loss, "vmap")}

    def value(gradient: Any) -> Any:
        # An accelerator may multiply float32 in fewer bits; here only the engines should differ.
        with jax.default_matmul_precision("highest"):
            return ravel_pytree(jax.jit(gradient)(params, some))[0]

    wanted = {name: value(gradient) for name, gradient in definitions.items()}

    def apart(name: str) -> float:
        want = wanted["dpjax vmap" if "dpjax" in name else "plain"]
        return float(jnp.linalg.norm(value(gradients[name]) - want) / jnp.linalg.norm(want))

    found = {n: apart(n) for n in names if n in gradients and n not in definitions}
    if not all(distance <= TOLERANCE for distance in found.values()):
        raise RuntimeError(f"steps: gradients differ from their definitions by {found}.")
    return {"disagreement": found, "left_out": size - len(sound)}


def steady(loss: Any, params: Any, batch: Any) -> np.ndarray:
    """Indices of examples whose gradients do not jump; raises if they are fewer than half."""
    gradient = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))
    size, jumps, key = len(batch[1]), [], jax.random.key(0)
    for start in range(0, size, TOGETHER):
        rows = jax.tree.map(lambda x, start=start: x[start : start + TOGETHER], batch)
        here, far = gradient(params, rows), jnp.zeros(len(rows[1]))
        for draw in range(DRAWS):
            moved = _moved((params, rows), jax.random.fold_in(key, start + draw))
            apart = jax.tree.map(jnp.subtract, gradient(*moved), here)
            far = jnp.maximum(far, jnp.sqrt(_squares(apart) / _squares(here)))
        jumps.append(far)
    found = np.flatnonzero(np.concatenate(jumps) <= TOLERANCE)
    if len(found) < size / 2:
        raise RuntimeError(f"steps: rounding decides of {size - len(found)} in {size} gradients.")
    return found


def _moved(tree: Any, key: Any) -> Any:
    """Perturbs floating-point leaves; other leaves pass unchanged."""

    def move(x: Any, key: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return x * (1 + MOVED * jax.random.normal(key, x.shape))

    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(map(move, leaves, jax.random.split(key, len(leaves))))


def _squares(gradients: Any) -> Any:
    """The squared length of each example's gradient."""
    leaves = jax.tree.leaves(gradients)
    return sum(jnp.sum(x**2, axis=tuple(range(1, x.ndim))) for x in leaves)

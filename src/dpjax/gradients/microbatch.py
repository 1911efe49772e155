# SPDX-License-Identifier: Apache-2.0
"""How many examples to differentiate at once.

The estimate reads the shapes of the loss's own program.  An engine that holds one gradient
per example gets as many as a share of the memory takes.  The book-keeping engine holds
activations, and what it could not follow; on a CPU its microbatch is sized to the caches,
because large temporaries are page-faulted in at every step.

All of this changes speed and memory, never a result.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Literal

from dpjax.gradients.rules import foresee
from dpjax.gradients.walk import trace
from dpjax.types import LossFn, PyTree

__all__ = ["bytes_per_example", "device_count", "microbatch_size"]

# The share of the memory that one microbatch may take, and what fits the caches of a CPU.
_SHARE, _CACHES = 1 / 8, 32 * 2**20


def microbatch_size(
    loss: LossFn, params: PyTree, example: PyTree, batch_size: int, engine: str = "ghost"
) -> int:
    """The number of examples that are differentiated at once.

    Args:
      loss: ``loss(params, example) -> (scalar, aux)``.
      params: Parameters, or their shapes.
      example: One example, or its shapes.
      batch_size: More than this many are never needed.
      engine: Which engine will run.

    Returns:
      A power of two, or ``batch_size`` if that is smaller; at least 1.

    Example:
      >>> import jax.numpy as jnp
      >>> loss = lambda w, x: (jnp.vdot(w, x), None)
      >>> microbatch_size(loss, jnp.zeros(10), jnp.zeros(10), batch_size=32)
      32
    """
    fits = _budget(engine) // max(1, bytes_per_example(loss, params, example, engine))
    return max(1, min(batch_size, 2 ** int(math.log2(max(1, fits)))))


def device_count(batch_size: int, microbatch_size: int) -> int:
    """How many devices share a batch: all host devices, if it takes several microbatches.

    Args:
      batch_size: Examples in all.
      microbatch_size: Examples at once.
    """
    several = batch_size > microbatch_size and jax.devices()[0].platform == "cpu"
    return min(jax.local_device_count(), -(-batch_size // microbatch_size)) if several else 1


def bytes_per_example(loss: LossFn, params: PyTree, example: PyTree, engine: str = "ghost") -> int:
    """An estimate of the memory that one example takes while it is worked on.

    The values of the forward program that depend on the example; with the book-keeping
    engine what its rules write beside them, else twice every leaf and the values thrice
    again, for cotangents and scaled copies.
    """
    program, leaves = jax.make_jaxpr(loss)(params, example).jaxpr, jax.tree.leaves(params)
    moving = [i >= len(leaves) for i in range(len(program.invars))]
    forward = _program_bytes(program, moving)
    if engine != "ghost":
        return 4 * forward + 2 * sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    found = trace(loss, params, example)
    numbers = sum(leaves[i].size for i in found.materialised)
    for i, leaf in enumerate(leaves):
        if sites := [site for site in found.sites if i in site.leaves]:
            numbers += foresee(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), sites).numbers
    return forward + 4 * numbers


def _program_bytes(jaxpr: Any, moving: Sequence[bool]) -> int:
    """Bytes of the values that depend on moving inputs."""
    moves = {v for v, moved in zip(jaxpr.invars, moving, strict=False) if moved}
    total = 0
    for equation in jaxpr.eqns:
        entering = [not isinstance(v, Literal) and v in moves for v in equation.invars]
        inner = [p for p in equation.params.values() if hasattr(p, "jaxpr")]
        for program in inner:
            size = _program_bytes(program.jaxpr, entering[-len(program.jaxpr.invars) :])
            total += size * equation.params.get("length", 1)
        if not inner and any(entering):
            shapes = [v.aval for v in equation.outvars if hasattr(v.aval, "shape")]
            total += sum(a.size * a.dtype.itemsize for a in shapes)
        moves |= set(equation.outvars) if any(entering) else set()
    return total


def _budget(engine: str) -> int:
    """Bytes that one microbatch may take on the default device."""
    device = jax.devices()[0]
    if device.platform == "cpu" and engine == "ghost":
        return _CACHES
    if device.platform == "cpu":
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        total = (device.memory_stats() or {}).get("bytes_limit", 16 * 2**30)
    return int(_SHARE * total)

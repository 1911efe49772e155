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
from typing import Any

import jax

from dpjax.gradients.rules import NORM_RULES
from dpjax.gradients.walk import trace
from dpjax.types import LossFn, PyTree

__all__ = ["bytes_per_example", "microbatch_size"]

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


def bytes_per_example(loss: LossFn, params: PyTree, example: PyTree, engine: str = "ghost") -> int:
    """An upper estimate of the memory that one example takes.

    Four times the values of the forward program (values, cotangents, their scaled and
    rearranged copies), and twice every leaf of which a gradient per example is formed.
    """
    forward = _program_bytes(jax.make_jaxpr(loss)(params, example).jaxpr)
    leaves = jax.tree.leaves(params)
    if engine == "ghost":
        program = trace(loss, params, example)
        generic = {
            site.leaf
            for site in program.sites
            if not site.isometry or site.equation.primitive.name not in NORM_RULES
        }
        leaves = [leaves[i] for i in generic | set(program.materialised)]
    gradients = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    return 4 * forward + 2 * gradients


def _program_bytes(jaxpr: Any) -> int:
    """Bytes of all values that a program computes, its inner programs included."""
    total = 0
    for equation in jaxpr.eqns:
        inner = [p for p in equation.params.values() if hasattr(p, "jaxpr")]
        total += sum(_program_bytes(p.jaxpr) for p in inner)
        if not inner:
            shapes = [v.aval for v in equation.outvars if hasattr(v.aval, "shape")]
            total += sum(a.size * a.dtype.itemsize for a in shapes)
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

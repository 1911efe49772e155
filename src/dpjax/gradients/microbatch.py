# SPDX-License-Identifier: Apache-2.0
"""How many examples to differentiate at once.

Per-example gradients cost memory in proportion to the microbatch.  The estimate reads the
shapes of the loss's own gradient program and takes as many examples as a share of the
memory holds; it changes speed and memory, never a result.
"""

from __future__ import annotations

import math
import os
from typing import Any

import jax

from dpjax.types import LossFn, PyTree

__all__ = ["bytes_per_example", "microbatch_size"]

# The share of the memory that one microbatch may take.
_SHARE = 1 / 8


def microbatch_size(loss: LossFn, params: PyTree, example: PyTree, batch_size: int) -> int:
    """The number of examples whose gradients are held at once.

    Args:
      loss: ``loss(params, example)``.
      params: Parameters, or their shapes.
      example: One example, or its shapes.
      batch_size: More than this many are never needed.

    Returns:
      A power of two, or ``batch_size`` if that is smaller; at least 1.

    Example:
      >>> import jax.numpy as jnp
      >>> loss = lambda w, x: jnp.vdot(w, x)
      >>> microbatch_size(loss, jnp.zeros(10), jnp.zeros(10), batch_size=32)
      32
    """
    fits = _budget() // max(1, bytes_per_example(loss, params, example))
    return max(1, min(batch_size, 2 ** int(math.log2(max(1, fits)))))


def bytes_per_example(loss: LossFn, params: PyTree, example: PyTree) -> int:
    """An upper estimate of the memory that one example's gradient takes.

    All intermediate values of the gradient program, as if none were ever freed.
    """
    program = jax.make_jaxpr(lambda p, x: jax.vjp(lambda q: loss(q, x), p)[0])(params, example)
    gradient = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
    return 2 * gradient + 2 * _program_bytes(program.jaxpr)


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


def _budget() -> int:
    """Bytes that one microbatch may take on the default device."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        total = (device.memory_stats() or {}).get("bytes_limit", 16 * 2**30)
    return int(_SHARE * total)

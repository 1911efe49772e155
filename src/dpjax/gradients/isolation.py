# SPDX-License-Identifier: Apache-2.0
"""Isolation: what is broken in one example stays in that example.

The kernel gradients of a vmapped convolution are one grouped convolution.  Where XLA writes
that with zeros between the groups (float64 on CPU), a NaN of one example becomes a NaN of
all, because 0 times NaN is NaN; all are then dropped by the rule, and one example has moved
the sum by as many bounds as there are others.  Where it is to split that convolution between
devices it is wrong altogether (`placement`).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from dpjax import trees
from dpjax.gradients.placement import refuse_split
from dpjax.gradients.primitives import inner_programs
from dpjax.gradients.rows import Engine, Rows, microbatched
from dpjax.types import ClippedSum, Clipping, LossFn, PyTree

__all__ = ["isolated"]


def isolated(
    engine: Engine, harmless: Callable[[LossFn, PyTree, PyTree], int] = lambda *_: 0
) -> Engine:
    """The same engine; where a norm is not finite, example after example; on one device.

    Args:
      engine: One that may differentiate vmapped convolutions by their kernels.
      harmless: ``(loss, params, example)`` to the number of convolutions that it is known
        not to; if those are all, there is nothing to guard.
    """
    alone = microbatched(engine, 1)

    def guarded(
        loss: LossFn, rule: Clipping, params: PyTree, rows: Rows, start: PyTree
    ) -> ClippedSum:
        example = trees.one_row(rows.batch)
        found = _convolutions(jax.make_jaxpr(loss)(params, example).jaxpr)
        if found == 0 or found == harmless(loss, params, example):
            return engine(loss, rule, params, rows, start)
        refuse_split(rows.batch)
        together = engine(loss, rule, params, rows, start)
        broken = ~jnp.all(jnp.isfinite(together.norms))
        return jax.lax.cond(
            broken, lambda: alone(loss, rule, params, rows, start), lambda: together
        )

    return guarded


def _convolutions(program: Jaxpr) -> int:
    """How many convolutions a program has, however deep."""
    here = sum(e.primitive.name == "conv_general_dilated" for e in program.eqns)
    return here + sum(_convolutions(p) for e in program.eqns for p in inner_programs(e))

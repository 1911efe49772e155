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
from dpjax.gradients.primitives import equations
from dpjax.gradients.rows import Engine, Rows, microbatched
from dpjax.types import ClippedSum, Clipping, LossFn, PyTree

__all__ = ["differentiates_kernels", "isolated"]

Harmless = Callable[[LossFn, PyTree, PyTree], int]
"""``(loss, params, example)`` to the number of convolutions whose kernel gradients are products."""


def isolated(engine: Engine, harmless: Harmless = lambda *_: 0) -> Engine:
    """The same engine; where a norm is not finite, example after example; on one device.

    Args:
      engine: One that may differentiate vmapped convolutions by their kernels.
      harmless: How many it is known not to; if those are all, there is nothing to guard.
    """
    alone = microbatched(engine, 1)

    def guarded(
        loss: LossFn, rule: Clipping, params: PyTree, rows: Rows, start: PyTree
    ) -> ClippedSum:
        if not differentiates_kernels(loss, params, trees.one_row(rows.batch), harmless):
            return engine(loss, rule, params, rows, start)
        refuse_split(rows.batch)
        together = engine(loss, rule, params, rows, start)
        broken = ~jnp.all(jnp.isfinite(together.norms))
        return jax.lax.cond(
            broken, lambda: alone(loss, rule, params, rows, start), lambda: together
        )

    return guarded


def differentiates_kernels(
    loss: LossFn, params: PyTree, example: PyTree, harmless: Harmless
) -> bool:
    """Whether a vmapped convolution may be differentiated by each example's own kernel."""
    found = _convolutions(jax.make_jaxpr(loss)(params, example).jaxpr)
    return found > 0 and found != harmless(loss, params, example)


def _convolutions(program: Jaxpr) -> int:
    """How many convolutions a program has, however deep."""
    return sum(e.primitive.name == "conv_general_dilated" for e in equations(program))

# SPDX-License-Identifier: Apache-2.0
"""Isolation: what is broken in one example stays in that example.

Of a convolution both sides of which differ from example to example, as in the gradient of its
kernel, `jax.vmap` makes one in groups.  Some of these XLA on CPU writes with zeros between the
groups; a NaN of one example is then a NaN of all, because 0 times NaN is NaN, and whatever drops
it drops them all: one example has moved the sum by as many bounds as there are others.

Numbers need not show it, for a loss, a client's optimizer or a user's weight may wipe a NaN out.
So it is decided from the program, before there are numbers.  Where XLA is to split such a
convolution between devices it is wrong altogether (`placement`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn

from dpjax import trees
from dpjax._jaxpr import equations
from dpjax.gradients.batching import Engine, Rows, microbatched
from dpjax.gradients.sharding_checks import refuse_split
from dpjax.types import ClippedSum, Clipping, LossFn, PyTree

Harmless = Callable[[LossFn, PyTree, PyTree], int]
"""``(loss, params, example)`` to the number of convolutions whose kernel gradients are products."""


def isolated(engine: Engine, harmless: Harmless = lambda *_: 0) -> Engine:
    """The same engine; example after example where their convolutions mix; on one device.

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
        if _mixes(lambda some: engine(loss, rule, params, some, start), rows):
            return alone(loss, rule, params, rows, start)
        together = engine(loss, rule, params, rows, start)
        if jax.default_backend() == "cpu":
            return together
        # What other compilers do was not tried; a norm that is not finite might have spread.
        broken = ~jnp.all(jnp.isfinite(together.norms))
        return jax.lax.cond(
            broken, lambda: alone(loss, rule, params, rows, start), lambda: together
        )

    return guarded


def each(function: Callable[[PyTree], PyTree], rows: PyTree) -> PyTree:
    """`jax.vmap` of a function over rows; row after row where their convolutions mix."""
    together = jax.vmap(function)
    return jax.lax.map(function, rows) if _mixes(together, rows) else together(rows)


def differentiates_kernels(
    loss: LossFn, params: PyTree, example: PyTree, harmless: Harmless
) -> bool:
    """Whether a vmapped convolution may be differentiated by each example's own kernel."""
    found = len(_convolutions(jax.make_jaxpr(loss)(params, example).jaxpr))
    return found > 0 and found != harmless(loss, params, example)


def _mixes(run: Callable[[PyTree], PyTree], rows: PyTree) -> bool:
    """Whether rows are groups of a convolution that is written with zeros between them."""
    # Channels may be groups as well, but of these there are not more where there are more rows.
    groups = _leaky(run, rows)
    return bool(groups) and groups != _leaky(run, jax.tree.map(lambda x: x[:1], rows))


def _leaky(run: Callable[[PyTree], PyTree], rows: PyTree) -> list[tuple[int, int]]:
    """The groups of those convolutions of a program that may be written with zeros."""
    found = _convolutions(jax.make_jaxpr(run)(rows).jaxpr)
    return [groups for e in found if _has_zeros(e, *(groups := _groups(e)))]


def _has_zeros(equation: JaxprEqn, features: int, batches: int) -> bool:
    """As seen on CPU (jaxlib 0.10.2): groups of features are clean in float32 and narrower."""
    arrays: list[Any] = [v.aval for v in (*equation.invars, *equation.outvars)]
    return batches > 1 or (features > 1 and any(x.dtype.itemsize > 4 for x in arrays))


def _groups(equation: JaxprEqn) -> tuple[int, int]:
    return equation.params["feature_group_count"], equation.params["batch_group_count"]


def _convolutions(program: Jaxpr) -> list[JaxprEqn]:
    """Those of a program, however deep."""
    return [e for e in equations(program) if e.primitive.name == "conv_general_dilated"]

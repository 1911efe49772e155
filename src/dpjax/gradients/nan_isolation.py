# SPDX-License-Identifier: Apache-2.0
"""Isolation: a NaN of one example must not reach the other examples of its batch.

`jax.vmap` turns a convolution whose two operands both differ from example to example into a grouped
convolution. XLA on CPU (jaxlib 0.10.2) compiles some with explicit zeros between the groups, and
0 * NaN is NaN: one example moves the sum by many bounds. A loss, a client's optimizer or a weight
may hide the NaN, so on a CPU the jaxpr decides and not the values.

If a batch is sharded over several devices, XLA partitions such a convolution wrongly for finite
numbers too: the error is as large as the gradient, without a warning. `_refuse_split` refuses it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from dpjax import trees
from dpjax.gradients import _platforms
from dpjax.gradients._jaxprs import convolutions
from dpjax.gradients.batching import Engine, Layout, Rows, laid_out
from dpjax.gradients.loss_checks import has_own_derivatives, require_one_example
from dpjax.gradients.traced import Traced
from dpjax.types import ClippedSum, Clipping, PyTree

Harmless = Callable[[Traced, PyTree, PyTree], int]
"""``(loss, params, example) -> number`` of convolutions whose kernel gradients the engine computes
by matrix products, which mix no examples."""


def isolated(engine: Engine, harmless: Harmless = lambda *_: 0) -> Engine:
    """An engine that takes one example at a time if convolutions of several examples mix them.

    ``harmless`` counts the convolutions of a loss that mix none in this engine; by default 0.
    """

    def guarded(
        loss: Traced, rule: Clipping, params: PyTree, rows: Rows, start: PyTree
    ) -> ClippedSum:
        run = partial(engine, loss, rule)
        # A loss with no convolution, or with harmless ones only, runs as it is.
        if not _differentiates_kernels(loss, params, trees.one_row(rows.batch), harmless):
            return run(params, rows, start)
        # XLA partitions exactly these convolutions wrongly, with or without NaN: a sharded batch is
        # refused.
        _refuse_split(rows.batch)
        # No convolution of a microbatch of one example has another example in its groups.
        one_by_one = partial(laid_out(run, Layout(1)), params, rows, start)
        # XLA on CPU mixes the examples of some grouped convolutions, and other platforms may mix
        # these too.
        if _grouped_by_rows(lambda rows: run(params, rows, start), rows):
            return one_by_one()
        together = run(params, rows, start)
        if _platforms.on_cpu():
            return together
        # XLA for other platforms was not tested, and may mix examples that a CPU keeps apart. A NaN
        # may have spread, so a batch with a non-finite norm is computed again, one by one.
        broken = ~jnp.all(jnp.isfinite(together.norms))
        return jax.lax.cond(broken, one_by_one, lambda: together)

    return guarded


def map_rows(function: Callable[[PyTree], PyTree], rows: PyTree, name: str) -> PyTree:
    """`jax.vmap` of a function of one row, or `jax.lax.map` if convolutions mix the rows."""
    require_one_example(jax.make_jaxpr(function)(trees.one_row(rows)).jaxpr, name)
    together = jax.vmap(function)
    if _grouped_by_rows(together, rows):
        return jax.lax.map(function, rows)
    return together(rows)


def _refuse_split(batch: PyTree) -> None:
    """Raises, now or at compilation, if the batch is sharded over several devices."""
    # Each device has its own program inside a shard_map.
    if jax.device_count() == 1 or jax.sharding.get_abstract_mesh().manual_axes:
        return
    for leaf in jax.tree.leaves(batch):
        if isinstance(leaf, jax.Array):  # NumPy arrays are on no device yet
            # The compiler chooses the shardings inside `jit`: they are known after compilation.
            jax.debug.inspect_array_sharding(leaf, callback=_refuse)


def _refuse(sharding: Any) -> None:
    if not sharding.is_fully_replicated:
        count = len(sharding.device_set)
        raise ValueError(
            f"clipped_grad: the batch lies on {count} devices, and XLA computes kernel gradients "
            f"of a split batch wrongly. Give devices={count}, or put the batch on one device."
        )


def _differentiates_kernels(
    loss: Traced, params: PyTree, example: PyTree, harmless: Harmless
) -> bool:
    """Whether a vmapped convolution may be differentiated by each example's own kernel."""
    program = jax.make_jaxpr(loss)(params, example).jaxpr
    count = len(convolutions(program))
    if has_own_derivatives(program):
        # JAX's rules have two more for each convolution; a user's derivatives may have others.
        in_gradient = len(convolutions(loss.gradient(params, example)))
        if in_gradient > 3 * count:
            return True
    return count > 0 and count != harmless(loss, params, example)


def _grouped_by_rows(run: Callable[[PyTree], PyTree], rows: PyTree) -> bool:
    """Whether rows become groups of a convolution that XLA compiles with zeros between groups."""
    groups = _mixing_groups(run, rows)
    if not groups:
        return False
    # Channels may be groups as well, but only groups that grow with the rows are examples.
    first_row = jax.tree.map(lambda x: x[:1], rows)
    return groups != _mixing_groups(run, first_row)


def _mixing_groups(run: Callable[[PyTree], PyTree], rows: PyTree) -> list[tuple[int, int]]:
    """The groups of each convolution that XLA may compile with zeros between groups."""
    mixing: list[tuple[int, int]] = []
    for equation in convolutions(jax.make_jaxpr(run)(rows).jaxpr):
        of_features = equation.params["feature_group_count"]
        of_batch = equation.params["batch_group_count"]
        avals: list[Any] = [v.aval for v in (*equation.invars, *equation.outvars)]
        # Seen on CPU (jaxlib 0.10.2): groups of features are safe in float32 and narrower dtypes,
        # and groups of the batch in none.
        wide = any(aval.dtype.itemsize > 4 for aval in avals)
        if of_batch > 1 or (of_features > 1 and wide):
            mixing.append((of_features, of_batch))
    return mixing

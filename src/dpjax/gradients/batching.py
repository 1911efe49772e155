# SPDX-License-Identifier: Apache-2.0
"""Batching: microbatches and devices, and nothing else in the library knows of either.

`sum_over` sums anything over the microbatches of a draw, on all devices. `microbatched` and
`spread` do the same for an engine on one batch, whose norms and losses are wanted per example.
All of them need only that the clipped sum of two pieces is the sum of their clipped sums.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from dpjax import sampling, trees
from dpjax.types import ClippedSum, Clipping, Draw, LossFn, PyTree

S = TypeVar("S")
T = TypeVar("T")


class Layout(NamedTuple):
    """How a batch is split."""

    microbatch_size: int
    """Examples in flight on each device."""
    devices: int
    """How many devices share the batch."""


def sum_over(
    add: Callable[[S, PyTree, Bool[Array, " size"], T], T],
    zero: T,
    layout: Layout,
    draw: Draw,
    data: PyTree,
    state: S,
) -> T:
    """Sums over the rows of a draw, microbatch by microbatch, on all devices.

    The loop takes as many trips as the draw needs, so a draw of any size runs in one compiled
    program, is never truncated, and an empty one leaves ``zero``.

    Args:
      add: ``(state, rows, mask, total) -> total`` for one microbatch. The mask is False in the
        padding of the last one.
      zero: The total over no rows.
      layout: The microbatch and the devices. Speed and memory only.
      draw: Which rows; of any size up to its capacity.
      data: A tree of arrays with one row per example.
      state: What ``add`` needs on every device, whole.

    Returns:
      One total per device, stacked; `device_sum` adds them.

    Example:
      >>> draw = Draw(jnp.array([3, 0, 4, 0, 0]), jnp.array(3))
      >>> add = lambda state, rows, mask, total: total + jnp.sum(jnp.where(mask, rows, 0))
      >>> zero, layout = jnp.array(0), Layout(microbatch_size=2, devices=1)
      >>> totals = sum_over(add, zero, layout, draw, jnp.arange(10), state=None)
      >>> int(device_sum(totals))
      7
    """
    size, devices = layout

    def share(which: Any, draw: Draw, data: PyTree, zero: T, state: S) -> T:
        def add_rows(indices: Int[Array, " size"], mask: Bool[Array, " size"], total: T) -> T:
            return add(state, jax.tree.map(lambda x: x[indices], data), mask, total)

        # A loop over the draw and not over the data: what was not drawn is never read.
        return sampling.fold(draw, size, add_rows, zero, (which, devices))

    # Devices meet once a step, in `device_sum`; noise is added after it, once.
    return on_each(share, devices)(draw, data, zero, state)


def add_part(total: PyTree, lost: PyTree | None, add: Callable[[PyTree], ClippedSum]) -> Any:
    """Adds a microbatch to a running total, and keeps what float32 rounds away (Kahan's sum).

    Args:
      total: The sum so far.
      lost: What earlier additions rounded away; None if that is little, see `rounds_little`.
      add: The clipped sum of the microbatch, added to what it is given.

    Returns:
      ``(total, lost, microbatch)``. The sum is ``total + lost``.
    """
    if lost is None:
        part = add(total)
        return part.value, None, part
    # The part begins with `lost`, so that a sparse part, such as rows of a table, adds in place.
    part = add(lost)
    after = jax.tree.map(jnp.add, total, part.value)
    lost = jax.tree.map(lambda a, t, p: p - (a - t), after, total, part.value)
    return after, lost, part


def rounds_little(examples: int, microbatch_size: int) -> bool:
    """Whether rounding lets one example move a plain float32 sum by less than 1.01 of its bound.

    One example more shifts every later total, so each addition may round the other way. There are
    ``examples / microbatch_size`` additions to a sum of at most ``examples`` bounds, and each
    rounds by half of its last bit. At a million examples they add up to several bounds.
    """
    # Compensation reads and writes all parameters once more for each microbatch, so it is left out
    # where a sum is short.
    return examples**2 / microbatch_size * 2.0**-24 < 0.01


def with_lost(total: PyTree, lost: PyTree | None) -> PyTree:
    """The sum, from the two parts that `add_part` keeps."""
    return total if lost is None else jax.tree.map(jnp.add, total, lost)


def device_sum(totals: T) -> T:
    """The sum of the totals of all devices, which `sum_over` and `on_each` stack."""
    return jax.tree.map(lambda x: jnp.sum(x, axis=0, dtype=x.dtype), totals)


class Rows(NamedTuple):
    """Examples with their masks and weights, all with the same leading axis.

    Args:
      batch: The examples.
      mask: Which are real; the others are padding.
      weights: In [0, 1]; they multiply the factors of the rule.
    """

    batch: PyTree
    mask: Bool[Array, " batch"]
    weights: Float[Array, "batch groups"]


Engine = Callable[[LossFn, Clipping, PyTree, Rows, PyTree], ClippedSum]
"""``(loss, rule, params, rows, start) -> clipped sum``, added to what was there at the start;
the loss returns ``(scalar, aux)``."""


def adding(engine: Callable[[LossFn, Clipping, PyTree, Rows], ClippedSum]) -> Engine:
    """An engine that adds to ``start``, from one that starts at zero."""

    def added(
        loss: LossFn, rule: Clipping, params: PyTree, rows: Rows, start: PyTree
    ) -> ClippedSum:
        found = engine(loss, rule, params, rows)
        return found._replace(value=jax.tree.map(jnp.add, start, found.value))

    return added


def microbatched(engine: Engine, size: int) -> Engine:
    """Runs an engine on one microbatch after the other, in one compiled loop.

    Args:
      engine: Runs on each microbatch.
      size: Rows in a microbatch; the last one is padded.
    """

    def loop(loss: LossFn, rule: Clipping, params: PyTree, rows: Rows, start: PyTree) -> ClippedSum:
        count = rows.mask.shape[0]
        if count <= size:
            return engine(loss, rule, params, rows, start)
        trips = -(-count // size)

        def fold(x: Array) -> Array:
            return x.reshape((trips, size, *x.shape[1:]))

        def unfold(x: Array) -> Array:
            return x.reshape((trips * size, *x.shape[2:]))[:count]

        def body(carry: tuple[PyTree, PyTree], some: Rows) -> tuple[Any, ClippedSum]:
            *carried, part = add_part(*carry, partial(engine, loss, rule, params, some))
            return tuple(carried), part._replace(value=None)

        folded = jax.tree.map(fold, _padded(rows, trips * size))
        lost = None if rounds_little(count, size) else jax.tree.map(jnp.zeros_like, start)
        (total, lost), parts = jax.lax.scan(body, (start, lost), folded)
        return jax.tree.map(unfold, parts)._replace(value=with_lost(total, lost))

    return loop


def spread(engine: Engine, devices: int) -> Engine:
    """Splits a batch over devices, runs the engine on each, and sums.

    Args:
      engine: What each device runs.
      devices: How many of this process's devices take part.
    """

    def together(loss: LossFn, rule: Clipping, params: PyTree, rows: Rows) -> ClippedSum:
        def part(which: Any, params: PyTree, some: Rows) -> ClippedSum:
            return engine(loss, rule, params, some, trees.zeros_wide(params))

        count = rows.mask.shape[0]
        # Masked rows make the parts equal; shard_map needs an even split.
        even = _padded(rows, -(-count // devices) * devices)
        # Each device starts from zeros and not from `start`, which would be added once a device.
        parts = on_each(part, devices, split={1})(params, even)
        each = jax.tree.map(
            lambda x: x.reshape((-1, *x.shape[2:]))[:count], parts._replace(value=None)
        )
        return each._replace(value=jax.tree.map(lambda x: jnp.sum(x, axis=0), parts.value))

    return adding(together)


def on_each(
    run: Callable[..., PyTree], devices: int, split: Collection[int] = ()
) -> Callable[..., PyTree]:
    """Runs a function on several devices in parallel and stacks the results along a new axis.

    Args:
      run: ``(which, *arguments) -> tree``, with the number of the device, from 0.
      devices: How many of this process's devices take part.
      split: Positions of the arguments that are split along the leading axis. Every device
        receives the other arguments whole.
    """

    def one(*arguments: PyTree) -> PyTree:
        # One device runs without `shard_map`, so a single-device program has no trace of a mesh.
        which = jax.lax.axis_index("devices") if devices > 1 else 0
        return jax.tree.map(lambda x: x[None], run(which, *arguments))

    def every(*arguments: PyTree) -> PyTree:
        whole, parts = PartitionSpec(), PartitionSpec("devices")
        specs = tuple(parts if i in split else whole for i in range(len(arguments)))
        mesh = Mesh(np.array(jax.local_devices()[:devices]), ("devices",))
        # check_vma=False: JAX would otherwise insert a psum over the devices for shared
        # parameters, so the gradients of several examples would be clipped as one.
        cut = jax.shard_map(one, mesh=mesh, in_specs=specs, out_specs=parts, check_vma=False)
        return cut(*arguments)

    return every if devices > 1 else one


def _padded(rows: Rows, size: int) -> Rows:
    """More rows, all masked. Copies of the last row are finite if it is; zeros may not be."""
    count = rows.mask.shape[0]

    def grow(x: Array) -> Array:
        return jnp.concatenate([x, jnp.broadcast_to(x[-1:], (size - count, *x.shape[1:]))])

    grown: Rows = rows if size == count else jax.tree.map(grow, rows)
    return grown._replace(mask=grown.mask & (jnp.arange(size) < count))

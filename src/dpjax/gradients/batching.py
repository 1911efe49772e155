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
    """Adds a microbatch to a running total, and keeps what float32 rounds away.

    Without compensation one example more shifts every later total, and each addition may round
    the other way: at a million examples and 16 a microbatch that is several bounds.

    Args:
      total: The sum so far.
      lost: What earlier additions rounded away; None if that is little, see `rounds_little`.
      add: The clipped sum of the microbatch, added to what it is given.

    Returns:
      ``(total, lost, microbatch)``. The sum is ``total + lost``, which only noise may round.
    """
    if lost is None:
        part = add(total)
        return part.value, None, part
    part = add(jax.tree.map(jnp.zeros_like, total))
    return *_add_exactly(total, lost, part.value), part


def rounds_little(size: int, layout: Layout) -> bool:
    """Whether draws of this size take one microbatch on each device, so that no total is needed.

    The few additions of a larger draw then round no more than the sums inside its microbatches.
    """
    return size <= layout.microbatch_size * layout.devices


def _add_exactly(total: PyTree, lost: PyTree, part: PyTree) -> tuple[PyTree, PyTree]:
    """``total + lost + part`` as two trees, to about 48 bits."""

    def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
        # Knuth's sum: `error` is exact whichever term is larger.
        rounded = a + b
        back = rounded - a
        return rounded, (a - (rounded - back)) + (b - back)

    def each(a: Array, low: Array, b: Array) -> tuple[Array, Array]:
        high, error = two_sum(a, b)
        # A second sum keeps `low` below the last bit of `high`, where it rounds least.
        return two_sum(high, low + error)

    leaves, structure = jax.tree.flatten(total)
    pairs = map(each, leaves, jax.tree.leaves(lost), jax.tree.leaves(part))
    high, low = zip(*pairs, strict=True) if leaves else ((), ())
    return structure.unflatten(high), structure.unflatten(low)


def with_lost(total: PyTree, lost: PyTree | None) -> PyTree:
    """The sum, rounded to the dtype of ``total``, from the two parts that `add_part` keeps."""
    return total if lost is None else jax.tree.map(jnp.add, total, lost)


def device_sum(totals: T) -> T:
    """The sum of the totals of all devices, which `sum_over` and `on_each` stack."""
    return jax.tree.map(lambda x: jnp.sum(x, axis=0, dtype=x.dtype), totals)


def join_devices(totals: PyTree, lost: PyTree | None) -> tuple[PyTree, PyTree | None]:
    """The sum of the totals of all devices and of what they lost, both stacked, as two parts."""
    if lost is None:
        return device_sum(totals), None
    count = jax.tree.leaves(totals)[0].shape[0] if jax.tree.leaves(totals) else 1

    def of(tree: PyTree, device: int) -> PyTree:
        return jax.tree.map(lambda x: x[device], tree)

    high, low = of(totals, 0), device_sum(lost)
    for device in range(1, count):
        high, low = _add_exactly(high, low, of(totals, device))
    return high, low


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
        lost = jax.tree.map(jnp.zeros_like, start)
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

# SPDX-License-Identifier: Apache-2.0
"""Batching: microbatches and devices.

A float32 sum of a million examples rounds what one of them adds by more than the margin of the
noise. So the sum of a *block* of examples is plain, and blocks are added with compensation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from dpjax import sampling
from dpjax.gradients.traced import Traced
from dpjax.types import ClippedSum, Clipping, Draw, PyTree

S = TypeVar("S")
T = TypeVar("T")


class Layout(NamedTuple):
    """How a batch is split."""

    microbatch_size: int
    """Examples in flight in each share."""
    mesh: Mesh | None = None
    """The devices, or None for a single one; see `dpjax.meshes`."""
    axes: tuple[str, ...] = ()
    """The axes of the mesh that split the batch. XLA partitions what is left."""

    @property
    def shares(self) -> int:
        """In how many parts the batch is split."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes) if self.mesh else 1


def sum_over(
    add: Callable[[S, PyTree, Bool[Array, "size ..."], T], T],
    zero: T,
    layout: Layout,
    draw: Draw,
    data: PyTree,
    state: S,
    settle: Callable[[T], T] | None = None,  # ends each block of microbatches
) -> T:
    """The sum of ``add(state, rows, mask, total)`` over the rows of a draw, one for each share."""
    size, shares = layout.microbatch_size, layout.shares

    def share(which: Any, draw: Draw, data: PyTree, zero: T, state: S) -> T:
        def add_rows(indices: Int[Array, "size ..."], mask: Bool[Array, "size ..."], total: T) -> T:
            return add(state, jax.tree.map(lambda x: x[indices], data), mask, total)

        # A loop over the draw and not over the data: what was not drawn is never read.
        block = None if settle is None else (microbatches_in_block(size), settle)
        return sampling.fold(draw, size, add_rows, zero, (which, shares), block)

    # Devices meet once a step, in `join`; noise is added after it, once.
    return on_each(share, layout)(draw, data, zero, state)


class Total(NamedTuple):
    """A running sum of gradients."""

    block: PyTree  # the microbatches since the last block ended, added in place
    high: PyTree | None = None  # all blocks that ended; None if draws rarely take more than one
    low: PyTree | None = None  # what ``high`` lacks of their sum; only noise may round it away


MOST = 1024
"""The most examples in a microbatch. One contraction over as many hostile rows moves a sum by 6e-5
of a bound more than an example should; the margin for sums is 2^-11."""


def microbatches_in_block(size: int) -> int:
    """How many microbatches of this size are added before a block ends.

    Each addition may round otherwise by the last bit of the block, once an example is left out: for
    blocks of ``size * count`` bounds, and ``count`` additions, by at most 2^-12 bounds.
    """
    return max(1, math.isqrt(2**11 // size))


def no_total(like: PyTree, examples: int, layout: Layout) -> Total:
    """The sum over no microbatches; ``examples`` is the size of a usual draw."""
    zeros, size = jax.tree.map(jnp.zeros_like, like), layout.microbatch_size
    short = examples <= layout.shares * size * microbatches_in_block(size)
    return Total(zeros) if short else Total(zeros, zeros, zeros)


def settled(total: Total) -> Total:
    """The total after its block has ended."""
    if total.high is None:
        return total
    zeros = jax.tree.map(jnp.zeros_like, total.block)
    return Total(zeros, *_compensated(total))


def _compensated(total: Total) -> tuple[PyTree, PyTree]:
    """The sum of a total, rounded, and what it lacks."""

    def two_sum(high: Array, low: Array, block: Array) -> tuple[Array, Array]:
        # Knuth's sum: the error is exact, whichever term is larger.
        rounded = high + block
        back = rounded - high
        return rounded, low + ((high - (rounded - back)) + (block - back))

    leaves = zip(*map(jax.tree.leaves, (total.high, total.low, total.block)), strict=True)
    structure = jax.tree.structure(total.block)
    high, low = zip(*(two_sum(*leaf) for leaf in leaves), strict=True)
    return structure.unflatten(high), structure.unflatten(low)


def join(
    totals: Total, more: T, layout: Layout, reach: Sequence[float]
) -> tuple[PyTree, PyTree | None, T]:
    """The sum of all shares, what it lacks because it is rounded, and the sums of ``more``."""

    # The one place where devices meet in a step. No coordinate of a sum exceeds its ``reach``.
    def of_share(totals: Total, more: T) -> tuple[PyTree, PyTree | None, T]:
        total, more = jax.tree.map(lambda x: x[0], (totals, more))
        return _joined(total, more, layout, reach)

    if layout.shares == 1:
        return of_share(totals, more)
    parts = PartitionSpec(layout.axes)
    return _shard_map(of_share, layout, (parts, parts), PartitionSpec())(totals, more)


def _joined(
    total: Total, more: T, layout: Layout, reach: Sequence[float]
) -> tuple[PyTree, PyTree | None, T]:
    value, lost = (total.block, None) if total.high is None else _compensated(total)
    if layout.shares == 1:
        return value, lost, more
    leaves, structure = jax.tree.flatten(value)
    lacking = [0.0] * len(leaves) if lost is None else jax.tree.leaves(lost)
    parts = [_in_two(*leaf) for leaf in zip(leaves, lacking, reach, strict=True)]
    value, lost = map(structure.unflatten, zip(*parts, strict=True))
    # In one call, so that XLA can make one collective of them.
    return jax.lax.psum((value, lost, more), layout.axes)


def _in_two(x: Array, low: Any, reach: float) -> tuple[Array, Array]:
    """What a share adds: multiples of a unit, which add exactly within the reach, and the rest."""
    info = jnp.finfo(x.dtype)
    unit = 2.0 ** (math.ceil(math.log2(reach)) - info.nmant) if 0 < reach < math.inf else 0.0
    # Not (x + 2^k) - 2^k, which XLA takes for x.
    high = jnp.round(x / unit) * unit if unit >= info.tiny else x
    return high, low + (x - high)


class Rows(NamedTuple):
    """Examples with their masks and weights, all with the same leading axis."""

    batch: PyTree
    mask: Bool[Array, " batch"]  # which are real; the others are padding
    weights: Float[Array, "batch groups"]  # in [0, 1]; they multiply the factors of the rule


Engine = Callable[[Traced, Clipping, PyTree, Rows, PyTree], ClippedSum]
"""``(loss, rule, params, rows, start) -> clipped sum``, added to what was there at the start."""

BoundEngine = Callable[[PyTree, Rows, PyTree], ClippedSum]
"""An engine for one loss and one rule; with the parameters go the weights that are frozen."""


def laid_out(engine: BoundEngine, layout: Layout) -> BoundEngine:
    """An engine in the microbatches and on the devices of a layout."""

    def in_turn(params: PyTree, rows: Rows, start: PyTree) -> ClippedSum:
        """One microbatch after the other, in one compiled loop; the last one is padded."""
        count, size = rows.mask.shape[0], layout.microbatch_size
        if count <= size:
            return engine(params, rows, start)
        # Blocks of equal length, so that at most one microbatch in each is padding.
        trips = -(-count // size)
        blocks = -(-trips // microbatches_in_block(size))
        shape = (blocks, -(-trips // blocks), size)

        def add(block: PyTree, some: Rows) -> tuple[PyTree, ClippedSum]:
            after = engine(params, some, block)
            return after.value, after._replace(value=None)

        def add_block(total: Total, some: Rows) -> tuple[Total, ClippedSum]:
            block, parts = jax.lax.scan(add, total.block, some)
            return settled(total._replace(block=block)), parts

        zeros = jax.tree.map(jnp.zeros_like, start)
        total = Total(start) if blocks == 1 else Total(zeros, start, zeros)
        even = _padded(rows, math.prod(shape))
        folded = jax.tree.map(lambda x: x.reshape((*shape, *x.shape[1:])), even)
        (block, high, low), parts = jax.lax.scan(add_block, total, folded)
        value = block if high is None else jax.tree.map(jnp.add, high, low)
        parts = jax.tree.map(lambda x: jax.lax.collapse(x, 0, 3)[:count], parts)
        return parts._replace(value=value)

    def spread(params: PyTree, rows: Rows, start: PyTree) -> ClippedSum:
        """Each device loops over its own share, and they meet once."""
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), start)

        def share(which: Any, params: PyTree, some: Rows, zeros: PyTree) -> ClippedSum:
            # From zeros and not from `start`, which would be added once a device.
            return in_turn(params, some, zeros)

        count = rows.mask.shape[0]
        # Masked rows make the shares equal; shard_map needs an even split.
        even = _padded(rows, -(-count // layout.shares) * layout.shares)
        shares = on_each(share, layout, split={1})(params, even, zeros)
        value = jax.tree.map(lambda s, x: s + jnp.sum(x, axis=0), start, shares.value)
        shares = shares._replace(value=None)
        shares = jax.tree.map(lambda x: jax.lax.collapse(x, 0, 2)[:count], shares)
        return shares._replace(value=value)

    return in_turn if layout.shares == 1 else spread


def on_each(
    run: Callable[..., PyTree], layout: Layout, split: Collection[int] = ()
) -> Callable[..., PyTree]:
    """Stacks ``run(which share, *arguments)`` of all shares; arguments in ``split`` are split."""
    several = layout.shares > 1

    def one(*arguments: PyTree) -> PyTree:
        which = jax.lax.axis_index(layout.axes) if several else 0
        return jax.tree.map(lambda x: x[None], run(which, *arguments))

    def every(*arguments: PyTree) -> PyTree:
        everywhere, parts = PartitionSpec(), PartitionSpec(layout.axes)
        specs = tuple(parts if i in split else everywhere for i in range(len(arguments)))
        return _shard_map(one, layout, specs, parts)(*arguments)

    # A single share runs without `shard_map`, so a single-device program has no trace of a mesh.
    return every if several else one


def _shard_map(
    run: Callable[..., PyTree], layout: Layout, into: Any, out: Any
) -> Callable[..., Any]:
    """`jax.shard_map` over the axes of the batch; XLA partitions the others."""
    # check_vma=False: JAX would otherwise insert a psum over the devices for shared parameters, so
    # the gradients of several examples would be clipped as one.
    options: Any = {"axis_names": set(layout.axes), "check_vma": False}
    return jax.shard_map(run, mesh=layout.mesh, in_specs=into, out_specs=out, **options)


def _padded(rows: Rows, size: int) -> Rows:
    """More rows, all masked. Copies of the last row are finite if it is; zeros may not be."""
    count = rows.mask.shape[0]

    def grow(x: Array) -> Array:
        return jnp.concatenate([x, jnp.broadcast_to(x[-1:], (size - count, *x.shape[1:]))])

    grown: Rows = rows if size == count else jax.tree.map(grow, rows)
    return grown._replace(mask=grown.mask & (jnp.arange(size) < count))

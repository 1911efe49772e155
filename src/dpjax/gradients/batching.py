# SPDX-License-Identifier: Apache-2.0
"""Batching: microbatches and devices, and nothing else in the library knows of either.

`sum_over` sums anything over the microbatches of a draw, on all devices. `microbatched` and
`spread` do the same for an engine on one batch, whose norms and losses are wanted per example.
All of them need only that the clipped sum of two pieces is the sum of their clipped sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from dpjax import meshes, sampling, trees
from dpjax._packing import packed, unpacked
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
    add: Callable[[S, PyTree, Bool[Array, " size"], T], T],
    zero: T,
    layout: Layout,
    draw: Draw,
    data: PyTree,
    state: S,
    settle: Callable[[T], T] | None = None,
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
      settle: What happens to a total after each block of microbatches, see `settled`.

    Returns:
      One total per share, stacked; `join` adds them.

    Example:
      >>> draw = Draw(jnp.array([3, 0, 4, 1, 2]), jnp.arange(5) < 3)
      >>> add = lambda state, rows, mask, total: total + jnp.sum(jnp.where(mask, rows, 0))
      >>> zero, layout = jnp.array(0), Layout(microbatch_size=2)
      >>> totals = sum_over(add, zero, layout, draw, jnp.arange(10), state=None)
      >>> int(totals[0])
      7
    """
    size, shares = layout.microbatch_size, layout.shares

    def share(which: Any, draw: Draw, data: PyTree, zero: T, state: S) -> T:
        def add_rows(indices: Int[Array, " size"], mask: Bool[Array, " size"], total: T) -> T:
            return add(state, jax.tree.map(lambda x: x[indices], data), mask, total)

        # A loop over the draw and not over the data: what was not drawn is never read.
        block = None if settle is None else (microbatches_in_block(size), settle)
        return sampling.fold(draw, size, add_rows, zero, (which, shares), block)

    # Devices meet once a step, in `join`; noise is added after it, once.
    return on_each(share, layout)(draw, data, zero, state)


class Total(NamedTuple):
    """A running sum of gradients that rounds as little as the sum of one block.

    A plain float32 total lets one example move the sum of a million by several bounds: the
    totals behind it change, and each addition may then round the other way.
    """

    block: PyTree
    """The microbatches since the last block ended, added in place."""
    high: PyTree | None = None
    """All blocks that ended, as `_parts`; None if draws rarely take more than one block."""
    low: PyTree | None = None
    """What ``high`` lacks of their sum. Only noise may round it away."""


# Examples in a block. Exact additions pass over all parameters, so they should be rare; the last
# bit of a sum of 32 is 2^-19 bounds: ``make bench BENCH=rounding``, ``BENCH=steps``.
_BLOCK = 32


def microbatches_in_block(size: int) -> int:
    """How many microbatches of this size are added before a block ends."""
    return max(1, _BLOCK // size)


def no_total(like: PyTree, examples: int, layout: Layout) -> Total:
    """The sum over no microbatches.

    Args:
      like: Gives shapes and dtypes.
      examples: The size of a usual draw.
      layout: The microbatch and the devices.
    """
    zeros = jax.tree.map(jnp.zeros_like, like)
    size = layout.microbatch_size
    short = examples <= layout.shares * size * microbatches_in_block(size)
    if short:
        return Total(zeros)
    parts = _parts(zeros, meshes.splits_parameters(layout.mesh))
    return Total(zeros, parts, parts)


def settled(total: Total) -> Total:
    """The total after its block has ended."""
    if total.high is None:
        return total
    parts = _add_exactly(total.high, total.low, total.block)
    return Total(jax.tree.map(jnp.zeros_like, total.block), *parts)


def _add_exactly(high: PyTree, low: PyTree, more: PyTree) -> tuple[list[Array], list[Array]]:
    """``high + low + more`` as two sums, to about 48 bits; ``more`` gets packed as they are."""

    def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
        # Knuth's sum: the error is exact, whichever term is larger.
        rounded = a + b
        back = rounded - a
        return rounded, (a - (rounded - back)) + (b - back)

    def each(a: Array, low: Array, b: Array) -> tuple[Array, Array]:
        rounded, error = two_sum(a, b)
        # A second sum keeps `low` below the last bit of `high`, where it rounds least.
        return two_sum(rounded, low + error)

    leaves = jax.tree.leaves(more)
    more = leaves if len(high) == len(leaves) else packed(leaves)
    pairs = [each(*one) for one in zip(high, low, more, strict=True)]
    return [x for x, _ in pairs], [x for _, x in pairs]


def _parts(tree: PyTree, split: bool) -> list[Array]:
    """The arrays of a `Total`: packed, so that it compiles in the time of few leaves.

    Leaves of a model that is split would be gathered, so there each is an array.
    """
    return jax.tree.leaves(tree) if split else packed(tree)


def _whole(arrays: Sequence[Array], like: PyTree) -> PyTree:
    """The tree that `_parts` took apart."""
    leaves, structure = jax.tree.flatten(like)
    same = len(arrays) == len(leaves)
    return structure.unflatten(arrays) if same else unpacked(arrays, like)


def join(
    totals: Total, more: T, layout: Layout, reach: Sequence[float]
) -> tuple[PyTree, PyTree | None, T]:
    """The totals of all shares together: the one place where devices meet in a step.

    Args:
      totals: One total per share, stacked.
      more: Numbers to be added plainly, stacked too.
      layout: The layout of `sum_over`.
      reach: For each leaf, what no coordinate of the sum exceeds; infinite if that is unknown.

    Returns:
      The sum, what it lacks because it is rounded (or None), and the sums of ``more``. From equal
      totals the first two are equal to the last bit in whatever order devices add, unless the
      reach is unknown. Another number of shares has other totals, which rounded otherwise.
    """

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
    """`join`, of one share's total, which meets the others over the axes of the batch."""
    value, lost = total.block, None
    if total.high is not None:
        parts = _add_exactly(total.high, total.low, total.block)
        value, lost = (_whole(part, total.block) for part in parts)
    if layout.shares == 1:
        return value, lost, more
    leaves, structure = jax.tree.flatten(value)
    lacking = [0.0] * len(leaves) if lost is None else jax.tree.leaves(lost)
    pairs = [_in_two(*each, layout.shares) for each in zip(leaves, lacking, reach, strict=True)]
    kept, lost = map(structure.unflatten, zip(*pairs, strict=True))
    # In one call, so that XLA can make one collective of them.
    return jax.lax.psum((kept, lost, more), layout.axes)


def _in_two(x: Array, lacks: Any, reach: float, shares: int) -> tuple[Array, Array]:
    """What one share adds to the sum and to what the sum lacks: both add exactly in any order."""
    unit = _unit(reach, x.dtype)
    kept = _rounded(x, unit)
    # `x - kept` and `lacks` are at most half a unit each, so the rest of all shares is below
    # `shares` units. It is rounded where a plain sum of the shares would round too.
    return kept, _rounded(lacks + (x - kept), _unit(shares * unit, x.dtype))


def _unit(reach: float, dtype: Any) -> float:
    """A power of two whose multiples within the reach have no more digits than the dtype.

    Infinite if the reach is unknown, or is so small that the multiples would underflow.
    """
    info = jnp.finfo(dtype)
    if not 0 < reach < math.inf:
        return math.inf
    unit = 2.0 ** (math.ceil(math.log2(reach)) - info.nmant)
    return unit if unit >= info.tiny else math.inf


def _rounded(x: Array, unit: float) -> Array:
    """The nearest multiple of the unit; the number itself if the unit is infinite."""
    # Not (x + 2^k) - 2^k, which XLA takes for x.
    return x if math.isinf(unit) else jnp.round(x / unit) * unit


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


Engine = Callable[[Traced, Clipping, PyTree, Rows, PyTree], ClippedSum]
"""``(loss, rule, params, rows, start) -> clipped sum``, added to what was there at the start."""


def adding(engine: Callable[[Traced, Clipping, PyTree, Rows], ClippedSum]) -> Engine:
    """An engine that adds to ``start``, from one that starts at zero."""

    def added(
        loss: Traced, rule: Clipping, params: PyTree, rows: Rows, start: PyTree
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

    def loop(loss: Traced, rule: Clipping, params: PyTree, rows: Rows, start: PyTree) -> ClippedSum:
        count = rows.mask.shape[0]
        if count <= size:
            return engine(loss, rule, params, rows, start)
        # Blocks of equal length, so that at most one microbatch in each is padding.
        trips = -(-count // size)
        blocks = -(-trips // microbatches_in_block(size))
        shape = (blocks, -(-trips // blocks), size)

        def fold(x: Array) -> Array:
            return x.reshape((*shape, *x.shape[1:]))

        def unfold(x: Array) -> Array:
            return x.reshape((math.prod(shape), *x.shape[3:]))[:count]

        def add(block: PyTree, some: Rows) -> tuple[PyTree, ClippedSum]:
            part = engine(loss, rule, params, some, block)
            return part.value, part._replace(value=None)

        def add_block(total: Total, some: Rows) -> tuple[Total, ClippedSum]:
            block, parts = jax.lax.scan(add, total.block, some)
            return settled(total._replace(block=block)), parts

        zeros = jax.tree.map(jnp.zeros_like, start)
        split = meshes.MODEL in jax.sharding.get_abstract_mesh().axis_names
        first, none = _parts(start, split), _parts(zeros, split)
        total = Total(start) if blocks == 1 else Total(zeros, first, none)
        folded = jax.tree.map(fold, _padded(rows, math.prod(shape)))
        (block, high, low), parts = jax.lax.scan(add_block, total, folded)
        value = block if high is None else _whole(jax.tree.map(jnp.add, high, low), start)
        return jax.tree.map(unfold, parts)._replace(value=value)

    return loop


def laid_out(engine: Engine, layout: Layout) -> Engine:
    """An engine in the microbatches and on the devices of a layout."""
    # Devices around microbatches: each device loops over its own share, and they meet once.
    run = microbatched(engine, layout.microbatch_size)
    return run if layout.shares == 1 else spread(run, layout)


def spread(engine: Engine, layout: Layout) -> Engine:
    """Splits a batch over devices, runs the engine on each, and sums.

    Args:
      engine: What each device runs.
      layout: The devices.
    """

    def together(loss: Traced, rule: Clipping, params: PyTree, rows: Rows) -> ClippedSum:
        def part(which: Any, params: PyTree, some: Rows) -> ClippedSum:
            return engine(loss, rule, params, some, trees.zeros_wide(params))

        count = rows.mask.shape[0]
        # Masked rows make the parts equal; shard_map needs an even split.
        even = _padded(rows, -(-count // layout.shares) * layout.shares)
        # Each device starts from zeros and not from `start`, which would be added once a device.
        parts = on_each(part, layout, split={1})(params, even)
        each = jax.tree.map(lambda x: jax.lax.collapse(x, 0, 2)[:count], parts._replace(value=None))
        return each._replace(value=jax.tree.map(lambda x: jnp.sum(x, axis=0), parts.value))

    return adding(together)


def on_each(
    run: Callable[..., PyTree], layout: Layout, split: Collection[int] = ()
) -> Callable[..., PyTree]:
    """Runs a function on each share of a batch in parallel and stacks the results.

    Args:
      run: ``(which, *arguments) -> tree``, with the number of the share, from 0.
      layout: The devices.
      split: Positions of the arguments that are split along the leading axis. Every share
        receives the other arguments whole.
    """
    several = layout.shares > 1

    def one(*arguments: PyTree) -> PyTree:
        which = jax.lax.axis_index(layout.axes) if several else 0
        return jax.tree.map(lambda x: x[None], run(which, *arguments))

    def every(*arguments: PyTree) -> PyTree:
        whole, parts = PartitionSpec(), PartitionSpec(layout.axes)
        specs = tuple(parts if i in split else whole for i in range(len(arguments)))
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

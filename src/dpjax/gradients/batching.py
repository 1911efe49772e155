# SPDX-License-Identifier: Apache-2.0
"""Batching: microbatches and devices.

A batch is split into *shares*, one for each device or group of devices. A share is split into
*microbatches*, which run one after the other. A *draw* is a batch by indices: it has the indices
of the data's rows that take part in a step, and a mask that is False for padding.

A float32 sum of a million examples rounds the term of one example by more than the margin of the
noise. So the sum of a *block* of examples is plain, and blocks are added with compensation.
"""

from __future__ import annotations

import functools
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
    """The axes of the mesh that split the batch. XLA partitions along the others."""

    @property
    def shares(self) -> int:
        """The number of parts of the batch."""
        if self.mesh is None:
            return 1
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def microbatches_in_block(self) -> int:
        """How many microbatches are added before a block ends.

        Without one example, each addition may round differently by the last bit of the block: with
        blocks of ``size * count`` bounds, and ``count`` additions, by at most 2^-12 bounds in
        total.
        """
        return max(1, math.isqrt(2**11 // self.microbatch_size))

    def sum_over(
        self,
        add: Callable[[S, PyTree, Bool[Array, "size ..."], T], T],
        zero: T,
        draw: Draw,
        data: PyTree,
        state: S,
        settle: Callable[[T], T] | None = None,
    ) -> T:
        """The sum of each share of a draw, stacked along a new axis; `join` adds them.

        ``add(state, rows, mask, total) -> total`` adds a microbatch, ``size`` rows of the data, to
        a total, which begins as ``zero``. ``state`` holds the other arrays that ``add`` reads;
        it must not close over them, because it may run on several devices. Indices and mask have
        the shape ``[size]``, or, if people are drawn, ``[size, rows of a person]``. ``settle`` maps
        the total after each block of microbatches to the one that is continued.
        """
        size = self.microbatch_size
        block = None
        if settle is not None:
            block = (self.microbatches_in_block, settle)

        def sum_of_share(number: Any, draw: Draw, data: PyTree, zero: T, state: S) -> T:
            def add_rows(
                indices: Int[Array, "size ..."], mask: Bool[Array, "size ..."], total: T
            ) -> T:
                rows = jax.tree.map(lambda x: x[indices], data)
                return add(state, rows, mask, total)

            # The loop is over the draw and not over the data: rows that were not drawn are never
            # read. Share number i takes every microbatch whose number is i modulo the shares.
            return sampling.fold(draw, size, add_rows, zero, (number, self.shares), block)

        return self.on_each(sum_of_share)(draw, data, zero, state)

    def on_each(
        self, run: Callable[..., PyTree], split: Collection[int] = ()
    ) -> Callable[..., PyTree]:
        """A function of the arguments: for each share, ``run(number of the share, *arguments)``.

        The results of all shares are stacked along a new leading axis. The arguments whose numbers
        are in ``split`` are split along their leading axis, and each share receives its part of
        them. It receives the others as a whole.
        """
        several = self.shares > 1

        def run_share(*arguments: PyTree) -> PyTree:
            number = jax.lax.axis_index(self.axes) if several else 0
            # `shard_map` stacks along the new axis.
            return jax.tree.map(lambda x: x[None], run(number, *arguments))

        def run_shares(*arguments: PyTree) -> PyTree:
            shares = PartitionSpec(self.axes)
            specs = [PartitionSpec()] * len(arguments)
            for i in split:
                specs[i] = shares
            return _shard_map(run_share, self, tuple(specs), shares)(*arguments)

        # A single share runs without `shard_map`, so a program of one device depends on no mesh.
        return run_shares if several else run_share

    def join(
        self, totals: Total, more: T, reach: Sequence[float]
    ) -> tuple[PyTree, PyTree | None, T]:
        """The sum of all shares, its rounding error, and the sums of ``more``, other arrays.

        Totals and ``more`` have a leading axis for the shares, as `on_each` gives them. Devices
        meet only here in a step. ``reach`` has a number for each leaf, which no coordinate of its
        sum exceeds.
        """

        def join_share(totals: Total, more: T) -> tuple[PyTree, PyTree | None, T]:
            total, more = jax.tree.map(lambda x: x[0], (totals, more))
            return _joined(total, more, self, reach)

        if self.shares == 1:
            return join_share(totals, more)
        split = PartitionSpec(self.axes)
        return _shard_map(join_share, self, (split, split), PartitionSpec())(totals, more)


class Total(NamedTuple):
    """A running sum of gradients."""

    block: PyTree  # the microbatches since the last block ended, added in place
    high: PyTree | None = None  # all blocks that ended; None if draws rarely take more than one
    low: PyTree | None = None  # the rounding error of ``high``; only noise may round it away

    @classmethod
    def none(cls, like: PyTree, examples: int, layout: Layout) -> Total:
        """The sum over no microbatches; ``examples`` is the size of a usual draw."""
        zeros = jax.tree.map(jnp.zeros_like, like)
        block = layout.microbatch_size * layout.microbatches_in_block
        fits_in_a_block = examples <= layout.shares * block
        if fits_in_a_block:
            return cls(zeros)
        return cls(zeros, zeros, zeros)

    def settled(self) -> Total:
        """The sum after its block has ended."""
        if self.high is None:
            return self
        zeros = jax.tree.map(jnp.zeros_like, self.block)
        high, low = self.compensated()
        return Total(zeros, high, low)

    def compensated(self) -> tuple[PyTree, PyTree]:
        """The whole sum, rounded, and its rounding error."""

        def two_sum(high: Array, low: Array, block: Array) -> tuple[Array, Array]:
            # Knuth's sum: the error is exact, whichever term is larger.
            rounded = high + block
            back = rounded - high
            return rounded, low + ((high - (rounded - back)) + (block - back))

        sums = jax.tree.map(two_sum, self.high, self.low, self.block)
        structure = jax.tree.structure(self.block)
        high, low = zip(*structure.flatten_up_to(sums), strict=True)
        return structure.unflatten(high), structure.unflatten(low)


MOST = 1024
"""The most examples in a microbatch. One contraction over as many hostile rows moves a sum by 6e-5
of a bound more than an example should; the margin for sums is 2^-11."""


def _joined(
    total: Total, more: T, layout: Layout, reach: Sequence[float]
) -> tuple[PyTree, PyTree | None, T]:
    """`Layout.join` on one device: its own share, added to the shares of all other devices.

    Returns the sum, its rounding error, and the sums of ``more``, other arrays of each share. No
    coordinate of the sum of leaf number i exceeds ``reach[i]``.
    """
    value = total.block
    error = None
    if total.high is not None:
        value, error = total.compensated()
    if layout.shares == 1:
        return value, error, more
    leaves, structure = jax.tree.flatten(value)
    errors = [0.0] * len(leaves)
    if error is not None:
        errors = jax.tree.leaves(error)
    # Two terms for each leaf: the first are added over the devices without rounding, and the second
    # are small. So their sums are the sum and its error.
    terms = [_in_two(*arguments) for arguments in zip(leaves, errors, reach, strict=True)]
    highs, lows = zip(*terms, strict=True)
    value = structure.unflatten(highs)
    error = structure.unflatten(lows)
    # One call, from which XLA can make one collective.
    return jax.lax.psum((value, error, more), layout.axes)


def _in_two(x: Array, error: Any, reach: float) -> tuple[Array, Array]:
    """A share's sum and its error as two terms: multiples of a unit, and all the rest.

    The unit is the last digit of a number of the size ``reach``. So the first terms of all shares
    add without rounding, and only the small second terms round.
    """
    info = jnp.finfo(x.dtype)
    unit = 0.0
    if 0 < reach < math.inf:
        unit = 2.0 ** (math.ceil(math.log2(reach)) - info.nmant)
    high = x
    if unit >= info.tiny:  # XLA may round smaller numbers to 0
        high = jnp.round(x / unit) * unit  # XLA simplifies (x + 2^k) - 2^k to x
    return high, error + (x - high)


class Rows(NamedTuple):
    """Examples with their masks and weights, all with the same leading axis."""

    batch: PyTree
    mask: Bool[Array, " batch"]  # which are real; the others are padding
    weights: Float[Array, "batch groups"]  # in [0, 1]; they multiply the factors of the rule


Engine = Callable[[Traced, Clipping, PyTree, Rows, PyTree], ClippedSum]
"""``(loss, rule, params, rows, start) -> clipped sum``, added to the sum ``start``."""

BoundEngine = Callable[[PyTree, Rows, PyTree], ClippedSum]
"""An engine for one loss and one rule: ``(model, rows, start)`` with the model
``(params, frozen)``."""


def laid_out(engine: BoundEngine, layout: Layout) -> BoundEngine:
    """An engine in the microbatches and on the devices of a layout."""
    if layout.shares == 1:
        return functools.partial(_in_turn, engine, layout)
    return functools.partial(_on_devices, engine, layout)


def _in_turn(
    engine: BoundEngine, layout: Layout, model: PyTree, rows: Rows, start: PyTree
) -> ClippedSum:
    """One microbatch after the other, in one compiled loop; the last ones are padded.

    The loop is in two levels, over blocks and over the microbatches of a block, because the sums of
    blocks are added with compensation. It runs over rows with the leading axes ``[blocks,
    microbatches of a block, size]``.
    """
    count = rows.mask.shape[0]
    size = layout.microbatch_size
    if count <= size:
        return engine(model, rows, start)  # a single microbatch needs neither loop nor padding
    # All divisions are rounded up. The blocks have the same length, the least that suffices, so
    # each has at most one microbatch of padding.
    microbatches = -(-count // size)
    blocks = -(-microbatches // layout.microbatches_in_block)
    block_length = -(-microbatches // blocks)
    shape = (blocks, block_length, size)

    def add(block: PyTree, microbatch: Rows) -> tuple[PyTree, ClippedSum]:
        clipped = engine(model, microbatch, block)
        # The scan carries the sum, and stacks the other results: one for each row, as its loss.
        return clipped.value, clipped._replace(value=None)

    def add_block(total: Total, microbatches: Rows) -> tuple[Total, ClippedSum]:
        block, of_rows = jax.lax.scan(add, total.block, microbatches)
        return total._replace(block=block).settled(), of_rows

    # Each block is summed from zeros, and then added to `high`, which begins with `start`.
    zeros = jax.tree.map(jnp.zeros_like, start)
    total = Total(zeros, high=start, low=zeros)
    if blocks == 1:
        total = Total(start)  # a single block begins with it, and needs no compensation
    padded = _padded(rows, math.prod(shape))
    folded = jax.tree.map(lambda x: x.reshape((*shape, *x.shape[1:])), padded)
    total, of_rows = jax.lax.scan(add_block, total, folded)
    value = total.block
    if total.high is not None:
        # All blocks have ended: their sum is in `high`, and its rounding error in `low`.
        value = jax.tree.map(jnp.add, total.high, total.low)
    # [blocks, microbatches, size, ...] becomes [rows, ...], without the padding.
    of_rows = jax.tree.map(lambda x: jax.lax.collapse(x, 0, 3)[:count], of_rows)
    return of_rows._replace(value=value)


def _on_devices(
    engine: BoundEngine, layout: Layout, model: PyTree, rows: Rows, start: PyTree
) -> ClippedSum:
    """Each device loops over its own share of the rows; then the sums of the shares are added."""
    # Shares begin with zeros, because ``start`` counts once: it is added below. `zeros_like` keeps
    # a sharding of ``start``, and every share needs zeros as a whole.
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), start)

    def sum_of_share(number: Any, model: PyTree, rows: Rows, zeros: PyTree) -> ClippedSum:
        return _in_turn(engine, layout, model, rows, zeros)

    count = rows.mask.shape[0]
    # Masked rows make the shares equal; shard_map needs an even split.
    padded = _padded(rows, -(-count // layout.shares) * layout.shares)
    # Only argument number 1, the rows, is split. Results have a leading axis of shares.
    shares = layout.on_each(sum_of_share, split={1})(model, padded, zeros)
    value = jax.tree.map(lambda x, sums: x + jnp.sum(sums, axis=0), start, shares.value)
    of_rows = shares._replace(value=None)
    # [shares, rows of a share, ...] becomes [rows, ...], without the padding.
    of_rows = jax.tree.map(lambda x: jax.lax.collapse(x, 0, 2)[:count], of_rows)
    return of_rows._replace(value=value)


def _shard_map(
    run: Callable[..., PyTree], layout: Layout, into: Any, out: Any
) -> Callable[..., Any]:
    """`jax.shard_map` over the axes of the batch; XLA partitions the others."""
    # JAX's check_vma inserts a psum over the devices for shared parameters, and the gradients of
    # several examples are clipped as one.
    options: Any = {"axis_names": set(layout.axes), "check_vma": False}
    return jax.shard_map(run, mesh=layout.mesh, in_specs=into, out_specs=out, **options)


def _padded(rows: Rows, size: int) -> Rows:
    """As many rows as ``size``; further ones are masked copies of the last row.

    They are copies, as gradients at zeros may be infinite.
    """
    count = rows.mask.shape[0]

    def grow(x: Array) -> Array:
        return jnp.concatenate([x, jnp.broadcast_to(x[-1:], (size - count, *x.shape[1:]))])

    grown: Rows = rows if size == count else jax.tree.map(grow, rows)
    return grown._replace(mask=grown.mask & (jnp.arange(size) < count))

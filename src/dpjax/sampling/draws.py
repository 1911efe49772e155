# SPDX-License-Identifier: Apache-2.0
"""Two ways to use a draw: a fold over its microbatches, and its indices on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from dpjax.sampling.sizes import checked_count
from dpjax.types import Draw

T = TypeVar("T")


def fold(
    draw: Draw,
    size: int,
    add: Callable[..., T],
    first: T,
    share: tuple[Any, int] = (0, 1),
    block: tuple[int, Callable[[T], T]] | None = None,
) -> T:
    """Folds ``add`` over a draw, ``size`` examples or people at a time; each is visited once.

    Args:
      draw: Of any size, including an empty one.
      size: Rows in a microbatch; speed and memory only.
      add: ``(rows, mask, total) -> total``, with ``rows`` the indices of a microbatch. ``mask``
        is True for those in the draw: the last microbatch is padded.
      first: The total of an empty draw. For a clipped sum, begin with
        `dpjax.clipping.empty_sum` and let ``add`` return ``clipped(..., start=total).total``.
      share: ``(which, of)``: only every ``of``-th microbatch, starting at number ``which``, as one
        of ``of`` devices adds them.
      block: ``(count, settle)``: after every ``count`` microbatches of the share, and after the
        last, ``settle(total)`` replaces the total, to add a block to a compensated sum for example.

    Example:
      >>> draw = Draw(jnp.array([3, 0, 4, 1, 2]), jnp.array([True, True, True, False, False]))
      >>> add = lambda rows, mask, total: total + jnp.sum(jnp.where(mask, rows, 0))
      >>> int(fold(draw, size=2, add=add, first=jnp.array(0)))
      7
    """
    size = checked_count("fold", "size", size)
    # An index beyond int32 is a pair of words, on an axis that the mask does not have.
    if draw.indices.ndim != draw.mask.ndim:
        raise ValueError(
            "sampling.fold: more than 2^31 - 1 examples have no rows in memory. Use a data.Stream."
        )
    which, of = share
    drawn = draw.size
    stride = of * size  # from the start of a share's microbatch to the start of its next one
    # Rows are padded to whole microbatches. Otherwise `dynamic_slice` shifts the last ones back,
    # over rows already added.
    pads = [(0, stride)]
    if draw.mask.ndim == 2:
        pads.append((0, 0))  # the axis of a person's rows
    indices = jnp.pad(draw.indices, pads)
    masks = jnp.pad(draw.mask, pads)

    # A while loop ends at the size of the draw, so Poisson draws of all sizes run in one program.
    # The loop carries the start of the next microbatch and the total.
    def body(carry: tuple[Int[Array, ""], T]) -> tuple[Int[Array, ""], T]:
        start, total = carry
        rows = jax.lax.dynamic_slice_in_dim(indices, start, size)
        mask = jax.lax.dynamic_slice_in_dim(masks, start, size)
        # Devices take microbatches in turn, so their shares differ by one microbatch at most.
        return start + stride, add(rows, mask, total)

    # Every share runs as often as the first one, which has the most microbatches. Otherwise a
    # collective in `add` waits for a device whose loop has ended. A microbatch beyond the draw has
    # only masked rows.
    def more(carry: tuple[Int[Array, ""], T]) -> Any:
        start, _ = carry
        # The position of the first share when this one is at `start`.
        return start - which * size < drawn

    begin = (jnp.asarray(which * size, jnp.int32), first)
    if block is None:
        _, total = jax.lax.while_loop(more, body, begin)
        return total
    count, settle = block

    # An inner loop adds the microbatches of one block.
    def body_of_blocks(carry: tuple[Int[Array, ""], T]) -> tuple[Int[Array, ""], T]:
        start, _ = carry
        end_of_block = start + count * stride
        start, total = jax.lax.while_loop(lambda c: more(c) & (c[0] < end_of_block), body, carry)
        return start, settle(total)

    _, total = jax.lax.while_loop(more, body_of_blocks, begin)
    return total


def on_host(draw: Draw) -> np.ndarray:
    """The indices of a draw of any sampler, ``[size]``, as `dpjax.data.Stream` reads them.

    For people they are ``[size, most_rows]``, also where the mask is False.

    Example:
      >>> on_host(Draw(jnp.array([3, 0, 4]), jnp.array([True, True, False]))).tolist()
      [3, 0]
    """
    return draw.on_host()[: int(draw.size)]

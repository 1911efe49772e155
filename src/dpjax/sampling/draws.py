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
      share: ``(which, of)``: every ``of``-th microbatch, starting at number ``which``.
      block: ``(count, settle)``: after every ``count`` microbatches of the share, and after the
        last, ``settle`` maps the total to the one that is continued.

    Example:
      >>> draw = Draw(jnp.array([3, 0, 4, 1, 2]), jnp.array([True, True, True, False, False]))
      >>> add = lambda rows, mask, total: total + jnp.sum(jnp.where(mask, rows, 0))
      >>> int(fold(draw, size=2, add=add, first=jnp.array(0)))
      7
    """
    size = checked_count("fold", "size", size)
    if draw.indices.ndim != draw.mask.ndim:
        raise ValueError(
            "sampling.fold: more than 2^31 - 1 examples have no rows in memory. Use a data.Stream."
        )
    which, of = share
    drawn = draw.size
    apart = of * size  # from one microbatch of a share to the next
    # Without padding, `dynamic_slice` shifts the last microbatches back, over rows already added.
    pads = [(0, apart)]
    if draw.mask.ndim == 2:
        pads.append((0, 0))  # the rows of a person
    indices = jnp.pad(draw.indices, pads)
    masks = jnp.pad(draw.mask, pads)

    # A while loop ends at the size of the draw, so Poisson draws of all sizes run in one program.
    # The loop carries the start of the next microbatch and the total.
    def body(carry: tuple[Int[Array, ""], T]) -> tuple[Int[Array, ""], T]:
        start, total = carry
        rows = jax.lax.dynamic_slice_in_dim(indices, start, size)
        mask = jax.lax.dynamic_slice_in_dim(masks, start, size)
        # Devices take turns, so their shares differ by one microbatch at most.
        return start + apart, add(rows, mask, total)

    # All shares end with the first share: the other devices wait for one whose loop ends early.
    def more(carry: tuple[Int[Array, ""], T]) -> Any:
        start, _ = carry
        return start - which * size < drawn

    begin = (jnp.asarray(which * size, jnp.int32), first)
    if block is None:
        _, total = jax.lax.while_loop(more, body, begin)
        return total
    count, settle = block

    def body_of_blocks(carry: tuple[Int[Array, ""], T]) -> tuple[Int[Array, ""], T]:
        end = carry[0] + count * apart
        start, total = jax.lax.while_loop(lambda c: more(c) & (c[0] < end), body, carry)
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

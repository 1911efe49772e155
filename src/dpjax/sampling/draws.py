# SPDX-License-Identifier: Apache-2.0
"""What is done with a draw: a fold over its microbatches, and its indices on the host."""

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
      add: ``(rows, mask, total) -> total``, with ``rows`` the indices of a microbatch and
        ``mask`` saying which of them belong to the draw: the last one is filled up.
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
    # Padded, so that the last microbatches are never shifted back.
    pads, drawn = [(0, of * size), (0, 0)][: draw.mask.ndim], draw.size
    padded = jnp.pad(draw.indices, pads), jnp.pad(draw.mask, pads)

    # A while loop on the size of the draw: an exact Poisson draw of any size runs in one program.
    def body(carry: tuple[Int[Array, ""], T]) -> tuple[Int[Array, ""], T]:
        start, total = carry
        rows, mask = (jax.lax.dynamic_slice_in_dim(x, start, size) for x in padded)
        # Devices take turns, so that their shares differ by one microbatch at most.
        return start + of * size, add(rows, mask, total)

    # By the first share's place: a device that ended its loop early would leave the others waiting.
    def more(carry: tuple[Int[Array, ""], T]) -> Any:
        return carry[0] - which * size < drawn

    start = (jnp.asarray(which * size, jnp.int32), first)
    if block is None:
        return jax.lax.while_loop(more, body, start)[1]
    count, settle = block

    def settled(carry: tuple[Int[Array, ""], T]) -> tuple[Int[Array, ""], T]:
        end = carry[0] + count * of * size
        place, total = jax.lax.while_loop(lambda c: more(c) & (c[0] < end), body, carry)
        return place, settle(total)

    return jax.lax.while_loop(more, settled, start)[1]


def on_host(draw: Draw) -> np.ndarray:
    """The indices of a draw of any sampler, ``[size]``, as `dpjax.data.Stream` reads them.

    Of people they are ``[size, most_rows]``, with the places that the mask leaves out.

    Example:
      >>> on_host(Draw(jnp.array([3, 0, 4]), jnp.array([True, True, False]))).tolist()
      [3, 0]
    """
    return draw.on_host()[: int(draw.size)]

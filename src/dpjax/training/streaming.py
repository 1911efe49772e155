# SPDX-License-Identifier: Apache-2.0
"""Steps on data that stay on disk: the host reads the rows of each draw.

The draw, the microbatches and the noise are the same as in `private_step`; the host only hands the
rows over. It reads the next microbatches while the device works, and sums a draw that is larger
than memory microbatch by microbatch before the noise is added.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from dpjax.data import Stream
from dpjax.gradients.batching import microbatches_in_block, on_each
from dpjax.sampling import on_host
from dpjax.training.in_memory import Steps
from dpjax.training.info import Sums, no_sums
from dpjax.training.recipe import Recipe, layout_of
from dpjax.training.step import add_clipped, draw_step, end_block, release
from dpjax.types import PyTree, State


def streamed(recipe: Recipe, stream: Stream) -> Steps:
    """Steps on data that are read by index.

    Args:
      recipe: What the run does.
      stream: Where examples are read.
    """

    def devices(state: State) -> int:
        return layout_of(recipe, state.params, stream.row).devices

    def start(state: State) -> Sums:
        layout = layout_of(recipe, state.params, stream.row)
        empty = on_each(lambda _, p: no_sums(recipe.mechanism, p, layout), layout.devices)
        return empty(state.params)

    def add(state: State, rows: PyTree, mask: Any, sums: Sums) -> Sums:
        def share(which: Any, state: State, rows: PyTree, mask: Any, sums: Sums) -> Sums:
            return add_clipped(recipe, state, rows, mask, jax.tree.map(lambda x: x[0], sums))

        return on_each(share, devices(state), split={1, 2, 3})(state, rows, mask, sums)

    draw = jax.jit(lambda key, step: draw_step(recipe, key, step))
    # Only the last program of a step may reuse the state's buffers: microbatches share them.
    begin, addition = jax.jit(start), jax.jit(add, donate_argnums=3)
    settle = jax.jit(end_block, donate_argnums=0)
    finish = jax.jit(lambda state, sums: release(recipe, state, sums), donate_argnums=0)

    def run(state: State, count: int) -> tuple[State, Sums]:
        chosen = layout_of(recipe, state.params, stream.row)
        size, first, seen = chosen.microbatch_size * chosen.devices, int(state.step), []
        block = microbatches_in_block(chosen.microbatch_size)
        draws = [_pieces(draw(state.key, step), size) for step in range(first, first + count)]
        # Draws are known in advance, so rows of the next steps are read while this one runs.
        batches = stream.batches(piece for pieces in draws for piece in pieces)
        for pieces in draws:
            sums = begin(state)
            for number, (rows, mask) in enumerate(_padded(batches, len(pieces), size), 1):
                sums = addition(state, rows, mask, sums)
                if sums.gradients.high is not None and not number % block:
                    sums = settle(sums)
            state, sums = finish(state, sums)
            seen.append(sums)
        return state, jax.tree.map(lambda *x: np.stack(x), *jax.device_get(seen))

    def programs(state: State) -> list[ClosedJaxpr]:
        chosen = layout_of(recipe, state.params, stream.row)
        size = chosen.microbatch_size * chosen.devices
        rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape), x.dtype), stream.row)
        mask, sums = jax.ShapeDtypeStruct((size,), bool), jax.eval_shape(start, state)
        traced = (
            draw.trace(state.key, state.step),
            addition.trace(state, rows, mask, sums),
            settle.trace(sums),
            finish.trace(state, sums),
        )
        return [each.jaxpr for each in traced]

    return Steps(run, programs)


def _pieces(draw: Any, size: int) -> list[np.ndarray]:
    """The indices of a draw, one microbatch after the other."""
    indices = on_host(draw)
    return [indices[i : i + size] for i in range(0, len(indices), size)]


def _padded(
    batches: Iterator[PyTree], count: int, size: int
) -> Iterator[tuple[PyTree, np.ndarray]]:
    """The next microbatches with their masks. Copies of the last row fill each up to ``size``."""
    for rows in (next(batches) for _ in range(count)):
        # Copies of the last row rather than zeros: a zero row may have a NaN gradient, as of a
        # norm at 0.
        found = len(jax.tree.leaves(rows)[0])
        places = np.minimum(np.arange(size), found - 1)
        whole = rows if found == size else jax.tree.map(lambda x, p=places: x[p], rows)
        yield whole, np.arange(size) < found

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
from jax.sharding import NamedSharding, PartitionSpec

from dpjax.data import Stream
from dpjax.gradients.batching import Layout, microbatches_in_block, on_each
from dpjax.sampling import on_host
from dpjax.training.environment import repeatable
from dpjax.training.in_memory import Steps
from dpjax.training.info import Seen, Sums, no_sums
from dpjax.training.recipe import Recipe, layout_of
from dpjax.training.step import add_clipped, draw_step, end_block, release, without_optimizer
from dpjax.types import PyTree, State


def streamed(recipe: Recipe, stream: Stream) -> Steps:
    """Steps on data that are read by index.

    Args:
      recipe: What the run does.
      stream: Where examples are read.
    """

    def layout(state: State) -> Layout:
        return layout_of(recipe, state.params, stream.row)

    def start(state: State) -> Sums:
        chosen = layout(state)
        empty = on_each(lambda _, p: no_sums(recipe.mechanism, p, chosen), chosen)
        return empty(state.params)

    def add(state: State, rows: PyTree, mask: Any, sums: Sums) -> Sums:
        def share(which: Any, state: State, rows: PyTree, mask: Any, sums: Sums) -> Sums:
            return add_clipped(recipe, state, rows, mask, jax.tree.map(lambda x: x[0], sums))

        before = without_optimizer(state)
        return on_each(share, layout(state), split={1, 2, 3})(before, rows, mask, sums)

    draw = repeatable(lambda key, step: draw_step(recipe, key, step))
    # Only the last program of a step may reuse the state's buffers: microbatches share them.
    begin, addition = repeatable(start), repeatable(add, donate_argnums=3)
    settle = repeatable(end_block, donate_argnums=0)
    finish = repeatable(
        lambda state, sums: release(recipe, layout(state), state, sums), donate_argnums=0
    )

    def whole(pieces: list[np.ndarray]) -> Iterator[np.ndarray]:
        for piece in pieces:
            _require_all(recipe, stream)
            yield piece

    def run(state: State, count: int) -> tuple[State, tuple[Seen, Any]]:
        chosen = layout(state)
        size, first, seen = chosen.microbatch_size * chosen.shares, int(state.step), []
        block = microbatches_in_block(chosen.microbatch_size)
        draws = [_pieces(draw(state.key, step), size) for step in range(first, first + count)]
        place = Placement(chosen, size)
        # Draws are known in advance, so rows of the next steps are read while this one runs.
        batches = stream.batches(place.ours(piece) for pieces in draws for piece in whole(pieces))
        for pieces in draws:
            sums = begin(state)
            for number, piece in enumerate(pieces, 1):
                sums = addition(state, *place(next(batches), len(piece)), sums)
                if sums.gradients.high is not None and not number % block:
                    sums = settle(sums)
            state, last = finish(state, sums)
            seen.append(last)
        return state, jax.tree.map(lambda *x: np.stack(x), *jax.device_get(seen))

    def programs(state: State) -> list[ClosedJaxpr]:
        chosen = layout(state)
        size = chosen.microbatch_size * chosen.shares
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


def _require_all(recipe: Recipe, stream: Stream) -> None:
    """Refuses a source that became shorter: rows may have moved, and a draw may miss its own."""
    examples = recipe.mechanism.sampling.examples
    if (found := len(stream)) < examples:
        raise IndexError(
            f"{recipe.name}: the source of the data.Stream had {examples} examples and has "
            f"{found}; expected that it does not change during a run. Usually its file was cut "
            "off or another program wrote it again. Restore it and resume the run."
        )


class Placement:
    """Puts the rows of a batch on the devices of a layout: each process reads its own.

    Args:
      layout: The devices.
      size: Rows in a batch, with the padding.
    """

    def __init__(self, layout: Layout, size: int) -> None:
        self.size, self.places = size, np.arange(size)
        self.sharding: NamedSharding | None = None
        if layout.mesh is not None and layout.mesh.is_multi_process:
            self.sharding = NamedSharding(layout.mesh, PartitionSpec(layout.axes))
            held = self.sharding.addressable_devices_indices_map((size,)).values()
            # Several devices of this process may hold the same rows.
            self.places = np.unique(np.concatenate([self.places[rows] for rows in held]))

    def ours(self, piece: np.ndarray) -> np.ndarray:
        """The drawn rows that this process reads; if all of its places are padding, the last."""
        mine = piece[self.places[self.places < len(piece)]]
        return mine if len(mine) else piece[-1:]

    def __call__(self, rows: PyTree, found: int) -> tuple[PyTree, Any]:
        """The rows that this process read on its devices, and the mask of the whole batch."""
        mask, read = np.arange(self.size) < found, len(jax.tree.leaves(rows)[0])
        # Copies of the last row rather than zeros: a zero row may have a NaN gradient, as of a
        # norm at 0.
        filled = np.minimum(np.arange(len(self.places)), read - 1)
        whole = rows if read == len(filled) else jax.tree.map(lambda x: x[filled], rows)
        sharding = self.sharding
        if sharding is None:
            return whole, mask
        where = np.zeros(self.size, int)
        where[self.places] = np.arange(len(self.places))

        def put(array: np.ndarray, where: np.ndarray) -> jax.Array:
            def part(at: Any) -> np.ndarray:
                return array[where[at[0]]]

            shape = (self.size, *array.shape[1:])
            return jax.make_array_from_callback(shape, sharding, part)

        return jax.tree.map(lambda x: put(x, where), whole), put(mask, np.arange(self.size))

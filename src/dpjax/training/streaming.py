# SPDX-License-Identifier: Apache-2.0
"""Steps on data that stay on disk: the host reads the rows of each draw.

The draw, the microbatches and the noise are the same as in `private_step`. The host reads the next
microbatches while the device works.
"""

from __future__ import annotations

import functools
import itertools
import types
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dpjax.data import Stream
from dpjax.gradients.batching import Layout, microbatches_in_block, on_each
from dpjax.sampling import on_host
from dpjax.training.info import Seen, Sums, no_sums
from dpjax.training.recipe import Recipe, bound_to, held_on, layout_of
from dpjax.training.step import add_clipped, end_block, release, without_optimizer
from dpjax.types import PyTree, State


class Streamed:
    """Steps on data that are read by index, with the methods of `InMemory`."""

    def __init__(self, recipe: Recipe, stream: Stream, shared: PyTree) -> None:
        self._recipe, self._stream = bound_to(recipe, shared), stream
        self._programs_on = functools.lru_cache(maxsize=4)(functools.partial(_programs, recipe))
        held = functools.partial(held_on, recipe, shared)
        self._held_on = functools.lru_cache(maxsize=1)(held)

    def run(self, state: State, count: int) -> tuple[State, Seen]:
        """Takes steps; see `InMemory.run`."""
        layout = layout_of(self._recipe, state.params, self._stream.row)
        its, shared = self._programs_on(layout), self._held_on(layout.mesh)
        size, first, seen = layout.microbatch_size * layout.shares, int(state.step), []
        block = microbatches_in_block(layout.microbatch_size)
        draws, epoch_key = [], state.epoch_key
        for step in range(first, first + count):
            draw, epoch_key = its.draw(state.key, state.noise_key, epoch_key, step)
            indices, mask = on_host(draw), np.asarray(draw.mask)
            cuts = [slice(i, i + size) for i in range(0, len(indices), size)]
            draws.append([(indices[cut], mask[cut][: len(indices[cut])]) for cut in cuts])
        place = _Placement(layout, size)
        # Draws are known in advance, so rows of the next steps are read while this one runs.
        pieces = (place.ours(indices) for indices, _ in itertools.chain.from_iterable(draws))
        batches = self._stream.batches(pieces)
        for microbatches in draws:
            sums = its.begin(state)
            for number, (_, mask) in enumerate(microbatches, 1):
                sums = its.add((state, shared), *place(next(batches), mask), sums)
                if sums.gradients.high is not None and not number % block:
                    sums = its.settle(sums)
            state, last = its.finish(state, sums)
            seen.append(last)
        state = state._replace(epoch_key=epoch_key)
        return state, jax.tree.map(lambda *x: np.stack(x), *jax.device_get(seen))


def _programs(recipe: Recipe, layout: Layout) -> types.SimpleNamespace:
    def begin(state: State) -> Sums:
        empty = on_each(lambda _, params: no_sums(recipe.mechanism, params, layout), layout)
        return empty(state.params)

    def add(held: tuple[State, PyTree], rows: PyTree, mask: Any, sums: Sums) -> Sums:
        def share(which: Any, held: Any, rows: PyTree, mask: Any, sums: Sums) -> Sums:
            state, shared = held
            its = bound_to(recipe, shared)
            return add_clipped(its, state, rows, mask, jax.tree.map(lambda x: x[0], sums))

        held = without_optimizer(held[0]), held[1]
        return on_each(share, layout, split={1, 2, 3})(held, rows, mask, sums)

    # Only the last program of a step may reuse the state's buffers: microbatches share them.
    return types.SimpleNamespace(
        draw=jax.jit(recipe.mechanism.sampling.drawn),
        begin=jax.jit(begin),
        add=jax.jit(add, donate_argnums=3),
        settle=jax.jit(end_block, donate_argnums=0),
        finish=jax.jit(functools.partial(release, recipe, layout), donate_argnums=0),
    )


class _Placement:
    """Puts the rows of a batch on the devices of a layout: each process reads its own."""

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

    def __call__(self, rows: PyTree, drawn: np.ndarray) -> tuple[PyTree, Any]:
        """The rows that this process read on its devices, and the mask of the whole batch."""
        mask, read = np.zeros((self.size, *drawn.shape[1:]), bool), len(jax.tree.leaves(rows)[0])
        mask[: len(drawn)] = drawn
        # Copies of the last row: a zero row may have a NaN gradient, as of a norm at 0.
        filled = np.minimum(np.arange(len(self.places)), read - 1)
        rows = rows if read == len(filled) else jax.tree.map(lambda x: x[filled], rows)
        sharding = self.sharding
        if sharding is None:
            return rows, mask
        where = np.zeros(self.size, int)
        where[self.places] = np.arange(len(self.places))

        def put(array: np.ndarray, where: np.ndarray) -> jax.Array:
            def rows_at(at: Any) -> np.ndarray:
                return array[where[at[0]]]

            return jax.make_array_from_callback((self.size, *array.shape[1:]), sharding, rows_at)

        return jax.tree.map(lambda x: put(x, where), rows), put(mask, np.arange(self.size))

# SPDX-License-Identifier: Apache-2.0
"""Steps on data that stay on disk: the host reads the rows of each draw.

Draw, microbatches and noise are the same as in `private_step`. All draws of a call follow from keys
and step numbers, so the host reads the next rows while the device works.

A layout divides each microbatch into shares, one for each device of the batch. A program of
`layout.on_each` runs on all of them, and stacks their results along a leading axis of shares.
"""

from __future__ import annotations

import functools
import itertools
import types
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dpjax._stream import Stream
from dpjax.gradients import Layout
from dpjax.sampling import on_host
from dpjax.training.info import Seen, Sums, no_sums
from dpjax.training.recipe import Recipe, bound_to, held_on, layout_of
from dpjax.training.step import add_clipped, end_block, release, without_optimizer
from dpjax.types import Key, PyTree, State


class _Microbatch(NamedTuple):
    """Part of a draw, on the host."""

    indices: np.ndarray
    """The drawn rows: ``[size]``, or ``[size, most_rows]`` if people are drawn."""
    mask: np.ndarray
    """In the shape of the indices; False for padding among the rows of a person."""


class Streamed:
    """Steps on data that are read by index, with the methods of `InMemory`."""

    def __init__(self, recipe: Recipe, stream: Stream, shared: PyTree) -> None:
        self._recipe = bound_to(recipe, shared)
        self._stream = stream
        programs = functools.partial(_programs, recipe)
        # A run has one layout, unless its parameters change their shapes.
        self._programs_on = functools.lru_cache(maxsize=4)(programs)
        held = functools.partial(held_on, recipe, shared)
        self._held_on = functools.lru_cache(maxsize=1)(held)

    def run(self, state: State, count: int) -> tuple[State, Seen]:
        """The state after ``count`` steps, and their `Seen`, with arrays ``[count, ...]``.

        It donates the buffers of ``state``.
        """
        layout = layout_of(self._recipe, state.params, self._stream.row)
        programs = self._programs_on(layout)
        shared = self._held_on(layout.mesh)
        placement = _Placement(layout)
        draws, epoch_key = _drawn(programs, state, count, placement.size)

        # The stream reads the rows of the next microbatches in its own threads.
        rows_of_microbatches = self._stream.batches(
            placement.own_rows(microbatch.indices)
            for microbatch in itertools.chain.from_iterable(draws)
        )
        seen = []
        for draw in draws:
            sums = programs.begin(state)
            for number, microbatch in enumerate(draw, 1):
                rows, mask = placement(next(rows_of_microbatches), microbatch.mask)
                sums = programs.add((state, shared), rows, mask, sums)
                # A large draw is summed in blocks, to bound the rounding errors; `high` is the sum
                # of the blocks that have ended.
                has_blocks = sums.gradients.high is not None
                if has_blocks and number % layout.microbatches_in_block == 0:
                    sums = programs.settle(sums)
            state, seen_in_step = programs.finish(state, sums)
            seen.append(seen_in_step)
        state = state._replace(epoch_key=epoch_key)
        return state, jax.tree.map(lambda *of_steps: np.stack(of_steps), *jax.device_get(seen))


def _drawn(
    programs: Any, state: State, count: int, size: int
) -> tuple[list[list[_Microbatch]], Key | None]:
    """A list of microbatches of ``size`` for each of ``count`` steps, and the next epoch key.

    The epoch key is for a sampler with `Bins`, which draws all batches of an epoch together; other
    samplers have None. ``programs`` is the result of `_programs`, with the sampler's ``draw``.
    """
    draws = []
    first_step = int(state.step)
    epoch_key = state.epoch_key
    for step in range(first_step, first_step + count):
        draw, epoch_key = programs.draw(state.key, state.noise_key, epoch_key, step)
        indices = on_host(draw)
        # Drawn examples, or persons, come first, and `on_host` leaves out the padding behind them.
        # The mask still has False for padding among the rows of a person.
        mask = np.asarray(draw.mask)[: len(indices)]
        starts = range(0, len(indices), size)
        draws.append([_Microbatch(indices[i : i + size], mask[i : i + size]) for i in starts])
    return draws, epoch_key


def _programs(recipe: Recipe, layout: Layout) -> types.SimpleNamespace:
    """The compiled parts of a step on this layout, in the order in which they run.

    A function that `layout.on_each` runs for each share gets the number of the share as its first
    argument, which no part needs.
    """

    def begin(state: State) -> Sums:
        """Zeros for each share."""
        zeros = layout.on_each(lambda _, params: no_sums(recipe.mechanism, params, layout))
        return zeros(state.params)

    def add(whole: tuple[State, PyTree], rows: PyTree, mask: Any, sums: Sums) -> Sums:
        """Adds a microbatch: each share its own rows to its own sums.

        ``rows`` and ``mask`` are ``[size, ...]``, and ``sums`` are ``[shares, ...]``.
        """

        def add_share(_: Any, whole: Any, rows: PyTree, mask: Any, sums: Sums) -> Sums:
            state, shared = whole
            recipe_with_shared = bound_to(recipe, shared)
            # The sums of one share are [1, ...] here; `on_each` adds the axis of shares again.
            sums = jax.tree.map(lambda x: x[0], sums)
            return add_clipped(recipe_with_shared, state, rows, mask, sums)

        state, shared = whole
        whole = (without_optimizer(state), shared)
        # Every share gets argument 0 as a whole, and its part of arguments 1 to 3.
        return layout.on_each(add_share, split={1, 2, 3})(whole, rows, mask, sums)

    finish = functools.partial(release, recipe, layout)
    # Only the last program of a step may reuse the state's buffers: all microbatches read them.
    return types.SimpleNamespace(
        draw=jax.jit(recipe.mechanism.sampling.drawn),
        begin=jax.jit(begin),
        add=jax.jit(add, donate_argnums=3),
        settle=jax.jit(end_block, donate_argnums=0),
        finish=jax.jit(finish, donate_argnums=0),
    )


class _Placement:
    """Puts microbatches on the devices of a layout; each process reads the rows of its devices.

    A microbatch has ``size`` places. ``places`` are those whose rows this process reads; if there
    is only one process, these are all, and ``sharding`` is None.
    """

    def __init__(self, layout: Layout) -> None:
        self.size = layout.microbatch_size * layout.shares
        self.places = np.arange(self.size)
        self.sharding: NamedSharding | None = None
        if layout.mesh is not None and layout.mesh.is_multi_process:
            self.sharding = NamedSharding(layout.mesh, PartitionSpec(layout.axes))
            slices = self.sharding.addressable_devices_indices_map((self.size,)).values()
            # Several devices of this process may hold the same rows.
            self.places = np.unique(np.concatenate([self.places[rows] for rows in slices]))

    def own_rows(self, indices: np.ndarray) -> np.ndarray:
        """The indices that this process reads; the last one if all of its places are padding."""
        places = self.places[self.places < len(indices)]
        if len(places) == 0:
            return indices[-1:]
        return indices[places]

    def __call__(self, rows: PyTree, drawn: np.ndarray) -> tuple[PyTree, Any]:
        """A microbatch with padding, for the devices: its rows and its mask, ``[size, ...]``.

        ``rows`` are the rows that this process read, and ``drawn`` is the mask of the microbatch
        without padding.
        """
        mask = np.zeros((self.size, *drawn.shape[1:]), bool)
        mask[: len(drawn)] = drawn
        rows_read = len(jax.tree.leaves(rows)[0])
        if rows_read < len(self.places):
            # Padding repeats the last row: a zero row may have a NaN gradient, as of a norm at 0.
            with_padding = np.minimum(np.arange(len(self.places)), rows_read - 1)
            rows = jax.tree.map(lambda x: x[with_padding], rows)
        sharding = self.sharding
        # A single process has no sharding; the program that takes these arrays moves them.
        if sharding is None:
            return rows, mask
        # The row of this process that stands at each place; 0 at the places of other processes,
        # which no device of this process asks for.
        where = np.zeros(self.size, int)
        where[self.places] = np.arange(len(self.places))
        rows = jax.tree.map(lambda x: _global(x, where, sharding), rows)
        # Each process has the whole mask, so place i has its entry i.
        return rows, _global(mask, np.arange(self.size), sharding)


def _global(array: np.ndarray, where: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """The sharded array of all processes, ``[len(where), ...]``; each device holds its own rows.

    ``array`` has the rows of this process, and row i of the result is its row ``where[i]``.
    """

    def rows_at(index: Any) -> np.ndarray:
        return array[where[index[0]]]

    shape = (len(where), *array.shape[1:])
    return jax.make_array_from_callback(shape, sharding, rows_at)

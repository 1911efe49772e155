# SPDX-License-Identifier: Apache-2.0
"""Steps on data that stay on disk: rows are read as they are drawn.

The sampler is the same exact one as for data on the device, and a step has the same draw
and the same noise: only where rows come from differs.  The next microbatches are read while the
present one is worked on.  A draw that is larger than memory is added up microbatch by
microbatch, and noise is added once.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from dpjax.data import Stream
from dpjax.gradients.batching import on_each
from dpjax.training.step import Recipe, Steps, Sums, microbatches, nothing, release
from dpjax.types import Key, PyTree


def streamed(recipe: Recipe, stream: Stream) -> Steps:
    """Steps on data that are read by index.

    Args:
      recipe: What is run.
      stream: Where examples are read.

    Returns:
      What `resident` returns.
    """
    draw = jax.jit(recipe.mechanism.sampling.draw)

    def start(params: PyTree) -> Sums:
        devices = microbatches(recipe, params, stream.row).devices
        return on_each(lambda which, params: nothing(recipe, params), devices)(params)

    def add(params: PyTree, at: Any, rows: PyTree, mask: Any, sums: Sums) -> Sums:
        found = microbatches(recipe, params, stream.row)

        def share(which: Any, params: PyTree, at: Any, rows: PyTree, mask: Any, sums: Sums) -> Sums:
            own = jax.tree.map(lambda x: x[0], sums)
            return found.add(params, at, rows, mask, own)

        return on_each(share, found.devices, split={2, 3, 4})(params, at, rows, mask, sums)

    # Only the last one takes the buffers of parameters: microbatches share them.
    start, add = jax.jit(start), jax.jit(add, donate_argnums=4)
    finish = jax.jit(
        lambda key, params, moved, sums: release(recipe, key, params, moved, sums),
        donate_argnums=(1, 2),
    )

    def steps(params: PyTree, moved: Any, key: Key, count: int) -> tuple[PyTree, Any, Sums]:
        found = microbatches(recipe, params, stream.row)
        size, infos, first = found.size * found.devices, [], int(moved[0].step)
        draws = [_chosen(draw(key, step), size) for step in range(first, first + count)]
        batches = stream.batches(piece for pieces in draws for piece in pieces)
        for pieces in draws:
            sums = start(params)
            for rows in (next(batches) for _ in pieces):
                sums = add(params, moved[0], *_padded(rows, size), sums)
            params, moved, info = finish(key, params, moved, sums)
            infos.append(info)
        return params, moved, jax.tree.map(lambda *x: np.stack(x), *jax.device_get(infos))

    return steps


def _chosen(draw: Any, size: int) -> list[np.ndarray]:
    """The rows of a draw, a microbatch at a time."""
    indices = np.asarray(draw.indices)[: int(draw.size)]
    return [indices[i : i + size] for i in range(0, len(indices), size)]


def _padded(rows: PyTree, size: int) -> tuple[PyTree, np.ndarray]:
    """As many rows as a microbatch has, copies of the last one filling it, and their mask."""
    count = len(jax.tree.leaves(rows)[0])
    places = np.minimum(np.arange(size), count - 1)
    whole = rows if count == size else jax.tree.map(lambda x: x[places], rows)
    return whole, np.arange(size) < count

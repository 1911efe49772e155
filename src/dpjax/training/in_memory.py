# SPDX-License-Identifier: Apache-2.0
"""Steps on data in device memory: one compiled program, several steps per dispatch.

Neither the size of a draw nor the number of steps compiles a second program.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from dpjax import meshes
from dpjax.training.info import Seen, nothing_seen
from dpjax.training.recipe import Home, Recipe, held_on
from dpjax.training.step import private_step
from dpjax.types import PyTree, State

# Steps in one dispatch: what all of them saw has a place in one buffer.
_MOST = 512


class InMemory:
    """Steps on data in device memory; ``shared`` as for `assemble`."""

    def __init__(self, recipe: Recipe, data: PyTree, home: Home, shared: PyTree) -> None:
        self._home = home
        # Whole on every device: a draw takes rows from everywhere.
        data = meshes.whole(data, recipe.mesh)
        shared = held_on(recipe, shared, recipe.mesh)

        # The layout's mesh is known with the parameters. Left where they are, arrays that are
        # committed to one device would be refused by JAX, and others copied in every dispatch.
        @functools.lru_cache(maxsize=1)
        def held(mesh: Mesh | None) -> tuple[PyTree, PyTree]:
            return meshes.whole(data, mesh), held_on(recipe, shared, mesh)

        self._held_on = held
        self._compiled = functools.lru_cache(maxsize=4)(functools.partial(_compiled, recipe))

    def run(self, state: State, count: int) -> tuple[State, Seen]:
        """The state ``count`` steps later, whose buffers it donates, and what the steps saw."""
        leaves, structure = jax.tree.flatten(state)
        mesh = self._home(state.params)
        places = None if mesh is None else tuple(leaf.sharding for leaf in leaves)
        several, held = self._compiled(places, structure), self._held_on(mesh)
        parts = []
        while count > 0:
            # One program serves every count, because the buffer has a fixed size.
            some = min(count, _MOST)
            state, seen = several(state, *held, some)
            parts.append(jax.tree.map(lambda x, n=some: x[:n], jax.device_get(seen)))
            count -= some
        return state, jax.tree.map(lambda *x: np.concatenate(x), *parts)


# Of the module: a method in its object's own cache would keep the data in memory.
def _compiled(recipe: Recipe, places: tuple[Any, ...] | None, structure: Any) -> Any:
    """`private_step`, several times, on states that lie in these places."""

    def several(
        state: State, data: PyTree, shared: PyTree, count: Int[Array, ""]
    ) -> tuple[State, Seen]:
        # The trip count is an argument of the loop: no number of steps compiles a new program, and
        # a run is the same to the last bit however it is cut into dispatches.
        def body(i: Int[Array, ""], carry: tuple[State, Any]) -> tuple[State, Any]:
            state, seen = carry
            state, last = private_step(recipe, data, state, shared)
            return state, jax.tree.map(lambda all_, this: all_.at[i].set(this), seen, last)

        none = nothing_seen(recipe.mechanism)
        seen = jax.tree.map(lambda x: jnp.zeros((_MOST, *x.shape), x.dtype), none)
        return jax.lax.fori_loop(0, count, body, (state, seen))

    # What a step returns lies where it lay before, so the next step finds the same program.
    out = None if places is None else (structure.unflatten(places), None)
    return jax.jit(several, donate_argnums=0, out_shardings=out)

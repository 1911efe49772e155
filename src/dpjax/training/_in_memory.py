# SPDX-License-Identifier: Apache-2.0
"""Steps on data in device memory: one compiled program, several steps per dispatch.

Neither the size of a draw nor the number of steps compiles a second program. Each step reports
`Seen`: secret sums over its draw, for example of losses and gradient norms.
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

# The most steps in one dispatch. One buffer holds what all of them report.
_MOST = 512


class InMemory:
    """Steps on data in device memory.

    ``home`` maps parameters to the mesh of the run. ``shared`` are arrays that the loss takes after
    the example, or None.
    """

    def __init__(self, recipe: Recipe, data: PyTree, home: Home, shared: PyTree) -> None:
        self._home = home
        # Every device has all data, because a draw takes rows from everywhere.
        data = meshes.whole(data, recipe.mesh)
        shared = held_on(recipe, shared, recipe.mesh)

        # The mesh of the layout is known when the parameters are. Arrays are then moved to it: JAX
        # refuses arrays that are committed to one device, and copies others in every dispatch.
        @functools.lru_cache(maxsize=1)
        def held(mesh: Mesh | None) -> tuple[PyTree, PyTree]:
            return meshes.whole(data, mesh), held_on(recipe, shared, mesh)

        self._held_on = held
        compiled = functools.partial(_compiled, recipe)
        # A run needs one program, unless the structure or the devices of its state change.
        self._compiled = functools.lru_cache(maxsize=4)(compiled)

    def run(self, state: State, count: int) -> tuple[State, Seen]:
        """The state after ``count`` steps, and their `Seen`, with arrays ``[count, ...]``.

        It donates the buffers of ``state``.
        """
        mesh = self._home(state.params)
        data, shared = self._held_on(mesh)
        # Shardings and structure of the state are the key of the cache of programs.
        leaves, structure = jax.tree.flatten(state)
        shardings = None
        if mesh is not None:
            shardings = tuple(leaf.sharding for leaf in leaves)
        run_several = self._compiled(shardings, structure)
        seen = []  # of each dispatch, [steps, ...]
        while count > 0:
            # The buffer has a fixed size, so one program serves every count.
            steps = min(count, _MOST)
            state, buffer = run_several(state, data, shared, steps)
            filled = jax.tree.map(lambda x, end=steps: x[:end], jax.device_get(buffer))
            seen.append(filled)
            count -= steps
        return state, jax.tree.map(lambda *x: np.concatenate(x), *seen)


# A function of the module, because `InMemory` holds the cache of programs, and the cache of a bound
# method holds the object. Such a cycle keeps the data in device memory until Python collects it.
def _compiled(recipe: Recipe, shardings: tuple[Any, ...] | None, structure: Any) -> Any:
    """The compiled program of several steps of `private_step`, for states of this structure.

    The program maps ``(state, data, shared, count)`` to the state after ``count`` steps and a
    buffer: `Seen` with a leading axis of `_MOST` steps. ``shardings`` has the sharding of each leaf
    of the state, or is None on a single device.
    """

    def several(
        state: State, data: PyTree, shared: PyTree, count: Int[Array, ""]
    ) -> tuple[State, Seen]:
        # Row i of the buffer is for step i of this dispatch.
        zero = nothing_seen(recipe.mechanism)
        buffer = jax.tree.map(lambda x: jnp.zeros((_MOST, *x.shape), x.dtype), zero)

        def body(i: Int[Array, ""], carry: tuple[State, Seen]) -> tuple[State, Seen]:
            state, buffer = carry
            state, seen = private_step(recipe, data, state, shared)
            return state, jax.tree.map(lambda rows, row: rows.at[i].set(row), buffer, seen)

        # The trip count is an argument of the loop. So no number of steps compiles a new program,
        # and a run has the same bits however it is divided into dispatches.
        return jax.lax.fori_loop(0, count, body, (state, buffer))

    if shardings is None:
        return jax.jit(several, donate_argnums=0)
    # The returned state keeps the shardings of the given one. Otherwise the next dispatch compiles
    # again, because `InMemory` looks its program up by them. For the buffer (None) XLA chooses.
    state_shardings = structure.unflatten(shardings)
    return jax.jit(several, donate_argnums=0, out_shardings=(state_shardings, None))

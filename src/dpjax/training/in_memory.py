# SPDX-License-Identifier: Apache-2.0
"""Steps on data that fit on the device: one program, several steps a dispatch.

The draw, the gathering of its rows, the private gradient, the noise and the update are
one compiled program, which runs as many steps as it is asked for before it answers, so
that the host is busy once in many steps.  A draw of any size takes as many microbatches
as it needs; a step, and the number of steps, never compile anything anew.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from dpjax import sampling, trees
from dpjax.gradients.batching import on_each
from dpjax.training.step import (
    Recipe,
    Steps,
    Sums,
    microbatches,
    nothing,
    release,
    seen,
)
from dpjax.types import Draw, Key, PyTree

_MOST = 512  # steps in one dispatch


def resident(recipe: Recipe, data: PyTree) -> Steps:
    """Steps on data that lie on the device.

    Args:
      recipe: What is run.
      data: A tree of arrays with one example a row.

    Returns:
      ``(params, optimizer state, key, count)`` to the same after ``count`` steps, and the
      infos of all of them.  The buffers of parameters and optimizer state are reused.
    """
    data = jax.tree.map(jnp.asarray, data)

    def one(params: PyTree, moved: Any, key: Key, data: PyTree) -> tuple[PyTree, Any, Sums]:
        draw = recipe.mechanism.sampling.draw(key, moved[0].step)
        size, devices, add = microbatches(recipe, params, trees.one_row(data))

        def share(which: Any, draw: Draw, params: PyTree, at: Any, data: PyTree) -> Sums:
            def taken(rows: Int[Array, " size"], mask: Bool[Array, " size"], sums: Sums) -> Sums:
                return add(params, at, jax.tree.map(lambda x: x[rows], data), mask, sums)

            return sampling.fold(draw, size, taken, nothing(recipe, params), (which, devices))

        sums = on_each(share, devices)(draw, params, moved[0], data)
        return release(recipe, key, params, moved, sums)

    def several(
        params: PyTree, moved: Any, key: Key, data: PyTree, count: Int[Array, ""]
    ) -> tuple[PyTree, Any, Sums]:
        def body(i: Int[Array, ""], carry: tuple[PyTree, Any, Sums]) -> tuple[PyTree, Any, Sums]:
            params, moved, infos = carry
            params, moved, info = one(params, moved, key, data)
            infos = jax.tree.map(lambda all_, this: all_.at[i].set(this), infos, info)
            return params, moved, infos

        infos = jax.tree.map(
            lambda x: jnp.zeros((_MOST, *x.shape), x.dtype), seen(nothing(recipe, params))
        )
        return jax.lax.fori_loop(0, count, body, (params, moved, infos))

    compiled = jax.jit(several, donate_argnums=(0, 1))

    def steps(params: PyTree, moved: Any, key: Key, count: int) -> tuple[PyTree, Any, Sums]:
        parts = []
        while count > 0:
            some = min(count, _MOST)
            params, moved, infos = compiled(params, moved, key, data, some)
            parts.append(jax.tree.map(lambda x, n=some: x[:n], jax.device_get(infos)))
            count -= some
        return params, moved, jax.tree.map(lambda *x: np.concatenate(x), *parts)

    return steps

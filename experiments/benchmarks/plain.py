# SPDX-License-Identifier: Apache-2.0
"""The gradient of the mean loss in three forms: what a private step is compared with.

  plain        `jax.grad`, the whole batch in one call, as users write it
  plain scan   the same, added up over the microbatches and devices that `dpjax auto` takes: the
               yardstick of memory, slow where XLA compiles convolutions in loops badly
  plain fast   `dpjax.gradients.plain_grad`: in microbatches, by the means of the private one

Nothing here is private.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from dpjax import gradients


def plain_gradients(loss: Any) -> dict[str, Any]:
    """Gradients of the mean loss, without privacy."""

    def mean_loss(params: Any, batch: Any) -> Any:
        return jnp.mean(jax.vmap(loss, (None, 0))(params, batch))

    return {
        "plain": jax.grad(mean_loss),
        "plain scan": accumulated(loss),
        "plain fast": gradients.plain_grad(loss),
    }


def accumulated(loss: Any) -> Any:
    """The plain gradient, as a loop over the microbatches that dpjax chooses for its own."""

    def gradient(params: Any, batch: Any) -> Any:
        size, example = len(batch[1]), jax.tree.map(lambda x: x[0], batch)
        layout = gradients.layout(loss, params, example, size)
        micro, devices = layout.microbatch_size, layout.shares
        micro = math.gcd(size // devices, micro)

        def mean_part(params: Any, some: Any) -> Any:
            return jnp.sum(jax.vmap(loss, (None, 0))(params, some)) / size

        def on_one(params: Any, share: Any) -> Any:
            def add(total: Any, some: Any) -> tuple[Any, None]:
                return jax.tree.map(jnp.add, total, jax.grad(mean_part)(params, some)), None

            folded = jax.tree.map(lambda x: x.reshape(-1, micro, *x.shape[1:]), share)
            total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), folded)
            return jax.lax.psum(total, "batch")

        mesh = Mesh(np.array(jax.devices()[:devices]), ("batch",))
        specs = {"in_specs": (P(), P("batch")), "out_specs": P(), "check_vma": False}
        return jax.shard_map(on_one, mesh=mesh, **specs)(params, batch)

    return gradient

# SPDX-License-Identifier: Apache-2.0
"""Refuses sharded batches where XLA's results would be wrong.

If a batch is sharded over several devices, XLA partitions the program itself. It partitions the
kernel gradients of vmapped convolutions wrongly (jaxlib 0.10.2, CPU; ``jax.vmap(jax.grad(loss))``
too): the error is as large as the gradient, and there is no warning.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax

from dpjax.types import PyTree


def refuse_split(call: str, batch: PyTree) -> None:
    """Raises, now or at compilation, if the batch is sharded over several devices."""
    # Inside a shard_map over all axes XLA partitions nothing. Over some, as with `model`, the
    # layout leaves no such convolution to XLA.
    inside = jax.sharding.get_abstract_mesh().manual_axes  # each device has a program of its own
    if jax.device_count() == 1 or inside:
        return
    for leaf in jax.tree.leaves(batch):
        if isinstance(leaf, jax.Array):  # NumPy arrays are on no device yet
            # Inside `jit` the compiler chooses shardings, so the question is put to the compiled
            # program.
            jax.debug.inspect_array_sharding(leaf, callback=partial(_refuse, call))


def _refuse(call: str, sharding: Any) -> None:
    if not sharding.is_fully_replicated:
        count = len(sharding.device_set)
        raise ValueError(
            f"{call}: the batch lies on {count} devices, and XLA computes kernel gradients wrongly "
            f"when it partitions them. Give devices={count}, or put the batch on one device."
        )

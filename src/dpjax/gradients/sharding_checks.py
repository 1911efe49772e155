# SPDX-License-Identifier: Apache-2.0
"""Checks of how a batch is sharded, with refusals where XLA's results would be wrong.

If a batch is sharded over several devices, XLA partitions the program itself. It partitions the
kernel gradients of vmapped convolutions wrongly (jaxlib 0.10.2, CPU; ``jax.vmap(jax.grad(loss))``
too): the error is as large as the gradient, and there is no warning. Such batches are refused.
Inside a `jax.jit` shardings are known only at compilation, so the error is raised then.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from jax.sharding import AxisType

from dpjax.types import PyTree


def refuse_meshes(call: str, batch: PyTree) -> None:
    """Raises if the type of the batch varies over a mesh, or explicit axes split it.

    A `jax.shard_map` that checks varying axes sums the gradients of shared parameters over devices
    before they can be clipped, so examples of several devices would be clipped as one. Most models
    do not run on a mesh of explicit axes.
    """
    for leaf in jax.tree.leaves(batch):
        kind = jax.typeof(leaf)
        # Read from the type of the traced value: this is known while tracing, before anything was
        # summed.
        if varying := sorted(kind.manual_axis_type.varying):
            raise ValueError(
                f"{call}: the batch varies over the axes {varying} of a jax.shard_map, which sums "
                "gradients of shared parameters over devices by itself, so that examples of "
                "several devices would be clipped as one. Give the shard_map check_vma=False; or "
                "give the batch whole and devices=..."
            )
    refuse_explicit(call, batch)


def refuse_explicit(call: str, data: PyTree) -> None:
    """Raises if a mesh of explicit axes splits the data, before JAX does within the step."""
    for leaf in jax.tree.leaves(data):
        sharding = jax.typeof(leaf).sharding
        if AxisType.Explicit in sharding.mesh.axis_types and any(sharding.spec):
            raise ValueError(
                f"{call}: the data are split by a mesh of explicit axes ({sharding.spec}); "
                "expected arrays that lie on one device, or are split by automatic axes. "
                "jax.make_mesh makes explicit axes by default, and then a loss has to give the "
                "sharding of the result of every reshape. Make the mesh with "
                "axis_types=(jax.sharding.AxisType.Auto,), or give NumPy arrays."
            )


def may_be_split() -> bool:
    """Whether XLA may partition what is traced; False only where one device is sure to run it.

    Shardings are known at compilation, too late to choose another form. One device is sure inside a
    `jax.shard_map` over all axes, under a mesh of one device, and where a single accelerator is.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        # A CPU may compile for any number of accelerators.
        return jax.device_count() > 1 or jax.default_backend() == "cpu"
    return mesh.size > 1 and set(mesh.manual_axes) != set(mesh.axis_names)


def refuse_split(call: str, batch: PyTree) -> None:
    """Raises, now or at compilation, if the batch is sharded over several devices.

    For losses in which vmapped convolutions are differentiated by their kernels.
    """
    # Inside a shard_map nothing is partitioned by XLA.
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
        count, parts = len(sharding.device_set), getattr(sharding, "spec", sharding)
        raise ValueError(
            f"{call}: the batch lies on {count} devices ({parts}), and the loss has convolutions "
            "whose kernel is differentiated for each example. XLA computes such gradients wrongly "
            f"when it partitions them over devices. Give devices={count}, so that each device "
            "runs a program of its own; or put the batch on one device. Engine 'ghost' needs such "
            "gradients for the fewest losses (gradients.explain)."
        )

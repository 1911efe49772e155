# SPDX-License-Identifier: Apache-2.0
"""Placement: where a batch lies, and what is refused there.

A batch may lie on several devices before it gets here, and then XLA splits the program
itself.  It splits the kernel gradients of vmapped convolutions wrongly (jaxlib 0.10.2, on
CPU; with ``jax.vmap(jax.grad(loss))`` alone as well): the result is off by as much as its
length, and nothing says so.  So it is refused here.  Inside a `jit` shardings are known only
once the program is compiled; it is then that the error comes.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AxisType

from dpjax.types import PyTree


def refuse_meshes(batch: PyTree) -> None:
    """Raises if JAX keeps account of which devices see what of the batch.

    Of a mesh of explicit axes most models know nothing.  And where `shard_map` checks what varies,
    the gradient of what all devices share is summed over them before anybody sees it: that of an
    example is then that of as many as there are devices, and they are clipped as one.
    """
    for leaf in jax.tree.leaves(batch):
        kind = jax.typeof(leaf)
        if kind.manual_axis_type.varying:
            raise ValueError(
                f"The batch varies over the axes {sorted(kind.manual_axis_type.varying)} of a "
                "jax.shard_map, which sums gradients of shared parameters over devices by itself, "
                "so that examples of several devices would be clipped as one. Give the shard_map "
                "check_vma=False; or give the batch whole and devices=..."
            )
        sharding = kind.sharding
        if AxisType.Explicit in sharding.mesh.axis_types and any(sharding.spec):
            raise ValueError(
                f"The batch is split by a mesh of explicit axes ({sharding.spec}); "
                "expected one that lies on one device, or is split by a mesh of automatic axes. "
                "Explicit ones are what jax.make_mesh gives by default, and with them a loss has "
                "to say of every reshape where its result lies. Make the mesh with "
                "axis_types=(jax.sharding.AxisType.Auto,), or give the batch whole and devices=..."
            )


def refuse_split(batch: PyTree) -> None:
    """Raises, now or when this is compiled, if the batch lies on several devices in parts.

    To be asked where vmapped convolutions are differentiated by their kernels.
    """
    inside = jax.sharding.get_abstract_mesh().manual_axes  # each device has a program of its own
    if jax.device_count() == 1 or inside:
        return
    for leaf in jax.tree.leaves(batch):
        if isinstance(leaf, jax.Array):  # NumPy's lie on no device yet
            jax.debug.inspect_array_sharding(leaf, callback=_refuse)


def _refuse(sharding: Any) -> None:
    if not sharding.is_fully_replicated:
        count, parts = len(sharding.device_set), getattr(sharding, "spec", sharding)
        raise ValueError(
            f"The batch lies on {count} devices ({parts}), and the loss has "
            "convolutions of which each example's own kernel gradient is wanted. XLA computes "
            "those wrongly where it splits them between devices. Give devices="
            f"{count}, so that each device runs a program of its own; or put the batch on one "
            "device. Of engines 'ghost' wants them of the fewest losses (gradients.explain)."
        )

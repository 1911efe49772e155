# SPDX-License-Identifier: Apache-2.0
"""Refuses to clip where a row may be the sum of several examples, or where JAX cannot add rows.

A `jax.shard_map` that tracks which values vary over its axes, as it does by default, sums the
gradient of a parameter that all devices share over these devices, before clipping.
"""

from __future__ import annotations

import jax
from jax.sharding import AxisType

from dpjax.types import PyTree


def refuse_tracking(call: str) -> None:
    """Raises inside a `jax.shard_map` that tracks varying values, over one device too."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if not axes:
        return
    # The number of a device varies wherever JAX tracks varying values. Arguments cannot show it:
    # the loss may close over the shard.
    number = jax.make_jaxpr(lambda: jax.lax.axis_index(axes))().out_avals[0]
    if number.manual_axis_type.varying:
        raise ValueError(
            f"{call}: a jax.shard_map that checks varying values sums gradients before clipping. "
            "Give it check_vma=False."
        )


def refuse_explicit(call: str, name: str, tree: PyTree) -> None:
    """Raises if a mesh of explicit axes splits arrays: most models do not run on such a mesh."""
    for leaf in jax.tree.leaves(tree):
        sharding = jax.typeof(leaf).sharding
        if AxisType.Explicit in sharding.mesh.axis_types and any(sharding.spec):
            raise ValueError(
                f"{call}: a mesh of explicit axes splits the {name}. Make it with "
                "axis_types=(jax.sharding.AxisType.Auto,)."
            )

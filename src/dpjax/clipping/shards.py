# SPDX-License-Identifier: Apache-2.0
"""Refuses to clip where a row may be the sum of several examples, or where JAX cannot add rows.

Clipping bounds what one row moves, so a row has to be the gradient of one example. A
`jax.shard_map` that tracks which values vary over its axes, as it does by default, breaks this: it
sums the gradient of a parameter that all devices share over these devices, before clipping.
"""

from __future__ import annotations

import jax
from jax.sharding import AxisType

from dpjax.types import PyTree


def refuse_tracking(call: str) -> None:
    """Raises inside a `jax.shard_map` that tracks varying values.

    Over one device too, where it would do no harm: the same program is for more of them.

    Args:
      call: How errors call the function that clips.
    """
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if not axes:
        return
    # Arguments cannot show it: the loss may close over the shard, and gradients that were summed
    # do not vary. The number of a device varies wherever JAX tracks varying values.
    number = jax.make_jaxpr(lambda: jax.lax.axis_index(axes))().out_avals[0]
    if number.manual_axis_type.varying:
        raise ValueError(
            f"{call}: it runs inside a jax.shard_map over {list(axes)} that checks varying values, "
            "and so sums gradients of shared parameters over devices by itself, so that examples "
            "of several devices would be clipped as one. Give the shard_map check_vma=False; or "
            "give dpjax.clipped_grad the whole batch and devices=..."
        )


def refuse_explicit(call: str, name: str, tree: PyTree, *, rows: bool = False) -> None:
    """Raises if a mesh of explicit axes splits arrays, before JAX does within the step.

    Most models do not run on such a mesh.

    Args:
      call: How errors call the function that received the arrays.
      name: How errors call the arrays.
      tree: The arrays.
      rows: Whether only their leading axis has to be whole.
    """
    for leaf in jax.tree.leaves(tree):
        sharding = jax.typeof(leaf).sharding
        split = any(sharding.spec[:1] if rows else sharding.spec)
        if AxisType.Explicit in sharding.mesh.axis_types and split:
            raise ValueError(
                f"{call}: the {name} are split by a mesh of explicit axes ({sharding.spec}); "
                "expected arrays that lie on one device, or are split by automatic axes. "
                "jax.make_mesh makes explicit axes by default, and then a loss has to give the "
                "sharding of the result of every reshape. Make the mesh with "
                "axis_types=(jax.sharding.AxisType.Auto,), or give NumPy arrays."
            )

# SPDX-License-Identifier: Apache-2.0
"""Meshes: the devices that share a run, and the arrays on each.

The axis ``model`` of a mesh splits parameters, the optimizer's state and the noise; all other axes
split the batch. XLA partitions convolutions and FFTs wrongly or fails: for a loss that has one,
``model`` splits the batch as well. A mesh changes no result but by last bits.
"""

from __future__ import annotations

import math
import os
import re
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from dpjax import checks, processes
from dpjax.types import PyTree

__all__ = ["MODEL", "of", "parse", "placed", "whole"]

MODEL = "model"
"""The axis that splits parameters."""

# Smaller leaves are not split: a collective costs more than a device saves.
_SMALL = 1024


def of(mesh: Mesh | None = None) -> Mesh | None:
    """The mesh of a run: the given one, else that of `jax.set_mesh`, else of all processes.

    Processes compare a given mesh, so all of them must call this. None is a run of one process
    that `dpjax.gradients.layout` places.
    """
    if mesh is None and not jax.sharding.get_abstract_mesh().empty:
        mesh = jax.sharding.get_mesh()
    if mesh is not None:
        processes.require_equal("meshes.of", lambda: {"the mesh": _named(mesh)})
        return automatic(mesh)
    if jax.process_count() == 1:
        return None
    return Mesh(np.array(jax.devices()), ("data",))


def _named(mesh: Mesh) -> str:
    """Axes and devices; None for the devices of a mesh that lies within this process."""
    processes_of_mesh = {device.process_index for device in mesh.devices.flat}
    # Programs that order devices differently wait for each other for ever.
    devices = [device.id for device in mesh.devices.flat]
    if processes_of_mesh == {jax.process_index()}:
        devices = None
    return f"{list(mesh.shape.items())} {devices}"


def automatic(mesh: Mesh) -> Mesh:
    """The mesh with automatic axes; with explicit axes JAX needs the sharding of every reshape."""
    return Mesh(mesh.devices, mesh.axis_names)


def in_force(mesh: Mesh | None) -> AbstractContextManager[Any]:
    """Puts the mesh of a run in force; None puts the caller's out of force."""
    if mesh is None:
        # JAX refuses every operation on arrays of the run's mesh under a caller's explicit axes.
        mesh = Mesh(np.empty((), object), ())
    return jax.set_mesh(mesh)


def of_host(devices: int) -> Mesh | None:
    """This process's first devices, which split the batch; None for one device."""
    if devices < 2:
        return None
    return Mesh(np.array(jax.local_devices()[:devices]), ("data",))


def host_devices() -> int:
    """How many devices a run on this machine's CPU should have; each holds all data."""
    return min(4, os.cpu_count() or 1)


def parse(text: str) -> Mesh:
    """A mesh from axes and their sizes, as command lines have them: ``"data:4,model:2"``.

    Example:
      >>> parse("data:1,model:1").axis_names
      ('data', 'model')
    """
    text = text.replace(" ", "")
    axes = re.findall(r"(\w+):(\d+)", text)
    devices = jax.devices()
    sizes = {name: int(size) for name, size in axes}
    if text != ",".join(map(":".join, axes)) or math.prod(sizes.values()) != len(devices):
        raise ValueError(
            f"meshes.parse(text={text!r}): expected axes and sizes for {len(devices)} devices, "
            "such as data:4,model:2. On a CPU, set jax_num_cpu_devices before JAX runs."
        )
    return Mesh(np.array(devices).reshape(*sizes.values()), tuple(sizes))


def splits_parameters(mesh: Mesh | None) -> bool:
    """Whether the mesh splits parameters."""
    return mesh is not None and mesh.shape.get(MODEL, 1) > 1


def placed(tree: PyTree, mesh: Mesh) -> PyTree:
    """Parameters, or a state, on a mesh.

    A leaf that lies on this mesh keeps its `PartitionSpec`, so a user's own splitting holds. Any
    other leaf is split by ``model`` along its longest axis that divides evenly, as in fully sharded
    data parallelism; small leaves are whole on every device.
    """

    def place(leaf: Any) -> Any:
        sharding = getattr(leaf, "sharding", None)
        spec = _default_spec(jnp.shape(leaf), mesh)
        if isinstance(sharding, NamedSharding):
            if sharding.mesh == mesh:
                return leaf  # as after each step, so it costs nothing
            # The user's mesh may have explicit axes, and the run's has the same devices and names
            # with automatic axes. An `AbstractMesh` has no devices to compare.
            if isinstance(sharding.mesh, Mesh) and automatic(sharding.mesh) == mesh:
                # The spec is cut to the rank of the leaf, because JAX gives a typed key that was
                # made under explicit axes a longer one.
                spec = PartitionSpec(*sharding.spec[: jnp.ndim(leaf)])
        return put(leaf, NamedSharding(mesh, spec))

    return jax.tree.map(place, tree)


def refuse_tracking(call: str) -> None:
    """Raises inside a `jax.shard_map` that tracks varying values, over one device too.

    Such a `jax.shard_map`, the default, sums the gradient of a parameter that all devices share
    over these devices, before clipping: a row is then the sum of several examples.
    """
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


def placed_rows(rows: PyTree, params: PyTree, mesh: Mesh) -> PyTree:
    """Arrays with one more axis before the parameter's own, each split as its parameter is."""

    def place(leaf: Any, array: Any) -> Any:
        return put(array, NamedSharding(mesh, PartitionSpec(None, *leaf.sharding.spec)))

    return jax.tree.map(place, params, rows)


def whole(tree: PyTree, mesh: Mesh | None) -> PyTree:
    """Arrays as a whole on every device of the mesh; without a mesh, JAX arrays."""
    if mesh is None:
        return jax.tree.map(jnp.asarray, tree)
    return jax.tree.map(lambda x: put(x, NamedSharding(mesh, PartitionSpec())), tree)


def gathered(tree: PyTree, mesh: Mesh) -> PyTree:
    """The tree, with whole copies on the mesh of arrays that are committed to other devices."""
    devices = tuple(mesh.devices.flat)

    def gather(leaf: Any) -> Any:
        if not _is_committed(leaf) or _devices(leaf.sharding) == devices:
            return leaf
        return put(leaf, NamedSharding(mesh, PartitionSpec()))

    return jax.tree.map(gather, tree)


def committed(tree: PyTree) -> tuple[Any, ...]:
    """The devices to which arrays are committed, if any; JAX refuses arrays on different ones."""
    leaves = filter(_is_committed, jax.tree.leaves(tree))
    return next((_devices(leaf.sharding) for leaf in leaves), ())


def _is_committed(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.committed


def _devices(sharding: Sharding) -> tuple[Any, ...]:
    """The devices in their order, because JAX only computes with arrays of one order."""
    mesh = getattr(sharding, "mesh", None)
    if mesh is not None:
        return tuple(mesh.devices.flat)
    return tuple(sorted(sharding.device_set, key=lambda device: device.id))


def _default_spec(shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """How `placed` splits a leaf that does not lie on the mesh."""
    parts = mesh.shape.get(MODEL, 1)
    even = [axis for axis, length in enumerate(shape) if length % parts == 0]
    if parts == 1 or math.prod(shape) < _SMALL or not even:
        return PartitionSpec()
    names: list[str | None] = [None] * len(shape)
    longest = max(even, key=lambda axis: shape[axis])
    names[longest] = MODEL
    return PartitionSpec(*names)


def put(leaf: Any, sharding: Sharding) -> Any:
    """An array, or a typed key, on the devices of a sharding, of this process or of several."""
    if checks.is_typed_key(leaf):
        data = put(jax.random.key_data(leaf), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    is_here = not isinstance(leaf, jax.Array) or leaf.is_fully_addressable
    if is_here and not sharding.is_fully_addressable:
        # Each process has the whole array and keeps the parts of its devices.
        array = np.asarray(jnp.asarray(leaf))
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
    return jax.device_put(leaf, sharding)

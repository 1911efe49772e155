# SPDX-License-Identifier: Apache-2.0
"""Layout: how many examples to differentiate together, and on how many devices.

As many as fit a share of the memory. The book-keeping engine on a CPU instead balances working sets
larger than the caches, which are slow, and the passes of every microbatch over all weights and the
total. The layout never changes a result.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.extend.core import Jaxpr, JaxprEqn
from jax.sharding import Mesh

from dpjax import meshes, trees
from dpjax.gradients import platforms
from dpjax.gradients._bookkeeping.cost import foresee
from dpjax.gradients._bookkeeping.primitives import known
from dpjax.gradients.batching import MOST, BoundEngine, Layout, Rows, laid_out
from dpjax.gradients.engines import named
from dpjax.gradients.jaxprs import convolutions, equations, evaluate, inner_programs
from dpjax.gradients.traced import Traced
from dpjax.types import ClippedSum, Key, LossFn, PyTree

# The share of the memory for one microbatch on an accelerator.
_SHARE = 1 / 8
# On a CPU: bytes in flight on all devices together, plus these multiples of the bytes of parameters
# and of frozen weights, which have no sum. Chosen by timing the clipped sums of five models in
# microbatches of each power of two.
_CACHES, _PASSES, _FROZEN_PASSES = 4 * 2**20, 4, 2


class Request(NamedTuple):
    """What a call requests of its layout, with the engine by its own name and not "auto"."""

    batch_size: int
    engine: str
    microbatch_size: int | None = None
    devices: int | Mesh | None = None


def layout(
    loss: LossFn,
    params: PyTree,
    example: PyTree,
    batch_size: int,
    engine: str = "auto",
    *,
    microbatch_size: int | None = None,
    devices: int | Mesh | None = None,
) -> Layout:
    """Chooses a microbatch size and a mesh, unless they are given.

    The arguments are as for `dpjax.clipped_grad`; parameters and example may be shapes, and
    ``batch_size`` is the largest useful microbatch. On one device a microbatch size chosen here is
    a power of two, or the whole batch; several devices divide it.

    Example:
      >>> import jax.numpy as jnp
      >>> layout(jnp.vdot, jnp.zeros(10), jnp.zeros(10), batch_size=32, devices=1)
      Layout(microbatch_size=32, mesh=None, axes=())
    """
    request = Request(batch_size, named("gradients.layout", engine), microbatch_size, devices)
    return _layout(request, Traced(loss), params, example)


def _layout(request: Request, loss: Traced, params: PyTree, example: PyTree) -> Layout:
    batch_size, engine, microbatch_size, devices = request
    if batch_size == 0:
        return Layout(1)
    with platforms.traced_for(platforms.of(devices)):
        together = microbatch_size or _together(loss, params, example, batch_size, engine)
        together = min(together, MOST)
        mesh = _mesh(devices, -(-batch_size // together))
        # The gradient, because derivatives of the user's own may hold other convolutions.
        split = mesh is not None and meshes.MODEL in mesh.axis_names
        program = loss.gradient(params, example) if split else None
        axes = () if mesh is None else _batch_axes(mesh, program)
        shares = Layout(1, mesh, axes).shares
        # Host devices share the caches, so the estimate is for all of them together.
        size = together // shares if platforms.on_cpu() else min(together, -(-batch_size // shares))
    return Layout(min(microbatch_size or size, MOST) or 1, mesh, axes)


def run_laid_out(
    request: Request,
    engine: Callable[[Key], BoundEngine],
    loss: Traced,
    params: PyTree,
    rows: Rows,
    start: PyTree,
    key: Key = None,
    frozen: PyTree = None,
) -> ClippedSum:
    """Runs ``engine(key)((params, frozen), rows, start)`` in the layout of its arrays' devices."""
    devices, example = request.devices, trees.one_row(rows.batch)
    parts = {"params": params, "batch": rows, "key": key, "start": start, "frozen": frozen}
    mesh = meshes.automatic(devices) if isinstance(devices, Mesh) else meshes.of_host(devices or 1)
    if mesh is not None:
        parts = {part: meshes.gathered(tree, mesh) for part, tree in parts.items()}
    committed = meshes.committed(parts)

    def run(params: PyTree, rows: Rows, key: Key, start: PyTree, frozen: PyTree) -> ClippedSum:
        # Chosen here, because the layout is that of the platform for which this is traced.
        beside = loss.beside(frozen)
        chosen = _layout(request, beside, params, example)
        if chosen.mesh and committed and committed != tuple(chosen.mesh.devices.flat):
            # JAX would refuse the arrays on other devices than theirs. A single share runs on any.
            ours = committed == tuple(jax.local_devices()[: len(committed)])
            there = request._replace(devices=len(committed) if ours else 1)
            chosen = _layout(there, beside, params, example)
        return laid_out(engine(key), chosen)((params, frozen), rows, start)

    with platforms.traced_for(platforms.of(devices)):
        return platforms.dependent(run, *parts.values())


def _mesh(devices: int | Mesh | None, microbatches: int) -> Mesh | None:
    """The user's mesh; or one of host devices, for a batch of several microbatches."""
    if isinstance(devices, Mesh):
        return meshes.automatic(devices)
    # Under a mesh or inside a shard_map the user chooses the devices.
    ours = jax.sharding.get_abstract_mesh().empty and jax.devices()[0].platform == "cpu"
    several = ours and microbatches > 1 and platforms.on_cpu()
    if several and devices is None:
        # JAX fixes the number of devices at its first array, so the user has to set it.
        _warn_of_idle_cores()
    most = min(jax.local_device_count(), microbatches) if several else 1
    return meshes.of_host(devices or most)


@functools.cache  # once a process
def _warn_of_idle_cores() -> None:
    """Says how to use all cores, unless the user has chosen the number of devices."""
    number, chosen = meshes.host_devices(), getattr(jax.config, "jax_num_cpu_devices", -1)
    if chosen < 0 and number > jax.local_device_count():
        logging.warning(
            "dpjax: JAX has one device for %d cores. Set JAX_NUM_CPU_DEVICES=%d to use them, or "
            "1 to silence this.",
            os.cpu_count(),
            number,
        )


def _batch_axes(mesh: Mesh, program: Jaxpr | None) -> tuple[str, ...]:
    """The axes of a mesh that split the batch of a loss: all but that of the parameters."""
    if program is None:
        return mesh.axis_names
    # XLA partitions kernel gradients wrongly (see `nan_isolation`), and fails on some FFTs on a CPU
    # (RET_CHECK in fft_thunk.cc). So with either nothing is left to XLA: the batch is split over
    # all devices, and each has all parameters during a step.
    used = {equation.primitive.name for equation in equations(program)}
    every = bool(used & {"conv_general_dilated", "fft"})
    return tuple(name for name in mesh.axis_names if every or name != meshes.MODEL)


def _together(loss: Traced, params: PyTree, example: PyTree, batch_size: int, engine: str) -> int:
    """Examples in flight, on all devices of a CPU or on one accelerator: a power of two, or all."""
    if engine != "ghost" and platforms.on_cpu() and _trains_kernels(loss, params, example):
        return 1
    per_example = bytes_per_example(loss, params, example, engine)
    fits = _budget(loss, params, example, engine) / max(1, per_example)
    return min(batch_size, 2 ** max(0, round(math.log2(fits))))


def _trains_kernels(loss: Traced, params: PyTree, example: PyTree) -> bool:
    """Whether the loss trains kernels, as a client's may: XLA on CPU makes naive loops of them."""
    # Only training loops with `while`: reverse mode cannot differentiate it.
    program = jax.make_jaxpr(loss)(params, example).jaxpr
    loops = (e for e in equations(program) if e.primitive.name == "while")
    return any(convolutions(inner) for loop in loops for inner in inner_programs(loop))


def bytes_per_example(loss: Traced, params: PyTree, example: PyTree, engine: str) -> int:
    """An estimate of the memory for one example in flight, from the values that depend on it."""
    program, leaves = jax.make_jaxpr(loss)(params, example).jaxpr, jax.tree.leaves(params)
    moving = [i >= len(leaves) for i in range(len(program.invars))]

    def written(equation: JaxprEqn, entering: list[bool]) -> int:
        # The book-keeping engine stores what XLA does not fuse.
        fused = engine == "ghost" and not known(equation.primitive.name).writes
        if fused or not any(entering):
            return 0
        return _bytes(v.aval for v in equation.outvars if hasattr(v.aval, "shape"))

    stored = _total(program, moving, written)
    if engine != "ghost":
        # Cotangents and scaled copies of all values, and two gradients of every leaf.
        return 4 * stored + 2 * _bytes(leaves)
    # The trace that the engine will use, so the forecast knows which leaves are materialised.
    traced = loss.program(params, example)
    numbers = sum(leaves[i].size for i in traced.materialised)
    for i, leaf in enumerate(leaves):
        if sites := [site for site in traced.sites if i in site.leaves]:
            numbers += foresee(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), sites, i).numbers
    # Sites compute norms in float32: 4 bytes per number.
    return stored + 4 * numbers


def _frozen_bytes(loss: Traced, params: PyTree, example: PyTree) -> int:
    """Bytes of the weights that the loss closes over, as far as products read them."""
    program = jax.make_jaxpr(loss)(params, example).jaxpr

    def read(equation: JaxprEqn, entering: list[bool]) -> int:
        if equation.primitive.name not in ("conv_general_dilated", "dot_general"):
            return 0
        operands = zip(equation.invars, entering, strict=True)
        return _bytes(v.aval for v, moves in operands if not moves)

    return _total(program, [True] * len(program.invars), read)


def _total(
    jaxpr: Jaxpr, moving: Sequence[bool], bytes_of: Callable[[JaxprEqn, list[bool]], int]
) -> int:
    """The sum of ``bytes_of(equation, which of its inputs move)`` over a program and its loops."""
    total = 0

    def count(equation: JaxprEqn, entering: list[bool]) -> list[bool]:
        nonlocal total
        inner = inner_programs(equation)
        for program in inner:
            # The last inputs are the program's own. Under vmap a `cond` runs all its branches.
            own = ([False] * len(program.invars) + entering)[len(entering) :]
            total += _total(program, own, bytes_of) * equation.params.get("length", 1)
        total += 0 if inner else bytes_of(equation, entering)
        return [any(entering)] * len(equation.outvars)

    evaluate(jaxpr, [False] * len(jaxpr.constvars), moving, count, literal=lambda _: False)
    return total


def _budget(loss: Traced, params: PyTree, example: PyTree, engine: str) -> int:
    """Bytes that may be in flight, on all devices of a CPU or on one accelerator."""
    if platforms.on_cpu() and engine == "ghost":
        frozen = _FROZEN_PASSES * _frozen_bytes(loss, params, example)
        return _CACHES + _PASSES * _bytes(jax.tree.leaves(params)) + frozen
    if platforms.on_cpu():
        return int(_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return int(_SHARE * platforms.memory_limit())


def _bytes(arrays: Any) -> int:
    return sum(np.size(x) * jnp.result_type(x).itemsize for x in arrays)

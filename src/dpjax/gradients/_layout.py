# SPDX-License-Identifier: Apache-2.0
"""Layout: how many examples to differentiate together, and on how many devices.

As many as fit a fixed part of the memory. The book-keeping engine on a CPU instead balances working
sets larger than the caches, which are slow, and the passes of every microbatch over all weights and
the total. The layout never changes a result.
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
from dpjax.gradients import _platforms
from dpjax.gradients._bookkeeping.cost import foresee
from dpjax.gradients._bookkeeping.primitives import known
from dpjax.gradients._jaxprs import convolutions, equations, evaluate, inner_programs
from dpjax.gradients.batching import MOST, BoundEngine, Layout, Rows, laid_out
from dpjax.gradients.engines import named
from dpjax.gradients.traced import Traced
from dpjax.types import ClippedSum, Key, LossFn, PyTree

# The share of the memory for one microbatch on an accelerator.
_SHARE = 1 / 8
# A CPU has this many bytes in flight on all its devices, plus these multiples of the bytes of
# parameters and of frozen weights, which have no sum. The numbers were chosen by timing the clipped
# sums of five models in microbatches of each power of two.
_CACHES = 4 * 2**20
_PASSES = 4
_FROZEN_PASSES = 2


class Request(NamedTuple):
    """Arguments of a call that decide its layout; the engine has its own name and not "auto"."""

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
    """As `layout`, for the platform that the program is traced for.

    The batch is split into *shares*, one for each index along ``axes`` of the mesh. Each share runs
    in microbatches of ``size`` examples. Examples *in flight* are differentiated at the same time,
    at most `MOST` in a microbatch.
    """
    batch_size, engine, microbatch_size, devices = request
    if batch_size == 0:
        return Layout(1)  # a microbatch has at least one example
    # A mesh is for its own platform; a number of devices leaves the platform as it is.
    with _platforms.traced_for(_platforms.of(devices)):
        in_flight = microbatch_size or _in_flight(loss, params, example, batch_size, engine)
        in_flight = min(in_flight, MOST)
        microbatches = -(-batch_size // in_flight)  # rounded up
        mesh = _mesh(devices, microbatches)
        axes = () if mesh is None else mesh.axis_names
        if mesh is not None and meshes.MODEL in axes:
            # The axis of the parameters has to split the batch as well for some primitives. They
            # are looked for in the gradient, which also holds derivatives that users wrote.
            axes = _batch_axes(mesh, loss.gradient(params, example))
        # The number of shares depends on mesh and axes only; 1 stands for any microbatch size.
        shares = Layout(1, mesh, axes).shares
        if microbatch_size:
            size = in_flight
        elif _platforms.on_cpu():
            # Host devices share the caches, so this number of examples is for all of them together.
            size = max(1, in_flight // shares)
        else:
            # Each accelerator has memory of its own for this many, but its share may have fewer.
            size = min(in_flight, -(-batch_size // shares))
    return Layout(size, mesh, axes)


def run_laid_out(
    request: Request,
    engine_of: Callable[[Key], BoundEngine],
    loss: Traced,
    params: PyTree,
    rows: Rows,
    start: PyTree,
    key: Key = None,
    frozen: PyTree = None,
) -> ClippedSum:
    """Runs ``engine_of(key)((params, frozen), rows, start)`` in the layout that fits.

    Arrays that are committed to devices move to the mesh of the request, or to its several devices.
    Otherwise these arrays decide the devices: JAX refuses to compute with them on others.
    """
    devices = request.devices
    example = trees.one_row(rows.batch)
    # The arguments of `run` below, in their order.
    arguments = {"params": params, "batch": rows, "key": key, "start": start, "frozen": frozen}
    # The mesh of the request; None for one device, or if it leaves the choice to the layout.
    mesh = meshes.automatic(devices) if isinstance(devices, Mesh) else meshes.of_host(devices or 1)
    if mesh is not None:
        arguments = {name: meshes.gathered(tree, mesh) for name, tree in arguments.items()}
    committed_to = meshes.committed(arguments)

    def run(params: PyTree, rows: Rows, key: Key, start: PyTree, frozen: PyTree) -> ClippedSum:
        # The layout is chosen inside, because here the platform is that of the trace.
        with_frozen = loss.with_frozen(frozen)
        chosen = _layout(request, with_frozen, params, example)
        if chosen.mesh and committed_to and committed_to != tuple(chosen.mesh.devices.flat):
            # The request named no devices: the arrays were moved to named ones above. If the arrays
            # are on the first n devices, the layout is chosen again for n devices, which are these.
            # Otherwise one share runs without a mesh, on the devices of the arrays.
            are_first = committed_to == tuple(jax.local_devices()[: len(committed_to)])
            on_their_devices = request._replace(devices=len(committed_to) if are_first else 1)
            chosen = _layout(on_their_devices, with_frozen, params, example)
        return laid_out(engine_of(key), chosen)((params, frozen), rows, start)

    with _platforms.traced_for(_platforms.of(devices)):
        return _platforms.dependent(run, *arguments.values())


def _mesh(devices: int | Mesh | None, microbatches: int) -> Mesh | None:
    """The user's mesh; or one of host devices, for a batch of several microbatches."""
    if isinstance(devices, Mesh):
        return meshes.automatic(devices)
    # The user chooses the devices under a mesh and inside a shard_map.
    is_free = jax.sharding.get_abstract_mesh().empty
    has_host_devices = is_free and jax.devices()[0].platform == "cpu" and _platforms.on_cpu()
    if microbatches == 1 or not has_host_devices:
        return meshes.of_host(devices or 1)
    if devices is None:
        # JAX fixes the number of devices at its first array, so the user has to set it.
        _warn_of_idle_cores()
    return meshes.of_host(devices or min(jax.local_device_count(), microbatches))


@functools.cache  # once a process
def _warn_of_idle_cores() -> None:
    """Logs how to use all cores, unless the user has chosen the number of devices."""
    number = meshes.host_devices()
    is_chosen = getattr(jax.config, "jax_num_cpu_devices", -1) >= 0
    if not is_chosen and number > jax.local_device_count():
        logging.warning(
            "dpjax: JAX has one device for %d cores. Set JAX_NUM_CPU_DEVICES=%d to use them, or "
            "1 to silence this.",
            os.cpu_count(),
            number,
        )


def _batch_axes(mesh: Mesh, gradient: Jaxpr) -> tuple[str, ...]:
    """The axes of a mesh that split the batch of a loss: all but that of the parameters.

    XLA partitions kernel gradients wrongly (see `nan_isolation`), and fails on some FFTs on a CPU
    (RET_CHECK in fft_thunk.cc). A loss with either leaves nothing to XLA: the batch is split over
    all devices, and each has all parameters during a step.
    """
    used = {equation.primitive.name for equation in equations(gradient)}
    if used & {"conv_general_dilated", "fft"}:
        return mesh.axis_names
    return tuple(name for name in mesh.axis_names if name != meshes.MODEL)


def _in_flight(loss: Traced, params: PyTree, example: PyTree, batch_size: int, engine: str) -> int:
    """How many examples all devices of a CPU, or one accelerator, should differentiate together.

    The number is a power of two, or the batch size if that is less.
    """
    if engine != "ghost" and _platforms.on_cpu() and _trains_kernels(loss, params, example):
        return 1
    per_example = bytes_per_example(loss, params, example, engine)
    fits = _budget(loss, params, example, engine) / max(1, per_example)
    return min(batch_size, 2 ** max(0, round(math.log2(fits))))


def _trains_kernels(loss: Traced, params: PyTree, example: PyTree) -> bool:
    """Whether the loss trains kernels, as a client's may: XLA on CPU makes naive loops of them."""
    program = jax.make_jaxpr(loss)(params, example).jaxpr
    for equation in equations(program):
        # A loss with a `while` is one that trains, because reverse mode cannot differentiate it.
        if equation.primitive.name == "while" and any(map(convolutions, inner_programs(equation))):
            return True
    return False


def bytes_per_example(loss: Traced, params: PyTree, example: PyTree, engine: str) -> int:
    """An estimate of the memory for one example that is differentiated in a microbatch.

    It adds up the values that depend on the example, and its gradients. The engine "ghost" is the
    book-keeping engine.
    """
    program = jax.make_jaxpr(loss)(params, example).jaxpr
    leaves = jax.tree.leaves(params)
    # The inputs are the leaves of the parameters, then the leaves of the example, which vary.
    varies = [i >= len(leaves) for i in range(len(program.invars))]

    def bytes_written(equation: JaxprEqn, inputs_vary: list[bool]) -> int:
        """The bytes of an equation's outputs; 0 if they are fused, or the same for all examples."""
        # XLA fuses most equations of the book-keeping engine; `writes` marks the other primitives.
        # Other engines store all values.
        is_fused = engine == "ghost" and not known(equation.primitive.name).writes
        if is_fused or not any(inputs_vary):
            return 0
        return _bytes(v.aval for v in equation.outvars if hasattr(v.aval, "shape"))

    stored = _total(program, varies, bytes_written)
    if engine != "ghost":
        # All values, their cotangents, scaled copies of both, and two gradients of every leaf.
        return 4 * stored + 2 * _bytes(leaves)
    # The engine forms one example's gradient of a materialised leaf. For another leaf it writes the
    # numbers from which it computes the norm: `foresee` counts them for the rule of that leaf.
    traced = loss.program(params, example)
    numbers = sum(leaves[i].size for i in traced.materialised)
    for i, leaf in enumerate(leaves):
        sites = [site for site in traced.sites if i in site.leaves]  # equations that use the leaf
        if sites:
            shape = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            numbers += foresee(shape, sites, i).numbers
    # These numbers are float32: 4 bytes each.
    return stored + 4 * numbers


def _frozen_bytes(loss: Traced, params: PyTree, example: PyTree) -> int:
    """Bytes of the weights that the loss closes over, as far as products read them."""
    program = jax.make_jaxpr(loss)(params, example).jaxpr

    def read(equation: JaxprEqn, inputs_vary: list[bool]) -> int:
        if equation.primitive.name not in ("conv_general_dilated", "dot_general"):
            return 0
        operands = zip(equation.invars, inputs_vary, strict=True)
        return _bytes(v.aval for v, operand_varies in operands if not operand_varies)

    return _total(program, [True] * len(program.invars), read)


def _total(
    program: Jaxpr, varies: Sequence[bool], bytes_of: Callable[[JaxprEqn, list[bool]], int]
) -> int:
    """The sum of ``bytes_of(equation, inputs_vary)`` over a program and its inner programs.

    ``varies`` has a flag for each input: whether it depends on the example. The outputs of an
    equation do if one of its inputs does.
    """
    total = 0

    def add_bytes(equation: JaxprEqn, inputs_vary: list[bool]) -> list[bool]:
        """Adds the bytes of an equation to the total; returns the flags of its outputs."""
        nonlocal total
        inner = inner_programs(equation)
        if not inner:
            total += bytes_of(equation, inputs_vary)
        # A scan runs its body as many times as its length. Under vmap a `cond` runs all branches.
        rounds = equation.params.get("length", 1)
        for inner_program in inner:
            # Inputs are matched from the last one. A branch of a `cond` takes all but the first;
            # other programs may take constants, which do not vary, before the equation's inputs.
            padded = [False] * len(inner_program.invars) + inputs_vary
            inner_varies = padded[len(inputs_vary) :]  # the last: one for each input of the program
            total += rounds * _total(inner_program, inner_varies, bytes_of)
        return [any(inputs_vary)] * len(equation.outvars)

    # `evaluate` passes flags in place of values; constants and literals do not vary.
    evaluate(program, [False] * len(program.constvars), varies, add_bytes, literal=lambda _: False)
    return total


def _budget(loss: Traced, params: PyTree, example: PyTree, engine: str) -> int:
    """Bytes that may be in flight, on all devices of a CPU or on one accelerator."""
    if _platforms.on_cpu() and engine == "ghost":
        frozen = _FROZEN_PASSES * _frozen_bytes(loss, params, example)
        return _CACHES + _PASSES * _bytes(jax.tree.leaves(params)) + frozen
    if _platforms.on_cpu():
        return int(_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return int(_SHARE * _platforms.memory_limit())


def _bytes(arrays: Any) -> int:
    return sum(np.size(x) * jnp.result_type(x).itemsize for x in arrays)

# SPDX-License-Identifier: Apache-2.0
"""One plan for `pods`: a training step that is compiled for devices that are not there.

The process needs an environment with the compiler of these devices (``pip install 'jax[tpu]'`` for
TPUs, ``pip install 'jax[cuda12]'`` for GPUs).  It allocates nothing: arguments are shapes.

The compiler's own totals count the body of a loop once, so `pods_hlo` reads the compiled program
and multiplies by the trips of the loops.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import math
import re
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pods_hlo
import workers
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import dpjax
from dpjax import meshes
from dpjax.gradients.batching import microbatches_in_block
from dpjax.training.recipe import Recipe
from dpjax.training.step import private_step
from dpjax.types import PyTree, State

# What the compiler of a GPU asks of a device.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84942979072 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
OPTIMIZER = optax.adamw(1e-4)


def devices_of(kind: str) -> list[Any]:
    """The devices of ``v5e:16x16``, ``v5p:4x4x4``, ``h100:8`` (of one host) or ``cpu:8``."""
    name, _, size = kind.partition(":")
    package = _package(kind)
    if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(name=package)
    if name == "cpu":
        return jax.devices()[: int(size)]
    if name == "h100":
        return topologies.get_topology_desc(
            topology_name="h100", platform="cuda", topology=f"1x1x{size}", target_config=H100
        ).devices
    sides = [int(side) for side in size.split("x")]
    # A host of a TPU has four chips, unless it is said to have fewer.
    fewer = {"chips_per_host_bounds": [*sides, 1]} if math.prod(sides) < 4 else {}
    return topologies.get_topology_desc(platform="tpu", topology_name=kind, **fewer).devices


def compiler_of(kind: str) -> str:
    """The package that compiles for these devices, with its version."""
    return f"{_package(kind)} {importlib.metadata.version(_package(kind))}"


def _package(kind: str) -> str:
    packages = {"cpu": "jaxlib", "h100": "jax_cuda12_plugin"}
    return packages.get(kind.partition(":")[0], "libtpu")


def decoder(shape: dict[str, int]) -> tuple[PyTree, Any]:
    """Shapes of the parameters of a decoder, and ``loss(params, tokens)`` of one text.

    Layers are one `jax.lax.scan`, each rematerialised; float32 parameters compute in bfloat16.
    """
    width, depth, heads = shape["width"], shape["depth"], shape["heads"]
    sizes = {
        "embedding": (shape["vocabulary"], width),
        "positions": (shape["length"], width),
        "attention": (depth, width, 3 * width),
        "output": (depth, width, width),
        "up": (depth, width, 4 * width),
        "down": (depth, 4 * width, width),
        "scales": (depth, 2, width),
        "last": (width,),
    }
    params = {name: jax.ShapeDtypeStruct(size, jnp.float32) for name, size in sizes.items()}
    layers = ("attention", "output", "up", "down", "scales")

    def normalised(x: Any, scale: Any) -> Any:
        x32 = x.astype(jnp.float32)
        x32 *= jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + 1e-6)
        return (x32 * scale).astype(x.dtype)

    def attend(x: Any) -> Any:
        parts = x.reshape(x.shape[0], 3, heads, width // heads)
        q, k, v = parts[:, 0], parts[:, 1], parts[:, 2]
        scores = jnp.einsum("qhd,khd->hqk", q, k) / math.sqrt(width // heads)
        seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        weights = jax.nn.softmax(jnp.where(seen, scores.astype(jnp.float32), -1e9))
        return jnp.einsum("hqk,khd->qhd", weights.astype(v.dtype), v).reshape(x.shape[0], width)

    def block(x: Any, layer: PyTree) -> tuple[Any, None]:
        w = {name: leaf.astype(x.dtype) for name, leaf in layer.items() if name != "scales"}
        scales = layer["scales"]
        x = x + attend(normalised(x, scales[0]) @ w["attention"]) @ w["output"]
        return x + jax.nn.gelu(normalised(x, scales[1]) @ w["up"]) @ w["down"], None

    def loss(params: PyTree, tokens: Any) -> Any:
        text, following = tokens[:-1].astype(jnp.int32), tokens[1:].astype(jnp.int32)
        x = (params["embedding"][text] + params["positions"]).astype(jnp.bfloat16)
        stacked = {name: params[name] for name in layers}
        x, _ = jax.lax.scan(jax.checkpoint(block), x, stacked)
        x = normalised(x, params["last"])
        logits = (x @ params["embedding"].T.astype(x.dtype)).astype(jnp.float32)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, following))

    return params, loss


def plain_step(loss: Any, mesh: Mesh, rounds: int, size: int) -> Any:
    """The step without privacy: microbatches on each device, devices meet once, AdamW."""
    axes = tuple(name for name in mesh.axis_names if name != meshes.MODEL)

    def gradients(params: PyTree, rows: Any) -> PyTree:
        def mean(p: PyTree, some: Any) -> Any:
            return jnp.mean(jax.vmap(loss, (None, 0))(p, some))

        def add(total: PyTree, some: Any) -> tuple[PyTree, None]:
            return jax.tree.map(jnp.add, total, jax.grad(mean)(params, some)), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        folded = rows.reshape(rounds, size, *rows.shape[1:])
        return jax.lax.psum(jax.lax.scan(add, zeros, folded)[0], axes)

    def step(data: Any, state: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        params, optimizer = state
        options: Any = {"axis_names": set(axes), "check_vma": False}
        total = jax.shard_map(
            gradients,
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec(axes)),
            out_specs=PartitionSpec(),
            **options,
        )(params, data)
        updates, optimizer = OPTIMIZER.update(total, optimizer, params)
        return optax.apply_updates(params, updates), optimizer

    return step


def placed(tree: PyTree, mesh: Mesh) -> PyTree:
    """Shapes with the shardings that `dpjax.meshes.placed` gives to arrays."""

    def place(leaf: Any) -> Any:
        sharding = NamedSharding(mesh, meshes._spec(leaf.shape, mesh))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, tree)


def program(task: dict[str, Any]) -> tuple[Any, PyTree, PyTree, Mesh, int]:
    """The step, the shapes of its arguments, the mesh, and the microbatches of a device."""
    axes: dict[str, int] = task["mesh"]
    devices = np.array(devices_of(task["devices"])).reshape(*axes.values())
    mesh, size = Mesh(devices, tuple(axes)), task["microbatch_size"]
    shares = math.prod(n for name, n in axes.items() if name != meshes.MODEL)
    rounds = -(-task["batch_size"] // (shares * size))
    params, loss = decoder(task["shape"])
    optimizer = jax.eval_shape(OPTIMIZER.init, params)
    length = task["shape"]["length"] + 1
    if task["step"] == "plain":
        spec = PartitionSpec(tuple(name for name in axes if name != meshes.MODEL))
        rows = jax.ShapeDtypeStruct(
            (task["batch_size"], length), jnp.int32, sharding=NamedSharding(mesh, spec)
        )
        step = plain_step(loss, mesh, rounds, size)
        return step, rows, placed((params, optimizer), mesh), mesh, rounds
    examples = task["examples"]
    mechanism = dpjax.Mechanism(
        sampling=dpjax.sampling.poisson(examples=examples, batch_size=task["batch_size"]),
        clipping=dpjax.clipping.flat(bound=1.0),
        noise_multiplier=1.0,
        steps=1000,
    )
    recipe = Recipe("dpsgd", loss, OPTIMIZER, mechanism, microbatch_size=size, mesh=mesh)
    key = jax.eval_shape(lambda: jax.random.key(0))
    one, zero = (jax.ShapeDtypeStruct((), dtype) for dtype in (jnp.float32, jnp.int32))
    state = placed(State(params, optimizer, one, key, zero, None), mesh)
    rows = jax.ShapeDtypeStruct(
        (examples, length), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec())
    )
    return functools.partial(private_step, recipe), rows, state, mesh, rounds


def too_large(error: Exception) -> str | None:
    """How much memory a step needs of how much, where a compiler gave up for it."""
    # The second form is that of libtpu 0.0.42.
    for form in (
        r"Used ([\d.]+\w) of ([\d.]+\w) hbm",
        r"required .* \(([\d.]+\w)\) exceeds available HBM \(([\d.]+\w)\)",
    ):
        if found := re.search(form, str(error)):
            return f"{found[1]} of {found[2]}"
    return None


def plan(task: dict[str, Any]) -> dict[str, Any]:
    """What the compiler plans for one step."""
    step, rows, state, mesh, rounds = program(task)
    within = min(rounds, microbatches_in_block(task["microbatch_size"]))
    dynamic = -(-rounds // within), within
    # A step leaves everything where it was.
    places = jax.tree.map(lambda leaf: leaf.sharding, state)
    out = places if task["step"] == "plain" else (places, None)
    jitted = jax.jit(step, donate_argnums=1, out_shardings=out)
    began = time.perf_counter()
    traced = jitted.trace(rows, state)
    answer: dict[str, Any] = {
        "parameters": sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state[0])),
        "microbatches": rounds,
        "matmul_flop": pods_hlo.matmul_flop(traced.jaxpr.jaxpr, dict(mesh.shape), dynamic),
        "trace_s": time.perf_counter() - began,
    }
    began = time.perf_counter()
    try:
        compiled = traced.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if not (found := too_large(error)):
            raise
        return {**answer, "too_large": found}
    answer["compile_s"] = time.perf_counter() - began
    memory, part = compiled.memory_analysis(), rows.sharding.shard_shape(rows.shape)
    data = math.prod(part) * rows.dtype.itemsize
    answer |= {
        "data_bytes": data,
        "state_bytes": memory.argument_size_in_bytes - data,
        "temporary_bytes": memory.temp_size_in_bytes,
    }
    return {**answer, **pods_hlo.counted(compiled.as_text(), dict(mesh.shape), dynamic)}


if __name__ == "__main__":
    workers.serve(plan)

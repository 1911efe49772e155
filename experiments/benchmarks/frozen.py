# SPDX-License-Identifier: Apache-2.0
"""Frozen weights as an argument of the step, and as constants that the loss closes over.

claim     an argument compiles sooner and needs less memory, and is in no checkpoint
verdict   of 512 MiB: 1.8 s and 0.18 GiB as an argument, 12.1 s and 2.6 GiB as a closure
hardware  two cores of an AMD EPYC; JAX 0.10.2
command   make bench BENCH=frozen ARGS="--out experiments/results/frozen.json"

A stack of layers of 2,048 x 2,048, in one `lax.scan`, with adapters of rank 4 that are trained.
Each first step of `dpjax.dpsgd` runs in a process of its own without a compilation cache. Memory is
the rise of the process above what it held with the weights. A step that is compiled for
four host devices with a mesh ``data:2,model:2`` shows how the weights are split, and what a device
holds.
"""

from __future__ import annotations

import functools
import pathlib
import sys
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpjax
from dpjax import clipping, sampling
from experiments.benchmarks import memory, reporting, workers

WIDTH = 2048
RANK = 4
EXAMPLES = 64
SIZES = (64, 128, 256, 512)  # MiB
KINDS = ("argument", "closure")


def problem(mib: int) -> tuple[Any, Any, Any, Any]:
    """The loss ``(adapters, example, frozen)``, adapters, frozen weights and data."""
    layers = mib * 2**20 // (4 * WIDTH**2)
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    frozen = normal(layers, WIDTH, WIDTH) / WIDTH**0.5
    down = normal(layers, WIDTH, RANK) / WIDTH**0.5
    adapters = {"down": down, "up": jnp.zeros((layers, RANK, WIDTH))}
    data = normal(EXAMPLES, WIDTH)

    def loss(params: Any, x: Any, frozen: Any) -> Any:
        def layer(h: Any, weights: Any) -> tuple[Any, None]:
            kernel, adapter = weights
            low_rank = (h @ adapter["down"]) @ adapter["up"]
            return jnp.tanh(h @ kernel + low_rank), None

        outputs, _ = jax.lax.scan(layer, x, (frozen, params))
        return jnp.sum(outputs**2)

    return loss, adapters, frozen, data


def started(kind: str, mib: int, **options: Any) -> tuple[Any, Any]:
    """An algorithm and its first state."""
    loss, adapters, frozen, data = problem(mib)
    mechanism = dpjax.Mechanism(
        sampling=sampling.poisson(EXAMPLES, 8),
        clipping=clipping.flat(1.0),
        noise_multiplier=1.0,
        steps=2,
    )
    if kind == "closure":
        closed = functools.partial(loss, frozen=frozen)
        algorithm = dpjax.dpsgd(closed, optax.sgd(0.1), mechanism, data)
    else:
        algorithm = dpjax.dpsgd(loss, optax.sgd(0.1), mechanism, data, frozen=frozen, **options)
    return algorithm, algorithm.init(adapters)


def first_step(kind: str, mib: int) -> dict[str, Any]:
    """Seconds and memory of a first step, and the bytes of a run's folder."""
    algorithm, state = started(kind, mib)
    rise = memory.of_process()
    begun = time.perf_counter()
    state, _ = algorithm.run(state, 1)
    jax.block_until_ready(state.params)
    seconds = time.perf_counter() - begun
    risen = rise()
    _, adapters, _, _ = problem(mib)
    with tempfile.TemporaryDirectory() as folder:
        dpjax.fit(algorithm, algorithm.init(adapters), directory=folder, progress=False)
        size = 0
        for path in pathlib.Path(folder).rglob("*"):
            if path.is_file():
                size += path.stat().st_size
    return {"first_s": seconds, "bytes": risen, "folder": size}


def split_step(mib: int) -> dict[str, Any]:
    """How the compiled step on four devices splits the weights, and what a device holds."""
    jax.config.update("jax_num_cpu_devices", 4)
    mesh = dpjax.meshes.parse("data:2,model:2")
    algorithm, state = started("split", mib, mesh=mesh)
    state = dpjax.meshes.placed(state._replace(ledger=None), mesh)
    steps = algorithm.run.__self__.steps  # pyright: ignore[reportFunctionMemberAccess]
    leaves, structure = jax.tree.flatten(state)
    shardings = tuple(leaf.sharding for leaf in leaves)
    program = steps._compiled(shardings, structure)
    compiled = program.lower(state, *steps._held_on(mesh), 1).compile()
    frozen_weights = compiled.input_shardings[0][2]
    of_device = compiled.memory_analysis().argument_size_in_bytes / 2**20
    return {"spec": str(frozen_weights.spec), "MiB of a device": of_device}


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """The figures of one kind of weights and one size."""
    jax.config.update("jax_enable_compilation_cache", False)
    if question["kind"] == "split":
        return split_step(question["mib"])
    return first_step(question["kind"], question["mib"])


def main(asked: Any) -> None:
    report = reporting.begin(("jax", "jaxlib"), smoke=asked.smoke)
    report["rows"] = {}
    for mib in (16,) if asked.smoke else SIZES:
        row = report["rows"][f"{mib} MiB"] = {}
        for kind in (*KINDS, "split"):
            worker = workers.Worker(sys.executable, "frozen", "answer")
            row[kind] = worker.ask({"kind": kind, "mib": mib})
            worker.close()
            print(mib, "MiB", kind, row[kind], flush=True)
        reporting.keep(report, asked.out)


if __name__ == "__main__" and sys.argv[1:] == ["answer"]:
    workers.serve(answer)
elif __name__ == "__main__":
    reporting.run(main, smoke="One size")

# SPDX-License-Identifier: Apache-2.0
"""Frozen weights as an argument of the step, and as constants that the loss closes over.

claim     an argument compiles sooner and needs less memory, and is in no checkpoint
verdict   of 512 MiB: 1.8 s and 0.18 GiB as an argument, 12.1 s and 2.6 GiB as a closure
hardware  two cores of an AMD EPYC; JAX 0.10.2
command   make bench BENCH=frozen ARGS="--out experiments/results/frozen.json"

A stack of layers of 2,048 x 2,048, in one `lax.scan`, with adapters of rank 4 that are trained.
Each first step of `dpjax.dpsgd` runs in a process of its own without a compilation cache. Memory is
the rise of the process above what it held with the weights. Of four host devices with a mesh
``data:2,model:2`` the compiled step says how the weights are split, and what a device holds.
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

WIDTH, RANK, EXAMPLES = 2048, 4, 64
SIZES = (64, 128, 256, 512)  # MiB
KINDS = ("argument", "closure")


def problem(mib: int) -> tuple[Any, Any, Any, Any]:
    """The loss ``(adapters, example, frozen)``, adapters, frozen weights and data."""
    layers, rng = mib * 2**20 // (4 * WIDTH**2), np.random.default_rng(0)
    frozen = jnp.asarray(rng.normal(size=(layers, WIDTH, WIDTH)), jnp.float32) / WIDTH**0.5
    down = jnp.asarray(rng.normal(size=(layers, WIDTH, RANK)), jnp.float32) / WIDTH**0.5
    adapters = {"down": down, "up": jnp.zeros((layers, RANK, WIDTH))}
    data = jnp.asarray(rng.normal(size=(EXAMPLES, WIDTH)), jnp.float32)

    def loss(params: Any, x: Any, frozen: Any) -> Any:
        def layer(h: Any, weights: Any) -> tuple[Any, None]:
            kernel, pair = weights
            return jnp.tanh(h @ kernel + (h @ pair["down"]) @ pair["up"]), None

        return jnp.sum(jax.lax.scan(layer, x, (frozen, params))[0] ** 2)

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


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Seconds and memory of a first step; bytes of a run's folder; or how weights are split."""
    kind, mib = question["kind"], question["mib"]
    jax.config.update("jax_enable_compilation_cache", False)
    if kind == "split":
        jax.config.update("jax_num_cpu_devices", 4)
        mesh = dpjax.meshes.parse("data:2,model:2")
        algorithm, state = started(kind, mib, mesh=mesh)
        state = dpjax.meshes.placed(state._replace(ledger=None), mesh)
        steps = algorithm.run.__self__.steps  # pyright: ignore[reportFunctionMemberAccess]
        leaves, structure = jax.tree.flatten(state)
        program = steps._compiled(tuple(leaf.sharding for leaf in leaves), structure)
        compiled = program.lower(state, *steps._held_on(mesh), 1).compile()
        each = compiled.memory_analysis().argument_size_in_bytes / 2**20
        return {"spec": str(compiled.input_shardings[0][2].spec), "MiB of a device": each}
    algorithm, state = started(kind, mib)
    rise, begun = memory.of_process(), time.perf_counter()
    jax.block_until_ready(algorithm.run(state, 1)[0].params)
    seconds, held = time.perf_counter() - begun, rise()
    with tempfile.TemporaryDirectory() as folder:
        dpjax.fit(algorithm, algorithm.init(problem(mib)[1]), directory=folder, progress=False)
        files = (path for path in pathlib.Path(folder).rglob("*") if path.is_file())
        return {"first_s": seconds, "bytes": held, "folder": sum(f.stat().st_size for f in files)}


def main(asked: Any) -> None:
    report = reporting.begin(("jax", "jaxlib"), smoke=asked.smoke)
    report["rows"] = {}
    for mib in [16] if asked.smoke else SIZES:
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

# SPDX-License-Identifier: Apache-2.0
"""Private steps of one workload, on as many host devices as the question says.

Started by `scaling`, which asks in lines of JSON: first ``{"workload": ..., "devices": ...}``, and
then ``{"steps": 3}``. The process has the cores of the process that started it.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np
import optax
import workers
from workloads import SEED, WORKLOADS, problem

import dpjax
from dpjax import clipping, meshes, sampling

_ready: dict[str, Any] = {}


def prepare(workload: str, devices: int, batch_size: int) -> dict[str, Any]:
    """Compiles a step, and takes the first ones."""
    jax.config.update("jax_num_cpu_devices", devices)
    loss, params, batch = problem(WORKLOADS[workload]._replace(batch_size=batch_size))
    mechanism = dpjax.Mechanism(
        # Batches of one size, so that all steps do equal work.
        sampling=sampling.shuffled(examples=batch_size, batch_size=batch_size),
        clipping=clipping.flat(1.0),
        noise_multiplier=1.1,
        steps=1_000_000,
    )
    mesh = meshes.parse(f"data:{devices}")
    algorithm = dpjax.dpsgd(loss, optax.sgd(0.1), mechanism, jax.device_get(batch), mesh=mesh)
    state = algorithm.init(params, jax.random.key(SEED))
    _ready["run"], (_ready["state"], _) = algorithm.run, algorithm.run(state, 2)
    return {"devices": jax.device_count()}


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """The answer to one question of `scaling`."""
    if "workload" in question:
        return prepare(**question)
    started = time.perf_counter()
    _ready["state"], info = _ready["run"](_ready["state"], question["steps"])
    seconds = (time.perf_counter() - started) / question["steps"]
    if not np.all(np.isfinite(info.loss)):
        return {"refused": "the loss is not finite"}
    return {"seconds": seconds}


if __name__ == "__main__":
    workers.serve(answer)

# SPDX-License-Identifier: Apache-2.0
"""Contestants of the step benchmark: JAX programs here, and peers in their own processes.

A contestant is four functions.  `run` takes steps and returns seconds per step, `memory` and
`sound` report on them, and `close` ends it.  All do the same work: gradients clipped to one bound,
equal noise, SGD, and one batch that already lies where the step wants it, on one device or
sharded.  Contestants called plain (`plain`) are not private.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

import dpjax
from dpjax import clipping, gradients, sampling
from experiments.benchmarks import workers
from experiments.benchmarks.workloads import SEED, WORKLOADS

BOUND = 1.0
NOISE_MULTIPLIER = 1.1
LEARNING_RATE = 0.1
STEPS = 1_000_000  # more than any run takes: a mechanism returns NaN after its last step
PEERS = (
    "jax_privacy",
    "opacus hooks",
    "opacus functorch",
    "opacus ew",
    "opacus ghost",
    "torch plain",
)


class Refused(Exception):
    """This contestant has no figure; the message gives the reason in a few words."""


class Contestant(NamedTuple):
    run: Callable[[int], float]
    memory: Callable[[], dict[str, int | None]]
    sound: Callable[[], bool]
    close: Callable[[], None]
    facts: dict[str, Any]


def step_of(gradient: Any, link: optax.GradientTransformation) -> tuple[Any, Any]:
    """The optimizer and the jitted step of a gradient, the link that makes it private, and SGD."""
    optimizer = optax.chain(link, optax.sgd(LEARNING_RATE))

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(gradient(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    return optimizer, step


def compiled(gradient: Any, link: optax.GradientTransformation, params: Any, batch: Any) -> Any:
    """A contestant in this process: a gradient, the link that makes it private, and SGD."""
    optimizer, step = step_of(gradient, link)
    program = None
    arguments = (params, optimizer.init(params), batch)

    def run(steps: int) -> float:
        nonlocal program, arguments
        started = time.perf_counter()
        try:
            if program is None:
                program = step.lower(*arguments).compile()
                arguments = jax.device_put(arguments, program.input_shardings[0])
            for _ in range(steps):
                # Steps are not queued, because host devices that wait for each other can run
                # out of threads.
                moved = jax.block_until_ready(program(*arguments))
                arguments = (*moved, arguments[2])
        except jax.errors.JaxRuntimeError as error:  # such as for lack of memory
            first_line = str(error).splitlines()[0]
            raise Refused(first_line[:100]) from error
        return (time.perf_counter() - started) / steps

    def planned() -> dict[str, int | None]:
        assert program is not None
        devices = jax.tree.leaves(program.output_shardings)[0].num_devices
        of_device = getattr(program.memory_analysis(), "temp_size_in_bytes", None)
        if of_device is None:
            return {"planned_bytes": None}
        return {"planned_bytes": devices * of_device}

    def sound() -> bool:
        flat, _ = ravel_pytree(arguments[0])
        return bool(jnp.isfinite(flat).all())

    return Contestant(run, planned, sound, lambda: None, {})


def peer(python: str, name: str, workload: str, batch_size: int, **env: str) -> Contestant:
    """A contestant in another process, and perhaps of another environment."""
    worker = workers.Worker(python, "peers", name, **env)
    last = {}

    def ask(question: dict[str, Any]) -> dict[str, Any]:
        answer = worker.ask(question)
        last.update(answer)
        if "refused" in answer:
            worker.close()
            raise Refused(answer["refused"])
        return answer

    task = {
        "workload": workload,
        "parameters": WORKLOADS[workload].parameters,
        "text": WORKLOADS[workload].text,
        "batch_size": batch_size,
        "bound": BOUND,
        "noise_multiplier": NOISE_MULTIPLIER,
        "learning_rate": LEARNING_RATE,
        "host_devices": jax.device_count(),
    }
    return Contestant(
        run=lambda steps: ask({"steps": steps})["seconds"],
        memory=lambda: last["memory"],
        sound=lambda: last["sound"],
        close=worker.close,
        facts=ask({"prepare": task}),
    )


def jax_privacy(loss: Any, batch_size: int, microbatch_size: int | None = None) -> Any:
    """jax_privacy's clipped gradient, and its noise."""
    from jax_privacy import clipping as theirs
    from jax_privacy import noise_addition

    gradient = theirs.clipped_grad(
        loss,
        l2_clip_norm=BOUND,
        normalize_by=batch_size,
        keep_batch_dim=False,
        microbatch_size=microbatch_size,
    )
    deviation = NOISE_MULTIPLIER * BOUND / batch_size
    key = jax.random.key(SEED)
    return gradient, noise_addition.gaussian_privatizer(stddev=deviation, prng_key=key)


def of_jax(loss: Any, batch_size: int) -> dict[str, tuple[Any, optax.GradientTransformation]]:
    """The gradients of JAX and dpjax by name, each with the link that makes it private."""
    key = jax.random.key(SEED)
    mechanism = dpjax.Mechanism(
        sampling=sampling.poisson(examples=60_000, batch_size=batch_size),
        clipping=clipping.flat(BOUND),
        noise_multiplier=NOISE_MULTIPLIER,
        steps=STEPS,
    )

    def mean_loss(params: Any, batch: Any) -> Any:
        return jnp.mean(jax.vmap(loss, (None, 0))(params, batch))

    def clipped_sum(engine: str) -> Any:
        clipped = dpjax.clipped_grad(loss, clipping.flat(BOUND), engine)
        return lambda params, batch: clipped(params, batch).sum

    programs: dict[str, Any] = {"plain": (jax.grad(mean_loss), optax.identity())}
    for engine in (*gradients.ENGINES, "auto"):
        programs[f"dpjax {engine}"] = (clipped_sum(engine), mechanism.privatize(key))
    return programs

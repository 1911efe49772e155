# SPDX-License-Identifier: Apache-2.0
"""How long one private training step takes, beside the same step without privacy.

  claim     a private step costs about as much as a plain one, without a tuned model
  figures   W1 (MNIST CNN, B 256): plain 60 ms, dpjax 54, vmap 88, optax.contrib 97
            W4 (MLP 784-256-256-10, B 1024): plain 12 ms, dpjax 21, vmap 2,793, contrib 1,069
            W2 and any GPU: not run with the present engines
  hardware  2 cores of an Intel Xeon, JAX 0.10.2; all figures in experiments/results/steps.json
  command   python experiments/benchmarks/steps.py --workloads W1,W4 --rounds 7 --seconds 10

Contestants: `plain` (not private), each dpjax engine, dpjax's own choice of one, and Optax's
`differentially_private_aggregate`; all with SGD, compiled, on the same batch.  They take turns
in an order drawn anew each round, so that a busy machine is busy for all.  `ratio` is plain's
median over theirs: 1.00 means that privacy costs no time.  `first` is the first step,
compilation included, in a process where later contestants profit from the tuning of earlier
ones.  `memory` is what XLA plans for temporaries: neither parameters and batch nor what a
kernel allocates inside itself.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import pathlib
import platform
import random
import statistics
import time
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from absl import app, flags, logging
from jax.flatten_util import ravel_pytree
from optax import contrib

import dpjax
from dpjax import clipping, losses, models, sampling
from dpjax.gradients import ENGINES

SEED, BOUND, NOISE_MULTIPLIER, LEARNING_RATE = 0, 1.0, 1.1, 0.1
TOLERANCE = 1e-4  # between the engines' clipped sums, relative to the norm of the sum
TURN = 0.1  # seconds: a contestant with shorter steps takes several in a row, after a warm one


class MaxPoolCNN(nn.Module):
    """A CIFAR-10 network of 550,570 parameters: conv, conv, max-pool, three times."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for channels in (32, 64, 128):
            x = jnp.tanh(nn.Conv(channels, (3, 3))(x))
            x = jnp.tanh(nn.Conv(channels, (3, 3))(x))
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = x.reshape(*x.shape[:-3], -1)
        return nn.Dense(10)(jnp.tanh(nn.Dense(128)(x)))


class Workload(NamedTuple):
    model: nn.Module
    shape: tuple[int, ...]
    batch_size: int


WORKLOADS = {
    "W1": Workload(models.TemperedCNN(), (28, 28, 1), 256),
    "W2": Workload(MaxPoolCNN(), (32, 32, 3), 256),
    "W4": Workload(models.MLP(features=(256, 256)), (784,), 1024),
}


def problem(workload: Workload) -> tuple[Any, Any, Any]:
    """The loss of one example, the first parameters, and a batch of noise with labels."""
    model, shape, size = workload
    for_x, for_y, for_params = jax.random.split(jax.random.key(SEED), 3)
    batch = jax.random.normal(for_x, (size, *shape)), jax.random.randint(for_y, (size,), 0, 10)
    params = jax.jit(model.init)(for_params, batch[0][0])["params"]
    return losses.of(model, losses.cross_entropy), params, batch


def clipped_sum(loss: Any, engine: str) -> Any:
    clipped = dpjax.clipped_grad(loss, clipping.flat(BOUND), engine)
    return lambda params, batch: clipped(params, batch).value


def disagreement(loss: Any, params: Any, batch: Any) -> dict[str, float]:
    """How far each engine's clipped sum is from that of vmap, which is the definition."""
    # An accelerator may multiply float32 in fewer bits; here only the engines should differ.
    with jax.default_matmul_precision("highest"):
        sums = {e: ravel_pytree(jax.jit(clipped_sum(loss, e))(params, batch))[0] for e in ENGINES}
    norm = jnp.linalg.norm
    return {e: float(norm(s - sums["vmap"]) / norm(sums["vmap"])) for e, s in sums.items()}


def contestants(loss: Any, params: Any, batch_size: int) -> dict[str, tuple[Any, Any]]:
    """Name -> (step, what it starts from): ``params, state = step(params, state, batch)``."""
    mechanism = dpjax.Mechanism(
        sampling=sampling.poisson(examples=60_000, batch_size=batch_size),
        clipping=clipping.flat(BOUND),
        noise_multiplier=NOISE_MULTIPLIER,
        steps=1_000_000,  # past its plan a mechanism returns NaN
    )
    key = jax.random.key(SEED)

    def mean_loss(params: Any, batch: Any) -> Any:
        return jnp.mean(jax.vmap(loss, (None, 0))(params, batch))

    def contestant(gradient: Any, link: optax.GradientTransformation) -> tuple[Any, Any]:
        optimizer = optax.chain(link, optax.sgd(LEARNING_RATE))

        @jax.jit
        def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any]:
            updates, state = optimizer.update(gradient(params, batch), state, params)
            return optax.apply_updates(params, updates), state

        return step, (params, optimizer.init(params))

    found = {"plain": contestant(jax.grad(mean_loss), optax.identity())}
    for engine in (*ENGINES, "auto"):
        gradient = clipped_sum(loss, engine)
        found[f"dpjax {engine}"] = contestant(gradient, mechanism.privatize(key))
    aggregate = contrib.differentially_private_aggregate(BOUND, NOISE_MULTIPLIER, key)
    found["optax.contrib"] = contestant(jax.vmap(jax.grad(loss), (None, 0)), aggregate)
    return found


def timed(step: Any, carry: Any, batch: Any, steps: int = 1) -> tuple[float, Any]:
    """Seconds per step of some steps in a row, and where they led."""
    started = time.perf_counter()
    for _ in range(steps):
        carry = step(*carry, batch)
    jax.block_until_ready(carry)
    return (time.perf_counter() - started) / steps, carry


def measure(workload: Workload, rounds: int, seconds: float) -> dict[str, Any]:
    """One workload: first steps, then the engines held to each other, then the rounds."""
    loss, params, batch = problem(workload)
    steps, carries, figures = {}, {}, {}
    for name, (step, start) in contestants(loss, params, workload.batch_size).items():
        first, carries[name] = timed(step, start, batch)
        memory = step.lower(*start, batch).compile().memory_analysis()
        planned = getattr(memory, "temp_size_in_bytes", None)  # not every backend tells
        figures[name] = {"first_s": first, "temporary_bytes": planned, "rounds_ms": []}
        steps[name] = step

    apart = disagreement(loss, params, batch)
    if not all(distance <= TOLERANCE for distance in apart.values()):
        raise RuntimeError(f"steps: the engines' clipped sums differ, relative to vmap: {apart}")

    order, left = random.Random(SEED), dict.fromkeys(steps, seconds)
    for _ in range(rounds):
        for name in order.sample(list(steps), len(steps)):
            if left[name] <= 0:
                continue
            started = time.perf_counter()
            each, carries[name] = timed(steps[name], carries[name], batch)
            if each < TURN:
                several = math.ceil(TURN / each)
                each, carries[name] = timed(steps[name], carries[name], batch, several)
            left[name] -= time.perf_counter() - started
            figures[name]["rounds_ms"].append(1e3 * each)

    for name, figure in figures.items():
        if not jnp.isfinite(ravel_pytree(carries[name][0])[0]).all():
            raise RuntimeError(f"steps: {name} ran into NaN or infinity; its times mean nothing.")
        figure["median_ms"] = statistics.median(figure["rounds_ms"])
        figure["ratio"] = figures["plain"]["median_ms"] / figure["median_ms"]
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    facts = {"parameters": size, "batch_size": workload.batch_size, "disagreement": apart}
    return {**facts, "contestants": figures}


def machine() -> dict[str, Any]:
    """What the figures were seen on."""
    device, cpu = jax.devices()[0], pathlib.Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "device": f"{jax.device_count()} x {device.device_kind} ({device.platform})",
        "cpu": f"{os.cpu_count()} cores of {(names or [platform.machine()])[0]}",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax")},
    }


def table(name: str, result: dict[str, Any]) -> str:
    rows = [
        f"{name}: {result['parameters']:,} parameters, batch {result['batch_size']}",
        f"  {'':14} median ms     fastest - slowest  rounds    ratio  first s  memory MiB",
    ]
    for who, f in result["contestants"].items():
        times, memory = f["rounds_ms"], f["temporary_bytes"]
        rows.append(
            f"  {who:14} {f['median_ms']:9.2f}  {min(times):9.2f} - {max(times):<8.2f} "
            f"{len(times):6}  {f['ratio']:7.3g}  {f['first_s']:7.1f}  "
            + ("         -" if memory is None else f"{memory / 2**20:10.1f}")
        )
    return "\n".join(rows)


def main(_: list[str]) -> None:
    logging.set_verbosity(logging.WARNING)  # JAX reports the accelerators it did not find
    jax.config.update("jax_enable_compilation_cache", False)  # or a first step is no first step
    asked = flags.FLAGS
    names, rounds = asked.workloads or list(WORKLOADS), asked.rounds
    if asked.smoke:
        jax.config.update("jax_disable_most_optimizations", True)  # compiling is all its time
        names, rounds = asked.workloads or ["W4"], 2
    if unknown := set(names) - set(WORKLOADS):
        raise app.UsageError(f"--workloads: {sorted(unknown)}; there are {', '.join(WORKLOADS)}.")
    report = {"smoke": asked.smoke, "rounds": rounds, "seconds": asked.seconds, **machine()}
    print("; ".join(f"{key} {value}" for key, value in report.items()), flush=True)
    report["workloads"] = {}
    for name in names:
        workload = WORKLOADS[name]._replace(**{"batch_size": 8} if asked.smoke else {})
        report["workloads"][name] = measure(workload, rounds, asked.seconds)
        print(table(name, report["workloads"][name]), flush=True)
    if asked.out:
        path = pathlib.Path(asked.out)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    # Not at the top: then importing this beside another experiment would define --out twice.
    flags.DEFINE_list("workloads", None, "Which; by default all, in a smoke run W4.")
    flags.DEFINE_integer("rounds", 10, "How many turns each contestant takes.", lower_bound=1)
    flags.DEFINE_float("seconds", 30.0, "After so long a contestant rests.", lower_bound=0.1)
    flags.DEFINE_bool("smoke", False, "Batches of 8, two rounds, little optimized: does it run?")
    flags.DEFINE_string("out", None, "JSON file for the figures.")
    app.run(main)

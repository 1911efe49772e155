# SPDX-License-Identifier: Apache-2.0
"""How long one private training step takes, beside the same step without privacy.

  claim     not run yet
  figures   not run yet
  hardware  not run yet
  command   python experiments/benchmarks/steps.py --out experiments/results/steps.json

Contestants: `plain` (not private), one per dpjax engine, dpjax's own choice, and Optax's
`differentially_private_aggregate`; each is a compiled step(params, state, batch) with SGD.
They take turns in an order drawn anew each round, so that a busy machine is busy for all.
`ratio` is plain's median time over theirs: 1.00 means that privacy costs no time.
`first` is the first step, compilation included; later contestants of a process profit from
what earlier ones tuned.  `memory` is XLA's plan for temporaries, without parameters and
batch, and without what a kernel allocates inside itself.
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
TOLERANCE = 1e-4  # of the engines' clipped sums, relative to the sum's norm
TURN = 0.1  # seconds: a contestant with shorter steps takes several in a row, after a warm one


class MaxPoolCNN(nn.Module):
    """The CIFAR-10 network of 550,570 parameters: conv, conv, max-pool, three times."""

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
    smoke_shape: tuple[int, ...]


WORKLOADS = {
    "W1": Workload(models.TemperedCNN(), (28, 28, 1), 256, (16, 16, 1)),
    "W2": Workload(MaxPoolCNN(), (32, 32, 3), 256, (8, 8, 3)),
    "W4": Workload(models.MLP(features=(256, 256)), (784,), 1024, (16,)),
}


def problem(workload: Workload, *, smoke: bool = False) -> tuple[Any, Any, Any]:
    """The loss, the first parameters and a batch of noise with labels to match."""
    shape = workload.smoke_shape if smoke else workload.shape
    size = 8 if smoke else workload.batch_size
    for_x, for_y, for_params = jax.random.split(jax.random.key(SEED), 3)
    batch = jax.random.normal(for_x, (size, *shape)), jax.random.randint(for_y, (size,), 0, 10)
    params = jax.jit(workload.model.init)(for_params, batch[0][0])["params"]
    return losses.of(workload.model, losses.cross_entropy), params, batch


def clipped_sum(loss: Any, engine: str) -> Any:
    clipped = dpjax.clipped_grad(loss, clipping.flat(BOUND), engine)
    return lambda params, batch: clipped(params, batch).value


def disagreement(loss: Any, params: Any, batch: Any) -> dict[str, float]:
    """How far each engine's clipped sum is from that of the engine which is the definition."""
    # An accelerator may multiply float32 in fewer bits; here only the engines should differ.
    with jax.default_matmul_precision("highest"):
        sums = {e: ravel_pytree(jax.jit(clipped_sum(loss, e))(params, batch))[0] for e in ENGINES}
    norm = jnp.linalg.norm
    return {e: float(norm(s - sums["vmap"]) / norm(sums["vmap"])) for e, s in sums.items()}


def contestants(loss: Any, batch_size: int) -> dict[str, tuple[Any, Any]]:
    """Name -> the gradient, and the Optax chain that takes it from there."""
    sgd, key = optax.sgd(LEARNING_RATE), jax.random.key(SEED)
    mechanism = dpjax.Mechanism(
        sampling=sampling.poisson(examples=60_000, batch_size=batch_size),
        clipping=clipping.flat(BOUND),
        noise_multiplier=NOISE_MULTIPLIER,
        steps=1_000_000,  # past its plan a mechanism returns NaN
    )

    def mean_loss(params: Any, batch: Any) -> Any:
        return jnp.mean(jax.vmap(loss, (None, 0))(params, batch))

    aggregate = contrib.differentially_private_aggregate(BOUND, NOISE_MULTIPLIER, key)
    return {
        "plain": (jax.grad(mean_loss), sgd),
        **{
            f"dpjax {engine}": (
                clipped_sum(loss, engine),
                optax.chain(mechanism.privatize(key), sgd),
            )
            for engine in [*ENGINES, "auto"]
        },
        "optax.contrib": (jax.vmap(jax.grad(loss), (None, 0)), optax.chain(aggregate, sgd)),
    }


def make_step(gradient: Any, optimizer: optax.GradientTransformation) -> Any:
    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(gradient(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    return step


def timed(step: Any, carry: Any, batch: Any, steps: int = 1) -> tuple[float, Any]:
    """Seconds per step of a few steps in a row, and where they led."""
    started = time.perf_counter()
    for _ in range(steps):
        carry = step(*carry, batch)
    jax.block_until_ready(carry)
    return (time.perf_counter() - started) / steps, carry


def measure(
    workload: Workload, *, rounds: int = 10, seconds: float = 30.0, smoke: bool = False
) -> dict[str, Any]:
    """One workload: first steps, then the engines held to each other, then the rounds."""
    loss, params, batch = problem(workload, smoke=smoke)
    steps, carries, figures = {}, {}, {}
    for name, (gradient, optimizer) in contestants(loss, len(batch[1])).items():
        steps[name] = make_step(gradient, optimizer)
        first, carries[name] = timed(steps[name], (params, optimizer.init(params)), batch)
        memory = steps[name].lower(*carries[name], batch).compile().memory_analysis()
        temporary = getattr(memory, "temp_size_in_bytes", None)
        figures[name] = {"first_step_s": first, "temporary_bytes": temporary, "rounds_ms": []}

    apart = disagreement(loss, params, batch)
    if not all(distance <= TOLERANCE for distance in apart.values()):
        raise RuntimeError(f"steps: the engines' clipped sums differ, by {apart} of their norm")

    left, order = dict.fromkeys(steps, seconds), random.Random(SEED)
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
            raise RuntimeError(f"steps: {name} ran into NaN or infinity; its times mean nothing")
        figure["median_ms"] = statistics.median(figure["rounds_ms"])
        figure["ratio"] = figures["plain"]["median_ms"] / figure["median_ms"]
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    facts = {"parameters": size, "batch_size": len(batch[1]), "disagreement": apart}
    return {**facts, "contestants": figures}


def machine() -> dict[str, Any]:
    """What the figures were seen on."""
    device, cpu = jax.devices()[0], pathlib.Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    named = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "devices": [device.platform, device.device_kind, jax.device_count()],
        "cpu": (named or [platform.machine()])[0],
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax")},
    }


def table(name: str, result: dict[str, Any]) -> str:
    title = f"{name}: {result['parameters']:,} parameters, batch {result['batch_size']}"
    rows = [title, f"  {'':14} median ms   range ms         ratio  rounds  first s  memory MB"]
    for who, f in result["contestants"].items():
        times, memory = f["rounds_ms"], f["temporary_bytes"]
        spread = f"{min(times):.4g} - {max(times):.4g}"
        words = "-" if memory is None else f"{memory / 2**20:.1f}"
        rows.append(
            f"  {who:14} {f['median_ms']:9.4g}   {spread:16} {f['ratio']:5.2f}  "
            f"{len(times):6}  {f['first_step_s']:7.1f}  {words:>9}"
        )
    return "\n".join(rows)


def main(_: list[str]) -> None:
    logging.set_verbosity(logging.WARNING)  # JAX reports the accelerators it did not find
    jax.config.update("jax_enable_compilation_cache", False)  # a cache would fake the first step
    asked = flags.FLAGS
    if unknown := set(asked.workloads) - set(WORKLOADS):
        raise app.UsageError(f"--workloads: {sorted(unknown)}; there are {', '.join(WORKLOADS)}.")
    limits = {"rounds": 2 if asked.smoke else asked.rounds, "seconds": asked.seconds}
    report: dict[str, Any] = {"smoke": asked.smoke, **limits, "machine": machine(), "workloads": {}}
    print(", ".join(f"{key} {value}" for key, value in report["machine"].items()), flush=True)
    for name in asked.workloads:
        result = measure(WORKLOADS[name], **limits, smoke=asked.smoke)
        report["workloads"][name] = result
        print(table(name, result), flush=True)
    if asked.out:
        path = pathlib.Path(asked.out)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    # Here, not at the top: importing this beside another experiment must not define flags twice.
    flags.DEFINE_list("workloads", list(WORKLOADS), "Which, by name.")
    flags.DEFINE_integer("rounds", 10, "How many turns each contestant takes.", lower_bound=1)
    flags.DEFINE_float("seconds", 30.0, "After so long a contestant's turns end.", lower_bound=0.1)
    flags.DEFINE_bool("smoke", False, "Tiny sizes, two rounds: does it run?")
    flags.DEFINE_string("out", None, "JSON file for all figures.")
    app.run(main)

# SPDX-License-Identifier: Apache-2.0
"""Time of a run outside its steps: host, dispatches, disk and checkpoints.

  result    3.4 % of the time in `fit` is the host's (step 0.470 ms, in `fit` 0.487); a checkpoint
            is on disk after 45 ms; the hash of MNIST's rows takes 118 ms
  hardware  two CPU cores
  command   make bench BENCH=overhead ARGS="--rounds 7 --out FILE"
  figures   experiments/results/overhead.json

The model is the demo's (digits, one hidden layer of 128, batches of 512).  A dispatch of n steps
takes a fixed time and n times a step's; both come from dispatches of 8 and of 64 steps.  Ledger,
log, signals and progress are what `fit` adds; checkpoints are timed by themselves.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import reporting
from absl import flags

import dpjax
from dpjax import checkpoints, clipping, data, losses, models, sampling, trees

_STEPS = flags.DEFINE_integer("steps", 2048, "Steps of a run.", 128)


def seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def algorithm(examples: Any) -> dpjax.types.Algorithm:
    mechanism = dpjax.Mechanism(
        sampling=sampling.poisson(1437, 512),
        clipping=clipping.flat(0.5),
        noise_multiplier=5.0,
        steps=10 * _STEPS.value,
    )
    model = models.MLP(features=(128,), classes=10)
    loss = losses.of(model, losses.cross_entropy)
    return dpjax.dpsgd(loss, optax.sgd(0.4, momentum=0.9), mechanism, examples)


def started(algorithm: dpjax.types.Algorithm) -> Any:
    model = models.MLP(features=(128,), classes=10)
    params = model.init(jax.random.key(0), jnp.zeros((8, 8, 1)))["params"]
    return algorithm.init(params, jax.random.key(0))


def dispatch(algorithm: dpjax.types.Algorithm, state: Any, count: int) -> float:
    """Seconds of a dispatch of ``count`` steps."""
    fresh = jax.block_until_ready(trees.copy(state))
    return seconds(lambda: jax.block_until_ready(algorithm.run(fresh, count)))


def driven(algorithm: dpjax.types.Algorithm, state: Any) -> float:
    """Seconds of a step when `fit` drives it."""
    options = {"evaluate_every": _STEPS.value, "progress": False, "steps": _STEPS.value}
    return seconds(lambda: dpjax.fit(algorithm, state, **options)) / _STEPS.value


def steps(algorithm: dpjax.types.Algorithm, rounds: int) -> tuple[float, float, float]:
    """Seconds of a step in a dispatch, of a dispatch without its steps, of a step in `fit`."""
    state, few, many = started(algorithm), 8, 64
    works = {
        "few": lambda: dispatch(algorithm, state, few),
        "many": lambda: dispatch(algorithm, state, many),
        "fit": lambda: driven(algorithm, state),
    }
    times = [{name: work() for name, work in works.items()} for _ in range(rounds + 1)]
    short, long, whole = (statistics.median(t[name] for t in times[1:]) for name in works)
    step = (long - short) / (many - few)
    return step, short - few * step, whole


def saving(state: Any, rounds: int) -> float:
    """Seconds until a checkpoint is on disk, for which the run waits."""
    with tempfile.TemporaryDirectory() as folder:
        kept = checkpoints.Checkpoints(folder)
        times = [seconds(lambda n=step: kept.save(n, state, {})) for step in range(rounds)]
        kept.close()
    return statistics.median(times)


def hashing(state: Any, rounds: int) -> dict[str, float]:
    """What it costs to know a run and its rows again."""
    images = np.zeros((60_000, 28, 28, 1), np.float32), np.zeros(60_000, np.int32)
    made = algorithm(data.load("digits").train)
    works = {
        "identity_ms": lambda: made.identity(state),
        "hash_of_mnist_ms": lambda: trees.fingerprint(images),
    }
    times = [{name: seconds(work) for name, work in works.items()} for _ in range(rounds)]
    return {name: 1e3 * statistics.median(t[name] for t in times) for name in works}


def main(asked: Any) -> None:
    report = reporting.begin(("dpjax", "jax", "orbax-checkpoint"), rounds=asked.rounds)
    train = data.load("digits").train
    resident = algorithm(train)
    step, alone, in_fit = steps(resident, asked.rounds)
    streamed, *_ = steps(algorithm(data.Stream(list(zip(*train, strict=True)))), asked.rounds)
    report |= {
        "step_ms": 1e3 * step,
        "dispatch_ms": 1e3 * alone,
        "step_in_fit_ms": 1e3 * in_fit,
        "host_share": (in_fit - step) / in_fit,
        "single_step_ms": 1e3 * (step + alone),
        "streamed_step_ms": 1e3 * streamed,
        "checkpoint_ms": 1e3 * saving(started(resident), asked.rounds),
        **hashing(started(resident), asked.rounds),
    }
    for name in list(report)[-9:]:
        print(f"{name:22} {report[name]:8.3f}")
    reporting.keep(report, asked.out)


if __name__ == "__main__":
    reporting.run(main, smoke=None, rounds=15)

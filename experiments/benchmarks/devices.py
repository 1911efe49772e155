# SPDX-License-Identifier: Apache-2.0
"""Time, memory and agreement of a private step on the device that JAX finds.

  result    on an H100 a private step takes 1.22, 1.18, 1.60, 1.33 and 0.91 times a plain one (W1 to
            W5), where `vmap` takes 2.69 (W1), 7.34 (W3), 2.39 and 1.15; the fastest mode of Opacus
            takes 10.6, 6.1, 2.9, 8.4 and 9.8 times as long as dpjax
  hardware  one NVIDIA H100 80GB, JAX 0.11.2; no TPU; on a CPU it runs too, and shows that it runs
  command   make bench BENCH=devices ARGS="--models=W5 --seconds=2 --out FILE", once for each model
  figures   experiments/results/devices.json; the table in docs/pages/speed.md (``--page``)

Each model of `device_models` is compiled as a plain step, a plain step with noise, dpjax's engines
and jax_privacy, if it is installed, side by side; W1 to W5 beside PyTorch and Opacus too, if
``--peers_python`` has them. The steps take turns in random order. "away" is the
largest difference between the clipped sum on the device and on the CPU of the machine, in bounds,
and "norms" that of a norm, relative to it: a matrix unit that rounds shows here. A step that fails,
such as for lack of memory, says so in its row, and the others are measured.
"""

from __future__ import annotations

import concurrent.futures
import functools
import importlib.util
import json
import math
import os
import pathlib
import statistics
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags

import dpjax
from dpjax import clipping
from experiments.benchmarks import (
    contestants,
    device_models,
    reporting,
    steps,
    workers,
)
from experiments.benchmarks.contestants import Contestant, Refused
from experiments.benchmarks.device_models import BOUND, gradient_of
from experiments.benchmarks.workloads import CLASSES, SEED, WORKLOADS
from experiments.common import markdown

# Examples whose clipped sum is compared with the CPU's, of models that are slow there.
EXAMPLES = {"WRN-16-4": 8, "ViT-S": 2, "Transformer": 2, "Transformer LoRA": 2}
# Peers in processes of their own; jax_privacy runs in this one.
OTHERS = tuple(name for name in contestants.PEERS if name != "jax_privacy")


def measure(
    name: str, chosen: list[str], batch_size: int, rounds: int, seconds: float, python: str
) -> dict[str, Any]:
    """The steps of one model, compiled together and then in turns."""
    shapes = device_models.problem(name, batch_size)
    params, batch, frozen = filled(shapes[1:])
    loss = functools.partial(with_frozen, shapes.loss)
    there = [s for s in chosen if s not in OTHERS]
    there = [s for s in there if s != "jax_privacy" or importlib.util.find_spec(s)]
    others = [
        s for s in chosen if s in OTHERS and name in WORKLOADS and pathlib.Path(python).exists()
    ]
    made = {step: contestant(step, loss, params, (frozen, batch)) for step in there}
    some = jax.tree.map(lambda x: x[: EXAMPLES.get(name, batch_size)], batch)
    stand = [jax.devices()[0], jax.devices("cpu")[0]]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        peers = {
            other: pool.submit(contestants.peer, python, other, name, batch_size).result
            for other in others
        }
        sums = [pool.submit(clipped_sum, loss, params, (frozen, some), device) for device in stand]
        why = dict(zip(there, pool.map(refusal, made.values()), strict=True))
        away = apart(*(found.result() for found in sums))
    makes = {step: functools.partial(refusing, made[step], why[step]) for step in there} | peers
    ready, figures = steps.start(makes)
    steps.take_turns(ready, figures, rounds, seconds)
    _close(ready)
    for step in ready:
        figures[step]["median_ms"] = statistics.median(figures[step]["rounds_ms"])
        if step in there:
            del figures[step]["first_s"]  # compiled before
    return {"batch_size": batch_size, "steps": figures, **away}


def filled(shapes: Any) -> Any:
    """Arrays of these shapes: noise, and the first few words and classes."""
    leaves, structure = jax.tree.flatten(shapes)

    def fill(shape: Any, key: Any) -> Any:
        if jnp.issubdtype(shape.dtype, jnp.integer):
            return jax.random.randint(key, shape.shape, 0, CLASSES, shape.dtype)
        return 0.05 * jax.random.normal(key, shape.shape, shape.dtype)

    return structure.unflatten(
        map(fill, leaves, jax.random.split(jax.random.key(SEED), len(leaves)))
    )


def with_frozen(loss: Any, frozen: Any, params: Any, example: Any) -> Any:
    """The loss of an example; of adapters, if there are frozen arrays."""
    return (loss if frozen is None else device_models.adapted(loss, frozen))(params, example)


def contestant(step: str, loss: Any, params: Any, given: Any) -> Contestant:
    """A step whose batch brings the frozen arrays, so that they are no constants of its program."""
    size = len(given[1][1])

    def gradient(params: Any, given: Any) -> Any:
        frozen, batch = given
        own, _ = gradient_of(step, functools.partial(loss, frozen), size)
        return own(params, batch)

    _, link = gradient_of(step, functools.partial(loss, given[0]), size)
    return contestants.compiled(gradient, link, params, given)


def clipped_sum(loss: Any, params: Any, given: Any, device: Any) -> Any:
    """The clipped sum and the norms on a device."""

    def run(params: Any, given: Any) -> Any:
        frozen, batch = given
        clipped = dpjax.clipped_grad(functools.partial(loss, frozen), clipping.flat(BOUND))
        found = clipped(params, batch)
        return found.value, found.norms

    with jax.default_device(device):
        return jax.device_get(jax.jit(run)(*jax.device_put((params, given), device)))


def apart(here: Any, there: Any) -> dict[str, float]:
    """How far a clipped sum and its norms are from the CPU's."""
    (value, norms), (want, lengths) = here, there
    away = jax.tree.map(lambda a, b: float(abs(a - b).max()), value, want)
    return {
        "away": max(jax.tree.leaves(away)) / BOUND,
        "norms": float((abs(norms - lengths) / lengths).max()),
    }


def refusal(made: Contestant) -> str | None:
    """Compiles a step; why it failed, if it did, such as for lack of memory."""
    try:
        made.prepare()
    except jax.errors.JaxRuntimeError as error:
        return str(error).splitlines()[0][:100]
    return None


def refusing(made: Contestant, why: str | None = None) -> Contestant:
    """A contestant that may fail without the others, such as for lack of memory."""

    def run(count: int) -> float:
        if why:
            raise Refused(why)
        try:
            return made.run(count)
        except jax.errors.JaxRuntimeError as error:
            raise Refused(str(error).splitlines()[0][:100]) from error

    return made._replace(run=run)


def _close(ready: dict[str, Contestant]) -> None:
    for name, made in ready.items():
        if not made.sound():
            raise RuntimeError(f"devices: {name} ran into NaN or infinity; its times are void.")
        made.close()


def table(report: dict[str, Any]) -> str:
    """The measurements as a table in Markdown."""
    rows = []
    for model, measured in report["models"].items():
        plain = measured["steps"]["plain"].get("median_ms", math.nan)
        for step, figure in measured["steps"].items():
            if "refused" in figure:
                rows.append(f"| {model} | {step} | {figure['refused']} | | | |")
                continue
            memory = figure.get("planned_bytes", figure.get("peak_bytes"))
            cells = [
                f"{figure['median_ms']:.3f} ({figure['median_ms'] / plain:.2f})",
                "-" if memory is None else f"{memory / 2**20:,.1f}",
                *(f"{measured[key]:.1e}" if step == "auto" else "" for key in ("away", "norms")),
            ]
            rows.append(markdown.line(model, step, *cells))
    return markdown.table("| model | step | measured ms | temporaries, MiB | away | norms |", rows)


def main(asked: Any) -> None:
    # Before JAX looks for devices: peers on the same GPU need memory as well.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax.config.update("jax_enable_compilation_cache", False)  # nor may another run's program count
    report = reporting.begin(("jax", "jaxlib", "optax"), smoke=asked.smoke)
    out = pathlib.Path(asked.out or "")
    earlier = json.loads(out.read_text())["models"] if out.is_file() else {}
    report |= {"kind": jax.devices()[0].device_kind, "models": earlier}
    for name in asked.models or (["W4"] if asked.smoke else list(device_models.BATCH_SIZES)):
        size = 8 if asked.smoke else asked.batch_size or device_models.BATCH_SIZES[name]
        rounds = 2 if asked.smoke else asked.rounds
        known = [*device_models.STEPS, *OTHERS]
        chosen = reporting.chosen("steps", known, asked.steps, always=("plain",))
        limits = rounds, asked.seconds
        found = measure(name, chosen, size, *limits, asked.peers_python)
        report["models"][name] = found
        reporting.keep(report, asked.out)
    print(shown := table(report))
    markdown.rewrite(asked.page, {"measured steps": shown})


if __name__ == "__main__":
    flags.DEFINE_string("page", None, "Markdown file whose table is written again.")
    flags.DEFINE_list("models", None, "Which; by default all, in a smoke run W4.")
    flags.DEFINE_list("steps", None, "Which; by default all, plain always.")
    flags.DEFINE_float("seconds", 30.0, "After so long a step rests.", lower_bound=0.1)
    flags.DEFINE_integer("batch_size", None, "Of every model; by default its own.", 1)
    flags.DEFINE_string("peers_python", str(workers.PEERS), "Interpreter with PyTorch and Opacus.")
    reporting.run(
        main,
        smoke="A batch of 8, two rounds",
        rounds=10,
        out="JSON file for the figures, rewritten after each model; others that it holds are kept.",
    )

# SPDX-License-Identifier: Apache-2.0
"""Time, memory and agreement of a private step on the device that JAX finds.

claim     a private step costs little more than a plain one on a GPU
verdict   0.91 to 1.60 times as much for W1 to W5; the fastest mode of Opacus 2.9 to 10.6 of that
hardware  one NVIDIA H100 80GB, JAX 0.11.2
command   make bench BENCH=devices ARGS="--models=W5 --seconds=2 --out FILE", once for each model

Steps take turns in random order; W1 to W5 beside PyTorch and Opacus too, if ``--peers_python`` has
them. "away" is the largest difference between the clipped sum on the device and on the CPU, in
bounds, and "norms" that of a norm, relative to it: a matrix unit that rounds shows here. ``--page``
writes the table in docs/pages/speed.md.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import os
import pathlib
import statistics
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from absl import flags

import dpjax
from dpjax import clipping, losses, models, noise
from experiments.benchmarks import contestants, reporting, steps, workers, workloads
from experiments.benchmarks.contestants import BOUND, Contestant, Refused
from experiments.benchmarks.workloads import CLASSES, SEED, WORKLOADS, Workload
from experiments.common import markdown

STEPS = ("plain", "auto", "vmap", "jax_privacy", "noised")
# Peers in processes of their own; jax_privacy runs in this one.
OTHERS = tuple(name for name in contestants.PEERS if name != "jax_privacy")
WIDTH, DEPTH, RANK = 768, 12, 8  # of the Transformer; of adapters
TEXTS = models.TextTransformer(
    classes=CLASSES,
    vocabulary=50_304,
    length=1024,
    width=WIDTH,
    depth=DEPTH,
    heads=12,
    padding=None,
    activation=nn.gelu,
)
LARGE = {
    "WRN-16-4": Workload(models.WideResNet(), None, (32, 32, 3), 4096),
    "ViT-S": Workload(models.ViT(width=384, heads=6), None, (224, 224, 3), 256),
    "Transformer": Workload(TEXTS, None, (1024,), 64, 50_304),
    "Transformer LoRA": Workload(TEXTS, None, (1024,), 64, 50_304),
}
MODELS = {**WORKLOADS, **LARGE}
# Examples whose clipped sum is compared with the CPU's, of models that are slow there.
EXAMPLES = {"WRN-16-4": 8, "ViT-S": 2, "Transformer": 2, "Transformer LoRA": 2}


def problem(name: str, batch_size: int) -> tuple[Any, Any, Any]:
    """The loss ``(frozen, params, example)``, parameters, and frozen arrays with a batch."""
    workload = MODELS[name]._replace(batch_size=batch_size)
    loss, params, batch = workloads.problem(workload)
    if name.startswith("Transformer"):
        loss = in_bfloat16(workload.model)
    if name.endswith("LoRA"):
        pairs = adapters(jax.random.key(SEED), WIDTH, DEPTH)
        return lambda w, *given: adapted(loss, w)(*given), pairs, (halved(params), batch)
    return lambda _, *given: loss(*given), params, (None, batch)


def halved(params: Any) -> Any:
    """The parameters in bfloat16, which the network then computes in."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)


def in_bfloat16(model: nn.Module) -> Callable[[Any, Any], jax.Array]:
    """The loss of one example, computed in bfloat16 up to the logits."""
    of_model = losses.of(model, lambda h, y: losses.cross_entropy(h.astype(jnp.float32), y))
    return lambda params, example: of_model(halved(params), example)


def adapters(key: jax.Array, width: int, depth: int) -> dict[str, dict[str, jax.Array]]:
    """Two thin matrices beside the kernel of every query and value; the product begins at 0."""
    block = "Transformer/encoderblock_{}/MultiHeadDotProductAttention_1/{}"
    names = [block.format(i, which) for i in range(depth) for which in ("query", "value")]
    return {
        name: {
            "down": jax.random.normal(one, (width, RANK)) / width**0.5,
            "up": jnp.zeros((RANK, width)),
        }
        for name, one in zip(names, jax.random.split(key, len(names)), strict=True)
    }


def adapted(loss: Callable[[Any, Any], Any], frozen: Any) -> Callable[[Any, Any], Any]:
    """The loss of the adapters beside frozen weights."""

    def of_adapters(added: Any, example: Any) -> jax.Array:
        thin = halved(added)

        def beside(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
            out, pair = call(*args, **kwargs), thin.get("/".join(context.module.path))
            if pair is None or context.method_name != "__call__":
                return out
            return out + (args[0] @ pair["down"] @ pair["up"]).reshape(out.shape)

        with nn.intercept_methods(beside):
            return loss(frozen, example)

    return of_adapters


def noised(gradient: Any) -> Any:
    """Adds noise to a plain gradient: no private step can cost less."""

    def noisy(params: Any, batch: Any) -> Any:
        key, plain = jax.random.key(SEED), gradient(params, batch)
        return jax.tree.map(lambda x: x + noise.standard_normal(key, x.shape), plain)

    return noisy


def program(step: str, loss: Any, batch_size: int) -> tuple[Any, optax.GradientTransformation]:
    """A gradient ``(params, batch) -> tree`` of a step in `STEPS`, and what makes it private."""
    if step == "jax_privacy":
        return contestants.jax_privacy(loss, batch_size)
    programs = contestants.of_jax(loss, batch_size)
    if step == "noised":
        return noised(programs["plain"][0]), optax.identity()
    return programs["plain" if step == "plain" else f"dpjax {step}"]


def contestant(step: str, loss: Any, params: Any, given: Any) -> Contestant:
    """A step whose batch brings the frozen arrays, so that they are no constants of its program."""
    size = len(given[1][1])

    def gradient(params: Any, given: Any) -> Any:
        frozen, batch = given
        return program(step, functools.partial(loss, frozen), size)[0](params, batch)

    _, link = program(step, functools.partial(loss, given[0]), size)
    return refusing(contestants.compiled(gradient, link, params, given))


def refusing(made: Contestant) -> Contestant:
    """A contestant that may fail without the others, such as for lack of memory."""

    def run(count: int) -> float:
        try:
            return made.run(count)
        except jax.errors.JaxRuntimeError as error:
            raise Refused(str(error).splitlines()[0][:100]) from error

    return made._replace(run=run)


def measure(
    name: str, chosen: list[str], batch_size: int, rounds: int, seconds: float, python: str
) -> dict[str, Any]:
    loss, params, given = problem(name, batch_size)
    makes: dict[str, Callable[[], Contestant]] = {}
    for step in chosen:
        if step not in OTHERS:
            if step != "jax_privacy" or importlib.util.find_spec(step):
                makes[step] = functools.partial(contestant, step, loss, params, given)
        elif name in WORKLOADS and pathlib.Path(python).exists():
            makes[step] = functools.partial(contestants.peer, python, step, name, batch_size)
    ready, figures = steps.start(makes)
    steps.take_turns(ready, figures, rounds, seconds)
    for step, made in ready.items():
        if not made.sound():
            raise RuntimeError(f"devices: {step} ran into NaN or infinity; its times are void.")
        made.close()
        figures[step]["median_ms"] = statistics.median(figures[step]["rounds_ms"])
    some = given[0], jax.tree.map(lambda x: x[: EXAMPLES.get(name, batch_size)], given[1])
    return {"batch_size": batch_size, "steps": figures, **apart(loss, params, some)}


def apart(loss: Any, params: Any, given: Any) -> dict[str, float]:
    """How far a clipped sum and its norms are from the CPU's."""

    def run(params: Any, given: Any) -> Any:
        frozen, batch = given
        clipped = dpjax.clipped_grad(functools.partial(loss, frozen), clipping.flat(BOUND))
        clipped_sum = clipped(params, batch)
        return clipped_sum.value, clipped_sum.norms

    results = []
    for device in (jax.devices()[0], jax.devices("cpu")[0]):
        with jax.default_device(device):
            results.append(jax.device_get(jax.jit(run)(*jax.device_put((params, given), device))))
    (value, norms), (want, lengths) = results
    away = jax.tree.map(lambda a, b: float(abs(a - b).max()), value, want)
    return {
        "away": max(jax.tree.leaves(away)) / BOUND,
        "norms": float((abs(norms - lengths) / lengths).max()),
    }


def table(report: dict[str, Any]) -> str:
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
    for name in asked.models or (["W4"] if asked.smoke else list(MODELS)):
        size = 8 if asked.smoke else MODELS[name].batch_size
        rounds = 2 if asked.smoke else asked.rounds
        chosen = reporting.chosen("steps", [*STEPS, *OTHERS], asked.steps, always=("plain",))
        python = asked.peers_python
        report["models"][name] = measure(name, chosen, size, rounds, asked.seconds, python)
        reporting.keep(report, asked.out)
    print(shown := table(report))
    markdown.rewrite(asked.page, {"measured steps": shown})


if __name__ == "__main__":
    flags.DEFINE_string("page", None, "Markdown file whose table is written again.")
    flags.DEFINE_list("models", None, "Which; by default all, in a smoke run W4.")
    flags.DEFINE_list("steps", None, "Which; by default all, plain always.")
    flags.DEFINE_float("seconds", 30.0, "After so long a step rests.", lower_bound=0.1)
    flags.DEFINE_string("peers_python", str(workers.PEERS), "Interpreter with PyTorch and Opacus.")
    reporting.run(
        main,
        smoke="A batch of 8, two rounds",
        rounds=10,
        out="JSON file for the figures, rewritten after each model; others that it holds are kept.",
    )

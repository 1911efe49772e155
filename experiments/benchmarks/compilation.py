# SPDX-License-Identifier: Apache-2.0
"""The first step of a run, with tracing and compilation, beside that of plain JAX.

  result    12 blocks of a Transformer 1.8 times plain JAX (15.7 and 8.9 s), a CNN 2.8 times (4.6
            and 1.6 s).  About 2 s are draw, exact sums, noise and checksum, whatever the model: a
            linear one takes 2.4 and 0.3 s.  12 blocks in a scan take 5.9 s, one block alone 4.2 s
  hardware  one core of an AMD EPYC; JAX 0.10.2
  command   make bench BENCH=compilation ARGS="--out experiments/results/compilation.json"
  figures   experiments/results/compilation.json

A step is `dpjax.dpsgd` with Poisson batches of 32 of 256 examples, clipping and noise; the plain
one is JAX's gradient of the mean loss of 32 examples and the same optimizer.  Each first step is
taken in a process of its own without a compilation cache, and costs the CPU time from the first
call, of `init` or of the plain step, to the new parameters.  "again" is the same step once more.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
import reporting
from absl import app, flags

import dpjax
from dpjax import clipping, losses, models, sampling

EXAMPLES, BATCH = 256, 32
WIDTH, HEADS, TOKENS, CLASSES = 64, 4, 16, 10
STEPS = ("plain", "private")
# Made here, so that no step pays for the import of the accountants.
MECHANISM = dpjax.Mechanism(
    sampling=sampling.poisson(EXAMPLES, BATCH),
    clipping=clipping.flat(1.0),
    noise_multiplier=1.0,
    steps=10,
)


def cnn() -> tuple[Any, Any, Any]:
    """The CNN of the tempered-sigmoid paper, on images of 28 x 28."""
    model = models.by_name("tempered_cnn", CLASSES)
    x = jnp.zeros((EXAMPLES, 28, 28, 1))
    params = jax.jit(model.init)(jax.random.key(0), x[:1])["params"]
    return losses.of(model, losses.cross_entropy), params, x


def transformer(depth: int, scanned: bool) -> tuple[Any, Any, Any]:
    """Blocks of attention and a perceptron, written one after the other or as one `lax.scan`."""
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def matrix(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) / shape[-2] ** 0.5

    sizes = {"query": (WIDTH, WIDTH), "key": (WIDTH, WIDTH), "value": (WIDTH, WIDTH)}
    sizes |= {"out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    stacked: dict[str, Any] = {name: matrix(depth, *size) for name, size in sizes.items()}
    stacked |= {f"{name} scale": jnp.ones((depth, WIDTH)) for name in ("first", "second")}

    def normed(h: Any, scale: Any) -> Any:
        return scale * (h - h.mean(-1, keepdims=True)) / (h.std(-1, keepdims=True) + 1e-6)

    def block(h: Any, p: Any) -> tuple[Any, None]:
        x = normed(h, p["first scale"])
        q, k, v = ((x @ p[n]).reshape(TOKENS, HEADS, -1) for n in ("query", "key", "value"))
        weights = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5)
        h = h + jnp.einsum("hqk,khd->qhd", weights, v).reshape(TOKENS, WIDTH) @ p["out"]
        x = normed(h, p["second scale"])
        return h + jax.nn.gelu(x @ p["up"]) @ p["down"], None

    each = [jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(depth)]
    params = {"blocks": stacked if scanned else each, "head": matrix(WIDTH, CLASSES)}

    def loss(params: Any, example: Any) -> Any:
        h, label = example
        if scanned:
            h, _ = jax.lax.scan(block, h, params["blocks"])
        else:
            for p in params["blocks"]:
                h, _ = block(h, p)
        return losses.cross_entropy(h.mean(0) @ params["head"], label)

    return loss, params, jax.random.normal(next(keys), (EXAMPLES, TOKENS, WIDTH))


def linear() -> tuple[Any, Any, Any]:
    """Hardly a model: what is left is the cost of draw, sums, noise and seals."""

    def loss(params: Any, example: Any) -> Any:
        return losses.cross_entropy(example[0] @ params, example[1])

    return loss, jnp.zeros((WIDTH, CLASSES)), jnp.zeros((EXAMPLES, WIDTH))


MODELS: dict[str, Callable[[], tuple[Any, Any, Any]]] = {
    "linear": linear,
    "CNN": cnn,
    "1 block": lambda: transformer(1, scanned=False),
    "4 blocks": lambda: transformer(4, scanned=False),
    "12 blocks": lambda: transformer(12, scanned=False),
    "12 blocks in a scan": lambda: transformer(12, scanned=True),
}


def step_of(kind: str, loss: Any, params: Any, batch: Any) -> Iterator[Any]:
    """Yields the parameters after each step."""
    optimizer = optax.sgd(0.1, momentum=0.9)
    if kind == "private":
        algorithm = dpjax.dpsgd(loss, optimizer, MECHANISM, batch)
        state = algorithm.init(dpjax.noise.secret_key(), params)
        while True:
            state, _ = algorithm.step(state)
            yield state.params

    @jax.jit
    def step(params: Any, moves: Any, some: Any) -> Any:
        mean = lambda p: jnp.mean(jax.vmap(loss, (None, 0))(p, some))  # noqa: E731
        changes, moves = optimizer.update(jax.grad(mean)(params), moves, params)
        return optax.apply_updates(params, changes), moves

    some, moves = jax.tree.map(lambda leaf: leaf[:BATCH], batch), optimizer.init(params)
    while True:
        params, moves = step(params, moves, some)
        yield params


def one(model: str, kind: str) -> dict[str, float]:
    """CPU seconds of the first step and of the next, in this process."""
    jax.config.update("jax_enable_compilation_cache", False)
    loss, params, x = MODELS[model]()
    batch = jax.block_until_ready((x, jnp.arange(EXAMPLES) % CLASSES))
    steps, seconds = step_of(kind, loss, params, batch), []
    for _ in range(2):
        begun = time.process_time()
        jax.block_until_ready(next(steps))
        seconds.append(time.process_time() - begun)
    return dict(zip(("first_s", "again_s"), seconds, strict=True))


def measured(model: str, rounds: int) -> dict[str, Any]:
    """Medians of a model's first steps, plain and private in turns."""
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in STEPS}
    for _ in range(rounds):
        for kind in STEPS:
            command = [sys.executable, __file__, f"--one={model}", f"--kind={kind}"]
            answer = subprocess.run(command, capture_output=True, text=True, check=True)
            found[kind].append(json.loads(answer.stdout.splitlines()[-1]))
    medians = {
        kind: {name: statistics.median(each[name] for each in all_) for name in all_[0]}
        for kind, all_ in found.items()
    }
    return {**medians, "ratio": medians["private"]["first_s"] / medians["plain"]["first_s"]}


def main(argv: list[str]) -> None:
    reporting.only_flags(argv)
    asked = flags.FLAGS
    if asked.one:
        print(json.dumps(one(asked.one, asked.kind)))
        return
    some, rounds = (["linear"], 1) if asked.smoke else (list(MODELS), asked.rounds)
    report = reporting.begin(("jax", "jaxlib", "optax"), smoke=asked.smoke, rounds=rounds)
    report["models"] = {}
    for model in some:
        found = report["models"][model] = measured(model, rounds)
        plain, private = (found[kind]["first_s"] for kind in STEPS)
        print(f"{model:20} plain {plain:6.2f} s  private {private:6.2f} s  {found['ratio']:5.2f} x")
        reporting.keep(report, asked.out)


if __name__ == "__main__":
    flags.DEFINE_integer("rounds", 3, "How many first steps of each kind.", lower_bound=1)
    flags.DEFINE_bool("smoke", False, "One model, one round: does it run?")
    flags.DEFINE_string("out", None, "JSON file for the figures.")
    flags.DEFINE_enum("one", None, list(MODELS), "Takes two steps of this model, here.")
    flags.DEFINE_enum("kind", "plain", list(STEPS), "The kind of step, with --one.")
    app.run(main)

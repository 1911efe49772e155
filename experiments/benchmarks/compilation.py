# SPDX-License-Identifier: Apache-2.0
"""The first step of a run, with tracing and compilation, beside that of plain JAX.

claim     a private first step takes at most about 2.7 times the time of a plain one
verdict   so it is, but for models so small that draw, sums and noise are most of it
hardware  one core of an AMD EPYC; JAX 0.10.2
command   make bench BENCH=compilation ARGS="--rounds 1 --out experiments/results/compilation.json"

A step is `dpjax.dpsgd` with Poisson batches of 32 of 256 examples; the plain one is JAX's gradient
of the mean loss of 32 examples. "vmap" is DP-SGD as a few lines of JAX. Each first step is taken
in a process of its own without a compilation cache, and costs the CPU time from the first call, of
`init` or of another step, to the new parameters. "again" is the same step once more.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import dpjax
from dpjax import clipping, losses, models, sampling
from experiments.benchmarks import reporting, workers

EXAMPLES, BATCH = 256, 32
WIDTH, TOKENS, CLASSES = 64, 16, 10
STEPS = ("plain", "private", "vmap")
# Made here, so that no step pays for the import of the accountants.
MECHANISM = dpjax.Mechanism(
    sampling=sampling.poisson(EXAMPLES, BATCH),
    clipping=clipping.flat(1.0),
    noise_multiplier=1.0,
    steps=10,
)


def of_module(model: nn.Module, *shape: int) -> tuple[Any, Any, Any]:
    x = jax.random.normal(jax.random.key(0), (EXAMPLES, *shape))
    params = jax.jit(model.init)(jax.random.key(0), x[0])["params"]
    return losses.of(model, losses.cross_entropy), params, x


class Block(nn.Module):
    @nn.compact
    def __call__(self, h: Any, _: Any = None) -> tuple[Any, None]:
        h = h + nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(h))
        return h + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(h)))), None


class Transformer(nn.Module):
    """Blocks one after the other, or as one `lax.scan`."""

    depth: int
    scanned: bool = False

    @nn.compact
    def __call__(self, h: Any) -> Any:
        if self.scanned:
            every = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            h, _ = nn.scan(Block, length=self.depth, **every)()(h, None)
        for _ in range(0 if self.scanned else self.depth):
            h, _ = Block()(h)
        return nn.Dense(CLASSES)(h.mean(0))


MODELS: dict[str, Callable[[], tuple[Any, Any, Any]]] = {
    # Hardly a model: what is left is the cost of draw, sums and noise.
    "linear": lambda: of_module(nn.Dense(CLASSES), WIDTH),
    "CNN": lambda: of_module(models.by_name("tempered_cnn", CLASSES), 28, 28, 1),
    "1 block": lambda: of_module(Transformer(1), TOKENS, WIDTH),
    "4 blocks": lambda: of_module(Transformer(4), TOKENS, WIDTH),
    "12 blocks": lambda: of_module(Transformer(12), TOKENS, WIDTH),
    "12 blocks in a scan": lambda: of_module(Transformer(12, scanned=True), TOKENS, WIDTH),
}


def step_of(kind: str, loss: Any, params: Any, batch: Any) -> Iterator[Any]:
    """Yields the parameters after each step."""
    optimizer = optax.sgd(0.1, momentum=0.9)
    if kind == "private":
        algorithm = dpjax.dpsgd(loss, optimizer, MECHANISM, batch)
        state = algorithm.init(params)
        while True:
            state, _ = algorithm.step(state)
            yield state.params

    @jax.jit
    def plain(params: Any, moves: Any, some: Any, number: Any) -> Any:
        del number

        def mean(params: Any) -> Any:
            return jnp.mean(jax.vmap(loss, (None, 0))(params, some))

        changes, moves = optimizer.update(jax.grad(mean)(params), moves, params)
        return optax.apply_updates(params, changes), moves

    @jax.jit
    def with_vmap(params: Any, moves: Any, data: Any, number: Any) -> Any:
        for_draw, for_noise = jax.random.split(jax.random.fold_in(key, number))
        drawn = jax.random.bernoulli(for_draw, BATCH / EXAMPLES, (EXAMPLES,))
        rows = jnp.nonzero(drawn, size=2 * BATCH, fill_value=0)[0]
        mask = (jnp.arange(2 * BATCH) < drawn.sum()).astype(jnp.float32)

        def clipped(example: Any) -> Any:
            gradient = jax.grad(loss)(params, example)
            factor = 1 / jnp.maximum(optax.tree.norm(gradient), 1)
            return jax.tree.map(lambda x: x * factor, gradient)

        def noisy(gradients: Any, noise: Any) -> Any:
            return (jnp.tensordot(mask, gradients, 1) + noise) / BATCH

        gradients = jax.vmap(clipped)(jax.tree.map(lambda leaf: leaf[rows], data))
        noise = optax.tree.random_like(for_noise, params, jax.random.normal)
        changes, moves = optimizer.update(jax.tree.map(noisy, gradients, noise), moves, params)
        return optax.apply_updates(params, changes), moves

    step, some = with_vmap, batch
    if kind == "plain":
        step, some = plain, jax.tree.map(lambda leaf: leaf[:BATCH], batch)
    moves, key = optimizer.init(params), jax.random.key(0)
    for number in itertools.count():
        params, moves = step(params, moves, some, number)
        yield params


def measured(model: str, rounds: int) -> dict[str, Any]:
    """Medians of a model's first steps, each kind in turns and in new processes."""
    answers: dict[str, list[dict[str, float]]] = {kind: [] for kind in STEPS}
    for _ in range(rounds):
        for kind in STEPS:
            worker = workers.Worker(sys.executable, "compilation", model, kind)
            answers[kind].append(worker.ask({}))
            worker.close()
    medians = {
        kind: {name: statistics.median(times[name] for times in of) for name in of[0]}
        for kind, of in answers.items()
    }
    private = medians["private"]["first_s"]
    ratios = {f"over {kind}": private / medians[kind]["first_s"] for kind in ("plain", "vmap")}
    return {**medians, **ratios}


def answer(question: dict[str, Any]) -> dict[str, float]:
    """CPU seconds of the first step and of the next, in this process."""
    del question
    _, model, kind = sys.argv
    jax.config.update("jax_enable_compilation_cache", False)
    loss, params, x = MODELS[model]()
    batch = jax.block_until_ready((x, jnp.arange(EXAMPLES) % CLASSES))
    steps, seconds = step_of(kind, loss, params, batch), []
    for _ in range(2):
        begun = time.process_time()
        jax.block_until_ready(next(steps))
        seconds.append(time.process_time() - begun)
    return dict(zip(("first_s", "again_s"), seconds, strict=True))


def main(asked: Any) -> None:
    some, rounds = (["linear"], 1) if asked.smoke else (list(MODELS), asked.rounds)
    report = reporting.begin(("jax", "jaxlib", "optax"), smoke=asked.smoke, rounds=rounds)
    report["models"] = {}
    for model in some:
        times = report["models"][model] = measured(model, rounds)
        seconds = "  ".join(f"{kind} {times[kind]['first_s']:6.2f} s" for kind in STEPS)
        print(f"{model:20} {seconds}  {times['over plain']:5.2f} x  {times['over vmap']:5.2f} x")
        reporting.keep(report, asked.out)


if __name__ == "__main__" and sys.argv[1:2] and sys.argv[1] in MODELS:
    workers.serve(answer)
elif __name__ == "__main__":
    reporting.run(main, smoke="One model, one round", rounds=3)

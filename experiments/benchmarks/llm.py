# SPDX-License-Identifier: Apache-2.0
"""Decoders of 124 million to a billion parameters on a GPU; memory of long texts and vocabularies.

claim     a private step needs at most twice the memory of a plain one, for long texts and large
          vocabularies too
verdict   1.33 times the plain step of 128,000 words, 0.26 times that of 4,096 tokens
hardware  CPU, JAX 0.10.2 (what XLA plans); the rows of a GPU were not run
command   make bench-peers BENCH=llm ARGS="--out experiments/results/llm_bench.json"

The rows of a GPU come in order of worth. Each runs in a process of its own, is written when it is
done, and is cut after 60 seconds; what has not begun after eight minutes is left out. Texts are of
512 tokens, weights random and float32, and the head has weights of its own, since Opacus takes no
shared ones; 25,128 words make GPT-2's layers 124 million parameters. Adapters have a frozen
base, which is an argument. Nothing is read from a network.
"""

from __future__ import annotations

import functools
import os
import pathlib
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
from absl import flags

import dpjax
from dpjax import clipping
from experiments.benchmarks import contestants, peers, reporting, workers
from experiments.benchmarks.workloads import SEED, TOKENS, Decoder, joined, split

SECONDS = 60.0  # of a row
ALL = 480.0  # seconds of all rows
ROUNDS = 10  # timed steps
Sizes = dict[str, Any]


SIZES: dict[str, Sizes] = {  # fields of `Decoder`, and examples
    "124 M": {
        "width": 768,
        "heads": 12,
        "depth": 12,
        "words": 25_128,
        "length": 512,
        "examples": 32,
    },
    "1 B, LoRA": {
        "width": 2048,
        "heads": 16,
        "depth": 18,
        "words": 25_128,
        "length": 512,
        "examples": 8,
        "rank": 8,
    },
    "350 M": {
        "width": 1024,
        "heads": 16,
        "depth": 24,
        "words": 25_128,
        "length": 512,
        "examples": 16,
    },
}
PLANNED: dict[str, Sizes] = {
    "128,000 words, 128 tokens": {
        "width": 256,
        "heads": 4,
        "depth": 2,
        "words": 128_000,
        "length": 128,
        "examples": 4,
        "tied": True,
    },
    "1,000 words, 4,096 tokens": {
        "width": 128,
        "heads": 4,
        "depth": 2,
        "words": 1_000,
        "length": 4_096,
        "examples": 4,
        "tied": True,
    },
}
ROWS = (
    ("124 M", "plain"),
    ("124 M", "dpjax auto"),
    ("124 M", "opacus ghost"),
    ("1 B, LoRA", "plain"),
    ("1 B, LoRA", "dpjax auto"),
    ("350 M", "plain"),
    ("350 M", "dpjax auto"),
    ("124 M", "dpjax vmap"),
    ("124 M", "jax_privacy"),
)
TINY: Sizes = {
    "width": 16,
    "heads": 2,
    "depth": 2,
    "words": TOKENS,
    "length": 16,
    "examples": 4,
}


def problem(examples: int, **fields: Any) -> tuple[Any, Any, Any]:
    """The loss of ``(params, example, frozen)``, a function that makes both trees, and texts."""
    model = Decoder(scanned=True, **fields)
    x = jax.random.randint(jax.random.key(SEED), (examples, model.length), 0, model.words)

    def initial() -> tuple[Any, Any]:
        params = model.init(jax.random.key(SEED), x[0])["params"]
        if model.rank:
            return split(params)
        return params, {}

    def loss(params: Any, example: Any, frozen: Any) -> Any:
        tokens, labels = example
        if model.rank:
            params = joined(params, frozen)
        logits: Any = model.apply({"params": params}, tokens)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))

    return loss, initial, (x, jnp.roll(x, -1, axis=1))


def private(loss: Any, who: str, examples: int) -> tuple[Any, Any]:
    """A contestant's gradient as a function of ``(params, (batch, frozen))``, and its link."""
    unfrozen_loss = functools.partial(loss, frozen={})
    if who == "jax_privacy":
        theirs, link = contestants.jax_privacy(unfrozen_loss, examples)

        def gradient(params: Any, data: Any) -> Any:
            batch, _ = data
            return theirs(params, batch)

        return gradient, link
    _, link = contestants.of_jax(unfrozen_loss, examples)[who]
    if who == "plain":

        def mean_loss(params: Any, batch: Any, frozen: Any) -> Any:
            return jnp.mean(jax.vmap(loss, (None, 0, None))(params, batch, frozen))

        def gradient(params: Any, data: Any) -> Any:
            return jax.grad(mean_loss)(params, *data)

        return gradient, link
    engine = who.removeprefix("dpjax ")
    clipped = dpjax.clipped_grad(loss, clipping.flat(contestants.BOUND), engine)

    def gradient(params: Any, data: Any) -> Any:
        batch, frozen = data
        return clipped(params, batch, frozen=frozen).sum

    return gradient, link


def planned(fields: Sizes, who: str) -> dict[str, int]:
    """XLA's plan of one step on a CPU: temporaries, and these with arguments and results."""
    loss, initial, batch = problem(**fields)
    optimizer, step = contestants.step_of(*private(loss, who, fields["examples"]))
    params, frozen = jax.eval_shape(initial)
    state = jax.eval_shape(optimizer.init, params)
    plan = step.lower(params, state, (batch, frozen)).compile().memory_analysis()
    inputs = plan.argument_size_in_bytes + plan.output_size_in_bytes
    return {"temporary_bytes": plan.temp_size_in_bytes, "bytes": plan.temp_size_in_bytes + inputs}


def of_opacus(fields: Sizes, who: str, parameters: int) -> contestants.Contestant:
    """The same decoder in PyTorch."""
    network = {name: fields[name] for name in ("width", "heads", "depth", "words", "length")}
    task = {
        "decoder": network,
        "text": True,
        "batch_size": fields["examples"],
        "parameters": parameters,
        "bound": contestants.BOUND,
        "noise_multiplier": contestants.NOISE_MULTIPLIER,
        "learning_rate": contestants.LEARNING_RATE,
    }
    take, facts = peers.CONTESTANTS[who](task)
    last: dict[str, Any] = {}

    def run(steps: int) -> float:
        last.update(take(steps))
        return last["seconds"]

    return contestants.Contestant(
        run=run,
        memory=lambda: last["memory"],
        sound=lambda: last["sound"],
        close=lambda: None,
        facts=facts,
    )


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Seconds, tokens a second and memory of a step of one contestant."""
    fields = question["fields"]
    who = question["who"]
    loss, initial, batch = problem(**fields)
    params, frozen = jax.eval_shape(initial)
    trained = numbers_of(params)
    if who.startswith("opacus"):
        made = of_opacus(fields, who, trained)
    else:
        gradient, link = private(loss, who, fields["examples"])
        params, frozen = jax.jit(initial)()
        made = contestants.compiled(gradient, link, params, (batch, frozen))
    first = made.run(1)
    made.run(1)  # a warm step, which is not counted
    times = []
    begun = time.perf_counter()
    while len(times) < ROUNDS and time.perf_counter() - begun < SECONDS / 6:
        times.append(made.run(1))
    if not made.sound():
        return {"refused": "NaN or infinity"}
    seconds = statistics.median(times)
    tokens, _ = batch
    return {
        "trained": trained,
        "frozen": numbers_of(frozen),
        "device": made.facts.get("device", jax.devices()[0].device_kind),
        "first_s": first,
        "step_s": seconds,
        "tokens_s": tokens.size / seconds,
        **made.memory(),
    }


def numbers_of(tree: Any) -> int:
    """How many numbers the leaves hold."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def row_of(name: str, who: str, left: float, asked: Any) -> dict[str, Any]:
    """One contestant on a GPU, or the reason why it did not run."""
    if not asked.smoke and jax.default_backend() != "gpu":
        return {"refused": "not run"}
    if left <= 0:
        return {"refused": "no time was left"}
    python = asked.peers_python
    if who.startswith(("plain", "dpjax")):
        python = sys.executable
    if not pathlib.Path(python).exists():
        return {"refused": workers.NOT_RUN}
    fields = SIZES[name]
    if asked.smoke:
        fields = fields | TINY
    seconds = SECONDS * slowness(asked)
    worker = workers.Worker(python, "llm", "answer")
    row = worker.ask({"fields": fields, "who": who}, min(seconds, left))
    worker.close()
    return row


def slowness(asked: Any) -> int:
    """A smoke run has ten times the seconds, since it may share a busy CPU."""
    return 10 if asked.smoke else 1


def main(asked: Any) -> None:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # a row has the GPU's memory
    began = time.monotonic()
    report = reporting.begin(("jax", "jaxlib", "flax"), smoke=asked.smoke)
    report |= {"rows": {}, "planned": {}}
    for name, who in ROWS[:5] if asked.smoke else ROWS:
        left = ALL * slowness(asked) - (time.monotonic() - began)
        row = row_of(name, who, left, asked)
        report["rows"].setdefault(name, {})[who] = row
        print(name, who, row, flush=True)
        reporting.keep(report, asked.out)
    with jax.default_device(jax.devices("cpu")[0]):
        for name, fields in PLANNED.items():
            fields = fields | TINY if asked.smoke else fields
            row = {who: planned(fields, who) for who in ("plain", "dpjax auto", "dpjax vmap")}
            report["planned"][name] = row
            print(name, row, flush=True)
            reporting.keep(report, asked.out)


if __name__ == "__main__" and sys.argv[1:] == ["answer"]:
    workers.serve(answer)
elif __name__ == "__main__":
    flags.DEFINE_string("peers_python", str(workers.PEERS), "Interpreter that has the peers.")
    reporting.run(main, smoke="Five rows and plans of tiny decoders")

# SPDX-License-Identifier: Apache-2.0
"""A round of clients beside the same number of plain steps of JAX.

  result    a round takes 0.28 times the CPU time of plain steps with the CNN of MNIST, 0.55 times
            with that of CIFAR-10, and 1.00 times with a perceptron
  hardware  one core of an AMD EPYC; JAX 0.10.2
  command   make bench BENCH=rounds ARGS="--out experiments/results/rounds.json"
  figures   experiments/results/rounds.json

In a round of `dpjax.federated.fedavg` each client makes one epoch in batches of 32 of its 64
examples.  Plain steps are jitted gradients and updates of the same batches, one dispatch each.  A
ratio is of medians of CPU time, over rounds in which the two alternate.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import reporting

import dpjax
from dpjax import clipping, federated, losses, models, sampling

CLIENTS, EACH, BATCH, RATE = 8, 64, 32, 0.1
SHAPES = {"mlp": (28, 28, 1), "tempered_cnn": (28, 28, 1), "cifar_dense_cnn": (32, 32, 3)}


def contestants(name: str) -> dict[str, Callable[[], Any]]:
    """One round, and the plain steps of all of its clients."""
    model = models.by_name(name, 10)
    x = jax.random.normal(jax.random.key(0), (CLIENTS, EACH, *SHAPES[name]))
    y = jnp.arange(CLIENTS * EACH).reshape(CLIENTS, EACH) % 10
    params = jax.jit(model.init)(jax.random.key(1), x[0, :1])["params"]
    loss = losses.of(model, losses.cross_entropy)
    mechanism = dpjax.Mechanism(
        sampling=sampling.full(examples=CLIENTS),
        clipping=clipping.flat(1.0),
        noise_multiplier=1.0,
        steps=1_000,
        unit="client",
    )
    algorithm = federated.fedavg(
        loss,
        optax.sgd(1.0),
        mechanism,
        federated.Clients.of(list(zip(x, y, strict=True))),
        client_optimizer=optax.sgd(RATE),
        local_batch_size=BATCH,
        local_epochs=1,
    )
    states = [algorithm.init(jax.tree.map(jnp.copy, params))]

    def one_round() -> Any:
        state, _ = algorithm.step(states.pop())
        states.append(state)
        return state.params

    @jax.jit
    def step(params: Any, some: Any) -> Any:
        gradient = jax.grad(lambda p: jnp.mean(jax.vmap(loss, (None, 0))(p, some)))(params)
        return jax.tree.map(lambda p, g: p - RATE * g, params, gradient)

    def plain() -> Any:
        trained = []
        for inputs, labels in zip(x, y, strict=True):
            here = params
            for at in range(0, EACH, BATCH):
                here = step(here, (inputs[at : at + BATCH], labels[at : at + BATCH]))
            trained.append(here)
        return trained

    return {"plain": plain, "round": one_round}


def measured(name: str, rounds: int) -> dict[str, float]:
    """Medians of CPU seconds, and their ratio; the first turn compiles and does not count."""
    found: dict[str, list[float]] = {"plain": [], "round": []}
    asked = contestants(name)
    for _ in range(rounds + 1):
        for kind, run in asked.items():
            begun = time.process_time()
            jax.block_until_ready(run())
            found[kind].append(time.process_time() - begun)
    medians = {f"{kind}_s": statistics.median(each[1:]) for kind, each in found.items()}
    return {**medians, "ratio": medians["round_s"] / medians["plain_s"]}


def main(asked: Any) -> None:
    some, rounds = (["mlp"], 1) if asked.smoke else (list(SHAPES), asked.rounds)
    report = reporting.begin(("jax", "jaxlib", "optax"), smoke=asked.smoke, rounds=rounds)
    report["models"] = {}
    for name in some:
        found = report["models"][name] = measured(name, rounds)
        plain, private = found["plain_s"], found["round_s"]
        print(f"{name:16} plain {plain:7.4f} s  round {private:7.4f} s  {found['ratio']:5.2f} x")
        reporting.keep(report, asked.out)


if __name__ == "__main__":
    reporting.run(main, smoke="One model, one turn", rounds=5)

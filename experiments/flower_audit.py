# SPDX-License-Identifier: Apache-2.0
"""Audits one round of federated strategies over Flower, with a canary client.

claim     clipping with noise of z C / K around FedAvg is refuted; `PrivateStrategy` never is
verdict   20 of 20 audits refute the first, and none of 20 the second
time      3 core minutes
hardware  two CPU cores
command   python -m experiments.flower_audit --out=experiments/results/flower_audit.json

Ten clients take part in a round, and client 0 holds half of the examples. `audit_algorithm` runs
the round under one seed with the client's update and with nearly 0 in its place, and divides the
distance by the noise. The noise multiplier is 1. Needs ``flwr``.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import random
import tempfile
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax import Mechanism, auditing, clipping, dpsgd, sampling
from dpjax.federated import PrivateStrategy, Weights
from experiments.common import flower_grid, runs

TRIES = 20
CONFIDENCE = 0.999
DELTA = 1e-5
EXAMPLES = [900] + [100] * 9
SIZE = 4096
PAIRS = 4  # of rounds that measure the noise; each has SIZE numbers


def stated(sampler: Any, unit: str = "example") -> Mechanism:
    """A round of noise multiplier 1 at the bound 1."""
    return Mechanism(
        sampling=sampler,
        clipping=clipping.flat(1.0),
        noise_multiplier=1.0,
        steps=1,
        unit=unit,
    )


def stock(draws: Any, noise: Any, population: list[bytes], sampler: Any) -> Any:
    """Flower's clipping at the server around its FedAvg, without its accountant."""
    del draws, sampler
    # Flower draws from the generators of the process.
    seed = int(jax.random.key_data(noise)[-1])
    importlib.import_module("numpy.random").seed(seed)
    random.seed(seed)
    flower = importlib.import_module("flwr.serverapp.strategy")
    average = flower.FedAvg(fraction_evaluate=0.0)
    return flower.DifferentialPrivacyServerSideFixedClipping(average, 1.0, 1.0, len(population))


class Seeded(PrivateStrategy):
    """The strategy with supplied keys, so a round can run with and without the canary."""

    draws: Any = None
    noise: Any = None

    def algorithm(self, exchange: Any, params: Any) -> Any:
        """The rounds, whose draws and noise follow from the keys."""
        rounds = super().algorithm(exchange, params)

        def init(params: Any) -> Any:
            state = rounds.init(params, self.noise)
            return state._replace(key=self.draws, noise_key=self.noise)

        return dataclasses.replace(rounds, init=init)


def private(draws: Any, noise: Any, population: list[bytes], sampler: Any) -> Any:
    """The strategy of dpjax, with weights by the number of examples."""
    strategy = Seeded(
        stated(sampler, "client"),
        optax.sgd(1.0),
        population=population,
        weights=Weights(values=EXAMPLES, largest=max(EXAMPLES)),
        directory=tempfile.mkdtemp(),
    )
    strategy.draws = draws
    strategy.noise = noise
    return strategy


def audited(make: Any, run: int) -> auditing.Separation:
    """The separation of one round of a strategy; runs differ in their noise and updates."""
    population = flower_grid.keys(len(EXAMPLES))
    generator = np.random.default_rng(run)
    updates = generator.normal(size=(len(EXAMPLES), SIZE)).astype(np.float32)
    sampler = sampling.full(len(EXAMPLES))

    def build(sampler: Any) -> Any:
        def step(state: Any) -> tuple[Any, None]:
            # The audit tells by the key of the draws which rounds measure the noise.
            noise = jax.random.fold_in(state.noise_key, run)
            indices, mask = sampler.draw(state.key, 0)
            present = set(np.asarray(indices)[np.asarray(mask)].tolist())

            def train(client: int, arrays: Any) -> Any:
                scale = 1.0 if client in present else 1e-9  # Flower divides by the norm
                trained = arrays["w"] + np.float32(scale) * updates[client]
                return {"w": trained}, EXAMPLES[client]

            grid = flower_grid.Grid(population, train)
            strategy = make(state.key, noise, population, sampler)
            start = flower_grid.record({"w": np.asarray(state.params)})
            result = strategy.start(grid, start, num_rounds=1)
            return state._replace(params=jnp.asarray(result.arrays["w"].numpy())), None

        rows = jnp.ones((len(EXAMPLES), SIZE))
        algorithm = dpsgd(lambda w, x: jnp.vdot(w, x), optax.sgd(1.0), stated(sampler), rows)
        return dataclasses.replace(algorithm, step=step)

    return auditing.audit_algorithm(
        build, sampler, jnp.zeros(SIZE), 0, pairs=PAIRS, confidence=CONFIDENCE
    )


ROWS = {"Flower, fixed clipping around FedAvg": stock, "PrivateStrategy": private}


def measured(name: str, seed: int, *_: Any) -> dict[str, Any]:
    """The separation and the bounds of one audit."""
    separation = audited(ROWS[name], seed)
    return {
        "separation": float(separation.measured[0]),
        "allowed": separation.claimed,
        "lower": separation.epsilon(DELTA),
        "claimed": separation.claimed_epsilon(DELTA),
        "refutes": bool(separation.refutes),
        "flwr": importlib.metadata.version("flwr"),
    }


def main(results: runs.Results) -> None:
    """Runs the audits as far as they are missing."""
    tries = 1 if runs.SMOKE.value else TRIES
    importlib.import_module("flwr.supercore").log.__self__.setLevel("ERROR")
    for name in filter(runs.named, ROWS):
        for seed in range(tries):
            print(name, seed, results.of(name, seed, partial(measured, name)), flush=True)


def tables(rows: dict[str, Any]) -> dict[str, str]:
    """The table of the page."""
    lines = []
    for name, seeds in rows.items():
        audits = list(seeds.values())
        refuted = sum(audit["refutes"] for audit in audits)
        lower = max(audit["lower"] for audit in audits)
        separation = max(audit["separation"] for audit in audits)
        claimed = f"{audits[0]['claimed']:.2f}"
        found = [f"{separation:.2f}", f"{lower:.2f}", f"{refuted} of {len(audits)}"]
        lines.append([name, claimed, *found])
    head = ["", "claimed", "separation", "lower bound", "refuted"]
    return {"flower audit": runs.table(head, lines)}


if __name__ == "__main__":
    runs.guide("flower_audit", tables, main, "row")

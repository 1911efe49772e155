# SPDX-License-Identifier: Apache-2.0
"""Audits a small run of every algorithm that ships: lower bounds on epsilon against the claims.

claim     no audit measures more than is claimed; one step shows nearly all of its claim
verdict   so it is, for 27 algorithms
time      10 minutes for all algorithms
hardware  two CPU cores shared with other work
command   python -m experiments.audit --algorithms=all --out experiments/results

All rows share one problem: the loss is linear, and the gradient of row i points along axis i of two
leaves. So a row's direction in the released parameters is its own, and no row hides another. Each
audit measures one step, then a run in which fair coins decide who takes part. Data are artificial,
so figures may be published. An audit without a finding proves nothing. `dpjax audit RUN` audits a
run of `dpjax train`.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags, logging

import dpjax
from dpjax import accounting, auditing, clipping, data, federated, sampling, strategies, training
from dpjax._files import strict
from dpjax.cli.audit import HEAD, OF_A_RUN, Line, conclude, curve_of, line_of_step
from experiments.common import runs

_ALGORITHMS = flags.DEFINE_string(
    "algorithms", "all", "Audit the algorithms that have this in their name; all for every one."
)
ROWS = 400
STEPS = 8
MULTIPLIER = 2.0
DELTA = 1e-5
GUESSES = ROWS // 5
PROJECTIONS = 30
PAIRS = 64

Build = Callable[[dpjax.types.Sampler, Any], dpjax.types.Algorithm]


class Audited(NamedTuple):
    """An algorithm as a function of its sampler and its rows."""

    name: str
    build: Build
    sampling: dpjax.types.Sampler = sampling.poisson(ROWS, ROWS / 2)
    length: float = 3.0
    """The norm of each gradient; the bound is 1."""
    keys: int = 1
    """Keys over which one step is measured."""
    instead: int | None = None
    """The row that takes the place of row 0, for batches of a fixed size."""


def rows(length: float, opposite: bool = False) -> dict[str, np.ndarray]:
    """The data: row i points along axis i of both leaves, and the last one against the first."""
    leaf = np.eye(ROWS, dtype=np.float32) * np.float32(length / np.sqrt(2))
    if opposite:
        leaf[-1] = -leaf[0]
    return {"a": leaf, "b": leaf}


def loss(params: Any, example: Any) -> jax.Array:
    """A linear loss: the gradient of a row is the same at all parameters."""
    total = jnp.float32(0)
    for name, leaf in params.items():
        total += jnp.vdot(leaf, example[name])
    return -total


def described(sampler: Any, rule: Any, multiplier: Any = MULTIPLIER, **more: Any) -> Any:
    """The mechanism of a row."""
    return dpjax.Mechanism(
        sampling=sampler,
        clipping=rule,
        noise_multiplier=multiplier,
        steps=STEPS,
        **more,
    )


def sgd(rule: Any = None, **more: Any) -> Build:
    """DP-SGD with a rule, and with options of the mechanism."""
    if rule is None:
        rule = clipping.flat(1.0)

    def build(sampler: Any, x: Any) -> Any:
        mechanism = described(sampler, rule, **more)
        return dpjax.dpsgd(loss, optax.sgd(1.0), mechanism, x)

    return build


def sgd_with(**options: Any) -> Build:
    """DP-SGD with options of `dpjax.dpsgd`; an example is a tuple, to which a step may be added."""

    def of_tuple(params: Any, example: Any) -> jax.Array:
        return loss(params, example[0])

    def build(sampler: Any, x: Any) -> Any:
        mechanism = described(sampler, clipping.flat(1.0))
        return dpjax.dpsgd(of_tuple, optax.sgd(1.0), mechanism, (x,), **options)

    return build


def streamed(sampler: Any, x: Any) -> Any:
    """DP-SGD on rows that are read by index."""

    def row(index: int) -> Any:
        return {name: leaf[index] for name, leaf in x.items()}

    source = data.Stream(range(ROWS), example=row)
    mechanism = described(sampler, clipping.flat(1.0))
    return dpjax.dpsgd(loss, optax.sgd(1.0), mechanism, source)


def langevin(sampler: Any, x: Any) -> Any:
    """DP-SGLD whose rate gives the same multiplier at half of the rows a step."""
    rate = (2 * 0.5 / MULTIPLIER) ** 2
    return training.dp_sgld(
        loss,
        rate,
        sampler,
        clipping.flat(1.0),
        STEPS,
        x,
        prior_deviation=10.0,
        samples=2,
    )


def of_clients(local: bool, **options: Any) -> Build:
    """Federated averaging or SGD; a client holds two copies of its row."""

    def build(sampler: Any, x: Any) -> Any:
        copies = {name: np.repeat(leaf, 2, axis=0) for name, leaf in x.items()}
        owners = np.repeat(np.arange(ROWS), 2)
        clients = federated.Clients.split(copies, owners, ROWS)
        mechanism = described(sampler, clipping.flat(1.0), unit="client")
        if not local:
            return federated.fedsgd(loss, optax.sgd(1.0), mechanism, clients, **options)
        return federated.fedavg(
            loss,
            optax.sgd(1.0),
            mechanism,
            clients,
            client_optimizer=optax.sgd(1.0),
            local_batch_size=1,
            local_epochs=1,
            **options,
        )

    return build


def schedule(step: Any) -> Any:
    """Noise that falls from 1.5 times the multiplier to once."""
    return MULTIPLIER * (1.5 - 0.5 * jnp.asarray(step) / STEPS)


COUNT = clipping.Quantile(count_multiplier=2 * MULTIPLIER)
LINEAR_COUNT = dataclasses.replace(COUNT, geometric=False)
HALF = np.where(np.arange(ROWS) < ROWS // 2, 1.0, 0.5)
BINS = sampling.scored(
    np.arange(ROWS) % 2,
    [[0.5, 0.25]],
    steps_per_row=STEPS,
    batch_size=0.375 * ROWS,
)
ALGORITHMS = (
    Audited("dpsgd, flat", sgd()),
    Audited("dpsgd, grouped", sgd(clipping.grouped(total=1.0, groups=2))),
    Audited(
        "dpsgd, per_group, noise by group",
        sgd(clipping.per_group([0.8, 0.6], 2), multiplier=(MULTIPLIER * 2, MULTIPLIER * 1.5)),
    ),
    Audited("dpsgd, automatic", sgd(clipping.automatic(1.0))),
    Audited("dpsgd, psac", sgd(clipping.psac(1.0))),
    Audited("dpsgd, normalized", sgd(clipping.normalized(1.0))),
    Audited("dpsgd, hard_threshold", sgd(clipping.hard_threshold(1.0)), length=0.999),
    Audited("dpsgd, jl", sgd(clipping.jl(1.0, PROJECTIONS)), keys=400),
    Audited("dpsgd, adapted bound", sgd(adaptive=COUNT)),
    Audited("dpsgd, adapted bound, linear", sgd(adaptive=LINEAR_COUNT)),
    Audited("dpsgd, scheduled noise", sgd(multiplier=schedule)),
    Audited("dpsgd, scheduled bound", sgd_with(bound_schedule=lambda t: 2.0 - t / STEPS)),
    Audited("dpsgd, loss by step", sgd_with(per_step=lambda t: t)),
    Audited("dpsgd, weights", sgd_with(weights=lambda t, w, x: 1.0 - t / (2 * STEPS))),
    Audited("dpsgd, engine vmap", sgd_with(engine="vmap")),
    Audited("dpsgd, stream", streamed),
    Audited("dpsgd, full batches", sgd(), sampling.full(ROWS)),
    Audited("dpsgd, shuffled batches", sgd(), sampling.shuffled(ROWS, ROWS // 4)),
    Audited("dpsgd, fixed batches", sgd(), sampling.fixed(ROWS, ROWS // 2), instead=ROWS - 1),
    Audited("dpsgd, scored batches", sgd(), BINS),
    Audited(
        "dpsgd, banded noise",
        sgd(noise=strategies.banded(STEPS, 2)),
        sampling.cyclic_poisson(ROWS, ROWS // 4, cycle=2),
    ),
    Audited(
        "dpsgd, buffered noise",
        sgd(noise=strategies.buffered(STEPS, participation=strategies.cycles(4))),
        sampling.balls_in_bins(ROWS, ROWS // 4),
    ),
    Audited("dp_sgld", langevin),
    Audited("fedavg", of_clients(local=True)),
    Audited("fedavg, projected", of_clients(local=True, project=True)),
    Audited("fedavg, weighted", of_clients(local=True, weights=federated.Weights(values=HALF))),
    Audited("fedsgd", of_clients(local=False)),
)


def audit(audited: Audited) -> tuple[Line, Line]:
    """Measures one step, then one run, of an algorithm."""
    x = rows(audited.length, opposite=audited.instead is not None)
    params = {name: jnp.zeros(ROWS) for name in x}

    def build(sampler: dpjax.types.Sampler) -> dpjax.types.Algorithm:
        return audited.build(sampler, x)

    separation = auditing.audit_algorithm(
        build,
        audited.sampling,
        params,
        canary=0,
        instead=audited.instead,
        keys=audited.keys,
        pairs=PAIRS,
    )
    members = np.random.default_rng(0).random(ROWS) < 0.5
    sampler = auditing.without(audited.sampling, np.flatnonzero(~members))
    algorithm = build(sampler)
    mechanism: Any = algorithm.mechanism
    method = "pld"
    if mechanism.clipping.projections is None:
        method = accounting.tightest(mechanism.event, mechanism.relation)
    state = algorithm.init(params, key=jax.random.key(0))
    state, _ = dpjax.fit(algorithm, state, progress=False, delta=DELTA, method=method)
    scores = sum(x[name] @ np.asarray(state.params[name]) for name in x)
    right, guesses = auditing.guess_members(scores, members, GUESSES)
    curve, assumed = curve_of(mechanism, STEPS)
    bound = auditing.epsilon_lower_bound(right, guesses, canaries=ROWS, delta=DELTA, curve=curve)
    claimed = mechanism.epsilon(DELTA, method)
    words = f"{right} of {guesses} guesses right; {assumed}"
    run = Line(f"{audited.name}: run", words, bound, claimed, OF_A_RUN, bound > claimed)
    return line_of_step(separation, DELTA, f"{audited.name}: step"), run


def main(argv: list[str]) -> None:
    runs.only_flags(argv)
    logging.set_verbosity(logging.ERROR)
    lines = []
    results = {}
    started = time.time()
    print(HEAD, flush=True)
    chosen = list(ALGORITHMS)
    if _ALGORITHMS.value != "all":
        chosen = [audited for audited in ALGORITHMS if _ALGORITHMS.value in audited.name]
    if runs.SMOKE.value:
        chosen = chosen[:1]
    for audited in chosen:
        step, run = audit(audited)
        lines += [step, run]
        results[audited.name] = {"step": strict(step._asdict()), "run": strict(run._asdict())}
        print(f"{step}\n{run}", flush=True)
    if runs.OUT.value is not None:
        facts = {
            "command": "python -m experiments.audit --algorithms=all --out experiments/results",
            "date": time.strftime("%Y-%m-%d"),
            "device": f"{os.cpu_count()} cores, {jax.devices()[0].device_kind}",
            **{name: importlib.metadata.version(name) for name in ("jax", "optax")},
            "seconds": round(time.time() - started),
            "delta": DELTA,
            "rows": results,
        }
        out = pathlib.Path(runs.OUT.value)
        out.mkdir(parents=True, exist_ok=True)
        (out / "audits.json").write_text(json.dumps(facts, indent=2) + "\n")
    print("Artificial data: these figures may be published.")
    conclude(lines, time.time() - started)  # the exit status is 1 if a bound exceeds its claim


if __name__ == "__main__":
    runs.start(main, "smoke", "out")

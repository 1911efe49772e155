# SPDX-License-Identifier: Apache-2.0
"""Time and memory of one private training step, and of the same step without privacy.

claim     a private step takes about as long as a plain one, and a fraction of Opacus
verdict   0.21 to 1.10 of plain JAX; the fastest mode of Opacus 1.5 to 3.8 of dpjax
hardware  2 cores of an AMD EPYC as 2 host devices, JAX 0.10.2; medians of up to 15 rounds
command   make bench-peers ARGS="--rounds 15 --seconds 8 --host_devices 2 --out FILE"

Contestants (`contestants`, `peers`) take turns in a random order, so a busy machine is busy for
all. `ratio` is their median over plain's, and `first` the first step with compilation. `plan`
is XLA's temporary memory, and `peak` the rise of PyTorch's above parameters and batch.
"""

from __future__ import annotations

import functools
import math
import os
import pathlib
import random
import statistics
from collections.abc import Callable
from typing import Any

import jax
from absl import app, flags

from experiments.benchmarks import reporting, workers
from experiments.benchmarks.contestants import PEERS, Contestant, Refused, compiled, of_jax, peer
from experiments.benchmarks.workloads import SEED, WORKLOADS, problem

TURN = 0.1  # seconds: a contestant with shorter steps takes several in a row, after a warm one


def take_turns(
    contestants: dict[str, Contestant], figures: dict[str, Any], rounds: int, seconds: float
) -> None:
    """The rounds: one contestant at a time, in random order, each within its seconds."""
    rng = random.Random(SEED)
    left = dict.fromkeys(contestants, seconds)
    for _ in range(rounds):
        for name in rng.sample(list(contestants), len(contestants)):
            if left[name] <= 0:
                continue
            run = contestants[name].run
            each = spent = run(1)
            if each < TURN:
                several = math.ceil(TURN / each)
                each = run(several)
                spent += several * each
            left[name] -= spent
            figures[name]["rounds_ms"].append(1e3 * each)


def start(makes: dict[str, Callable[[], Contestant]]) -> tuple[dict[str, Contestant], dict]:
    """Every contestant after its first step, or the reason why it cannot take one."""
    ready: dict[str, Contestant] = {}
    figures: dict[str, dict[str, Any]] = {}
    for name, make in makes.items():
        try:
            made = make()
            first = made.run(1)
            made.run(1)  # some libraries set themselves up in two steps
        except Refused as why:
            figures[name] = {"refused": str(why)}
            continue
        ready[name] = made
        figures[name] = {"first_s": first, **made.memory(), "rounds_ms": [], **made.facts}
    return ready, figures


def summarise(figures: dict[str, Any]) -> None:
    """Adds medians, and ratios to the plain step."""
    timed = [figure for figure in figures.values() if "rounds_ms" in figure]
    for figure in timed:
        figure["median_ms"] = statistics.median(figure["rounds_ms"])
    for figure in timed:
        figure["ratio"] = figure["median_ms"] / figures["plain"]["median_ms"]


def measure(
    name: str, batch_size: int, words: list[str] | None, python: str | None, **limits: Any
) -> dict[str, Any]:
    """One workload: first steps, then the rounds."""
    loss, params, batch = problem(WORKLOADS[name]._replace(batch_size=batch_size))
    makes = {
        who: functools.partial(compiled, gradient, link, params, batch)
        for who, (gradient, link) in of_jax(loss, batch_size).items()
    }
    for who in PEERS:
        makes[who] = lambda who=who: peer(str(python), who, name, batch_size)
    names = reporting.chosen("contestants", list(makes), words, always=("plain",))
    if python is None:
        names = [name for name in names if name not in PEERS]
    contestants, figures = start({name: makes[name] for name in names})
    try:
        take_turns(contestants, figures, **limits)
        for who, contestant in contestants.items():
            if not contestant.sound():
                raise RuntimeError(f"steps: {who} ran into NaN or infinity; its times are void.")
    finally:
        for contestant in contestants.values():
            contestant.close()
    summarise(figures)
    facts = {"parameters": WORKLOADS[name].parameters, "batch_size": batch_size}
    return {**facts, "contestants": figures}


def table(name: str, result: dict[str, Any]) -> str:
    """One workload's figures, a contestant a row; the file has all of them."""
    rows = [f"{name}: {result['parameters']:,} parameters, batch {result['batch_size']}"]
    for who, f in result["contestants"].items():
        words = f.get("refused")
        if not words:
            times = f"{f['median_ms']:9.2f} ms in {len(f['rounds_ms'])} rounds, {f['ratio']:6.3g} x"
            words = f"{times}, first {f['first_s']:.1f} s  {f.get('note', '')}".rstrip()
        rows.append(f"  {who:16} {words}")
    return "\n".join(rows)


def main(asked: Any) -> None:
    # Peers on the same GPU need memory as well. JAX reads this when it looks for devices.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax.config.update("jax_num_cpu_devices", asked.host_devices)
    jax.config.update("jax_enable_compilation_cache", False)  # each first step compiles
    names = asked.workloads or list(WORKLOADS)
    limits = {"rounds": asked.rounds, "seconds": asked.seconds}
    if asked.smoke:
        jax.config.update("jax_disable_most_optimizations", True)  # it mostly compiles
        names = asked.workloads or ["MLP on a table"]
        limits["rounds"] = 2
    if unknown := set(names) - set(WORKLOADS):
        raise app.UsageError(f"--workloads: {sorted(unknown)}; there are {', '.join(WORKLOADS)}.")
    packages = ("jax", "jaxlib", "flax", "optax")
    report = reporting.begin(packages, smoke=asked.smoke, **limits)
    python = asked.peers_python
    if not pathlib.Path(python).exists():
        python = None
        print(workers.NOT_RUN, flush=True)
    report["workloads"] = {}
    for name in names:
        batch_size = 8 if asked.smoke else WORKLOADS[name].batch_size
        result = measure(name, batch_size, asked.contestants, python, **limits)
        report["workloads"][name] = result
        print(table(name, result), flush=True)
        reporting.keep(report, asked.out)


if __name__ == "__main__":
    flags.DEFINE_list("workloads", None, "Which; by default all, in a smoke run one.")
    flags.DEFINE_list("contestants", None, "Names or how they begin; by default all, plain always.")
    flags.DEFINE_float("seconds", 30.0, "After so long a contestant rests.", lower_bound=0.1)
    flags.DEFINE_integer("host_devices", 1, "Devices that the CPU is shown as.", lower_bound=1)
    flags.DEFINE_string("peers_python", str(workers.PEERS), "Interpreter that has the peers.")
    reporting.run(main, smoke="Batches of 8, two rounds, little optimized", rounds=10)

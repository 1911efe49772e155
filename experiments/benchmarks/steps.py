# SPDX-License-Identifier: Apache-2.0
"""How long one private training step takes, beside the same step without privacy.

  claim     a private step costs about as much as a plain one, without a tuned model
  figures   of an earlier engine; the present one is faster, its figures are not run yet
            W1 (MNIST CNN, B 256): plain 60 ms, dpjax 54, vmap 88, optax.contrib 97
            W4 (MLP 784-256-256-10, B 1024): plain 12 ms, dpjax 21, vmap 2,793, contrib 1,069
            W2, W3, W5, the peers and any GPU: not run
  hardware  2 cores of an Intel Xeon, JAX 0.10.2; all figures in experiments/results/steps.json
  command   make bench-peers ARGS="--rounds 7 --seconds 30 --out steps.json"
            (`make bench` leaves out the peers if they are not there)

Contestants (`contestants`, `peers`): the plain step, twice; each dpjax engine, and dpjax's own
choice; Optax's `differentially_private_aggregate`; jax_privacy; Opacus in five modes; plain
PyTorch.  All with SGD on the same kind of batch, in place before.  They take turns in an order
drawn anew each round, while the others sleep, so that a busy machine is busy for all.

`ratio` is plain's median over theirs: 1.00 means that privacy costs no time; `to Opacus` the
same against Opacus' fastest mode.  `first` is the first step, compilation included, where JAX
in this process profits from the tuning of those before.  `memory` is of JAX what XLA plans for
temporaries (neither parameters and batch nor what a kernel allocates inside itself), and of
PyTorch how far its process's peak rose by stepping: near each other in kind, not the same.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import pathlib
import platform
import random
import statistics
from collections.abc import Callable
from typing import Any

import jax
import workers
from absl import app, flags, logging
from contestants import PEERS, Contestant, Refused, disagreement, in_this_process, peer
from workloads import SEED, WORKLOADS, problem

TOLERANCE = 1e-4  # between a gradient of dpjax and its definition, relative to the norm
TURN = 0.1  # seconds: a contestant with shorter steps takes several in a row, after a warm one


def chosen(names: list[str], words: list[str] | None) -> list[str]:
    """Those that are asked for by name or by how they begin; plain, the yardstick, always."""
    if words is None:
        return names
    exact, known = set(words) & set(names), {"plain"}
    for word in words:
        found = {n for n in names if n == word or (word not in exact and n.startswith(word))}
        if not found:
            raise app.UsageError(f"--contestants: {word!r}; there are {', '.join(names)}.")
        known |= found
    return [name for name in names if name in known]


def take_turns(
    contestants: dict[str, Contestant], figures: dict[str, Any], rounds: int, seconds: float
) -> None:
    """The rounds: one contestant at a time, in an order drawn anew, each within its seconds."""
    order, left = random.Random(SEED), dict.fromkeys(contestants, seconds)
    for _ in range(rounds):
        for name in order.sample(list(contestants), len(contestants)):
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
    """Every contestant after its first step; of one that cannot take it, why."""
    ready, figures = {}, {}
    for name, make in makes.items():
        try:
            made = make()
            first = made.run(1)
        except Refused as why:
            figures[name] = {"refused": str(why)}
            continue
        ready[name] = made
        figures[name] = {"first_s": first, "memory_bytes": made.memory(), "rounds_ms": []}
        figures[name] |= made.facts
    return ready, figures


def summarise(figures: dict[str, Any]) -> None:
    """Adds medians, and the ratios to the plain step and to Opacus at its best."""
    timed = {name: figure for name, figure in figures.items() if "rounds_ms" in figure}
    for figure in timed.values():
        figure["median_ms"] = statistics.median(figure["rounds_ms"])
    opacus = [figure["median_ms"] for name, figure in timed.items() if name.startswith("opacus")]
    for figure in timed.values():
        figure["ratio"] = timed["plain"]["median_ms"] / figure["median_ms"]
        figure["ratio_to_opacus"] = min(opacus) / figure["median_ms"] if opacus else None


def measure(
    name: str, batch_size: int, words: list[str] | None, python: str | None, **limits: Any
) -> dict[str, Any]:
    """One workload: first steps, then dpjax held to its definitions, then the rounds."""
    loss, params, batch = problem(WORKLOADS[name]._replace(batch_size=batch_size))
    makes = in_this_process(loss, params, batch)
    for who in PEERS:
        makes[who] = lambda who=who: peer(str(python), who, name, batch_size)
    names = [n for n in chosen(list(makes), words) if python or n not in PEERS]
    contestants, figures = start({n: makes[n] for n in names})
    try:
        apart = disagreement(names, loss, params, batch)
        if not all(distance <= TOLERANCE for distance in apart.values()):
            raise RuntimeError(f"steps: gradients differ from their definitions by {apart}.")
        take_turns(contestants, figures, **limits)
        for who, contestant in contestants.items():
            if not contestant.sound():
                raise RuntimeError(f"steps: {who} ran into NaN or infinity; its times are void.")
    finally:
        for contestant in contestants.values():
            contestant.close()
    summarise(figures)
    facts = {"parameters": WORKLOADS[name].parameters, "batch_size": batch_size}
    return {**facts, "disagreement": apart, "contestants": figures}


def machine() -> dict[str, Any]:
    """What the figures were seen on."""
    device, cpu = jax.devices()[0], pathlib.Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "device": f"{jax.device_count()} x {device.device_kind} ({device.platform})",
        "cpu": f"{os.cpu_count()} cores of {(names or [platform.machine()])[0]}",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax")},
    }


def table(name: str, result: dict[str, Any]) -> str:
    """One workload's figures, a contestant a row."""
    rows = [
        f"{name}: {result['parameters']:,} parameters, batch {result['batch_size']}",
        f"  {'':16} median ms     fastest - slowest  rounds   ratio  to Opacus  first s      MiB",
    ]
    for who, f in result["contestants"].items():
        if "refused" in f:
            rows.append(f"  {who:16} {f['refused']}")
            continue
        times, memory, opacus = f["rounds_ms"], f["memory_bytes"], f["ratio_to_opacus"]
        rows.append(
            f"  {who:16} {f['median_ms']:9.2f}  {min(times):9.2f} - {max(times):<8.2f} "
            f"{len(times):6}  {f['ratio']:6.3g}  "
            + ("        -" if opacus is None else f"{opacus:9.3g}")
            + f"  {f['first_s']:7.1f}  "
            + ("      -" if memory is None else f"{memory / 2**20:7.1f}")
            + f"  {f.get('note', '')}".rstrip()
        )
    return "\n".join(rows)


def configure(smoke: bool, host_devices: int) -> None:
    logging.set_verbosity(logging.WARNING)  # JAX reports the accelerators it did not find
    # Before JAX looks for devices: peers on the same GPU need memory as well.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax.config.update("jax_num_cpu_devices", host_devices)
    jax.config.update("jax_enable_compilation_cache", False)  # or a first step is no first step
    if smoke:
        jax.config.update("jax_disable_most_optimizations", True)  # compiling is all its time


def main(_: list[str]) -> None:
    asked = flags.FLAGS
    configure(asked.smoke, asked.host_devices)
    names = asked.workloads or (["W4"] if asked.smoke else list(WORKLOADS))
    if unknown := set(names) - set(WORKLOADS):
        raise app.UsageError(f"--workloads: {sorted(unknown)}; there are {', '.join(WORKLOADS)}.")
    python = asked.peers_python if pathlib.Path(asked.peers_python).exists() else None
    limits = {"rounds": 2 if asked.smoke else asked.rounds, "seconds": asked.seconds}
    report = {"smoke": asked.smoke, **limits, **machine()}
    print("; ".join(f"{key} {value}" for key, value in report.items()), flush=True)
    if python is None:
        print(workers.NOT_RUN, flush=True)
    report["workloads"] = {}
    for name in names:
        batch_size = 8 if asked.smoke else WORKLOADS[name].batch_size
        result = measure(name, batch_size, asked.contestants, python, **limits)
        report["workloads"][name] = result
        print(table(name, result), flush=True)
        if asked.out:
            path = pathlib.Path(asked.out)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    # Not at the top: then importing this beside another experiment would define --out twice.
    flags.DEFINE_list("workloads", None, "Which; by default all, in a smoke run W4.")
    flags.DEFINE_list("contestants", None, "Names or how they begin; by default all, plain always.")
    flags.DEFINE_integer("rounds", 10, "How many turns each contestant takes.", lower_bound=1)
    flags.DEFINE_float("seconds", 30.0, "After so long a contestant rests.", lower_bound=0.1)
    flags.DEFINE_integer("host_devices", 1, "Devices that the CPU is shown as.", lower_bound=1)
    flags.DEFINE_string("peers_python", str(workers.PEERS), "Interpreter that has the peers.")
    flags.DEFINE_bool("smoke", False, "Batches of 8, two rounds, little optimized: does it run?")
    flags.DEFINE_string("out", None, "JSON file for the figures, rewritten after each workload.")
    app.run(main)

# SPDX-License-Identifier: Apache-2.0
"""Error and search time of strategies of correlated noise: dpjax and jax_privacy.

  command   make bench-peers BENCH=strategies ARGS="--out experiments/results/strategies.json"
  figures   experiments/results/strategies.json

Banded Toeplitz, buffered Toeplitz and dense strategies for prefix sums, for one participation and
for several: at least a separation apart, or for dense strategies exactly that far apart.  Both
sides search for the least mean error; a figure is the root of the mean variance times the
sensitivity.  The peer's functions rate the peer's matrices.  Each search runs once, imports
excluded: results of both libraries are cached by settings.  NumPy has one thread; JAX, which the
peer uses, has all cores.
"""

from __future__ import annotations

import json
import pathlib
import sys
import time
from typing import Any

from absl import flags

from experiments.benchmarks import reporting, workers

# (family, steps, bands or buffers, separation, most); dense has no size.
TASKS = [
    ("banded", 1_000, 16, None, 1),
    ("banded", 10_000, 64, None, 1),
    ("banded", 100_000, 64, None, 1),
    ("banded", 1_000, 16, 100, 10),
    ("buffered", 1_000, 4, None, 1),
    ("buffered", 10_000, 4, None, 1),
    ("buffered", 100_000, 4, None, 1),
    ("buffered", 1_000, 2, 100, 10),
    ("dense", 128, None, None, 1),
    ("dense", 512, None, None, 1),
    ("dense", 2_000, None, None, 1),
    ("dense", 128, None, 32, 4),
    ("dense", 512, None, 64, 8),
]
SMOKE = [("banded", 20, 4, None, 1), ("buffered", 20, 2, 5, 4), ("dense", 8, None, 4, 2)]


def ours(task: dict[str, Any]) -> dict[str, Any]:
    """One search of dpjax."""
    import dense_strategies

    from dpjax import strategies

    steps, size = task["steps"], task["size"]
    if task["separation"] is None:
        participation = strategies.once()
    else:
        several = strategies.cycles if task["family"] == "dense" else strategies.apart
        participation = several(task["separation"], task["most"])
    make = {
        "banded": lambda: strategies.banded(steps, size, participation, normalized=False),
        "buffered": lambda: strategies.buffered(steps, size, participation),
        "dense": lambda: dense_strategies.mean_error(steps, participation),
    }[task["family"]]
    started = time.perf_counter()
    found = make()
    seconds = time.perf_counter() - started
    error = found if isinstance(found, float) else found.errors(participation).mean
    return {"seconds": seconds, "error": error}


def peers(task: dict[str, Any]) -> dict[str, Any]:
    """One search of jax_privacy, with its defaults, rated by its own functions."""
    import jax

    jax.config.update("jax_enable_x64", True)
    import jax.numpy as jnp
    from jax_privacy.matrix_factorization import buffered_toeplitz, dense, sensitivity, toeplitz

    steps, size, most = task["steps"], task["size"], task["most"]
    started = time.perf_counter()
    if task["family"] == "dense":
        matrix = dense.optimize(steps, epochs=most).block_until_ready()
        seconds = time.perf_counter() - started
        squared = sensitivity.fixed_epoch_sensitivity(matrix, most) ** 2
        variances = dense.per_query_error(strategy_matrix=matrix)
    else:
        if task["family"] == "banded":
            column = toeplitz.optimize_banded_toeplitz(steps, size).block_until_ready()
        else:
            found = buffered_toeplitz.optimize(
                n=steps,
                min_sep=task["separation"] or steps,
                max_participations=most,
                error="mean",
                min_buffers=size,
                max_buffers=size,
            )
            column = found.toeplitz_coefs(steps).block_until_ready()
        seconds = time.perf_counter() - started
        squared = toeplitz.minsep_sensitivity_squared(
            column, task["separation"] or steps, most, steps, skip_checks=True
        )
        variances = toeplitz.per_query_error(strategy_coef=column, n=steps, skip_checks=True)
    return {"seconds": seconds, "error": float(squared * jnp.mean(variances)) ** 0.5}


def named(task: dict[str, Any]) -> str:
    """The task in words."""
    size = {"banded": "bands", "buffered": "buffers"}.get(task["family"])
    parts = [f"{task['family']}, {task['steps']:,} steps"]
    parts += [f"{task['size']} {size}"] if size else []
    parts += [f"{task['most']} steps {task['separation']} apart"] if task["separation"] else []
    return ", ".join(parts)


def main(asked: Any) -> None:
    report = reporting.begin(("numpy", "scipy", "jax"), smoke=asked.smoke, seconds=asked.seconds)
    report["rows"] = {}
    if asked.rows and asked.out and pathlib.Path(asked.out).exists():
        report["rows"] = json.loads(pathlib.Path(asked.out).read_text())["rows"]
    here = pathlib.Path(__file__).name
    interpreters = {"dpjax": sys.executable, "jax_privacy": asked.peers_python}
    if not pathlib.Path(asked.peers_python).exists():
        print(workers.NOT_RUN, flush=True)
        del interpreters["jax_privacy"]
    alive: dict[str, workers.Worker] = {}
    keys = ("family", "steps", "size", "separation", "most")
    for values in SMOKE if asked.smoke else TASKS:
        task: dict[str, Any] = dict(zip(keys, values, strict=True))
        if asked.rows and named(task) not in asked.rows:
            continue
        row = report["rows"][named(task)] = {}
        for who, python in interpreters.items():
            if who not in alive:
                # On cores that others use too, OpenBLAS's threads mostly wait for each other.
                alive[who] = workers.Worker(python, here, who, OPENBLAS_NUM_THREADS="1")
                alive[who].ask({"prepare": True})
            row[who] = alive[who].ask(task, asked.seconds if who == "jax_privacy" else None)
            if "refused" in row[who]:
                alive.pop(who).close()
        cells = [
            found.get("refused") or f"{found['error']:.6f} in {found['seconds']:.2f} s"
            for found in row.values()
        ]
        print(f"{named(task)}: {'; '.join(cells)}", flush=True)
        reporting.keep(report, asked.out)
    for worker in alive.values():
        worker.close()


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """What a process of one library answers."""
    search = {"dpjax": ours, "jax_privacy": peers}[sys.argv[1]]
    if "prepare" in question:
        first = {"family": "buffered", "steps": 4, "size": 1, "separation": None, "most": 1}
        search(first)
        return {}
    return search(question)


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1] in ("dpjax", "jax_privacy"):
        workers.serve(answer)
    else:
        flags.DEFINE_string("peers_python", str(workers.PEERS), "Interpreter that has the peers.")
        flags.DEFINE_float("seconds", 600.0, "A peer's search that is longer is stopped.", 0.1)
        flags.DEFINE_multi_string("rows", None, "Which, as printed; others are kept from --out.")
        reporting.run(main, smoke="Short runs")

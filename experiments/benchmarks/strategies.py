# SPDX-License-Identifier: Apache-2.0
"""Error and search time of strategies of correlated noise: dpjax and jax_privacy.

claim     dpjax finds strategies of the same error in less time
verdict   so it is; `dense` has the least error of all strategies, as a yardstick of the others
hardware  two CPU cores that a dozen other programs shared
command   make bench-peers BENCH=strategies ARGS="--out experiments/results/strategies.json"

Strategies for prefix sums, for one participation and for several at least a separation apart. A
figure is the root of the mean variance times the sensitivity; the peer's functions rate the peer's
matrices. Each search runs once, imports excluded: both libraries cache results by settings.

References:
  Denisov et al., "Improved differential privacy for SGD via optimal private linear operators on
  adaptive streams", 2022: dense strategies.
"""

from __future__ import annotations

import math
import pathlib
import sys
import time
from typing import Any

import numpy as np
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
]
SMOKE = [("banded", 20, 4, None, 1), ("buffered", 20, 2, 5, 4), ("dense", 8, None, None, 1)]


def ours(task: dict[str, Any]) -> dict[str, Any]:
    """One search of dpjax."""
    from dpjax import strategies

    steps = task["steps"]
    size = task["size"]
    participation = strategies.once()
    if task["separation"] is not None:
        participation = strategies.apart(task["separation"], task["most"])
    started = time.perf_counter()
    if task["family"] == "dense":
        error = dense(steps)
        return {"seconds": time.perf_counter() - started, "error": error}
    if task["family"] == "banded":
        strategy = strategies.banded(steps, size, participation, normalized=False)
    else:
        strategy = strategies.buffered(steps, size, participation)
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "error": strategy.errors(participation).mean}


def dense(steps: int, gap: float = 1e-5, iterations: int = 100) -> float:
    r"""The error of the best lower-triangular matrix C for one participation: a yardstick.

    The variance is convex in $X = C^T C$, $\mathrm{tr}(G X^{-1})$ of the Gram matrix G of the
    workload, and the squared sensitivity is the largest entry of X's diagonal. The optimum is
    $X = D^{-1/2} (D^{1/2} G D^{1/2})^{1/2} D^{-1/2}$ with $D$ such that the diagonal is 1. Any D
    gives a lower bound, and X scaled to a diagonal of ones an upper one.
    """
    sums = np.tri(steps)
    gram = sums.T @ sums
    weights = np.sqrt(np.diag(gram))
    upper = math.inf
    for _ in range(iterations):
        scale = np.sqrt(weights)
        values, vectors = np.linalg.eigh(scale[:, None] * gram * scale)
        roots = np.sqrt(np.maximum(values, 0.0))
        root = (vectors * roots) @ vectors.T
        norms = np.sqrt(np.diag(root) / weights)
        inverse = (vectors / np.maximum(roots, 1e-300)) @ vectors.T
        lower = np.sum(roots) ** 2 / np.sum(weights)
        scaled = scale * norms
        upper = float(np.sum(gram * (inverse * np.outer(scaled, scaled))))
        if upper - lower <= gap * upper:
            break
        # An exponent of 1 is the plain iteration; 1.9 takes half as many steps.
        weights = weights * (np.diag(root) / weights) ** 1.9
    return math.sqrt(upper / steps)


def peers(task: dict[str, Any]) -> dict[str, Any]:
    """One search of jax_privacy, with its defaults, rated by its own functions."""
    import jax

    jax.config.update("jax_enable_x64", True)
    import jax.numpy as jnp
    from jax_privacy.matrix_factorization import buffered_toeplitz, dense, sensitivity, toeplitz

    steps = task["steps"]
    size = task["size"]
    most = task["most"]
    separation = task["separation"] or steps
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
            strategy = buffered_toeplitz.optimize(
                n=steps,
                min_sep=separation,
                max_participations=most,
                error="mean",
                min_buffers=size,
                max_buffers=size,
            )
            column = strategy.toeplitz_coefs(steps).block_until_ready()
        seconds = time.perf_counter() - started
        squared = toeplitz.minsep_sensitivity_squared(
            column, separation, most, steps, skip_checks=True
        )
        variances = toeplitz.per_query_error(strategy_coef=column, n=steps, skip_checks=True)
    return {"seconds": seconds, "error": float(squared * jnp.mean(variances)) ** 0.5}


def named(task: dict[str, Any]) -> str:
    """The name of a row."""
    parts = [f"{task['family']}, {task['steps']:,} steps"]
    if task["family"] == "banded":
        parts.append(f"{task['size']} bands")
    elif task["family"] == "buffered":
        parts.append(f"{task['size']} buffers")
    if task["separation"]:
        parts.append(f"{task['most']} steps {task['separation']} apart")
    return ", ".join(parts)


def main(asked: Any) -> None:
    report = reporting.begin(("numpy", "scipy", "jax"), smoke=asked.smoke, seconds=asked.seconds)
    report["rows"] = {}
    interpreters = {"dpjax": sys.executable, "jax_privacy": asked.peers_python}
    if not pathlib.Path(asked.peers_python).exists():
        print(workers.NOT_RUN, flush=True)
        del interpreters["jax_privacy"]
    alive: dict[str, workers.Worker] = {}
    keys = ("family", "steps", "size", "separation", "most")
    for values in SMOKE if asked.smoke else TASKS:
        task: dict[str, Any] = dict(zip(keys, values, strict=True))
        row = report["rows"][named(task)] = {}
        for who, python in interpreters.items():
            if who not in alive:
                # OpenBLAS's threads mostly wait for each other on cores that others use too.
                alive[who] = workers.Worker(python, "strategies", who, OPENBLAS_NUM_THREADS="1")
                alive[who].ask({"prepare": True})
            limit = asked.seconds if who == "jax_privacy" else None
            row[who] = alive[who].ask(task, limit)
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
    """Answers a question in the process of one library."""
    search = {"dpjax": ours, "jax_privacy": peers}[sys.argv[1]]
    if "prepare" in question:
        search({"family": "buffered", "steps": 4, "size": 1, "separation": None, "most": 1})
        return {}
    return search(question)


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1] in ("dpjax", "jax_privacy"):
        workers.serve(answer)
    else:
        flags.DEFINE_string("peers_python", str(workers.PEERS), "Interpreter that has the peers.")
        flags.DEFINE_float("seconds", 600.0, "A peer's search that is longer is stopped.", 0.1)
        reporting.run(main, smoke="Short runs")

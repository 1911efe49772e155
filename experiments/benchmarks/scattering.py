# SPDX-License-Identifier: Apache-2.0
"""Images per second of the scattering transform, beside kymatio's frontends.

  result    28x28x1: dpjax 5,774, kymatio's jax 2,469, torch 1,487, numpy 827; 32x32x3: 1,650, 709,
            370, 244; MNIST in 14.4 s, CIFAR-10 in 44.9 s
  hardware  2 cores of an Intel Xeon, shared; JAX 0.10.2, kymatio 0.3.0, PyTorch 2.13.0; no GPU
  command   make bench-peers BENCH=scattering ARGS="--rounds 7 --seconds 1.5 --data mnist,cifar10"
  figures   experiments/results/scattering.json

Each contestant runs in its own process in the environment of the peers; without that, dpjax runs
alone.  They take turns in a random order.  A rate is printed only if the features are dpjax's
within 1e-5.  ``--data`` times `features.scattered` on a whole data set, compilation included.
"""

from __future__ import annotations

import os
import pathlib
import random
import statistics
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import reporting
import workers
from absl import flags

import dpjax
from dpjax import features
from dpjax.scattering import scatter

SEED, J, L = 0, 2, 8
SHAPES = {"28x28x1": (28, 28, 1), "32x32x3": (32, 32, 3)}
FRONTENDS = ("numpy", "torch", "jax")
TOLERANCE = 1e-5
CHECKED = 8  # how many images' features are compared


class Alone:
    """dpjax, in this process, answering as the workers do."""

    def __init__(self, images: np.ndarray) -> None:
        self._images = jnp.asarray(images)

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        done, started = 0, time.perf_counter()
        while done == 0 or time.perf_counter() - started < question["seconds"]:
            scatter(self._images, J, L).block_until_ready()
            done += len(self._images)
        return {"speed": done / (time.perf_counter() - started)}

    def close(self) -> None:
        del self._images


def enter(
    frontend: str, images: np.ndarray, python: str, folder: str, seconds: float
) -> tuple[Any, dict[str, Any]]:
    """A frontend of kymatio, after its first images, if its features agree with dpjax."""
    worker = workers.Worker(python, "kymatio_frontends.py", frontend)
    path = pathlib.Path(folder, "images.npy")
    np.save(path, np.moveaxis(images, -1, 1))
    facts = worker.ask({"images": str(path), "J": J, "L": L, "seconds": seconds}, 600)
    if "refused" not in facts:
        # (batch, channels, paths, height, width), where dpjax has channels x paths at the end.
        theirs = np.moveaxis(np.load(facts.pop("features")), (1, 2), (3, 4))
        ours = np.asarray(scatter(jnp.asarray(images[:CHECKED]), J, L))
        facts["disagreement"] = float(abs(theirs.reshape(ours.shape) - ours).max())
        if not facts["disagreement"] <= TOLERANCE:
            facts["refused"] = f"its features differ by {facts['disagreement']:.2g}"
    return worker, facts


def measure(
    shape: tuple[int, ...], examples: int, python: str, rounds: int, seconds: float
) -> dict[str, Any]:
    """Images a second of every contestant for one shape, round by round."""
    images = np.random.default_rng(SEED).random((examples, *shape), np.float32)
    started = time.perf_counter()
    scatter(jnp.asarray(images), J, L).block_until_ready()
    figures: dict[str, Any] = {"dpjax": {"first_s": time.perf_counter() - started}}
    players: dict[str, Any] = {"dpjax": Alone(images)}
    with tempfile.TemporaryDirectory() as folder:
        for frontend in FRONTENDS if os.path.exists(python) else ():
            name = f"kymatio {frontend}"
            players[name], figures[name] = enter(frontend, images, python, folder, seconds / 3)
    able = [name for name, facts in figures.items() if "refused" not in facts]
    for name in able:
        figures[name]["rounds_images_per_s"] = []
    order = random.Random(SEED)
    for _ in range(rounds):
        for name in order.sample(able, len(able)):
            answer = players[name].ask({"seconds": seconds})
            figures[name]["rounds_images_per_s"].append(answer["speed"])
    for player in players.values():
        player.close()
    ours = None
    for name in able:
        median = statistics.median(figures[name]["rounds_images_per_s"])
        ours = ours or median
        figures[name] |= {"images_per_s": median, "dpjax_is_faster_by": ours / median}
    return figures


def whole(name: str) -> dict[str, Any]:
    """The time of a data set's training images, as a user meets it."""
    jax.clear_caches()
    images = dpjax.data.load(name).train[0]
    started = time.perf_counter()
    made = features.scattered(images, J, L)
    seconds = time.perf_counter() - started
    facts = {"examples": len(images), "features": list(made.shape[1:]), "seconds": seconds}
    return {**facts, "images_per_s": len(images) / seconds}


def table(name: str, figures: dict[str, Any]) -> str:
    rows = [f"{name}: J={J}, L={L}, float32", f"  {'':14} images/s  slowest - fastest    ratio"]
    for who, facts in figures.items():
        if "refused" in facts:
            rows.append(f"  {who:14} {facts['refused']}")
            continue
        seen = facts["rounds_images_per_s"]
        rows.append(
            f"  {who:14} {facts['images_per_s']:8,.0f}  {min(seen):7,.0f} - {max(seen):<7,.0f}  "
            f"{facts['dpjax_is_faster_by']:7.2f}"
        )
    return "\n".join(rows)


def main(asked: Any) -> None:
    rounds, seconds, examples = asked.rounds, asked.seconds, asked.examples
    shapes = SHAPES
    if asked.smoke:
        rounds, seconds, examples, shapes = 2, 0.01, 16, {"28x28x1": (28, 28, 1)}
    packages = ("jax", "jaxlib", "numpy")
    report = reporting.begin(packages, smoke=asked.smoke, rounds=rounds, seconds=seconds)
    if not os.path.exists(asked.peers_python):
        print(workers.NOT_RUN, flush=True)
    report["shapes"] = {}
    for name, shape in shapes.items():
        figures = measure(shape, examples, asked.peers_python, rounds, seconds)
        report["shapes"][name] = figures
        print(table(name, figures), flush=True)
    report["whole"] = {name: whole(name) for name in asked.data or ()}
    for name, facts in report["whole"].items():
        print(
            f"{name}: {facts['examples']:,} images in {facts['seconds']:.1f} s, compilation "
            f"included: {facts['images_per_s']:,.0f} images/s"
        )
    reporting.keep(report, asked.out)


if __name__ == "__main__":
    flags.DEFINE_list("data", None, "Whole data sets to time, by name; DPJAX_DATA_DIR has them.")
    flags.DEFINE_integer("examples", 1024, "Images of a turn's lot.", lower_bound=CHECKED)
    flags.DEFINE_float("seconds", 2.0, "The length of a turn.", lower_bound=0.01)
    flags.DEFINE_string("peers_python", str(workers.PEERS), "Interpreter that has kymatio.")
    reporting.run(main, smoke="Few images, two short rounds", rounds=7)

# SPDX-License-Identifier: Apache-2.0
"""Settings on handwritten digits at epsilon 3, and the tables of the guide to settings.

claim     rates decide; bounds and batches are level at equal rate times bound and equal epochs
verdict   so it is, in the tables of docs/pages/settings.md, which ``--page`` writes
time      1 to 8 core seconds a run; 7 core minutes for three seeds
hardware  CPU cores
command   python -m experiments.settings --seeds=3 --out=experiments/results/settings.json

One setting of `Setting` changes at a time; noise is for epsilon 3 at delta 1e-5 by PLD. Where
several rates are listed, the table shows the one with the best mean test accuracy over seeds; such
a choice by private data costs epsilon.
"""

from __future__ import annotations

import functools
import json
import pathlib
import statistics
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpjax
from dpjax import losses, metrics, models, training
from experiments.common import runs

RESULTS = pathlib.Path(__file__).parent / "results"


class Setting(NamedTuple):
    """One run; the other rows change one or two of the defaults."""

    rate: float = 0.4
    momentum: float = 0.9
    bound: float = 0.5
    batch: int = 512
    steps: int = 112
    epsilon: float = 3.0
    average: float = 0.0
    views: int = 1
    network: str = "mlp"


EPOCHS = 40  # about the 112 batches of 512
# The best rate of each setting is neither the first nor the last.
RATES = (0.1, 0.2, 0.4, 0.8, 1.6)
# The settings of each line, by table and line; the best rate of several is shown.
SWEEPS: dict[str, dict[str, list[Setting]]] = {
    "rate": {f"rate {r:g}": [Setting(rate=r)] for r in (0.004, 0.04, 0.4, 4.0, 40.0)},
    "bound": {
        f"bound {b:g}, rate {0.2 / b:g}": [Setting(bound=b, rate=0.2 / b)]
        for b in (0.05, 0.5, 5.0, 50.0)
    },
    "batch": {
        f"{1437 * EPOCHS // b} batches of {b}": [
            Setting(batch=b, steps=1437 * EPOCHS // b, rate=r * b / 512) for r in RATES
        ]
        for b in (64, 256, 1024)
    },
    "average": {
        "last parameters": [Setting(rate=r) for r in RATES],
        "average over about 20 steps": [Setting(average=0.95, rate=r) for r in RATES],
    },
    "augmentation": {
        "the image": [Setting(rate=r) for r in RATES],
        "4 shifted views": [Setting(views=4, rate=r) for r in RATES],
    },
    "group norm": {
        "convolutions": [Setting(network="cnn", rate=r) for r in RATES],
        "with group normalisation": [Setting(network="cnn, normalised", rate=r) for r in RATES],
    },
    "steps": {
        f"{s} steps": [Setting(steps=s, rate=r * 112 / s) for r in RATES] for s in (28, 112, 448)
    },
}


class Convolutions(nn.Module):
    """Two convolutions, with or without group normalisation, and a linear layer."""

    normalised: bool

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for width, stride in ((16, 1), (32, 2)):
            x = nn.Conv(width, (3, 3), strides=stride)(x)
            if self.normalised:
                x = nn.GroupNorm(num_groups=4)(x)
            x = nn.relu(x)
        return nn.Dense(10)(x.reshape(-1))


def shifted(key: Any, x: Any) -> Any:
    """The image, moved by at most one pixel in each direction."""
    row, column = jax.random.randint(key, (2,), 0, 3)
    padded = jnp.pad(x, ((1, 1), (1, 1), (0, 0)))
    return jax.lax.dynamic_slice(padded, (row, column, 0), x.shape)


@functools.lru_cache(maxsize=1)
def prepared(setting: Setting) -> tuple[Any, Any]:
    """Model and algorithm of a setting, compiled once for its seeds."""
    data = dpjax.data.load("digits")
    if setting.network == "mlp":
        model = models.MLP(features=(128,))
    else:
        model = Convolutions(normalised=setting.network == "cnn, normalised")
    loss = losses.of(model, losses.cross_entropy)
    examples: tuple[Any, ...] = data.train
    per_step = None
    if setting.views > 1:
        loss = losses.augmented(loss, shifted, setting.views, key=jax.random.key(0))
        examples = (*examples, np.arange(data.examples))
        per_step = _itself
    steps = 4 if runs.SMOKE.value else setting.steps
    mechanism = runs.calibrated(
        examples=data.examples,
        batch=setting.batch,
        steps=steps,
        epsilon=setting.epsilon,
        bound=setting.bound,
    )
    sgd = optax.sgd(setting.rate, momentum=setting.momentum or None)
    optimizer = optax.chain(sgd, training.average_parameters(setting.average))
    return model, dpjax.dpsgd(loss, optimizer, mechanism, examples, per_step=per_step)


def _itself(step: Any) -> Any:
    """The step, from which `losses.augmented` draws its views."""
    return step


def run(setting: Setting, seed: int, folder: Any) -> Mapping[str, Any]:
    """Test accuracy of the averaged parameters, and the means of the last tenth of the steps."""
    del folder
    model, algorithm = prepared(setting)
    mechanism = algorithm.mechanism
    x, y = jax.tree.map(jnp.asarray, dpjax.data.load("digits").test)
    params = jax.jit(model.init)(jax.random.key(seed), x[0])["params"]
    state = algorithm.init(params, key=jax.random.key(seed))
    last = max(1, mechanism.steps // 10)
    state, _ = dpjax.fit(algorithm, state, steps=mechanism.steps - last, progress=False)
    # A row of the log holds the means since the row before it, which are those last steps.
    state, rows = dpjax.fit(algorithm, state, steps=last, evaluate_every=last, progress=False)
    logits = runs.logits_on(model, x)(training.averaged(state.optimizer))
    (row,) = rows
    means = row["private"]
    return {
        "accuracy": 100 * float(metrics.accuracy(logits, y)),
        "loss": float(means["loss"]),
        "clipped": 100 * float(np.mean(means["clipped"])),
        "noise_multiplier": float(mechanism.multipliers[0]),
        "epsilon": mechanism.epsilon(runs.DELTA, "pld"),
    }


def row_of(setting: Setting) -> str:
    """The name of a row: the fields that differ from the defaults."""
    changed = [
        f"{field} {value}"
        for field, value in setting._asdict().items()
        if value != Setting._field_defaults[field]
    ]
    return "digits " + (", ".join(changed) or "defaults")


_CIFAR10 = "batch 4096, rate 0.8, momentum 0.9, 780 steps"
_GROUPS = "cifar10 paper, 16 groups, batch 1024, momentum 0.9"
# The tables of the guide with rows of other experiments. A line has a name, a file of results and
# a row of it.
PAPERS: dict[str, list[tuple[str, str, str]]] = {
    "features": [
        ("MNIST, a CNN on pixels", "tramer2021", "mnist pixels cnn"),
        ("MNIST, a linear model on wavelets", "tramer2021", "mnist wavelets linear"),
        ("FashionMNIST, a CNN on pixels", "tramer2021", "fashion pixels cnn"),
        ("FashionMNIST, a linear model on wavelets", "tramer2021", "fashion wavelets linear"),
        ("CIFAR-10, a linear model on wavelets", "tramer2021", "cifar wavelets linear"),
        (
            "CIFAR-10, a linear model on EfficientNet",
            "finetuning",
            "cifar10 linear small R at epsilon 1",
        ),
        ("CIFAR-10, the same at epsilon 3", "finetuning", "cifar10 linear small R at epsilon 3"),
        ("CIFAR-10, the same, not private", "finetuning", "cifar10 linear not private"),
    ],
    "rate of a paper": [
        ("MNIST, rate 0.05", "liu2021", "mnist flat, 1324 steps"),
        ("MNIST, rate 0.1414", "liu2021", "mnist flat, rate 0.1414, 1324 steps"),
        ("MNIST, rate 0.5", "liu2021", "mnist flat, rate 0.5, 1324 steps"),
    ],
    "rules": [
        ("bound 1", "bu2023", "mnist small R"),
        ("bound 200, rate by as much smaller", "bu2023", "mnist large R"),
        ("automatic", "bu2023", "mnist automatic"),
        ("a bound for each layer", "bu2023", "algorithms SGD, layerwise"),
        ("flat, for layers", "bu2023", "algorithms SGD, flat, small R"),
        ("8 groups, with the same total", "liu2021", "mnist equal, 8 groups, rate 0.5, 1324 steps"),
        ("flat, for 8 groups", "liu2021", "mnist flat, rate 0.5, 1324 steps"),
    ],
    "noise": [
        ("falling", "an2021", "exponential-down"),
        ("constant, at an epsilon as large", "an2021", "constant 1.0472"),
        ("rising", "an2021", "exponential-up"),
    ],
    "epsilons": [
        (f"noise multiplier {noise}", "an2021", f"constant {noise}") for noise in range(1, 6)
    ],
    "longer": [
        ("MNIST, 1,324 steps", "liu2021", "mnist flat, rate 0.5, 1324 steps"),
        ("MNIST, 12,646 steps", "liu2021", "mnist flat, rate 0.5, 12646 steps"),
        ("FashionMNIST, 4,901 steps", "liu2021", "fashion_mnist flat, rate 0.5, 4901 steps"),
        ("FashionMNIST, 10,546 steps", "liu2021", "fashion_mnist flat, rate 0.5, 10546 steps"),
    ],
    "optimizers": [
        ("SGD", "bu2023", "algorithms SGD, flat, small R"),
        ("heavy ball", "bu2023", "algorithms heavy ball, flat, small R"),
        ("Nesterov", "bu2023", "algorithms NAG, flat, small R"),
        ("Adam", "bu2023", "algorithms Adam, flat, small R"),
        ("RMSprop", "bu2023", "algorithms RMSprop, flat, small R"),
    ],
    "activations": [
        ("MNIST, ReLU", "papernot2021", "mnist ReLU, 14100 steps"),
        ("MNIST, tanh", "papernot2021", "mnist tanh, 14100 steps"),
        ("FashionMNIST, ReLU", "papernot2021", "fashion_mnist ReLU, 9400 steps"),
        ("FashionMNIST, tanh", "papernot2021", "fashion_mnist tanh, 9400 steps"),
        ("CIFAR-10, ReLU", "papernot2021", f"cifar10 ReLU, {_CIFAR10}"),
        ("CIFAR-10, tanh", "papernot2021", f"cifar10 tanh, {_CIFAR10}"),
        ("CIFAR-10, 16 groups, ReLU", "liu2021", f"{_GROUPS}, relu, 1625 steps"),
        ("CIFAR-10, 16 groups, tanh", "liu2021", f"{_GROUPS}, 1625 steps"),
    ],
}


class Line(NamedTuple):
    """A line of a table: accuracies by seed, epsilon by PLD, and the row that they come from."""

    label: str
    accuracies: list[float]
    epsilon: str
    source: str
    runs: list[dict[str, Any]]


@functools.cache
def content(name: str) -> Any:
    """A file of results."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def of_paper(label: str, name: str, row: str) -> Line:
    """A line with a row of another experiment."""
    seeds = list(content(name)["rows"][row].values())
    accuracies = [run["accuracy"] for run in seeds]
    _, _, epsilon = content("epsilons")[name].get(row, ["", "", "none"])
    return Line(label, accuracies, epsilon, f"{name}: {row}", seeds)


def of_sweep(label: str, settings: list[Setting]) -> Line:
    """The setting whose mean over seeds is best."""
    rows = content("settings")["rows"]
    accuracies = {}
    for setting in settings:
        row = row_of(setting)
        accuracies[row] = [run["accuracy"] for run in rows[row].values()]
    best = max(accuracies, key=lambda row: statistics.mean(accuracies[row]))
    epsilon = f"{settings[0].epsilon:g}"
    seeds = list(rows[best].values())
    return Line(label, accuracies[best], epsilon, f"settings: {best}", seeds)


def lines() -> dict[str, list[Line]]:
    """The lines of every table of the guide."""
    papers = {name: [of_paper(*row) for row in rows] for name, rows in PAPERS.items()}
    sweeps = {
        name: [of_sweep(label, settings) for label, settings in sweep.items()]
        for name, sweep in SWEEPS.items()
    }
    return papers | sweeps


def table(found: list[Line]) -> str:
    """One table; sweeps also show the means of the last tenth of the steps."""
    with_means = all("clipped" in run for line in found for run in line.runs)
    head = ["setting", "test accuracy", "epsilon", "row"]
    if with_means:
        head = ["setting", "test accuracy", "epsilon", "training loss", "clipped", "row"]
    rows = []
    for line in found:
        cells = [line.label, runs.spread(line.accuracies), line.epsilon]
        if with_means:
            loss = statistics.mean(run["loss"] for run in line.runs)
            clipped = statistics.mean(run["clipped"] for run in line.runs)
            cells += [f"{loss:.2f}", f"{clipped:.0f} %"]
        cells.append(f"`{line.source}`")
        rows.append(cells)
    return runs.table(head, rows)


def tables() -> dict[str, str]:
    """The tables of the page, by marker."""
    return {name: table(found) for name, found in lines().items()}


def main(results: runs.Results) -> None:
    """Runs the rows as far as they are missing."""
    for table, sweep in SWEEPS.items():
        if not runs.named(table):
            continue
        for name, settings in sweep.items():
            if runs.SMOKE.value:
                settings = [settings[len(settings) // 2]]
            for setting in settings:
                row = row_of(setting)
                done = [results.of(row, seed, partial(run, setting)) for seed in runs.seeds()]
                accuracy = runs.spread([row["accuracy"] for row in done])
                print(f"{table}: {name}", row, accuracy, sep="  ", flush=True)


if __name__ == "__main__":
    runs.guide("settings", lambda _: tables(), main, "runs", "data_dir", "row")

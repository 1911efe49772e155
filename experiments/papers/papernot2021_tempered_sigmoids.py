# SPDX-License-Identifier: Apache-2.0
"""Bounded activations for private training: the tables and figures of tempered_sigmoids_2021.

  result    tanh beats ReLU under DP-SGD, as claimed: MNIST 98.0 and 96.5 % (paper: 98.1, 96.6),
            FashionMNIST 85.6 and 83.1 (86.1, 81.9), CIFAR-10 56.6 and 53.6 (66.2, 61.6)
  time      5 to 20 minutes a run on a shared CPU core; CIFAR-10 80 to 95
  command   python experiments/papers/papernot2021_tempered_sigmoids.py --table=3 --seeds=3
  figures   experiments/results/papernot2021.json; others with --figure=3 --plot=curves.png

The paper prints epsilon, but for most rows neither noise nor rates.  The noise here gives its
epsilon by its conversion; rates are its own for FashionMNIST and its tutorial's for MNIST.  It
shuffles batches and accounts for Poisson batches; here batches are Poisson.  For CIFAR-10 it
prints no setting: batch, epochs and colours come from tramer2021_scatternet.
"""

from __future__ import annotations

import itertools
import pathlib
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags, logging

import dpjax
from dpjax import activations, clipping, data, diagnostics, models, sampling

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import papernot2021_pictures as pictures
from common import multi_panel_figure, paper_runs

from dpjax.cli.flag_checks import only_flags

_TABLE = flags.DEFINE_enum("table", None, ["3", "4"], "Which table; 3 by default.")
_FIGURE = flags.DEFINE_enum("figure", None, ["2", "3", "4", "5"], "Which figure.")
_DATASETS = flags.DEFINE_list("datasets", ["mnist", "fashion_mnist", "cifar10"], "Data sets.")
_EPOCHS = flags.DEFINE_float("epochs", None, "Number of epochs, in place of the published one.")


class Setting(NamedTuple):
    """A data set's published run; the noise gives its epsilon by the paper's conversion."""

    model: Callable[..., nn.Module]
    noise: float
    epochs: float
    rate: float
    printed: Mapping[str, float]  # accuracy
    batch: int = 256


def _printed(plain: float, relu: float, tanh: float) -> Mapping[str, float]:
    return {"ReLU, not private": plain, "ReLU": relu, "tanh": tanh}


SETTINGS = {
    "mnist": Setting(models.TemperedCNN, 1.12, 60, 0.15, _printed(99.0, 96.6, 98.1)),
    "fashion_mnist": Setting(models.TemperedCNN, 1.038, 40, 0.332, _printed(89.4, 81.9, 86.1)),
    "cifar10": Setting(models.CIFARCNN, 0.898, 30, 2.0, _printed(76.6, 61.6, 66.2), batch=1024),
    "digits": Setting(models.MLP, 1.1, 2, 0.15, {}),
}
KINDS = {  # activation, and whether it is trained privately
    "ReLU, not private": (nn.relu, False),
    "tanh, not private": (jnp.tanh, False),
    "ReLU": (nn.relu, True),
    "tanh": (jnp.tanh, True),
}
_KINDS = flags.DEFINE_multi_enum("kind", None, list(KINDS), "Kinds of table 3 and figures 3 to 5.")
FAMILY = tuple(itertools.product((1.0, 2.0, 4.0), (1.0, 2.0, 4.0), (0.5, 1.0, 2.0)))
TABLE_4 = {  # optimizer: (rate, accuracy) without privacy, and with it
    "sgd": ((0.107, 90.3), (0.332, 86.1)),
    "adam": ((1.06e-3, 90.5), (1.32e-3, 86.0)),
}


def mechanism_of(setting: Setting, examples: int, private: bool = True) -> dpjax.Mechanism:
    """The mechanism; an epoch counts its last, shorter batch, as the paper's epsilon does."""
    epochs = setting.epochs if _EPOCHS.value is None else _EPOCHS.value
    return dpjax.Mechanism(
        sampling=sampling.poisson(examples, setting.batch),
        clipping=clipping.flat(1.0 if private else float("inf")),
        noise_multiplier=setting.noise if private else 0.0,
        steps=round(epochs * -(-examples // setting.batch)),
    )


class Job:
    """One data set: runs with any activation and optimizer, kept by name."""

    def __init__(self, name: str, results: paper_runs.Results) -> None:
        self.name, self.setting, self.results = name, SETTINGS[name], results
        self.dataset = paper_runs.standardized(data.load(name, paper_runs.DATA_DIR.value))
        self.seeds = range(1 if paper_runs.SMOKE.value else paper_runs.SEEDS.value)
        self.title = name + paper_runs.copied(self.dataset)

    def runs(
        self,
        word: str,
        activation: Any,
        *,
        private: bool = True,
        optimizer: optax.GradientTransformation | None = None,
    ) -> list[Mapping[str, Any]]:
        """The results of all seeds, with 20 evaluations, which figures 3 to 5 draw."""
        mechanism = mechanism_of(self.setting, self.dataset.examples, private)
        model = self.setting.model(activation=activation)
        images = jnp.asarray(self.dataset.test[0][:64])

        def look(state: Any) -> dict[str, Any]:
            hidden = diagnostics.preactivation_norms(model, state.params, images)
            return {"first layer": next(iter(hidden.values()))}

        moves = optax.sgd(self.setting.rate) if optimizer is None else optimizer
        options: Any = {"evaluations": 20, "look": look}
        run = partial(paper_runs.trained, self.dataset, model, mechanism, moves, **options)
        row = f"{self.title} {word}, {mechanism.steps} steps"
        return [self.results.of(row, seed, run) for seed in self.seeds]

    def line(
        self, word: str, found: list[Mapping[str, Any]], printed: float | None, private: bool = True
    ) -> list[str]:
        """A row of a table."""
        two = paper_runs.epsilons(mechanism_of(self.setting, self.dataset.examples, private))
        accuracy = paper_runs.spread([each["accuracy"] for each in found])
        deviations = [each["deviation"] for each in found if "deviation" in each]
        deviation = f"{np.mean(deviations):.2f}" if deviations else ""
        figures = paper_runs.figures(two, ".3f")
        published = "" if printed is None else f"{printed:.1f}"
        return [self.title, word, accuracy, published, deviation, *figures]


def asked() -> Mapping[str, tuple[Any, bool]]:
    """The compared kinds: activation, and whether training is private."""
    return {words: kind for words, kind in KINDS.items() if words in (_KINDS.value or KINDS)}


def table_3(jobs: list[Job]) -> list[list[str]]:
    """ReLU without privacy, ReLU and tanh with privacy."""
    return [
        job.line(
            words, job.runs(words, act, private=private), job.setting.printed.get(words), private
        )
        for job in jobs
        for words, (act, private) in asked().items()
        if words != "tanh, not private"
    ]


def table_4(jobs: list[Job]) -> list[list[str]]:
    """SGD against Adam, each with its rate, without and with privacy; tanh."""
    lines = []
    for job, (name, sides) in itertools.product(jobs, TABLE_4.items()):
        for private, (rate, printed) in enumerate(sides):
            words = f"{name} at {rate:g}" + ", not private" * (not private)
            if private and (name, rate) == ("sgd", job.setting.rate):
                words = "tanh"  # the row of table 3
            moves = getattr(optax, name)(rate)
            found = job.runs(words, jnp.tanh, private=bool(private), optimizer=moves)
            lines.append(job.line(words, found, printed, bool(private)))
    return lines


def figure_2(jobs: list[Job]) -> list[list[str]]:
    """The family around tanh, the best first."""
    lines = []
    for job, (s, t, o) in itertools.product(jobs, FAMILY[:2] if paper_runs.SMOKE.value else FAMILY):
        words = f"s={s:g} T={t:g} o={o:g}" + " (tanh)" * ((s, t, o) == (2, 2, 1))
        found = job.runs(words, activations.tempered_sigmoid(s, t, o))
        lines.append(job.line(words, found, None))
    return sorted(lines, key=lambda line: (line[0], -float(line[2].split()[0])))


def curves(jobs: list[Job], figure: str) -> list[list[str]]:
    """Figures 3 to 5: accuracy by epsilon, gradient and activation norms by step."""
    drawn, lines = [], []
    for job in jobs:
        found = {}
        for words, (act, private) in asked().items():
            if private or figure != "3":
                found[words] = job.runs(words, act, private=private)
                lines.append(job.line(words, found[words], None, private))
        drawn += pictures.FIGURES[figure].panels(job.title, found)
    if paper_runs.PLOT.value:
        multi_panel_figure.draw(paper_runs.PLOT.value, drawn)
    return lines


def main(argv: list[str]) -> None:
    only_flags(argv)
    logging.set_verbosity(logging.WARNING)
    names = ["digits"] if paper_runs.SMOKE.value else _DATASETS.value
    jobs = [Job(name, paper_runs.results()) for name in names]
    if _FIGURE.value:
        lines = figure_2(jobs) if _FIGURE.value == "2" else curves(jobs, _FIGURE.value)
    else:
        lines = table_4(jobs) if _TABLE.value == "4" else table_3(jobs)
    head = ["data", "what", "here", "paper", "by class", "epsilon, paper's", "rdp", "pld"]
    print(paper_runs.table(head, lines))
    print(
        "By class is the standard deviation of the classes' accuracies, in points (the paper names "
        "0.16 for tanh and 0.27 for ReLU, of 10 runs averaged, without its unit or data set).\n"
        "The paper's epsilon is by the older conversion; rdp and pld are tighter, and all hold for "
        "the Poisson batches that run here."
    )


if __name__ == "__main__":
    app.run(main)

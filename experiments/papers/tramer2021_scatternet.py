# SPDX-License-Identifier: Apache-2.0
"""Wavelet features against learnt ones: the nine rows of Tramèr and Boneh (2021) at epsilon 3.

  claim    fixed wavelet features with a linear model or a small CNN beat CNNs that learn
           theirs from the pixels, at equal privacy
  seen     at the published settings, mean and range of 3 seeds, two CPU cores (the paper's
           accuracy in brackets): FashionMNIST from pixels 86.0, 85.7 to 86.2 (86.0);
           MNIST from pixels 98.1, 98.0 to 98.2 (98.1), wavelets with a
           linear model 98.5, 98.4 to 98.5 (98.7), with a CNN 98.4, 98.3 to 98.6 (98.7);
           FashionMNIST, wavelets with a linear model 89.4, 89.3 to 89.6 (89.7), with a CNN
           88.7, 88.5 to 88.9 (89.0);
           CIFAR-10 (JPEG copy), wavelets with a linear model 64.7, 64.5 to 64.9 (67.0), with a CNN
           66.9, one seed (69.3), from pixels 57.9, one seed, two hours on a busy core (59.2);
           experiments/results/tramer2021.json.  Why wavelets are behind, over two seeds: with the
           paper's shuffled batches FashionMNIST's linear model ends 0.16 higher, and of all epochs
           the best is 0.1 to 0.2 above the last; together that is 89.6.  MNIST's gains nothing by
           shuffling, and 0.1 by its best epoch; with exact moments its CNN has 98.6 (one run by
           hand).  CIFAR-10, one run each by hand: exact moments 64.5, so private ones cost
           nothing, and with them but without noise 67.7; the copy is JPEG of quality 75, colours
           at half size
  command  python experiments/papers/tramer2021_scatternet.py --rows=mnist --seeds=3 --data_dir=...

Settings are the published ones: batch, rate, epochs, noise, normalisation, PyTorch's initial
weights, SGD with momentum 0.9, every gradient clipped to 0.1; the MNIST CNN pads by "SAME",
where the paper's code pads by 2, with the same parameters.  Two things differ, and make the
guarantee hold: batches are really Poisson samples (the paper shuffles, and accounts for
Poisson), and where features are scaled by private moments the thresholds are found by two
further queries that are paid for (the paper takes medians of the private norms).  So there
are two epsilons: the paper's, of its own events by its own conversion, and ours, of all that
runs.  CIFAR-10 is what the folder has; JPEG copies are lossy, and the table says so.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from absl import app, flags, logging

import dpjax
from dpjax import accounting, clipping, data, features, models, sampling

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from common import paper_runs

from dpjax.cli.flag_checks import only_flags

_ROWS = flags.DEFINE_list("rows", None, "Rows whose names hold one of these words; else all.")
_CACHE = flags.DEFINE_string("cache_dir", None, "Where features are kept; as secret as the data.")


class Row(NamedTuple):
    """A row of the paper's table: settings, and the accuracy that was published."""

    dataset: str
    model: str
    batch: int
    rate: float
    epochs: int
    noise: float
    scaled: str  # "" from pixels, "data" by private moments, "group" each example by itself
    published: float


ROWS = {
    "mnist pixels cnn": Row("mnist", "tempered_cnn", 512, 0.5, 40, 1.23, "", 98.1),
    "mnist wavelets linear": Row("mnist", "scatter_linear", 4096, 8, 40, 3.04, "data", 98.7),
    "mnist wavelets cnn": Row("mnist", "scatter_cnn", 1024, 1, 25, 1.35, "data", 98.7),
    "fashion pixels cnn": Row("fashion_mnist", "tempered_cnn", 2048, 4, 40, 2.15, "", 86.0),
    "fashion wavelets linear": Row(
        "fashion_mnist", "scatter_linear", 8192, 16, 40, 4.05, "group", 89.7
    ),
    "fashion wavelets cnn": Row("fashion_mnist", "scatter_cnn", 2048, 4, 40, 2.15, "group", 89.0),
    "cifar pixels cnn": Row("cifar10", "cifar_dense_cnn", 1024, 1, 30, 1.54, "", 59.2),
    "cifar wavelets linear": Row("cifar10", "scatter_linear", 8192, 4, 60, 5.67, "data", 67.0),
    "cifar wavelets cnn": Row("cifar10", "scatter_cifar_cnn", 8192, 4, 60, 5.67, "data", 69.3),
}
SMALL = {
    "digits pixels": Row("digits", "mlp", 256, 0.5, 2, 1.5, "", float("nan")),
    "digits wavelets": Row("digits", "scatter_linear", 256, 0.5, 2, 3.0, "data", float("nan")),
}
MOMENTS, SEARCH = 8.0, 20.0  # noise of the two queries for moments, and of two for thresholds


def mechanism_of(row: Row, examples: int) -> dpjax.Mechanism:
    """What runs: Poisson batches, and every query on the data."""
    return dpjax.Mechanism(
        sampling=sampling.poisson(examples, row.batch),
        clipping=clipping.flat(0.1),
        noise_multiplier=row.noise,
        steps=examples // row.batch * row.epochs,
        preparation=normalization(examples).multipliers if row.scaled == "data" else (),
    )


def claimed(row: Row, examples: int) -> Any:
    """What the paper accounts: as if Poisson, and two queries for moments."""
    steps = accounting.subsampled_gaussian(
        row.noise, row.batch / examples, examples // row.batch * row.epochs
    )
    queries = [accounting.gaussian(MOMENTS)] * 2 if row.scaled == "data" else []
    return accounting.compose(*queries, steps)


def normalization(examples: int) -> features.Normalization:
    return features.Normalization(
        examples=examples,
        noise_multiplier=MOMENTS,
        thresholds=features.Search(noise_multiplier=SEARCH),
    )


def prepared(row: Row, dataset: data.Dataset, key: Any) -> data.Dataset:
    """Pixels as the paper has them, or scaled wavelet features."""
    dataset = paper_runs.standardized(dataset)
    (x, y), (x_test, y_test) = dataset.train, dataset.test
    if row.scaled:
        x, x_test = (
            jnp.asarray(features.scattered(part, directory=_CACHE.value)) for part in (x, x_test)
        )
        scale: Any = partial(features.group_norm, groups=27 * x.shape[-1] // 81)
        if row.scaled == "data":
            moments = normalization(len(x)).release(key, x)
            scale = partial(features.normalize, moments=moments)
        x, x_test = map(jax.jit(scale), (x, x_test))
    return dataset._replace(train=(x, y), test=(x_test, y_test))


def run(row: Row, dataset: data.Dataset, seed: int, folder: Any) -> Mapping[str, Any]:
    """One training run of a row."""
    key = jax.random.key(seed)
    ready = prepared(row, dataset, key)
    mechanism = mechanism_of(row, dataset.examples)
    model = models.by_name(row.model, dataset.classes, torch_init=True)
    moves = optax.sgd(row.rate, momentum=0.9)
    return paper_runs.trained(ready, model, mechanism, moves, seed, folder)


def main(argv: list[str]) -> None:
    only_flags(argv)
    logging.set_verbosity(logging.WARNING)
    rows = SMALL if paper_runs.SMOKE.value else ROWS
    chosen = {n: r for n, r in rows.items() if any(w in n for w in _ROWS.value or [""])}
    results, lines = paper_runs.results(), []
    for name, row in chosen.items():
        dataset = data.load(row.dataset, paper_runs.DATA_DIR.value)
        seeds = range(1 if paper_runs.SMOKE.value else paper_runs.SEEDS.value)
        found = [results.of(name, seed, partial(run, row, dataset)) for seed in seeds]
        two = paper_runs.epsilons(
            mechanism_of(row, dataset.examples), claimed(row, dataset.examples)
        )
        accuracy = paper_runs.spread([each["accuracy"] for each in found])
        note = " JPEG copy" * ("JPEG" in dataset.note)
        figures = paper_runs.figures(two, ".2f")
        lines.append([name + note, accuracy, f"{row.published:.1f}", *figures])
        print(*lines[-1], sep="  ", flush=True)
    print(paper_runs.table(["row", "here", "paper", "epsilon, paper's", "rdp", "pld"], lines))
    print(
        "The paper's epsilon is of shuffled batches accounted as Poisson, by the older conversion, "
        "and without the thresholds; rdp and pld are bounds for all that ran here."
    )


if __name__ == "__main__":
    app.run(main)

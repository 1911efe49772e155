# SPDX-License-Identifier: Apache-2.0
"""Models of tables with declared columns, private and not.

claim     on tables of some hundred rows a linear model is as good as a network, and privacy costs
verdict   at epsilon 1 it is ahead on two of three such tables; from 3 on both are level
time      3 core minutes
hardware  CPU cores
command   python -m experiments.declared --seeds=5 --out=experiments/results/declared.json

Ranges are round numbers from the units of each column, and were not read off the rows.  A fifth of
the rows is held out.  The rates of targets were set after a first run with 1 had diverged.
``--page=docs/pages/tutorials/table.md`` writes the table of the page.

References:
  scikit-learn's breast cancer and diabetes; Wine Quality (Cortez et al., 2009); California Housing
  (Pace and Barry, 1997).
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import pathlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpjax
from dpjax import data, losses, metrics, models, training
from experiments.common import runs

EPSILONS = (1.0, 3.0, 8.0, math.inf)
MODELS = {"linear": {}, "mlp": {"features": (32,)}}
# The range of each column.
CANCER = {
    "radius": (0, 40),
    "texture": (0, 50),
    "perimeter": (0, 300),
    "area": (0, 5000),
    "smoothness": (0, 0.3),
    "compactness": (0, 1.5),
    "concavity": (0, 1.5),
    "concave points": (0, 0.3),
    "symmetry": (0, 0.7),
    "fractal dimension": (0, 0.25),
}
WINE = {
    "fixed acidity": (0, 20),
    "volatile acidity": (0, 2),
    "citric acid": (0, 1),
    "residual sugar": (0, 20),
    "chlorides": (0, 1),
    "free sulfur dioxide": (0, 100),
    "total sulfur dioxide": (0, 300),
    "density": (0.98, 1.01),
    "pH": (2, 5),
    "sulphates": (0, 2),
    "alcohol": (8, 16),
}
HOUSING = {
    "longitude": (-125, -114),
    "latitude": (32, 42),
    "housing_median_age": (0, 60),
    "total_rooms": (0, 10_000),
    "total_bedrooms": (0, 2000),
    "population": (0, 5000),
    "households": (0, 2000),
    "median_income": (0, 15),
}
DIABETES = {
    "age": (0, 100),
    "sex": (1, 2),
    "bmi": (15, 45),
    "bp": (50, 150),
    "s1": (0, 400),
    "s2": (0, 300),
    "s3": (0, 120),
    "s4": (0, 10),
    "s5": (3, 7),
    "s6": (50, 150),
}


def declared(ranges: Mapping[str, Any], **learnt: Any) -> dict[str, Any]:
    """The columns of a table: numbers in their ranges, and the column to be learnt."""
    columns = {}
    for name, (low, high) in ranges.items():
        middle = (low + high) / 2  # stands for a missing number
        columns[name] = {"kind": "number", "low": low, "high": high, "fill": middle}
    return columns | learnt


def target(low: float, high: float) -> dict[str, Any]:
    """A number to be learnt."""
    return {"kind": "target", "low": low, "high": high}


@functools.cache
def table(name: str) -> data.Dataset:
    """A table, from scikit-learn or from the data folder."""
    folder = pathlib.Path(runs.DATA_DIR.value or os.environ.get("DPJAX_DATA_DIR", "."))
    if name == "breast cancer":
        from sklearn.datasets import load_breast_cancer

        rows = load_breast_cancer()
        frame = dict(zip(CANCER, rows.data[:, -10:].T.tolist(), strict=True))
        frame["diagnosis"] = rows.target_names[rows.target].tolist()
        label = {"kind": "label", "values": ["benign", "malignant"]}
        return data.table(frame, declared(CANCER, diagnosis=label))
    if name == "diabetes":
        from sklearn.datasets import load_diabetes

        rows = load_diabetes(scaled=False)
        frame = dict(zip(DIABETES, rows.data.T.tolist(), strict=True))
        frame["progression"] = rows.target.tolist()
        return data.table(frame, declared(DIABETES, progression=target(0, 400)))
    if name == "wine quality":
        columns = declared(WINE, quality=target(0, 10))
        return data.table(folder / "wine_quality_red.csv", columns)
    columns = declared(HOUSING, median_house_value=target(0, 500_001))
    return data.table(folder / "california_housing.csv", columns)


@functools.cache
def algorithm(name: str, model: str, epsilon: float) -> tuple[dpjax.types.Algorithm, Any]:
    """The algorithm of a row, and its model."""
    dataset = table(name)
    network = models.by_name(model, classes=dataset.classes or 1, **MODELS[model])
    _, labels = dataset.train
    examples = len(labels)
    mechanism = runs.calibrated(
        examples=examples,
        batch=min(examples // 4, 512),
        steps=160,
        epsilon=epsilon,
        bound=0.5,
    )
    loss = losses.squared_error
    # A target has a tenth of the page's rate, with which the noise in the parameters grows.
    rate = 0.1
    if dataset.classes:
        loss = losses.cross_entropy
        if math.isfinite(epsilon):
            rate = 1.0
    sgd = optax.sgd(rate, momentum=0.9)
    optimizer = optax.chain(sgd, training.average_parameters(0.95))
    return dpjax.dpsgd(losses.of(network, loss), optimizer, mechanism, dataset.train), network


def train(name: str, model: str, epsilon: float, seed: int, folder: Any) -> Mapping[str, Any]:
    """One run, measured on the held-out rows."""
    del folder
    dpsgd, network = algorithm(name, model, epsilon)
    dataset = table(name)
    key = jax.random.key(seed)
    x, y = dataset.test
    params = network.init(key, jnp.asarray(x[0]))["params"]
    state = dpsgd.init(params, key=key)
    state, _ = dpjax.fit(dpsgd, state, evaluate_every=160, progress=False)
    average = {"params": training.averaged(state.optimizer)}
    outputs = np.asarray(network.apply(average, jnp.asarray(x)), np.float64)
    if dataset.classes:
        scores = outputs[:, 1] - outputs[:, 0]
        right = (scores > 0) == y
        return {"accuracy": 100 * float(np.mean(right)), "auroc": metrics.auroc(scores, y)}
    predicted = outputs[:, 0]
    low, high = dataset.target_range
    scale = (high - low) / 2  # targets are scaled to [-1, 1]
    return {
        "rmse": scale * float(metrics.rmse(predicted, y)),
        "r2": float(metrics.r2(predicted, y)),
    }


NAMES = ("breast cancer", "diabetes", "wine quality", "california housing")
WORDS = {"accuracy": "accuracy, %", "auroc": "AUROC", "rmse": "RMSE", "r2": "R2"}


def key_of(name: str, model: str, epsilon: float) -> str:
    """The name of a row."""
    return f"{name} {model} at epsilon {epsilon:g}"


def shown(measure: str, value: float) -> str:
    """A figure of the table: percent with one decimal, all others with three digits."""
    if measure == "accuracy":
        return f"{value:.1f}"
    rounded = float(f"{value:.3g}")
    if rounded >= 1000:
        return f"{rounded:,.0f}"
    return f"{rounded:.3g}"


def tables(rows: Mapping[str, Any]) -> dict[str, str]:
    """The table of the page: means over seeds by epsilon, and the largest range of the private."""
    lines = []
    for name in NAMES:
        for measure, words in WORDS.items():
            for model, model_words in (("linear", "linear"), ("mlp", "network")):
                means = []
                ranges = []
                for epsilon in EPSILONS:
                    runs_of = rows[key_of(name, model, epsilon)].values()
                    values = [run[measure] for run in runs_of if measure in run]
                    if values:
                        means.append(shown(measure, float(np.mean(values))))
                        if math.isfinite(epsilon):
                            ranges.append(np.ptp(values))
                if means:
                    largest = shown(measure, max(ranges))
                    lines.append([name, model_words, words, *means, largest])
    heads = ["table", "model", "measure", "epsilon 1", "epsilon 3", "epsilon 8", "not private"]
    return {"table": runs.table([*heads, "largest range of 5 seeds"], lines)}


def main(results: runs.Results) -> None:
    """Runs the rows as far as they are missing."""
    names = NAMES[:1] if runs.SMOKE.value else NAMES
    for name, model, epsilon in itertools.product(names, MODELS, EPSILONS):
        row = key_of(name, model, epsilon)
        if runs.named(row):
            run = partial(train, name, model, epsilon)
            done = [results.of(row, seed, run) for seed in runs.seeds()]
            print(row, *done, flush=True)


if __name__ == "__main__":
    runs.guide("declared", tables, main, "data_dir", "row")

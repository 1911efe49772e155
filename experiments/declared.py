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
CANCER = {"radius": 40, "texture": 50, "perimeter": 300, "area": 5000, "smoothness": 0.3}
CANCER |= {"compactness": 1.5, "concavity": 1.5, "concave points": 0.3, "symmetry": 0.7}
CANCER |= {"fractal dimension": 0.25}
WINE = {"fixed acidity": 20, "volatile acidity": 2, "citric acid": 1, "residual sugar": 20}
WINE |= {"chlorides": 1, "free sulfur dioxide": 100, "total sulfur dioxide": 300}
WINE |= {"density": (0.98, 1.01), "pH": (2, 5), "sulphates": 2, "alcohol": (8, 16)}
HOUSING = {"longitude": (-125, -114), "latitude": (32, 42), "housing_median_age": 60}
HOUSING |= {"total_rooms": 10_000, "total_bedrooms": 2000, "population": 5000}
HOUSING |= {"households": 2000, "median_income": 15}
DIABETES = {"age": 100, "sex": (1, 2), "bmi": (15, 45), "bp": (50, 150), "s1": 400, "s2": 300}
DIABETES |= {"s3": 120, "s4": 10, "s5": (3, 7), "s6": (50, 150)}


def declared(limits: Mapping[str, Any], **learnt: Any) -> dict[str, Any]:
    """Numbers from 0, or from another number, to a limit; and the column to be learnt."""
    pairs = {name: most if isinstance(most, tuple) else (0, most) for name, most in limits.items()}
    numbers = {n: {"kind": "number", "low": low, "high": high} for n, (low, high) in pairs.items()}
    # A gap counts as the middle of its range.
    return {n: {**c, "fill": (c["low"] + c["high"]) / 2} for n, c in numbers.items()} | learnt


def target(low: float, high: float) -> dict[str, Any]:
    return {"kind": "target", "low": low, "high": high}


@functools.cache
def table(name: str) -> data.Dataset:
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
    dataset, private = table(name), math.isfinite(epsilon)
    network = models.by_name(model, classes=dataset.classes or 1, **MODELS[model])
    examples = len(dataset.train[1])
    mechanism = runs.calibrated(examples, min(examples // 4, 512), 160, epsilon, 0.5)
    loss = losses.cross_entropy if dataset.classes else losses.squared_error
    # Labels take the page's rate.  A target takes a tenth: the noise that is left grows with it.
    rate = 1.0 if private and dataset.classes else 0.1
    optimizer = optax.chain(optax.sgd(rate, momentum=0.9), training.average_parameters(0.95))
    return dpjax.dpsgd(losses.of(network, loss), optimizer, mechanism, dataset.train), network


def train(name: str, model: str, epsilon: float, seed: int, folder: Any) -> Mapping[str, Any]:
    """One run, measured on the held-out rows."""
    del folder
    made, network = algorithm(name, model, epsilon)
    dataset, key = table(name), jax.random.key(seed)
    x, y = dataset.test
    params = network.init(key, jnp.asarray(x[0]))["params"]
    state, _ = dpjax.fit(made, made.init(params, key=key), evaluate_every=160, progress=False)
    average = {"params": training.averaged(state.optimizer)}
    outputs = np.asarray(network.apply(average, jnp.asarray(x)), np.float64)
    if dataset.classes:
        scores = outputs[:, 1] - outputs[:, 0]
        return {
            "accuracy": 100 * float(np.mean((scores > 0) == y)),
            "auroc": metrics.auroc(scores, y),
        }
    low, high = dataset.target_range
    return {
        "rmse": (high - low) / 2 * float(metrics.rmse(outputs[:, 0], y)),
        "r2": float(metrics.r2(outputs[:, 0], y)),
    }


NAMES = ("breast cancer", "diabetes", "wine quality", "california housing")
WORDS = {"accuracy": "accuracy, %", "auroc": "AUROC", "rmse": "RMSE", "r2": "R2"}


def tables(rows: Mapping[str, Any]) -> dict[str, str]:
    lines = []
    for name in NAMES:
        for model, of in (("linear", "linear"), ("mlp", "network")):
            found = [[*rows[f"{name} {model} at epsilon {e:g}"].values()] for e in EPSILONS]
            for measure in set(WORDS) & set(found[0][0]):
                digits = ".1f" if measure == "accuracy" else ".3g"
                cells = (f"{np.mean([run[measure] for run in each]):{digits}}" for each in found)
                spread = max(np.ptp([run[measure] for run in each]) for each in found[:3])
                lines.append([name, of, WORDS[measure], *cells, f"{spread:{digits}}"])
    heads = ["table", "model", "measure", *(f"epsilon {e:g}" for e in EPSILONS[:3])]
    order = [*WORDS.values()]
    lines.sort(key=lambda line: (NAMES.index(line[0]), order.index(line[2]), line[1]))
    return {"table": runs.table([*heads, "not private", "largest range of 5 seeds"], lines)}


def main(results: runs.Results) -> None:
    for name in NAMES[: 1 if runs.SMOKE.value else None]:
        for model in MODELS:
            for epsilon in EPSILONS:
                row = f"{name} {model} at epsilon {epsilon:g}"
                if runs.named(row):
                    one = partial(train, name, model, epsilon)
                    print(row, *(results.of(row, s, one) for s in runs.seeds()), flush=True)


if __name__ == "__main__":
    runs.guide("declared", tables, main, "data_dir", "row")

# SPDX-License-Identifier: Apache-2.0
"""The two regressions of convergence_calibration_2023: house prices, and marks of wines.

A perceptron of 64, 64 and 32 with ReLU learns from features that are scaled by constants.
The constants are round numbers chosen in advance: means of the examples would be a release that
epsilon does not count.  Epsilon covers the training alone.  Prices are in 100,000 dollars.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dpjax
from dpjax import data, losses, models
from experiments.calibration import settings
from experiments.calibration.settings import Row
from experiments.common import runs

SCALES = {  # of the features: what becomes 0, what becomes 1; and the unit of the target
    "california_housing": (
        (-119.5, 36, 30, 2_500, 500, 1_500, 500, 4),
        (2, 2, 12, 2_000, 400, 1_000, 400, 2),
        1e5,
    ),
    "wine_quality": (
        (8, 0.5, 0.25, 2.5, 0.1, 15, 50, 0.997, 3.3, 0.65, 10.5),
        (2, 0.2, 0.2, 1.5, 0.05, 10, 30, 0.002, 0.15, 0.15, 1),
        1.0,
    ),
}


def _squared(prediction: Any, target: Any) -> Any:
    """The paper's: without the half."""
    return 2 * losses.squared_error(prediction, target)


def prepared(name: str) -> data.Dataset:
    """Scaled features and targets; with --smoke as many random ones as take a second."""
    center, width, unit = SCALES[name]
    if runs.SMOKE.value:
        x = np.random.default_rng(0).normal(size=(96, len(center))).astype(np.float32)
        y = x[:, 0] + 5
        return data.Dataset(name, (x[:64], y[:64]), (x[64:], y[64:]), None)
    dataset = runs.loaded(name)
    train, test = (
        (data.standardize(x, center, width), np.asarray(y / unit, np.float32))
        for x, y in (dataset.train, dataset.test)
    )
    return dataset._replace(train=train, test=test)


def train(row: Row, seed: int, folder: Any) -> Mapping[str, Any]:
    """One run: mean squared errors over the steps."""
    name, way = row
    dataset, setting = prepared(name), settings.SETTINGS[name]
    if runs.SMOKE.value:
        whole = setting.batch == setting.examples
        size = dataset.examples
        setting = setting._replace(examples=size, batch=size if whole else 32, steps=4)
    model = models.by_name("regression_mlp", 1, torch_init=True)
    parts = jax.tree.map(jnp.asarray, (dataset.train, dataset.test))
    params = model.init(jax.random.key(seed), parts[0][0][0])["params"]
    mechanism = settings.mechanism_of(setting, way, params)
    optimizer, _ = settings.moves(setting, way, settings.ways(setting, params)[way].bound)
    algorithm = dpjax.dpsgd(losses.of(model, _squared), optimizer, mechanism, parts[0])

    @jax.jit
    def errors(params: Any) -> list[Any]:
        def error(x: Any, y: Any) -> Any:
            prediction: Any = model.apply({"params": params}, x)
            return jnp.mean((prediction[:, 0] - y) ** 2)

        return [error(*part) for part in parts]

    def evaluate(state: Any) -> dict[str, Any]:
        train, test = errors(state.params)
        return {"mse": test, "private": {"train mse": train}}

    state = algorithm.init(params, key=jax.random.key(seed))
    every = -(-setting.steps // 50)
    options: Any = {"evaluate_every": every, "progress": False, "delta": setting.delta}
    _, history = dpjax.fit(algorithm, state, evaluate=evaluate, directory=folder, **options)
    return {"mse": history[-1]["mse"], "way": [[row["step"], row["mse"]] for row in history]}

# SPDX-License-Identifier: Apache-2.0
"""The two regressions of convergence_calibration_2023: house prices, and marks of wines.

A perceptron of 64, 64 and 32 with ReLU learns from features that are scaled by constants.
The constants are round numbers chosen in advance: means of the examples are a release that
epsilon does not count.  Epsilon covers only the training.  Prices are in 100,000 dollars.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import dpjax
from dpjax import data, losses, models
from experiments.calibration import settings
from experiments.calibration.settings import Row
from experiments.common import runs


class Scale(NamedTuple):
    """Public constants: features become (x - center) / width, and targets y / unit."""

    center: tuple[float, ...]
    width: tuple[float, ...]
    unit: float


SCALES = {
    "california_housing": Scale(
        center=(-119.5, 36, 30, 2_500, 500, 1_500, 500, 4),
        width=(2, 2, 12, 2_000, 400, 1_000, 400, 2),
        unit=1e5,
    ),
    "wine_quality": Scale(
        center=(8, 0.5, 0.25, 2.5, 0.1, 15, 50, 0.997, 3.3, 0.65, 10.5),
        width=(2, 0.2, 0.2, 1.5, 0.05, 10, 30, 0.002, 0.15, 0.15, 1),
        unit=1.0,
    ),
}


def _squared(prediction: Any, target: Any) -> Any:
    """The squared error, which the paper does not halve."""
    return 2 * losses.squared_error(prediction, target)


def prepared(name: str) -> data.Dataset:
    """Scaled features and targets; with --smoke as many random ones as take a second."""
    scale = SCALES[name]
    if runs.SMOKE.value:
        x = np.random.default_rng(0).normal(size=(96, len(scale.center))).astype(np.float32)
        y = x[:, 0] + 5
        return data.Dataset(name, (x[:64], y[:64]), (x[64:], y[64:]), None)
    dataset = runs.loaded(name)
    train = _scaled(dataset.train, scale)
    test = _scaled(dataset.test, scale)
    return dataset._replace(train=train, test=test)


def _scaled(part: tuple[Any, Any], scale: Scale) -> tuple[Any, Any]:
    """Features and targets by public constants."""
    x, y = part
    x = data.standardize(x, scale.center, scale.width)
    return x, np.asarray(y / scale.unit, np.float32)


def train(row: Row, seed: int, folder: Any) -> Mapping[str, Any]:
    """One run: mean squared errors over the steps."""
    name, way = row
    dataset = prepared(name)
    setting = settings.SETTINGS[name]
    if runs.SMOKE.value:
        batch = dataset.examples if setting.batch == setting.examples else 32
        setting = setting._replace(examples=dataset.examples, batch=batch, steps=4)
    model = models.by_name("regression_mlp", 1, torch_init=True)
    x, y = jax.tree.map(jnp.asarray, dataset.train)
    x_test, y_test = jax.tree.map(jnp.asarray, dataset.test)
    params = model.init(jax.random.key(seed), x[0])["params"]
    mechanism = settings.mechanism_of(setting, way, params)
    bound = settings.ways(setting, params)[way].bound
    optimizer, _ = settings.moves(setting, way, bound)
    algorithm = dpjax.dpsgd(losses.of(model, _squared), optimizer, mechanism, (x, y))

    @jax.jit
    def mse(params: Any, x: Any, y: Any) -> Any:
        prediction: Any = model.apply({"params": params}, x)
        return jnp.mean((prediction[:, 0] - y) ** 2)

    def evaluate(state: Any) -> dict[str, Any]:
        return {
            "mse": mse(state.params, x_test, y_test),
            "private": {"train mse": mse(state.params, x, y)},
        }

    state = algorithm.init(params, key=jax.random.key(seed))
    every = -(-setting.steps // 50)
    options: Any = {"evaluate_every": every, "progress": False, "delta": setting.delta}
    _, history = dpjax.fit(algorithm, state, evaluate=evaluate, directory=folder, **options)
    return {"mse": history[-1]["mse"], "way": [[row["step"], row["mse"]] for row in history]}

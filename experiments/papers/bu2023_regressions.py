# SPDX-License-Identifier: Apache-2.0
"""The two regressions of convergence_calibration_2023: house prices, and marks of wines.

A perceptron of 64, 64 and 32 with ReLU learns from features that are scaled by constants.
The constants are round numbers chosen in advance: means of the examples would be a release that
epsilon does not count.  Epsilon covers the training alone.  Prices are in 100,000 dollars.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import bu2023_pictures as pictures
import bu2023_settings as settings
import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from bu2023_settings import LARGE, PLAIN, SMALL
from common import multi_panel_figure, paper_runs

import dpjax
from dpjax import data, losses, models

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
_LOSS = flags.DEFINE_enum(
    "loss", "squared_error", ["squared_error", "huber"], "Of the regressions; tests: squared."
)


def _squared(prediction: Any, target: Any) -> Any:
    """The paper's: without the half."""
    return 2 * losses.squared_error(prediction, target)


def prepared(name: str) -> data.Dataset:
    """Scaled features and targets; with --smoke as many random ones as take a second."""
    center, width, unit = SCALES[name]
    if paper_runs.SMOKE.value:
        x = np.random.default_rng(0).normal(size=(96, len(center))).astype(np.float32)
        y = x[:, 0] + 5
        return data.Dataset(name, (x[:64], y[:64]), (x[64:], y[64:]), None)
    dataset = data.load(name, paper_runs.DATA_DIR.value)
    train, test = (
        (data.standardize(x, center, width), np.asarray(y / unit, np.float32))
        for x, y in (dataset.train, dataset.test)
    )
    return dataset._replace(train=train, test=test)


def run(name: str, way: str, seed: int, folder: Any) -> Mapping[str, Any]:
    """One run: mean squared errors over the steps."""
    dataset, setting = prepared(name), settings.SETTINGS[name]
    if paper_runs.SMOKE.value:
        whole = setting.batch == setting.examples
        size = dataset.examples
        setting = setting._replace(examples=size, batch=size if whole else 32, steps=4)
    model = models.by_name("regression_mlp", 1, torch_init=True)
    parts = jax.tree.map(jnp.asarray, (dataset.train, dataset.test))
    params = model.init(jax.random.key(seed), parts[0][0][0])["params"]
    mechanism = settings.mechanism_of(setting, way, params)
    optimizer, _ = settings.moves(setting, way, settings.ways(setting, params)[way].bound)
    loss = losses.of(model, losses.huber() if _LOSS.value == "huber" else _squared)
    algorithm = dpjax.dpsgd(loss, optimizer, mechanism, parts[0])

    @jax.jit
    def errors(params: Any) -> list[Any]:
        def error(x: Any, y: Any) -> Any:
            prediction: Any = model.apply({"params": params}, x)
            return jnp.mean((prediction[:, 0] - y) ** 2)

        return [error(*part) for part in parts]

    def evaluate(state: Any) -> dict[str, Any]:
        train, test = errors(state.params)
        return {"mse": test, "private": {"train mse": train}}

    state = algorithm.init(params, jax.random.key(seed))
    every = -(-setting.steps // 50)
    options: Any = {"evaluate_every": every, "progress": False, "delta": setting.delta}
    _, history = dpjax.fit(algorithm, state, evaluate=evaluate, directory=folder, **options)
    return {"mse": history[-1]["mse"], "way": [[row["step"], row["mse"]] for row in history]}


def figure_10(results: paper_runs.Results) -> str:
    """Test errors by step under a small bound, a large one and none."""
    seeds = paper_runs.seeds()
    lines, drawn = [], []
    for name, setting in settings.SETTINGS.items():
        if name not in SCALES:
            continue
        found = {}
        for way in (SMALL, LARGE) if paper_runs.SMOKE.value else (PLAIN, SMALL, LARGE):
            row = f"{name} {way} {_LOSS.value}"
            runs = [results.of(row, seed, partial(run, name, way)) for seed in seeds]
            errors = [each["mse"] for each in runs]
            spread = f"{np.mean(errors):.3f} ± {np.std(errors):.3f} ({len(errors)} seeds)"
            shape = {"layer": {"kernel": jnp.zeros(1)}}  # bounds of layers are not asked for
            lines.append([name, way, spread, *settings.epsilons(setting, way, shape)])
            found[way] = runs
        drawn += pictures.errors(name, found)
    if paper_runs.PLOT.value:
        multi_panel_figure.draw(paper_runs.PLOT.value, drawn)
    return paper_runs.table(["data", "clipping", "squared error", *settings.EPSILONS], lines)

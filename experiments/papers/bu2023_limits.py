# SPDX-License-Identifier: Apache-2.0
"""The limit of small steps, where noise vanishes and clipping stays (table 1, figure 1).

In that limit the loss falls along a matrix H C that need not be symmetric or positive.  Table 1
of the paper lists the properties that are guaranteed.  Here they are measured on small random
networks, from the matrices and by descending in small steps without noise.  A property without a
guarantee may still hold in every network that was tried.

  result    every guaranteed property held in 50 of 50 networks, except that the loss did not come
            near 0 in one network, nor in 16 under small flat bounds; small bounds lose symmetry
            always.  Smaller steps shrink what noise moves, from 0.009 to 0.003 of the test loss (5
            seeds), and leave what clipping moves, 0.18
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any, NamedTuple

import bu2023_pictures as pictures
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import multi_panel_figure, paper_runs

import dpjax
from dpjax import clipping, data, diagnostics, models, sampling
from dpjax.diagnostics import ntk

INPUTS, WIDTH, RATE, STEPS, TRIALS = 4, 2, 0.005, 20_000, 50
TIME, RATES, NOISES = 100.0, (1.0, 0.25, 0.0625), (2.0, 10.0)
MODEL = models.MLP(features=(4, 4), classes=1)


class Row(NamedTuple):
    """A row of table 1: a clipping, and which properties theorems 1 and 2 guarantee."""

    layerwise: bool
    bound: float
    batch: float  # what the mean gradient is multiplied by
    guaranteed: str


NONE, LARGE, SMALL = 1e9, 1e4, 0.5
TABLE_1 = {
    "no clipping": Row(False, NONE, 1.0, "yyyyyy"),
    "batch clipping": Row(False, NONE, 0.5, "yyyyyy"),
    "large R, flat": Row(False, LARGE, 1.0, "yyyyyy"),
    "large R, layerwise": Row(True, LARGE, 1.0, "yyyyyy"),
    "small R, flat": Row(False, SMALL, 1.0, "nnynny"),
    "small R, layerwise": Row(True, SMALL, 1.0, "nnnnnn"),
}
COLUMNS = ("symmetric", "positive form", "positive eigenvalues", "converges", "monotone", "to 0")


def _output(params: Any, x: Any) -> Any:
    return MODEL.apply({"params": params}, x)[0]


def _gradients(params: Any, batch: Any) -> tuple[Any, Any]:
    """Losses and gradients of each example."""
    each = jax.value_and_grad(lambda p, x, y: (_output(p, x) - y) ** 2)
    return jax.vmap(each, (None, 0, 0))(params, *batch)


@partial(jax.jit, static_argnames=("layerwise", "steps"))
@partial(jax.vmap, in_axes=(None, None, None, None, 0))
def _descend(layerwise: bool, steps: int, bound: Any, batch: Any, key: Any) -> tuple[Any, Any]:
    """The matrix of a random network, and its mean losses on the way down."""
    keys = jax.random.split(key, 3)
    x = jax.random.normal(keys[0], (INPUTS, WIDTH))
    examples = x, 2 * jax.random.normal(keys[1], (INPUTS,))
    params = MODEL.init(keys[2], x[0])["params"]
    rule = clipping.grouped(bound=1.0, groups=clipping.by_layer(params) if layerwise else 1)

    def clipped(params: Any) -> Any:
        each, gradients = _gradients(params, examples)
        # Divided by the bound and clipped to 1, so that one program serves all bounds.
        scaled = jax.tree.map(lambda g: g / bound, gradients)
        total, _, factors = clipping.clip(rule, scaled)
        return each, jax.tree.map(lambda g: g * bound, total), factors

    def step(params: Any, _: Any) -> tuple[Any, Any]:
        each, total, _ = clipped(params)
        moved = jax.tree.map(lambda w, g: w - RATE * batch * g / INPUTS, params, total)
        return moved, jnp.mean(each)

    matrix = batch * ntk(_output, params, x, clipped(params)[2], rule.partition)
    return matrix, jax.lax.scan(step, params, length=steps)[1]


def measured(row: Row, trials: int, steps: int, seed: int, folder: Any) -> dict[str, int]:
    """In how many networks each property of the table was found."""
    del folder  # a row takes seconds, and starts from its beginning
    keys = jax.random.split(jax.random.key(seed), trials)
    matrices, ways = _descend(row.layerwise, steps, row.bound, row.batch, keys)
    found = np.zeros(len(COLUMNS), int)
    for matrix, way in zip(np.asarray(matrices), np.asarray(ways, np.float64), strict=True):
        kinds = diagnostics.definiteness(matrix)
        rises = np.diff(way) > 1e-5 * way[:-1] + 1e-7 * way[0]
        settled = np.ptp(way[-steps // 10 :]) < 0.01 * way[0]
        found += [*kinds[3:], settled, not rises.any(), way[-1] < 0.01 * way[0]]
    return {"networks": trials, **dict(zip(COLUMNS, found.tolist(), strict=True))}


def table_1(results: paper_runs.Results) -> str:
    """How often each property was found, and whether it is guaranteed."""
    trials, steps = (10, 200) if paper_runs.SMOKE.value else (TRIALS, STEPS)
    lines = []
    for name, row in TABLE_1.items():
        counts = results.of(f"kernel {name}", 0, partial(measured, row, trials, steps))
        words = [
            f"{counts[column]}/{trials} ({'yes' if sure == 'y' else 'no'})"
            for column, sure in zip(COLUMNS, row.guaranteed, strict=True)
        ]
        lines.append([name, *words])
    return paper_runs.table(["clipping", *COLUMNS], lines)


def figure_1(results: paper_runs.Results) -> str:
    """How far noise, and how far clipping, moves the test loss at one time, by step size."""
    time, rates = (4.0, RATES[:1]) if paper_runs.SMOKE.value else (TIME, RATES)
    noises = NOISES[-1:] if paper_runs.SMOKE.value else NOISES
    seeds = paper_runs.seeds()
    dataset = data.load("digits")
    model = models.MLP(features=(32,), activation=nn.relu)
    sampler = sampling.full(dataset.examples)

    def run(bound: float, noise: float, rate: float, seed: int) -> tuple[str, Any]:
        steps = round(time / rate)
        ran = dpjax.Mechanism(
            sampling=sampler, clipping=clipping.flat(bound), noise_multiplier=noise, steps=steps
        )
        train = partial(paper_runs.trained, dataset, model, ran, optax.sgd(rate), evaluations=2)
        row = f"R={bound} {noise} at {rate} over {steps}"
        return row, results.of(f"digits {row}", seed, train)

    sides = [(1.0, 0.0), *((1.0, noise) for noise in noises), (math.inf, 0.0)]
    found: dict[str, list[Any]] = {}
    for seed, rate, side in itertools.product(seeds, rates, sides):
        name, ran = run(*side, rate, seed)
        found.setdefault(name, []).append(ran)
    (panel,) = pictures.gaps("digits", found)
    if paper_runs.PLOT.value:
        multi_panel_figure.draw(paper_runs.PLOT.value, [panel])
    rates = sorted(rates)
    rows = [[n, *(f"{np.mean(gap):.4f}" for gap in gaps)] for n, (_, gaps) in panel.lines.items()]
    return paper_runs.table(["what moves the test loss", *(f"step {r:g}" for r in rates)], rows)

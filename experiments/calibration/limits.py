# SPDX-License-Identifier: Apache-2.0
"""The limit of small steps, where noise vanishes and clipping stays (table 1, figure 1).

In that limit the loss falls along a matrix H C that need not be symmetric or positive.  Table 1
of the paper lists the properties that are guaranteed.  Here they are measured on small random
networks, from the matrices and by descending in small steps without noise.  A property without a
guarantee may still hold in every network that was tried.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpjax
from dpjax import clipping, data, diagnostics, models, sampling
from dpjax.diagnostics import ntk
from experiments.common import runs
from experiments.common.claims import Claim

INPUTS, WIDTH, RATE, STEPS, TRIALS = 4, 2, 0.005, 20_000, 50
TIME, RATES, NOISES = 100.0, (1.0, 0.25, 0.0625), (2.0, 10.0)
MODEL = models.MLP(features=(4, 4), classes=1)
EXAMPLES = 1_437  # of the digits


class Kernel(NamedTuple):
    """A row of table 1: a clipping, and which properties theorems 1 and 2 guarantee."""

    layerwise: bool
    bound: float
    batch: float  # what the mean gradient is multiplied by
    guaranteed: str


NONE, LARGE, SMALL = 1e9, 1e4, 0.5
TABLE_1 = {
    "no clipping": Kernel(False, NONE, 1.0, "yyyyyy"),
    "batch clipping": Kernel(False, NONE, 0.5, "yyyyyy"),
    "large R, flat": Kernel(False, LARGE, 1.0, "yyyyyy"),
    "large R, layerwise": Kernel(True, LARGE, 1.0, "yyyyyy"),
    "small R, flat": Kernel(False, SMALL, 1.0, "nnynny"),
    "small R, layerwise": Kernel(True, SMALL, 1.0, "nnnnnn"),
}
COLUMNS = ("symmetric", "positive form", "positive eigenvalues", "converges", "monotone", "to 0")


def _output(params: Any, x: Any) -> Any:
    return MODEL.apply({"params": params}, x)[0]


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
        squares = jax.value_and_grad(lambda p, x, y: (_output(p, x) - y) ** 2)
        each, gradients = jax.vmap(squares, (None, 0, 0))(params, *examples)
        # Divided by the bound and clipped to 1, so that one program serves all bounds.
        total, _, factors = clipping.clip(rule, jax.tree.map(lambda g: g / bound, gradients))
        return each, jax.tree.map(lambda g: g * bound, total), factors

    def step(params: Any, _: Any) -> tuple[Any, Any]:
        each, total, _ = clipped(params)
        moved = jax.tree.map(lambda w, g: w - RATE * batch * g / INPUTS, params, total)
        return moved, jnp.mean(each)

    matrix = batch * ntk(_output, params, x, clipped(params)[2], rule.partition)
    return matrix, jax.lax.scan(step, params, length=steps)[1]


class Step(NamedTuple):
    """A run of figure 1: all ends are at one time, step size times steps."""

    bound: float
    noise: float
    rate: float
    steps: int


def measured(row: Kernel, seed: int) -> dict[str, int]:
    """In how many networks each property of the table was found."""
    trials, steps = (10, 200) if runs.SMOKE.value else (TRIALS, STEPS)
    keys = jax.random.split(jax.random.key(seed), trials)
    matrices, ways = _descend(row.layerwise, steps, row.bound, row.batch, keys)
    counts = np.zeros(len(COLUMNS), int)
    for matrix, way in zip(np.asarray(matrices), np.asarray(ways, np.float64), strict=True):
        kinds = diagnostics.definiteness(matrix)
        rises = np.diff(way) > 1e-5 * way[:-1] + 1e-7 * way[0]
        settled = np.ptp(way[-steps // 10 :]) < 0.01 * way[0]
        counts += [*kinds[3:], settled, not rises.any(), way[-1] < 0.01 * way[0]]
    return {"networks": trials, **dict(zip(COLUMNS, counts.tolist(), strict=True))}


def mechanism_of(row: Step) -> dpjax.Mechanism:
    """Full batches of the digits."""
    return dpjax.Mechanism(
        sampling=sampling.full(EXAMPLES),
        clipping=clipping.flat(row.bound),
        noise_multiplier=row.noise,
        steps=row.steps,
    )


def train(row: Step, seed: int, folder: Any) -> Any:
    dataset = data.load("digits")
    model = models.MLP(features=(32,), activation=nn.relu)
    optimizer = optax.sgd(row.rate)
    return runs.trained(dataset, model, mechanism_of(row), optimizer, seed, folder, evaluations=2)


TABLE_1_ROWS = {f"kernel {name}": row for name, row in TABLE_1.items()}
FIGURE_1 = {
    f"digits R={bound} {noise} at {rate} over {round(TIME / rate)}": Step(
        bound, noise, rate, round(TIME / rate)
    )
    for rate in RATES
    for bound, noise in ((1.0, 0.0), *((1.0, noise) for noise in NOISES), (math.inf, 0.0))
}
_END = f"at {RATES[-1]} over {round(TIME / RATES[-1])}"
CLAIMS = [
    Claim(f"digits: noise {noise:g} level with none in the limit of small steps",
          [f"digits R=1.0 {noise} {_END}"], "level", [f"digits R=1.0 0.0 {_END}"], figures=("1",))
    for noise in NOISES
] + [
    Claim(f"table 1, {way}: large R keeps what small R loses, in more of 50 networks",
          [f"kernel large R, {way}"], "above", [f"kernel small R, {way}"],
          lambda run, of=TABLE_1[f"small R, {way}"].guaranteed:
          [run[name] for name, kept in zip(COLUMNS, of, strict=True) if kept == "n"])
    for way in ("flat", "layerwise")
]  # fmt: skip

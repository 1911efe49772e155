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
from experiments.common.claims import Claim, Curve

# The networks of table 1.
INPUTS = 4
WIDTH = 2
RATE = 0.005
STEPS = 20_000
TRIALS = 50
# The runs of figure 1.
TIME = 100.0
RATES = (1.0, 0.25, 0.0625)
NOISES = (2.0, 10.0)
MODEL = models.MLP(features=(4, 4), classes=1)
EXAMPLES = 1_437  # of the digits


class Kernel(NamedTuple):
    """A row of table 1: a clipping, and which properties theorems 1 and 2 guarantee."""

    layerwise: bool
    bound: float
    batch: float  # what the mean gradient is multiplied by
    guaranteed: str


NONE = 1e9  # bounds
LARGE = 1e4
SMALL = 0.5
TABLE_1 = {
    "no clipping": Kernel(
        layerwise=False,
        bound=NONE,
        batch=1.0,
        guaranteed="yyyyyy",
    ),
    "batch clipping": Kernel(
        layerwise=False,
        bound=NONE,
        batch=0.5,
        guaranteed="yyyyyy",
    ),
    "large R, flat": Kernel(
        layerwise=False,
        bound=LARGE,
        batch=1.0,
        guaranteed="yyyyyy",
    ),
    "large R, layerwise": Kernel(
        layerwise=True,
        bound=LARGE,
        batch=1.0,
        guaranteed="yyyyyy",
    ),
    "small R, flat": Kernel(
        layerwise=False,
        bound=SMALL,
        batch=1.0,
        guaranteed="nnynny",
    ),
    "small R, layerwise": Kernel(
        layerwise=True,
        bound=SMALL,
        batch=1.0,
        guaranteed="nnnnnn",
    ),
}
COLUMNS = ("symmetric", "positive form", "positive eigenvalues", "converges", "monotone", "to 0")


def _output(params: Any, x: Any) -> Any:
    """The one output of the network."""
    return MODEL.apply({"params": params}, x)[0]


@partial(jax.jit, static_argnames=("layerwise", "steps"))
@partial(jax.vmap, in_axes=(None, None, None, None, 0))
def _descend(layerwise: bool, steps: int, bound: Any, batch: Any, key: Any) -> tuple[Any, Any]:
    """The matrix of a random network, and its mean losses on the way down."""
    x_key, y_key, params_key = jax.random.split(key, 3)
    x = jax.random.normal(x_key, (INPUTS, WIDTH))
    y = 2 * jax.random.normal(y_key, (INPUTS,))
    params = MODEL.init(params_key, x[0])["params"]
    groups = clipping.by_layer(params) if layerwise else 1
    rule = clipping.grouped(bound=1.0, groups=groups)

    def square(params: Any, x: Any, y: Any) -> Any:
        return (_output(params, x) - y) ** 2

    def clipped(params: Any) -> Any:
        losses, gradients = jax.vmap(jax.value_and_grad(square), (None, 0, 0))(params, x, y)
        # Gradients are divided by the bound and clipped to 1: one program serves all bounds.
        scaled = jax.tree.map(lambda g: g / bound, gradients)
        total, _, factors = clipping.clip(rule, scaled)
        return losses, jax.tree.map(lambda g: g * bound, total), factors

    def step(params: Any, _: Any) -> tuple[Any, Any]:
        losses, total, _ = clipped(params)
        moved = jax.tree.map(lambda w, g: w - RATE * batch * g / INPUTS, params, total)
        return moved, jnp.mean(losses)

    _, _, factors = clipped(params)
    matrix = batch * ntk(_output, params, x, factors, rule.partition)
    _, mean_losses = jax.lax.scan(step, params, length=steps)
    return matrix, mean_losses


class Step(NamedTuple):
    """A run of figure 1: all ends are at one time, step size times steps."""

    bound: float
    noise: float
    rate: float
    steps: int


def measured(row: Kernel, seed: int) -> dict[str, int]:
    """The number of networks with each property of the table."""
    trials = 10 if runs.SMOKE.value else TRIALS
    steps = 200 if runs.SMOKE.value else STEPS
    keys = jax.random.split(jax.random.key(seed), trials)
    matrices, ways = _descend(row.layerwise, steps, row.bound, row.batch, keys)
    counts = np.zeros(len(COLUMNS), int)
    for matrix, way in zip(np.asarray(matrices), np.asarray(ways, np.float64), strict=True):
        kinds = diagnostics.definiteness(matrix)
        rises = np.diff(way) > 1e-5 * way[:-1] + 1e-7 * way[0]
        converges = np.ptp(way[-steps // 10 :]) < 0.01 * way[0]
        to_0 = way[-1] < 0.01 * way[0]
        counts += [  # in the order of `COLUMNS`
            kinds.symmetric,
            kinds.positive_quadratic,
            kinds.positive_eigenvalues,
            converges,
            not rises.any(),
            to_0,
        ]
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
    """One run of figure 1."""
    dataset = data.load("digits")
    model = models.MLP(features=(32,), activation=nn.relu)
    optimizer = optax.sgd(row.rate)
    return runs.trained(
        dataset=dataset,
        model=model,
        mechanism=mechanism_of(row),
        optimizer=optimizer,
        seed=seed,
        directory=folder,
        evaluations=2,
    )


TABLE_1_ROWS = {f"kernel {name}": row for name, row in TABLE_1.items()}


def _key_of(bound: float, noise: float, rate: float) -> str:
    """The key of a row of figure 1."""
    return f"digits R={bound} {noise} at {rate} over {round(TIME / rate)}"


FIGURE_1 = {
    _key_of(bound, noise, rate): Step(
        bound=bound,
        noise=noise,
        rate=rate,
        steps=round(TIME / rate),
    )
    for rate in RATES
    for bound, noise in ((1.0, 0.0), (1.0, 2.0), (1.0, 10.0), (math.inf, 0.0))
}


def _lost(guaranteed: str) -> Curve:
    """Reads from a run the counts of the properties that are not guaranteed."""
    names = [name for name, kept in zip(COLUMNS, guaranteed, strict=True) if kept == "n"]
    return lambda run: [run[name] for name in names]


CLAIMS = [
    Claim(
        f"digits: noise {noise:g} level with none in the limit of small steps",
        [_key_of(1.0, noise, RATES[-1])],
        "level",
        than=[_key_of(1.0, 0.0, RATES[-1])],
        figures=("1",),
    )
    for noise in NOISES
]
CLAIMS += [
    Claim(
        f"table 1, {way}: large R keeps what small R loses, in more of 50 networks",
        [f"kernel large R, {way}"],
        "above",
        than=[f"kernel small R, {way}"],
        measure=_lost(TABLE_1[f"small R, {way}"].guaranteed),
    )
    for way in ("flat", "layerwise")
]

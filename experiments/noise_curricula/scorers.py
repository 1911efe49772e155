# SPDX-License-Identifier: Apache-2.0
"""Difficulty scores for the curricula of noise_curricula_2021, and samplers made from them.

The score of an example is its cross-entropy under a logistic regression, fitted

  difficulty  on the private data without noise, as in the paper: examples are put in order, one
              example can move all others, and no bound limits what the order reveals
  public      on the digits of scikit-learn, to whose size images are shrunk
  private     on the private data by DP-SGD, which `dpjax.Mechanism(before=...)` accounts

The last two cut scores at public thresholds.  The bin of an example depends only on that
example, and examples are drawn at the rates of their bins, one bin more every four epochs.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpjax
from dpjax import clipping, data, losses, models, sampling

THRESHOLDS = (0.1, 0.3, 1.0, 2.0)
GROWING = 0.01 * np.tri(5)
"""A rate of 0.01 for each open bin: batches grow, at the epsilon of no curriculum."""
FULL = GROWING * 5 / np.arange(1, 6)[:, None]
"""About 600 examples from the first step on: the first bin's high rates cost epsilon."""


def difficulty(dataset: data.Dataset) -> np.ndarray:
    """Indices from easy to hard, by a logistic regression on the examples, without noise."""
    x, y = jax.tree.map(jnp.asarray, dataset.train)
    params = _fitted(x, y, dataset.classes)
    scores = _cross_entropies(params, x, y, dataset.classes)
    return np.argsort(np.asarray(scores))


def public(dataset: data.Dataset) -> np.ndarray:
    """The bin of each example, by a logistic regression on other digits."""
    known = data.load("digits")
    known_x, known_y = jax.tree.map(jnp.asarray, known.train)
    params = _fitted(known_x, known_y, known.classes)
    x, y = jax.tree.map(jnp.asarray, dataset.train)
    scores = _cross_entropies(params, _shrunk(x), y, known.classes)
    return np.digitize(scores, THRESHOLDS)


def private(dataset: data.Dataset, seed: int) -> tuple[np.ndarray, dpjax.mechanism.Spent]:
    """The bin of each example by a private logistic regression, and what that spent."""
    size = dataset.examples
    mechanism = dpjax.Mechanism(
        sampling=sampling.poisson(size, 0.01 * size),
        clipping=clipping.flat(1.0),
        noise_multiplier=2.0,
        steps=500,
    )
    model = models.by_name("linear", dataset.classes)
    x, y = jax.tree.map(jnp.asarray, dataset.train)
    algorithm = dpjax.dpsgd(
        losses.of(model, losses.cross_entropy),
        optax.sgd(1.0),
        mechanism,
        (x, y),
    )
    params = model.init(jax.random.key(0), x[0])["params"]
    key = jax.random.fold_in(jax.random.key(seed), 1)
    state = algorithm.init(params, key=key)
    state, _ = dpjax.fit(algorithm, state, progress=False)
    scores = _cross_entropies(state.params, x, y, dataset.classes)
    bins = np.digitize(scores, THRESHOLDS)
    return bins, mechanism.spent(mechanism.multipliers)


def drawn(bins: np.ndarray, rates: np.ndarray, steps: int) -> dpjax.types.Sampler:
    """Poisson batches at the rates of the bins; ``steps`` steps pass through all rows."""
    return sampling.scored(
        bins,
        rates,
        steps_per_row=steps // len(rates),
        batch_size=0.01 * bins.size,
    )


def easy(model: Any, steps: int) -> Any:
    """The weight of an example by its own loss at the step: hard examples count later."""
    loss = losses.of(model, losses.cross_entropy)

    def weight(step: Any, params: Any, example: Any) -> Any:
        threshold = 1 + 9 * step / steps
        return jax.nn.sigmoid(threshold - loss(params, example))

    return weight


def _fitted(x: Any, y: Any, classes: int | None) -> Any:
    """A logistic regression, without privacy."""
    model = models.by_name("linear", classes)
    key = jax.random.key(0)
    params = model.init(key, x[0])["params"]
    optimizer = optax.adam(0.05)

    def mean_loss(params: Any) -> Any:
        return jnp.mean(_cross_entropies(params, x, y, classes))

    @jax.jit
    def step(params: Any, state: Any) -> tuple[Any, Any]:
        gradient = jax.grad(mean_loss)(params)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for _ in range(100):
        params, state = step(params, state)
    return params


def _cross_entropies(params: Any, x: Any, y: Any, classes: int | None) -> Any:
    """The cross-entropy of each example under a logistic regression."""
    model = models.by_name("linear", classes)
    logits = model.apply({"params": params}, x)
    return jax.vmap(losses.cross_entropy)(logits, y)


def _shrunk(images: Any) -> Any:
    """Images cut to their middle and resized to 8 x 8, since the public digits fill their frame."""
    count, height, width, _ = images.shape
    edge = max(0, (height - 20) // 2)
    inner = images[:, edge : height - edge, edge : width - edge]
    return jax.image.resize(inner, (count, 8, 8, 1), "linear")

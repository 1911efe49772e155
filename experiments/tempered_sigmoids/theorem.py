# SPDX-License-Identifier: Apache-2.0
r"""Theorem 1: the bias of clipping for the tempered logistic loss.

$$ \ell_T(\theta; z, y) = \ln(1 + e^{-T y \langle z, \theta \rangle}), \qquad \|z\| \le 1 $$

The gradient of an example is at most $T$ long. Below that, clipping to $C$ moves the optimum, and
the theorem limits the excess risk by $2 (T - C)$ times the diameter of the set of models. Both
sides are measured on random problems, without noise.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dpjax import clipping
from experiments.common.claims import Claim

EXAMPLES = 200
FEATURES = 5
RADIUS = 5.0  # of the ball of models
STEPS = 2_000
TEMPERATURES = (2.0, 4.0, 8.0)
BOUNDS = (0.25, 0.5, 1.0)


class Side(NamedTuple):
    """A side of the inequality, at every temperature and bound."""

    measured: bool


ROWS = {
    "theorem 1: excess risk of clipped descent": Side(measured=True),
    "theorem 1: its limit": Side(measured=False),
}
_EXCESS, _LIMIT = ROWS
CLAIM = Claim(
    "theorem 1: excess risk of clipped descent below its limit",
    [_EXCESS],
    "below",
    than=[_LIMIT],
    measure=lambda run: run["risks"],
)


def measured(row: Side, seed: int) -> dict[str, Any]:
    """The risks of a row, on one random problem a seed."""
    for_inputs, for_model, for_labels = jax.random.split(jax.random.key(seed), 3)
    z = jax.random.normal(for_inputs, (EXAMPLES, FEATURES))
    z = z / jnp.linalg.norm(z, axis=1, keepdims=True)
    logits = 3 * z @ jax.random.normal(for_model, (FEATURES,))
    is_positive = jax.random.bernoulli(for_labels, jax.nn.sigmoid(logits))
    y = jnp.where(is_positive, 1.0, -1.0)

    risks = []
    for temperature, bound in itertools.product(TEMPERATURES, BOUNDS):
        risk = 2 * (temperature - bound) * 2 * RADIUS
        if row.measured:
            risk = float(excess(z, y, temperature, bound))
        risks.append(risk)
    return {"problems": 1, "risks": risks}


def excess(
    z: Float[Array, "batch features"], y: Float[Array, " batch"], temperature: float, bound: float
) -> Float[Array, ""]:
    """The risk where clipped descent ends, less the risk where plain descent ends."""
    rule = clipping.flat(bound)

    def loss(theta: Array, example: tuple[Array, Array]) -> Array:
        z, y = example
        return jax.nn.softplus(-temperature * y * jnp.vdot(z, theta))

    def risk(theta: Array) -> Array:
        return jnp.mean(jax.vmap(loss, (None, 0))(theta, (z, y)))

    def clipped(theta: Array) -> Array:
        gradients = jax.vmap(jax.grad(loss), (None, 0))(theta, (z, y))
        total, _, _ = clipping.clip(rule, gradients)
        return total / len(z)

    # The largest curvature of the loss is T^2 / 4.
    rate = 4 / temperature**2
    return risk(descent(clipped, rate)) - risk(descent(jax.grad(risk), rate))


def descent(gradient: Callable[[Array], Array], rate: float) -> Float[Array, " features"]:
    """Where accelerated descent from 0 ends, projected to the ball of models."""

    def body(step: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        theta, before = state
        ahead = theta + step / (step + 3) * (theta - before)
        after = ahead - rate * gradient(ahead)
        after *= RADIUS / jnp.maximum(jnp.linalg.norm(after), RADIUS)
        return after, theta

    start = jnp.zeros(FEATURES)
    end, _ = jax.lax.fori_loop(0, STEPS, body, (start, start))
    return end

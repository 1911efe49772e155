# SPDX-License-Identifier: Apache-2.0
r"""The bias of clipping for the tempered logistic loss, beside its limit.

The inverse temperature $T$ of the paper scales the gradients of a logistic
regression. While $T \|z\|$ is at most the bound $C$, clipping does nothing; beyond it, clipped
gradient descent minimises another function, and theorem 1 limits the excess of the risk. Both
sides are measured here, without noise.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dpjax import clipping


class TemperedBias(NamedTuple):
    """A measured bias and the two limits of the paper.

    Privacy:
      No field has noise: all of them are as private as the examples.
    """

    largest: Float[Array, ""]
    """The largest norm of an example's gradient on the way of clipped descent."""
    largest_limit: Float[Array, ""]
    r"""Equation 4: $T \max_i \|z_i\|$."""
    excess: Float[Array, ""]
    """The risk where clipped descent ends, less the risk where plain descent ends."""
    excess_limit: Float[Array, ""]
    r"""Theorem 1 with the constant of its proof: $2 \max(T \max_i \|z_i\| - C, 0)$ diameters."""


def tempered_bias(
    inputs: Float[Array, "batch features"],
    labels: Float[Array, " batch"],
    temperature: float,
    bound: float,
    *,
    radius: float = 1.0,
    steps: int = 2_000,
) -> TemperedBias:
    r"""Measures how far clipping moves the optimum of a logistic regression.

    $$ \ell_T(\theta; z, y) = \ln(1 + e^{-T y \langle z, \theta \rangle}), \qquad
       \|\nabla \ell_T\| \le T \|z\| $$

    Full-batch accelerated gradient descent runs from 0, projected to a ball, once with clipped and
    once with plain gradients. The step is $4 / (T \max_i \|z_i\|)^2$, the inverse of the largest
    curvature, so that both runs converge.

    ``labels`` are 1 or -1, and ``radius`` is that of the ball; its diameter enters theorem 1.

    Example:
      >>> z, y = jnp.array([[1.0], [1.0], [1.0]]), jnp.array([1.0, 1.0, -1.0])
      >>> bias = tempered_bias(z, y, temperature=4.0, bound=1.0)
      >>> bool(0 < bias.excess < bias.excess_limit), float(bias.excess_limit)
      (True, 12.0)
    """
    z, y = jnp.asarray(inputs, jnp.float32), jnp.asarray(labels, jnp.float32)
    rule = clipping.flat(bound)

    def loss(theta: Array, example: tuple[Array, Array]) -> Array:
        z, y = example
        return jax.nn.softplus(-temperature * y * jnp.vdot(z, theta))

    def risk(theta: Array) -> Array:
        return jnp.mean(jax.vmap(loss, (None, 0))(theta, (z, y)))

    longest = temperature * jnp.max(jnp.linalg.norm(z, axis=1))
    # If all inputs are 0, all gradients are, and any rate does.
    rate = 4 / jnp.where(longest > 0, longest, 1) ** 2

    def descent(gradient: Any) -> tuple[Array, Array]:
        """Where descent with these gradients ends, and the largest norm on its way."""

        def body(step: int, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            theta, before, largest = state
            # Nesterov's momentum, because plain descent needs too many steps for a large T.
            ahead = theta + step / (step + 3) * (theta - before)
            mean, norm = gradient(ahead)
            there = ahead - rate * mean
            there *= radius / jnp.maximum(jnp.linalg.norm(there), radius)
            return there, theta, jnp.maximum(largest, norm)

        start = jnp.zeros(z.shape[1])
        there, _, largest = jax.lax.fori_loop(0, steps, body, (start, start, jnp.zeros(())))
        return there, largest

    def clipped(theta: Array) -> tuple[Array, Array]:
        total, norms, _ = clipping.clip(rule, jax.vmap(jax.grad(loss), (None, 0))(theta, (z, y)))
        return total / len(z), jnp.max(norms)

    there, largest = descent(clipped)
    best, _ = descent(lambda theta: (jax.grad(risk)(theta), 0.0))
    limit = 2 * jnp.maximum(longest - bound, 0) * 2 * radius
    return TemperedBias(largest, longest, risk(there) - risk(best), limit)

# SPDX-License-Identifier: Apache-2.0
"""A running average of the parameters, as the last link of an Optax chain.

Noise moves parameters around the optimum, and their average over the last steps lies closer to it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from dpjax import trees
from dpjax.types import PyTree


class AverageState(NamedTuple):
    """The weighted sum of past parameters and the sum of the weights."""

    total: PyTree
    weight: Float[Array, ""]


def average_parameters(decay: float = 0.99) -> optax.GradientTransformation:
    r"""Keeps an exponential average of the parameters; updates pass through unchanged.

    $$ \bar\theta_t = \Bigl(\sum_{s \le t} d^{\,t-s}\,\theta_s\Bigr)
       \Big/ \sum_{s \le t} d^{\,t-s} $$

    The division removes the bias towards the first parameters. Put this link at the end of a chain;
    `averaged` reads the average, which looks back over about $1 / (1 - d)$ steps for a decay $d$.

    Privacy:
      Post-processing of private parameters: free.

    Example:
      >>> optimizer = optax.chain(optax.sgd(0.1), average_parameters(0.9))
      >>> params = jnp.array(1.0)
      >>> updates, state = optimizer.update(params, optimizer.init(params), params)
      >>> print(averaged(state))
      0.9
    """

    def init(params: PyTree) -> AverageState:
        # The dtype is at least float32: in bfloat16 the total stops growing after some steps.
        return AverageState(trees.zeros_wide(params), jnp.zeros(()))

    def update(updates: PyTree, state: Any, params: Any = None) -> tuple[PyTree, AverageState]:
        # This link is the last one, so these are the parameters that the step releases.
        after = optax.apply_updates(params, updates)
        # The total is divided by the weight when it is read, so early averages are not biased
        # towards zero.
        total = jax.tree.map(lambda s, p: decay * s + p, state.total, trees.widened(after))
        return updates, AverageState(total, decay * state.weight + 1)

    return optax.GradientTransformation(init, update)


def link_of(state: Any, kind: type[Any], call: str, link: str) -> Any:
    """The state of a link inside another state."""
    # The search is by type, because the optimizer around the link may have any structure.
    links = trees.nodes(state, kind)
    if not links:
        raise ValueError(f"training.{call}: expected a state with training.{link} as a link.")
    return links[0]


def averaged(optimizer_state: Any) -> PyTree:
    """The averaged parameters inside an optimizer's (or a whole run's) state.

    Example:
      >>> optimizer = optax.chain(optax.sgd(1.0), average_parameters(decay=0.5))
      >>> params = jnp.array(3.0)
      >>> state = optimizer.init(params)
      >>> for _ in range(2):
      ...     updates, state = optimizer.update(jnp.array(1.0), state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> print(round(float(averaged(state)), 3))  # (0.5 x 2 + 1) / (0.5 + 1)
      1.333
    """
    average = link_of(optimizer_state, AverageState, "averaged", "average_parameters()")
    return jax.tree.map(lambda total: total / average.weight.astype(total.dtype), average.total)

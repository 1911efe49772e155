# SPDX-License-Identifier: Apache-2.0
"""A step size from the known noise: how far noise may move a parameter decides the rate."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from dpjax import checks, trees
from dpjax.mechanism import Mechanism
from dpjax.types import PyTree

DRIFT = 0.6
"""The default of ``drift``, the deviation by which noise moves a parameter in a whole run.

It was chosen on development tasks, before any held-out task of `experiments.nothing_to_tune` ran.
"""


class PacedState(NamedTuple):
    """The number of steps so far, and the moments of private means without bias correction."""

    step: Int[Array, ""]
    first: PyTree  # like the parameters
    second: PyTree  # a scalar for each leaf, the mean over its entries


def paced(
    mechanism: Mechanism, drift: float = DRIFT, b1: float = 0.9, b2: float = 0.99
) -> optax.GradientTransformationExtraArgs:
    r"""Adam with a second moment for each leaf, and a rate that follows from the known noise.

    Noise of standard deviation $\sigma$ is in every private mean. $\hat m_t$ is Adam's first moment
    and $\hat v_t$ the mean of its second moments over a leaf, both without bias. The divisor is at
    least the deviation of the noise, so the noise of a step is at most the rate. Rates that fall
    from $\rho \sqrt{3 / T}$ to 0 over $T$ steps then move a parameter by noise of a standard
    deviation of at most about $\rho$ in the whole run, as $\sum_t (1 - t / T)^2 \approx T / 3$:

    $$ \theta_{t+1} = \theta_t - \rho \sqrt{3 / T}\, (1 - t / T)\, \hat m_t
       \big/ \sqrt{\max(\hat v_t, \sigma^2)} $$

    Where noise hides the gradient, how far a run moves along it is in proportion to epsilon and to
    the number of examples. A loss that is multiplied by a number takes the same path, if the rule
    of the mechanism normalises gradients.

    Args:
      mechanism: The mechanism of the run, which knows the noise of each step.
      drift: $\rho$. The default suits parameters of networks with the usual initial scale and
        inputs of the order of 1.
      b1: Decay of the first moment.
      b2: Decay of the second.

    Returns:
      An Optax optimizer for the private means of this mechanism. ``update`` takes ``bound_scale=``
      where bounds change, as `dpjax.dpsgd` passes it.

    Privacy:
      Post-processing: moments of private means, and constants of the mechanism.

    Example:
      >>> import dpjax
      >>> planned = dpjax.plan(60_000, jnp.zeros(10), epsilon=3.0, delta=1e-5)
      >>> optimizer = paced(planned.mechanism)
      >>> updates, _ = optimizer.update(jnp.ones(10), optimizer.init(jnp.zeros(10)))
      >>> print(round(float(updates[0]), 3))  # 0.6 x (3 / 200) ^ 0.5
      -0.073

    References:
      Kingma and Ba, "Adam", 2015. Panda et al., "A New Linear Scaling Rule for Private Adaptive
      Hyperparameter Optimization", 2024: rate times steps in proportion to epsilon.
    """
    checks.instance("planning.paced", "mechanism", mechanism, Mechanism)
    drift = checks.positive("planning.paced", "drift", drift)
    steps = max(1, mechanism.steps)  # a mechanism of 0 steps must not divide by 0
    first_rate = drift * math.sqrt(3 / steps)

    def init(params: PyTree) -> PacedState:
        zeros = trees.zeros_wide(params)  # in the dtype of private means
        zero_of_leaf = jax.tree.map(jnp.mean, zeros)  # a scalar 0 of the same dtype
        return PacedState(jnp.zeros((), jnp.int32), first=zeros, second=zero_of_leaf)

    def update(
        updates: PyTree,
        state: Any,
        params: PyTree | None = None,
        *,
        bound_scale: Any = 1.0,
        **extra: Any,
    ) -> tuple[PyTree, PacedState]:
        del params, extra
        # Groups may have noise of their own; the largest variance is a safe floor for all.
        deviations = jnp.stack(mechanism.deviations_on_mean(state.step)) * bound_scale
        variance = jnp.square(jnp.max(deviations))
        first = optax.tree_utils.tree_update_moment(updates, state.first, b1, 1)
        # The second moment is one number for each leaf, the mean of its squares. It is updated by
        # order 1, because the entries are squared here.
        squares = jax.tree.map(lambda g: jnp.mean(jnp.square(g)), updates)
        second = optax.tree_utils.tree_update_moment(squares, state.second, b2, 1)
        step = state.step + 1
        rate = first_rate * (1 - state.step / steps)

        def update_of_leaf(m: Float[Array, "..."], v: Float[Array, ""]) -> Float[Array, "..."]:
            m_hat = m / (1 - b1**step)
            v_hat = v / (1 - b2**step)
            floored = jnp.maximum(v_hat, variance.astype(v.dtype))
            # A leaf whose gradients were all 0, without noise, has 0 / 0 here; it does not move.
            direction = m_hat / jnp.sqrt(jnp.where(floored > 0, floored, 1))
            return (-rate * direction).astype(m.dtype)

        updates = jax.tree.map(update_of_leaf, first, second)
        return updates, PacedState(step, first, second)

    return optax.GradientTransformationExtraArgs(init, update)

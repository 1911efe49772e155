# SPDX-License-Identifier: Apache-2.0
"""A step size from the known noise: how far noise may move a loss decides the rate."""

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

DRIFT = 4.0
"""The default of ``drift``, the deviation by which noise moves a loss in a whole run.

It was chosen for cross entropies, on the development tasks of `experiments.nothing_to_tune`.
"""
WARMUP = 0.1
"""The share of the steps over which the rate rises, while the bound finds the norms."""
_USUAL_NORM = 5.0  # of a gradient, where no bound follows the norms


class PacedState(NamedTuple):
    """The number of steps so far, and the moments of private means without bias correction."""

    step: Int[Array, ""]
    first: PyTree  # like the parameters
    second: PyTree  # a scalar for each leaf, the mean over its entries


def paced(
    mechanism: Mechanism, drift: float = DRIFT, b1: float = 0.9, b2: float = 0.99
) -> optax.GradientTransformationExtraArgs:
    r"""Adam with a second moment for each leaf, and a rate that follows from noise and bound.

    Noise of standard deviation $\sigma_t$ is in every private mean, and $C_t$ is the bound, which
    `dpjax.clipping.Quantile` holds at a quantile of the gradient norms. $\hat m_t$ is Adam's first
    moment and $\hat v_t$ the mean of its second moments over a leaf, both without bias:

    $$ \theta_{t+1} = \theta_t - \frac{\rho}{C_t \sqrt T}\, \hat m_t
       \big/ \sqrt{\max(\hat v_t, \sigma_t^2)} $$

    The divisor is at least the deviation of the noise, so noise moves a parameter in a step by at
    most about the rate, and the loss of an example, to first order, by the rate times the norm of
    its gradient. Over $T$ steps it moves the loss of an example at the bound by a standard
    deviation of at most about $\rho$. Large inputs and deep networks therefore get small steps.
    The formula omits that the rate rises from 0 over the first tenth of the steps. It rises by the
    square, because a rate over a bound that is still far below the norms is too large.

    Where noise hides the gradient, how far a run moves along it is in proportion to epsilon and to
    the number of examples.

    Args:
      mechanism: The mechanism of the run, which knows the noise of each step. Without adapted
        bounds the gradient norms are taken for 5.
      drift: $\rho$. The default suits a cross entropy, and 1 the squared error of a target in
        [-1, 1]. A loss that is 10 times as large needs a drift that is 10 times as large.
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
      >>> print(f"{updates[0]:.1e}")  # (1 / 80)^2 of 4 / 800^0.5
      -2.2e-05

    References:
      Kingma and Ba, "Adam", 2015. Panda et al., "A New Linear Scaling Rule for Private Adaptive
      Hyperparameter Optimization", 2024: rate times steps in proportion to epsilon.
    """
    checks.instance("planning.paced", "mechanism", mechanism, Mechanism)
    drift = checks.positive("planning.paced", "drift", drift)
    steps = max(1, mechanism.steps)  # a mechanism of 0 steps must not divide by 0
    follows = mechanism.adaptive is not None
    norm = _USUAL_NORM
    if follows:
        norm = mechanism.clipping.sensitivity  # at first; `bound_scale` has its changes
    first_rate = drift / (norm * math.sqrt(steps))

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
        risen = jnp.minimum(1.0, step / (WARMUP * steps))
        rate = first_rate * jnp.square(risen)
        if follows:
            rate = rate / bound_scale

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

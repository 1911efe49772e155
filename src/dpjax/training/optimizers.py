# SPDX-License-Identifier: Apache-2.0
"""Three additions to Optax for private training: `dp_adam`, `lookahead` and `scaled_rate`.

Any Optax optimizer takes private means, and costs nothing, because they may be released.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from dpjax import checks, trees
from dpjax.mechanism import Mechanism
from dpjax.training.recipe import extra_arguments
from dpjax.types import PyTree, Schedule


def scaled_rate(base: float, batch_size: float) -> float:
    r"""The learning rate for a batch, $\lfloor B / 512 \rfloor$ times a base rate.

    Under noise the rate grows in proportion to the batch. The literature on wavelet features
    gives rates for 512 examples. ``batch_size`` is the expected size $B$, at least 512.

    Example:
      >>> scaled_rate(0.25, 2048)
      1.0

    References:
      Tramèr and Boneh, "Differentially Private Learning Needs Better Features (or Much More
      Data)", 2021, appendix D.
    """
    # The paper counts whole batches of 512.
    batches = checks.positive("training.scaled_rate", "batch_size // 512", batch_size // 512)
    return batches * base


class DPAdamState(NamedTuple):
    """Running means before the correction of their bias; symbols as in `dp_adam`."""

    step: Int[Array, ""]
    first: PyTree
    """$m_t$: the mean of the private means."""
    second: PyTree
    """$v_t$: the mean of their squares."""
    noise: Float[Array, " groups"]
    """$s_t$: the mean variance of the noise on them, per group."""


def dp_adam(
    learning_rate: float | Schedule,
    mechanism: Mechanism,
    b1: float = 0.9,
    b2: float = 0.999,
    floor: float = 1e-8,
) -> optax.GradientTransformationExtraArgs:
    r"""Adam with the second moment of only the gradient, without the noise.

    Noise of standard deviation $\sigma_t$ adds $\sigma_t^2$ to every square. The running mean
    $\hat s_t$ of these variances, with Adam's weights, is public and is subtracted:

    $$ \theta_{t+1} = \theta_t - \eta_t\, \hat m_t
       \big/ \sqrt{\max(\hat v_t - \hat s_t,\ \mathrm{floor})} $$

    Args:
      learning_rate: $\eta_t$.
      mechanism: The mechanism of the run, which knows the noise of each step and group.
      b1: Decay of the first moment.
      b2: Decay of the second.
      floor: The smallest second moment. Where noise hides the gradient, the step is
        $\hat m_t / \sqrt{\mathrm{floor}}$, so it matters as much as the rate.

    Returns:
      An Optax optimizer for the private means of this mechanism, as they are: a link before it
      that averages, scales or clips them changes their noise, and so does `optax.MultiSteps` around
      it. `dpjax.dpsgd` refuses averages over steps. If bounds change with the step, or the mean
      is scaled by a public total of weights, ``update`` needs ``bound_scale=``; `dpjax.dpsgd` and
      `dpjax.federated` pass it. If groups have noise multipliers of their own, it needs all
      parameters: `optax.partition` and `optax.masked` hide the group of a leaf.

    Privacy:
      Post-processing: moments of private means, and constants of the mechanism.

    Example:
      >>> import dpjax
      >>> mechanism = dpjax.Mechanism(
      ...     sampling=dpjax.sampling.poisson(examples=100, batch_size=10),
      ...     clipping=dpjax.clipping.flat(bound=1.0),
      ...     noise_multiplier=2.0,
      ...     steps=5,
      ... )
      >>> optimizer = dp_adam(1e-3, mechanism)
      >>> _, state = optimizer.update(jnp.ones(3), optimizer.init(jnp.ones(3)), jnp.ones(3))
      >>> print(round(float(state[0].noise[0]), 7))  # (2.0 x 1.0 / 10) ^ 2 x (1 - b2)
      4e-05

    References:
      Tang, Shpilevskiy and Lécuyer, "DP-AdamBC: Your DP-Adam Is Actually DP-SGD (Unless You
      Apply Bias Correction)", 2023.
    """
    checks.instance("training.dp_adam", "mechanism", mechanism, Mechanism)
    floor = checks.positive("training.dp_adam", "floor", floor)
    # Correlated noise has smaller moments, by an amount that is not computed here.
    if mechanism.noise is not None:
        raise ValueError(
            f"training.dp_adam: expected independent noise, got {mechanism.noise.name}. Use "
            "optax.adam."
        )
    groups = mechanism.clipping.partition
    # Each group has its own variance if the multiplier is a tuple. A single multiplier scales the
    # sensitivity of all groups together, so all have the variance of group 0.
    per_group = isinstance(mechanism.noise_multiplier, tuple)

    def init(params: PyTree) -> DPAdamState:
        zeros = trees.zeros_wide(params)  # in the dtype of private means
        return DPAdamState(jnp.zeros((), jnp.int32), zeros, zeros, jnp.zeros(groups.size))

    def update(
        updates: PyTree,
        state: Any,
        params: PyTree | None = None,
        *,
        bound_scale: Any = 1.0,
        **extra: Any,
    ) -> tuple[PyTree, DPAdamState]:
        # The standard deviations of the noise on the mean, [groups]. The mechanism has those at the
        # rule's own bounds, and `bound_scale` is the factor of this step on them.
        deviations = jnp.stack(mechanism.deviations_on_mean(state.step)) * bound_scale
        variances = jnp.square(deviations)
        # In the symbols of `dp_adam`, first is m, second is v and noise is s.
        first = optax.tree_utils.tree_update_moment(updates, state.first, b1, 1)
        second = optax.tree_utils.tree_update_moment(updates, state.second, b2, 2)
        noise = b2 * state.noise + (1 - b2) * variances.astype(state.noise.dtype)
        step = state.step + 1

        leaves, structure = jax.tree.flatten(second)
        group_of = (0,) * len(leaves)  # enough if all groups have one variance
        if per_group:
            group_of = groups.assign(updates)
        # v and s have the same bias, so they are subtracted before its correction.
        without_noise = [
            v - noise[group].astype(v.dtype) for v, group in zip(leaves, group_of, strict=True)
        ]

        def direction(m: Array, v_minus_s: Array) -> Array:
            m_hat = m / (1 - b1**step)
            v_hat_minus_s_hat = v_minus_s / (1 - b2**step)
            return m_hat / jnp.sqrt(jnp.maximum(v_hat_minus_s_hat, floor))

        directions = jax.tree.map(direction, first, structure.unflatten(without_noise))
        return directions, DPAdamState(step, first, second, noise)

    adam = optax.GradientTransformationExtraArgs(init, update)
    return optax.chain(adam, optax.scale_by_learning_rate(learning_rate))


class LookaheadState(NamedTuple):
    """The slow parameters, which you test and release, and the state of `optax.lookahead`."""

    slow: PyTree
    inner: Any


def lookahead(
    fast_optimizer: optax.GradientTransformation,
    sync_period: int,
    slow_step_size: float,
    reset_state: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""`optax.lookahead` for parameters as the loss takes them.

    $$ s \leftarrow s + \alpha (\theta - s), \qquad \theta \leftarrow s \qquad
       \text{every } k \text{ steps} $$

    Optax holds $s$ in a pair of fast and slow parameters. `dpjax.dpsgd` adds noise to all
    parameters that it trains, so here the slow ones are in the state: ``state.optimizer.slow``.

    Args:
      fast_optimizer: Moves $\theta$ at every step.
      sync_period: $k$.
      slow_step_size: $\alpha$.
      reset_state: Whether the state of ``fast_optimizer`` starts again every $k$ steps.

    Returns:
      An Optax optimizer. Use it as the last link: its updates must be applied as they are. Its
      ``update`` passes ``bound_scale=`` to ``fast_optimizer``. This may be `dp_adam`, but
      without ``reset_state``, because `dp_adam` counts the steps of the run.

    Privacy:
      Post-processing: the slow parameters follow from private ones.

    Example:
      >>> optimizer = lookahead(optax.sgd(0.5), sync_period=1, slow_step_size=0.5)
      >>> updates, state = optimizer.update(jnp.ones(2), optimizer.init(jnp.ones(2)), jnp.ones(2))
      >>> print(updates, state.slow)
      [-0.25 -0.25] [0.75 0.75]

    References:
      Zhang, Lucas, Hinton and Ba, "Lookahead Optimizer: k steps forward, 1 step back", 2019.
    """

    def of_pairs(bound_scale: Any) -> optax.GradientTransformation:
        """Optax's lookahead, which takes and moves pairs of fast and slow parameters."""
        # `optax.lookahead` passes no extra arguments on, but `dp_adam` needs the scale.
        update = partial(fast_optimizer.update, **extra_arguments(fast_optimizer, bound_scale))
        fast = optax.GradientTransformation(fast_optimizer.init, update)
        return optax.lookahead(fast, sync_period, slow_step_size, reset_state)

    def init(params: PyTree) -> LookaheadState:
        # A copy, because a step may donate the buffers of parameters and state.
        slow = trees.copy(params)
        pair = optax.LookaheadParams(params, slow)
        return LookaheadState(slow, of_pairs(bound_scale=1.0).init(pair))

    def update(
        updates: PyTree, state: Any, params: Any = None, *, bound_scale: Any = 1.0, **extra: Any
    ) -> tuple[PyTree, LookaheadState]:
        pair = optax.LookaheadParams(params, state.slow)
        changes: Any
        changes, inner = of_pairs(bound_scale).update(updates, state.inner, pair)
        slow = optax.apply_updates(state.slow, changes.slow)
        return changes.fast, LookaheadState(slow, inner)

    return optax.GradientTransformationExtraArgs(init, update)

# SPDX-License-Identifier: Apache-2.0
"""The link after which a gradient may be released.

Its scale is a *multiplier* times the rule's sensitivity, so the number that is accounted is the
number that is drawn. The noise of step t comes from ``fold_in(fold_in(root, NOISE), t)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from dpjax import checks, trees
from dpjax.noise.multiplier import WIDER, checked_multiplier, standard_deviations
from dpjax.noise.normal import normal_in_parts, standard_normal
from dpjax.noise.state import GaussianState, LinkNoise, first_key, unless_unset
from dpjax.strategies import Strategy
from dpjax.types import Clipping, Key, NoiseMultiplier, Partition, Purpose, PyTree, Sum


def gaussian(
    noise_multiplier: NoiseMultiplier, rule: Clipping, key: Key | None = None
) -> optax.GradientTransformationExtraArgs:
    r"""The Optax link that adds Gaussian noise to a clipped sum.

    $$ s + \mathcal{N}\bigl(0,\ (m_t \, \Delta)^2 I\bigr) $$

    Args:
      noise_multiplier: $m_t$: a number, an Optax schedule of the step, or a tuple with one number
        per group. A tuple is relative to each group's own bound (standard deviation $m_g C_g$ in
        group $g$); its effective multiplier is $(\sum_g m_g^{-2})^{-1/2}$. 0 is not private.
      rule: The rule that clipped the sum; $\Delta$ is its sensitivity.
      key: For experiments that repeat: every ``init`` starts the noise of this key. By default
        each ``init`` draws a secret key of its own from the operating system.

    Returns:
      A link on sums (not means). It takes the `dpjax.types.Sum` of an equal rule, from
      `dpjax.clip_and_sum`, ``dpjax.clipped_grad(...)(...).sum`` or `dpjax.clipping.trusted_sum`.

      A traced ``init`` (in ``jit``, ``vmap`` or ``eval_shape``) without a key gives the *unset*
      key: ``update`` refuses it, or in ``jit`` returns NaN, until `dpjax.noise.renew` sets another.

      The noise is a function of key and step. ``update`` with a state that it received before adds
      the same noise to another sum, so return the next state from a jitted step, and carry it in a
      loop. Several processes share the key that the first one draws.

    Privacy:
      With add-or-remove neighbours, one step is the Gaussian mechanism with multiplier $m_t$.
      Release the output of this link, never its input. Save its state only where a secret may lie.

    Example:
      >>> import dpjax
      >>> rule = dpjax.clipping.flat(bound=1.0)
      >>> optimizer = optax.chain(dpjax.clip_and_sum(rule), gaussian(1.1, rule), optax.sgd(1e-3))
      >>> params, gradients = jnp.zeros(3), jnp.ones((8, 3))
      >>> updates, state = optimizer.update(gradients, optimizer.init(params), params)
    """
    return sum_link("noise.gaussian", noise_multiplier, rule, key)


def noise_link(
    name: str,
    rule: Clipping,
    key: Key | None,
    noise: LinkNoise,
    release: Callable[..., tuple[PyTree, GaussianState]],
    adapts: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """The link of any noise: its checks, key and count of steps, around a ``release``.

    Args:
      name: The call that error messages name.
      rule: The rule that clipped the sums.
      key: Where the noise of every ``init`` starts; None for a secret key.
      noise: Its deviations, multiplier and strategy, which `dpjax.testing` also reads.
      release: ``(sum, state, count) -> (noisy sum, next state)``, which draws the noise. The count
        is the ``below=`` of an update, for bounds that adapt.
      adapts: Whether bounds adapt, so the state has a scale.
    """
    if key is not None:
        checks.key(name, key)

    def init(params: PyTree) -> Any:
        step = jnp.zeros((), jnp.int32)
        scale = None
        if adapts:
            scale = jnp.ones((), jnp.float32)
        memory = first_memory(noise.strategy, params)
        # The step is traced under `jit`, the parameters under `vmap`: then the key is unset.
        return GaussianState(first_key(key, (step, params)), step, memory, scale)

    def update(
        updates: Any, state: Any, params: PyTree | None = None, *, below: Any = None, **extra: Any
    ) -> tuple[PyTree, Any]:
        require_sum(updates, rule, name)
        # Sum and count as given: `dpjax.testing` overrides this method to record or replace them.
        total, below = state.meeting(updates, below, noise)
        if key is None:
            # A traced `init` without a key gives the unset key, zeros, which is refused here. With
            # a key of the caller zeros are allowed: `jax.random.key(0)` is zeros too.
            total = unless_unset(total, state.key, name)
        released, after = release(total, state, below)
        return released, after._replace(step=state.step + 1)

    return optax.GradientTransformationExtraArgs(init, update)


def sum_link(
    name: str,
    noise_multiplier: NoiseMultiplier,
    rule: Clipping,
    key: Key | None,
    strategy: Strategy | None = None,
    scale: float = 1.0,
) -> optax.GradientTransformationExtraArgs:
    """The link of `gaussian`, and of `correlated` with deviations ``scale`` times as large."""
    hint = "The noise is scaled to the sensitivity of a rule: write dpjax.clipping.flat(bound)."
    checks.instance(name, "rule", rule, Clipping, hint)
    multiplier = checked_multiplier(name, noise_multiplier, rule)

    def deviations(step: Any) -> list[Any]:
        return [x * scale for x in standard_deviations(multiplier, rule, step)]

    def release(total: PyTree, state: GaussianState, below: None) -> tuple[PyTree, GaussianState]:
        noisy, memory = add_noise(
            total,
            rule.partition,
            deviations(state.step),
            state.key,
            state.step,
            strategy,
            state.memory,
        )
        return noisy, state._replace(memory=memory)

    return noise_link(name, rule, key, LinkNoise(deviations, multiplier, strategy), release)


def first_memory(strategy: Strategy | None, params: PyTree) -> PyTree:
    """The memory of correlated noise before the first step; empty for white noise."""
    if strategy is None:
        return ()
    return strategy.start(trees.zeros_wide(params))


def require_sum(updates: Any, rule: Clipping, name: str) -> None:
    """Raises unless a link received a clipped sum of this rule."""
    if not isinstance(updates, Sum):
        raise TypeError(
            f"{name}: expected a clipped sum, as of clip_and_sum or clipped.sum, not a "
            f"{type(updates).__name__}. Put other links behind the noise."
        )
    limits = rule.limits(updates.value)
    if updates.rule != limits:
        clipped = updates.rule.in_words(limits)
        noised = limits.in_words(updates.rule)
        raise ValueError(
            f"{name}: the sum is clipped to {clipped}, the noise is for {noised}; "
            "expected one rule for both."
        )


def add_noise(
    total: PyTree,
    partition: Partition,
    deviations: Sequence[Any],
    key: Key,
    step: Any,
    strategy: Strategy | None = None,
    memory: PyTree = (),
    *,
    lost: PyTree | None = None,
    in_parts: bool = False,
) -> tuple[PyTree, PyTree]:
    """The sum plus the Gaussian noise of one step, and the memory of the next step.

    Args:
      total: The clipped sum.
      partition: The partition of the rule that clipped, so each group has the noise of its bound.
      deviations: The standard deviation in each group.
      key: The root key of the run.
      step: The number of the step.
      strategy: How noise is correlated over steps; None for white noise.
      memory: The strategy's memory of earlier steps.
      lost: The rounding error of ``total``, which is added too; None if it is not known.
      in_parts: For leaves that a mesh splits: each device draws its part of the same numbers.
    """
    groups = partition.assign(total)  # the group of each leaf
    # `WIDER` covers the rounding errors of float32 in the sum; accounting does not count it.
    wider = [deviation * WIDER for deviation in deviations]
    scales = jax.tree.structure(total).unflatten([wider[group] for group in groups])
    noise_key = trees.step_key(key, Purpose.NOISE, step)
    operands = [scales]  # the arguments of `_added` after noise and leaf, as trees
    if lost is not None:
        operands.append(lost)
    parts = normal_in_parts if in_parts else None  # the sampler in place of `standard_normal`
    if strategy is None:
        # `_added` runs on each leaf before more noise is drawn, to hold less of it in memory.
        noisy = trees.random_like(
            standard_normal, noise_key, total, *operands, use=_added, parts=parts
        )
        return noisy, memory
    # The numbers of white noise are mixed with earlier steps' numbers, and then scaled.
    white = trees.random_like(standard_normal, noise_key, total, parts=parts)
    mixed, memory = strategy.next(white, memory, step)
    return jax.tree.map(_added, mixed, total, *operands), memory


def _added(noise: Array, leaf: Array, deviation: Any, lost: Array | None = None) -> Array:
    """A leaf of the sum plus noise of this deviation, plus the leaf's rounding error."""
    addend = deviation * noise
    if lost is not None:
        # The small terms are added first. Otherwise the long sum rounds away what it lost.
        addend = lost + addend
    return leaf.astype(noise.dtype) + addend

# SPDX-License-Identifier: Apache-2.0
"""The steps of a mechanism: from a clipped sum to a private mean, as Optax links and as a function.

`private` and `privatize` are the bodies of methods of `Mechanism`, whose docstrings say what each
promises. A step of `dpjax.training` and an audit call `private_mean`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from dpjax import checks, clipping, noise, trees
from dpjax._marks import require_clipped_sum
from dpjax.mechanism.adaptive import AdaptiveState, followed
from dpjax.noise.link import add_noise, checked_sums, first_state
from dpjax.noise.seals import seal_outside_jit
from dpjax.types import Key, PyTree

if TYPE_CHECKING:
    from dpjax.mechanism.description import Mechanism


def private(mechanism: Mechanism, key: Key) -> optax.GradientTransformation:
    """The link from per-example gradients to a private mean: `Mechanism.private`."""
    if mechanism.adaptive is not None:
        raise ValueError(
            "Mechanism.private: the bound is adapted to the norms of each batch, which the "
            "links of a chain do not exchange. Use dpjax.dpsgd, or leave adaptive= out."
        )
    checks.key("Mechanism.private", key)
    return optax.chain(clipping.clip_and_sum(mechanism.clipping), privatize(mechanism, key))


def privatize(mechanism: Mechanism, key: Key) -> optax.GradientTransformationExtraArgs:
    """The link from a clipped sum to a private mean: `Mechanism.privatize`."""
    name = "Mechanism.privatize"
    checked = checked_sums(
        name, mechanism.clipping, mechanism.gradient_multiplier, key, mechanism.noise
    )

    def init(params: PyTree) -> Any:
        state = first_state(name, key, params, mechanism.noise)
        if mechanism.adaptive is None:
            return state
        return AdaptiveState(state.key, state.step, jnp.ones((), jnp.float32))

    def update(
        updates: PyTree,
        state: Any,
        params: PyTree | None = None,
        *,
        below: Float[Array, ""] | None = None,
        **extra: Any,
    ) -> tuple[PyTree, Any]:
        del extra
        # A loop that added microbatches itself passes no parameters, and a chain does.
        own = params is None or not mechanism.noise_multiplier
        updates = require_clipped_sum(updates, mechanism.clipping, name, plain=own)
        updates, below = checked(updates, state, mechanism.deviations_on_sum(state.step), below)
        scale, memory = getattr(state, "scale", None), getattr(state, "memory", ())
        mean, scale, memory = private_mean(
            mechanism, updates, state.key, state.step, memory=memory, bound_scale=scale, below=below
        )
        seal_outside_jit(state.key, state.step, (mean, scale), name)
        if mechanism.adaptive is None:
            return mean, noise.GaussianState(state.key, state.step + 1, memory)
        return mean, AdaptiveState(state.key, state.step + 1, scale)

    return optax.GradientTransformationExtraArgs(init, update)


def private_mean(
    mechanism: Mechanism,
    total: PyTree,
    key: Key,
    step: Int[Array, ""],
    *,
    memory: PyTree = (),
    lost: PyTree | None = None,
    bound_scale: Any = None,
    below: Float[Array, ""] | None = None,
    in_parts: bool = False,
) -> tuple[PyTree, Any, PyTree]:
    """The private mean of one step, from its clipped sum: a pure function of its arguments.

    Args:
      mechanism: What runs.
      total: The clipped sum.
      key: The root key of the run.
      step: The number of the step, from 0.
      memory: What correlated noise remembers of earlier steps.
      lost: What ``total`` lacks of the sum, because float32 rounds.
      bound_scale: The scale of an adapted bound at this step.
      below: The count that an adapted bound follows.
      in_parts: Whether a mesh splits the leaves; see `add_noise`.

    Returns:
      The mean, and the scale and the memory of the next step. `Mechanism.privatize` says what
      happens past the planned steps.
    """
    beyond = step >= mechanism.steps
    if not trees.traced(beyond) and beyond:
        raise ValueError(
            f"Mechanism.privatize: step {int(step) + 1} of {mechanism.steps} planned steps; the "
            "accounting does not cover this step. Plan more steps in the Mechanism."
        )
    deviations, partition = mechanism.deviations_on_sum(step), mechanism.clipping.partition
    noisy, memory = add_noise(
        total,
        partition,
        deviations,
        key,
        step,
        mechanism.noise,
        memory,
        lost=lost,
        in_parts=in_parts,
    )
    # The divisor is the expected batch size, a public constant; the drawn size is private.
    # Inside jit nothing can be raised, so an unaccounted step releases NaN: it fails closed.
    share = jnp.where(step < mechanism.steps, 1 / mechanism.batch_size, jnp.nan)
    mean = jax.tree.map(lambda x: x * share.astype(x.dtype), noisy)
    if mechanism.adaptive is None:
        return mean, bound_scale, memory
    count = mechanism.count_multiplier
    scale = followed(mechanism.adaptive, count, below, share, bound_scale, key, step)
    return mean, scale, memory

# SPDX-License-Identifier: Apache-2.0
"""The steps of a mechanism: from a clipped sum to a private mean, as Optax links and as a function.

`private` and `privatize` are the bodies of methods of `Mechanism`, whose docstrings say what each
promises. A step of `dpjax.training` and an audit call `private_mean`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from dpjax import checks, clipping, trees
from dpjax.mechanism.adaptive import followed
from dpjax.noise.link import add_noise, first_state, require_sum
from dpjax.noise.state import unless_unset
from dpjax.types import Key, PyTree, Sampler

# A `Mechanism`, whose file imports this one.
Described = Any


def private(mechanism: Described, key: Key | None) -> optax.GradientTransformationExtraArgs:
    """The link from per-example gradients to a private mean: `Mechanism.private`."""
    if mechanism.adaptive is not None:
        raise ValueError(
            "Mechanism.private: adapted bounds need the norms of each batch, which the links of a "
            "chain do not exchange. Use dpjax.dpsgd, or leave adaptive= out."
        )
    if key is not None:
        checks.key("Mechanism.private", key)
    clip, noise = clipping.clip_and_sum(mechanism.clipping), privatize(mechanism, key)

    def init(params: PyTree) -> Any:
        return clip.init(params), noise.init(params)

    def update(
        updates: PyTree,
        state: Any,
        params: PyTree | None = None,
        *,
        mask: ArrayLike | None = None,
        **extra: Any,
    ) -> tuple[PyTree, Any]:
        del extra
        _require_mask(mechanism.sampling, updates, mask)
        total, shapes = clip.update(updates, state[0], params, mask=mask)
        mean, after = noise.update(total, state[1], params)
        return mean, (shapes, after)

    return optax.GradientTransformationExtraArgs(init, update)


def _require_mask(sampler: Sampler, gradients: PyTree, mask: ArrayLike | None) -> None:
    """Refuses padding that would count: rows of a sampler that pads its draws, without a mask."""
    full = mask is True and trees.leading_size(gradients) == sampler.capacity
    if sampler.padded and (mask is None or full):
        raise ValueError(
            f"Mechanism.private: {sampler.name} draws are padded; give update(..., mask=mask), of "
            "sampling.batch or draw.mask. mask=True says that all rows were drawn."
        )


def privatize(mechanism: Described, key: Key | None) -> optax.GradientTransformationExtraArgs:
    """The link from a clipped sum to a private mean: `Mechanism.privatize`."""
    name, multiplier = "Mechanism.privatize", mechanism.gradient_multiplier
    if key is not None:
        checks.key(name, key)

    def init(params: PyTree) -> Any:
        state = first_state(key, params, mechanism.noise)
        adapted = mechanism.adaptive is not None
        return state._replace(scale=jnp.ones((), jnp.float32)) if adapted else state

    def update(
        updates: Any,
        state: Any,
        params: PyTree | None = None,
        *,
        below: Float[Array, ""] | None = None,
        **extra: Any,
    ) -> tuple[PyTree, Any]:
        del params, extra
        require_sum(updates, mechanism.clipping, name)
        deviations, strategy = mechanism.deviations_on_sum, mechanism.noise
        total, below = state.meeting(updates, deviations, multiplier, strategy, below)
        if key is None:
            total = unless_unset(total, state.key, name)
        root, memory = state.key, state.memory
        mean, scale, memory = private_mean(
            mechanism, total, root, state.step, memory=memory, bound_scale=state.scale, below=below
        )
        return mean, state._replace(step=state.step + 1, memory=memory, scale=scale)

    return optax.GradientTransformationExtraArgs(init, update)


def private_mean(
    mechanism: Described,
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
      key: The root key of the noise.
      step: The number of the step, from 0.
      memory: What correlated noise remembers of earlier steps.
      lost: What ``total`` lacks of the sum, because float32 rounds.
      bound_scale: The scale of an adapted bound at this step.
      below: The count that an adapted bound follows.
      in_parts: Whether a mesh splits the leaves; see `add_noise`.

    Returns:
      The mean, and the scale and the memory of the next step.
    """
    beyond = step >= mechanism.steps
    if not trees.traced(beyond) and beyond:
        raise ValueError(
            f"Mechanism.privatize: step {int(step) + 1} of {mechanism.steps} planned steps is not "
            "accounted. Plan more steps in the Mechanism."
        )
    partition, strategy = mechanism.clipping.partition, mechanism.noise
    deviations = mechanism.deviations_on_sum(step)
    noisy, memory = add_noise(
        total, partition, deviations, key, step, strategy, memory, lost=lost, in_parts=in_parts
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

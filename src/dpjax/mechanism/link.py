# SPDX-License-Identifier: Apache-2.0
"""The steps of a mechanism: from a clipped sum to a private mean, as Optax links and as a function.

`private` and `privatize` are the bodies of methods of `Mechanism`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from dpjax import clipping, noise, trees
from dpjax.noise import GaussianState
from dpjax.noise.link import add_noise, noise_link
from dpjax.noise.multiplier import WIDER
from dpjax.noise.state import LinkNoise
from dpjax.types import Key, Purpose, PyTree, Sampler

# A `Mechanism`, whose file imports this one.
Described = Any


def private(mechanism: Described, key: Key | None) -> optax.GradientTransformationExtraArgs:
    """The link from per-example gradients to a private mean: `Mechanism.private`."""
    clip = clipping.clip_and_sum(mechanism.clipping)
    links = optax.chain(clip, privatize(mechanism, key, "Mechanism.private"))

    def update(
        updates: PyTree,
        state: Any,
        params: PyTree | None = None,
        *,
        mask: ArrayLike | None = None,
        **extra: Any,
    ) -> tuple[PyTree, Any]:
        sampler = mechanism.sampling
        if sampler.most_rows is not None:  # the sampler draws persons, who may own several rows
            # It raises for None and True too, so only samplers of rows can be refused below.
            mask = _drawn_units(mask, trees.leading_size(updates), sampler)
        # Padding is counted as examples without a mask. `mask=True` states that no gradient is
        # padding. As many gradients as the capacity are a padded draw, so it is refused for them.
        full = mask is True and trees.leading_size(updates) == sampler.capacity
        if sampler.padded and (mask is None or full):
            raise ValueError(
                f"Mechanism.private: {sampler.name} draws are padded; give update(..., mask=mask), "
                "of sampling.batch or draw.mask. mask=True says that all rows were drawn."
            )
        return links.update(updates, state, params, mask=mask)

    return optax.GradientTransformationExtraArgs(links.init, update)


def _drawn_units(mask: Any, gradients: int, sampler: Sampler) -> Bool[Array, " gradients"]:
    """Which units have a drawn row; raises where units are flattened into their rows."""
    # A person moves the sum by `most_rows` bounds if each row has a gradient of its own.
    unit = sampler.unit
    most_rows = sampler.most_rows
    if np.shape(mask) != (gradients, most_rows):
        raise ValueError(
            f"Mechanism.private: {gradients} gradients and a mask of shape {np.shape(mask)}; "
            f"expected one gradient a {unit}, and the mask [{unit}s, {most_rows}] as drawn. "
            "Take the gradient of dpjax.losses.of_person(loss) at (rows, mask)."
        )
    return jnp.any(jnp.asarray(mask), axis=1)


def privatize(
    mechanism: Described, key: Key | None, name: str = "Mechanism.privatize"
) -> optax.GradientTransformationExtraArgs:
    """The link from a clipped sum to a private mean: `Mechanism.privatize`."""

    def release(
        total: PyTree, state: GaussianState, below: Float[Array, ""] | None
    ) -> tuple[PyTree, GaussianState]:
        mean, scale, memory = private_mean(
            mechanism,
            total,
            state.key,
            state.step,
            memory=state.memory,
            bound_scale=state.scale,
            below=below,
        )
        return mean, state._replace(memory=memory, scale=scale)

    described = LinkNoise(
        mechanism.deviations_on_sum, mechanism.gradient_multiplier, mechanism.noise
    )
    adapts = mechanism.adaptive is not None
    return noise_link(name, mechanism.clipping, key, described, release, adapts)


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
    """The private mean of one step, and the scale and the memory of the next step.

    Args:
      mechanism: The `Mechanism`.
      total: The clipped sum of the step, relative to ``bound_scale`` if the bounds are adapted.
      key: The noise key of the run.
      step: The number of the step.
      memory: The state of correlated noise.
      lost: What the rounding of ``total`` lost, to be added with the noise.
      bound_scale: How much larger the bounds of this step are than the rule's.
      below: The count that adapted bounds follow, of `dpjax.clipping.Quantile.below`: each example
        counts 1/2 if its norm is below the bound, and -1/2 above it.
      in_parts: Whether a mesh splits the leaves, and each device draws its part of the noise.
    """
    beyond = step >= mechanism.steps
    if not trees.traced(beyond) and beyond:  # a traced step beyond the plan becomes NaN below
        raise ValueError(
            f"Mechanism: step {int(step) + 1} of {mechanism.steps} planned steps. Plan more steps."
        )
    noisy, memory = add_noise(
        total,
        mechanism.clipping.partition,
        mechanism.deviations_on_sum(step),
        key,
        step,
        mechanism.noise,
        memory,
        lost=lost,
        in_parts=in_parts,
    )
    # The divisor is the expected batch size, a public constant; the drawn size is private. A
    # compiled step cannot raise, so a step beyond the plan fails closed and releases NaN.
    factor = jnp.where(step < mechanism.steps, 1 / mechanism.batch_size, jnp.nan)
    mean = jax.tree.map(lambda x: x * factor.astype(x.dtype), noisy)
    if mechanism.adaptive is None:
        return mean, bound_scale, memory
    if below is None:
        raise ValueError(
            "Mechanism: the bound is adapted, so update needs the count of the batch. Use "
            "dpjax.dpsgd, or privatize with below=quantile.below(rule, norms, mask)."
        )
    # One example moves the count by 1/2, so the deviation of its noise is half the multiplier.
    # `WIDER` is the factor on all noise that covers the rounding of float32.
    drawn = WIDER * noise.standard_normal(trees.step_key(key, Purpose.COUNT, step), ())
    noisy_count = below + mechanism.count_multiplier / 2 * drawn
    fraction_below = noisy_count * factor + 0.5  # from -1/2 to 1/2, moved to 0 to 1
    return mean, mechanism.adaptive.moved(bound_scale, fraction_below), memory

# SPDX-License-Identifier: Apache-2.0
"""A bound that follows a quantile: its state, and the one count that is noised for it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float, Int

from dpjax import clipping, noise, trees
from dpjax.types import Clipping, Key, Purpose


class AdaptiveState(NamedTuple):
    """What noise needs to go on where the bound is adapted.

    Privacy: the key is a secret.  The scale is released: it follows from noised counts.
    """

    key: Key
    step: Int[Array, ""]
    scale: Float[Array, ""]
    """What the rule's bounds, and the noise with them, are multiplied by at this step."""


def followed(
    quantile: clipping.Quantile,
    multiplier: float,
    below: Float[Array, ""] | None,
    share: Array,
    scale: Float[Array, ""],
    key: Key,
    step: Int[Array, ""],
) -> Float[Array, ""]:
    """The scale of the next step, from a count to which noise is added here, once.

    Args:
      quantile: What it follows.
      multiplier: Of the count's noise.
      below: The count, `dpjax.clipping.Quantile.below`; not private.
      share: 1 / batch size; NaN for a step that is not planned.
      scale: The scale of this step.
      key: The root key of the run.
      step: The number of the step.
    """
    if below is None:
        raise ValueError(
            "Mechanism.privatize: the bound is adapted, so update needs the count that it "
            "follows: update(sum, state, below=quantile.below(rule, norms, mask)), of the "
            "same batch. dpjax.dpsgd does all of it; optax chains with clip_and_sum cannot, "
            "for their bound does not move."
        )
    drawn = noise.standard_normal(trees.step_key(key, Purpose.COUNT, step), ())
    fraction = (below + multiplier / 2 * drawn) * share + 0.5
    return quantile.moved(scale, fraction)


def check_adaptive(rule: Clipping, multipliers: np.ndarray, count: float) -> None:
    """Refuses a bound that cannot move, and a count that costs more than all together.

    Args:
      rule: Whose bounds are adapted.
      multipliers: Of gradients and count together, at each planned step.
      count: The multiplier of the count.
    """
    bound = rule.sensitivity
    if not 0 < bound < np.inf:
        raise ValueError(
            f"Mechanism(adaptive=...): the rule's bound is {bound}; expected a positive, finite "
            "one to begin at, near a gradient's usual norm. It may be off by far."
        )
    if rule.projections is not None:
        raise ValueError(
            "Mechanism(adaptive=...): norms are estimated (clipping.jl), and nothing is proved for "
            "their count beside such sums. Take clipping.flat, or leave adaptive= out."
        )
    largest = float(np.max(multipliers, initial=0.0))
    if not (largest < count or largest == count == 0):
        raise ValueError(
            f"Mechanism(adaptive=...): the noise multiplier of gradients and count together is "
            f"{largest:.4g}, and that of the count alone {count:.4g}: together they cannot cost "
            "less than one of them does. Give clipping.Quantile a count_multiplier above "
            f"{largest:.4g}, 10 times it say (by default it is a tenth of the batch size)."
        )

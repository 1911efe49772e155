# SPDX-License-Identifier: Apache-2.0
"""Adaptive bounds: the state, and the noised count that moves the scale of the bounds.

The scale multiplies the rule's bounds and the noise alike. The link `Mechanism.privatize` keeps it
in an `AdaptiveState`, a run in ``State.bound_scale``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float, Int

from dpjax import clipping, noise, trees
from dpjax._display import veiled
from dpjax.noise.multiplier import WIDER
from dpjax.types import Clipping, Key, Purpose


class AdaptiveState(NamedTuple):
    """The state of the link `Mechanism.privatize` if bounds are adapted.

    Privacy:
      The key is secret. The scale may be released: it is computed from noised counts.
    """

    key: Key
    step: Int[Array, ""]
    scale: Float[Array, ""]
    """The factor of the rule's bounds, and of the noise, at this step."""

    def __repr__(self) -> str:
        return veiled(self, "key")


def followed(
    quantile: clipping.Quantile,
    multiplier: float,
    below: Float[Array, ""] | None,
    share: Array,
    scale: Float[Array, ""],
    key: Key,
    step: Int[Array, ""],
) -> Float[Array, ""]:
    """The scale of the next step, from the count; the noise of the count is added here, once.

    Args:
      quantile: The quantile that the bounds follow.
      multiplier: The noise multiplier of the count.
      below: The count before the noise, `dpjax.clipping.Quantile.below`.
      share: 1 / batch size; NaN for a step that is not planned.
      scale: The scale of this step.
      key: The root key of the run.
      step: The number of the step.
    """
    if below is None:
        raise ValueError(
            "Mechanism.privatize: the bound is adapted, so update needs the count of the same "
            "batch: update(sum, state, below=quantile.below(rule, norms, mask)). dpjax.dpsgd "
            "passes it. Optax chains with clip_and_sum cannot, because their bound is fixed."
        )
    # One example moves the count by 1/2, so its noise has half the multiplier as deviation.
    drawn = WIDER * noise.standard_normal(trees.step_key(key, Purpose.COUNT, step), ())
    # Divided by the expected batch size, like the sum: the drawn size is private.
    fraction = (below + multiplier / 2 * drawn) * share + 0.5
    return quantile.moved(scale, fraction)


def check_adaptive(rule: Clipping, multipliers: np.ndarray, count: float) -> None:
    """Refuses a bound that cannot move, and a count that alone costs more than the total.

    Args:
      rule: The rule with the bounds.
      multipliers: The total multiplier of gradients and count, at each planned step.
      count: The multiplier of the count.
    """
    bound = rule.sensitivity
    if not 0 < bound < np.inf:
        raise ValueError(
            f"Mechanism(adaptive=...): the rule's bound is {bound}; expected a positive, finite "
            "bound to start from, near the usual norm of a gradient. A rough guess is enough."
        )
    if rule.projections is not None:
        raise ValueError(
            "Mechanism(adaptive=...): norms are estimated (clipping.jl), and nothing is proved for "
            "a count together with such sums. Use clipping.flat, or leave adaptive= out."
        )
    largest = float(np.max(multipliers, initial=0.0))
    if not (largest < count or largest == count == 0):
        raise ValueError(
            f"Mechanism(adaptive=...): the noise multiplier of gradients and count together is "
            f"{largest:.4g}, and the multiplier of the count is {count:.4g}: together they cannot "
            "cost less than the count alone. Give clipping.Quantile a count_multiplier above "
            f"{largest:.4g}, for example {10 * largest:.4g}. The default is a tenth of the batch "
            "size."
        )

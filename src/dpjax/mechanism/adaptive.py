# SPDX-License-Identifier: Apache-2.0
"""Adaptive bounds: the noised count that moves the scale of the bounds.

The scale multiplies the rule's bounds and the noise alike. The link `Mechanism.privatize` keeps it
in its state, a run in ``State.bound_scale``.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Array, Float, Int

from dpjax import clipping, noise, trees
from dpjax.noise.multiplier import WIDER
from dpjax.types import Clipping, Key, Purpose


def followed(
    quantile: clipping.Quantile,
    multiplier: float,
    below: Float[Array, ""] | None,
    share: Array,
    scale: Float[Array, ""],
    key: Key,
    step: Int[Array, ""],
) -> Float[Array, ""]:
    """The scale of the next step, from the count; the noise of the count is added here, once."""
    if below is None:
        raise ValueError(
            "Mechanism.privatize: the bound is adapted, so update needs the count of the batch. "
            "Give below=quantile.below(rule, norms, mask)."
        )
    # One example moves the count by 1/2, so its noise has half the multiplier as deviation.
    drawn = WIDER * noise.standard_normal(trees.step_key(key, Purpose.COUNT, step), ())
    # Divided by the expected batch size, like the sum: the drawn size is private.
    fraction = (below + multiplier / 2 * drawn) * share + 0.5
    return quantile.moved(scale, fraction)


def check_adaptive(rule: Clipping, multipliers: np.ndarray, count: float) -> None:
    """Refuses a bound that cannot move, and a count that alone costs more than the total."""
    bound = rule.sensitivity
    if not 0 < bound < np.inf:
        raise ValueError(
            f"Mechanism(adaptive=...): the bound is {bound}; expected a positive, finite bound."
        )
    if rule.projections is not None:
        raise ValueError("Mechanism(adaptive=...): norms are estimated; expected exact ones.")
    largest = float(np.max(multipliers, initial=0.0))
    if not (largest < count or largest == count == 0):
        raise ValueError(
            f"Mechanism(adaptive=...): the total multiplier is {largest:.4g} and that of the count "
            f"{count:.4g}. Give clipping.Quantile a count_multiplier above {largest:.4g}."
        )

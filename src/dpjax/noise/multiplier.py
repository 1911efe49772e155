# SPDX-License-Identifier: Apache-2.0
"""Noise multipliers: their forms, their checks, and the standard deviations that they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from dpjax import checks
from dpjax.types import Clipping, NoiseMultiplier

WIDER = 1 + 2.0**-10
"""The factor on every deviation where noise is drawn; the accounted multiplier does not have it.

It covers the rounding of float32 in the contribution of an example: half of it in norms, half in
sums. Larger errors are bounded where they arise, see `dpjax.gradients`.
"""


def standard_deviations(noise_multiplier: NoiseMultiplier, rule: Clipping, step: Any) -> list[Any]:
    """The standard deviation of the noise of `gaussian` in each group at a step."""
    if isinstance(noise_multiplier, Sequence):
        # These are relative to each group's own bound; a number is relative to the sensitivity.
        pairs = zip(noise_multiplier, rule.bounds, strict=True)
        return [_product(multiplier, bound) for multiplier, bound in pairs]
    multiplier = noise_multiplier
    if callable(noise_multiplier):
        # A narrower dtype can round the product with a small bound to zero.
        multiplier = jnp.asarray(noise_multiplier(step), jnp.float32)
        # JAX broadcasts an array along each leaf.
        if multiplier.ndim:
            raise TypeError(
                f"noise: the schedule returned shape {multiplier.shape}, not one number at each "
                "step. Write dpjax.schedules.table(values)."
            )
    return [_product(multiplier, rule.sensitivity)] * rule.partition.size


def _product(multiplier: Any, bound: float) -> Any:
    """Multiplier * bound. With an infinite bound only a multiplier of 0 is allowed."""
    if math.isinf(bound):
        return 0.0
    return multiplier * bound


def checked_multiplier(call: str, noise_multiplier: Any, rule: Clipping) -> NoiseMultiplier:
    """The multiplier as a schedule, a float, or a tuple with a float for each group of the rule."""
    hint = "It is the noise's standard deviation divided by the sensitivity."

    def number(value: Any) -> float:
        return checks.not_negative(call, "noise_multiplier", value, hint)

    if callable(noise_multiplier):
        checked = noise_multiplier
    elif np.ndim(noise_multiplier):
        checked = tuple(map(number, noise_multiplier))
        if len(checked) != rule.partition.size:
            raise ValueError(
                f"{call}: {len(checked)} multipliers for {rule.partition.size} groups "
                f"({', '.join(rule.partition.names)}); expected one per group."
            )
    else:
        checked = number(noise_multiplier)
    # 0 * inf is NaN; the pair is allowed only as "no clipping, no noise".
    if math.isinf(rule.sensitivity) and (callable(checked) or np.any(checked)):
        raise ValueError(
            f"{call}: the rule's bound is infinite, so no finite noise hides one example. Give a "
            "finite bound, or noise_multiplier=0.0."
        )
    return checked

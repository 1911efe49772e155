# SPDX-License-Identifier: Apache-2.0
"""A bound that follows a quantile of the gradient norms, by a noised count.

The adapted quantity is a *scale* on all bounds of a rule, which begins at 1.
``Mechanism(adaptive=Quantile(...))`` splits the noise between gradients and count: both
together cost as much as its ``noise_multiplier``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from dpjax import checks
from dpjax.clipping.rules import ON_BOUND
from dpjax.types import Clipping

# The scale stays within this factor of 1. Losses divided by a smaller scale overflow.
_FAR = 1e6


@dataclass(frozen=True, kw_only=True)
class Quantile:
    r"""How the bounds of a rule follow a quantile of the norms.

    With $b_t$ the noised fraction of examples below the bound,

    $$ C_{t+1} = C_t \, e^{-\eta (b_t - \gamma)} $$

    Args:
      target: $\gamma$, the fraction of examples that should be below the bound.
      rate: $\eta$; 0.2 usually moves the bound by at most 10 % a step, where the target is 0.5.
      count_multiplier: The noise multiplier of the count.  By default a tenth of the expected
        batch size, for which the fraction has noise of standard deviation 0.05, and at least four
        times the total of the mechanism, which leaves the sums 3 % more noise.
      geometric: Whether the bound moves in proportion to itself.  If not, by
        ``rate * (target - fraction)`` times the rule's own bound.

    Privacy:
      Each example of the batch counts 1/2 if it is below and -1/2 if not: one that
      joins or leaves moves the count by 1/2.  Noise has the standard deviation
      ``count_multiplier / 2``.  The count is of the very batch whose gradients are summed, so
      their multipliers join to $(z_g^{-2} + z_c^{-2})^{-1/2}$ before the sampling amplifies
      them.  The bound itself may be published.

    With several groups the mean over groups is counted, and one scale moves all bounds. It is held
    between 1e-6 and 1e6. A norm that is NaN or infinite is not below.

    Example:
      >>> import math
      >>> quantile = Quantile(target=0.5, rate=math.log(2))
      >>> print(round(float(quantile.moved(jnp.ones(()), 1.0)), 4))  # all are below: less
      0.7071

    References:
      Andrew, Thakkar, Ramaswamy, McMahan, "Differentially Private Learning with Adaptive
      Clipping", 2021, algorithm 1.
    """

    target: float = 0.5
    rate: float = 0.2
    count_multiplier: float | None = None
    geometric: bool = True

    def __post_init__(self) -> None:
        call = "clipping.Quantile"
        if not 0 <= self.target <= 1:
            raise ValueError(f"{call}(target={self.target}): expected a fraction from 0 to 1.")
        # Cards and caches hold Python's numbers.
        object.__setattr__(self, "target", float(self.target))
        object.__setattr__(self, "rate", checks.positive(call, "rate", self.rate))
        count = self.count_multiplier
        if count is not None:
            count = checks.not_negative(call, "count_multiplier", count, infinite=False)
            object.__setattr__(self, "count_multiplier", count)

    def below(
        self, rule: Clipping, norms: Float[Array, "batch groups"], mask: Bool[ArrayLike, " batch"]
    ) -> Float[Array, ""]:
        """How many more examples are below the bound than above it, halved; **not** private.

        The norms are those before clipping, relative to the scale.

        Sensitivity:
          1/2, attained by every example with one group.
        """
        bounds = jnp.asarray([rule.bounds], norms.dtype) * (1 + ON_BOUND)
        under = jnp.mean(norms <= bounds, axis=-1) - 0.5
        return jnp.sum(jnp.where(mask, under, 0), dtype=jnp.float32)

    def moved(self, scale: Float[Array, ""], fraction: Any) -> Float[Array, ""]:
        """The scale of the next step, from that of this one and the noised fraction below."""
        error = self.rate * (fraction - self.target)
        if self.geometric:
            # This step follows a bound over orders of magnitude at one rate.
            after = scale * jnp.exp(-error)
        else:
            after = scale - error
        return jnp.clip(after, 1 / _FAR, _FAR).astype(scale.dtype)

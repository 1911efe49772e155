# SPDX-License-Identifier: Apache-2.0
"""Filters: a budget that holds although the noise depends on what was released before.

Ordinary composition needs multipliers that were fixed in advance. If the noise, the sampling rate
or the existence of a step depends on earlier releases, adding up is sound only for a measure that
bounds every step *given* the past, against a limit fixed before the first step. Rényi divergence
at one fixed order is such a measure, and so is the squared signal of unsampled Gaussians. A
`Filter` holds the limit and the amount spent, and refuses a step before it runs.

The order is chosen first: the theorem does not cover taking the best of several orders afterwards.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from dataclasses import dataclass

import dp_accounting
import numpy as np
from dp_accounting import DpEvent

from dpjax import checks
from dpjax.accounting.event_parts import split
from dpjax.accounting.events import gaussian
from dpjax.accounting.methods import checked_delta
from dpjax.accounting.rdp_accountant import limits, total
from dpjax.accounting.rdp_divergence import ORDERS, renyi_divergence
from dpjax.checks import Refused


@dataclass(frozen=True, kw_only=True)
class Filter:
    r"""A budget for steps whose noise is chosen during the run.

    With ``r_t`` the Rényi divergence of step t at the order ``a``, a step is admitted if

    $$ \sum_{s \le t} r_s \;\le\; \varepsilon - \log\frac{a-1}{a}
       + \frac{\log \delta + \log a}{a - 1}. $$

    Args:
      epsilon: The most that all steps together may cost, however they were chosen.
      delta: The delta of the budget.
      order: ``a``, fixed before the first step; `best_order` finds a good one for expected steps.
      method: "rdp"; or "gdp" for Gaussians without sampling: no order, and exact.
      spent: The sum over the admitted steps, in the method's own unit.
      steps: The number of admitted steps.

    Privacy:
      Add-or-remove neighbours, Poisson sampling, exact norms (not `clipping.jl`). All that is
      released by admitted steps is (epsilon, delta)-private together if each choice depends on
      earlier releases and public things only: a loss, a norm or an accuracy of training data
      *before* its noise is neither.
      The bound of clipping may be chosen so too, and is free: multipliers are relative to it.

    | method | answer |
    |---|---|
    | "rdp" | any multipliers and rates; as many equal steps as the ledger lets, at the best order |
    | "gdp" | rate 1 only; ``sum 1/z^2 <= mu^2``, which is all that (epsilon, delta) can hold |
    | "pld" | refused: its numerical composition is proved for multipliers fixed in advance alone |

    Example:
      >>> budget = Filter(epsilon=3.0, delta=1e-5, order=7.3)
      >>> round(budget.limit, 6), budget.room(1.1, 256 / 60_000)
      (1.635412, 18338)
      >>> budget = budget.admit(1.1, 256 / 60_000)  # now run that step, with that noise
      >>> budget = budget.admit(0.8, 256 / 60_000)  # less noise, by what the first released
      >>> budget.steps
      2

    References:
      Feldman, Zrnic, *Individual privacy accounting via a Rényi filter*, 2021.
      Lécuyer, *Practical privacy filters and odometers with Rényi differential privacy*, 2021.
      Smith, Thakurta, *Fully adaptive composition for Gaussian differential privacy*, 2022.
    """

    epsilon: float
    delta: float
    order: float | None = None
    method: str = "rdp"
    spent: float = 0.0
    steps: int = 0

    def __post_init__(self) -> None:
        """Refuses what no theorem covers, and orders at which nothing fits."""
        _check_method(self.method, self.order)
        checks.positive("accounting.Filter", "epsilon", self.epsilon)
        checked_delta("accounting.Filter", self.delta)
        hint = (
            "They are the sum over the admitted steps and how many they are; a negative sum would "
            "admit more than the budget. admit sets both: build a Filter without them."
        )
        checks.not_negative("accounting.Filter", "spent", self.spent, hint)
        checks.whole("accounting.Filter", "steps", self.steps, hint, least=0)
        if not self.limit > 0:
            raise ValueError(
                f"accounting.Filter(order={self.order}): at this order nothing fits into epsilon="
                f"{self.epsilon:g} at delta={self.delta:g}. Take a larger one; best_order finds it."
            )

    @property
    def limit(self) -> float:
        """The largest sum over steps that is admitted."""
        if self.order is not None:
            return float(limits(self.epsilon, self.delta, np.float64(self.order)))
        # The search ends within 1e-12 of the root, on either side of it.
        return dp_accounting.get_sigma_gaussian(self.epsilon, self.delta) ** -2 * (1 - 1e-9)

    def cost(self, noise_multiplier: float, sampling_rate: float) -> float:
        """The cost of one step: its divergence at the order, or its squared signal."""
        if self.order is not None:
            return _divergence(float(noise_multiplier), float(sampling_rate), float(self.order))
        if sampling_rate != 1:
            raise ValueError(
                f"accounting.Filter(method='gdp'): sampling_rate={sampling_rate}; it holds for "
                "Gaussians on all the data (rate 1). For sampled steps: method='rdp', and an order."
            )
        # Through `split`, so that a multiplier of 0 costs infinity here as everywhere.
        parts = split(gaussian(noise_multiplier))
        return parts.precision if parts.private else math.inf

    def room(self, noise_multiplier: float, sampling_rate: float) -> int:
        """How many more steps with this noise would be admitted now; at most a billion."""
        # Bisection on the rounded-up sum that `admit` compares, so that `room` and `admit` never
        # disagree.
        cost, limit = self.cost(noise_multiplier, sampling_rate), self.limit
        steps = range(1, 10**9 + 1)
        return bisect.bisect_left(steps, True, key=lambda n: not self._after(cost, n) <= limit)

    def admit(self, noise_multiplier: float, sampling_rate: float, *, steps: int = 1) -> Filter:
        """Records the next steps, or refuses all of them: call it *before* they run.

        Args:
          noise_multiplier: Noise standard deviation over add-or-remove sensitivity.
          sampling_rate: The probability with which each example joins.
          steps: How many such steps.

        Returns:
          A filter that includes these steps. This one does not change; do not use it again.

        Raises:
          Refused: They would pass the limit.
        """
        hint = "It is how many steps are about to run; room() says how many would fit."
        steps = checks.whole("accounting.Filter.admit", "steps", steps, hint)
        after = self._after(self.cost(noise_multiplier, sampling_rate), steps)
        if not after <= self.limit:
            raise Refused(
                f"accounting.Filter: {steps} more with multiplier {noise_multiplier:.4g} and rate "
                f"{sampling_rate:.4g} would bring what is spent to {after:.6g}; {self.limit:.6g} "
                f"is the limit for epsilon={self.epsilon:g} at delta={self.delta:g}. "
                f"{self.room(noise_multiplier, sampling_rate)} such steps fit after the "
                f"{self.steps} that ran. Take more noise, or stop: what was released stays covered."
            )
        # A new value: a caller that drops it after a refused step has lost nothing, and a filter
        # can be a field of a state.
        return dataclasses.replace(self, spent=after, steps=self.steps + steps)

    def _after(self, cost: float, steps: int) -> float:
        """The sum after more steps, rounded up, so that rounding never admits a step."""
        return math.nextafter(self.spent + math.nextafter(steps * cost, math.inf), math.inf)


def best_order(event: DpEvent, epsilon: float, delta: float) -> float:
    """The order at which a budget admits most of the expected steps; choose it in advance.

    Args:
      event: The expected steps: one of them, or a whole plan. Their number does not matter.
      epsilon: The budget.
      delta: The delta of the budget.

    Returns:
      One of `ORDERS`. If other steps run, the filter still holds, and admits fewer of them.

    Example:
      >>> from dpjax import accounting
      >>> step = accounting.subsampled_gaussian(1.1, sampling_rate=256 / 60_000, steps=1)
      >>> best_order(step, epsilon=3.0, delta=1e-5)
      7.3
    """
    checks.positive("accounting.best_order", "epsilon", epsilon)
    checked_delta("accounting.best_order", delta)
    # Of what is expected to run: the order is a guess in advance, and a bad guess costs steps, not
    # privacy.
    divergences = total(split(event), "add-or-remove")
    left = limits(epsilon, delta, ORDERS)
    usable = (left > 0) & (divergences > 0) & np.isfinite(divergences)
    if not np.any(usable):
        raise ValueError(
            f"accounting.best_order(event={event}, epsilon={epsilon}, delta={delta}): the event "
            "fits at no order, or it costs nothing. Allow a larger epsilon, or expect more noise."
        )
    return float(ORDERS[usable][np.argmax(left[usable] / divergences[usable])])


@functools.lru_cache(maxsize=4096)
def _divergence(multiplier: float, rate: float, order: float) -> float:
    return float(renyi_divergence(multiplier, rate, [order])[0])


def _check_method(method: str, order: float | None) -> None:
    if method == "pld":
        raise ValueError(
            "accounting.Filter(method='pld'): privacy loss distributions compose numerically only "
            "when multipliers are fixed in advance; where they depend on releases the composed "
            "distribution bounds nothing. Use method='rdp' with an order, which costs some steps; "
            "or fix the schedule, and account with dpjax.ledger.Budget(method='pld')."
        )
    hint = "No other method bounds a sum of steps that depend on releases."
    checks.one_of("accounting.Filter", "method", method, ("rdp", "gdp"), hint)
    if method == "gdp" and order is not None:
        raise ValueError(
            f"accounting.Filter(method='gdp', order={order}): Gaussians without sampling need no "
            "order: leave it out, or use method='rdp'."
        )
    if method == "rdp" and not (order is not None and 1 < order < math.inf):
        raise ValueError(
            f"accounting.Filter(order={order}): expected one order above 1, fixed before the first "
            "step, because no theorem covers the best of several orders. accounting.best_order("
            "event, epsilon, delta) finds a good one for the steps that you expect."
        )

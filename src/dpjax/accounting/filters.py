# SPDX-License-Identifier: Apache-2.0
"""Filters: a budget that holds although the noise depends on what was released before.

Adding up is then sound only for a measure that bounds every step *given* the past, against a limit
fixed before the first step. Rényi divergence at one fixed order is such a measure, but not at the
best of several orders afterwards.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from dataclasses import dataclass

import numpy as np
from dp_accounting import DpEvent

from dpjax import checks
from dpjax.accounting.event_parts import split
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
      spent: The sum over the admitted steps. Loss distributions would not do: their numerical
        composition is proved for fixed multipliers alone.
      steps: The number of admitted steps.

    Privacy:
      Add-or-remove neighbours, Poisson sampling, exact norms (not `clipping.jl`). All that is
      released by admitted steps is (epsilon, delta)-private together if each choice depends on
      earlier releases and public things only: a loss, a norm or an accuracy of training data
      *before* its noise is neither.
      The bound of clipping may be chosen so too, and is free: multipliers are relative to it.

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
    """

    epsilon: float
    delta: float
    order: float
    spent: float = 0.0
    steps: int = 0

    def __post_init__(self) -> None:
        call = "accounting.Filter"
        checks.positive(call, "epsilon", self.epsilon)
        checked_delta(call, self.delta)
        checks.positive(call, "order - 1", self.order - 1, "See accounting.best_order.")

    @property
    def limit(self) -> float:
        """The largest sum over steps that is admitted."""
        return float(limits(self.epsilon, self.delta, np.float64(self.order)))

    def cost(self, noise_multiplier: float, sampling_rate: float) -> float:
        """The cost of one step: its divergence at the order."""
        return float(renyi_divergence(noise_multiplier, sampling_rate, self.order)[0])

    def room(self, noise_multiplier: float, sampling_rate: float) -> int:
        """How many more steps with this noise would be admitted now; at most a billion."""
        # On the rounded-up sum that `admit` compares, so that the two never disagree.
        cost, limit = self.cost(noise_multiplier, sampling_rate), self.limit
        steps = range(1, 10**9 + 1)
        return bisect.bisect_left(steps, True, key=lambda n: not self._after(cost, n) <= limit)

    def admit(self, noise_multiplier: float, sampling_rate: float, *, steps: int = 1) -> Filter:
        """Records the next steps, or refuses all of them: call it *before* they run.

        The arguments are as for `subsampled_gaussian`. Returns a filter that includes these steps;
        this one does not change, and must not be used again. Steps beyond the limit are `Refused`.
        """
        steps = checks.whole("accounting.Filter.admit", "steps", steps)
        after = self._after(self.cost(noise_multiplier, sampling_rate), steps)
        if not after <= self.limit:
            raise Refused(
                f"accounting.Filter: {steps} more would spend {after:.6g} of {self.limit:.6g}. "
                f"{self.room(noise_multiplier, sampling_rate)} such steps fit after the "
                f"{self.steps} that ran."
            )
        # A new value, so that a filter can be a field of a state.
        return dataclasses.replace(self, spent=after, steps=self.steps + steps)

    def _after(self, cost: float, steps: int) -> float:
        """The sum after more steps, rounded up, so that rounding never admits a step."""
        return math.nextafter(self.spent + math.nextafter(steps * cost, math.inf), math.inf)


def best_order(event: DpEvent, epsilon: float, delta: float) -> float:
    """The order at which a budget admits most of the expected steps; choose it in advance.

    ``event`` is one of the steps, or a whole plan: their number does not matter. The answer is one
    of `ORDERS`. If other steps run, the filter still holds, and admits fewer of them.

    Example:
      >>> from dpjax import accounting
      >>> step = accounting.subsampled_gaussian(1.1, sampling_rate=256 / 60_000, steps=1)
      >>> best_order(step, epsilon=3.0, delta=1e-5)
      7.3
    """
    checks.positive("accounting.best_order", "epsilon", epsilon)
    checked_delta("accounting.best_order", delta)
    # The order of expected steps is a guess: a bad one costs steps, and no privacy.
    divergences = total(split(event), "add-or-remove")
    left = limits(epsilon, delta, ORDERS)
    usable = (left > 0) & (divergences > 0) & np.isfinite(divergences)
    if not np.any(usable):
        raise ValueError(
            f"accounting.best_order(epsilon={epsilon}): the event fits at no order, or is free."
        )
    return float(ORDERS[usable][np.argmax(left[usable] / divergences[usable])])

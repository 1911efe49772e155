# SPDX-License-Identifier: Apache-2.0
r"""Accounting for estimated norms (`clipping.jl`), where a norm may be estimated too small.

In exact arithmetic a norm estimated from ``r`` random projections is the norm times
``sqrt(chi2_r / r)``, for every gradient. (The estimator adds a margin for float32.) An example
therefore moves the clipped sum by up to ``s = sqrt(r / chi2_r)`` bounds: usually about one, rarely
many. Suppose that the projections are released too; they do not depend on the data. Given them, a
step is a Gaussian with its multiplier divided by ``s``. Its privacy loss is that of this Gaussian,
mixed over ``s``. This covers one example more or fewer. For replace-one both examples have an
``s``, which this proof does not cover.

The probability of a large ``s`` falls like a power, and Rényi divergences weigh it by the
exponential of a square. They are infinite at every order, so every method except PLD refuses.
"""

import dataclasses
import functools
import math
from typing import TypeAlias

import dp_accounting
import numpy as np
from dp_accounting import DpEvent
from dp_accounting.pld import common
from dp_accounting.pld import privacy_loss_distribution as library
from scipy import stats

from dpjax import checks
from dpjax.accounting import profiles
from dpjax.accounting._event_parts import Parts
from dpjax.accounting._loss_distributions import MIXED, composed, one_step, proven, rounded
from dpjax.accounting.events import BARE, rewritten
from dpjax.accounting.profiles import Profile

_RARE = 0.05  # a scale `s` is rare if P(S > s) is below this
_BULK = 80  # values to which an `s` that is not rare is rounded up
_TAIL = 140  # values to which a rare `s` is rounded up
# An example counts as unprotected at a scale `s` with one of these.
_LEAST = 0.13  # z / s is less
_CHANCE = 1e-12  # P(S > s) is less
_LEVELS = 24  # distinct steps of a schedule, each a second; more are rounded

# `{(rate, multiplier, projections): count}`
Steps: TypeAlias = dict[tuple[float, float, int], int]


@dataclasses.dataclass(frozen=True)
class ProjectedGaussianDpEvent(DpEvent):
    """The Gaussian mechanism on a sum that was clipped by norms from random projections."""

    noise_multiplier: float
    projections: int


def with_projections(event: DpEvent, projections: int) -> DpEvent:
    """Turns the event of a run with exact norms into one with norms from random projections.

    Example:
      >>> from dpjax.accounting.events import gaussian
      >>> with_projections(gaussian(2.0), projections=30)
      ProjectedGaussianDpEvent(noise_multiplier=2.0, projections=30)
    """
    projections = checks.whole("accounting.with_projections", "projections", projections)

    # These are the kinds that samplers make. The proof covers only a Gaussian on a clipped sum.
    def projected(part: DpEvent) -> DpEvent:
        match part:
            case dp_accounting.GaussianDpEvent(noise_multiplier=z):
                return ProjectedGaussianDpEvent(z, projections)
            case dp_accounting.PoissonSampledDpEvent(sampling_probability=rate, event=inner):
                return dp_accounting.PoissonSampledDpEvent(rate, rewritten(inner, projected))
            case dp_accounting.NoOpDpEvent() | dp_accounting.NonPrivateDpEvent():
                return part
        raise ValueError(
            f"clipping.jl: nothing is proved for estimated norms in {type(part).__name__}. "
            "Use sampling.poisson or sampling.full, or clip by exact norms."
        )

    return rewritten(event, projected)


def profile(steps: Steps, parts: Parts, neighbours: str) -> Profile:
    """The profile of ``steps``, which are the foreign parts, and of the Gaussians in ``parts``."""
    for q, z, r in steps:
        # A step without noise hides nothing, and NaN counts as no noise. A step that draws every
        # example hides nothing either if the norm is likely to be estimated far too small. At a
        # rate below 1 this costs only delta: see `_mixture`.
        if not z > BARE or (q == 1 and _chance_unprotected(z, r) >= _RARE):
            return profiles.gaussian(math.inf)  # epsilon is infinite
    # The mixture is over one random scale. Replace-one needs the joint law of two.
    if neighbours == "replace-one":
        raise ValueError(
            "accounting: random projections have no proof for 'replace-one'. Use 'add-or-remove'."
        )
    foreign_count = sum(count for _, count in parts.foreign)
    if sum(steps.values()) < foreign_count:  # some foreign events have no estimated norms
        raise ValueError(
            f"accounting: random projections compose with Gaussians only, not {parts.named}."
        )
    total = composed(parts, MIXED, neighbours)  # of all parts that are not foreign
    for projections in {r for _, _, r in steps}:
        alike = {(q, z): count for (q, z, r), count in steps.items() if r == projections}
        for (q, z), count in rounded(alike, _LEVELS).items():
            step = _mixture(q, z, projections, neighbours)
            total = total.compose(step.self_compose(count))
    return proven(total, parts)


def steps_of(parts: Parts) -> Steps:
    """``{(rate, multiplier, projections): count}`` of the steps with estimated norms."""
    steps: Steps = {}
    for event, count in parts.foreign:
        rate = 1.0
        if isinstance(event, dp_accounting.PoissonSampledDpEvent):
            rate = event.sampling_probability
            event = event.event
        if isinstance(event, ProjectedGaussianDpEvent):
            key = (float(rate), float(event.noise_multiplier), event.projections)
            steps[key] = steps.get(key, 0) + count
    return steps


@functools.lru_cache(maxsize=64)
def _mixture(q: float, z: float, r: int, neighbours: str) -> library.PrivacyLossDistribution:
    """The loss of one step: that of a Gaussian with multiplier ``z / s``, mixed over ``s``.

    The distribution of ``S = sqrt(r / chi2_r)`` is cut into levels. Each level is a component of
    the mixture, with ``s`` the upper end of the level.
    """
    unprotected = _chance_unprotected(z, r)
    # An unprotected example is revealed if it is drawn. That has probability q: epsilon 0, delta q.
    total = library.from_privacy_parameters(
        common.DifferentialPrivacyParameters(0.0, q), value_discretization_interval=MIXED
    )
    if unprotected >= _RARE:
        return total  # as if all scales left the example unprotected, an upper bound
    # Level k has `chances[k] >= P(S > s) >= chances[k + 1]`, so its probability is the difference.
    # Rounding s up to the end of its level never lowers the loss.
    likely = np.linspace(1.0, _RARE, _BULK, endpoint=False)
    rare = np.geomspace(_RARE, unprotected, _TAIL)
    chances = np.concatenate([likely, rare])
    ends = np.sqrt(r / stats.chi2(r).ppf(chances[1:]))  # P(S > end) is the chance
    probabilities = -np.diff(chances)
    # The rarest level is mixed first. Mixed last, it has a weight ``1 - self_weight`` of 1 minus
    # almost 1, which keeps few digits.
    mixed = unprotected  # the probability of all components in `total`
    for scale, probability in zip(ends[::-1], probabilities[::-1], strict=True):
        step = one_step(q, z / float(scale), MIXED, neighbours)
        with_step = mixed + float(probability)
        total = total.compute_mixture(step, self_weight=mixed / with_step)
        mixed = with_step
    return total


def _chance_unprotected(z: float, r: int) -> float:
    """The probability of a scale at which the proof counts the example as unprotected."""
    # P(S > s) = P(chi2 < r / s^2)
    return max(_CHANCE, float(stats.chi2(r).cdf(r * (_LEAST / z) ** 2)))

# SPDX-License-Identifier: Apache-2.0
"""A lower bound on epsilon from the right guesses about the canaries of a single run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from dp_accounting import DpEvent
from scipy.special import ndtr, ndtri

from dpjax import accounting, checks
from dpjax.accounting import profiles
from dpjax.accounting.events import with_noise
from dpjax.accounting.methods import profile_of

CURVES = ("gaussian", "any")
# The epsilons whose deltas describe a curve.
_POINTS = np.append(0.0, np.geomspace(0.02, 40, 40))


def epsilon_lower_bound(
    correct: int,
    guesses: int,
    *,
    canaries: int,
    delta: float,
    confidence: float = 0.95,
    curve: str | DpEvent = "gaussian",
) -> float:
    r"""The largest epsilon that this number of right guesses refutes, from a single run.

    Canaries join by fair coins. If a run is private, many right guesses are unlikely. The bound is
    the epsilon at ``delta`` of the least private run that is refuted, among the runs of a family:

    | ``curve`` | the family |
    |---|---|
    | ``"gaussian"`` | runs whose trade-off curve is that of one Gaussian (Gaussian DP) |
    | an event | the run that the event describes, with its noise scaled |
    | ``"any"`` | all runs that are $(\epsilon, \delta)$-private; far lower bounds |

    Many steps of DP-SGD are close to one Gaussian, but not below it at every point: only the run's
    own event, or ``"any"``, refutes a claim. With ``delta=0``, ``"gaussian"`` stands for ``"any"``,
    because no Gaussian has a finite epsilon there.

    Args:
      correct: The number of right guesses.
      guesses: The number of guesses.
      canaries: The number of canaries, those without a guess too.
      delta: The delta of the claim.
      confidence: The confidence of the bound.
      curve: The family, as above.

    Returns:
      The bound, with ``"any"`` at most 50; 0 if nothing is refuted.

    Example:
      >>> round(epsilon_lower_bound(950, 1000, canaries=1000, delta=1e-5), 2)
      5.08
      >>> round(epsilon_lower_bound(950, 1000, canaries=1000, delta=1e-5, curve="any"), 2)
      2.7
      >>> epsilon_lower_bound(500, 1000, canaries=1000, delta=1e-5)
      0.0

    References:
      Mahloujifar, Melis and Chaudhuri, "Auditing f-Differential Privacy in One Run", 2025, for
      curves; Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run", 2023,
      theorem 5.2, for "any".
    """
    call = "auditing.epsilon_lower_bound"
    if not 0 <= correct <= guesses <= canaries:
        raise ValueError(f"{call}: expected {correct=} <= {guesses=} <= {canaries=}.")
    confidence = checks.fraction(call, "confidence", confidence, "Such as 0.95, not per cent.")
    numbers = (correct, guesses, canaries)
    risk = 1 - confidence
    if isinstance(curve, DpEvent):
        return _of_event(curve, numbers, delta, risk)
    checks.one_of(call, "curve", curve, CURVES, "Or give an event.")
    if curve == "any" or delta == 0:
        return _largest(
            lambda epsilon: _any_refuted(epsilon, numbers, delta, risk), low=0.0, high=50.0
        )
    checks.delta(call, delta)

    def gaussian_refuted(mu: float) -> bool:
        # The trade-off curve of two Gaussians at the distance mu, from a rate of true positives.
        return refuted(lambda rate: float(ndtr(ndtri(rate) - mu)), *numbers, risk)

    mu = _largest(gaussian_refuted, low=0.0, high=20.0)
    return profiles.gaussian(mu).epsilon(delta)


def refuted(
    least_false_positives: Callable[[float], float],
    correct: int,
    guesses: int,
    canaries: int,
    risk: float,
) -> bool:
    """Whether a trade-off curve makes this many right guesses, or more, rarer than ``risk``.

    ``least_false_positives`` is the curve: from a rate of true positives to the smallest rate of
    false positives that it allows.
    """
    # Assume that the chance of `correct` right guesses or more is `risk`. For a random canary,
    # `right` is the chance that its guess is right and that j guesses or more are right in all, and
    # `wrong` is the chance that its guess is wrong and that j or more are right. They begin at
    # j = correct, and grow as j falls: flipping the canary's coin makes its right guess wrong and
    # leaves one right guess less, so `wrong` at j is at least the rate that the curve allows for
    # `right` at j + 1. The assumption is false if right + wrong exceeds the chance that the canary
    # has a guess.
    right = risk * correct / canaries
    wrong = risk * (guesses - correct) / canaries
    for j in range(correct - 1, -1, -1):
        wrong_at_j = max(wrong, least_false_positives(right))
        if wrong_at_j == wrong:  # neither chance rises here, so none does at smaller j
            break
        # Exactly j right guesses add to both chances, in the ratio of right to wrong guesses.
        right += j / (guesses - j) * (wrong_at_j - wrong)
        wrong = wrong_at_j
        if right + wrong > guesses / canaries:
            return True
    return right + wrong > guesses / canaries


def _of_event(event: DpEvent, numbers: tuple[int, int, int], delta: float, risk: float) -> float:
    """The epsilon at ``delta`` of the event, with the least noise at which it is refuted.

    ``numbers`` are the right guesses, all guesses and the canaries. The search goes from 2^8 times
    the noise of the event to 2^-8 times, and is exact to 0.3 % of the noise.
    """
    method = accounting.tightest(event)
    growth = np.exp(_POINTS)

    def is_refuted(halvings: float) -> bool:
        """Whether the event is refuted after its noise is halved this many times."""
        scaled_event = with_noise(event, 2.0**-halvings)
        # Canaries join or not: the data sets differ by one that is added or removed.
        profile = profile_of(scaled_event, method, neighbours="add-or-remove")
        deltas = np.array([profile.delta(epsilon) for epsilon in _POINTS])

        def least_false_positives(true_positives: float) -> float:
            """The trade-off curve: the least false-positive rate at a true-positive rate."""
            # Each (epsilon, delta) bounds the curve in both directions. More points only raise it.
            forward = np.max((true_positives - deltas) / growth)
            reverse = np.max(1 - deltas - growth * (1 - true_positives))
            return max(0.0, float(forward), float(reverse))

        return refuted(least_false_positives, *numbers, risk)

    if not is_refuted(-8.0):  # not even with the most noise, so the bound is 0
        return 0.0
    halvings = _largest(is_refuted, low=-8.0, high=8.0, digits=4e-3)
    return accounting.epsilon(with_noise(event, 2.0**-halvings), delta, method)


def _any_refuted(epsilon: float, numbers: tuple[int, int, int], delta: float, risk: float) -> bool:
    """Whether no run that is (epsilon, delta)-private has this many right guesses."""
    from scipy.stats import binom  # the import takes a second, so only audits of whole runs pay it

    correct, guesses, canaries = numbers
    # Each guess is right with at most this chance under pure epsilon.
    chance = 1 / (1 + np.exp(-epsilon))
    # Delta turns a bounded number of wrong guesses into right ones.
    turned = np.arange(1, correct + 1)
    below = np.cumsum(binom.pmf(correct - turned, guesses, chance))
    slack = np.max(below / turned, initial=0.0)
    return bool(binom.sf(correct - 1, guesses, chance) + 2 * canaries * delta * slack <= risk)


def _largest(
    holds: Callable[[float], bool], low: float, high: float, digits: float = 1e-6
) -> float:
    """The largest number at which ``holds`` is true, by bisection; ``low`` if there is none."""
    if not holds(low):
        return low
    while high - low > digits:
        middle = (low + high) / 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low

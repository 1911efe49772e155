# SPDX-License-Identifier: Apache-2.0
"""The Rényi accountant: divergences of steps add at every order; the best order makes epsilon.

The improved conversion is the default. The classic one is looser; papers of 2016 to 2021 print it.
The RDP of dp_accounting does not double the sensitivity for replace-one. This file therefore halves
the noise, at every depth of an event, before it passes the event on.
"""

import math
from functools import partial

import dp_accounting
import numpy as np
from dp_accounting import DpEvent
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import rdp_privacy_accountant as library

from dpjax.accounting import _allocation
from dpjax.accounting._event_parts import Parts, relation
from dpjax.accounting._rdp_divergence import CLASSIC, ORDERS, curves
from dpjax.accounting.events import AllocatedGaussianDpEvent, RandomAllocationDpEvent, rewritten
from dpjax.accounting.profiles import Profile


def improved(parts: Parts, neighbours: str) -> Profile:
    """The profile by the improved conversion."""
    divergences = total(parts, neighbours)
    return Profile(partial(to_epsilon, divergences), partial(to_delta, divergences))


def to_epsilon(divergences: np.ndarray, delta: float) -> float:
    """``min_alpha rdp(alpha) + log((alpha-1)/alpha) - (log delta + log alpha) / (alpha-1)``.

    Canonne, Kamath, Steinke, *The discrete Gaussian for differential privacy*, 2020, prop. 12.
    """
    # The library converts our exact divergences, which are never above its own upper bounds.
    epsilon, _ = library.compute_epsilon(ORDERS.tolist(), divergences.tolist(), delta)
    return float(epsilon)


def to_delta(divergences: np.ndarray, epsilon: float) -> float:
    """Delta by the improved conversion of divergences on `ORDERS`."""
    # The library takes the logarithm of zero below 1e-15. Rounding a divergence up is always sound.
    divergences = np.maximum(divergences, 1e-15)
    delta, _ = library.compute_delta(ORDERS.tolist(), divergences.tolist(), epsilon)
    return float(delta)


def classic(parts: Parts, neighbours: str) -> Profile:
    """``epsilon(delta) = min_alpha rdp(alpha) + log(1/delta) / (alpha - 1)``, and its inverse.

    Mironov, *Rényi differential privacy*, 2017, proposition 3.
    """
    orders = ORDERS[CLASSIC]
    divergences = total(parts, neighbours)[CLASSIC]

    def epsilon_at(delta: float) -> float:
        return float(np.min(divergences - math.log(delta) / (orders - 1)))

    def delta_at(epsilon: float) -> float:
        log_delta = float(np.min((orders - 1) * (divergences - epsilon)))
        return math.exp(min(0.0, log_delta))

    return Profile(epsilon_at, delta_at)


def total(parts: Parts, neighbours: str) -> np.ndarray:
    """The sum of the divergences of all parts, ``[orders]`` on `ORDERS`."""
    replaces = neighbours == "replace-one"
    squared_factor = 4 if replaces else 1  # a replacement moves a sum twice as far
    if replaces and parts.sampled:
        raise ValueError(
            "accounting: RDP has no proof for Poisson sampling, 'replace-one'. Use method='pld'."
        )
    # Random allocations (an example is in one random bin of steps) are foreign parts: `_foreign`
    # counts them below. For 'replace-one' they count as unsampled Gaussians instead, because an
    # example and its replacement are in the same bin: a bound for each known bin holds for a random
    # one.
    if replaces:
        parts = _allocation.known_bins(parts)  # adds them to `parts.precision`
    # The divergence of a Gaussian is order / (2 z^2).
    divergence = ORDERS * parts.precision / 2 * squared_factor
    if parts.sampled:
        counts = np.array(list(parts.sampled.values()), np.float64)
        divergence = divergence + counts @ curves(list(parts.sampled))  # [pairs] @ [pairs, orders]
    for event, count in parts.foreign:
        divergence = divergence + count * _foreign(event, neighbours)
    return divergence


def _foreign(event: DpEvent, neighbours: str) -> np.ndarray:
    """The divergence of a foreign event on `ORDERS`."""
    if isinstance(event, AllocatedGaussianDpEvent | RandomAllocationDpEvent):
        return _allocation.curve(event)
    if neighbours == "replace-one":
        event = rewritten(event, _halved)
    accountant = library.RdpAccountant(ORDERS.tolist(), relation(neighbours))
    try:
        return accountant.compose(event).rdp
    except dp_accounting.UnsupportedEventError as error:
        raise ValueError(
            f"accounting: RDP with neighbours={neighbours!r} has no proof for {event}. Often "
            f"method='pld' has one; dp_accounting says: {error}"
        ) from error


def _halved(event: DpEvent) -> DpEvent:
    """An event with half the noise; refuses kinds that are not on the list."""
    match event:
        case dp_accounting.NoOpDpEvent() | dp_accounting.RandomizedResponseDpEvent():
            return event  # the library bounds a randomised response for an exchange
        case dp_accounting.GaussianDpEvent(noise_multiplier=z):
            # The library takes the logarithm of 0 from 1e8 on. Less noise costs no less.
            return dp_accounting.GaussianDpEvent(min(z / 2, 1e7))
        case dp_accounting.LaplaceDpEvent(noise_multiplier=b):
            return dp_accounting.LaplaceDpEvent(b / 2)
        case RepeatAndSelectDpEvent(event=inner, mean=mean, shape=shape):
            return RepeatAndSelectDpEvent(rewritten(inner, _halved), mean, shape)
        case dp_accounting.SampledWithoutReplacementDpEvent(event=inner):
            return dp_accounting.SampledWithoutReplacementDpEvent(
                event.source_dataset_size, event.sample_size, rewritten(inner, _halved)
            )
    raise ValueError(
        f"accounting: RDP with 'replace-one' has no proof for {event}. Use 'add-or-remove'."
    )

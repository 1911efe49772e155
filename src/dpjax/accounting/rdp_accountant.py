# SPDX-License-Identifier: Apache-2.0
"""The Rényi accountant: divergences of steps add at every order; the best order makes epsilon.

The improved conversion is the default. The classic one is looser; papers of 2016 to 2021 print it.
Replace-one is converted here: the RDP of dp_accounting does not double the sensitivity, so noise is
halved, at every depth of an event, before the event is passed on.
"""

import math
from functools import partial

import dp_accounting
import numpy as np
from dp_accounting import DpEvent
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import rdp_privacy_accountant as library

from dpjax.accounting import allocation
from dpjax.accounting.event_parts import Parts, relation
from dpjax.accounting.events import AllocatedGaussianDpEvent, RandomAllocationDpEvent, rewritten
from dpjax.accounting.profiles import Profile
from dpjax.accounting.rdp_divergence import CLASSIC, ORDERS, curves


def improved(parts: Parts, neighbours: str) -> Profile:
    """The profile by the improved conversion."""
    divergences = total(parts, neighbours)
    return Profile(partial(to_epsilon, divergences), partial(to_delta, divergences))


def to_epsilon(divergences: np.ndarray, delta: float) -> float:
    """``min_alpha rdp(alpha) + log((alpha-1)/alpha) - (log delta + log alpha) / (alpha-1)``.

    Canonne, Kamath, Steinke, *The discrete Gaussian for differential privacy*, 2020, prop. 12.
    """
    # The library's conversion, on our exact divergences: a divergence that is exact is never above
    # the library's upper bound.
    return float(library.compute_epsilon(ORDERS.tolist(), divergences.tolist(), delta)[0])


def to_delta(divergences: np.ndarray, epsilon: float) -> float:
    """Delta by the improved conversion of divergences on `ORDERS`."""
    # Below 1e-15 the library takes the logarithm of zero; rounding a divergence up is always sound.
    divergences = np.maximum(divergences, 1e-15)
    return float(library.compute_delta(ORDERS.tolist(), divergences.tolist(), epsilon)[0])


def limits(epsilon: float, delta: float, orders: np.ndarray | np.float64) -> np.ndarray:
    """The improved conversion, turned round: the divergence that epsilon leaves at each order."""
    return epsilon - np.log1p(-1 / orders) + (math.log(delta) + np.log(orders)) / (orders - 1)


def classic(parts: Parts, neighbours: str) -> Profile:
    """``epsilon(delta) = min_alpha rdp(alpha) + log(1/delta) / (alpha - 1)``, and its inverse.

    Mironov, *Rényi differential privacy*, 2017, proposition 3.
    """
    orders, divergences = ORDERS[CLASSIC], total(parts, neighbours)[CLASSIC]

    def delta_at(epsilon: float) -> float:
        return math.exp(min(0.0, float(np.min((orders - 1) * (divergences - epsilon)))))

    return Profile(
        lambda delta: float(np.min(divergences - math.log(delta) / (orders - 1))), delta_at
    )


def total(parts: Parts, neighbours: str) -> np.ndarray:
    """The sum of the divergences of all parts, ``[orders]`` on `ORDERS`."""
    # Replace-one moves the sum twice as far. Our own Gaussians scale by 4 = 2^2 in the divergence.
    swap = neighbours == "replace-one"
    if swap and parts.sampled:
        raise ValueError(
            "accounting: RDP has no proof for Poisson sampling, 'replace-one'. Use method='pld'."
        )
    # An example and its replacement are in the same bin: given the bin, a plain Gaussian.
    parts = allocation.known_bins(parts) if swap else parts
    # The divergence of a Gaussian of signal 1 / m is order / (2 m^2), without sampling exactly.
    divergence = ORDERS * parts.precision / 2 * (4 if swap else 1)
    if parts.sampled:
        counts = np.array(list(parts.sampled.values()), np.float64)
        divergence = divergence + counts @ curves(list(parts.sampled))
    for event, count in parts.foreign:
        divergence = divergence + count * _foreign(event, neighbours)
    return divergence


def _foreign(event: DpEvent, neighbours: str) -> np.ndarray:
    swap = neighbours == "replace-one"
    if isinstance(event, AllocatedGaussianDpEvent | RandomAllocationDpEvent):
        return allocation.curve(event)
    accountant = library.RdpAccountant(ORDERS.tolist(), relation(neighbours))
    try:
        return accountant.compose(rewritten(event, _halved) if swap else event).rdp
    except dp_accounting.UnsupportedEventError as error:
        raise ValueError(
            f"accounting: RDP with neighbours={neighbours!r} has no proof for {event}. Often "
            f"method='pld' has one; dp_accounting says: {error}"
        ) from error


def _halved(event: DpEvent) -> DpEvent:
    """An event with half the noise; refuses kinds that are not on the list."""
    match event:
        case dp_accounting.NoOpDpEvent() | dp_accounting.RandomizedResponseDpEvent():
            return event  # the library's bound of the latter is for an exchange
        case dp_accounting.GaussianDpEvent(noise_multiplier=z):
            # The library takes the logarithm of 0 from 1e8 on, and less noise costs no less.
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

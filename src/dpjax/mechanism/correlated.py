# SPDX-License-Identifier: Apache-2.0
"""The cost of correlated noise: a strategy joined to a sampler.

Row t of $G$ is the clipped sum of step t, $C$ the lower triangular matrix of the strategy, $Z$
white noise and $z$ its scale. The rows of $G + z C^{-1} Z$ are released, and they follow from
$C G + z Z$. So a run is one Gaussian mechanism on $C G$, however later gradients follow from
earlier releases. One example moves $C G$ by the columns of $C$ of the steps that it is in. The
sampler gives these steps. If an example is in the steps of one random bin, it gives the
distribution of the bin.
"""

from __future__ import annotations

import functools
from typing import Any

import dp_accounting as dp
import numpy as np

from dpjax import accounting, checks, strategies
from dpjax.accounting.events import AllocatedGaussianDpEvent, correlated_samples
from dpjax.strategies import Participation, Strategy
from dpjax.types import Sampler


def check_strategy(mechanism: Any) -> None:
    """Raises if the sampler, schedule or rule invalidates the accounting of correlated noise."""
    strategy = mechanism.noise
    name = f"Mechanism(noise={strategy.name})"
    check_run(name, strategy, mechanism.sampling, mechanism.steps)
    checks.constant_noise(name, mechanism.noise_multiplier)
    # Noise of earlier steps that was scaled to other bounds does not cancel. The cost of estimated
    # norms is proved only for single steps.
    if mechanism.adaptive is not None or mechanism.clipping.projections is not None:
        raise ValueError(f"{name}: expected fixed bounds and exact norms, as of clipping.flat.")


def check_run(call: str, strategy: Strategy, sampler: Sampler, steps: int) -> None:
    """Refuses a sampler without a known sensitivity, and more steps than a strategy has."""
    if sampler.participation is None:
        raise ValueError(
            f"{call}: {sampler.name} batches have no proved sensitivity. Use "
            "sampling.cyclic_poisson(..., cycle=bands)."
        )
    # One Gaussian hides the steps of a strategy together, and none of the steps beyond them.
    if steps > strategy.steps:
        raise ValueError(f"{call}: {steps:,} steps; the strategy has {strategy.steps:,}.")


def is_amplified(strategy: Strategy, sampler: Sampler) -> bool:
    """Whether one participation ends before the next can begin, so sampling amplifies each."""
    # An example takes part only at steps t, t + cycle, ..., each by a coin of its own, and moves
    # rows t to t + bands - 1 of C G. With bands <= cycle no row depends on two coins, so each
    # participation is a sampled Gaussian, given earlier releases.
    return sampler.in_parts and strategy.bands <= sampler.facts["cycle"]


def participation_of(strategy: Strategy, sampler: Sampler) -> Participation:
    """The steps of one example to which the noise multiplier is relative."""
    if is_amplified(strategy, sampler):
        return strategies.once()
    assert sampler.participation is not None
    return sampler.participation(strategy.steps)


@functools.lru_cache(maxsize=128)
def sensitivity_of(strategy: Strategy, sampler: Sampler) -> float:
    """How far one example moves $C G$, in sensitivities of the rule."""
    return strategies.sensitivity(strategy, participation_of(strategy, sampler))


@functools.lru_cache(maxsize=128)
def overlaps_of(strategy: Strategy, sampler: Sampler) -> tuple[float, ...] | None:
    """The overlaps of two possible bins of an example; None where they gain nothing."""
    if not sampler.random_bins:
        return None
    overlaps = strategy.overlaps(participation_of(strategy, sampler).separation)
    if overlaps is None:
        return None
    shared = overlaps / sensitivity_of(strategy, sampler) ** 2
    # The bound saves at most a twentieth of the noise where bins share more.
    if np.mean(shared) > 0.75:
        return None
    return tuple(shared.tolist())


def correlated_claim(strategy: Strategy, sampler: Sampler) -> str:
    """In words, how the batches are drawn and how `correlated_event` counts them."""
    if is_amplified(strategy, sampler):
        return sampler.claim
    # The sampler's claim ends with its count for white noise.
    drawn = sampler.claim.partition(";")[0]
    if overlaps_of(strategy, sampler) is None:
        return f"{drawn}; no amplification is counted: one Gaussian for the run"
    return f"{drawn}; one Gaussian for the run, in a batch that is unknown"


def correlated_event(strategy: Strategy, sampler: Sampler, multipliers: np.ndarray) -> dp.DpEvent:
    """The privacy event of the steps that ran under correlated noise, with these multipliers."""
    check_run(f"Mechanism(noise={strategy.name})", strategy, sampler, len(multipliers))
    if is_amplified(strategy, sampler):
        # The participations of one example are separate releases, as with white noise.
        event = sampler.event(multipliers)
        # A participation moves as many rows of C G as C has bands, so examples that differ in their
        # steps may move common rows if there are several bands. A run of one cycle needs no mark:
        # it is one mixture, whose proof in `accounting._user_level` covers the overlap.
        if strategy.bands == 1 or len(multipliers) <= sampler.facts["cycle"]:
            return event
        # The mark tells `accounting.for_groups` that the examples of a user may overlap in rows.
        return correlated_samples(event)
    if not len(multipliers):
        return dp.NoOpDpEvent()
    # The noise hides all steps of an example together, as one Gaussian with the least multiplier. A
    # run that stops early costs the same.
    least = float(np.min(multipliers))
    overlaps = overlaps_of(strategy, sampler)
    if overlaps is None:
        return accounting.gaussian(least)
    # The bin of an example is random, which costs less the less possible bins overlap.
    return AllocatedGaussianDpEvent(least, overlaps)

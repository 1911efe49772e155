# SPDX-License-Identifier: Apache-2.0
"""What correlated noise hides, and what it costs: a strategy joined to a sampler.

Released are rows of $G + z C^{-1} Z$, which follow from $C G + z Z$. So a run is one Gaussian
mechanism on $C G$, however later gradients follow from earlier releases. One example moves $C G$
by the columns of the steps that it is in. Those are known from the sampler, or, of a random bin, up
to the bin.
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
    """Refuses a strategy where its noise would not be what is accounted."""
    strategy = mechanism.noise
    name = f"Mechanism(noise={strategy.name})"
    check_run(name, strategy, mechanism.sampling, mechanism.steps)
    checks.constant_noise(name, mechanism.noise_multiplier)
    # Noise of earlier steps, scaled to other bounds, would not cancel. What estimated norms add
    # is accounted for single steps alone.
    if mechanism.adaptive is not None or mechanism.clipping.projections is not None:
        raise ValueError(f"{name}: expected fixed bounds and exact norms, as of clipping.flat.")


def check_run(call: str, strategy: Strategy, sampler: Sampler, steps: int) -> None:
    """Refuses a sampler without a known sensitivity, and more steps than a strategy has."""
    if sampler.participation is None:
        raise ValueError(
            f"{call}: {sampler.name} batches have no proved sensitivity. Use "
            "sampling.cyclic_poisson(..., cycle=bands)."
        )
    # One Gaussian hides the steps of a strategy together: steps beyond them would cost nothing.
    if steps > strategy.steps:
        raise ValueError(f"{call}: {steps:,} steps; the strategy has {strategy.steps:,}.")


def is_amplified(strategy: Strategy, sampler: Sampler) -> bool:
    """Whether one participation ends before the next can begin, so that sampling amplifies each."""
    # An example takes part at steps t, t + cycle, ... alone, each by a coin of its own, and moves
    # rows t to t + bands - 1 of C G. With bands <= cycle no row depends on two coins, so each
    # participation is a sampled Gaussian, given what was released before.
    return sampler.in_parts and strategy.bands <= sampler.facts["cycle"]


def participation_of(strategy: Strategy, sampler: Sampler) -> Participation:
    """The steps that one example is in, as far as the multiplier is relative to them."""
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
    """How much two possible bins of an example have in common; None where that gains nothing."""
    if not sampler.random_bins:
        return None
    overlaps = strategy.overlaps(participation_of(strategy, sampler).separation)
    if overlaps is None:
        return None
    shared = overlaps / sensitivity_of(strategy, sampler) ** 2
    # Where batches share more, the bound saves a twentieth of the noise at most, and soon nothing.
    return tuple(shared.tolist()) if np.mean(shared) <= 0.75 else None


def correlated_claim(strategy: Strategy, sampler: Sampler) -> str:
    """In words, how the batches are drawn and what `correlated_event` counts for them."""
    if is_amplified(strategy, sampler):
        return sampler.claim
    # The sampler's words end with what it counts for fresh noise.
    drawn = sampler.claim.partition(";")[0]
    if overlaps_of(strategy, sampler) is None:
        return f"{drawn}; no amplification is counted: one Gaussian for the run"
    return f"{drawn}; one Gaussian for the run, in a batch that is unknown"


def correlated_event(strategy: Strategy, sampler: Sampler, multipliers: np.ndarray) -> dp.DpEvent:
    """The privacy event of the steps that ran, of these multipliers, with correlated noise."""
    check_run(f"Mechanism(noise={strategy.name})", strategy, sampler, len(multipliers))
    if is_amplified(strategy, sampler):
        # Columns that do not overlap are separate releases: each is accounted by itself.
        event = sampler.event(multipliers)
        # Moves of two records overlap across cycles where there are several cycles and bands.
        apart = strategy.bands == 1 or len(multipliers) <= sampler.facts["cycle"]
        return event if apart else correlated_samples(event)
    if not len(multipliers):
        return dp.NoOpDpEvent()
    # The noise hides all steps of an example together: a run that stops early costs the same.
    least, shared = float(np.min(multipliers)), overlaps_of(strategy, sampler)
    if shared is None:
        return accounting.gaussian(least)
    return AllocatedGaussianDpEvent(least, shared)

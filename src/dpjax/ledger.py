# SPDX-License-Identifier: Apache-2.0
"""The ledger: what was spent, what one more step would cost, and refusal.

The multipliers are fixed in advance, so ordinary composition is enough where the stopping time does
not depend on the data. Where results chose it (`ended`), all planned steps count.
`dpjax.accounting.Filter` is for noise that depends on releases.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dpjax import checks
from dpjax.accounting.events import runs_of
from dpjax.accounting.methods import checked_delta, checked_method
from dpjax.accounting.rounding import upwards
from dpjax.checks import Refused
from dpjax.types import Plan

__all__ = ["Budget", "Ledger", "Refused", "admit", "affordable", "empty", "epsilon"]

_WORDS = 4


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The most that a run may spend.

    Args:
      epsilon: The largest epsilon.
      delta: The delta beside it.
      method: The `dpjax.accounting` method that computes epsilon; a proven one. By default that
        of ``mechanism.target``, so that a budget admits what was calibrated for it, or
        `dpjax.accounting.default_method`.

    Example:
      >>> Budget(epsilon=3.0, delta=1e-5)
      Budget(epsilon=3.0, delta=1e-05, method=None)
    """

    epsilon: float
    delta: float
    method: str | None = None

    def __post_init__(self) -> None:
        """Refuses budgets that mean nothing."""
        hint = "At 0 no step fits."
        epsilon = checks.positive("ledger.Budget", "epsilon", self.epsilon, hint, infinite=True)
        # Python's numbers, which the cache of answers can hold.
        object.__setattr__(self, "epsilon", epsilon)
        object.__setattr__(self, "delta", checked_delta("ledger.Budget", self.delta))
        if not checked_method("ledger.Budget", self.method or "rdp").proven:
            raise ValueError(f"ledger.Budget(method={self.method!r}): not proven. Use 'rdp'.")


class Ledger(NamedTuple):
    """The multipliers of the steps that ran, run-length encoded, in order."""

    # Run-length encoded, so that a million equal steps are one entry of the state.
    multipliers: np.ndarray
    counts: np.ndarray
    accounted: np.ndarray
    """A hash of what else is accounted, such as the sampler; zeros before the first step."""
    supplied: np.ndarray
    """Whether the caller supplied the root key, and may so know the noise."""
    chosen: np.ndarray
    """How many steps plan and budget allowed where results ended the run; 0 if they never did."""

    @property
    def steps(self) -> int:
        """How many steps ran."""
        return int(self.counts.sum())

    def expand(self) -> np.ndarray:
        """The multiplier of each step, ``[steps]``."""
        return np.repeat(self.multipliers, self.counts)


def empty(*, supplied: bool = False) -> Ledger:
    """A ledger without steps; ``supplied`` says whether the caller supplied the root key."""
    words = np.zeros(_WORDS, np.uint32)
    return Ledger(np.zeros(0), np.zeros(0, np.int64), words, np.array(supplied), np.array(0))


def admit(
    ledger: Ledger, mechanism: Plan, budget: Budget | None = None, *, steps: int = 1
) -> Ledger:
    """Records the next steps, or refuses all of them; call it before they run.

    Args:
      ledger: The steps that ran so far.
      mechanism: The mechanism that runs; the steps of the ledger must be its first steps.
      budget: A limit on epsilon.
      steps: The number of next steps.

    Returns:
      The ledger with the next steps in it.

    Raises:
      Refused: A step is not planned, or would pass the budget, or the ledger is of
        another mechanism.

    Example:
      >>> import dpjax
      >>> mechanism = dpjax.Mechanism(
      ...     sampling=dpjax.sampling.poisson(examples=100, batch_size=10),
      ...     clipping=dpjax.clipping.flat(bound=1.0),
      ...     noise_multiplier=1.1,
      ...     steps=20,
      ... )
      >>> spent = admit(empty(), mechanism, Budget(epsilon=5.0, delta=1e-3), steps=3)
      >>> spent.steps
      3
      >>> admit(spent, mechanism, steps=18)
      Traceback (most recent call last):
      dpjax.checks.Refused: ledger: step 21 of 20 planned steps. ...
    """
    steps = checks.whole("ledger.admit", "steps", steps)
    require(ledger, mechanism, steps, budget)
    # The ledger must be a prefix of the plan: the stopping time then does not depend on the data.
    # Run-length encoded: a million equal steps are one entry of the state.
    values, counts = runs_of(_multipliers(mechanism)[: ledger.steps + steps])
    after = ledger._replace(multipliers=values, counts=counts, accounted=_digest(mechanism))
    return ended(after, mechanism, budget) if ledger.chosen else after


def ended(
    ledger: Ledger, mechanism: Plan, budget: Budget | None = None, *, least: int = 0
) -> Ledger:
    """Records that results ended the run: all steps count that plan and budget allow."""
    allowed = max(int(ledger.chosen), affordable(mechanism, budget), least)
    return ledger._replace(chosen=np.array(allowed))


def require(ledger: Ledger, mechanism: Plan, steps: int, budget: Budget | None = None) -> None:
    """Refuses the next steps, before they run, unless all of them fit plan and budget."""
    done, planned = len(ran(ledger, mechanism)), mechanism.steps
    # Apart from the budget: the cure is a longer plan, and not fewer steps.
    if done + steps > planned:
        raise Refused(f"ledger: step {done + steps} of {planned} planned steps. Plan more steps.")
    if budget is None:
        return
    method = _method(mechanism, budget)
    fits, reached = affordable(mechanism, budget), max(int(ledger.chosen), done + steps)
    if reached > fits:
        # What the refused steps would bring: the reader can see how far the budget is off.
        cost = _prefix_epsilon(mechanism, reached, budget.delta, method)
        what = "this step" if steps == 1 else f"these {steps} steps"
        at = f"{upwards(cost)} at delta={upwards(budget.delta, '.6g')}"
        raise Refused(
            f"ledger: {what} would bring epsilon to {at}; the budget is {budget.epsilon:g} "
            f"({method}). {fits} of {planned} steps fit."
        )


def affordable(mechanism: Plan, budget: Budget | None = None) -> int:
    """How many steps run before one would pass the plan or the budget.

    Example:
      >>> import dpjax
      >>> mechanism = dpjax.Mechanism(
      ...     sampling=dpjax.sampling.poisson(60_000, 256),
      ...     clipping=dpjax.clipping.flat(1.0),
      ...     noise_multiplier=1.1,
      ...     steps=14_063,
      ... )
      >>> affordable(mechanism, Budget(epsilon=2.0, delta=1e-5))
      8642
    """
    if budget is None:
        return mechanism.steps
    return _affordable(mechanism, budget.epsilon, budget.delta, _method(mechanism, budget))


def _method(mechanism: Plan, budget: Budget) -> str:
    """The method by which a budget is accounted; by default that of ``mechanism.target``."""
    checks.instance("ledger", "budget", budget, Budget)
    return mechanism.stated(budget.delta, budget.method)[1]


# Cached, because `admit` asks before every dispatch. The method is a key of its own: mechanisms are
# equal whatever they were calibrated for.
@functools.lru_cache(maxsize=128)
def _affordable(mechanism: Plan, epsilon: float, delta: float, method: str) -> int:
    """Bisects: a longer prefix of the same steps never costs less."""

    def passes(steps: int) -> bool:
        return not _prefix_epsilon(mechanism, steps, delta, method) <= epsilon

    # The usual plan fits, which is one question to a slow accountant.
    if mechanism.steps and not passes(mechanism.steps):
        return mechanism.steps
    return bisect.bisect_left(range(1, mechanism.steps + 1), True, key=passes)


def _prefix_epsilon(mechanism: Plan, steps: int, delta: float, method: str) -> float:
    return mechanism.epsilon_of(_multipliers(mechanism)[:steps], delta, method)


def epsilon(
    ledger: Ledger, mechanism: Plan, delta: float | None = None, method: str | None = None
) -> float:
    """The epsilon of the steps that really ran; of all planned ones if results ended the run.

    Args:
      ledger: The steps.
      mechanism: Under which they ran.
      delta: The delta beside it; by default that of ``mechanism.target``.
      method: The `dpjax.accounting` method; by default that of ``mechanism.target``, or
        `dpjax.accounting.default_method`.

    Raises:
      Refused: They ran under another mechanism.
    """
    return mechanism.epsilon_of(counted(ledger, mechanism), *mechanism.stated(delta, method))


def counted(ledger: Ledger, mechanism: Plan) -> np.ndarray:
    """The multiplier of each step that counts: that ran, or was planned where results ended it."""
    # A number of steps that follows from released results is a function of all steps that could
    # have run: their epsilon holds for it, and that of the steps alone is not proved.
    steps = ran(ledger, mechanism)
    return _multipliers(mechanism)[: max(int(ledger.chosen), len(steps))]


def ran(ledger: Ledger, mechanism: Plan) -> np.ndarray:
    """The multiplier of each step that ran; refused if it ran under another mechanism."""
    checks.instance("ledger", "ledger", ledger, Ledger, "Give state.ledger.")
    # In memory no folder checks a state: steps at rate 1 must not have the price of a lower rate.
    done = ledger.steps
    if done and not np.array_equal(ledger.accounted, _digest(mechanism)):
        raise Refused("ledger: the steps ran under another mechanism. Use init(state.params).")
    if mechanism.steps < ledger.chosen:
        raise Refused(
            f"ledger: results ended this run, so all {int(ledger.chosen)} steps count that were "
            f"allowed, and this mechanism plans {mechanism.steps}."
        )
    # A state that was put on a device holds its multipliers in float32.
    multipliers, held = _multipliers(mechanism)[:done], ledger.expand()
    if not np.array_equal(held, multipliers.astype(held.dtype)):
        raise Refused(
            f"ledger: the {done} steps here are not the first of {mechanism.steps} planned."
        )
    return multipliers


@functools.lru_cache(maxsize=128)
def _digest(mechanism: Plan) -> np.ndarray:
    """A hash of the accounted facts beside multipliers, as words that devices keep exactly."""
    content = hashlib.sha256(mechanism.accounted.encode()).digest()
    return np.frombuffer(content, np.uint32)[:_WORDS]


# A run asks for them before each step.
@functools.lru_cache(maxsize=128)
def _multipliers(mechanism: Plan) -> np.ndarray:
    return mechanism.multipliers

# SPDX-License-Identifier: Apache-2.0
"""The ledger counts what was spent, finds the cost of further steps, and refuses them.

The multipliers are fixed in advance, so ordinary composition is enough if the number of steps does
not depend on the data. If results chose it (`ended`), all planned steps count.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import hashlib
import json
import math
import os
import pathlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dpjax import _files, accounting, checks, clipping, schedules
from dpjax._rounding import three_digits, upwards
from dpjax.checks import Refused
from dpjax.mechanism import Mechanism, Spent
from dpjax.types import Plan

__all__ = ["Account", "Budget", "Ledger", "Refused", "admit", "affordable", "empty", "epsilon"]

# How many words of 32 bits the hash of the accounted facts has.
_WORDS = 4
# Threads take turns with the accounts that have no file.
_THREADS = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The most that a run may spend.

    Args:
      epsilon: The largest epsilon.
      delta: The delta of that epsilon.
      method: The `dpjax.accounting` method that computes epsilon; a proven one. By default that
        of ``mechanism.target``, so a budget admits what was calibrated for it, or
        `dpjax.accounting.default_method`.

    Example:
      >>> Budget(epsilon=3.0, delta=1e-5)
      Budget(epsilon=3.0, delta=1e-05, method=None)
    """

    epsilon: float
    delta: float
    method: str | None = None

    def __post_init__(self) -> None:
        """Refuses budgets that do not limit anything."""
        hint = "At 0 no step fits."
        epsilon = checks.positive("ledger.Budget", "epsilon", self.epsilon, hint, infinite=True)
        # The cache of answers takes Python's numbers as keys.
        object.__setattr__(self, "epsilon", epsilon)
        object.__setattr__(self, "delta", checks.delta("ledger.Budget", self.delta))
        method = checks.one_of("ledger.Budget", "method", self.method or "rdp", accounting.METHODS)
        if not accounting.METHODS[method].proven:
            raise ValueError(f"ledger.Budget(method={self.method!r}): not proven. Use 'rdp'.")


class Ledger(NamedTuple):
    """The multipliers of the steps that ran, run-length encoded, in order."""

    # A million equal steps are one entry of the state.
    multipliers: np.ndarray
    counts: np.ndarray
    accounted: np.ndarray
    """A hash of the other accounted facts, such as the sampler; zeros before the first step."""
    supplied: np.ndarray
    """Whether the caller supplied the root key, and may so know the noise."""
    chosen: np.ndarray
    """How many steps plan and budget allowed where results ended the run; 0 if they never did."""

    @property
    def steps(self) -> int:
        """The number of steps that ran."""
        return int(self.counts.sum())

    def expand(self) -> np.ndarray:
        """The multiplier of each step, ``[steps]``."""
        return np.repeat(self.multipliers, self.counts)


def empty(*, supplied: bool = False) -> Ledger:
    """A ledger without steps; ``supplied`` records whether the caller supplied the root key."""
    return Ledger(
        multipliers=np.zeros(0),
        counts=np.zeros(0, np.int64),
        accounted=np.zeros(_WORDS, np.uint32),
        supplied=np.array(supplied),
        chosen=np.array(0),
    )


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
      Refused: A step is not planned, or exceeds the budget, or the ledger is of another mechanism.

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
    # The ledger is a prefix of the plan, so the number of steps does not depend on the data.
    values, counts = schedules.runs_of(_multipliers(mechanism)[: ledger.steps + steps])
    after = ledger._replace(multipliers=values, counts=counts, accounted=_digest(mechanism))
    if ledger.chosen:
        return ended(after, mechanism, budget)
    return after


def ended(
    ledger: Ledger, mechanism: Plan, budget: Budget | None = None, *, least: int = 0
) -> Ledger:
    """Records that results ended the run: all steps count that plan and budget allow."""
    allowed = max(int(ledger.chosen), affordable(mechanism, budget), least)
    return ledger._replace(chosen=np.array(allowed))


def require(ledger: Ledger, mechanism: Plan, steps: int, budget: Budget | None = None) -> None:
    """Refuses the next steps, before they run, unless all of them fit plan and budget."""
    done = len(ran(ledger, mechanism))  # `ran` refuses a ledger of another mechanism
    planned = mechanism.steps
    # This refusal is separate from the budget's, because its cure is a longer plan.
    if done + steps > planned:
        raise Refused(f"ledger: step {done + steps} of {planned} planned steps. Plan more steps.")
    if budget is None:
        return
    method = _method(mechanism, budget)
    fits = affordable(mechanism, budget)
    # Where results ended the run earlier, all steps count that were allowed then.
    reached = max(int(ledger.chosen), done + steps)
    if reached > fits:
        # The epsilon of the refused steps shows by how much they exceed the budget.
        cost = _prefix_epsilon(mechanism, reached, budget.delta, method)
        what = "this step" if steps == 1 else f"these {steps} steps"
        at = f"{upwards(cost)} at delta={upwards(budget.delta, '.6g')}"
        raise Refused(
            f"ledger: {what} would bring epsilon to {at}; the budget is {budget.epsilon:g} "
            f"({method}). {fits} of {planned} steps fit."
        )


def affordable(mechanism: Plan, budget: Budget | None = None) -> int:
    """The number of steps that fit into the plan and the budget.

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


# This is cached, because `admit` calls it before every dispatch. The method is a separate key,
# because mechanisms that were calibrated for different targets can be equal.
@functools.lru_cache(maxsize=128)
def _affordable(mechanism: Plan, epsilon: float, delta: float, method: str) -> int:
    """Finds `affordable` by bisection, since a longer prefix of the same steps never costs less."""

    def exceeds(steps: int) -> bool:
        return not _prefix_epsilon(mechanism, steps, delta, method) <= epsilon

    # The usual plan fits, and this asks a slow accountant only once.
    if mechanism.steps and not exceeds(mechanism.steps):
        return mechanism.steps
    return bisect.bisect_left(range(1, mechanism.steps + 1), True, key=exceeds)


def _prefix_epsilon(mechanism: Plan, steps: int, delta: float, method: str) -> float:
    """The epsilon of the first steps of the plan."""
    return mechanism.epsilon_of(_multipliers(mechanism)[:steps], delta, method)


def epsilon(
    ledger: Ledger, mechanism: Plan, delta: float | None = None, method: str | None = None
) -> float:
    """The epsilon of the steps that really ran; of all planned ones if results ended the run.

    Args:
      ledger: The steps.
      mechanism: Under which they ran.
      delta: The delta of that epsilon; by default that of ``mechanism.target``.
      method: The `dpjax.accounting` method; by default that of ``mechanism.target``, or
        `dpjax.accounting.default_method`.

    Raises:
      Refused: They ran under another mechanism.
    """
    return mechanism.epsilon_of(counted(ledger, mechanism), *mechanism.stated(delta, method))


def counted(ledger: Ledger, mechanism: Plan) -> np.ndarray:
    """The multiplier of each step that counts: that ran, or was planned where results ended it."""
    # A number of steps that follows from released results is a function of all steps that could
    # have run. Their epsilon holds for it. The epsilon of only the steps that ran is not proved.
    steps = ran(ledger, mechanism)
    return _multipliers(mechanism)[: max(int(ledger.chosen), len(steps))]


def ran(ledger: Ledger, mechanism: Plan) -> np.ndarray:
    """The multiplier of each step that ran, ``[steps]``.

    Raises `Refused` if the ledger is of another mechanism: if their accounted facts differ, if the
    mechanism plans fewer steps than were allowed where results ended the run, or if the multipliers
    of its first steps differ from the ledger.
    """
    checks.instance("ledger", "ledger", ledger, Ledger, "Give state.ledger.")
    # Otherwise a state that ran with another sampler is accounted at the rate of this one. A run
    # folder compares mechanisms too, but only those on the disk.
    done = ledger.steps
    if done and not np.array_equal(ledger.accounted, _digest(mechanism)):
        raise Refused("ledger: the steps ran under another mechanism. Use init(state.params).")
    if mechanism.steps < ledger.chosen:
        raise Refused(
            f"ledger: results ended this run, so all {int(ledger.chosen)} steps count that were "
            f"allowed, and this mechanism plans {mechanism.steps}."
        )
    multipliers = _multipliers(mechanism)[:done]
    # A state that was put on a device holds its multipliers in float32.
    held = ledger.expand()
    if not np.array_equal(held, multipliers.astype(held.dtype)):
        raise Refused(
            f"ledger: the {done} steps here are not the first of {mechanism.steps} planned."
        )
    return multipliers


@functools.lru_cache(maxsize=128)
def _digest(mechanism: Plan) -> np.ndarray:
    """A hash of the accounted facts except the multipliers, in words that devices keep exactly."""
    content = hashlib.sha256(mechanism.accounted.encode()).digest()
    return np.frombuffer(content, np.uint32)[:_WORDS]


@functools.lru_cache(maxsize=128)
def _multipliers(mechanism: Plan) -> np.ndarray:
    """The multiplier of each planned step, cached because a run needs them before each step."""
    return mechanism.multipliers


class Account:
    """A budget that several runs on the same data share, such as the fits of a search.

    A copy is the same account, so `sklearn.base.clone` gives it to each clone. With a path, the
    charges are in a file, and other processes charge it too. Otherwise only this process can.

    Args:
      budget: The most that all runs together may spend.
      path: A JSON file of the charges; it is made if necessary.

    Privacy:
      The runs are composed as mechanisms that were fixed in advance, as a grid of settings and its
      folds are. The sum is not proved for a run whose noise or steps follow from results of
      earlier ones.

    Example:
      >>> import dpjax
      >>> mechanism = dpjax.Mechanism(
      ...     sampling=dpjax.sampling.poisson(examples=100, batch_size=10),
      ...     clipping=dpjax.clipping.flat(bound=1.0),
      ...     noise_multiplier=2.0,
      ...     steps=20,
      ... )
      >>> account = Account(Budget(epsilon=1.5, delta=1e-5, method="rdp"))
      >>> account.charge(mechanism)
      >>> print(account)
      charge    epsilon   in all
           1       1.23     1.23
      of a budget of 1.5 at delta=1e-05
      >>> account.charge(mechanism)
      Traceback (most recent call last):
      dpjax.checks.Refused: ledger.Account: ...
    """

    def __init__(self, budget: Budget, path: str | os.PathLike[str] | None = None) -> None:
        self.budget = checks.instance("ledger.Account", "budget", budget, Budget)
        self.path = None
        if path is not None:
            # Absolute, because other processes may have another working directory.
            self.path = pathlib.Path(path).absolute()
        self._charges: list[dict[str, Any]] = []
        self._process: int | None = os.getpid()

    @property
    def charges(self) -> list[dict[str, Any]]:
        """The description of each mechanism that was charged, as on a privacy card."""
        if self.path is not None and self.path.exists():
            return _files.read_json(self.path)["charges"]
        return self._charges

    @property
    def epsilon(self) -> float:
        """The epsilon of all charges together, at the delta of the budget."""
        return self._epsilon(self.charges)

    @property
    def mechanism(self) -> Mechanism:
        """All charges as one mechanism, which has no steps after theirs; at least one is needed.

        `dpjax.reports.card` makes its privacy card, from which ``dpjax verify`` recomputes epsilon.
        """
        return _together(self.charges)

    def charge(self, mechanism: Mechanism) -> None:
        """Records all steps of a mechanism, before they run.

        Raises:
          Refused: They exceed the budget; they protect another unit (an example or a person), or
            under another neighbour relation, than earlier charges; or this process cannot charge
            the account.
        """
        with self._locked():
            charges = [*self.charges, mechanism.facts]
            protected = {(facts["unit"], facts["neighbours"]) for facts in charges}
            if len(protected) > 1:
                raise Refused(f"ledger.Account: charges protect {sorted(protected)}; expected one.")
            cost = 0.0
            # An infinite budget admits every cost, so none is computed.
            if math.isfinite(self.budget.epsilon):
                cost = self._epsilon(charges)
            if cost > self.budget.epsilon:
                raise Refused(
                    f"ledger.Account: this run would bring epsilon to {upwards(cost)} at "
                    f"delta={upwards(self.budget.delta, '.6g')}; the budget is "
                    f"{self.budget.epsilon:g}. Runs charged before: {len(charges) - 1}."
                )
            self._charges = charges
            if self.path is not None:
                _files.replace(self.path, json.dumps({"charges": charges}, allow_nan=False))

    def _locked(self) -> contextlib.AbstractContextManager[Any]:
        """The account's lock: against other threads, and other processes if it has a path."""
        if self.path is not None:
            return _files.turn(self.path.with_name(f"{self.path.name}.lock"))
        if self._process == os.getpid():
            return _THREADS
        raise Refused(
            "ledger.Account: another process made this account, and its charges are not in a file. "
            "Make it with a path, or give a new account."
        )

    def _epsilon(self, charges: list[dict[str, Any]]) -> float:
        if not charges:
            return 0.0
        mechanism = _together(charges)
        # A planned mechanism is calibrated by the tightest method too.
        method = self.budget.method or accounting.tightest(mechanism.event, mechanism.relation)
        return mechanism.epsilon_of(mechanism.multipliers, self.budget.delta, method)

    def __str__(self) -> str:
        lines = [f"{'charge':<10}epsilon   in all"]
        charges = self.charges
        for number in range(1, len(charges) + 1):
            one = self._epsilon(charges[number - 1 : number])
            total = self._epsilon(charges[:number])
            lines.append(f"{number:>6}{three_digits(one):>11}{three_digits(total):>9}")
        lines.append(f"of a budget of {self.budget.epsilon:g} at delta={self.budget.delta:g}")
        return "\n".join(lines)

    def __deepcopy__(self, memo: Any) -> Account:
        return self

    def __getstate__(self) -> dict[str, Any]:
        # A copy that is read from a pickle was not made by a process that can count its charges.
        return {**vars(self), "_process": None}


def _together(charges: Sequence[Mapping[str, Any]]) -> Mechanism:
    """A mechanism without steps, which comes after all steps of the described mechanisms."""
    runs: list[Spent] = []
    for facts in charges:
        planned = sum(steps for _, steps in facts["multiplier_and_steps"])
        runs += Spent.of_run(facts, planned)
    # A delta has to be below one over the number of all units, and a fold has fewer.
    largest = max(runs, key=lambda run: run.sampling.examples)
    return Mechanism(
        sampling=largest.sampling,
        clipping=clipping.flat(1.0),
        noise_multiplier=1.0,
        steps=0,
        neighbours=charges[0]["neighbours"],
        before=runs,
        unit=largest.unit,
    )

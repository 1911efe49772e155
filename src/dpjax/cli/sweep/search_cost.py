# SPDX-License-Identifier: Apache-2.0
"""The privacy cost of a search: of one run, of all runs, or of the best of a random number.

The cost of the best run is proved only for RDP.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import dp_accounting

from dpjax import accounting, mechanism, training
from dpjax._files import read_json
from dpjax._rounding import three_digits
from dpjax.cli.report.load_run import protects


class Price(NamedTuple):
    """An epsilon, the runs that it covers, when it applies, and its accountant."""

    what: str
    epsilon: float
    holds: str
    method: str

    def __str__(self) -> str:
        epsilon = f"epsilon {three_digits(self.epsilon)}"
        return f"{epsilon:<16}{self.what}, by {self.method.upper()}: {self.holds}"


class Spent(NamedTuple):
    """The JSON description of a run's mechanism, and how many of its steps were released."""

    mechanism: Mapping[str, Any]
    steps: int

    @property
    def event(self) -> dp_accounting.DpEvent:
        """The event of these steps and of earlier runs."""
        # An infinite bound limits no gradient, so no noise protects the sum.
        if self.steps and math.inf in map(float, self.mechanism["clipping"]["bounds"]):
            return dp_accounting.NonPrivateDpEvent()
        runs = mechanism.Spent.of_run(self.mechanism, self.steps)
        return accounting.compose(*(run.event for run in runs))


def spent_in(folder: pathlib.Path) -> Spent:
    """The cost of a run, finished or not."""
    described = read_json(folder / "run.json")["mechanism"]
    # The last entry is of this run, and the others of the runs before it.
    return Spent(described, training.earlier(folder)[-1].steps)


def prices(
    runs: Sequence[Spent], delta: float, number: tuple[str, float] | None = None
) -> list[Price]:
    """The costs of a search with these runs: of one run, of all, and of the best one.

    The best one has a price only if the number of runs was drawn from ``number``, a distribution
    and its mean. This price assumes that each run that could have been drawn costs as much as one
    of ``runs``.
    """
    # Costs add only if all runs protect the same unit under the same neighbouring relation.
    protected = {protects(run.mechanism) for run in runs}
    if len(protected) > 1:
        raise ValueError(f"costs do not add: they protect {' and '.join(sorted(protected))}.")
    relation = runs[0].mechanism["neighbours"]

    def cost(event: dp_accounting.DpEvent) -> tuple[float, str]:
        """Epsilon, and the method that proves it."""
        method = accounting.tightest(event, relation)
        return accounting.epsilon(event, delta, method, relation), method

    # Most runs have equal events. Each is accounted once, because accounting takes seconds. Texts
    # tell events apart, because events have no hash.
    different_events = list({repr(run.event): run.event for run in runs}.values())
    # The search may keep any run, so "one run" is the most expensive one.
    epsilon_of_one, method_of_one = max(cost(event) for event in different_events)
    epsilon_of_all, method_of_all = cost(accounting.compose(*(run.event for run in runs)))
    holds = "right only if its settings were fixed without these data"
    result = [Price("one run alone", epsilon_of_one, holds, method_of_one)]
    holds = "whichever is kept, and if all of them are published"
    result.append(Price("all runs together", epsilon_of_all, holds, method_of_all))
    if number is not None:
        name, mean = number
        best = accounting.select_best(
            different_events, delta, runs=mean, distribution=name, neighbours=relation
        ).epsilon_best
        holds = "if that run alone is published, and how many ran stays secret"
        covered = f"the best of a {name} number, {mean:g} on average"
        result.append(Price(covered, best, holds, "rdp"))
    return result

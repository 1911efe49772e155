# SPDX-License-Identifier: Apache-2.0
"""The privacy cost of a search: of one run, of all runs, or of the best of a random number.

The last also pays for the settings that could have been drawn, by RDP, which alone has a proof.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import dp_accounting
from absl import app, flags

from dpjax import accounting, training
from dpjax._files import read_json
from dpjax.accounting.rounding import three_digits
from dpjax.cli.sweep.search_space import Candidates, Range, every, words
from dpjax.cli.train import build, inputs
from dpjax.cli.train.command import load
from dpjax.mechanism import Mechanism
from dpjax.mechanism.card import protects, spent_of

Settings = dict[str, str]


class Price(NamedTuple):
    """An epsilon, if it is known, what it is the cost of, when it applies, and its accountant."""

    what: str
    epsilon: float | None
    holds: str
    method: str

    def __str__(self) -> str:
        epsilon = self.epsilon
        known = "not known" if epsilon is None else f"epsilon {three_digits(epsilon)}"
        return f"{known:<16}{self.what}, by {self.method.upper()}: {self.holds}"


class Spent(NamedTuple):
    """The described mechanism of a run, and how many of its steps were released."""

    mechanism: Mapping[str, Any]
    steps: int

    @property
    def event(self) -> dp_accounting.DpEvent:
        """The event of these steps, and of what came before them."""
        if self.steps and math.inf in map(float, self.mechanism["clipping"]["bounds"]):
            return dp_accounting.NonPrivateDpEvent()
        return accounting.compose(*(run.event for run in spent_of(self.mechanism, self.steps)))


def spent_in(folder: pathlib.Path) -> Spent:
    """What a run has spent, finished or not."""
    mechanism = read_json(folder / "run.json")["mechanism"]
    return Spent(mechanism, training.earlier(folder)[-1].steps)


def prices(
    runs: Sequence[Spent],
    delta: float,
    number: tuple[str, float] | None = None,
    possible: Sequence[Mechanism] = (),
    unknown: str = "",
) -> list[Price]:
    """The costs of a search; ``unknown`` says why the ``possible`` mechanisms are not known."""
    described = [run.mechanism for run in runs] + [mechanism.facts for mechanism in possible]
    # A relation is proved for all runs together or not at all.
    if len(protected := {protects(mechanism) for mechanism in described}) > 1:
        raise ValueError(f"costs do not add: they protect {' and '.join(sorted(protected))}.")
    relation = described[0]["neighbours"]

    def cost(event: dp_accounting.DpEvent) -> tuple[float, str]:
        method = accounting.tightest(event, relation)
        return accounting.epsilon(event, delta, method, relation), method

    kinds = _different(run.event for run in runs)
    one, by_one = max(cost(event) for event in kinds)
    every_run, by_every = cost(accounting.compose(*(run.event for run in runs)))
    holds = "right only if its settings were fixed without these data"
    lines = [Price("one run alone", one, holds, by_one)]
    holds = "whichever is kept, and if all of them are published"
    lines.append(Price("all runs together", every_run, holds, by_every))
    if number is not None:
        (name, mean), best, holds = number, None, unknown
        if not unknown:
            by = {"runs": mean, "distribution": name, "neighbours": relation}
            drawable = _different([*kinds, *(mechanism.event for mechanism in possible)])
            best = accounting.select_best(drawable, delta, **by).epsilon_best
            holds = "if that run alone is published, and how many ran stays secret"
        lines.append(Price(f"the best of a {name} number, {mean:g} on average", best, holds, "rdp"))
    return lines


def _different(events: Iterable[dp_accounting.DpEvent]) -> list[dp_accounting.DpEvent]:
    return list({repr(event): event for event in events}.values())


class Recorded:
    """Parsed flags that note the names of the flags that are read; they have no other member."""

    def __init__(self, given: flags.FlagValues) -> None:
        # A preset sets flags that are read.
        self._given, self.names_read = given, {"preset"}

    def __getitem__(self, name: str) -> Any:
        self.names_read.add(name)
        return self._given[name]

    def __getattr__(self, name: str) -> Any:
        return self[name].value


def possible_mechanisms(
    candidates: Candidates, parse: Callable[[Settings], flags.FlagValues]
) -> tuple[list[Mechanism], str]:
    """The mechanisms of all runs of `dpjax train` that could be drawn, or why one is not known."""
    # Each is built, while `Recorded` notes the flags that it reads: no list says which matter.
    ranges = {name: span for name, span in candidates.items() if isinstance(span, Range)}
    # One value stands for a range, which is refused below if a mechanism reads it.
    values = {**candidates, **{name: [span.text(span.high)] for name, span in ranges.items()}}
    mechanisms: list[tuple[Settings, Mechanism | None]] = []
    for settings in every(values):
        if any(read.items() <= settings.items() for read, _ in mechanisms):
            continue
        try:
            given: Any = Recorded(parse(settings))  # what reads flags takes them
        except flags.Error as error:
            return [], f"{words(settings)} is refused: {error}"
        try:
            dataset = load(given)
            size = dataset.units
            asked = inputs.build_normalization(given, size)
            queries = () if asked is None else asked.multipliers
            mechanism = build.build_mechanism(given, size, queries, dataset.owners)
        except (ValueError, app.UsageError):  # such a run is refused, and costs nothing
            mechanism = None
        read = {name: value for name, value in settings.items() if name in given.names_read}
        mechanisms.append((read, mechanism))
        # Noise is in units of the bound, so a finite bound changes no event.
        if unlisted := sorted(ranges.keys() & read.keys() - {"bound"}):
            return [], f"a cost depends on {', '.join(unlisted)}, which has no list of values"
    known = [mechanism for _, mechanism in mechanisms if mechanism is not None]
    return known, "" if known else f"{words(every(values)[0])} and the others are refused"

# SPDX-License-Identifier: Apache-2.0
"""The privacy cost of a search: of one run, of all runs, or of the best of a random number.

Events are rebuilt from the privacy cards of finished runs.  An unfinished run has no card; its
spending comes from its log, its checkpoints and its queries.  A search with a random number of
runs also pays for the settings that it could have drawn: `possible_runs` builds them.  Each price
is by the tightest proven method, except that of a random number of runs, for which only RDP has a
proof.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import dp_accounting
import numpy as np

from dpjax import accounting, training
from dpjax._files import read_json
from dpjax.accounting.rounding import upwards
from dpjax.cli.sweep import search_space
from dpjax.cli.train.inputs import MOMENTS
from dpjax.mechanism import Mechanism
from dpjax.mechanism.card import protects, spent_of

Card = dict[str, Any]


class Price(NamedTuple):
    """An epsilon, if it is known, what it is the cost of, when it applies, and its accountant."""

    what: str
    epsilon: float | None
    holds: str
    method: str

    def __str__(self) -> str:
        epsilon = "not known"
        if self.epsilon is not None:
            epsilon = f"epsilon {upwards(self.epsilon, '.3f')}"
        return f"{epsilon:<16}{self.what}, by {self.method.upper()}: {self.holds}"


class Unfinished(NamedTuple):
    """What an unfinished run has spent, and whose data that protects; None if no file says it."""

    event: dp_accounting.DpEvent
    protects: str | None = None


def card_of(folder: pathlib.Path) -> Card:
    """The privacy card of a finished run."""
    path = folder / "privacy.json"
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path}: expected the privacy card of a run that has finished ({error}). The binary "
            "must leave one in --out, as dpjax train does; dpjax.reports.card makes it."
        ) from error


def spent_so_far(folder: pathlib.Path) -> Unfinished:
    """What an unfinished run has spent; a run that never started has spent nothing."""
    path, moments = folder / "run.json", folder / MOMENTS
    if not path.exists():
        if not moments.exists():
            return Unfinished(dp_accounting.NoOpDpEvent())
        # Stopped after its queries and before its first step, when no file described the run yet.
        with np.load(moments) as kept:
            queries = map(accounting.gaussian, kept["multipliers"].tolist())
            return Unfinished(accounting.compose(*queries))
    mechanism = read_json(path)["mechanism"]
    steps = training.earlier(folder)[-1].steps
    return Unfinished(event_of(mechanism, steps), protects(mechanism))


def event_of(mechanism: Mapping[str, Any], steps: int) -> dp_accounting.DpEvent:
    """The event of the first steps of a described mechanism, and of what came before them."""
    if steps and math.inf in map(float, mechanism["clipping"]["bounds"]):
        return dp_accounting.NonPrivateDpEvent()
    return accounting.compose(*(run.event for run in spent_of(mechanism, steps)))


def prices(
    cards: Sequence[Card],
    others: Sequence[Unfinished],
    number: tuple[str, float] | None,
    uncovered: str,
    possible: Sequence[Mechanism] = (),
    different: str = "",
) -> tuple[list[Price], float, str]:
    """The costs of a search, with their delta and their neighbour relation.

    Args:
      cards: The cards of finished runs.
      others: What the other runs have spent.
      number: The distribution and mean of the number of runs, if it was drawn.
      uncovered: Why the cost of some possible run is not known, or an empty text.
      possible: Mechanisms of runs that could have been drawn.
      different: Why the costs of these runs do not add, or an empty text.
    """
    # An unfinished run counts too: a relation is proved for all runs together or not at all.
    of_cards = (protects(card["mechanism"]) for card in cards)
    protected = {*of_cards, *(other.protects for other in others if other.protects)}
    if len(protected) > 1:
        raise ValueError(
            "The costs of these runs do not add: the runs, finished or not, protect "
            f"{' and '.join(sorted(protected))}. "
            "Usually --sampling was searched; make a search of each."
        )
    delta, relation = min(card["delta"] for card in cards), cards[0]["mechanism"]["neighbours"]
    spent = [event_of(card["mechanism"], card["steps"]) for card in cards]
    kinds = _different(spent)

    def cost(event: dp_accounting.DpEvent) -> tuple[float, str]:
        method = accounting.tightest(event, relation)
        return accounting.epsilon(event, delta, method, relation), method

    one, by_one = max(cost(event) for event in kinds)
    every, by_every = cost(accounting.compose(*spent, *(other.event for other in others)))
    alone = "right only if its settings were fixed without these data"
    together = "whichever is kept, and if all of them are published"
    if different:
        every, together, uncovered = None, f"their costs do not add: {different}", different
    found = [
        Price("one run alone", one, alone, by_one),
        Price("all runs together", every, together, by_every),
    ]
    if any(protects(mechanism.facts) not in protected for mechanism in possible):
        uncovered = "settings that were not run protect other neighbours"
    if number is not None:
        (name, mean), best, holds = number, None, uncovered
        if not uncovered:
            by = {"runs": mean, "distribution": name, "neighbours": relation}
            drawable = _different([*kinds, *(mechanism.event for mechanism in possible)])
            best = accounting.select_best(drawable, delta, **by).epsilon_best
            holds = "if that run alone is published, and how many ran stays secret"
        what = f"the best of a {name} number, {mean:g} on average"
        found.append(Price(what, best, holds, "rdp"))
    return found, delta, relation


def _different(events: Iterable[dp_accounting.DpEvent]) -> list[dp_accounting.DpEvent]:
    return list({repr(event): event for event in events}.values())


def uncovered(
    candidates: search_space.Candidates, done: Iterable[search_space.Trial], free: Collection[str]
) -> str:
    """Why the cards of these runs do not bound the cost of every run that could be drawn.

    A flag in ``free`` changes no cost, except for an infinite bound.  Of the other flags every
    combination must have run.
    """
    dear = {
        name: values
        for name, values in candidates.items()
        if name not in free or (isinstance(values, list) and any(map(_infinite, values)))
    }
    tried = {search_space.words({name: trial.settings[name] for name in dear}) for trial in done}
    ranges = any(isinstance(values, search_space.Range) for values in dear.values())
    if not ranges and tried.issuperset(map(search_space.words, search_space.every(dear))):
        return ""
    return (
        f"settings of {', '.join(dear)} that were not run may cost more; --free names flags that "
        "change no cost"
    )


def _infinite(value: str) -> bool:
    try:
        return math.isinf(float(value))  # also 1e999
    except ValueError:
        return False

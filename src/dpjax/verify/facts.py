# SPDX-License-Identifier: Apache-2.0
"""The facts of a privacy card as dataclasses, each read strictly and bounded by itself.

What is not read is not checked, so a card has exactly these fields. `dpjax.mechanism.card` and
`dpjax.reports.card` say what they mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated, Any, get_type_hints

FORMAT = 4
LARGEST = 10**8
"""Steps of one multiplier. More would take minutes, and no run has had them."""
MOST_LEVELS = 256
BOUNDS = ("rdp", "pld", "rdp-classic")
ESTIMATES = ("gdp",)
# From the weakest: what is proved for one of them also holds for the later ones.
NEIGHBOURS = ("add-or-remove", "zero-out", "replace-one")

Reader = Callable[[Any, str], Any]


class Unreadable(Exception):
    """The card cannot be checked, with the reason in a sentence."""


def refused(where: str, value: Any, expected: str) -> Unreadable:
    """The error for a value that no such field has."""
    return Unreadable(f"{where} is {value!r:.80}; expected {expected}.")


def number(least: float = 0.0, most: float = math.inf, *, above: bool = False) -> Reader:
    """Reads a number within these limits; NaN is within none, and "inf" is infinity."""

    def read(value: Any, where: str) -> float:
        given = math.inf if value == "inf" else value
        is_number = type(given) is float or (type(given) is int and abs(given) < 2**1000)
        if not is_number or not least <= given <= most or (above and given == least):
            limit = "" if most == math.inf else f", at most {most:g}"
            raise refused(where, value, f"a number {'above' if above else 'from'} {least:g}{limit}")
        return float(given)

    return read


def whole(least: int = 0, most: int = 2**63) -> Reader:
    """Reads a whole number within these limits; true, which Python takes for 1, is none."""

    def read(value: Any, where: str) -> int:
        if type(value) is not int or not least <= value <= most:
            raise refused(where, value, f"a whole number from {least} to {most:,}")
        return value

    return read


def one_of(*choices: Any) -> Reader:
    """Reads one of a few values; 1 is not true."""

    def read(value: Any, where: str) -> Any:
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            raise refused(where, value, f"one of {', '.join(map(repr, choices))}")
        return value

    return read


def text(value: Any, where: str) -> str:
    """Reads words."""
    if not isinstance(value, str):
        raise refused(where, value, "a text")
    return value


def optional(reader: Reader) -> Reader:
    """Reads null, or what the reader reads."""
    return lambda value, where: None if value is None else reader(value, where)


def rows(*readers: Reader, least: int = 0) -> Reader:
    """Reads a list, of tuples if there are several readers."""

    def row(value: Any, where: str) -> Any:
        if len(readers) == 1:
            return readers[0](value, where)
        if not isinstance(value, list) or len(value) != len(readers):
            raise refused(where, value, f"{len(readers)} values")
        return tuple(reader(entry, where) for reader, entry in zip(readers, value, strict=True))

    def read(value: Any, where: str) -> list[Any]:
        if not isinstance(value, list) or len(value) < least:
            raise refused(where, value, f"a list of {least} or more")
        return [row(entry, f"{where}[{place}]") for place, entry in enumerate(value)]

    return read


def fields(readers: Mapping[str, Reader], value: Any, where: str) -> dict[str, Any]:
    """The fields of a JSON object that has exactly these."""
    given = set(value if isinstance(value, dict) else ())
    unlike = [f"{name} is missing" for name in sorted(readers.keys() - given)]
    unlike += [f"{name} is unknown" for name in sorted(given - readers.keys())]
    if unlike:
        raise Unreadable(f"{where} is not of format {FORMAT}: {', '.join(unlike)}.")
    return {name: reader(value[name], f"{where}.{name}") for name, reader in readers.items()}


def record(kind: Any) -> Reader:
    """Reads an object as a dataclass, whose annotations hold the readers of its fields."""

    def read(value: Any, where: str) -> Any:
        hints = get_type_hints(kind, include_extras=True)
        readers = {name: hint.__metadata__[0] for name, hint in hints.items()}
        return kind(**fields(readers, value, where))

    return read


# Of a strategy of correlated noise, by its kind: `dpjax.strategies.Strategy.facts` documents them.
ANY = number(-math.inf)
STRATEGY = {"kind": text, "name": text, "steps": whole(1, LARGEST), "sensitivity": number()}
KINDS: dict[str, dict[str, Reader]] = {
    "toeplitz": {"values": rows(ANY, least=1), "normalized": one_of(True, False)},
    "inverse_toeplitz": {"values": rows(ANY, least=1)},
    "buffered": {"scales": rows(ANY), "decays": rows(ANY)},
    "tree": {},
}


def strategy(value: Any, where: str) -> SimpleNamespace:
    """Reads a strategy of any kind."""
    kind = value.get("kind") if isinstance(value, dict) else value
    own = KINDS[one_of(*KINDS)(kind, f"{where}.kind")]
    return SimpleNamespace(**fields({**STRATEGY, **own}, value, where))


def bounds(value: Any, where: str) -> list[float]:
    """Reads the bounds of a rule: one for each group, beside facts that no verdict depends on."""
    given = value if isinstance(value, dict) else {}
    found = rows(number(), least=1)(given.get("bounds"), f"{where}.bounds")
    if not isinstance(groups := given.get("groups"), list) or len(groups) != len(found):
        raise refused(f"{where}.groups", groups, f"{len(found)}, one for each bound")
    return found


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How batches are drawn; `dpjax.sampling.events.stated` documents the last four."""

    name: Annotated[str, text]
    examples: Annotated[int, whole(1)]
    batch_size: Annotated[float, number(above=True)]
    neighbours: Annotated[str, one_of(*NEIGHBOURS)]
    event: Annotated[str, one_of("poisson", "subset", "none")]
    rates: Annotated[list[tuple[float, int]], rows(number(0, 1), whole(1), least=1)]
    cycle: Annotated[int, whole(1)]
    place: Annotated[str | None, one_of(None, "any", "same", "random", "coin")]


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run costs."""

    unit: Annotated[str, one_of("example", "client")]
    sampling: Annotated[Sampling, record(Sampling)]
    multiplier_and_steps: Annotated[list[tuple[float, int]], rows(number(), whole(1, LARGEST))]
    preparation: Annotated[list[float], rows(number())]
    projections: Annotated[int | None, optional(whole(1))]
    noise: Annotated[Any, optional(strategy)]


@dataclass(frozen=True, kw_only=True)
class Earlier(Run):
    """An earlier run, which this one continues."""

    randomness: Annotated[str, one_of("fresh", "supplied")]


@dataclass(frozen=True, kw_only=True)
class Adaptive:
    """The quantile that adapted bounds follow; its count is part of the steps' multipliers."""

    target: Annotated[float, number(0, 1)]
    rate: Annotated[float, number(above=True)]
    count_multiplier: Annotated[float, number()]
    geometric: Annotated[bool, one_of(True, False)]


@dataclass(frozen=True, kw_only=True)
class Mechanism(Run):
    """The plan."""

    format: Annotated[int, one_of(FORMAT)]
    neighbours: Annotated[str, one_of(*NEIGHBOURS)]
    multipliers_by_group: Annotated[list[float] | None, optional(rows(number()))]
    clipping: Annotated[list[float], bounds]
    adaptive: Annotated[Adaptive | None, optional(record(Adaptive))]
    before: Annotated[list[Earlier], rows(record(Earlier))]


@dataclass(frozen=True, kw_only=True)
class Levels:
    """To how many geometric levels, from the smallest on, multipliers of sampled steps round."""

    levels: Annotated[int, whole(1, MOST_LEVELS)]
    smallest: Annotated[float, number(above=True)]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """An epsilon, and whether the card calls it proven."""

    value: Annotated[float, number()]
    proven: Annotated[bool, one_of(True, False)]


def claims(value: Any, where: str) -> dict[str, Claim]:
    """Reads the epsilons by their methods; those of bounds alone are called proven."""
    claim = record(Claim)
    given = value if isinstance(value, dict) else {where: value}
    for name in given:
        one_of(*BOUNDS, *ESTIMATES)(name, f"a method of {where}")
    found = {name: claim(each, f"{where}.{name}") for name, each in given.items()}
    for name, each in found.items():
        one_of(name in BOUNDS)(each.proven, f"{where}.{name}.proven")
    return found


@dataclass(frozen=True, kw_only=True)
class Card:
    """The plan, how many of its steps count, and what is claimed for them."""

    mechanism: Annotated[Mechanism, record(Mechanism)]
    steps: Annotated[int, whole()]
    claim: Annotated[str, text]
    delta: Annotated[float, number(0, 1, above=True)]
    levels: Annotated[Levels | None, optional(record(Levels))]
    epsilon: Annotated[dict[str, Claim], claims]
    not_private: Annotated[str | None, optional(text)]
    randomness: Annotated[str, one_of("fresh", "supplied")]
    versions: Annotated[Any, lambda value, where: value]


def card_of(value: dict[str, Any]) -> Card:
    """The card that a JSON object is."""
    mechanism = value.get("mechanism")
    version = mechanism.get("format") if isinstance(mechanism, dict) else FORMAT
    if version != FORMAT:
        raise Unreadable(
            f"the card is of format {version!r}, and this file reads format {FORMAT}. "
            "Verify it with the version of dpjax that wrote it."
        )
    card = record(Card)(value, "the card")
    planned = sum(steps for _, steps in card.mechanism.multiplier_and_steps)
    if card.steps > planned:
        raise refused("the card.steps", card.steps, f"at most the planned {planned:,}")
    runs = (card.mechanism, *card.mechanism.before)
    proved = max(NEIGHBOURS.index(run.sampling.neighbours) for run in runs)
    if NEIGHBOURS.index(card.mechanism.neighbours) < proved:
        raise Unreadable(
            f"the card is for {card.mechanism.neighbours} neighbours, and its batches are proved "
            f"for {NEIGHBOURS[proved]} alone."
        )
    return card

# SPDX-License-Identifier: Apache-2.0
"""The facts of a privacy card: exactly these fields, as what is not read is not checked.

`dpjax.mechanism.card` and `dpjax.reports.card` say what they mean.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

FORMAT = 4
MOST_STEPS = 10**8  # of one multiplier: more would take minutes, and no run has had them
MOST_LEVELS = 256
BOUNDS = ("rdp", "pld", "rdp-classic")  # of the methods of a card, the proven ones
# From the weakest: what is proved for one of them also holds for the later ones.
NEIGHBOURS = ("add-or-remove", "zero-out", "replace-one")


class Limits(NamedTuple):
    """Between which values a number is."""

    least: float = 0
    most: float = math.inf
    above: bool = False  # the least


Number = Annotated[float, Limits()]
Positive = Annotated[float, Limits(above=True)]
Rate = Annotated[float, Limits(0, 1)]
Count = Annotated[int, Limits(1, 2**63)]
Steps = Annotated[int, Limits(1, MOST_STEPS)]
Neighbours = Literal["add-or-remove", "zero-out", "replace-one"]
Randomness = Literal["fresh", "supplied"]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How batches are drawn; `dpjax.sampling.stated` documents the last four."""

    name: str
    examples: Count
    batch_size: Positive
    neighbours: Neighbours
    event: Literal["poisson", "subset", "allocation", "none"]
    rates: list[tuple[Rate, Count]]
    cycle: Count
    place: Literal[None, "any", "same", "random", "coin"]


class Strategy(SimpleNamespace):
    """A strategy of correlated noise; its fields depend on its ``kind``, see `KINDS`."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run costs."""

    unit: str
    sampling: Sampling
    multiplier_and_steps: list[tuple[Number, Steps]]
    preparation: list[Number]
    projections: Count | None
    noise: Strategy | None


@dataclass(frozen=True, kw_only=True)
class Earlier(Run):
    """An earlier run, which this one continues."""

    randomness: Randomness


@dataclass(frozen=True, kw_only=True)
class Mechanism(Run):
    """The plan."""

    format: Literal[4]
    neighbours: Neighbours
    multipliers_by_group: list[Number] | None
    clipping: dict[str, Any]
    adaptive: Any  # the count that bounds follow is part of the steps' multipliers
    before: list[Earlier]


@dataclass(frozen=True, kw_only=True)
class Levels:
    """To how many geometric levels, from the smallest on, multipliers of sampled steps round."""

    levels: Annotated[int, Limits(1, MOST_LEVELS)]
    smallest: Positive


@dataclass(frozen=True, kw_only=True)
class Claim:
    """An epsilon, and whether the card calls it proven."""

    value: Number
    proven: Literal[True, False]


@dataclass(frozen=True, kw_only=True)
class Card:
    """The plan, how many of its steps count, and what is claimed for them."""

    mechanism: Mechanism
    steps: Annotated[int, Limits(0, 2**63)]
    claim: str
    delta: Annotated[float, Limits(0, 1, above=True)]
    levels: Levels | None
    epsilon: dict[Literal["rdp", "pld", "rdp-classic", "gdp"], Claim]
    true_positive_rates: list[tuple[Positive, Rate]]
    not_private: str | None
    randomness: Randomness
    versions: Any


# Beside name, kind, steps and sensitivity: `dpjax.strategies.Strategy.facts` documents them.
_REALS = list[Annotated[float, Limits(-math.inf)]]
KINDS: dict[str, dict[str, Any]] = {
    "toeplitz": {"values": _REALS, "normalized": Literal[True, False]},
    "inverse_toeplitz": {"values": _REALS},
    "buffered": {"scales": _REALS, "decays": _REALS},
    "tree": {},
}


class Unreadable(Exception):
    """The card cannot be checked, with the reason in a sentence."""


def refused(where: str, value: Any, expected: str) -> Unreadable:
    """The error for a value that no such field has."""
    return Unreadable(f"{where} is {value!r:.80}; expected {expected}.")


def read(hint: Any, value: Any, where: str) -> Any:
    """The value of a field with this type hint."""
    origin, args = get_origin(hint), get_args(hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return hint(**fields(get_type_hints(hint, include_extras=True), value, where))
    if hint is str and not isinstance(value, str):
        raise refused(where, value, "a text")
    if origin is Annotated:
        kind, limits = args
        return number(kind, limits, value, where)
    if origin is Literal:
        return one_of(args, value, where)
    if origin in (Union, UnionType):
        return None if value is None else read(args[0], value, where)
    if origin is list or origin is tuple:
        if not isinstance(value, list) or (origin is tuple and len(value) != len(args)):
            raise refused(where, value, "a list" if origin is list else f"{len(args)} values")
        hints = args * len(value) if origin is list else args
        places = enumerate(zip(hints, value, strict=True))
        return origin(read(of, entry, f"{where}[{place}]") for place, (of, entry) in places)
    if origin is dict:
        if not isinstance(value, dict):
            raise refused(where, value, "an object")
        of_name, of_value = args
        pairs = value.items()
        return {read(of_name, k, where): read(of_value, v, f"{where}.{k}") for k, v in pairs}
    return strategy(value, where) if hint is Strategy else value


def number(kind: type, limits: Limits, value: Any, where: str) -> Any:
    """A number within limits; NaN is within none, "inf" is infinity, and true is no number."""
    least, most, above = limits
    given = math.inf if value == "inf" else value
    is_number = type(given) is int if kind is int else type(given) in (int, float)
    if not is_number or not least <= given <= most or (above and given == least):
        of, start = "whole number" if kind is int else "number", "above" if above else "from"
        end = "" if most == math.inf else f", at most {most:,}"
        raise refused(where, value, f"a {of} {start} {least:g}{end}")
    return kind(given)


def one_of(choices: tuple[Any, ...], value: Any, where: str) -> Any:
    """One of a few values; 1 is not true."""
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise refused(where, value, f"one of {', '.join(map(repr, choices))}")
    return value


def fields(hints: Mapping[str, Any], value: Any, where: str) -> dict[str, Any]:
    """The fields of a JSON object that has exactly these."""
    given = set(value if isinstance(value, dict) else ())
    unlike = [f"{name} is missing" for name in sorted(hints.keys() - given)]
    unlike += [f"{name} is unknown" for name in sorted(given - hints.keys())]
    if unlike:
        raise Unreadable(f"{where} is not of format {FORMAT}: {', '.join(unlike)}.")
    return {name: read(hint, value[name], f"{where}.{name}") for name, hint in hints.items()}


def strategy(value: Any, where: str) -> Strategy:
    """A strategy of any kind."""
    kind = value.get("kind") if isinstance(value, dict) else value
    of_kind = KINDS[one_of(tuple(KINDS), kind, f"{where}.kind")]
    usual = {"kind": str, "name": str, "steps": Steps, "sensitivity": Number}
    return Strategy(**fields({**usual, **of_kind}, value, where))


def card_of(value: dict[str, Any]) -> Card:
    """The card that a JSON object is."""
    mechanism = value.get("mechanism")
    version = mechanism.get("format") if isinstance(mechanism, dict) else FORMAT
    if version != FORMAT:
        raise Unreadable(
            f"the card is of format {version!r}; expected {FORMAT}. Use the dpjax that wrote it."
        )
    card = read(Card, value, "the card")
    for name, claim in card.epsilon.items():
        one_of((name in BOUNDS,), claim.proven, f"the card.epsilon.{name}.proven")
    planned = sum(steps for _, steps in card.mechanism.multiplier_and_steps)
    if card.steps > planned:
        raise refused("the card.steps", card.steps, f"at most the planned {planned:,}")
    runs = (card.mechanism, *card.mechanism.before)
    for run in runs:
        if not run.unit.isidentifier():  # it is printed
            raise refused("the card.mechanism.unit", run.unit, "one word")
    proved = max(NEIGHBOURS.index(run.sampling.neighbours) for run in runs)
    if NEIGHBOURS.index(card.mechanism.neighbours) < proved:
        raise Unreadable(
            f"the card is for {card.mechanism.neighbours}; its batches are proved for "
            f"{NEIGHBOURS[proved]} alone."
        )
    return card

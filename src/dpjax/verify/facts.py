# SPDX-License-Identifier: Apache-2.0
"""The facts of a privacy card: exactly these fields, because a field that is not read is unchecked.

`dpjax.mechanism.card` and `dpjax.reports.card` document their meaning.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

FORMAT = 5
# The fields that a card of format 4 does not have.
SINCE_FORMAT_5 = {"format": 4, "sources": None, "parameters": None, "risk": None}
# The most steps with one multiplier: more take minutes, and no run has had them.
MOST_STEPS = 10**8
MOST_LEVELS = 256
# The proven methods of a card.
BOUNDS = ("rdp", "pld", "rdp-classic")
# The relations of neighbours, in this order: a proof for one of them also implies the later ones,
# with the sensitivity of these.
NEIGHBOURS = ("add-or-remove", "zero-out", "replace-one")


class Limits(NamedTuple):
    """The interval of a number; ``above`` excludes its least value."""

    least: float = 0
    most: float = math.inf
    above: bool = False


Number = Annotated[float, Limits()]
Positive = Annotated[float, Limits(above=True)]
Rate = Annotated[float, Limits(0, 1)]
Count = Annotated[int, Limits(1, 2**63)]
Steps = Annotated[int, Limits(1, MOST_STEPS)]
Reals = list[Annotated[float, Limits(-math.inf)]]
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


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A strategy of correlated noise; `dpjax.strategies.Strategy.facts` documents the fields."""

    kind: str
    name: str
    steps: Steps
    sensitivity: Number


@dataclass(frozen=True, kw_only=True)
class Toeplitz(Strategy):
    """Given coefficients of C."""

    values: Reals
    normalized: Literal[True, False]


@dataclass(frozen=True, kw_only=True)
class InverseToeplitz(Strategy):
    """Given coefficients of the inverse of C."""

    values: Reals


@dataclass(frozen=True, kw_only=True)
class Buffered(Strategy):
    """A Toeplitz matrix whose coefficients are sums of decaying powers."""

    scales: Reals
    decays: Reals


@dataclass(frozen=True, kw_only=True)
class Tree(Strategy):
    """A binary tree of sums."""


KINDS: dict[str, type[Strategy]] = {
    "toeplitz": Toeplitz,
    "inverse_toeplitz": InverseToeplitz,
    "buffered": Buffered,
    "tree": Tree,
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """The facts that determine the cost of a run."""

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
    adaptive: Any  # unread: the multipliers of the steps include the noisy count of a bound
    before: list[Earlier]


@dataclass(frozen=True, kw_only=True)
class Levels:
    """The geometric levels to which multipliers of sampled steps are rounded."""

    levels: Annotated[int, Limits(1, MOST_LEVELS)]
    smallest: Positive


@dataclass(frozen=True, kw_only=True)
class Claim:
    """An epsilon, and whether the card calls it proven."""

    value: Number
    proven: Literal[True, False]


@dataclass(frozen=True, kw_only=True)
class Risk:
    """The most true positives of an attack, at a rate of false ones, that noise was chosen for."""

    true_positive_rate: Rate
    false_positive_rate: Positive


@dataclass(frozen=True, kw_only=True)
class Card:
    """The plan, the number of its steps that ran, and the claims for these steps."""

    format: Literal[4, 5]
    sources: str | None
    parameters: str | None
    risk: Risk | None
    mechanism: Mechanism
    steps: Annotated[int, Limits(0, 2**63)]
    claim: str
    delta: Annotated[float, Limits(0, 1, above=True)]
    levels: Levels | None
    epsilon: dict[Literal["rdp", "pld", "rdp-classic", "gdp"], Claim]
    true_positive_rates: list[tuple[Positive, Rate]]
    not_private: str | None
    randomness: Randomness
    versions: dict[str, str]


class Unreadable(Exception):
    """The card cannot be checked, with the reason in a sentence."""


def refused(where: str, value: Any, expected: str) -> Unreadable:
    """The error for a value outside its field's type."""
    return Unreadable(f"{where} is {value!r:.80}; expected {expected}.")


def read(hint: Any, value: Any, where: str) -> Any:
    """Checks a value from JSON and converts it to the type of its hint; recursive.

    An object becomes a dataclass with exactly these fields, or a dictionary, and a list becomes a
    list or a tuple. Values of the hint ``Any`` are not checked. ``where`` names the field in an
    error.
    """
    # The hint list[int] has the origin list and the arguments (int,).
    origin = get_origin(hint)
    arguments = get_args(hint)
    if hint is Strategy:  # the fields depend on the kind
        hint = kind_of(value, where)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        hints = get_type_hints(hint, include_extras=True)
        return hint(**fields(hints, value, where))
    if hint is str and not isinstance(value, str):
        raise refused(where, value, "a text")
    if origin is Annotated:
        kind, limits = arguments
        return number(kind, limits, value, where)
    if origin is Literal:
        return one_of(arguments, value, where)
    if origin in (Union, UnionType):  # all unions here are with None
        return None if value is None else read(arguments[0], value, where)
    if origin is list:
        if not isinstance(value, list):
            raise refused(where, value, "a list")
        return entries(arguments * len(value), value, where)  # all entries have one hint
    if origin is tuple:
        if not isinstance(value, list) or len(value) != len(arguments):
            raise refused(where, value, f"{len(arguments)} values")
        return tuple(entries(arguments, value, where))
    if origin is dict:
        if not isinstance(value, dict):
            raise refused(where, value, "an object")
        name_hint, value_hint = arguments
        return {
            read(name_hint, name, where): read(value_hint, entry, f"{where}.{name}")
            for name, entry in value.items()
        }
    return value  # a string, or of the hint Any


def entries(hints: Sequence[Any], values: list[Any], where: str) -> list[Any]:
    """The entries of a list, each with its own type hint."""
    return [
        read(hint, entry, f"{where}[{place}]")
        for place, (hint, entry) in enumerate(zip(hints, values, strict=True))
    ]


def number(kind: type, limits: Limits, value: Any, where: str) -> Any:
    """A number within limits; "inf" is infinity. NaN and true are refused."""
    least, most, above = limits
    given = math.inf if value == "inf" else value
    types = (int,) if kind is int else (int, float)
    is_number = type(given) in types
    if not is_number or not least <= given <= most or (above and given == least):
        noun = "whole number" if kind is int else "number"
        start = "above" if above else "from"
        expected = f"a {noun} {start} {least:g}"
        if most < math.inf:
            expected += f", at most {most:,}"
        raise refused(where, value, expected)
    return kind(given)


def one_of(choices: tuple[Any, ...], value: Any, where: str) -> Any:
    """One of a few values, also of the same type: 1 is not true."""
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise refused(where, value, f"one of {', '.join(map(repr, choices))}")
    return value


def fields(hints: Mapping[str, Any], value: Any, where: str) -> dict[str, Any]:
    """The fields of a JSON object that has exactly these."""
    given = set(value) if isinstance(value, dict) else set()
    unlike = [f"{name} is missing" for name in sorted(hints.keys() - given)]
    unlike += [f"{name} is unknown" for name in sorted(given - hints.keys())]
    if unlike:
        raise Unreadable(f"{where} is not of format {FORMAT}: {', '.join(unlike)}.")
    return {name: read(hint, value[name], f"{where}.{name}") for name, hint in hints.items()}


def kind_of(value: Any, where: str) -> type[Strategy]:
    """The class of a strategy."""
    kind = value.get("kind") if isinstance(value, dict) else value
    return KINDS[one_of(tuple(KINDS), kind, f"{where}.kind")]


def card_of(value: dict[str, Any]) -> Card:
    """Reads a card from its JSON object, and checks that its fields agree."""
    mechanism = value.get("mechanism")
    version = value.get("format")
    if version is None and isinstance(mechanism, dict):
        version = mechanism.get("format")  # a card of format 4 has no other one
    # A value without any format is not a card: `read` raises, and names the missing fields.
    if version not in (None, 4, FORMAT):
        raise Unreadable(
            f"the card is of format {version!r}; expected 4 or {FORMAT}. Use the dpjax that wrote "
            "it."
        )
    if "format" not in value:
        value = SINCE_FORMAT_5 | value
    card = read(Card, value, "the card")
    for name, claim in card.epsilon.items():
        proven = name in BOUNDS  # a card must call exactly these methods proven
        one_of((proven,), claim.proven, f"the card.epsilon.{name}.proven")
    planned = sum(steps for _, steps in card.mechanism.multiplier_and_steps)
    if card.steps > planned:
        raise refused("the card.steps", card.steps, f"at most the planned {planned:,}")
    runs = (card.mechanism, *card.mechanism.before)
    for run in runs:
        if not run.unit.isidentifier():  # the verdicts print it
            raise refused("the card.mechanism.unit", run.unit, "one word")
    # The batches of each run are proved for its sampler's relation and for the later ones. All runs
    # together are proved for the last of these relations and for the later ones.
    last = max(NEIGHBOURS.index(run.sampling.neighbours) for run in runs)
    if NEIGHBOURS.index(card.mechanism.neighbours) < last:
        raise Unreadable(
            f"the card is for {card.mechanism.neighbours}; its batches are proved for "
            f"{NEIGHBOURS[last]} alone."
        )
    return card

# SPDX-License-Identifier: Apache-2.0
"""Reads a privacy card, recomputes its epsilon, and reports which claims hold.

A card is the ``privacy.json`` in the folder of a run. The ``run.json`` next to it, which can be
missing, holds the mechanism that the run recorded before its first step.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import pathlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from decimal import ROUND_CEILING, Decimal, localcontext
from typing import Any

import numpy as np
from absl import logging

from dpjax.verify._epsilon import EPSILONS, by_losses, by_rdp, most_true_positives
from dpjax.verify._matrices import require_hidden
from dpjax.verify.advisories import advisories_on
from dpjax.verify.facts import BOUNDS, Card, Unreadable, card_of
from dpjax.verify.parameters import digest
from dpjax.verify.steps import steps_of

# The relative distance of bounds that grids of orders and of losses give.
TOLERANCE = 0.005
# The largest relative excess of a claim over the recomputed epsilon.
LOOSE = 0.01
# dp-accounting cuts 1e-15 off the distribution of each different step.
SMALLEST_DELTA = 1e-12
_PARAMS = "--params="
_USAGE = """\
usage: dpjax verify RUN, with a run's folder or its privacy.json, or a folder of runs
       dpjax verify --params=FILE CARD

Recomputes the epsilon of each method on the card, and how many true positives a membership attack
can have, from the facts of the card, without dpjax. Compares the card's SHA-256 with that of the
parameters in FILE, by default the params.msgpack next to the card.
A line begins with what was checked and ends with the verdict. The headline, which is the smallest
bound on the card, comes first. In a folder of runs each run has its lines. An advisory names
a mistake of the dpjax that wrote the card, and what to do. The exit status is 0 if all claims hold,
and 1 if one does not, an advisory affects a card, or a card makes no claim, must not be published
or cannot be read."""


def main(words: Sequence[str] | None = None) -> int:
    """Prints a verdict for each claim of a card, or of several, and returns the exit status.

    ``words`` is the folder of a run, or a card, or a folder of runs, and options; by default the
    words of the command line.
    """
    if words is None:
        words = sys.argv[1:]
    params_files = [word.removeprefix(_PARAMS) for word in words if word.startswith(_PARAMS)]
    words = [word for word in words if not word.startswith(_PARAMS)]
    if list(words) in (["-h"], ["--help"]):
        print(_USAGE)
        return 0
    if len(words) != 1 or words[0].startswith("-"):
        print(_USAGE)
        return 2
    paths = cards_in(pathlib.Path(words[0]))
    if len(paths) == 1:
        return verified(paths[0], words[0], params_files)
    statuses = []
    for path in paths:
        print(f"{path.parent}:")
        statuses.append(verified(path, str(path.parent), params_files))
    return max(statuses)


def cards_in(path: pathlib.Path) -> list[pathlib.Path]:
    """The card that a path names, or the cards of the runs in a folder."""
    if not path.is_dir():
        return [path]
    card = path / "privacy.json"
    if card.exists():
        return [card]
    return sorted(path.glob("*/privacy.json")) or [card]


def verified(path: pathlib.Path, name: str, params_files: Sequence[str] = ()) -> int:
    """Prints a verdict for each claim of a card, and returns its exit status.

    ``name`` stands for the path in errors, and ``params_files`` are the paths in ``--params``.
    """
    logger = logging.get_absl_logger()
    level_before = logger.level
    logger.setLevel("CRITICAL")  # dp-accounting warns of Rényi orders whose series do not converge
    try:
        card = load(path)
        # Pairs: whether a part of the card supports a release, and a line to print.
        verdicts = [*findings(card), *parameters(card, path, params_files)]
    except Unreadable as reason:
        print(f"{name}: {reason}", file=sys.stderr)
        return 1
    finally:
        logger.setLevel(level_before)
    for _, line in verdicts:
        print(line)
    if not path.with_name("run.json").exists():
        print("no run.json lies beside the card: nothing confirms its unit and other facts")
    return int(not all(good for good, _ in verdicts))


def load(path: pathlib.Path) -> dict[str, Any]:
    """Reads a card, and raises if the ``run.json`` of its folder contradicts it."""
    card = parsed(path)
    run = path.with_name("run.json")
    if not run.exists():
        return card
    recorded = parsed(run)
    # A person who supplied a key may know the noise, so a card must not hide that it was supplied.
    # The reverse is harmless: a card that calls a fresh key supplied only promises less.
    if recorded.get("randomness") == "supplied" and card.get("randomness") != "supplied":
        raise Unreadable(
            "run.json states that the key was supplied, and the card beside it does not."
        )
    if recorded.get("mechanism") != card.get("mechanism"):
        raise Unreadable("the card describes another mechanism than run.json beside it.")
    return card


def parsed(path: pathlib.Path) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Unreadable(
            "no such file; expected a run's folder or card, or a folder of runs."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise Unreadable(f"{path.name} is not JSON ({error}).") from None
    if not isinstance(value, dict):
        raise Unreadable(f"{path.name} holds a {type(value).__name__}; expected a JSON object.")
    return value


def findings(facts: dict[str, Any]) -> Iterator[tuple[bool, str]]:
    """Yields whether each part of a card supports a release, and the verdict in words.

    ``facts`` is the card as `dpjax.reports.card` makes it.

    Raises:
      Unreadable: Its fields are of another format, or nothing is known for them.
    """
    try:
        card = card_of(facts)
        for run in (*card.mechanism.before, card.mechanism):
            require_hidden(run)
        yield from claims(card)
        yield from obstacles(card)
        yield from advisories_on(card)
    except (ArithmeticError, LookupError, MemoryError, ValueError) as error:
        # Each fact is possible by itself, but not together with the others.
        raise Unreadable(f"the card cannot be accounted ({error}).") from error


def parameters(
    facts: dict[str, Any], path: pathlib.Path, params_files: Sequence[str] = ()
) -> Iterator[tuple[bool, str]]:
    """Yields whether parameters have the digest of a card: by default the file next to it."""
    claimed = facts.get("parameters")
    paths = list(map(pathlib.Path, params_files))
    beside = path.with_name("params.msgpack")
    if not paths and claimed is not None and beside.exists():
        paths.append(beside)
    for file in paths:
        same = digest(file) == claimed
        verdict = "holds" if same else "DOES NOT HOLD"
        yield same, f"{'parameters':12} of {file.name} have the SHA-256 of the card: {verdict}"


def claims(card: Card) -> Iterator[tuple[bool, str]]:
    """Yields pairs for each claim of the card: whether it holds, and the verdict in words.

    The claims are the epsilons first, and then the limits of attacks.
    """
    claimed = {name: claim.value for name, claim in card.epsilon.items()}
    # The claims by proven methods. The other methods estimate.
    bounds = {name: value for name, value in claimed.items() if name in BOUNDS}
    if not bounds:
        yield False, f"promises nothing: the card claims no epsilon by {' or '.join(BOUNDS)}"
        return
    recomputed_epsilons, deltas = recomputed(card, bounds)
    # A proof by any accountant holds for every claim, so claims are compared with the smallest.
    smallest, best_method = min((value, name) for name, value in recomputed_epsilons.items())
    # The headline of a statement is the smallest bound, so it comes first.
    for name, value in sorted(bounds.items(), key=operator.itemgetter(1)):
        # A method without a recomputed epsilon gives no upper limit of its claim.
        by_method = recomputed_epsilons.get(name, math.inf)
        verdict = verdict_of(value, smallest, by_method, card.delta)
        yield (
            verdict == "holds",
            f"{name:12} claims epsilon {upwards(value)} for one {card.mechanism.unit} at "
            f"delta={upwards(card.delta, '.3g')}; recomputed {upwards(smallest)} by {best_method}, "
            f"the best accountant here: {verdict}",
        )
    for name in claimed.keys() - set(BOUNDS):
        yield (
            True,
            f"{name:12} estimates epsilon {upwards(claimed[name])}: not checked, and no bound",
        )
    yield from attacks(card, deltas)
    yield from risk(card, deltas)


def attacks(card: Card, deltas: np.ndarray) -> Iterator[tuple[bool, str]]:
    """Yields a verdict on the claimed rates of attacks, unless they claim nothing."""
    false_positives, true_positives = zip(*card.true_positive_rates, strict=True)
    if min(true_positives) == 1:
        return
    rates = [most_true_positives(deltas, rate) for rate in false_positives]
    sound = rates_hold(card, deltas)
    verdict = "holds" if sound else "DOES NOT HOLD"
    yield (
        sound,
        f"{'attacks':12} of {exactly(false_positives)} false positives claim at most "
        f"{percent(true_positives)} true ones; recomputed {percent(rates)}: {verdict}",
    )


def risk(card: Card, deltas: np.ndarray) -> Iterator[tuple[bool, str]]:
    """Yields a verdict on the rates of an attack that the noise was chosen for, if it was."""
    if card.risk is None:
        return
    most, wrong = dataclasses.astuple(card.risk)
    reached = most_true_positives(deltas, wrong)
    sound = most >= reached * (1 - TOLERANCE)
    verdict = "holds" if sound else "DOES NOT HOLD"
    yield (
        sound,
        f"{'risk':12} of at most {percent([most])} true positives at {exactly([wrong])} false "
        f"ones; recomputed {percent([reached])}: {verdict}",
    )


def verdict_of(claimed: float, smallest: float, largest: float, delta: float) -> str:
    """The verdict on a claimed epsilon, between the best and the claim's own accountant."""
    if math.isinf(claimed):
        return "promises nothing"
    if claimed < smallest * (1 - TOLERANCE):
        if delta < SMALLEST_DELTA:
            return "cannot be confirmed at so small a delta"
        return "DOES NOT HOLD"
    if claimed > largest * (1 + LOOSE):
        # No honest card claims far more than its facts cost: they have another delta or noise.
        return f"IS OF OTHER FACTS, which would cost at most {upwards(largest)}"
    return "holds"


def rates_hold(card: Card, deltas: np.ndarray) -> bool:
    """Whether attacks have at most the true positives that the card claims, by these deltas."""
    return all(
        claimed >= most_true_positives(deltas, false_positives) * (1 - TOLERANCE)
        for false_positives, claimed in card.true_positive_rates
    )


def recomputed(card: Card, bounds: dict[str, float]) -> tuple[dict[str, float], np.ndarray]:
    """Epsilon by each method that is needed to confirm the claims, and deltas at `EPSILONS`.

    ``bounds`` are the claimed epsilons by the proven methods. The deltas bound attacks.
    """
    steps = steps_of(card)
    if steps is None:  # no noise hides some example
        return dict.fromkeys(BOUNDS, math.inf), np.ones_like(EPSILONS)
    epsilons, deltas = by_rdp(card, steps)
    by_divergences = epsilons.get("rdp", math.inf)
    epsilons_hold = min(bounds.values()) >= by_divergences * (1 - TOLERANCE)
    # Loss distributions take seconds. They can confirm a claim that Rényi divergences cannot.
    if "pld" in bounds or not epsilons_hold or not rates_hold(card, deltas):
        epsilon, deltas_by_losses = by_losses(card, steps)
        # The smaller of two upper bounds is an upper bound too.
        epsilons["pld"] = min(epsilon, by_divergences)
        deltas = np.minimum(deltas, deltas_by_losses)
    return epsilons, deltas


def obstacles(card: Card) -> Iterator[tuple[bool, str]]:
    """Yields each reason against a release, and each limit of it, at any epsilon."""
    if card.not_private is not None:
        yield False, f"not for release: the card says {card.not_private!r}"
    earlier = [run.randomness for run in card.mechanism.before]
    if "supplied" in (card.randomness, *earlier):
        yield (
            True,
            "the key was supplied: epsilon holds against those who do not know the key, for one "
            "run per key",
        )
    if card.delta * card.mechanism.sampling.examples >= 1:
        yield (
            False,
            f"promises nothing: delta={upwards(card.delta, '.3g')} is not below one over the "
            f"number of {card.mechanism.unit}s, and publishing one of them would satisfy it",
        )


def percent(rates: Iterable[float]) -> str:
    """Rates in per cent, rounded up."""
    return ", ".join(f"{100 * float(upwards(rate)):.3g} %" for rate in rates)


def exactly(rates: Iterable[float]) -> str:
    """Rates in per cent, in as many digits as they have."""
    return ", ".join(f"{float(100 * Decimal(repr(rate))):.15g} %" for rate in rates)


def upwards(value: float, form: str = "#.3g") -> str:
    """A number in three digits, never below its value, because a proof covers nothing smaller."""
    if not math.isfinite(value):
        return f"{value:g}"
    with localcontext(prec=3, rounding=ROUND_CEILING):
        rounded = +Decimal(repr(float(value)))
    return f"{float(rounded):{form}}".rstrip(".")

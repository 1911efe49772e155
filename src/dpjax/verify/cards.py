# SPDX-License-Identifier: Apache-2.0
"""Reads a privacy card, recomputes its epsilon, and says what holds.

The card says how examples were drawn, how much noise each step had, how many steps ran and
which queries and runs came before them.
"""

from __future__ import annotations

import contextlib
import json
import math
import pathlib
import sys
from collections.abc import Iterator, Sequence
from decimal import ROUND_CEILING, Decimal, localcontext
from typing import Any

from absl import logging
from dp_accounting import UnsupportedEventError

from dpjax.verify.correlated import Unreadable
from dpjax.verify.epsilon import ROUGH, leaves, recompute, rounding_error, signal
from dpjax.verify.events import LEVELS, event_of
from dpjax.verify.fields import BOUNDS, ESTIMATES, require_consistent

# Relative: both bounds are found on grids of orders and of losses.
TOLERANCE = 0.005
# How far a claim may be above the recomputed one; dpjax rounds many steps together.
LOOSE, LOOSE_LEVELS = 0.01, 0.1
# dp-accounting cuts 1e-15 off the distribution of each different step.
SMALLEST_DELTA = 1e-12
_USAGE = """\
usage: dpjax verify RUN, with a run's folder or its privacy.json

Recomputes the epsilon of each method on the card from the facts beside it, by dp-accounting alone.
A line begins with what was checked and ends with the verdict. The exit status is 0 if every line
holds, and 1 if one does not hold, promises nothing, is not for release or cannot be read."""


def main(words: Sequence[str] | None = None) -> int:
    """Prints a verdict for each claim of a card, and returns the exit status.

    Args:
      words: The folder of a run, or a card; by default the words of the command line.
    """
    words = sys.argv[1:] if words is None else list(words)
    if len(words) != 1 or words[0].startswith("-"):
        print(_USAGE)
        return 0 if words in (["-h"], ["--help"]) else 2
    path = pathlib.Path(words[0])
    path = path / "privacy.json" if path.is_dir() else path
    logger = logging.get_absl_logger()
    before = logger.level
    logger.setLevel("CRITICAL")  # the library reports orders that do not converge
    try:
        verdicts = list(findings(load(path)))
    except Unreadable as reason:
        print(f"{words[0]}: {reason}", file=sys.stderr)
        return 1
    finally:
        logger.setLevel(before)
    for _, line in verdicts:
        print(line)
    if not path.with_name("run.json").exists():
        print("no run.json lies beside the card: nothing confirms its unit and other facts")
    return int(not all(good for good, _ in verdicts))


def load(path: pathlib.Path) -> dict[str, Any]:
    """The card in a file, which the other files of its folder do not contradict."""
    card = parsed(path)
    run = path.with_name("run.json")
    if run.exists():
        require_of_run(card, parsed(run), path.with_name("furthest"))
    return card


def require_of_run(card: dict[str, Any], run: dict[str, Any], mark: pathlib.Path) -> None:
    """Refuses a card that the other files of its folder contradict.

    Args:
      card: The card.
      run: What run.json holds.
      mark: The file with the number of the last released step, and of steps that count.
    """
    try:
        steps = max(map(int, mark.read_text().split()), default=0) if mark.exists() else 0
        few = card.get("steps", 0) < steps
    except (OSError, TypeError, ValueError) as error:
        raise Unreadable(f"steps of the card, or {mark.name}, are no numbers ({error}).") from None
    # A seed that is named is published, of any size; a small one can also be that of the caller's
    # key.
    named = (run.get(name) is not None for name in ("--seed", "seed"))
    seeded = run.get("randomness") == "supplied" or any(named)
    wrong = {
        "describes another mechanism": run.get("mechanism") != card.get("mechanism"),
        "hides the seed": seeded and card.get("seed_published") is None,
        f"counts fewer than {steps} steps": few,
    }
    if found := [what for what, is_wrong in wrong.items() if is_wrong]:
        raise Unreadable(
            f"the card {' and '.join(found)}; run.json and furthest beside it say otherwise. "
            "Usually it was copied from another run, one of the files was changed, or the run was "
            "killed before it wrote this card again: the command of the run resumes it."
        )


def parsed(path: pathlib.Path) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Unreadable(
            f"there is no file or folder {path}. Expected the folder of a finished run, or its "
            "privacy.json. Usually the path is misspelt, or the run has not finished."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise Unreadable(f"{path.name} is not readable as JSON ({error}).") from None
    if not isinstance(found, dict):
        raise Unreadable(f"{path.name} holds a {type(found).__name__}; expected a JSON object.")
    return found


def findings(card: dict[str, Any]) -> Iterator[tuple[bool, str]]:
    """Yields whether each part of a card supports a release, and the verdict in words.

    Args:
      card: As `dpjax.reports.card` makes it.

    Raises:
      Unreadable: Its fields are of another format, or contradict each other.
    """
    try:
        require_consistent(card)
        yield from claims(card)
        yield from obstacles(card)
    except Unreadable:
        raise
    except Exception as error:
        # A field of another type or size than any card has: arithmetic on it has no answer.
        raise Unreadable(
            f"a field has a value that cannot be accounted ({type(error).__name__}: {error}). "
            "Usually the card was changed."
        ) from error


def claims(card: dict[str, Any]) -> Iterator[tuple[bool, str]]:
    """Yields a verdict for each claimed epsilon."""
    unit, delta = card["mechanism"]["unit"], card["delta"]
    found = {name: float(claim["value"]) for name, claim in card["epsilon"].items()}
    bounds = {name: value for name, value in found.items() if name in BOUNDS}
    if not bounds:
        said = ", ".join(found) or "nothing"
        yield (
            False,
            f"promises nothing: the card claims epsilon by {said}, and upper bounds are those by "
            f"{', '.join(BOUNDS)}; gdp is an estimate",
        )
        return
    # What dp-accounting proves by one accountant holds whichever accountant the claim was made
    # with, so a claim is compared with the smallest.
    exact = {name: recompute(card, name) for name in ("rdp", "pld") if name in bounds}
    exact = exact or {"rdp": recompute(card, "rdp")}
    # At large rates dp-accounting's RDP is loose between whole orders, or does not converge there;
    # its loss distributions confirm what it cannot.
    if "pld" not in exact and min(bounds.values()) < exact["rdp"][0] * (1 - TOLERANCE):
        with contextlib.suppress(UnsupportedEventError, Unreadable):
            exact["pld"] = recompute(card, "pld")
    smallest, best = min((value, name) for name, (value, _) in exact.items())
    # Of earlier runs too: dpjax rounds all of them together.
    levels = sum(1 for _ in leaves(event_of(card, halve=False)))
    loose = 1 + (LOOSE if levels <= LEVELS else LOOSE_LEVELS)
    for name, claimed in bounds.items():
        largest = exact[name][0] if name in exact else recompute(card, "rdp")[1]
        if math.isinf(claimed):
            good, verdict = False, "promises nothing"
        elif not claimed >= smallest * (1 - TOLERANCE):
            least = ROUGH * rounding_error(card) if name == "pld" else 0.0
            coarse = delta < max(least, SMALLEST_DELTA) and math.isnan(signal(card))
            verdict = "cannot be confirmed at so small a delta" if coarse else "DOES NOT HOLD"
            good = False
        elif claimed > largest * loose:
            # No honest card claims more than its facts cost: another delta, or other noise.
            good, verdict = False, f"IS OF OTHER FACTS, which would cost at most {upwards(largest)}"
        else:
            good, verdict = True, "holds"
        yield (
            good,
            f"{name:12} claims epsilon {upwards(claimed)} for one {unit} at "
            f"delta={upwards(delta, 6)}; recomputed {upwards(smallest)} by {best}, the best "
            f"accountant here: {verdict}",
        )
    for name in found.keys() & set(ESTIMATES):
        yield True, f"{name:12} estimates epsilon {found[name]:.4g}: not checked, and no bound"


def obstacles(card: dict[str, Any]) -> Iterator[tuple[bool, str]]:
    """Yields what is against a release, whatever epsilon is."""
    if card["not_private"] is not None:
        yield False, f"not for release: the card says {card['not_private']!r}"
    earlier = any(spent["seeded"] is not False for spent in card["mechanism"]["before"])
    if card["seed_published"] is not None or earlier:
        yield (
            False,
            f"not for release: the seed of the run{' or of an earlier one' * earlier} is known or "
            f"small ({card['seed_published']}), so the noise can be computed and subtracted",
        )
    if card["delta"] * card["mechanism"]["sampling"]["examples"] >= 1:
        yield (
            False,
            f"promises nothing: delta={upwards(card['delta'], 6)} is not below one over the "
            f"number of {card['mechanism']['unit']}s, and publishing one of them would satisfy it",
        )


def upwards(value: float, digits: int = 4) -> str:
    """A number in few digits, never below its value: a claim rounded down would not be proved."""
    if not math.isfinite(value):
        return f"{value:g}"
    with localcontext(prec=digits, rounding=ROUND_CEILING):
        return f"{float(+Decimal(repr(float(value)))):.{digits}g}"

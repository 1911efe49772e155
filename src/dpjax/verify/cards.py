# SPDX-License-Identifier: Apache-2.0
"""Reads a privacy card, and recomputes its epsilon, mostly with dp-accounting.

The card says how examples were drawn, how much noise each step had, how many steps ran and
which queries and runs came before them.
"""

from __future__ import annotations

import json
import math
import pathlib
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from decimal import ROUND_CEILING, Decimal, localcontext
from typing import Any

import dp_accounting as dp
import numpy as np
from absl import logging

from dpjax.verify import gaussian as closed_form
from dpjax.verify.correlated import Unreadable, is_amplified, saved, sensitivity

FORMAT = 3  # of the description that dpjax.mechanism.card documents
CARD = "mechanism steps claim delta epsilon not_private seed_published versions"
MECHANISM = (
    "format unit sampling multiplier_and_steps preparation projections noise neighbours "
    "multipliers_by_group clipping adaptive before"
)
SPENT = "unit sampling multiplier_and_steps preparation projections noise seeded"

RELATION = {
    "add-or-remove": dp.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "zero-out": dp.NeighboringRelation.ADD_OR_REMOVE_ONE,  # the same for a sum
    "replace-one": dp.NeighboringRelation.REPLACE_ONE,
}
# The relations for which the batches of each sampler are proved.
PROVED = {
    **dict.fromkeys(
        ("poisson", "full", "scored", "cyclic_poisson", "balls_in_bins"), tuple(RELATION)
    ),
    **dict.fromkeys(("shuffled", "curriculum"), ("zero-out", "replace-one")),
    "fixed": ("replace-one",),
}
# What the field ``claim`` says of each sampler.
CLAIMS = {
    "poisson": (
        "exact Poisson sampling; amplification by sampling is proved and counted",
        "Poisson sampling by blocks, never above its rate; amplification by sampling is proved and "
        "counted",
    ),
    "full": ("every step uses every example; plain composition of Gaussians",),
    "scored": ("Poisson sampling at a rate for each bin of public scores; the largest is counted",),
    "cyclic_poisson": (
        "Poisson sampling from {cycle} parts in turn; one amplified step a cycle is proved",
    ),
    "balls_in_bins": ("one random batch of the epoch for each example, the same in every epoch",),
    "shuffled": (
        "shuffled batches; no amplification is proved: one Gaussian an epoch",
        "pseudo-randomly shuffled batches; no amplification is proved: one Gaussian an epoch",
    ),
    "curriculum": (
        "a public fixed order; no amplification is proved: one Gaussian an epoch",
        "the order comes from the private data without noise: not private",
    ),
    "fixed": ("uniform batches of a fixed size; proved for replace-one neighbours (RDP)",),
}
# And of each, after the words for how batches are drawn, where the noise of steps is correlated.
TOGETHER = (
    "no amplification is counted: one Gaussian for the run",
    "one Gaussian for the run, in a batch that is unknown",
)
BOUNDS = ("rdp", "pld", "rdp-classic")
ESTIMATES = ("gdp",)
# Of the comparison: bounds are found on grids of orders and of losses.
TOLERANCE = 0.005
# PLD convolves once for each different step. So more than 64 are rounded to 64 that cost no less,
# here as in dpjax, which rounds the steps of all runs together.
LOOSE, LOOSE_LEVELS, LEVELS = 0.01, 0.1, 64
# Of the divergences: no coarser than in dpjax, whose claims would seem too small.
ORDERS = np.concatenate(
    [
        1 + np.arange(2, 10) / 100,
        1 + np.arange(1, 100) / 10,
        np.arange(11, 64),
        [72, 80, 96, 128, 192, 256, 384, 512, 768, 1024],
    ]
)
# dp-accounting cuts 1e-15 off the distribution of each different step.
SMALLEST_DELTA = 1e-12
ROUGH = 20  # a delta below 20 errors of a distribution leaves few digits of epsilon
BARE = 1e-100  # a smaller multiplier hides nothing: its square underflows


def main(words: Sequence[str] | None = None) -> int:
    """Prints a verdict for each claim of a card, and returns the exit status.

    Args:
      words: The folder of a run, or a card; by default the words of the command line.
    """
    words = sys.argv[1:] if words is None else list(words)
    if len(words) != 1 or words[0].startswith("-"):
        print("usage: dpjax verify RUN, with a run's folder or its privacy.json")
        return 0 if words in (["-h"], ["--help"]) else 2
    logger = logging.get_absl_logger()
    before = logger.level
    logger.setLevel("CRITICAL")  # the library reports orders that do not converge
    try:
        verdicts = list(findings(load(pathlib.Path(words[0]))))
    except Unreadable as reason:
        print(f"{words[0]}: {reason}", file=sys.stderr)
        return 1
    finally:
        logger.setLevel(before)
    for _, line in verdicts:
        print(line)
    return int(not all(good for good, _ in verdicts))


def load(path: pathlib.Path) -> dict[str, Any]:
    """The card at a path, or in the folder of a run."""
    path = path / "privacy.json" if path.is_dir() else path
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
    seeded = run.get("small seed") or any(named)
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


def require_fields(facts: Any, names: str, where: str) -> None:
    """Refuses a part of the card with other fields: what is not read is not checked."""
    given, expected = set(facts if isinstance(facts, dict) else ()), set(names.split())
    if given != expected:
        unlike = [f"{name} is missing" for name in sorted(expected - given)]
        unlike += [f"{name} is unknown" for name in sorted(given - expected)]
        raise Unreadable(
            f"{where} does not have the fields of format {FORMAT}: {', '.join(unlike)}. Usually "
            "the file is not a privacy card, or it was changed."
        )


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


def obstacles(card: dict[str, Any]) -> Iterator[tuple[bool, str]]:
    """Yields what is against a release, whatever epsilon is."""
    if card["not_private"] is not None:
        yield False, f"not for release: the card says {card['not_private']!r}"
    earlier = any(spent["seeded"] for spent in card["mechanism"]["before"])
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
    smallest, best = min((value, name) for name, (value, _) in exact.items())
    levels = len({z for z, _ in card["mechanism"]["multiplier_and_steps"]})
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


def upwards(value: float, digits: int = 4) -> str:
    """A number in few digits, never below its value: a claim rounded down would not be proved."""
    if not math.isfinite(value):
        return f"{value:g}"
    with localcontext(prec=digits, rounding=ROUND_CEILING):
        return f"{float(+Decimal(repr(float(value)))):.{digits}g}"


def require_consistent(card: dict[str, Any]) -> None:
    """Refuses a card with values that contradict each other."""
    require_format(card)
    require_claims(card)
    mechanism = card["mechanism"]
    for spent in (mechanism, *mechanism["before"]):
        require_run(spent, mechanism)
    require_count(mechanism)
    require_rule(mechanism)
    require_words(card["claim"], mechanism)


def require_format(card: dict[str, Any]) -> None:
    """Refuses a card that does not have exactly the fields of this format."""
    mechanism: Any = card.get("mechanism")
    version = mechanism.get("format", 1) if isinstance(mechanism, dict) else FORMAT
    if version != FORMAT:
        raise Unreadable(
            f"the card is of format {version!r}, and this file reads format {FORMAT}. Another "
            "version of dpjax wrote the card: verify it with that version's dpjax.verify."
        )
    require_fields(card, CARD, "the card")
    require_fields(mechanism, MECHANISM, "the mechanism of the card")
    for spent in mechanism["before"]:
        require_fields(spent, SPENT, "an earlier run on the card")


def require_claims(card: dict[str, Any]) -> None:
    """Refuses epsilons of unknown methods, and more steps than were planned."""
    for name, claim in card["epsilon"].items():
        if name not in (*BOUNDS, *ESTIMATES):
            raise Unreadable(f"epsilon by {name!r} is of a method that is not known here.")
        if claim["proven"] is not (name in BOUNDS):
            said = "proven" if claim["proven"] else "an estimate"
            raise Unreadable(f"the card marks epsilon by {name} as {said}, which it is not.")
    planned = sum(steps for _, steps in card["mechanism"]["multiplier_and_steps"])
    if not (card["steps"] % 1 == 0 and 0 <= card["steps"] <= planned and 0 < card["delta"] < 1):
        raise Unreadable(
            f"the card counts {card['steps']:,} steps at delta={card['delta']}, and its mechanism "
            f"plans {planned:,}. A ledger admits no step beyond the plan, so the card was changed."
        )


def require_run(spent: dict[str, Any], mechanism: dict[str, Any]) -> None:
    """Refuses a run, this one or an earlier one, that does not add to the card's epsilon."""
    sampling = spent["sampling"]
    if sampling["name"] not in PROVED:
        raise Unreadable(
            f"batches are drawn by {sampling['name']!r}, a sampler that is not known here. "
            "Only its author can say what it costs."
        )
    if mechanism["neighbours"] not in PROVED[sampling["name"]]:
        raise Unreadable(
            f"neighbours are {mechanism['neighbours']!r}, and {sampling['name']} batches are "
            f"proved for {' and '.join(PROVED[sampling['name']])} alone."
        )
    if spent["unit"] not in ("example", "client"):
        raise Unreadable(f"the unit is {spent['unit']!r}; expected 'example' or 'client'.")
    if spent["unit"] != mechanism["unit"]:
        raise Unreadable("the card adds what one example costs to what one client costs.")
    require_drawn(sampling)
    if not all(steps % 1 == 0 and steps >= 0 for _, steps in spent["multiplier_and_steps"]):
        raise Unreadable("a number of steps is negative, or not whole.")
    require_hidden(spent)
    numbers = [*each_multiplier(spent), *map(float, spent["preparation"])]
    if not all(number >= 0 for number in numbers):
        raise Unreadable("a noise multiplier is negative.")


def require_count(mechanism: dict[str, Any]) -> None:
    """Refuses a count of adaptive clipping that costs more than count and gradients together."""
    adaptive = mechanism["adaptive"]
    if adaptive is not None:
        count = float(adaptive["count_multiplier"])
        both = max(each_multiplier(mechanism), default=0.0)
        if not (both < count or both == count == 0):
            raise Unreadable(
                f"the count that moves the bounds has noise multiplier {count:.4g}, and count and "
                f"gradients are counted with {both:.4g} together: they cannot cost less than the "
                "count alone."
            )


def require_rule(mechanism: dict[str, Any]) -> None:
    """Refuses a rule without a bound for each group, or groups with other noise than counted."""
    rule, groups = mechanism["clipping"], mechanism["multipliers_by_group"]
    bounds = rule["bounds"]
    if len(bounds) != len(rule["groups"]) or not all(float(bound) >= 0 for bound in bounds):
        raise Unreadable(
            f"the rule has the bounds {bounds!r}, and not one of 0 or more for each of its "
            f"{len(rule['groups'])} groups."
        )
    if groups is not None:
        worth = joined([float(z) for z in groups])
        same = all(math.isclose(z, worth, rel_tol=1e-6) for z in each_multiplier(mechanism))
        if len(groups) != len(bounds) or not same:
            raise Unreadable(
                f"the groups' multipliers are worth {worth:.4g} together, and the steps are "
                "counted with another multiplier."
            )


def require_words(claim: str, mechanism: dict[str, Any]) -> None:
    """Refuses a claim about the batches that is not proved for them."""
    sampling, noise = mechanism["sampling"], mechanism["noise"]
    known = [words.format(**sampling) for words in CLAIMS[sampling["name"]]]
    if noise is not None and not is_amplified(noise, sampling):
        # Cards of earlier versions say here what is proved for fresh noise.
        endings = TOGETHER if sampling["name"] == "balls_in_bins" else TOGETHER[:1]
        known += [f"{words.partition(';')[0]}; {each}" for words in known for each in endings]
    if claim not in known:
        raise Unreadable(
            f"the card says {claim!r}, which is not what is proved for {sampling['name']} batches."
        )


def require_drawn(sampling: dict[str, Any]) -> None:
    """Refuses facts of a sampler that no sampler of its name has."""
    size, examples = sampling["batch_size"], sampling["examples"]
    if not 0 < size <= examples:
        raise Unreadable("the batch size is not between 0 and the number of examples.")
    if sampling["name"] == "cyclic_poisson":
        cycle = sampling["cycle"]
        if not (cycle % 1 == 0 and cycle >= 1 and cycle * size / examples <= 1):
            raise Unreadable(
                f"a cycle of {cycle} parts is not a whole number from 1 to {examples / size:.6g}, "
                "examples / batch size: a part must hold a batch."
            )
    if sampling["name"] == "scored":
        rows = sampling["rates"]
        sound = all(0 <= rate <= 1 and n % 1 == 0 and n >= 1 for rate, n in rows)
        if not (rows and sound):
            raise Unreadable("rates of scores are not pairs of a rate from 0 to 1 and its steps.")


def require_hidden(spent: dict[str, Any]) -> None:
    """Refuses correlated noise that was scaled to less than one example moves."""
    noise, sampling = spent["noise"], spent["sampling"]
    if noise is None:
        return
    planned = each_multiplier(spent)
    if noise["steps"] < len(planned) or len(set(planned)) > 1 or spent["projections"] is not None:
        raise Unreadable(
            f"noise is correlated over {noise['steps']} steps, and the run has {len(planned)}, "
            "several multipliers or estimated norms. One multiplier covers all steps together."
        )
    least = sensitivity(noise, sampling)
    if not float(noise["sensitivity"]) >= least * (1 - 1e-6):
        raise Unreadable(
            f"noise was scaled to a sensitivity of {noise['sensitivity']:.6g}, and one example "
            f"moves a run with this strategy and these batches by {least:.6g}."
        )


def joined(multipliers: list[float]) -> float:
    """The one multiplier that several groups with their own multipliers are worth."""
    if min(multipliers) == 0:
        return 0.0
    precision = sum(z**-2 for z in multipliers)
    return precision**-0.5 if precision else math.inf


def event_of(card: dict[str, Any], *, halve: bool, rounded: bool = False) -> dp.DpEvent:
    """The privacy event that a card describes: earlier runs, and the planned steps that ran.

    ``halve``: dp-accounting's RDP does not double the sensitivity for replace-one neighbours,
    so the noise multiplier is halved instead. ``rounded``: `at_levels`.
    """
    mechanism = card["mechanism"]
    if card["steps"] and math.inf in map(float, mechanism["clipping"]["bounds"]):
        return dp.NonPrivateDpEvent()
    runs = [(spent, each_multiplier(spent)) for spent in mechanism["before"]]
    runs.append((mechanism, each_multiplier(mechanism)[: card["steps"]]))
    events = [spent_event(*run, halve, rounded) for run in runs]
    # dp-accounting divides by the square of a multiplier where batches have a fixed size.
    noise = [z for spent, each in runs for z in (*each, *map(float, spent["preparation"]))]
    if min(noise, default=math.inf) <= BARE:
        return dp.NonPrivateDpEvent()
    return dp.ComposedDpEvent(events)


def each_multiplier(spent: dict[str, Any]) -> list[float]:
    """The noise multiplier of each step; "inf" is infinity."""
    return [float(z) for z, steps in spent["multiplier_and_steps"] for _ in range(steps)]


def spent_event(
    spent: dict[str, Any], multipliers: list[float], halve: bool, rounded: bool
) -> dp.DpEvent:
    """The event of one run: its queries before the first step, and its steps."""
    if spent["projections"] is not None:
        raise Unreadable(
            "norms were estimated from random projections. dp-accounting has no such event, so "
            "nothing is recomputed: dpjax.accounting alone accounts for this card."
        )
    sampling, half = spent["sampling"], 2 if halve else 1
    queries = [gaussian(float(z) / half) for z in spent["preparation"]]
    each = [z / half for z in multipliers]
    rates = [sampling["batch_size"] / sampling["examples"]] * len(each)
    if sampling["name"] == "curriculum" and not sampling["public"]:
        return dp.NonPrivateDpEvent()
    if spent["noise"] is not None and not is_amplified(spent["noise"], sampling):
        # The noise hides all steps of an example together.
        return dp.ComposedDpEvent([*queries, *map(gaussian, each[:1])])
    if (steps := epoch(sampling)) > 1:  # one batch an epoch, at an unknown place
        each = [min(each[i : i + steps]) for i in range(0, len(each), steps)]
        rates = [steps * rate for rate in rates[: len(each)]]  # of the part whose turn it is
    elif sampling["name"] == "scored":  # the largest rate of any bin; the last row stays
        rows = [rate for rate, steps in sampling["rates"] for _ in range(steps)]
        rates = (rows + rows[-1:] * len(each))[: len(each)]
    pairs = Counter(zip(rates, each, strict=False))
    if rounded and sampling["name"] in ("poisson", "scored", "cyclic_poisson"):
        pairs = at_levels(pairs)
    steps = [
        dp.SelfComposedDpEvent(step_event(sampling, rate, z), n)
        for (rate, z), n in pairs.items()
        if rate > 0
    ]
    return dp.ComposedDpEvent([*queries, *steps])


def at_levels(pairs: Counter[tuple[float, float]]) -> Counter[tuple[float, float]]:
    """At most 64 sampled steps that cost no less: rates rounded up, multipliers down.

    The group of steps whose rounding costs the most is cut in two, between rates or multipliers,
    until there are 64.
    """
    sampled = sorted((q, z) for q, z in pairs if 0 < q < 1 and 0 < z < math.inf)
    if len(sampled) <= LEVELS:
        return pairs
    groups = [np.array([(q, z, pairs[q, z]) for q, z in sampled])]
    cuts = [best_cut(groups[0])]
    while len(groups) < LEVELS:
        place = max(range(len(cuts)), key=lambda number: cuts[number][0])
        if not (halves := cuts[place][1]):
            break
        groups[place : place + 1] = halves
        cuts[place : place + 1] = map(best_cut, halves)
    found = Counter({pair: pairs[pair] for pair in pairs.keys() - set(sampled)})
    for steps in groups:
        q, z, count = steps.T
        found[float(q.max()), float(z.min())] += int(count.sum())
    return found


def best_cut(steps: np.ndarray) -> tuple[float, list[np.ndarray]]:
    """The two groups that rounded steps cost the least in, after what that saves."""

    def costs(steps: np.ndarray) -> np.ndarray:
        q, z = np.maximum.accumulate(steps[:, 0]), np.minimum.accumulate(steps[:, 1])
        return np.cumsum(steps[:, 2]) * q**2 * np.expm1(np.minimum(z**-2, 700))

    found: tuple[float, list[np.ndarray]] = 0.0, []
    for column in (0, 1):
        order = steps[np.argsort(steps[:, column], kind="stable")]
        left, right = costs(order), costs(order[::-1])[::-1]
        saved = left[-1] - left[:-1] - right[1:]
        if len(saved) and saved.max() > found[0]:
            cut = int(saved.argmax()) + 1
            found = float(saved.max()), [order[:cut], order[cut:]]
    return found


def less_by_bins(card: dict[str, Any], orders: np.ndarray) -> np.ndarray:
    """What random bins take from the divergences of the events, which leave the bins out."""
    mechanism, total = card["mechanism"], 0 * orders
    if mechanism["neighbours"] == "replace-one":
        return total
    ran = [*mechanism["before"], *[mechanism] * bool(card["steps"])]
    for spent in ran:
        multipliers = each_multiplier(spent)
        if spent["noise"] is not None and multipliers:
            total = total + saved(spent["noise"], spent["sampling"], multipliers[0], orders)
    return total


def epoch(sampling: dict[str, Any]) -> int:
    """In how many steps in turn an example is at most once."""
    if sampling["name"] == "cyclic_poisson":
        return int(sampling["cycle"])
    once = sampling["name"] in ("shuffled", "curriculum", "balls_in_bins")
    return int(sampling["examples"] // sampling["batch_size"]) if once else 1


def gaussian(multiplier: float) -> dp.DpEvent:
    """A sum with noise; with infinite noise it releases nothing."""
    return dp.NoOpDpEvent() if math.isinf(multiplier) else dp.GaussianDpEvent(multiplier)


def step_event(sampling: dict[str, Any], rate: float, multiplier: float) -> dp.DpEvent:
    """One step, as this sampler's claim allows it to be counted."""
    noise = gaussian(multiplier)
    if math.isinf(multiplier):
        return noise
    if sampling["name"] in ("poisson", "scored", "cyclic_poisson") and rate < 1:
        return dp.PoissonSampledDpEvent(rate, noise)
    if sampling["name"] == "fixed":
        return dp.SampledWithoutReplacementDpEvent(
            sampling["examples"], int(sampling["batch_size"]), noise
        )
    return noise


def leaves(event: dp.DpEvent, count: int = 1) -> Iterator[tuple[dp.DpEvent, int]]:
    """The events that hold no composition, and how often each runs."""
    match event:
        case dp.SelfComposedDpEvent(event=part, count=runs):
            yield from leaves(part, count * runs)
        case dp.ComposedDpEvent(events=parts):
            for part in parts:
                yield from leaves(part, count)
        case _:
            yield event, count


def grid(event: dp.DpEvent, exchange: int) -> float:
    """The distance between losses: 1e-4, or less where that is much for a sampled step.

    As in dpjax, an eighth of a step's deviation, if half a million span all losses.
    """
    steps: list[tuple[float, float, int]] = []
    for part, n in leaves(event):
        match part:
            case dp.PoissonSampledDpEvent(
                sampling_probability=q, event=dp.GaussianDpEvent(noise_multiplier=z)
            ):
                steps.append((q, z, n))
    if not steps:
        return 1e-4

    def variance(times: int) -> float:
        return math.fsum(n * q**2 * math.expm1(min((times / z) ** 2, 700)) for q, z, n in steps)

    total, largest = variance(exchange), max(exchange / z for _, z, _ in steps)
    losses = 2 * max(total / 2 + 6 * math.sqrt(total), largest**2 / 2 + 10 * largest)
    step = math.sqrt(variance(1) / sum(n for *_, n in steps))
    finest = max(step / 8, losses / 500_000, 1e-4 / 1024)
    return 1e-4 * 2.0 ** min(0, math.floor(math.log2(finest / 1e-4)))


def rounding_error(card: dict[str, Any]) -> float:
    """By how much floating point can move a delta of dp-accounting's distribution, either way.

    `dpjax.accounting.pld.error` says why: each step by 2 units in the last place of 1, and each
    distinct step by 16. Equal Gaussians without sampling are one.
    """
    found = leaves(event_of(card, halve=False, rounded=True))
    counts = [1 if isinstance(part, dp.GaussianDpEvent) else count for part, count in found]
    return 2.0**-52 * sum(2 * count + 16 for count in counts)


def signal(card: dict[str, Any]) -> float:
    """By how many standard deviations one example moves Gaussians; NaN if batches are sampled."""
    exchange = 2 if card["mechanism"]["neighbours"] == "replace-one" else 1
    return exchange * math.sqrt(closed_form.precision(event_of(card, halve=False)))


def recompute(card: dict[str, Any], method: str) -> tuple[float, float]:
    """The epsilon of a card by one of dp-accounting's accountants, and by a classic conversion.

    Gaussians without sampling have a closed form, which replaces their distribution. The second
    number is above the smallest epsilon of the classic conversion.
    """
    mechanism = card["mechanism"]
    relation = RELATION[mechanism["neighbours"]]
    halve = method == "rdp" and mechanism["neighbours"] == "replace-one"
    if halve and mechanism["sampling"]["name"] != "fixed":
        relation = dp.NeighboringRelation.ADD_OR_REMOVE_ONE
    event = event_of(card, halve=halve, rounded=method == "pld")
    if isinstance(event, dp.NonPrivateDpEvent):
        return math.inf, math.inf
    if method == "pld":
        if not math.isnan(moved := signal(card)):
            epsilon = closed_form.epsilon(moved, card["delta"])
        else:
            exchange = 2 if mechanism["neighbours"] == "replace-one" else 1
            accountant = dp.pld.PLDAccountant(relation, grid(event, exchange))
            accountant.compose(event)
            error = rounding_error(card)
            spare = card["delta"] - error
            epsilon = float(accountant.get_epsilon(spare)) if spare > 0 else math.inf
            # Without their sampling, the same steps cost no less, and have a closed form.
            noises = ((getattr(part, "event", part), n) for part, n in leaves(event))
            total = math.fsum(n * closed_form.precision(noise) for noise, n in noises)
            whole = closed_form.epsilon(exchange * math.sqrt(total), card["delta"])
            epsilon = min(epsilon, whole)
            if card["delta"] < ROUGH * error and exchange == 1:
                epsilon = min(epsilon, recompute(card, "rdp")[0])
        if np.any(less_by_bins(card, np.array([2.0]))):  # dp-accounting has no such distribution
            epsilon = min(epsilon, recompute(card, "rdp")[0])
        return epsilon, epsilon
    accountant = dp.rdp.RdpAccountant(ORDERS.tolist(), relation)
    accountant.compose(event)
    divergences = accountant.rdp + less_by_bins(card, ORDERS)
    found = ORDERS.tolist(), divergences.tolist()
    epsilon, order = dp.rdp.compute_epsilon(*found, card["delta"])
    if not order > 1:
        return float(epsilon), float(epsilon)
    # At one order, the classic conversion lacks these two terms of the improved one. The published
    # one has no orders below 1.1 or above 63, so it is larger where those are the best.
    classic = epsilon + math.log(order) / (order - 1) + math.log(order / (order - 1))
    low = (ORDERS >= 1.1) & (ORDERS <= 63)
    published = divergences[low] - math.log(card["delta"]) / (ORDERS[low] - 1)
    return float(epsilon), max(float(classic), float(np.min(published)))

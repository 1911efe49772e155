# SPDX-License-Identifier: Apache-2.0
"""The fields of a privacy card: refusals of what no card of this format holds.

What is not read is not checked, so a card has exactly the known fields, and none may contradict
another.
"""

from __future__ import annotations

import math
from typing import Any

from dpjax.verify.correlated import Unreadable, is_amplified, sensitivity
from dpjax.verify.epsilon import RELATION
from dpjax.verify.events import each_multiplier

FORMAT = 3  # of the description that dpjax.mechanism.card documents
CARD = "mechanism steps claim delta epsilon not_private seed_published versions"
MECHANISM = (
    "format unit sampling multiplier_and_steps preparation projections noise neighbours "
    "multipliers_by_group clipping adaptive before"
)
SPENT = "unit sampling multiplier_and_steps preparation projections noise seeded"
ADAPTIVE = "target rate count_multiplier geometric"
SAMPLING = {
    **dict.fromkeys(
        ("poisson", "full", "fixed", "shuffled", "balls_in_bins"), "name examples batch_size"
    ),
    "scored": "name examples batch_size rates",
    "cyclic_poisson": "name examples batch_size cycle",
    "curriculum": "name examples batch_size public",
}
NOISE = {
    "toeplitz": "kind name steps sensitivity values normalized",
    "inverse_toeplitz": "kind name steps sensitivity values",
    "buffered": "kind name steps sensitivity scales decays",
    "tree": "kind name steps sensitivity",
    "dense": "kind name steps sensitivity rows",
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
    "curriculum": (  # of an order that is not public, and of a public one
        "the order comes from the private data without noise: not private",
        "a public fixed order; no amplification is proved: one Gaussian an epoch",
    ),
    "fixed": ("uniform batches of a fixed size; proved for replace-one neighbours (RDP)",),
}
# How a claim ends where noise is correlated over the steps; it begins with how batches are drawn.
TOGETHER = (
    "no amplification is counted: one Gaussian for the run",
    "one Gaussian for the run, in a batch that is unknown",
)
BOUNDS = ("rdp", "pld", "rdp-classic")
ESTIMATES = ("gdp",)


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


def require_claims(card: dict[str, Any]) -> None:
    """Refuses epsilons of unknown methods, and more steps than were planned."""
    for name, claim in card["epsilon"].items():
        if name not in (*BOUNDS, *ESTIMATES):
            raise Unreadable(f"epsilon by {name!r} is of a method that is not known here.")
        if claim["proven"] is not (name in BOUNDS):
            said = "proven" if claim["proven"] else "an estimate"
            raise Unreadable(f"the card marks epsilon by {name} as {said}, which it is not.")
    planned = sum(steps for _, steps in card["mechanism"]["multiplier_and_steps"])
    if not (0 <= whole(card["steps"]) <= planned and 0 < number(card["delta"]) < 1):
        raise Unreadable(
            f"the card counts {card['steps']!r} steps at delta={card['delta']!r}, and its "
            f"mechanism plans {planned:,}. A ledger admits no step beyond the plan: the card was "
            "changed."
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
    runs, queries = spent["multiplier_and_steps"], spent["preparation"]
    if not all(whole(steps) >= 1 for _, steps in runs):
        raise Unreadable("a number of steps is not whole, or below 1.")
    if not all(number(z) >= 0 for z in (*queries, *(z for z, _ in runs))):
        raise Unreadable("a noise multiplier is negative, or no number.")
    require_hidden(spent)


def require_count(mechanism: dict[str, Any]) -> None:
    """Refuses adapted bounds without a quantile, or a count that costs more than the steps."""
    adaptive = mechanism["adaptive"]
    if adaptive is not None:
        require_fields(adaptive, ADAPTIVE, "the adapted bound on the card")
        target, rate = number(adaptive["target"]), number(adaptive["rate"])
        moved = 0 <= target <= 1 and 0 < rate < math.inf
        if not (moved and isinstance(adaptive["geometric"], bool)):
            raise Unreadable(
                f"the bounds follow {adaptive!r}; expected a target from 0 to 1, a finite rate "
                "above 0, and true or false for geometric."
            )
        count = number(adaptive["count_multiplier"])
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
    sound = bounds and all(number(bound) >= 0 for bound in bounds)
    if len(bounds) != len(rule["groups"]) or not sound:
        raise Unreadable(
            f"the rule has the bounds {bounds!r}, and not one of 0 or more for each of its "
            f"{len(rule['groups'])} groups, which are one or more."
        )
    if groups is not None:
        worth = joined(list(map(number, groups)))
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
    if sampling["name"] == "curriculum":
        known = [known[sampling["public"]]]
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
    require_fields(sampling, SAMPLING[sampling["name"]], "the sampling on the card")
    require_flag("public", sampling)
    read = whole if sampling["name"] in ("fixed", "shuffled", "curriculum") else number
    size, examples = read(sampling["batch_size"]), whole(sampling["examples"])
    if not 0 < size <= examples:
        raise Unreadable(
            "the batch size is not between 0 and the number of examples, or no whole number where "
            "all batches have that size."
        )
    if sampling["name"] == "cyclic_poisson":
        cycle = sampling["cycle"]
        if not (whole(cycle) >= 1 and cycle * size / examples <= 1):
            raise Unreadable(
                f"a cycle of {cycle} parts is not a whole number from 1 to {examples / size:.6g}, "
                "examples / batch size: a part must hold a batch."
            )
    if sampling["name"] == "scored":
        rows = sampling["rates"]
        sound = all(0 <= number(rate) <= 1 and whole(steps) >= 1 for rate, steps in rows)
        if not (rows and sound):
            raise Unreadable("rates of scores are not pairs of a rate from 0 to 1 and its steps.")


def require_hidden(spent: dict[str, Any]) -> None:
    """Refuses correlated noise that was scaled to less than one example moves."""
    noise, sampling = spent["noise"], spent["sampling"]
    if noise is None:
        return
    if noise["kind"] not in NOISE:
        raise Unreadable(
            f"noise is correlated by a strategy of kind {noise['kind']!r}, unknown here."
        )
    require_fields(noise, NOISE[noise["kind"]], "the correlated noise on the card")
    require_flag("normalized", noise)
    planned = each_multiplier(spent)
    covered = whole(noise["steps"]) >= len(planned)
    if not covered or len(set(planned)) > 1 or spent["projections"] is not None:
        raise Unreadable(
            f"noise is correlated over {noise['steps']} steps, and the run has {len(planned)}, "
            "several multipliers or estimated norms. One multiplier covers all steps together."
        )
    least, scaled = sensitivity(noise, sampling), number(noise["sensitivity"])
    if not scaled >= least * (1 - 1e-6):
        raise Unreadable(
            f"noise was scaled to a sensitivity of {scaled:.6g}, and one example moves a run with "
            f"this strategy and these batches by {least:.6g}."
        )


def require_flag(name: str, facts: dict[str, Any]) -> None:
    """Refuses text or a number for true or false, as "false" would count as true."""
    if type(facts.get(name, True)) is not bool:
        raise Unreadable(f"{name} is {facts[name]!r}; expected true or false.")


def joined(multipliers: list[float]) -> float:
    """The one multiplier that several groups with their own multipliers are worth."""
    if min(multipliers) == 0:
        return 0.0
    precision = sum(z**-2 for z in multipliers)
    return precision**-0.5 if precision else math.inf


def number(value: Any) -> float:
    """A number on the card, or its word for infinity; NaN, which is in no range, for all else."""
    if isinstance(value, float):
        return value
    return math.inf if value == "inf" else whole(value)


def whole(value: Any) -> float:
    """A whole number on the card; NaN for all else, also for true, which Python takes for 1."""
    return value if type(value) is int else math.nan

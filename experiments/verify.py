# SPDX-License-Identifier: Apache-2.0
"""Recomputes the epsilon of a privacy card, without dpjax.

  command   python experiments/verify.py RUN/privacy.json
  result    one line per claim, and exit status 1 if one is too small

The card says how examples were drawn, how much noise each step had, how many steps ran and
which queries and runs came before them. This file hands these facts to Google's dp-accounting
and imports nothing of dpjax, so it checks dpjax's accounting as well as the card's arithmetic.
"""

from __future__ import annotations

import collections
import json
import math
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import dp_accounting as dp
from absl import app, logging

RELATION = {
    "add-or-remove": dp.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "zero-out": dp.NeighboringRelation.ADD_OR_REMOVE_ONE,  # the same for a sum
    "replace-one": dp.NeighboringRelation.REPLACE_ONE,
}
FORMAT = 2  # of the description that dpjax.mechanism.card documents
CLAIMS = ("rdp", "pld", "rdp-classic")
TOLERANCE = 0.005  # of the comparison: bounds are found on grids of orders and of losses


def event_of(card: dict[str, Any], *, halve: bool) -> dp.DpEvent:
    """The privacy event that a card describes: earlier runs, and the planned steps that ran.

    ``halve``: dp-accounting's RDP does not double the sensitivity for replace-one neighbours,
    so the noise multiplier is halved instead.
    """
    mechanism = card["mechanism"]
    if card["steps"] and math.inf in map(float, mechanism["clipping"]["bounds"]):
        return dp.NonPrivateDpEvent()
    ran = each_multiplier(mechanism)[: card["steps"]]
    before = [spent_event(spent, each_multiplier(spent), halve) for spent in mechanism["before"]]
    return dp.ComposedDpEvent([*before, spent_event(mechanism, ran, halve)])


def each_multiplier(spent: dict[str, Any]) -> list[float]:
    """The noise multiplier of each step; "inf" is infinity."""
    return [float(z) for z, steps in spent["multiplier_and_steps"] for _ in range(steps)]


def spent_event(spent: dict[str, Any], multipliers: list[float], halve: bool) -> dp.DpEvent:
    """The event of one run: its queries before the first step, and its steps."""
    if spent["projections"] is not None:
        sys.exit(
            "Norms were estimated from random projections. dp-accounting has no such event, so "
            "nothing is recomputed: dpjax.accounting alone accounts for this card."
        )
    sampling, half = spent["sampling"], 2 if halve else 1
    queries = [gaussian(float(z) / half) for z in spent["preparation"]]
    each = [z / half for z in multipliers]
    rates = [sampling["batch_size"] / sampling["examples"]] * len(each)
    if sampling["name"] == "curriculum" and not sampling["public"]:
        return dp.NonPrivateDpEvent()
    if sampling["name"] in ("shuffled", "curriculum"):  # one batch an epoch, at an unknown place
        steps = sampling["examples"] // sampling["batch_size"]
        each = [min(each[i : i + steps]) for i in range(0, len(each), steps)]
    elif sampling["name"] == "scored":  # the largest rate of any bin; the last row stays
        rows = [rate for rate, steps in sampling["rates"] for _ in range(steps)]
        rates = (rows + rows[-1:] * len(each))[: len(each)]
    pairs = collections.Counter(zip(rates, each, strict=False))
    steps = [
        dp.SelfComposedDpEvent(step_event(sampling, rate, z), n)
        for (rate, z), n in pairs.items()
        if rate > 0
    ]
    return dp.ComposedDpEvent([*queries, *steps])


def gaussian(multiplier: float) -> dp.DpEvent:
    """A sum with noise; with infinite noise it releases nothing."""
    return dp.NoOpDpEvent() if math.isinf(multiplier) else dp.GaussianDpEvent(multiplier)


def step_event(sampling: dict[str, Any], rate: float, multiplier: float) -> dp.DpEvent:
    """One step, as this sampler's claim allows it to be counted."""
    noise = gaussian(multiplier)
    if math.isinf(multiplier):
        return noise
    if sampling["name"] in ("poisson", "scored") and rate < 1:
        return dp.PoissonSampledDpEvent(rate, noise)
    if sampling["name"] == "fixed":
        return dp.SampledWithoutReplacementDpEvent(
            sampling["examples"], int(sampling["batch_size"]), noise
        )
    return noise


def recompute(card: dict[str, Any], method: str) -> float:
    """The epsilon of a card by one of dp-accounting's accountants."""
    mechanism = card["mechanism"]
    relation = RELATION[mechanism["neighbours"]]
    halve = method == "rdp" and mechanism["neighbours"] == "replace-one"
    if halve and mechanism["sampling"]["name"] != "fixed":
        relation = dp.NeighboringRelation.ADD_OR_REMOVE_ONE
    accountant = (
        dp.pld.PLDAccountant(relation)
        if method == "pld"
        else dp.rdp.RdpAccountant(neighboring_relation=relation)
    )
    accountant.compose(event_of(card, halve=halve))
    return float(accountant.get_epsilon(card["delta"]))


def check(card: dict[str, Any]) -> Iterator[tuple[str, float, float]]:
    """Yields (method, claimed, bound) for every claim that is an upper bound.

    ``bound`` is the smallest that dp-accounting gives by any method of the card: what it
    proves by one accountant holds whichever accountant the claim was made with.
    """
    found = card.get("mechanism", {}).get("format", 1)
    if found != FORMAT:
        sys.exit(
            f"The card is of format {found}, and this file reads format {FORMAT}. Another version "
            "of dpjax wrote the card: verify it with that version's verify.py."
        )
    planned = sum(steps for _, steps in card["mechanism"]["multiplier_and_steps"])
    if card["steps"] > planned:
        sys.exit(
            f"The card counts {card['steps']:,} steps, and its mechanism plans {planned:,}: no "
            "claim is checked. Usually the card was altered; dpjax.reports.card takes the steps "
            "from the ledger, which admits no step beyond the plan."
        )
    claims = [method for method in CLAIMS if method in card["epsilon"]]
    by = [method for method in ("rdp", "pld") if method in claims] or ["rdp"] * bool(claims)
    bounds = [recompute(card, method) for method in by]
    for method in claims:
        yield method, float(card["epsilon"][method]["value"]), min(bounds)


def holds(claimed: float, bound: float) -> bool:
    """Whether a claim is no smaller than the bound, but for the grids on which both are found."""
    return claimed >= bound * (1 - TOLERANCE)


def main(argv: list[str]) -> None:
    if len(argv) != 2:
        raise app.UsageError("expected one privacy card: verify.py RUN/privacy.json")
    logging.set_verbosity(logging.FATAL)  # the library reports orders that do not converge
    card = json.loads(pathlib.Path(argv[1]).read_text())
    results = list(check(card))
    if not results:
        said = ", ".join(card["epsilon"]) or "nothing"
        sys.exit(
            f"Nothing to check: the card claims epsilon by {said}, and upper bounds are those by "
            f"{', '.join(CLAIMS)}; gdp is an estimate. Usually no method has a number for this "
            "run, and then nothing is proved of it."
        )
    for method, claimed, bound in results:
        verdict = "holds" if holds(claimed, bound) else "DOES NOT HOLD"
        print(
            f"{method:12} claims epsilon {claimed:.4f} for one {card['mechanism']['unit']} at "
            f"delta={card['delta']:g}; "
            f"recomputed {bound:.4f}: {verdict}"
        )
    sys.exit(not all(holds(claimed, bound) for _, claimed, bound in results))


if __name__ == "__main__":
    app.run(main)

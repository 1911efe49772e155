# SPDX-License-Identifier: Apache-2.0
"""Recomputes the epsilon of a privacy card, without dpjax.

  command   python experiments/verify.py RUN/privacy.json
  result    one line per claim, and exit status 1 if one is too small

The card says how examples were drawn, how much noise each step had, how many steps ran and
what was asked of all the data before the first.  This file hands those facts to Google's
dp-accounting and nothing else, so it checks dpjax's own accounting as well as the card's
arithmetic.
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
import numpy as np
from absl import app, logging

RELATION = {
    "add-or-remove": dp.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "zero-out": dp.NeighboringRelation.ADD_OR_REMOVE_ONE,  # the same for a sum
    "replace-one": dp.NeighboringRelation.REPLACE_ONE,
}
CLAIMS = ("rdp", "pld", "rdp-classic")
TOLERANCE = 0.005  # of the comparison: bounds are found on grids of orders and of losses


def event_of(card: dict[str, Any], *, halve: bool) -> dp.DpEvent:
    """The privacy event that a card describes.

    ``halve``: dp-accounting's RDP does not double the sensitivity for replace-one
    neighbours, so the noise it is told of is halved instead.
    """
    if card.get("projections") is not None:
        sys.exit(
            "Norms were estimated from random projections. dp-accounting has no such event, so "
            "nothing is recomputed: dpjax.accounting alone accounts for this card."
        )
    sampling = card["sampling"]
    rate = sampling["batch_size"] / sampling["examples"]
    if sampling["name"] == "poisson" and not math.isclose(sampling["sampling_rate"], rate):
        sys.exit(
            f"The card counts a rate of {sampling['sampling_rate']:.4g}, and its batches are of "
            f"{rate:.4g}: one of both is not of this run, and no claim is checked. Usually the "
            "card was altered; dpjax.reports.card writes both from the sampler."
        )
    half = 2 if halve else 1
    runs = [(float(z) / half, n) for z, n in card["noise"]["multiplier_and_steps"]]
    if sampling["name"] == "curriculum" and "not private" in sampling["claim"]:
        return dp.NonPrivateDpEvent()
    if "clipping" in card and math.isinf(float(card["clipping"]["sensitivity"])) and runs:
        return dp.NonPrivateDpEvent()
    if sampling["name"] in ("shuffled", "curriculum"):
        steps = sampling["examples"] // sampling["batch_size"]
        each = np.repeat([z for z, _ in runs], [n for _, n in runs])
        runs = [(min(each[i : i + steps]), 1) for i in range(0, len(each), steps)]
    queries = card.get("preparation", {}).get("gaussian_multipliers", [])
    before = [event_of(spent, halve=halve) for spent in card.get("before", [])]
    before += [gaussian(float(z) / half) for z in queries]
    if sampling["name"] == "scored":  # the largest rate of any bin, step by step
        rows = [rate for rate, steps in sampling["rates"] for _ in range(steps)]
        each = [z for z, n in runs for _ in range(n)]
        pairs = collections.Counter(zip(rows + rows[-1:] * len(each), each, strict=False))
        steps = [
            dp.SelfComposedDpEvent(step_event({**sampling, "sampling_rate": rate}, z), n)
            for (rate, z), n in pairs.items()
            if rate > 0
        ]
    else:
        steps = [dp.SelfComposedDpEvent(step_event(sampling, z), n) for z, n in runs]
    return dp.ComposedDpEvent([*before, *steps])


def gaussian(multiplier: float) -> dp.DpEvent:
    """A sum with noise; infinite noise, which a card calls "inf", tells nothing."""
    return dp.NoOpDpEvent() if math.isinf(multiplier) else dp.GaussianDpEvent(multiplier)


def step_event(sampling: dict[str, Any], multiplier: float) -> dp.DpEvent:
    """One step, as this sampler's claim allows it to be counted."""
    noise = gaussian(multiplier)
    if math.isinf(multiplier):
        return noise
    if sampling["name"] in ("poisson", "scored") and sampling["sampling_rate"] < 1:
        return dp.PoissonSampledDpEvent(sampling["sampling_rate"], noise)
    if sampling["name"] == "fixed":
        return dp.SampledWithoutReplacementDpEvent(
            sampling["examples"], int(sampling["batch_size"]), noise
        )
    return noise


def recompute(card: dict[str, Any], method: str) -> float:
    """The epsilon of a card by one of dp-accounting's accountants."""
    relation = RELATION[card["neighbours"]]
    halve = method == "rdp" and card["neighbours"] == "replace-one"
    if halve and card["sampling"]["name"] != "fixed":
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
    ran = sum(steps for _, steps in card["noise"]["multiplier_and_steps"])
    if card["steps"] != ran:
        sys.exit(
            f"The card counts {card['steps']:,} steps, and its noise is that of {ran:,}: one of "
            "both is not of this run, and no claim is checked. Usually the card was altered; "
            "dpjax.reports.card writes both from the ledger."
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
            f"{method:12} claims epsilon {claimed:.4f} for one {card['unit']} at "
            f"delta={card['delta']:g}; "
            f"recomputed {bound:.4f}: {verdict}"
        )
    sys.exit(not all(holds(claimed, bound) for _, claimed, bound in results))


if __name__ == "__main__":
    app.run(main)

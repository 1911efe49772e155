# SPDX-License-Identifier: Apache-2.0
"""The advisories on privacy: releases and commits whose cards claimed too small an epsilon.

`SECURITY.md` describes how an advisory comes about. A card is affected if an advisory lists its
version or the digest of its sources, and concerns its facts. Its epsilon may follow from its facts,
but the program that wrote it did not do what the facts state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from dpjax.verify.facts import Card


class Advisory(NamedTuple):
    """A mistake in dpjax that made claims too small."""

    name: str
    happened: str
    cure: str
    concerns: Callable[[Card], bool]
    versions: tuple[str, ...] = ()
    """The affected releases."""
    sources: tuple[str | None, ...] = ()
    """Digests of affected commits (`dpjax._versions.sources`); None is a card without a digest."""


def has_fresh_bins(card: Card) -> bool:
    """Whether an epsilon is amplified by bins that were drawn from the key of the run."""
    if card.randomness == "supplied":
        return False  # the statement limits the claim to one run per key
    for run in (card.mechanism, *card.mechanism.before):
        by_strategy = run.noise is not None and run.sampling.place == "random"
        if by_strategy or run.sampling.event == "allocation":
            return True
    return False


ADVISORIES = (
    Advisory(
        name="DPJAX-2026-1",
        happened=(
            "runs that began from one state, or from copies of one folder, drew the same bins, so "
            "together they cost more than their cards claim"
        ),
        cure=(
            "If no other run began from its state, the claim holds. Otherwise account for n such "
            "runs with random_allocation as one run, with the noise multiplier divided by the root "
            "of n; with balls_in_bins no bound is proved for them together"
        ),
        concerns=has_fresh_bins,
        sources=(None,),
    ),
)


def advisories_on(card: Card) -> Iterator[tuple[bool, str]]:
    """Yields each advisory that affects a card: its claims must not be relied on."""
    for advisory in ADVISORIES:
        of_release = card.versions.get("dpjax") in advisory.versions
        of_commit = card.sources in advisory.sources
        if (of_release or of_commit) and advisory.concerns(card):
            words = f"{advisory.name}: {advisory.happened}: AFFECTED. {advisory.cure}."
            yield False, f"{'advisory':12} {words}"

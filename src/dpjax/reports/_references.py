# SPDX-License-Identifier: Apache-2.0
"""The papers behind a computation, as BibTeX: the algorithm, the accountants, the rule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import resources
from types import MappingProxyType

from dpjax.mechanism import Mechanism

# The BibTeX key of the paper on each method, sampler, rule or feature.
_WORKS = MappingProxyType(
    {
        "dpsgd": "abadi2016deep",
        "client": "mcmahan2018learning",
        "rdp": "mironov2017renyi",
        "pld": "doroshenko2022connect",
        "random_allocation": "feldman2025privacy",
        "grouped": "liu2021grouped",
        "adaptive": "andrew2021differentially",
        "risk": "kulynych2024attack",
        "preparation": "tramer2021differentially",
        "psac": "xia2023differentially",
        "automatic": "bu2023automatic",
    }
)


def references(mechanism: Mechanism, methods: Iterable[str]) -> Iterator[str]:
    """BibTeX of the works that a mechanism and these accounting methods use."""
    file = resources.files("dpjax.reports").joinpath("references.bib")
    entries = {}
    for entry in file.read_text(encoding="utf-8").split("\n\n"):
        key = entry.partition("{")[2].partition(",")[0]  # from "@article{key, ..."
        entries[key] = entry.strip()
    # A reader meets the names in this order; a rule without a paper has no row.
    used = ["dpsgd", *methods, mechanism.sampling.name, mechanism.clipping.name]
    if mechanism.of_clients:
        used.insert(1, "client")
    if mechanism.adaptive is not None:
        used.append("adaptive")
    if mechanism.risk is not None:
        used.append("risk")
    if mechanism.preparation:
        used.append("preparation")
    for name in used:
        if name in _WORKS:
            yield entries[_WORKS[name]]

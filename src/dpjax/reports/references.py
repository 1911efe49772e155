# SPDX-License-Identifier: Apache-2.0
"""The papers behind a computation, as BibTeX: the algorithm, the accountants, the rule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import resources
from types import MappingProxyType

from dpjax.mechanism import Mechanism

_WORKS = MappingProxyType(
    {
        "dpsgd": "abadi2016deep",
        "client": "mcmahan2018learning",
        "rdp": "mironov2017renyi",
        "pld": "doroshenko2022connect",
        "random_allocation": "feldman2025privacy",
        "grouped": "liu2021grouped",
        "adaptive": "andrew2021differentially",
        "preparation": "tramer2021differentially",
        "psac": "xia2023differentially",
        "automatic": "bu2023automatic",
    }
)


def references(mechanism: Mechanism, methods: Iterable[str]) -> Iterator[str]:
    """BibTeX of the works that a mechanism and these accounting methods use."""
    text = resources.files("dpjax.reports").joinpath("references.bib").read_text(encoding="utf-8")
    entries = {entry.partition("{")[2].partition(",")[0]: entry for entry in text.split("\n\n")}
    prepared = ["preparation"] * bool(mechanism.preparation)
    adapted = ["adaptive"] * (mechanism.adaptive is not None)
    named = (mechanism.sampling.name, mechanism.clipping.name)
    # In the order in which a reader meets them; a rule without a paper has no row.
    for key in ("dpsgd", mechanism.unit, *methods, *named, *adapted, *prepared):
        if key in _WORKS:
            yield entries[_WORKS[key]].strip()

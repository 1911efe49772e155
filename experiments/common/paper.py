# SPDX-License-Identifier: Apache-2.0
"""A paper as data: its rows, the tables and figures that show them, and what it claims."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from experiments.common.claims import Claim


class Paper(NamedTuple):
    """What the package of a paper hands to `runs.main`, to the tables and to the gallery.

    Attributes:
      name: Of its results file.
      title: Of its section on the page of results.
      package: What runs it: ``python -m`` of this.
      rows: Its rows by key, which is also the key in the results file.
      tables: For each table, figure or other word of ``--table``, the keys of its rows.
      train: Trains a row: ``(row, seed, folder) -> numbers``.
      epsilons: From a row, and if a claim is of its first epochs their number, to its mechanism,
        what the paper accounts for, by which conversion, and the delta if not `runs.DELTA`.
      claims: What the paper claims of its rows.
      small: A few rows for ``--smoke``.
      figures: Its figures, by name.
      note: A sentence below its table of claims.
    """

    name: str
    title: str
    package: str
    rows: Mapping[str, Any]
    tables: Mapping[str, Sequence[str]]
    train: Callable[[Any, int, pathlib.Path | None], Mapping[str, Any]]
    epsilons: Callable[..., tuple[Any, ...]]
    claims: Sequence[Claim]
    small: Mapping[str, Any]
    figures: Mapping[str, Any] = MappingProxyType({})
    note: str = ""

    @classmethod
    def of(cls, name: str, title: str, settings: Any, **more: Any) -> Paper:
        """A paper whose package has a module of settings with all rows, tables and claims."""
        data = {"rows": settings.ROWS, "tables": settings.TABLES, "claims": settings.CLAIMS}
        return cls(name, title, settings.__package__, small=settings.SMALL, **data, **more)

    @property
    def command(self) -> str:
        return f"python -m {self.package}"

    @property
    def printed(self) -> dict[str, float]:
        """Published accuracies of rows at their end; of several the first."""
        numbers = [c for c in self.claims if not (c.compares or c.at) and c.measure == "accuracy"]
        return {key: float(claim.published) for claim in reversed(numbers) for key in claim.rows}

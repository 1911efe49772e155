# SPDX-License-Identifier: Apache-2.0
"""A paper as data: its rows, the tables and figures that show them, and what it claims."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from experiments.common.claims import Claim


class Paper(NamedTuple):
    """A paper, as `runs.main`, the tables and the gallery take it.

    Attributes:
      name: Of its results file.
      title: Of its section on the page of results.
      package: The module of its command, ``python -m PACKAGE``.
      rows: Its rows by key, which is also the key in the results file.
      tables: For each table, figure or other word of ``--table``, the keys of its rows.
      train: Trains a row: ``(row, seed, folder) -> numbers``.
      epsilons: Takes a row, and the number of epochs if a claim is about its first ones. Returns
        its mechanism, the event of the paper, its conversion, and the delta if not `runs.DELTA`.
      claims: The claims of the paper about its rows.
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
        return cls(
            name=name,
            title=title,
            package=settings.__package__,
            rows=settings.ROWS,
            tables=settings.TABLES,
            claims=settings.CLAIMS,
            small=settings.SMALL,
            **more,
        )

    @property
    def command(self) -> str:
        """The command that runs its rows."""
        return f"python -m {self.package}"

    @property
    def printed(self) -> dict[str, float]:
        """Published accuracies of rows at their end; the first if there are several."""
        accuracies: dict[str, float] = {}
        for claim in self.claims:
            if claim.measure == "accuracy" and not claim.compares and not claim.at:
                for key in claim.rows:
                    accuracies.setdefault(key, float(claim.published))
        return accuracies

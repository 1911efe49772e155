# SPDX-License-Identifier: Apache-2.0
"""A paper as data: its rows, the tables and figures that show them, and what it claims."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.common.claims import Claim


class Paper(NamedTuple):
    """What the package of a paper hands to `runs.main`, to the tables and to the gallery.

    Attributes:
      name: Of its results file.
      title: Of its section on the page of results.
      command: What runs it.
      rows: Its rows by key, which is also the key in the results file.
      tables: For each table, figure or other word of ``--table``, the keys of its rows.
      train: Trains a row: ``(row, seed, folder) -> numbers``.
      epsilons: From a row, and a number of epochs or 0 for all, to its mechanism, what the paper
        accounts for, by which conversion, and at which delta if not `runs.DELTA`.
      claims: What the paper claims of its rows.
      figures: Its figures, by name.
      small: A few rows for ``--smoke``.
      note: A sentence below its table of claims.
    """

    name: str
    title: str
    command: str
    rows: Mapping[str, Any]
    tables: Mapping[str, Sequence[str]]
    train: Callable[[Any, int, pathlib.Path | None], Mapping[str, Any]]
    epsilons: Callable[[Any, int], tuple[Any, ...]]
    claims: Sequence[Claim]
    figures: Mapping[str, Any]
    small: Mapping[str, Any]
    note: str = ""

    @property
    def printed(self) -> dict[str, float]:
        """Published accuracies of rows at their end; of several the first."""
        numbers = [c for c in self.claims if not (c.compares or c.at) and c.measure == "accuracy"]
        return {key: float(claim.published) for claim in reversed(numbers) for key in claim.rows}

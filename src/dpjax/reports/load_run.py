# SPDX-License-Identifier: Apache-2.0
"""Reads the folder of a run.

Only ``metrics.jsonl`` is required. Numbers that were not finite are null in JSON and NaN here,
except epsilon, which is infinite.

A privacy card whose steps differ from the log's, or whose mechanism differs from the one in
``run.json``, belongs to an earlier run in the same folder. The card and the
files written with it are ignored: the epsilon of one run with the accuracy of another would be a
false claim.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from dpjax import accounting
from dpjax._files import read_arrays, read_json, read_log
from dpjax.accounting.rounding import upwards
from dpjax.mechanism.card import check_format

_INTERRUPTED = (
    "Usually the run was interrupted while it wrote the file, or the disk was full. Run the same "
    "command again, which writes it again, or remove the file to read the others."
)


class Missing(LookupError):
    """The folder lacks what a figure needs; the message names it and its file."""


class SavedRun(NamedTuple):
    """The files of a folder; None where a file does not exist or belongs to an earlier run.

    ``foreign`` says why the card belongs to an earlier run; it is empty if the card is this run's.
    """

    path: pathlib.Path
    rows: list[dict[str, Any]]
    identity: dict[str, Any] | None = None
    card: dict[str, Any] | None = None
    statement: str | None = None
    config: dict[str, Any] | None = None
    evaluation: Mapping[str, np.ndarray] | None = None
    diagnostics: Mapping[str, np.ndarray] | None = None
    foreign: str = ""

    def series(self, *names: str) -> Float[np.ndarray, "rows width"]:
        """The value of each row under these nested names: a number, or one per group, or NaN."""
        found = []
        for row in self.rows:
            value: Any = row
            for name in names:
                value = value.get(name) if isinstance(value, dict) else None
            values = np.atleast_1d(np.asarray(value, dtype=np.float64)).ravel()
            found.append(np.where(np.isfinite(values), values, np.nan))
        # Rows may hold one number or one per group; rows of another width become NaN rather than an
        # error, because an older version may have written them.
        width = max((len(values) for values in found), default=1)
        table = np.full((len(found), width), np.nan)
        for line, values in zip(table, found, strict=True):
            line[:] = values if len(values) in (1, width) else np.nan
        if np.isnan(table).all():
            raise Missing(f"metrics.jsonl has no {' / '.join(names)}")
        return table

    def array(self, file: str, name: str) -> np.ndarray:
        """An array of ``evaluation`` or ``diagnostics``."""
        arrays = getattr(self, file)
        if arrays is None:
            raise self.missing(f"{file}.npz")
        if name not in arrays or not arrays[name].size:
            raise Missing(f"{file}.npz has no {name}")
        return arrays[name]

    def missing(self, file: str) -> Missing:
        """The error for a file of the folder that was not read."""
        return Missing(f"{file} is not of this run" if self.foreign else f"there is no {file}")

    @property
    def mechanism(self) -> dict[str, Any]:
        """The description of the mechanism, see `dpjax.mechanism.card`; empty if unknown."""
        return (self.card or self.identity or {}).get("mechanism", {})

    @property
    def seed(self) -> Any:
        """The published seed: from the card, or without one from ``run.json``.

        It is True for another supplied key, or that of an earlier run.
        """
        if self.card is not None:
            return self.card.get("seed_published")
        supplied = (self.identity or {}).get("randomness") == "supplied"
        before = any(spent.get("seeded") for spent in self.mechanism.get("before", ()))
        return supplied or before or None

    @property
    def epsilons(self) -> dict[str, float]:
        """The final epsilon by each proven method, best first; without a card, the log's."""
        if self.card is None:
            last = self.rows[-1]
            # An estimate in the log is no bound, so the page must not print it as one.
            if last.get("estimate"):
                return {"any method": math.inf}
            return {str(last.get("method", "the log")): _number(last.get("epsilon"), math.inf)}
        values = {
            method: float(claim["value"])
            for method, claim in self.card["epsilon"].items()
            if claim["proven"]
        }
        # Ties go to the method that this version knows, whose words can be printed.
        best_first = sorted(values, key=lambda m: (values[m], m not in accounting.METHODS))
        return {method: values[method] for method in best_first} or {"any method": math.inf}

    @property
    def epsilon(self) -> float:
        """The final epsilon by the best proven method: the claim."""
        return min(self.epsilons.values())

    @property
    def not_private(self) -> bool:
        """Whether the run is known not to be private; other infinite epsilons are not proved."""
        known = self.card is not None and bool(self.card.get("not_private"))
        return known and math.isinf(self.epsilon)

    @property
    def accuracy(self) -> float:
        """The test accuracy of the released parameters, a fraction; NaN if it is not one number.

        An earlier row's accuracy is of earlier parameters, so it never stands in for the last one.
        """
        return _number(self.rows[-1].get("accuracy"))

    @property
    def stated(self) -> str:
        """At which delta and by which accountant the log states epsilon, for labels of axes.

        Logs of earlier versions do not name the accountant.
        """
        found = {_number(row.get("delta")) for row in self.rows}
        deltas = {f" at delta {upwards(d, '.3g')}" for d in found if not math.isnan(d)}
        methods = {
            f" by {row['method']}{' (an estimate)' * bool(row.get('estimate'))}"
            for row in self.rows
            if "method" in row
        }
        return ",".join(" or".join(sorted(each)) for each in (deltas, methods) if each)

    @property
    def measured_at(self) -> str:
        """The parameters that ``evaluation.npz`` and ``diagnostics.npz`` are of, in words."""
        averaged = str((self.diagnostics or {}).get("parameters")) == "averaged"
        return "at the averaged parameters" if averaged else "at the released parameters"

    @property
    def delta(self) -> float:
        """The delta at which epsilon is stated."""
        return _number((self.card or self.rows[-1]).get("delta"))


def read(directory: str | pathlib.Path, *, arrays: bool = True) -> SavedRun:
    """Reads the folder of a run.

    Args:
      directory: Where `dpjax.fit` and the binary wrote.
      arrays: Whether ``evaluation.npz`` and ``diagnostics.npz`` are read too.

    Returns:
      A `SavedRun`, with rows in the order of their steps.

    Raises:
      FileNotFoundError: Without ``metrics.jsonl`` there is no run.
      ValueError: A file is damaged or of another format, or the log has no whole line.
    """
    path = pathlib.Path(directory)
    rows, identity = _rows(path / "metrics.jsonl"), _json(path / "run.json")
    card = _json(path / "privacy.json")
    # A killed run with `--overwrite` leaves the card of the run before it: its smaller epsilon must
    # not stand on this run's page.
    if card is not None and (why := _foreign(path, card, identity or {}, rows)):
        return SavedRun(path, rows, identity, foreign=why)
    evaluation, diagnostics = (
        read_arrays(file, "reports.report", _INTERRUPTED) if arrays and file.is_file() else None
        for file in (path / "evaluation.npz", path / "diagnostics.npz")
    )
    statement, config = _text(path / "statement.txt"), _json(path / "config.json")
    return SavedRun(path, rows, identity, card, statement, config, evaluation, diagnostics)


def _foreign(
    path: pathlib.Path,
    card: Mapping[str, Any],
    identity: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
) -> str:
    """Why a card does not belong to the run with these rows and this identity, or nothing."""
    check_format(card.get("mechanism"), str(path / "privacy.json"))
    steps = int(rows[-1].get("counted", rows[-1]["step"]))
    counted = _number(card.get("steps", 0))  # NaN for text, which is another run's
    if counted != steps:
        return f"it counts {card.get('steps')} steps, and the log counts {steps:,}"
    # Algorithms without a Mechanism write none into run.json; the steps alone are compared then.
    there, here = card["mechanism"], identity.get("mechanism", card["mechanism"])
    differ = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    return f"run.json describes another mechanism: {', '.join(differ)} differ" if differ else ""


def _rows(path: pathlib.Path) -> list[dict[str, Any]]:
    if not path.is_file():
        missing = f"has no {path.name}, so it is not the folder of a run"
        raise FileNotFoundError(
            f"reports.report: {path.parent} {missing if path.parent.is_dir() else 'is no folder'}. "
            "Usually the path is one level off; otherwise train with dpjax.fit(..., "
            "directory=...), which writes it."
        )
    rows = read_log(path)
    if not rows:
        raise ValueError(f"{path}: holds no whole line yet, so there is nothing to show.")
    return rows


def _number(value: Any, otherwise: float = math.nan) -> float:
    """A number of the log; ``otherwise`` for null, text, or one number per group."""
    return float(value) if isinstance(value, int | float) else otherwise


def _text(path: pathlib.Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _json(path: pathlib.Path) -> dict[str, Any] | None:
    return read_json(path) if path.is_file() else None

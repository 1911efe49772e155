# SPDX-License-Identifier: Apache-2.0
"""Reads the folder of a run: ``metrics.jsonl``, and the other files that are there.

A privacy card of other steps than the log's, or of another mechanism than that of ``run.json``, is
an earlier run's; it and the files written with it are ignored.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float

from dpjax import accounting
from dpjax._display import rate
from dpjax._files import read_arrays, read_json, read_log
from dpjax._rounding import upwards
from dpjax.mechanism.card import check_format

T = TypeVar("T")


class Missing(LookupError):
    """The folder lacks what a figure needs; the message names it and its file."""


class SavedRun(NamedTuple):
    """The files of a folder; None for one that does not exist or is an earlier run's."""

    path: pathlib.Path
    rows: list[dict[str, Any]]  # metrics.jsonl, by step
    identity: dict[str, Any] | None = None  # run.json: the mechanism, and whose the key was
    card: dict[str, Any] | None = None  # privacy.json
    statement: str | None = None
    board: str | None = None
    config: dict[str, Any] | None = None
    evaluation: Mapping[str, np.ndarray] | None = None
    diagnostics: Mapping[str, np.ndarray] | None = None
    foreign: str = ""  # why the card is an earlier run's

    def series(self, *names: str) -> Float[np.ndarray, "rows width"]:
        """The value of each row under these nested names: a number, or one per group, or NaN."""
        values = [_values(row, names) for row in self.rows]
        # Rows of another width stay NaN: an older version may have written them. A single number
        # counts for all groups.
        width = max(map(len, values))
        table = np.full((len(values), width), np.nan)
        for line, value in zip(table, values, strict=True):
            if len(value) in (1, width):
                line[:] = value
        if np.isnan(table).all():
            raise Missing(f"metrics.jsonl has no {' / '.join(names)}")
        return table

    @property
    def steps(self) -> np.ndarray:
        """The step of each row."""
        return self.series("step")[:, 0]

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
        if self.foreign:
            return Missing(f"{file} is not of this run")
        return Missing(f"there is no {file}")

    @property
    def mechanism(self) -> dict[str, Any]:
        """The description of the mechanism, see `dpjax.mechanism.card`; empty if unknown."""
        return (self.card or self.identity or {}).get("mechanism", {})

    @property
    def unit(self) -> str:
        """Whose data are protected."""
        return self.mechanism.get("unit", "example")

    @property
    def supplied(self) -> bool:
        """Whether the caller supplied the key of this run, or of one before it."""
        facts = (self.card, self.identity, *self.mechanism.get("before", ()))
        return any(run and run.get("randomness") == "supplied" for run in facts)

    @property
    def epsilons(self) -> dict[str, float]:
        """The final epsilon by each proven method, smallest first; without a card, that of the log.

        If no method proves one, the only entry is an infinite epsilon, "any method".
        """
        last = self.rows[-1]
        values = {}
        if self.card is not None:
            for name, claim in self.card["epsilon"].items():
                if claim["proven"]:
                    values[name] = float(claim["value"])
        elif not last.get("estimate"):  # an estimate is not a bound
            name = str(last.get("method", "the log"))
            # JSON has no infinity: an infinite epsilon is null in the log.
            values[name] = number(last.get("epsilon"), otherwise=math.inf)

        def rank(name: str) -> tuple[float, bool]:
            # A card of another version may name a method that this one does not know. At equal
            # epsilon a known method comes first (False < True).
            return values[name], name not in accounting.METHODS

        best_first = sorted(values, key=rank)
        return {name: values[name] for name in best_first} or {"any method": math.inf}

    @property
    def epsilon(self) -> float:
        """The final epsilon by the best proven method: the claim."""
        return min(self.epsilons.values())

    @property
    def delta(self) -> float:
        """The delta at which epsilon is stated."""
        return number((self.card or self.rows[-1]).get("delta"))

    @property
    def accuracy(self) -> float:
        """The test accuracy of the released parameters, a fraction; NaN if it is not one number."""
        return round(number(self.rows[-1].get("accuracy")), 6)  # it is of float32


def protects(facts: Mapping[str, Any]) -> str:
    """Whose data a described mechanism protects, in words: costs of others do not add."""
    return f"{facts['neighbours']} neighbours of one {facts['unit']}"


def speed_of(run: SavedRun) -> str:
    """The median of the log's units per second; empty without one."""
    name = f"{run.unit}s_per_second"
    speeds = [number(row.get(name)) for row in run.rows if name in row]
    if not speeds:
        return ""
    return rate(float(np.median(speeds)))


def stated_at(run: SavedRun) -> str:
    """The delta and the accountant of the log's epsilon, to append to "epsilon" in a label.

    For example " at delta 1e-05, by rdp", and " (an estimate)" after it if the epsilon is not a
    bound; empty if the log has none of them.
    """
    last = run.rows[-1]
    delta = number(last.get("delta"))
    words = ""
    if not math.isnan(delta):
        words += f" at delta {upwards(delta, '.3g')}"
    if "method" in last:
        words += f", by {last['method']}"
    if last.get("estimate"):
        words += " (an estimate)"
    return words


def read(directory: str | pathlib.Path, *, arrays: bool = True) -> SavedRun:
    """Reads the folder of a run; ``arrays=False`` skips the ``.npz`` files, which may be large."""
    path = pathlib.Path(directory)
    rows = read_log(path / "metrics.jsonl")
    if not rows:
        raise FileNotFoundError(f"reports.report: {path}: expected a metrics.jsonl with a row.")
    identity = _if_there(path / "run.json", read_json)
    card = _if_there(path / "privacy.json", read_json)
    if card is not None:
        # Raises if another version of dpjax wrote the card in a format that this one cannot read.
        check_format(card.get("mechanism"), str(path / "privacy.json"))
        # A killed run may leave the card of the run before it, and the files that were written with
        # that card. None of them is read, because that epsilon must not be on this run's page.
        why_foreign = _foreign(card, identity or {}, rows)
        if why_foreign:
            return SavedRun(path, rows, identity, foreign=why_foreign)
    evaluation = None
    diagnostics = None
    if arrays:
        read_npz = partial(read_arrays, call="reports.report")  # the caller that errors name
        evaluation = _if_there(path / "evaluation.npz", read_npz)
        diagnostics = _if_there(path / "diagnostics.npz", read_npz)
    read_text = partial(pathlib.Path.read_text, encoding="utf-8")
    return SavedRun(
        path=path,
        rows=rows,
        identity=identity,
        card=card,
        statement=_if_there(path / "statement.txt", read_text),
        board=_if_there(path / "board.txt", read_text),
        config=_if_there(path / "config.json", read_json),
        evaluation=evaluation,
        diagnostics=diagnostics,
    )


def number(value: Any, otherwise: float = math.nan) -> float:
    """A number of the log; ``otherwise`` for null, text, or one number per group."""
    return float(value) if isinstance(value, int | float) else otherwise


def _if_there(file: pathlib.Path, read: Callable[[pathlib.Path], T]) -> T | None:
    """The content of a file of the folder; None if the run has not written it."""
    return read(file) if file.is_file() else None


def _foreign(card: dict[str, Any], identity: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Why a card does not belong to the run with these rows and this identity, or nothing."""
    steps = rows[-1].get("counted", rows[-1]["step"])
    if card.get("steps") != steps:
        return f"it counts {card.get('steps')} steps, and the log counts {steps:,}"
    # A folder without run.json has only the steps to compare.
    if card["mechanism"] != identity.get("mechanism", card["mechanism"]):
        return "run.json describes another mechanism"
    return ""


def _values(row: Any, names: Sequence[str]) -> np.ndarray:
    """The numbers under nested names of a row; NaN for text, infinity and a name that it lacks."""
    for name in names:
        if not isinstance(row, dict):
            return np.array([np.nan])
        row = row.get(name)
    try:
        values = np.atleast_1d(np.asarray(row, np.float64)).ravel()
    except (TypeError, ValueError):  # text
        return np.array([np.nan])
    return np.where(np.isfinite(values), values, np.nan)

# SPDX-License-Identifier: Apache-2.0
"""Reads the folder of a run: ``metrics.jsonl``, and what else is there.

A privacy card of other steps than the log's, or of another mechanism than that of ``run.json``, is
an earlier run's; it and the files written with it are ignored.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from dpjax import accounting
from dpjax._display import rate
from dpjax._files import read_arrays, read_json, read_log
from dpjax.accounting.rounding import upwards
from dpjax.mechanism.card import check_format

MEASURES = {
    "accuracy": "test accuracy",
    "balanced_accuracy": "balanced accuracy",
    "auroc": "AUROC",
    "average_precision": "average precision",
    "rmse": "test RMSE",
    "mae": "test MAE",
    "r2": "R2",
}
"""What `dpjax train` logs of the test examples, and how pages and tables call it."""
PER_CENT = ("accuracy", "balanced_accuracy")


def shown(measure: str, value: float, digits: int = 1) -> str:
    """The value of one of `MEASURES`; ``digits`` of a per cent."""
    if measure in PER_CENT:
        return f"{100 * value:.{digits}f} %"
    return f"{value:.4g}" if measure in ("rmse", "mae") else f"{value:.3f}"


class Missing(LookupError):
    """The folder lacks what a figure needs; the message names it and its file."""


class SavedRun(NamedTuple):
    """The files of a folder; None for one that does not exist or is an earlier run's."""

    path: pathlib.Path
    rows: list[dict[str, Any]]
    identity: dict[str, Any] | None = None
    card: dict[str, Any] | None = None
    statement: str | None = None
    board: str | None = None
    config: dict[str, Any] | None = None
    evaluation: Mapping[str, np.ndarray] | None = None
    diagnostics: Mapping[str, np.ndarray] | None = None
    foreign: str = ""  # why the card is an earlier run's

    def series(self, *names: str) -> Float[np.ndarray, "rows width"]:
        """The value of each row under these nested names: a number, or one per group, or NaN."""
        values = [_values(row, names) for row in self.rows]
        # Rows of another width become NaN: an older version may have written them.
        width = max(map(len, values))
        table = np.full((len(values), width), np.nan)
        for line, value in zip(table, values, strict=True):
            line[:] = value if len(value) in (1, width) else np.nan
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
        return Missing(f"{file} is not of this run" if self.foreign else f"there is no {file}")

    @property
    def mechanism(self) -> dict[str, Any]:
        """The description of the mechanism, see `dpjax.mechanism.card`; empty if unknown."""
        return (self.card or self.identity or {}).get("mechanism", {})

    @property
    def supplied(self) -> bool:
        """Whether the caller supplied the key of this run, or of one before it."""
        facts = (self.card, self.identity, *self.mechanism.get("before", ()))
        return any(run and run.get("randomness") == "supplied" for run in facts)

    @property
    def epsilons(self) -> dict[str, float]:
        """The final epsilon by each proven method, best first; without a card, the log's."""
        last = self.rows[-1]
        if self.card is not None:
            claims = self.card["epsilon"].items()
            values = {name: float(claim["value"]) for name, claim in claims if claim["proven"]}
        elif last.get("estimate"):  # which is no bound
            values = {}
        else:
            values = {str(last.get("method", "the log")): _number(last.get("epsilon"), math.inf)}
        # Ties go to the method that this version knows, whose words can be printed.
        best_first = sorted(values, key=lambda name: (values[name], name not in accounting.METHODS))
        return {name: values[name] for name in best_first} or {"any method": math.inf}

    @property
    def epsilon(self) -> float:
        """The final epsilon by the best proven method: the claim."""
        return min(self.epsilons.values())

    @property
    def accuracy(self) -> float:
        """The test accuracy of the released parameters, a fraction; NaN if it is not one number."""
        return round(_number(self.rows[-1].get("accuracy")), 6)  # it is of float32

    @property
    def speed(self) -> str:
        """The median of the log's examples or clients per second; empty without one."""
        name = f"{self.mechanism.get('unit', 'example')}s_per_second"
        speeds = [_number(row.get(name)) for row in self.rows if name in row]
        return rate(float(np.median(speeds))) if speeds else ""

    @property
    def guesses(self) -> dict[str, float]:
        """What always guessing the most frequent label, or the mean, has; empty if unknown."""
        answers = self.evaluation or {}
        if "targets" in answers:
            off = answers["targets"] - answers["targets"].mean()
            return {"rmse": float(off.std()), "mae": float(np.abs(off).mean()), "r2": 0.0}
        labels = answers.get("labels", np.empty(0))
        if not (counts := np.unique(labels, return_counts=True)[1]).size:
            return {}
        most, ones = counts.max() / labels.size, np.mean(labels == 1)
        guesses = {"accuracy": round(float(most), 6), "balanced_accuracy": 1 / counts.size}
        return guesses | {"auroc": 0.5, "average_precision": float(ones)}

    @property
    def measures(self) -> dict[str, float]:
        """The `MEASURES` of the last row; balanced accuracy of unlike classes alone."""
        last = {name: _number(self.rows[-1].get(name)) for name in MEASURES}
        guesses = self.guesses
        if not guesses.get("accuracy", 0) > 1.5 * guesses.get("balanced_accuracy", 1):
            del last["balanced_accuracy"]
        return {name: value for name, value in last.items() if not math.isnan(value)}

    @property
    def beside_a_guess(self) -> str:
        """What a guess has of the first measure, and whether the model is no better, in words."""
        name, value = next(iter(self.measures.items()), ("accuracy", math.nan))
        if (guess := self.guesses.get(name)) is None:
            return ""
        better = value < guess if name == "rmse" else value > guess
        always = "Always" if better else "The model is no better than always"
        what = "mean of the test targets" if name == "rmse" else "most frequent class"
        return f"{always} guessing the {what}: {shown(name, guess)}."

    @property
    def others_beside_a_guess(self) -> str:
        """The measures after the first one, each with what a guess has, in words."""
        words, guesses = [], self.guesses
        for name, value in list(self.measures.items())[1:]:
            of = f" (a guess: {shown(name, guesses[name])})" if name in guesses else ""
            words.append(f"{MEASURES[name]} {shown(name, value)}{of}")
        return ", ".join(words)

    @property
    def stated(self) -> str:
        """At which delta and by which accountant the log states epsilon, for labels of axes."""
        last, delta = self.rows[-1], _number(self.rows[-1].get("delta"))
        at = "" if math.isnan(delta) else f" at delta {upwards(delta, '.3g')}"
        by = f", by {last['method']}" if "method" in last else ""
        return at + by + " (an estimate)" * bool(last.get("estimate"))

    @property
    def delta(self) -> float:
        """The delta at which epsilon is stated."""
        return _number((self.card or self.rows[-1]).get("delta"))


def read(directory: str | pathlib.Path, *, arrays: bool = True) -> SavedRun:
    """Reads the folder of a run, with or without its ``.npz`` files; rows are in order of steps."""
    path = pathlib.Path(directory)
    rows = read_log(path / "metrics.jsonl")
    if not rows:
        raise FileNotFoundError(f"reports.report: {path}: expected a metrics.jsonl with a row.")
    identity, card, config = (
        read_json(file) if file.is_file() else None
        for file in (path / "run.json", path / "privacy.json", path / "config.json")
    )
    # A killed run may leave the card of the run before it: that epsilon must not be on this page.
    if card is not None:
        check_format(card.get("mechanism"), str(path / "privacy.json"))
        if why := _foreign(card, identity or {}, rows):
            return SavedRun(path, rows, identity, foreign=why)
    evaluation, diagnostics = (
        read_arrays(file, "reports.report") if arrays and file.is_file() else None
        for file in (path / "evaluation.npz", path / "diagnostics.npz")
    )
    statement, board = (
        file.read_text(encoding="utf-8") if file.is_file() else None
        for file in (path / "statement.txt", path / "board.txt")
    )
    return SavedRun(path, rows, identity, card, statement, board, config, evaluation, diagnostics)


def _foreign(card: dict[str, Any], identity: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Why a card does not belong to the run with these rows and this identity, or nothing."""
    steps = rows[-1].get("counted", rows[-1]["step"])
    if card.get("steps") != steps:
        return f"it counts {card.get('steps')} steps, and the log counts {steps:,}"
    # A folder without run.json has the steps alone to compare.
    if card["mechanism"] != identity.get("mechanism", card["mechanism"]):
        return "run.json describes another mechanism"
    return ""


def _values(row: Any, names: Sequence[str]) -> np.ndarray:
    for name in names:
        row = row.get(name) if isinstance(row, dict) else None
    try:
        values = np.atleast_1d(np.asarray(row, np.float64)).ravel()
    except (TypeError, ValueError):  # text
        values = np.array([np.nan])
    return np.where(np.isfinite(values), values, np.nan)


def _number(value: Any, otherwise: float = math.nan) -> float:
    """A number of the log; ``otherwise`` for null, text, or one number per group."""
    return float(value) if isinstance(value, int | float) else otherwise

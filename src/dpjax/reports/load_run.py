# SPDX-License-Identifier: Apache-2.0
"""What a run left in its folder, read back.

`metrics.jsonl` is the only file that has to be there.  A resumed run may have written a step
twice, and then the last line counts; a run that was interrupted may end in half a line, which
is no line.  Numbers that were not finite are null in JSON and NaN here.

A card that counts other steps than the log, or other noise than ``run.json`` plans, is of an
earlier run in this folder.  It is not believed, nor what was written beside it: one run's
epsilon under another's accuracy would be a claim about neither.

This file must never know what is drawn from the numbers, or who may see them.
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from dpjax import accounting
from dpjax.data.files import DAMAGED


class Missing(LookupError):
    """What a figure needs is not in the folder; the words say what, and where it would be."""


class Run(NamedTuple):
    """The files of a folder; None where a file does not exist, or is of an earlier run.

    ``foreign`` says why the card is not this run's, and is empty if it is.
    """

    path: pathlib.Path
    rows: list[dict[str, Any]]
    identity: dict[str, Any] | None
    card: dict[str, Any] | None
    statement: str | None
    config: dict[str, Any] | None
    evaluation: Mapping[str, np.ndarray] | None
    diagnostics: Mapping[str, np.ndarray] | None
    foreign: str = ""

    def series(self, *names: str) -> Float[np.ndarray, "rows width"]:
        """What each row has under these nested names: a number or one per group, else NaN."""
        found = [_floats(_inside(row, names)) for row in self.rows]
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
        """Why a file of the folder is not here."""
        return Missing(f"{file} is not of this run" if self.foreign else f"there is no {file}")

    @property
    def seed(self) -> Any:
        """The published seed: by the card, or while there is none by the run's configuration."""
        if self.card is not None:
            return self.card.get("seed_published")
        known = self.identity or {}
        return known.get("--seed", known.get("seed"))

    @property
    def epsilons(self) -> dict[str, float]:
        """Epsilon at the end by each proven method, best first; by the log if there is no card."""
        if self.card is None:
            last = self.rows[-1].get("epsilon")
            if self.rows[-1].get("estimate"):
                return {"any method": math.inf}
            return {"the log": math.inf if last is None else float(last)}
        values = {
            method: float(claim["value"])
            for method, claim in self.card["epsilon"].items()
            if claim["proven"]
        }
        best_first = sorted(values, key=lambda m: (values[m], m not in accounting.METHODS))
        return {method: values[method] for method in best_first} or {"any method": math.inf}

    @property
    def delta(self) -> float:
        """The delta at which epsilon is stated."""
        return float((self.card or self.rows[-1]).get("delta", math.nan))


def read(directory: str | pathlib.Path, *, arrays: bool = True) -> Run:
    """Reads the folder of a run.

    Args:
      directory: Where `dpjax.fit` and the binary wrote.
      arrays: Whether ``evaluation.npz`` and ``diagnostics.npz`` are read too.

    Returns:
      A `Run`, with rows in the order of their steps.

    Raises:
      FileNotFoundError: Without ``metrics.jsonl`` there is no run.
      ValueError: A file is damaged, or the log has no whole line.
    """
    path = pathlib.Path(directory)
    rows, identity = _rows(path / "metrics.jsonl"), _json(path / "run.json")
    card = _json(path / "privacy.json")
    try:
        why = _foreign(card, identity, int(rows[-1]["step"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{path}: privacy.json or run.json lacks what dpjax.reports.card and dpjax.fit write "
            f"({type(error).__name__}: {error}). Usually one of them was written by hand or "
            "altered; without privacy.json the log alone is read."
        ) from error
    if why:
        return Run(path, rows, identity, None, None, None, None, None, why)
    return Run(
        path,
        rows,
        identity,
        card,
        _text(path / "statement.txt"),
        _json(path / "config.json"),
        _arrays(path / "evaluation.npz") if arrays else None,
        _arrays(path / "diagnostics.npz") if arrays else None,
    )


def _foreign(card: Mapping[str, Any] | None, identity: Mapping[str, Any] | None, steps: int) -> str:
    """Why a card is not of the run with this log and this identity, or nothing."""
    if card is None:
        return ""
    ran = _each(card["noise"]["multiplier_and_steps"])
    if len(ran) != steps:
        return f"it counts {len(ran):,} steps, and the log ends at step {steps:,}"
    if identity is None or "multiplier_and_steps" not in identity:
        return ""
    if not np.array_equal(ran, _each(identity["multiplier_and_steps"])[:steps]):
        return "its steps had other noise than run.json says"
    drawn = _of_card(card)["drawn"]
    if list(drawn.values()) != list(_planned(identity)["drawn"].values()):
        return "its batches were drawn in another way than run.json says"
    queries = card["preparation"]["gaussian_multipliers"]
    before = [_of_card(spent) for spent in card["before"]]
    planned = [_planned(spent) for spent in identity["before"]]
    if [*map(float, queries)] != [*map(float, identity["preparation"])] or before != planned:
        return "something else ran before it than run.json says"
    rule = card["clipping"]
    clipped = [rule.get("name"), [*map(float, rule["bounds"])], card.get("projections")]
    if clipped != [identity.get(name) for name in ("clipping", "bounds", "projections")]:
        return "it was clipped in another way than run.json says"
    if any(card.get(name) != identity.get(name) for name in ("unit", "neighbours")):
        return "it protects something else than run.json says"
    return ""


def _of_card(spent: Mapping[str, Any]) -> dict[str, Any]:
    """What a run cost by, as a card has it."""
    sampling = spent["sampling"]
    return {
        "drawn": {name: sampling.get(name) for name in ("name", "examples", "batch_size", "rates")},
        "noise": _each(spent["noise"]["multiplier_and_steps"]).tolist(),
        "queries": [*map(float, spent["preparation"]["gaussian_multipliers"])],
        "projections": spent.get("projections"),
    }


def _planned(spent: Mapping[str, Any]) -> dict[str, Any]:
    """The same, as ``run.json`` has it."""
    sizes = {name: spent.get(name) for name in ("examples", "batch_size", "rates")}
    return {
        "drawn": {"name": spent["sampling"], **sizes},
        "noise": _each(spent["multiplier_and_steps"]).tolist(),
        "queries": [*map(float, spent["preparation"])],
        "projections": spent.get("projections"),
    }


def _each(runs: list[Any]) -> np.ndarray:
    """The multiplier of every step."""
    return np.array([float(z) for z, steps in runs for _ in range(steps)])


def _rows(path: pathlib.Path) -> list[dict[str, Any]]:
    text = _text(path)
    if text is None:
        raise FileNotFoundError(
            f"reports.report: {path.parent} has no {path.name}, so it is not the folder of a run. "
            "Usually the path is one level off; otherwise train with dpjax.fit(..., "
            "directory=...), which writes it."
        )
    lines, rows = text.splitlines(), {}
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            rows[row["step"]] = row
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            if number == len(lines):  # the run was interrupted while it wrote
                continue
            raise ValueError(
                f"{path}, line {number}: expected a JSON object with a step, got {line[:60]!r}. "
                "Usually two runs wrote into one folder at once. Remove the line to go on."
            ) from error
    if not rows:
        raise ValueError(f"{path}: holds no whole line yet, so there is nothing to show.")
    return [rows[step] for step in sorted(rows)]


def _text(path: pathlib.Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _json(path: pathlib.Path) -> dict[str, Any] | None:
    text = _text(path)
    if text is None:
        return None
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}: expected JSON, got {text[:60]!r} ({error}). Usually the run was "
            "interrupted while it wrote the file; remove it to go on without it."
        ) from error


def _arrays(path: pathlib.Path) -> Mapping[str, np.ndarray] | None:
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except (*DAMAGED, AttributeError) as error:  # a lone array is loaded as what it is
        raise ValueError(
            f"{path}: expected arrays as np.savez writes them ({error}). Usually the run was "
            "interrupted while it wrote the file, or the disk was full: run the same command "
            "again, which writes it anew, or remove the file to go on without it."
        ) from error


def _inside(row: Any, names: tuple[str, ...]) -> Any:
    for name in names:
        row = row.get(name) if isinstance(row, dict) else None
    return row


def _floats(value: Any) -> np.ndarray:
    """A number, a list of them or nothing, as floats; null and infinity are NaN."""
    values = np.atleast_1d(np.asarray(value, dtype=np.float64)).ravel()
    return np.where(np.isfinite(values), values, np.nan)

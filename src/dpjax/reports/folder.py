# SPDX-License-Identifier: Apache-2.0
"""What a run left in its folder, read back.

`metrics.jsonl` is the only file that has to be there.  A resumed run may have written a step
twice, and then the last line counts; a run that was interrupted may end in half a line, which
is no line.  Numbers that were not finite are null in JSON and NaN here.

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

__all__ = ["Missing", "Run", "read"]


class Missing(LookupError):
    """What a figure needs is not in the folder; the words say what, and where it would be."""


class Run(NamedTuple):
    """The files of a folder; None where a file does not exist."""

    path: pathlib.Path
    rows: list[dict[str, Any]]
    identity: dict[str, Any] | None
    card: dict[str, Any] | None
    statement: str | None
    config: dict[str, Any] | None
    evaluation: Mapping[str, np.ndarray] | None
    diagnostics: Mapping[str, np.ndarray] | None

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
            raise Missing(f"there is no {file}.npz")
        if name not in arrays or not arrays[name].size:
            raise Missing(f"{file}.npz has no {name}")
        return arrays[name]

    @property
    def epsilons(self) -> dict[str, float]:
        """Epsilon at the end by each proven method, best first; by the log if there is no card."""
        if self.card is None:
            last = self.rows[-1].get("epsilon")
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


def read(directory: str | pathlib.Path) -> Run:
    """Reads the folder of a run.

    Args:
      directory: Where `dpjax.fit` and the binary wrote.

    Returns:
      A `Run`, with rows in the order of their steps.

    Raises:
      FileNotFoundError: Without ``metrics.jsonl`` there is no run.
      ValueError: A file is damaged, or the log has no whole line.
    """
    path = pathlib.Path(directory)
    return Run(
        path,
        _rows(path / "metrics.jsonl"),
        _json(path / "run.json"),
        _json(path / "privacy.json"),
        _text(path / "statement.txt"),
        _json(path / "config.json"),
        _arrays(path / "evaluation.npz"),
        _arrays(path / "diagnostics.npz"),
    )


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
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def _inside(row: Any, names: tuple[str, ...]) -> Any:
    for name in names:
        row = row.get(name) if isinstance(row, dict) else None
    return row


def _floats(value: Any) -> np.ndarray:
    """A number, a list of them or nothing, as floats; null and infinity are NaN."""
    values = np.atleast_1d(np.asarray(value, dtype=np.float64)).ravel()
    return np.where(np.isfinite(values), values, np.nan)
